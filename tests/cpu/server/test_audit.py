"""The audit log: who asked what, text redacted, files that rotate, disks that are slow or full."""

import asyncio
import threading
from pathlib import Path

import pytest

from perilune.core.config import ServerConfig, build
from perilune.core.errors import ConfigError
from perilune.server import audit
from perilune.server.audit import AuditLog, compiled, redacted
from tests.cpu.server.test_observability import (
    KEY,
    lines,
    logger,
    logs_are_written_to_their_end,  # noqa: F401  (a fixture for all)
)
from tests.serving import BYTES, CALL, CHAT, HANG_SECONDS, HELLO, TEXT, WEATHER, Served, serve


def test_the_audit_log_says_who_when_what_and_how_much(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k")

    async def test(s: Served) -> None:
        s.client.headers = {"authorization": "Bearer k", "x-request-id": "req-9"}
        assert (await s.client.post(CHAT, {"messages": HELLO, "tools": [WEATHER]})).status == 200
        await s.client.post(TEXT, {"prompt": "secret text", "max_tokens": 0})
        s.client.headers = {}
        await s.client.post(CHAT, {"messages": HELLO})
        await s.client.get("/health")

    directory = tmp_path / "log"
    answer = f"I see</think>{CALL.format(0)}"
    serve(test, answer=answer, api_key_file=str(keys), audit_log=str(directory), observers=[logger(directory)])
    called, raw, refused = lines(directory)
    assert called["key"] == "default" and called["client"] == "192.0.2.7" and called["request_id"] == "req-9"
    assert called["model"] == "m" and called["route"] == CHAT and called["status"] == 200 and called["method"] == "POST"
    assert called["tools"] == ["get_weather"] and called["finish_reasons"] == ["stop"] and called["error"] is None
    assert called["cached_tokens"] == 3 and called["reasoning_tokens"] == 5
    assert called["output_tokens"] == len(BYTES.encode(answer, allow_special=True)) + 1
    assert 0 < called["first_token_seconds"] <= called["seconds"] and called["queue_seconds"] == 0
    assert refused["key"] is None and refused["error"] == {"type": "authentication_error", "code": "invalid_api_key"}
    assert raw["route"] == TEXT and refused["route"] == CHAT and refused["status"] == 401
    assert 0 < refused["seconds"] < called["seconds"] + 1
    everything = "".join(file.read_text() for file in directory.iterdir())
    assert "secret" not in everything and "Oslo" not in everything, "text only when asked for"
    assert directory.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in directory.iterdir())


def test_text_when_asked_for(tmp_path: Path) -> None:
    async def test(s: Served) -> None:
        await s.client.post(TEXT, {"prompt": ["call 555-1234", "b"], "n": 2})

    patterns = audit.compiled([r"\d{3}-\d{4}"])
    made = logger(tmp_path, patterns=patterns)
    serve(test, answer="mail to a@b", audit_log=str(tmp_path), audit_text=True, observers=[made])
    (entry,) = lines(tmp_path)
    assert entry["prompts"] == ["call [redacted]", "b"] and entry["prompt_tokens"] == 14
    assert entry["answers"] == ["mail to a@b<|im_end|>"] * 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sk-proj-abcdefghijklmnop1234 is it", "[redacted] is it"),
        ("ghp_abcdefghijklmnop1234, hf_abcdefghijklmnopqrst", "[redacted], [redacted]"),
        (f"use {KEY}!", "use [redacted]!"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        ("Authorization: Bearer abc.def-123==", "Authorization: Bearer [redacted]"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2ln", "[redacted]"),
        ("see x-eyJ-eyJhbGciOiJIUzI1.eyJzdWIiOiIx and eyJhbGciOiJI.", "see [redacted] and eyJhbGciOiJI."),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nafter", "[redacted]\nafter"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE and cut", "[redacted]"),
        ("postgres://me:hunter2@db/x", "postgres://[redacted]@db/x"),
        ('{"password": "hunter2", "user": "me"}', '{"password": "[redacted]", "user": "me"}'),
        ('{\\"api_key\\": \\"hunter22\\"}', '{\\"api_key\\": \\"[redacted]\\"}'),
        ("DB_PASSWORD=hunter2", "DB_PASSWORD=[redacted]"),
        ("the password is long; the token count: 12; task-force sk-1", None),
        ("see https://example.org:8080/a@b", None),
    ],
)
def test_redaction(text: str, shown: str | None) -> None:
    assert redacted(text) == (text if shown is None else shown)


@pytest.mark.parametrize("pattern", ["(", "", "[0-9]*"])
def test_rules_that_find_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="audit_redact"):
        compiled([pattern])


def test_redaction_takes_time_in_proportion() -> None:
    import time

    for piece in (
        "a",
        "sk-",
        "password",
        "-",
        "://a:",
        "Bearer ",
        "-----BEGIN PRIVATE KEY-----",
        "eyJ.",
        "\\\"' :=",
        "-eyJ",
    ):
        text = piece * (200_000 // len(piece))
        started = time.process_time()
        redacted(text)
        assert time.process_time() - started < 3, piece


def test_files_rotate_within_their_bound(tmp_path: Path) -> None:
    async def test(s: Served) -> None:
        for i in range(120):
            s.client.headers = {"x-request-id": f"r{i}"}
            await s.client.post(TEXT, {"prompt": "a"})

    limit = 20_000
    for _ in range(2):  # a second server goes on beside the files of the first
        serve(test, audit_log=str(tmp_path), observers=[logger(tmp_path, limit_bytes=limit)])
        total = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert limit / 2 < total <= limit and 4 < len(list(tmp_path.iterdir())) <= 9
        kept = [entry["request_id"] for entry in lines(tmp_path)]
        assert kept[-1] == "r119" and kept == [f"r{i}" for i in (*range(120), *range(120))][-len(kept) :]


def test_a_deleted_file_takes_no_further_lines(tmp_path: Path) -> None:
    made = AuditLog(tmp_path, "m", str, lambda: None)
    for line in (b"a", b"b"):
        for file in tmp_path.iterdir():
            file.unlink()
        made._append(line)
    made.close()
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"b"]


def test_a_full_disk_loses_lines_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(s: Served) -> None:
        monkeypatch.setattr(audit.os, "write", lambda fd, data: 3)
        for _ in range(3):
            await s.client.post(TEXT, {"prompt": "a"})
        while "perilune_audit_lost_total 3.0" not in (await s.client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        await s.client.post(TEXT, {"prompt": "a"})

    serve(test, audit_log=str(tmp_path), observers=[logger(tmp_path)])
    assert len(lines(tmp_path)) == 1, "no half line stays"
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        f"the audit log in {tmp_path} loses lines: No space left on device"
    ]


def test_a_slow_disk_never_delays_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(audit, "MAX_QUEUED_REQUESTS", 4)
    monkeypatch.setattr(audit, "MAX_QUEUED_TEXTS", 2)
    real = AuditLog._append

    def slow(self: AuditLog, line: bytes) -> None:
        begun.set()
        assert go.wait(HANG_SECONDS)
        real(self, line)

    monkeypatch.setattr(AuditLog, "_append", slow)

    async def test(s: Served) -> None:
        for i in range(10):
            await s.client.post(TEXT, {"prompt": str(i)})
            await asyncio.to_thread(begun.wait, HANG_SECONDS)  # the first is being written
        go.set()
        assert "perilune_audit_lost_total 5.0" in (await s.client.get("/metrics")).text

    serve(test, audit_log=str(tmp_path), audit_text=True, observers=[logger(tmp_path)])
    entries = lines(tmp_path)
    assert len(entries) == 5 and [len(e["prompts"]) for e in entries] == [1, 1, 1, 0, 0]


def test_wrong_rules_and_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit_text and audit_redact need audit_log"):
        ServerConfig(audit_text=True)
    with pytest.raises(ConfigError, match="audit_mb must be at least 1"):
        build(ServerConfig, {"audit_mb": 0})
    for key in ("audit_log", "files_dir"):  # "" would be the working directory
        with pytest.raises(ConfigError, match=f"{key} is empty"):
            build(ServerConfig, {key: ""})
    with pytest.raises(ConfigError, match="not a regular expression"):
        audit.compiled(["a", "("])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="audit_log: cannot write in"):
        audit.prepare(tmp_path / "file" / "log")
    with pytest.raises(ConfigError, match="belong together"):
        ServerConfig(tls_cert="a")
