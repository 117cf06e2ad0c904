"""The verbs that serve a model for the occasion, as users run them: the bundled model behind real HTTP."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from tests.e2e.server import needs_nano

pytestmark = needs_nano


def run(*args: str, text: str | None = None, mark: str = "") -> tuple[Any, str]:
    """(the JSON of the last line of output, standard error) of a verb. `mark`: in the environment of its processes."""
    command = [sys.executable, "-m", "perilune.cli.main", *args, "--set", "threads=1", "--draft", "off"]
    env = {**os.environ, "MARK": mark}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, input=text, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if text is None else done.stdout, done.stderr


def processes(mark: str) -> list[str]:
    """Running commands with `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if mark.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
    return found


def test_evaluate_and_its_server_end_together() -> None:
    mark = uuid.uuid4().hex
    last, _ = run("evaluate", "--count", "4", "--families", "add_sub", "--thinking", "off", "--max-tokens", "64",
                  "--max-model-len", "1500", mark=mark)  # fmt: skip
    assert [(r["split"], r["n"], r["errors"], r["server"]) for r in last["rows"]] == [
        ("heldout", 2, 0, "private"),
        ("structural", 2, 0, "private"),
    ]
    assert all(r["model"] == "kimi-nano" and r["mean_tokens"] > 1 for r in last["rows"])
    assert processes(mark) == []


def test_the_aa_protocol_fits_the_prompt_to_the_model() -> None:
    row, said = run("bench", "aa", "--runs", "1", "--parallel", "2", "--output-tokens", "40", "--max-model-len", "256")
    assert "the prompt is 184 tokens instead of 10000" in said
    assert row["samples"] == 2 and row["ignore_eos"] is True and row["output_tokens"] == 40
    assert 0.95 * 184 <= row["prompt_tokens"] <= 184 and row["token_count"] == "server"
    assert 0 < row["ttft_s"] and row["output_tokens_per_s"] > 0


def test_chat_reads_a_pipe() -> None:
    shown, errors = run("chat", "--temperature", "0", text="What is 2 + 3?\n/think off\nhello\n")
    assert "= 5" in shown
    assert shown.count("tok/s]") == 2 and "thinking is off" in shown and "error" not in errors
