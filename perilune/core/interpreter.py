"""The environment of Perilune's own processes (`python -m perilune...`)."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where this package lies


def environment() -> dict[str, str]:
    """os.environ, changed so that a process imports this very package, and nothing from the current directory: `python
    -m` looks there first, and would import a user's queue.py or perilune.py instead."""
    found = {**os.environ, "PYTHONSAFEPATH": "1"}
    if ROOT.name not in ("site-packages", "dist-packages"):  # these are found anyway, after the standard library
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return found
