"""Ctrl-C while an engine of this process computes."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

PATIENCE_SECONDS = 5.0  # A Ctrl-C that comes so long after the first takes effect at once: a step may hang.


@contextlib.contextmanager
def put_off() -> Iterator[Callable[[], None]]:
    """Delays Ctrl-C within the block: it takes effect when the yielded function is called, or at the end of the block.
    In the middle of a step it would leave a scheduler that has lost the step in flight, and no request could follow.
    Python handles signals only on the main thread; on another thread this function changes nothing."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    first: float | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first > PATIENCE_SECONDS:
            handler(number, frame)
        first = time.monotonic() if first is None else first

    def take() -> None:
        nonlocal first
        if first is not None:
            first = None
            handler(signal.SIGINT, None)

    signal.signal(signal.SIGINT, note)
    try:
        yield take
    finally:
        signal.signal(signal.SIGINT, handler)
        take()
