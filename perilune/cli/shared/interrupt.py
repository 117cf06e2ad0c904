"""Ctrl-C: it ends a command with code 130 wherever it comes, without a traceback.

Python raises KeyboardInterrupt at the next instruction, whatever that belongs to. While modules are imported, C++ code
may discard it (torch's did in 3 of 45 tries), turn it into another error or end the process with an abort; of a
finalizer or a weak reference's callback Python itself prints and forgets it.

This module imports nothing that takes time: until it is imported, Ctrl-C is Python's own.
"""

import os
import signal
import sys

CODE = 130
AGAIN_SECONDS = 0.01  # after which an interrupt that Python has forgotten is raised again


def _end(number: int, frame: object) -> None:
    os._exit(CODE)


class Importing:
    """While it is entered, Ctrl-C ends the process at once: there is nothing to clean up yet. Only what would raise
    KeyboardInterrupt is replaced, and only on the main thread, where signals are handled."""

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
    """Raises again what finalizers and callbacks have forgotten, from now on in this process."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = _forgotten


def _forgotten(unraisable: "sys.UnraisableHookArgs") -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)  # not here, where it would be forgotten once more
    else:
        sys.__unraisablehook__(unraisable)


def leave() -> None:
    """Ends the process after an interrupt; another one is not printed as a traceback of what ends with it."""
    signal.signal(signal.SIGINT, _end)
    sys.exit(CODE)
