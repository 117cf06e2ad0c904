"""The environment of Perilune's own processes (`python -m perilune...`), and their end."""

import ctypes
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where this package lies


def environment() -> dict[str, str]:
    """os.environ, changed so that a process imports this very package, and nothing from the current directory: `python
    -m` looks there first, and would import a user's queue.py or perilune.py instead."""
    found = {**os.environ, "PYTHONSAFEPATH": "1"}
    if ROOT.name not in ("site-packages", "dist-packages"):  # these are found anyway, after the standard library
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return found


def end_with_parent(number: int, parent: int = 0) -> None:
    """Has Linux send this signal to this process when its parent dies, even by SIGKILL, and even while this process
    loads weights; at once, if `parent` is the id of one that has died already. Other systems: nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
        if parent and os.getppid() != parent:
            os.kill(os.getpid(), number)
