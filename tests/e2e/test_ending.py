"""How `perilune serve` ends, and what clients see when it or its engine ends: signals while answers are in flight."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.server import HANG_SECONDS, QUESTION, Server, held_engines, needs_nano

pytestmark = needs_nano
PATIENT = ("--drain-seconds", "600")
# An engine that answers for half an hour, where the server alone decides: it starts for a third of the CPU time.
SLOW = [sys.executable, "-m", "tests.scripted_engine", "--step-ms", "20", "serve", "kimi-nano", "--port", "0"]


@contextlib.contextmanager
def streaming(server: Server) -> Iterator[Iterator[str]]:
    """The lines of an answer of half an hour, from the second on."""
    body = {"prompt": [65], "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG_SECONDS) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def ends_soon(server: Server, number: signal.Signals) -> None:
    """Ends the server by a signal while it streams an answer of half an hour: the stream must end with the reason. Of
    SIGTERM the second one does so; after the first one the server waits for its answers."""
    with streaming(server) as lines:
        if number == signal.SIGTERM:
            server.process.send_signal(number)
            while server.get("/health/ready").status_code == 200:  # two signals that wait are one
                time.sleep(0.01)
        assert server.stop(number)[0] == 0
        assert any("shutting down" in line for line in lines), "the stream in flight is told why it ends"
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


def test_a_strict_server_from_the_command_line_ends_on_sigterm() -> None:
    server = Server(
        "--vendor-strict", "--cors-origins", "https://a.example.org", "--cors-origins", "https://b.example.org",
        *PATIENT, command=SLOW,
    )  # fmt: skip
    try:
        for fields in ({"temperature": 0.2}, {"top_p": 0.5}, {"n": 2}, {"presence_penalty": 1.0}):
            with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
                server.openai.chat.completions.create(model="kimi-nano", messages=QUESTION, **fields)
        page = {"origin": "https://b.example.org"}
        allowed = server.get("/v1/models", headers=page).headers["access-control-allow-origin"]
        assert allowed == page["origin"]
        ends_soon(server, signal.SIGTERM)
    finally:
        server.kill()


def test_ctrl_c_ends_server_and_engine() -> None:
    server = Server("--set", "threads=1", "--draft", "off", *PATIENT)
    try:
        ends_soon(server, signal.SIGINT)
    finally:
        server.kill()


def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    hold, env = held_engines(tmp_path)
    server = Server("--set", "threads=1", "--draft", "off", "--set", "max_num_seqs=1", env=env)
    try:
        killed = server.engine_pid()
        with streaming(server) as lines, ThreadPoolExecutor(1) as pool:
            short = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
            queued = pool.submit(server.post, "/v1/completions", json=short)
            while not server.metric("perilune_num_requests_waiting"):
                time.sleep(0.05)
            hold.touch()
            os.kill(killed, signal.SIGKILL)
            errors = [line for line in lines if '"error"' in line]
            assert len(errors) == 1 and "engine" in errors[0], "the stream in flight says why it ends"
            assert server.get("/health/ready").status_code == 503
            assert server.get("/health/live").status_code == 200
            refused = server.post("/v1/completions", json=short)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            hold.unlink()
            answer = queued.result()
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert server.get("/health/ready").status_code == 200
        assert server.metric("perilune_engine_restarts_total") == 1
        assert server.engine_pid() != killed and not Path(f"/proc/{killed}").exists()
        assert server.stop(signal.SIGTERM)[0] == 0
        assert not any("Traceback" in line for line in server.lines), "".join(server.lines)
    finally:
        server.kill()


def test_sigterm_lets_answers_end_and_refuses_new_ones() -> None:
    server = Server(command=SLOW)
    try:
        body = {"prompt": [65], "max_tokens": 100, "ignore_eos": True, "stream": True}
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)  # the answer does not end before the server has been asked
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, "/v1/completions", json=body)
            while not server.metric("perilune_generations_in_flight"):
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            while server.get("/health/ready").status_code == 200:
                time.sleep(0.02)
            assert server.get("/health/ready").status_code == 503
            assert server.get("/health/live").status_code == 200
            refused = server.post("/v1/completions", json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "engine_unavailable"
            os.kill(engine, signal.SIGCONT)
            rest = [line for line in asked.result().text.splitlines() if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(HANG_SECONDS) == 0
    finally:
        server.kill()


def test_the_time_to_drain_is_bounded() -> None:
    server = Server("--drain-seconds", "0.5", command=SLOW)
    try:
        with streaming(server) as lines:
            status, seconds = server.stop(signal.SIGTERM)
            assert status == 0 and seconds >= 0.5
            assert any("shutting down" in line for line in lines), "the answer ended by itself"
    finally:
        server.kill()
