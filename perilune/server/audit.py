"""The audit log: a line of JSON per request, in rotating files of bounded total size; with audit_text also its texts,
redacted."""

import json
import logging
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perilune.core.errors import ConfigError
from perilune.server import errors
from perilune.server.call import Call
from perilune.text.chat import PLACEHOLDER

MAX_QUEUED_REQUESTS = 1024
MAX_QUEUED_TEXTS = 64  # With more requests queued, lines are written without text, which may be megabytes each.
MAX_TEXT_CHARS = 100_000  # Longer prompts and answers are cut.
FILES = 8  # The files together stay within the bound of bytes; the oldest is deleted first.
CLOSE_SECONDS = 1.0
UNSEEN = ("/", "/health", "/health/ready", "/health/live", "/metrics")  # not logged: the page and probes
HIDDEN = "[redacted]"
_PICTURE = re.compile(rf"(?:{re.escape(PLACEHOLDER)})+")  # in a prompt a picture is thousands of placeholders
log = logging.getLogger("perilune.server")

# `re` holds the GIL while it searches, so every pattern must take linear time on any text. This one scans a whole run
# of characters, so it is tried only at the beginning of a run that a dot follows.
_RUN = r"[A-Za-z0-9_-]"
_TOKEN = rf"(?<!{_RUN})(?={_RUN}++\.){_RUN}*?\beyJ{_RUN}{{8,}}\.{_RUN}+(?:\.{_RUN}*)?"
_KEY = r"(?:sk|pk|rk|plk|hf|ghp|gho|ghu|ghs|ghr|github_pat|glpat|npm|xox[abeoprs])[-_][A-Za-z0-9_-]{16,}"
SECRETS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        rf"\b{_KEY}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\bAIza[A-Za-z0-9_-]{35}",
        _TOKEN,
        r"(?i)(?<=\bbearer )[A-Za-z0-9._~+/=-]{8,}",
        r"(?<=://)[^/\s:@]{1,256}:[^/\s@]{1,256}(?=@)",
    )
)
# Matches NAME = value and "name": "value"; only the value is redacted. JSON inside a JSON string has \" for ".
_NAMED = re.compile(
    r"(?i)((?:password|passwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token)\b[\\\"']{0,3}\s{0,4}[:=]"
    r"\s{0,4}[\\\"']{0,3})([^\s\\\"',;]{4,})"
)


def redacted(text: str, patterns: Iterable[re.Pattern[str]] = ()) -> str:
    """The text with everything replaced that looks like a key, token, password or private key or matches `patterns`."""
    for pattern in (*SECRETS, *patterns):
        text = pattern.sub(HIDDEN, text)
    return _NAMED.sub(rf"\1{HIDDEN}", text)


def compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """The compiled patterns; ConfigError for one that is no regular expression or matches the empty text."""
    found = []
    for pattern in patterns:
        try:
            found.append(re.compile(pattern))
        except re.error as e:
            raise ConfigError(f"audit_redact: {pattern!r} is not a regular expression: {e}") from e
        if found[-1].search(""):
            raise ConfigError(f"audit_redact: {pattern!r} matches between all letters: write + for *, or leave it out")
    return found


class AuditLog:
    """Writes on its own thread. If the disk is full or slower than the requests, lines are lost and counted.

    The files of the directory have at most `limit_bytes` together: the oldest are deleted. Servers may share it.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        decode: Callable[[Sequence[int]], str],
        lost: Callable[[], None],
        *,
        patterns: Sequence[re.Pattern[str]] = (),
        limit_bytes: int = 1 << 30,
    ) -> None:
        """`decode`: token ids to text, for calls that keep them. `lost` is called for each lost line, from any thread.
        ConfigError if the directory cannot be written."""
        self.directory = directory
        self.model = model
        self._decode, self._lost, self._patterns = decode, lost, patterns
        self._limit_bytes = limit_bytes
        self._file_bytes = max(limit_bytes // FILES, 1)
        self._queue: queue.Queue[Call | None] = queue.Queue(MAX_QUEUED_REQUESTS)
        self._file: int | None = None
        self._written = 0  # bytes written to the open file
        self._failing = False
        prepare(directory)
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        self._thread.start()

    def record(self, call: Call) -> None:
        """Queues the line of a request that has ended; does not block."""
        if call.route in UNSEEN:
            return
        if self._queue.qsize() >= MAX_QUEUED_TEXTS:
            for run in call.runs:
                run.prompt, run.ids = (), []
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._lost()

    def close(self) -> None:
        """Writes what is queued, for CLOSE_SECONDS at most."""
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                self._append(self._line(call))
                self._failing = False
            except OSError as e:
                self._lost()
                if not self._failing:
                    log.error("the audit log in %s loses lines: %s", self.directory, e.strerror)
                self._failing = True
        if self._file is not None:
            os.close(self._file)

    def _line(self, call: Call) -> bytes:
        entry = about(call, self.model)
        texts = self._texts(call)
        line = json.dumps(entry | texts).encode() + b"\n"
        if texts and len(line) > self._file_bytes:
            line = json.dumps(entry | {"text_lost": True}).encode() + b"\n"
        return line

    def _texts(self, call: Call) -> dict[str, Any]:
        if not call.keeps_text:
            return {}
        prompts = [self._shown(run.prompt) for run in call.runs if run.prompt and run.prompt_tokens]
        answers = [self._shown(run.ids) for run in call.runs if run.prompt]
        return {"prompts": prompts, "answers": answers}

    def _shown(self, ids: Sequence[int]) -> str:
        # Redact the whole text before it is cut: a key that is cut in half would not be recognised.
        text = redacted(_PICTURE.sub(PLACEHOLDER, self._decode(ids)), self._patterns)
        return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}[{len(text) - MAX_TEXT_CHARS} more]"

    def _append(self, line: bytes) -> None:
        full = self._written + len(line) > self._file_bytes
        if self._file is None or full or not os.fstat(self._file).st_nlink:  # 0: it was deleted
            self._next_file()
        assert self._file is not None
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full: remove the incomplete line
            os.ftruncate(self._file, self._written)
            raise OSError(28, "No space left on device")
        self._written += written

    def _next_file(self) -> None:
        """Begins a file, after deleting the oldest ones so that all stay within the bound."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        files = sorted(self.directory.glob("audit-*.jsonl"))
        sizes = {file: file.stat().st_size for file in files}
        while files and sum(sizes[f] for f in files) > self._limit_bytes - self._file_bytes:
            files.pop(0).unlink(missing_ok=True)
        self._written = 0
        while self._file is None:
            name = f"audit-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.jsonl"
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._file = os.open(self.directory / name, flags, 0o600)
            except FileExistsError:  # another server has this name: try the next
                time.sleep(0.001)


def prepare(directory: Path) -> None:
    """Makes the directory of a log, for its owner only. ConfigError if it cannot be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as e:
        raise ConfigError(f"audit_log: cannot write in {directory}: {e.strerror}") from e


def about(call: Call, model: str) -> dict[str, Any]:
    """The fields of a line, without the text."""
    firsts = [run.first - call.started for run in call.runs if run.first]
    error = None
    if call.error is not None:
        described = errors.describe(call.error)[1]["error"]
        error = {"type": described["type"], "code": described["code"]}
    return {
        "time": datetime.fromtimestamp(call.started_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "request_id": call.id,
        "key": call.account.name or None,
        "client": call.client,
        "method": call.method,
        "route": call.route,
        "status": call.status,
        "model": model,
        "seconds": round(call.ended - call.started, 6),
        "queue_seconds": round(max((run.queue_seconds for run in call.runs), default=0.0), 6),
        "first_token_seconds": round(min(firsts), 6) if firsts else None,
        "prompt_tokens": call.total("prompt_tokens"),
        "cached_tokens": call.total("cached_tokens"),
        "output_tokens": call.total("output_tokens"),
        "reasoning_tokens": call.total("reasoning_tokens"),
        "tools": [name for run in call.runs for name in run.tools],
        "finish_reasons": [run.finish_reason for run in call.runs],
        "error": error,
    }
