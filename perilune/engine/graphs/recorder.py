"""Captures CUDA graphs, all of them in one memory pool, and counts the device memory that they hold."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from perilune.core.errors import EngineError

log = logging.getLogger("perilune.engine")

SPARE_BYTES = 512 << 20  # With less free device memory than this, torch's cached memory is freed before a capture.

Replay = Callable[[], None]


class Recorder:
    """One per engine and device; used by one thread at a time. Graphs may be replayed in any order, never two at once,
    because they share memory.

    captured, capture_seconds  graphs captured since the start, and the seconds that this took
    longest_test_seconds       longest self-test of a graph (its first replay and the comparison) since the start
    nbytes                     device memory that the graphs hold: by how much captures reduced the free memory
    needed                     whether a failed capture is an EngineError: with several ranks, this one would run op by
                               op while others replay
    """

    def __init__(self, device: torch.device, *, needed: bool = False) -> None:
        self._device, self.needed = device, needed
        self._pool: Any = None  # torch has no public type for it; None: the next graph makes one
        self._failed: list[torch.cuda.CUDAGraph] = []  # see `record`
        self._stream: torch.cuda.Stream | None = None
        self.captured, self.capture_seconds, self.nbytes = 0, 0.0, 0
        self.longest_test_seconds = 0.0

    def clear(self) -> None:
        """Call it when all graphs were dropped: the next ones get a new memory pool."""
        self._pool, self.nbytes = None, 0

    def test(self, run: Callable[[], None]) -> None:
        """Runs the self-test of a graph and counts its time."""
        begin = time.perf_counter()
        run()
        self.longest_test_seconds = max(self.longest_test_seconds, time.perf_counter() - begin)

    def record(self, work: Callable[[], None], name: str) -> Replay:
        """Runs `work` once, captures a second run, and returns the function that replays the captured run. RuntimeError
        if `work` cannot be captured."""
        begin, device = time.perf_counter(), self._device
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            work()  # the first run may allocate and compile, which a capture may not
            self._stream.synchronize()
            # cuBLAS must allocate its workspace for this stream during the capture, so that it lies in the pool.
            torch._C._cuda_clearCublasWorkspaces()
            if torch.cuda.mem_get_info(device)[0] < SPARE_BYTES:
                torch.cuda.empty_cache()  # slow afterwards: the next prompts allocate from the driver again
            before = torch.cuda.mem_get_info(device)[0]
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # ending a failed capture raises the same error again
                    graph.capture_end()
                # The failed graph has not released the pool, so no capture can begin in it: the next one gets a new
                # pool. The allocator still asks the failed graph whether it is capturing, so the object must live on.
                self._failed.append(graph)
                self._pool = None
                raise
            graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
        self._pool = graph.pool()
        self.nbytes += max(before - torch.cuda.mem_get_info(device)[0], 0)
        seconds = time.perf_counter() - begin
        self.captured, self.capture_seconds = self.captured + 1, self.capture_seconds + seconds
        log.info("CUDA graph of %s: %.3f s; %.0f MB in all", name, seconds, self.nbytes / 1e6)
        return graph.replay

    def record_or_run(self, work: Callable[[], None], name: str) -> Replay:
        """As `record`, but returns `work` itself if it cannot be captured."""
        try:
            return self.record(work, name)
        except RuntimeError as e:
            if self.needed:
                raise EngineError(f"no CUDA graph of {name}: {str(e).splitlines()[0]}") from e
            log.warning("no CUDA graph of %s: %s", name, str(e).splitlines()[0])
            return work
