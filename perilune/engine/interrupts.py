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
    """Within the block Ctrl-C takes effect where the yielded function is called, or at the end of the block. In the
    middle of a step it would leave a scheduler that has forgotten the step in flight, so that no request could follow.
    Only signals to the main thread are handled by Python; in another thread nothing changes."""
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
