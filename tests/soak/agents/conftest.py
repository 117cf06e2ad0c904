"""A server with the scripted engine and K2.6's vocabulary per session, and the folder that a program works in."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from perilune.text.tokenizer import Tokenizer
from tests.e2e.server import Server
from tests.session_script import Step, lines, write

MODEL = "kimi-k2.6"
TASK = "repair the function in prices.py until check.py passes"
BROKEN = '''"""What a basket costs."""


def total(prices, rate):
    """The sum of the prices with tax; rate 0.2 is 20 %."""
    return sum(prices) * rate
'''
WRONG, RIGHT = "sum(prices) * rate", "sum(prices) * (1 + rate)"
CHECK = """import pathlib
from prices import total

right = abs(total([10, 20], 0.2) - 36) < 1e-9
with pathlib.Path("runs.log").open("a") as log:
    log.write("right " if right else "wrong ")
print("the check passed" if right else f"the check failed: {total([10, 20], 0.2)} is not 36")
"""
REPORT = "The tax was multiplied instead of added. I repaired `total` in prices.py; the check passed."


@dataclass
class Workshop:
    """`folder` has the broken program; `home` is empty."""

    folder: Path
    home: Path
    server: Server

    def finished(self, out: str) -> None:
        """The task was done by calls: the file is right, the check ran before and after, the report was printed."""
        assert (self.folder / "prices.py").read_text() == BROKEN.replace(WRONG, RIGHT)
        assert (self.folder / "runs.log").read_text() == "wrong right "
        assert REPORT in out, out[-2000:]
        assert self.statuses() == {"200"}, "".join(self.server.lines[-30:])

    def statuses(self) -> set[str]:
        """Of the answers to all requests of programs."""
        page = httpx.get(f"{self.server.url}/metrics").text
        counted = re.findall(r'perilune_http_requests_total\{route="([^"]*)",status="(\d+)"\} ([\d.]+)', page)
        return {status for route, status, _ in counted if route != "/metrics"}


Start = Callable[[Sequence[Step]], Workshop]


@pytest.fixture
def start(kimi_k26: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a server that plays these steps."""
    running: list[Server] = []

    def begin(steps: Sequence[Step]) -> Workshop:
        folder, home, script = tmp_path / "work", tmp_path / "home", tmp_path / "script.jsonl"
        folder.mkdir()
        home.mkdir()
        (folder / "prices.py").write_text(BROKEN)
        (folder / "check.py").write_text(CHECK)
        write(script, lines(Tokenizer.from_directory(kimi_k26), TASK, steps))
        engine = ("--script", str(script), "--answer-tokens", "16", "--width", "3")
        command = [sys.executable, "-m", "tests.scripted_engine", *engine, "serve", str(kimi_k26), "--port", "0"]
        running.append(Server("--served-model-name", MODEL, command=command))
        return Workshop(folder, home, running[-1])

    yield begin
    for server in running:
        server.kill()
        assert not any("Traceback" in line for line in server.lines), "".join(server.lines[-50:])


@pytest.fixture(scope="session")
def programs(pytestconfig: pytest.Config) -> Path:
    """Where programs are installed; kept between runs."""
    return Path(pytestconfig.cache.mkdir("agents"))
