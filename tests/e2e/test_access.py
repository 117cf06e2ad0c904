"""A server as it is put on the open network: HTTPS, keys, JSON lines and an audit log, by the real engine."""

import json
import os
import shutil
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import certificates
from tests.certificates import needs_openssl
from tests.cpu.server.test_keys import bearer, entry
from tests.e2e.server import HANG_SECONDS, Server, needs_nano

pytestmark = [needs_nano, needs_openssl]


class Secured:
    """The server, its files, and clients by the name of their key."""

    def __init__(self, directory: Path) -> None:
        self.keys, self.audit = directory / "keys.toml", directory / "audit"
        self.cert, self.key = certificates.make(directory, "perilune")
        self.restore()
        options = ["--api-key-file", self.keys, "--tls-cert", self.cert, "--tls-key", self.key]
        options += ["--audit-log", self.audit, "--log-format", "json", "--draft", "suffix"]
        # A fixed number of drafts: otherwise measured times decide it, and with it the number of steps.
        options += ["--set", "threads=1", "--set", "max_step_tokens=64", "--set", "draft_tokens=4"]
        self.server = Server(*map(str, options))

    def restore(self) -> None:
        """The keys that every test begins with, and the server with them."""
        self.write(entry("a"), entry("b"), entry("c", cache_group='"team"'), entry("d", cache_group='"team"'))

    def served(self, name: str) -> None:
        """Waits until the server takes this key."""
        deadline = time.monotonic() + HANG_SECONDS
        with self.client(name) as client:
            while client.get(f"{self.server.url}/v1/models").status_code != 200:
                assert time.monotonic() < deadline, name
                time.sleep(0.02)

    def write(self, *entries: str) -> None:
        self.keys.write_text("".join((*entries, entry("root", operator="true"))))
        self.keys.chmod(0o600)

    def ask(self, name: str, prompt: str, **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
        return self.post(name, "/v1/completions", body)

    def post(self, name: str, path: str, body: Any) -> httpx.Response:
        with self.client(name) as client:
            return client.post(f"{self.server.url}{path}", json=body)

    def client(self, name: str) -> httpx.Client:
        return httpx.Client(headers=bearer(name), verify=self.context(), timeout=HANG_SECONDS)

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert))

    def steps(self) -> float:
        """How many steps the engine has computed."""
        return self.server.metric("perilune_engine_steps_total", headers=bearer("root"), verify=self.context())

    def entries(self) -> list[Any]:
        """Lines of the audit log; the last may be half written."""
        found = [text for file in self.audit.glob("*.jsonl") for text in file.read_text().splitlines(keepends=True)]
        return [json.loads(text) for text in found if text.endswith("\n")]

    def logged(self, words: str) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not any(words in line for line in self.server.lines):
            assert time.monotonic() < deadline, (words, self.server.lines)
            time.sleep(0.02)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("access"))
    try:
        yield made
        assert made.server.stop(signal.SIGTERM)[0] == 0
        for line in made.server.lines:
            assert "message" in json.loads(line), "every line is an object"
        assert "plk-" not in "".join(made.server.lines) and "Traceback" not in "".join(made.server.lines)
    finally:
        made.server.kill()


def test_no_key_can_tell_what_another_has_asked(secured: Secured) -> None:
    """Neither by cached tokens nor by how many steps an answer takes, that is by the time. Prompts take several steps
    each; accepted drafts save steps too."""

    def asked(name: str, number: int) -> tuple[int, float]:
        """(cached tokens, steps of the engine)"""
        prompt = f"{number}. The quick brown fox jumps over the lazy dog. " * 15
        before = secured.steps()
        answer = secured.ask(name, prompt, max_tokens=12)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], secured.steps() - before

    for number in range(1, 5):
        first, again, other = (asked(name, number) for name in "aab")
        assert again[0] > 200 and first[0] == other[0] == 0
        assert again[1] < first[1] == other[1], (number, first, again, other)
    assert asked("c", 1)[0] == 0 and asked("d", 1)[0] > 200, "keys of a group share"


def test_keys_are_read_again_and_usage_is_counted(secured: Secured) -> None:
    assert secured.ask("late", "a").status_code == 401
    secured.write(entry("a", concurrent=1), entry("late"))
    secured.logged("the API key file was read again")
    assert secured.ask("late", "a").status_code == 200 and secured.ask("b", "a").status_code == 401
    assert secured.ask("a", "a", n=2).status_code == 429
    secured.keys.write_text("[[key")
    os.kill(secured.server.process.pid, signal.SIGHUP)
    secured.logged("was not read again")
    assert secured.ask("late", "a").status_code == 200
    secured.write(entry("a"), entry("b"), entry("late"))
    with secured.client("late") as client:
        (shown,) = client.get(f"{secured.server.url}/v1/usage").json()["data"]
    assert shown["key"] == "late" and shown["requests"] == 2 and shown["output_tokens"] == 48
    secured.restore()
    for name in "cd":  # no other test depends on whether this one ran before
        secured.served(name)


def test_the_certificate_is_replaced_while_answers_stream(secured: Secured, tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
    old = secured.client("a")
    with old, old.stream("POST", f"{secured.server.url}/v1/completions", json=body) as stream:
        pieces = stream.iter_lines()
        next(pieces)
        cert, key = certificates.make(tmp_path, "perilune")
        shutil.copy(key, secured.key)
        shutil.copy(cert, secured.cert)
        os.kill(secured.server.process.pid, signal.SIGHUP)
        secured.logged("the TLS certificate was read again")
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            try:
                assert secured.ask("a", "a").status_code == 200  # trusts the new certificate alone
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert list(pieces)[-2:] == ["data: [DONE]", ""], "the stream of the old connection goes on"


def test_what_the_logs_say(secured: Secured) -> None:
    for name in ("a", "b", "c", "d", "unknown"):
        assert secured.ask(name, "a").status_code == (401 if name == "unknown" else 200)
    with secured.client("a") as client:
        client.headers["x-request-id"] = "req-77"
        reply = client.get(f"{secured.server.url}/v1/models")
        assert reply.headers["x-request-id"] == "req-77" and "max-age" in reply.headers["strict-transport-security"]
        assert client.get(f"{secured.server.url}/metrics").status_code == 403
    with secured.client("root") as client:
        page = client.get(f"{secured.server.url}/metrics").text
    assert 'perilune_key_tokens_total{key="a",kind="output"}' in page
    waited = float(page.split("perilune_request_queue_time_seconds_sum ")[1].split()[0])
    assert 0 < waited < 60, "the engine says how long requests waited"
    secured.logged("req-77")
    (line,) = (json.loads(text) for text in secured.server.lines if "req-77" in text and "models" in text)
    assert line["status"] == 200 and line["key"] == "a" and line["route"] == "/v1/models"
    deadline = time.monotonic() + HANG_SECONDS
    entries = secured.entries()
    while not {e["key"] for e in entries} >= {"a", "b", "c", "d", None}:  # a thread of the server writes them
        assert time.monotonic() < deadline, entries
        time.sleep(0.02)
        entries = secured.entries()
    assert all(e["client"] == "127.0.0.1" for e in entries)
