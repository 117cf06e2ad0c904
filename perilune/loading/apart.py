"""Memory for weights that are converted after all are read, apart from weights that stay."""

import math

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 30  # Larger: while weights are converted, more of what is unused is held.
ALIGNMENT = 512  # bytes, as torch's own tensors


class Apart:
    """Tensors side by side in chunks; a chunk is free when none of its tensors is left. Between weights that stay, what
    the converted ones leave are gaps of 20 to 40 MB, which torch cannot give back: with 61 layers of Kimi K2.5 on four
    GPUs 1.5 GB."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, device=self._device)
            self._used = 0
        own = self._chunk[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return own.view(dtype).view(shape)
