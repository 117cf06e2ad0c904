"""The copies of a GPU, on a driver that the test plays: what a two-dimensional copy is asked for must be the block."""

import ctypes
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from perilune.core.errors import EngineError
from perilune.kv.copier import CpuCopier, CudaCopier, block_bytes, page_views
from perilune.kv.transfer import row_bytes
from perilune.ops.harness import build
from perilune.ops.rows import host_rows


class FakeDriver:
    """Does what the driver's manual says of cuMemcpy2DAsync, on the CPU's memory."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.copies = status, 0
        self.refused = False  # CUDA refuses a pitch below the width; an exception would not leave a callback
        self.cuMemcpy2DAsync_v2 = host_rows.Driver(self._copy)

    def cuCtxSetCurrent(self, context):
        return 0

    def _copy(self, copy, stream):
        c = copy.contents
        assert ctypes.sizeof(c) == 128 and c.srcMemoryType == c.dstMemoryType == 4
        largest = host_rows.MAX_PITCH_BYTES
        self.refused |= max(c.srcPitch, c.dstPitch) > largest or min(c.srcPitch, c.dstPitch) < c.WidthInBytes
        for line in range(c.Height):
            ctypes.memmove(c.dstDevice + line * c.dstPitch, c.srcDevice + line * c.srcPitch, c.WidthInBytes)
        self.copies += 1
        return self.status


def gpu(caches, status=0):
    """A CudaCopier without a GPU."""
    made = object.__new__(CudaCopier)
    made._driver, made.block_seconds = FakeDriver(status), 0.0
    made._context, made._stream = ctypes.c_void_p(), SimpleNamespace(cuda_stream=0)
    made._pages = [
        host_rows.Places(view.data_ptr(), view.shape[0], view.shape[2], view.stride(0)) for view in page_views(caches)
    ]
    return made


@pytest.fixture(params=["compiled", "in Python"])
def loop(request, monkeypatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(build, "library", lambda source: "no compiler")
    elif isinstance(reason := build.library(host_rows.STEM), str):
        pytest.skip(reason)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("largest_pitch", [2**31 - 1, 20_000])
@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 576), (torch.uint8, 640)])
def test_both_kinds_of_copier_move_the_same_bytes(dtype, width, largest_pitch, monkeypatch) -> None:
    """Also where the pages are longer than the largest pitch, so that each layer is a copy of its own."""
    monkeypatch.setattr(host_rows, "MAX_PITCH_BYTES", largest_pitch)
    pages = torch.randint(0, 255, (3, 20, 4, width * dtype.itemsize), dtype=torch.uint8).view(dtype)
    drafts = torch.randint(0, 255, (30, 4, 96), dtype=torch.uint8)
    caches = [pages, drafts]
    blocks = random.Random(0).sample(range(20), 6)
    size = row_bytes(caches)
    rows = [np.zeros((6, size), np.uint8) for _ in range(2)]
    there = gpu(caches)
    for queue, held in zip((CpuCopier(caches), there), rows):
        queue.out(list(zip(blocks, held)))
    assert np.array_equal(*rows) and rows[0][:, : block_bytes(caches)].any()
    assert not there._driver.refused
    assert there._driver.copies == (12 if largest_pitch > 20_000 else 6 * 3 + 6)
    targets = [[cache.clone() for cache in caches] for _ in range(2)]
    for queue in (CpuCopier(targets[0]), gpu(targets[1])):
        queue.into(list(zip(blocks[::-1], rows[0])))
    for mine, theirs in zip(*targets):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.usefixtures("loop")
def test_a_copy_that_the_driver_refuses_is_an_error() -> None:
    caches = [torch.zeros(2, 4, 4, 8)]
    with pytest.raises(EngineError, match="error 719"):
        gpu(caches, 719).out([(0, np.zeros(row_bytes(caches), np.uint8))])


@pytest.mark.usefixtures("loop")
def test_paced_copies_take_their_time() -> None:
    """So that the queue of copies stays short; the same bytes arrive."""
    caches = [torch.arange(6 * 4 * 8, dtype=torch.float32).view(1, 6, 4, 8)]
    rows = np.zeros((6, row_bytes(caches)), np.uint8)
    paced = gpu(caches)
    paced.block_seconds = 0.004
    begin = time.perf_counter()
    paced.out(list(zip(range(6), rows)))
    assert time.perf_counter() - begin >= 6 * 0.004
    assert np.array_equal(rows[:, :128].reshape(-1), caches[0].numpy().view(np.uint8).reshape(-1))


def test_checksums_are_those_of_the_loop_in_python(monkeypatch) -> None:
    if isinstance(reason := build.library(host_rows.STEM), str):
        pytest.skip(reason)
    rng = np.random.default_rng()
    rows = list(rng.integers(0, 256, (5, 3 * 4096), np.uint8))
    digests = [rng.bytes(16) for _ in rows]
    compiled = host_rows.checksums(rows, digests)
    monkeypatch.setattr(build, "library", lambda source: "no compiler")
    assert np.array_equal(compiled, host_rows.checksums(rows, digests))
    assert len(set(compiled.tolist())) == 5 and not len(host_rows.checksums([], []))
