"""How `perilune serve` ends where one of its threads still computes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Ends the server as soon as it is ready, while a thread sleeps that the loop's and the interpreter's ends wait for.
START = """
import asyncio, sys, time
from perilune.cli import serve
from perilune.core.errors import EngineError
from tests import scripted_engine

HOW = sys.argv[1]
async def reached(self):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 300)
    if HOW == "fails":
        raise EngineError("no more")

serve.Ending.reached = reached
sys.argv = ["scripted_engine", *sys.argv[2:]]
scripted_engine.main()
"""


@pytest.mark.parametrize(("how", "code"), [("fails", 1), ("ends", 0)])
def test_a_computing_thread_changes_neither_the_exit_code_nor_what_is_left(how: str, code: int, tmp_path: Path) -> None:
    uds = tmp_path / "s"
    command = [sys.executable, "-c", START, how, "serve", "kimi-nano", "--uds", str(uds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done
    assert ("error: no more\n" in done.stderr) == (how == "fails"), done.stderr
    assert "is served at" in done.stderr and "Traceback" not in done.stderr and not uds.exists(), done.stderr
