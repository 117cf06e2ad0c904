"""`perilune serve` in a process of its own, and what tests ask it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import perilune

NANO = Path(perilune.__file__).parent / "bundled" / "kimi-nano"
needs_nano = pytest.mark.skipif(
    not (NANO / "config.json").is_file(), reason=f"the bundled model kimi-nano is not at {NANO}"
)
QUESTION: Any = [{"role": "user", "content": "What is 347 + 589?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HANG_SECONDS = 120.0  # bounds what would never end; says nothing about speed: a busy machine stops for seconds
COMMAND = [sys.executable, "-m", "perilune.cli.main", "serve", "kimi-nano", "--port", "0"]


class Server:
    """A server process in a process group of its own; `lines` is what it printed."""

    def __init__(self, *options: str, command: Sequence[str] = COMMAND, **where: Any) -> None:
        """`where`: cwd and env of the process."""
        self.process = subprocess.Popen(
            [*command, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
            **where,
        )  # fmt: skip
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.url = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if not self.ready.wait(HANG_SECONDS) or not self.url:
            self.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.match(r'curl (https?://[^/]+)/v1|.*"message": "ready", "url": "([^"]+)', line):
                self.url = found[1] or found[2]
                self.ready.set()
        self.ready.set()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG_SECONDS)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=HANG_SECONDS, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=HANG_SECONDS, **more)

    def metric(self, name: str, absent: float | None = None, **more: Any) -> float:
        """`absent`: of one that is not on the page; without it that is an error. `more`: as of `get`."""
        page = self.get("/metrics", **more).text
        found = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(f"{name} ")]
        assert found or absent is not None, name
        return float(found[0]) if found else float(absent or 0.0)

    def cancelled_after(self, leave: Callable[[], None]) -> float:
        """How many generations were cancelled once nothing is computed any more, after clients left."""
        label = 'perilune_request_success_total{finished_reason="cancelled"}'
        before = self.metric(label, 0.0)
        leave()
        while self.metric("perilune_generations_in_flight") or self.metric("perilune_num_requests_running"):
            time.sleep(0.05)
        return self.metric(label, 0.0) - before

    def engine_pid(self) -> int:
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def stop(self, number: signal.Signals) -> tuple[int, float]:
        """(exit status, seconds it took); afterwards nothing of the process group may live."""
        started = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(HANG_SECONDS)
        seconds = time.monotonic() - started
        self.reader.join(HANG_SECONDS)
        with pytest.raises(ProcessLookupError):
            os.killpg(self.process.pid, 0)
        return status, seconds

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(HANG_SECONDS)


def held_engines(directory: Path) -> tuple[Path, dict[str, str]]:
    """A file, and variables for a server: while the file exists, an engine process of that server does not begin."""
    hold = directory / "hold"
    (directory / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        f"while 'perilune.engine.process' in sys.orig_argv and os.path.exists({str(hold)!r}):\n    time.sleep(0.01)\n"
    )
    return hold, {**os.environ, "PYTHONPATH": str(directory)}
