"""Rows of host memory for KV blocks, allocated and pinned piece by piece in the background while the engine serves.

A GPU's copy engines can read and write pinned memory without the CPU. Pinning takes about 0.3 s for each GB, so an
engine with 500 GB of it would start minutes late if it waited.
"""

import logging
import threading

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger("perilune.kv")

ALIGNED_BYTES = 4096  # A row begins on a page of memory and is a whole number of them.
PIECE_BYTES = 256 << 20  # Pinned per call. Larger: fewer calls, but the first rows are usable later.

Bytes = NDArray[np.uint8]


class HostMemory:
    """`limit` rows of `row_bytes` bytes, a multiple of ALIGNED_BYTES; the bytes of a row from `used_bytes` on are zero.

    at_once  number of rows that are usable when the constructor returns
    ready    number of rows that are usable now: they are allocated in order
    """

    def __init__(self, limit: int, row_bytes: int, used_bytes: int, device: torch.device, *, at_once: int = 1) -> None:
        assert row_bytes % ALIGNED_BYTES == 0 and used_bytes <= row_bytes
        self.ready, self.row_bytes = 0, row_bytes
        self._limit, self._used_bytes, self._device = limit, used_bytes, device
        self._rows_per_piece = max(PIECE_BYTES // row_bytes, 1)
        self._pieces: list[Bytes] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="perilune-pin", daemon=True)
        while self.ready < at_once:
            self._grow()

    def start(self) -> None:
        """Begins to allocate the other rows in the background. While the driver pins them, copies are slow."""
        self._thread.start()

    def row(self, index: int) -> Bytes:
        """The row's bytes: [row_bytes] uint8."""
        piece, at = divmod(index, self._rows_per_piece)
        found: Bytes = self._pieces[piece][at]
        return found

    def close(self) -> None:
        """Frees the memory; no transfer may be in flight."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._device.type == "cuda":
            for piece in self._pieces:
                torch.cuda.cudart().cudaHostUnregister(piece.ctypes.data)
        self._pieces.clear()
        self.ready = 0

    def _fill(self) -> None:
        try:
            while self.ready < self._limit and not self._closing.is_set():
                self._grow()
        except (MemoryError, RuntimeError) as e:
            log.warning(
                "host memory for KV blocks ends at %.1f GB: %s",
                self.ready * self.row_bytes / 1e9,
                str(e).split("\n")[0],
            )

    def _grow(self) -> None:
        count = min(self._rows_per_piece, self._limit - self.ready)
        raw = np.empty(count * self.row_bytes + ALIGNED_BYTES, np.uint8)
        begin = -raw.ctypes.data % ALIGNED_BYTES
        piece = raw[begin : begin + count * self.row_bytes].reshape(count, self.row_bytes)
        piece[:, self._used_bytes :] = 0  # checksums and files include the padding, so its bytes must be fixed
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                status = torch.cuda.cudart().cudaHostRegister(piece.ctypes.data, piece.nbytes, 0)
            if int(status) != 0:
                raise RuntimeError(f"the driver cannot pin {piece.nbytes >> 20} MiB (error {int(status)})")
        self._pieces.append(piece)
        self.ready += count
