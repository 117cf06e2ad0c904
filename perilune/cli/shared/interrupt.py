"""Ctrl-C: ends a command with code 130 at any point, without a traceback.

Python raises KeyboardInterrupt at the next instruction of any code. While modules are imported, C++ code may discard it
(torch's did in 3 of 45 tries), turn it into another error or abort the process. In a finalizer or the callback of a
weak reference, Python itself prints and discards it.

This module imports nothing that takes time: until it has been imported, Ctrl-C shows Python's traceback.
"""

import os
import signal
import sys

CODE = 130
AGAIN_SECONDS = 0.01  # after which an interrupt that Python has discarded is raised again


def _end(number: int, frame: object) -> None:
    os._exit(CODE)


class Importing:
    """A context in which Ctrl-C ends the process at once: there is nothing to clean up yet. Replaces only the handler
    that raises KeyboardInterrupt, and only on the main thread, where signals are handled."""

    def __enter__(self) -> None:
        self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._replaced:
            try:
                signal.signal(signal.SIGINT, _end)
            except ValueError:  # another thread
                self._replaced = False

    def __exit__(self, *error: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def keep() -> None:
    """From now on in this process, an interrupt that Python discards in a finalizer or callback is raised again."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = _discarded


def _discarded(unraisable: "sys.UnraisableHookArgs") -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)  # not here: what a hook raises is discarded, too
    else:
        sys.__unraisablehook__(unraisable)


def leave() -> None:
    """Ends the process after an interrupt. Another interrupt ends it at once: exit handlers would print a traceback."""
    signal.signal(signal.SIGINT, _end)
    sys.exit(CODE)
