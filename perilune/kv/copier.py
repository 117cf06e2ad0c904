"""Copies KV blocks between the pages of a device and rows of host memory.

A row holds a block's bytes of all layers, one after the other. In the pages a block's bytes of one layer are
contiguous, and the next layer's bytes begin one pitch further on. So a block of a cache is one two-dimensional copy,
one command of a GPU's copy engine: steps keep all SMs. On a CPU the calling thread copies with numpy: torch would start
a second team of OpenMP threads, which halves the speed of steps on few cores.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import EngineError
from perilune.kv.host_memory import Bytes
from perilune.ops.rows import host_rows

Pair = tuple[int, Bytes]  # (block, row)


class Copier(Protocol):
    """A queue of copies in one direction; used by one thread.

    block_seconds  min time between the starts of two blocks' copies; 0: no pacing. Pacing keeps the queue short, so
                   that a step's own copies wait for few blocks, and other threads wait for few calls of the driver
    """

    block_seconds: float

    def out(self, pairs: Sequence[Pair]) -> None:
        """Queues copies of blocks to rows."""
        ...

    def into(self, pairs: Sequence[Pair]) -> None:
        """Queues copies of rows to blocks."""
        ...

    def mark(self) -> object:
        """A point in the queue, for `wait`: after all copies queued so far."""
        ...

    def wait(self, mark: object = None) -> None:
        """Waits until the copies queued before `mark` are complete; None: all queued so far."""
        ...


def page_views(caches: Sequence[Tensor]) -> list[Tensor]:
    """Each cache [layers, blocks, block_size, width], or [blocks, block_size, width], as [layers, blocks, bytes]."""
    views = []
    for cache in caches:
        layered = cache if cache.dim() == 4 else cache.unsqueeze(0)
        layers, blocks = layered.shape[:2]
        views.append(layered.view(torch.uint8).view(layers, blocks, -1))
    return views


def block_bytes(caches: Sequence[Tensor]) -> int:
    return sum(view.shape[0] * view.shape[2] for view in page_views(caches))


def copier(caches: Sequence[Tensor]) -> Copier:
    return CpuCopier(caches) if caches[0].device.type == "cpu" else CudaCopier(caches)


class CpuCopier:
    def __init__(self, caches: Sequence[Tensor]) -> None:
        self.block_seconds = 0.0  # not used: copies are made at once
        self._pages = [view.numpy() for view in page_views(caches)]

    def out(self, pairs: Sequence[Pair]) -> None:
        for page, stored in self._parts(pairs):
            np.copyto(stored, page)

    def into(self, pairs: Sequence[Pair]) -> None:
        for page, stored in self._parts(pairs):
            np.copyto(page, stored)

    def _parts(self, pairs: Sequence[Pair]) -> Iterator[tuple[Bytes, Bytes]]:
        """For each block and cache: the block's bytes in the pages, and their place in the block's row."""
        for block, row in pairs:
            at = 0
            for pages in self._pages:
                layers, _, size = pages.shape
                yield pages[:, block], row[at : at + layers * size].reshape(layers, size)
                at += layers * size

    def mark(self) -> object:
        return None

    def wait(self, mark: object = None) -> None:
        pass


class CudaCopier:
    """Queues copies on its own CUDA stream. The caller guarantees that no step writes to the blocks: the last step that
    used them is committed."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self.block_seconds = 0.0
        self._device = caches[0].device
        self._pages = []
        for view in page_views(caches):
            layers, _, size = view.shape
            self._pages.append(host_rows.Places(view.data_ptr(), layers, size, view.stride(0)))
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)
            torch.cuda.Event().record(self._stream)  # makes the device's context current in this thread
            self._context = ctypes.c_void_p()
            self._check(self._driver.cuCtxGetCurrent(ctypes.byref(self._context)))

    def out(self, pairs: Sequence[Pair]) -> None:
        self._queue(pairs, out=True)

    def into(self, pairs: Sequence[Pair]) -> None:
        self._queue(pairs, out=False)

    def mark(self) -> object:
        self._check(self._driver.cuCtxSetCurrent(self._context))
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, mark: object = None) -> None:
        event = mark or self.mark()
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()

    def _queue(self, pairs: Sequence[Pair], *, out: bool) -> None:
        self._check(self._driver.cuCtxSetCurrent(self._context))  # a new thread has no current context
        stream = self._stream.cuda_stream
        run, pace = self._driver.cuMemcpy2DAsync_v2, self.block_seconds
        self._check(host_rows.copy(run, stream, pairs, self._pages, out=out, block_seconds=pace))

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise EngineError(f"the driver cannot copy KV blocks (error {status})")
