"""Copies KV blocks between the pages of a device and rows of host memory.

A row holds a block's bytes of all layers, one after the other. In the pages a block's bytes of one layer are
contiguous, and the next layer's begin one pitch further on: a two-dimensional copy, which a GPU's copy engines do in
one command without a kernel, so that steps running meanwhile keep all SMs. On a CPU the calling thread copies, with
numpy: torch would start a second team of OpenMP threads, which halves the speed of steps on few cores.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import EngineError
from perilune.kv.host_memory import Bytes

Pair = tuple[int, Bytes]  # (block, row)


class Copier(Protocol):
    """One direction's queue; used by one thread."""

    def out(self, pairs: Sequence[Pair]) -> None:
        """Queues copies of blocks to rows."""
        ...

    def into(self, pairs: Sequence[Pair]) -> None:
        """Queues copies of rows to blocks."""
        ...

    def wait(self) -> None:
        """Until all that was queued is complete."""
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
        self._pages = [view.numpy() for view in page_views(caches)]

    def out(self, pairs: Sequence[Pair]) -> None:
        for block, row in pairs:
            at = 0
            for pages in self._pages:
                layers, _, size = pages.shape
                np.copyto(row[at : at + layers * size].reshape(layers, size), pages[:, block])
                at += layers * size

    def into(self, pairs: Sequence[Pair]) -> None:
        for block, row in pairs:
            at = 0
            for pages in self._pages:
                layers, _, size = pages.shape
                np.copyto(pages[:, block], row[at : at + layers * size].reshape(layers, size))
                at += layers * size

    def wait(self) -> None:
        pass


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t),
            ("Y", ctypes.c_size_t),
            ("MemoryType", ctypes.c_uint),
            ("Host", ctypes.c_void_p),
            ("Device", ctypes.c_uint64),
            ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )
    ] + [("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t)]


_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says where it is
_MAX_PITCH_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Pages:
    address: int
    layers: int
    block_bytes: int  # of one layer
    pitch_bytes: int


class CudaCopier:
    """Queues on a stream of its own. The caller knows that no step writes to the blocks: their last step is committed,
    and none that was launched later has them."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._device = caches[0].device
        self._pages = []
        for view in page_views(caches):
            layers, _, size = view.shape
            self._pages.append(_Pages(view.data_ptr(), layers, size, view.stride(0)))
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)
            self._done = torch.cuda.Event(blocking=True)
            self._done.record(self._stream)  # from here on the device's context belongs to this thread
            self._context = ctypes.c_void_p()
            self._check(self._driver.cuCtxGetCurrent(ctypes.byref(self._context)))

    def out(self, pairs: Sequence[Pair]) -> None:
        self._queue(pairs, out=True)

    def into(self, pairs: Sequence[Pair]) -> None:
        self._queue(pairs, out=False)

    def wait(self) -> None:
        self._check(self._driver.cuCtxSetCurrent(self._context))
        self._done.record(self._stream)
        self._done.synchronize()

    def _queue(self, pairs: Sequence[Pair], *, out: bool) -> None:
        self._check(self._driver.cuCtxSetCurrent(self._context))  # a thread begins without one
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        copy = _Copy2D(srcMemoryType=_UNIFIED, dstMemoryType=_UNIFIED)
        for block, row in pairs:
            host = row.ctypes.data
            for pages in self._pages:
                # Beyond the largest pitch a copy is as high as one layer.
                height = pages.layers if pages.pitch_bytes <= _MAX_PITCH_BYTES else 1
                for layer in range(0, pages.layers, height):
                    there = pages.address + layer * pages.pitch_bytes + block * pages.block_bytes
                    here, pitch = host + layer * pages.block_bytes, min(pages.pitch_bytes, _MAX_PITCH_BYTES)
                    copy.srcDevice, copy.dstDevice = (there, here) if out else (here, there)
                    copy.srcPitch, copy.dstPitch = (
                        (pitch, pages.block_bytes) if out else (pages.block_bytes, pitch)
                    )  # fmt: skip
                    copy.WidthInBytes, copy.Height = pages.block_bytes, height
                    self._check(self._driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), stream))
                host += pages.layers * pages.block_bytes

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise EngineError(f"the driver cannot copy KV blocks (error {status})")
