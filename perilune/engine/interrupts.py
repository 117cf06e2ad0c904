"""Delays Ctrl-C (SIGINT) and SIGTERM until an engine of this process has ended its step."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 5.0  # A second signal this long after the first takes effect at once: the step may hang.


@contextlib.contextmanager
def put_off() -> Iterator[Callable[[], None]]:
    """Delays Ctrl-C, and SIGTERM if it has a handler, within the block: a signal takes effect when the yielded function
    is called, or at the end of the block. KeyboardInterrupt or SystemExit inside `Engine.step` could skip the
    commit of the step in flight: no request could run after it.
    Python handles signals only on the main thread; on another thread this function changes nothing."""
    handlers = {int(number): by for number in SIGNALS if callable(by := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield lambda: None
        return
    first: tuple[int, float] | None = None  # the signal, and when it came

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first[1] > PATIENCE_SECONDS:
            handlers[number](number, frame)
        first = (number, time.monotonic()) if first is None else first

    def take() -> None:
        nonlocal first
        if first is not None:
            number, first = first[0], None
            handlers[number](number, None)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield take
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        take()
