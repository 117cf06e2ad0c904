"""Progress of a long read of files, on stderr: a bar, or a line every LINE_SECONDS if stderr is no terminal."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_SECONDS = 30.0  # between lines of progress in a log

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(what: str, total: int, show: bool) -> Iterator[Advance]:
    """Gives a function that counts bytes of `total` as done; one thread at a time may call it.

    what  such as "converting kimi-nano"
    """
    if show and not sys.stderr.isatty():
        yield _lines(what, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _lines(what: str, total: int) -> Advance:
    begin = last = time.monotonic()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        now = time.monotonic()
        if now - last >= LINE_SECONDS:
            last, rate = now, done / (now - begin)
            left = (total - done) / rate / 60 if rate else math.inf
            text = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} minutes left"
            print(f"{what}: {text}", file=sys.stderr, flush=True)

    return advance
