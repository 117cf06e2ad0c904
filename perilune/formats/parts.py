"""What a format stores for one linear layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor stored for a linear layer: its shape, and the types it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
