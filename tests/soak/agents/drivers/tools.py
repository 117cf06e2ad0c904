"""The three tools of the drivers, in the folder that they run in."""

import subprocess
import sys
from pathlib import Path


def read_file(path: str) -> str:
    """The text of a file."""
    return Path(path).read_text()


def replace_in_file(path: str, old: str, new: str) -> str:
    """Replaces a text that occurs once in a file."""
    text = Path(path).read_text()
    if text.count(old) != 1:
        return f"error: the text occurs {text.count(old)} times"
    Path(path).write_text(text.replace(old, new))
    return "replaced"


def run_check() -> str:
    """Runs check.py and returns what it prints."""
    return subprocess.run([sys.executable, "check.py"], capture_output=True, text=True, check=True).stdout


TOOLS = (read_file, replace_in_file, run_check)
