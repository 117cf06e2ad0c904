"""Delays Ctrl-C (SIGINT) until an engine of this process has ended its step."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

PATIENCE_SECONDS = 5.0  # A second Ctrl-C this long after the first takes effect at once: the step may hang.


@contextlib.contextmanager
def put_off() -> Iterator[Callable[[], None]]:
    """Delays Ctrl-C within the block: it takes effect when the yielded function is called, or at the end of the block.
    KeyboardInterrupt inside `Engine.step` could skip the commit of the step in flight: no request could run after it.
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
