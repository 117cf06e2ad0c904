"""Jobs that fill destinations in memory from files, and the threads that do them.

Each thread holds one staging buffer of STAGE_BYTES beyond what it fills.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from perilune.loading.progress import Advance

STAGE_BYTES = 1 << 25


@dataclass(slots=True)
class Stage:
    """A thread's staging buffer between file and device, allocated when first needed; pinned if the device is a GPU."""

    device: torch.device
    advance: Advance
    _bytes: torch.Tensor | None = field(default=None)

    def view(self, dtype: torch.dtype, shape: Sequence[int], count: int) -> torch.Tensor:
        """The first `count` values of `dtype`, as a tensor of `shape`."""
        if self._bytes is None:
            pin = self.device.type == "cuda"
            self._bytes = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=pin)
        return self._bytes[: count * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Job:
    """Fills one destination. `at`: (file, offset); in this order, files are read sequentially."""

    at: tuple[str, int]
    nbytes: int  # number of bytes that it reads
    run: Callable[[Stage], None]


class _Stopped(Exception):
    """The load is over for this thread: another one failed, or the user interrupted."""


def run(jobs: list[Job], threads: int, device: torch.device, advance: Advance) -> None:
    """Runs every job; the first error stops the rest and is raised here."""
    queue = deque(sorted(jobs, key=lambda job: job.at))
    stopping = threading.Event()
    errors: list[BaseException] = []

    def advance_or_stop(nbytes: int) -> None:
        if stopping.is_set():
            raise _Stopped
        advance(nbytes)

    def work(ended: threading.Event) -> None:
        stage = Stage(device, advance_or_stop)
        try:
            with torch.no_grad(), contextlib.suppress(_Stopped):  # no_grad is a thread's own setting
                while not stopping.is_set():
                    try:
                        job = queue.popleft()
                    except IndexError:  # another thread took the last one
                        return
                    job.run(stage)
        except BaseException as e:
            errors.append(e)
            stopping.set()
        finally:
            ended.set()

    # No pool, and no join() of a running thread: if interrupted there, Python 3.11 may leave a thread running.
    ends = [threading.Event() for _ in range(threads)]
    readers = [threading.Thread(target=work, args=(ended,), name=f"load-{k}") for k, ended in enumerate(ends)]
    try:
        for reader in readers:
            reader.start()
        for ended in ends:
            ended.wait()
    finally:
        # After Ctrl-C, too: no further job starts, and running jobs end after the piece that they are reading.
        stopping.set()
        for reader, ended in zip(readers, ends):
            if reader.ident is not None:  # otherwise it was not started, or it will find `stopping` set
                ended.wait()
                reader.join()
    if errors:
        raise errors[0]
