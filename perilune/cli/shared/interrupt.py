"""Ctrl-C: ends a command with code 130 at any point, without a traceback.

Python raises KeyboardInterrupt at the next instruction of any code. While modules are imported, C++ code may discard it
(torch's did in 3 of 45 tries), turn it into another error or abort the process. In a finalizer or the callback of a
weak reference, Python itself prints and discards it.

This module imports nothing that takes time: until it has been imported, Ctrl-C shows Python's traceback.
"""

import atexit
import os
import signal
import sys

ENDING = signal.SIGTERM, signal.SIGHUP  # SIGHUP: the terminal was closed; serve reads files again instead
GRACE_SECONDS = 5.0  # after one of them, for what is cleaned up
AGAIN_SECONDS = 0.01  # after which an interrupt that Python has discarded is raised again
_ended_by = 0  # the signal, once one ends the process


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)


def _terminate(number: int, frame: object) -> None:
    """Raises SystemExit, so that temporary files are removed (12 GB of `bench loading`). After GRACE_SECONDS, or at a
    second signal, the process ends at once."""
    import threading  # here: it takes time

    global _ended_by
    _ended_by = number
    signal.signal(number, _end)
    last = threading.Timer(GRACE_SECONDS, os._exit, (128 + number,))
    last.daemon = True
    last.start()
    sys.exit(128 + number)


class Importing:
    """A context in which Ctrl-C and ENDING end the process at once: there is nothing to clean up yet. Replaces only
    the handlers that raise, and only on the main thread, where signals are handled."""

    def __enter__(self) -> None:
        raising = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(ENDING, _terminate)}
        self._replaced = {number: by for number, by in raising.items() if signal.getsignal(number) is by}
        try:
            for number in self._replaced:
                signal.signal(number, _end)
        except ValueError:  # another thread
            self._replaced = {}

    def __exit__(self, *error: object) -> None:
        for number, by in self._replaced.items():
            signal.signal(number, by)


def keep() -> None:
    """From now on in this process, ENDING unwind the stack as Ctrl-C does, and an exception of either that Python
    discards in a finalizer or callback is raised again."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, _terminate)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = _discarded
    atexit.register(_finish)  # registered first, so that it runs last


def _discarded(unraisable: "sys.UnraisableHookArgs") -> None:
    if issubclass(unraisable.exc_type, (KeyboardInterrupt, SystemExit)):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)  # raised here, it would be discarded, too
    else:
        sys.__unraisablehook__(unraisable)


def leave(number: int = signal.SIGINT) -> None:
    """Ends the process. An interrupt now ends it at once: exit handlers would print a traceback."""
    global _ended_by
    _ended_by = number
    signal.signal(signal.SIGINT, _end)
    sys.exit(128 + number)


def _finish() -> None:
    """Ends the process after a signal without Python's finalization, which crashed in 2 of 100 tries: a thread may be
    importing a native module then (serve prepares on threads)."""
    if _ended_by:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # a closed pipe
            pass
        os._exit(128 + _ended_by)
