"""Progress of a load, on stderr: GB read, GB in all, GB/s, over all ranks that take part."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

REPORT_SECONDS = 0.1  # between two reports of a rank

Advance = Callable[[int], None]  # with the number of bytes just read
Report = Callable[[int, int], None]  # (bytes read so far, bytes to read), of one rank


class Bar:
    """A progress bar of the sum over ranks. Any thread may call `report`."""

    def __init__(self, name: str) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(
            TextColumn("loading {task.description}", markup=False), *columns, console=Console(stderr=True)
        )
        self._task = self._bar.add_task(name, total=0)
        self._ranks: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def report(self, rank: int, done: int, total: int) -> None:
        with self._lock:
            self._ranks[rank] = done, total
            done, total = (sum(column) for column in zip(*self._ranks.values()))
            self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


@contextlib.contextmanager
def counted(name: str, total: int, to: bool | Report) -> Iterator[Advance]:
    """The function that threads call with the number of bytes just read; reports to `to`, or to a Bar if it is True."""
    if to is False:
        yield lambda nbytes: None
        return
    with contextlib.ExitStack() as stack:
        report = partial(stack.enter_context(Bar(name)).report, 0) if to is True else to
        lock = threading.Lock()
        done, last = 0, -math.inf

        def advance(nbytes: int) -> None:
            nonlocal done, last
            with lock:
                done += nbytes
                if (now := time.monotonic()) - last >= REPORT_SECONDS or done == total:
                    last = now
                    report(done, total)

        report(0, total)
        yield advance
