"""The engine process ends by itself: what becomes of its requests, and of the next process."""

import asyncio
import errno
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError, EngineUnavailable
from perilune.core.messages import Delta, Order
from perilune.core.sampling import SamplingParams
from perilune.engine import client as client_module
from perilune.engine.client import EngineClient
from tests.serving import served

ENGINE = Path(__file__).with_name("failing_engine.py")
ANSWERED, POISON, HANGS, LATER = (5,), (1,), (2,), (4,)


class Supervised:
    def __init__(self, client: EngineClient, starts: Path) -> None:
        self.client, self._starts = client, starts

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._starts.read_text().split()]

    async def ask(self, prompt: tuple[int, ...], order: Order | None = None) -> list[int]:
        stream = self.client.generate(prompt, SamplingParams(max_tokens=3), order=order or Order())
        return [token async for delta in stream for token in delta.tokens]

    async def finish_reason(self, prompt: tuple[int, ...], order: Order) -> str | None:
        stream = self.client.generate(prompt, SamplingParams(max_tokens=3), order=order)
        return [delta.finish_reason async for delta in stream][-1]

    async def begin(self, prompt: tuple[int, ...]) -> tuple[Any, Delta]:
        stream = self.client.generate(prompt, SamplingParams(max_tokens=3))
        return stream, await anext(stream)

    async def lost(self) -> None:
        """Until the client knows that the process has ended: looks in every round of the loop, because a new process
        may be ready before a timer of a busy machine ends."""
        while self.client.alive:
            await asyncio.sleep(0)

    async def ready(self, restarts: int) -> None:
        while not (self.client.alive and self.client.restarts == restarts):
            await asyncio.sleep(0.01)


def supervise(
    test: Callable[[Supervised], Coroutine[Any, Any, None]], tmp_path: Path, *options: str, supervised: bool = True
) -> None:
    starts = tmp_path / "starts"

    async def main() -> None:
        command = (sys.executable, str(ENGINE), "--count", str(starts), *options)
        client = await EngineClient.start(tmp_path, EngineConfig(), supervised=supervised, command=command)
        try:
            await asyncio.wait_for(test(Supervised(client, starts)), 100)
        finally:
            await client.close()

    asyncio.run(main())
    for pid in map(int, starts.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


supervised = functools.partial(served, by=supervise, takes=["tmp_path"])


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", 0.2)
    # All processes here end by themselves; one that a busy machine is slow to end must not be killed before.
    monkeypatch.setattr(client_module, "CRASH_SECONDS", 10.0)


@supervised()
async def test_answers_in_flight_fail_and_queued_requests_run_again(s: Supervised) -> None:
    stream, delta = await s.begin(HANGS)
    assert delta.tokens == (7,)
    queued = asyncio.create_task(s.ask(LATER))
    await asyncio.sleep(0.1)
    s.client._start_seconds = 1000.0  # as of a large model
    os.kill(s.pids[0], signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"signal 9.*send the request again") as lost:  # logged once already
        await anext(stream)
    assert not s.client.alive and lost.value.retry_seconds == 60
    between = asyncio.create_task(s.ask(ANSWERED))  # while there is no process
    assert await queued == [7, 7, 7] and await between == [7, 7, 7]
    assert s.client.alive and s.client.restarts == 1 and len(s.pids) == 2 and s.client.retry_seconds is None


@supervised()
async def test_kills_in_a_row_end_no_later_request(s: Supervised) -> None:
    for kill in range(4):
        assert await s.ask(ANSWERED) == [7, 7, 7]
        os.kill(s.pids[-1], signal.SIGKILL)
        await s.ready(kill + 1)


@supervised()
async def test_a_request_that_ends_the_engine_is_run_twice_at_most(s: Supervised) -> None:
    assert await s.ask(ANSWERED) == [7, 7, 7]
    with pytest.raises(EngineError, match="exit code 9"):
        await s.ask(POISON)
    await s.ready(2)
    assert await s.ask(ANSWERED) == [7, 7, 7] and len(s.pids) == 3


@supervised()
async def test_a_restart_is_at_once_after_a_step_and_delayed_without_one(
    s: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    assert await s.ask(ANSWERED) == [7, 7, 7]
    os.kill(s.pids[-1], signal.SIGKILL)
    await s.ready(1)
    assert "the next try is in" not in caplog.text
    begin = time.monotonic()
    os.kill(s.pids[-1], signal.SIGKILL)  # has computed nothing
    await s.ready(2)
    assert "the next try is in 0.2 s" in caplog.text and time.monotonic() - begin > 0.2


@supervised("--never")
async def test_an_engine_that_cannot_start_again_fails_all_requests_clearly(s: Supervised) -> None:
    assert await s.ask(ANSWERED) == [7, 7, 7]
    queued = asyncio.create_task(s.ask(LATER))
    await asyncio.sleep(0.05)
    os.kill(s.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="could not be started again: no more"):
        await queued
    assert not s.client.alive
    with pytest.raises(EngineError, match="no more"):
        await s.ask(ANSWERED)


@supervised()
async def test_a_process_that_the_system_refuses_is_started_later(
    s: Supervised, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, refusals = asyncio.create_subprocess_exec, [OSError(errno.ENOMEM, "Cannot allocate memory")]

    async def refuse(*command: Any, **how: Any) -> asyncio.subprocess.Process:
        if refusals:
            raise refusals.pop()
        return await start(*command, **how)

    assert await s.ask(ANSWERED) == [7, 7, 7]
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    os.kill(s.pids[0], signal.SIGKILL)
    await asyncio.wait_for(s.ready(1), 50)
    assert await s.ask(ANSWERED) == [7, 7, 7]
    assert "cannot be started: Cannot allocate memory" in caplog.text


@supervised()
async def test_a_cancelled_request_does_not_run_again(s: Supervised) -> None:
    assert await s.ask(ANSWERED) == [7, 7, 7]
    poison = asyncio.create_task(s.ask(POISON))
    await s.lost()
    poison.cancel()
    await s.ready(1)
    assert await s.ask(ANSWERED) == [7, 7, 7] and len(s.pids) == 2


@supervised()
async def test_a_deadline_holds_while_the_engine_starts_again(s: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", 1000.0)
    queued = asyncio.create_task(s.finish_reason(LATER, Order(deadline_seconds=3.0)))
    await asyncio.sleep(0)
    os.kill(s.pids[0], signal.SIGKILL)  # has computed nothing
    await s.lost()
    async with asyncio.timeout(50):
        assert await queued == "deadline"
    assert not s.client.alive


@supervised()
async def test_a_deadline_holds_while_the_engine_does_not_answer(s: Supervised) -> None:
    async with asyncio.timeout(50):
        assert await s.finish_reason(LATER, Order(deadline_seconds=0.1)) == "deadline"
    assert await s.ask(ANSWERED) == [7, 7, 7]


@supervised()
async def test_closing_while_the_engine_starts_again_leaves_no_process(s: Supervised) -> None:
    assert await s.ask(ANSWERED) == [7, 7, 7]
    os.kill(s.pids[0], signal.SIGKILL)
    await s.lost()
    await asyncio.sleep(0.05)


NO_THREAD = """s.detach()
def no(*_, **__): raise RuntimeError("can't start new thread")
from perilune.engine import process as p; p.Engine = no; p.main()"""


@pytest.mark.parametrize(
    ("act", "why"),
    [
        ("s.close(); os._exit(3)", "exit code 3; `ulimit -v` is 600000 KB: raise it"),
        ("s.send(bytes(4)); s.makefile('rb').read()", "malformed"),
        (NO_THREAD, "no memory to start: .*start new thread.*raise `ulimit -v`"),
    ],
)
def test_an_engine_that_breaks_its_connection_is_ended_with_all_it_has_started(
    tmp_path: Path, act: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that it has not read make its end a reset, which closes the server's side too."""
    child = tmp_path / "child"
    program = (
        "import os, socket, subprocess, sys\n"
        f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '200']).pid))\n"
        f"s = socket.socket(fileno=int(sys.argv[1]))\n{act}"
    )
    monkeypatch.setattr("resource.getrlimit", lambda which: (600_000 << 10, -1))
    with pytest.raises(EngineError, match=why):
        asyncio.run(EngineClient.start(tmp_path, EngineConfig(), command=(sys.executable, "-c", program)))
    status = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 60  # of the 200 that it would live
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.01)


def test_what_an_engine_writes_is_logged_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = (
        "import os, sys, time\nsys.stderr.write('compiling\\n\\n12:00:01 WARNING no nvcc\\n12:00:02 ERR')\n"
        "sys.stderr.flush()\ntime.sleep(0.1)\n"
        "sys.stderr.write('OR it broke\\n' + 'x' * 100_000 + '\\nthe last')\nsys.stderr.flush()\nos._exit(3)\n"
    )
    command = (sys.executable, "-c", program)
    with caplog.at_level("INFO"), pytest.raises(EngineError, match="exit code 3"):
        asyncio.run(EngineClient.start(tmp_path, EngineConfig(), command=command, logged=True))
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "perilune.engine"]
    long = [text for _, text in said if text.startswith("x")]
    assert sum(map(len, long)) == 100_000 and max(map(len, long)) <= 2 * client_module.MAX_LINE_BYTES
    assert [entry for entry in said if entry[1] not in long] == [
        ("INFO", "compiling"), ("WARNING", "no nvcc"), ("ERROR", "it broke"), ("INFO", "the last"),
    ]  # fmt: skip


@supervised(supervised=False)
async def test_without_supervision_everything_fails(s: Supervised) -> None:
    with pytest.raises(EngineError, match="ended unexpectedly"):
        await s.ask(POISON)
    with pytest.raises(EngineError, match="ended unexpectedly"):
        await s.ask(ANSWERED)
    assert len(s.pids) == 1


SHRINKING = """
import os, sys
from pathlib import Path
import numpy as np
from perilune.formats.safetensors_file import SafetensorsFile
header = b'{"a":{"dtype":"U8","shape":[1024,64],"data_offsets":[0,65536]}}'
path = Path(sys.argv[1])
path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(65536))
file, copy = SafetensorsFile(path), np.copyto
def shrinking(*args):
    os.truncate(path, 8)
    copy(*args)
np.copyto = shrinking
file.read_columns(8 + len(header), 64, slice(0, 8), np.empty((1024, 8), np.uint8))
"""


def test_a_file_that_shrinks_while_the_engine_reads_it_is_named_as_the_cause(tmp_path: Path) -> None:
    command = (sys.executable, "-c", SHRINKING, str(tmp_path / "a.safetensors"))
    with pytest.raises(EngineError, match="signal 7, because a file of the model became shorter") as found:
        asyncio.run(asyncio.wait_for(EngineClient.start(tmp_path, EngineConfig(), command=command), 100))
    assert "\n" not in str(found.value)


SERVER = """
import asyncio, sys
from pathlib import Path
from perilune.core.config import EngineConfig
from perilune.engine.client import EngineClient
async def main():
    client = await EngineClient.start(Path(sys.argv[1]), EngineConfig(), supervised=True)
    print(client._process.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_the_engine_ends_with_a_server_that_is_killed_even_while_it_cannot_look(tiny: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(tiny)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        os.kill(engine, signal.SIGSTOP)  # as one that waits for a device: it will not look at its socket
        server.kill()
        server.wait(100)
        deadline = time.monotonic() + 100
        while Path(f"/proc/{engine}/stat").exists() and Path(f"/proc/{engine}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline, "the engine outlived its server"
            time.sleep(0.02)
    finally:
        server.kill()
