"""Batches through real processes: a server that is killed in the middle, and the program of docs/operations.md."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.server import Server, needs_nano

pytestmark = needs_nano
LINES = 120
SCRIPTED = [sys.executable, "-m", "tests.scripted_engine", "--answer-tokens", "4", "--max-num-seqs", "4"]
SERVE = [*SCRIPTED, "serve", "kimi-nano", "--port", "0"]
# The batch takes 36 s, of which less than 3 are needed: it must not end before the server is killed.
SLOW = [*SCRIPTED, "--step-ms", "150", "serve", "kimi-nano", "--port", "0"]
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def requests(count: int) -> bytes:
    lines = [
        {
            "custom_id": f"q{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Number {i}"}]},
        }
        for i in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_a_batch_survives_a_server_that_is_killed(tmp_path: Path) -> None:
    options = ("--files-dir", str(tmp_path / "files"))
    running = Server(*options, command=SLOW)
    try:
        client = running.openai
        asked = client.files.create(file=("asked.jsonl", requests(LINES)), purpose="batch")
        batch = client.batches.create(input_file_id=asked.id, endpoint="/v1/chat/completions", completion_window="24h")
        while client.batches.retrieve(batch.id).request_counts.completed < 5:
            time.sleep(0.01)
        client.chat.completions.create(model="kimi-nano", messages=[{"role": "user", "content": "Hi"}])
        assert client.batches.retrieve(batch.id).status == "in_progress", "a request waited for the batch"
        background = client.responses.create(model="kimi-nano", input="Hi", background=True)
        while (background := client.responses.retrieve(background.id)).status in ("queued", "in_progress"):
            time.sleep(0.01)
        assert background.status == "completed" and background.output
    finally:
        running.kill()
    (output,) = (tmp_path / "files").glob("key-/batch_*.output")
    assert 0 < output.read_bytes().count(b"\n") < LINES
    running = Server(*options, command=SERVE)
    try:
        client = running.openai
        while (batch := client.batches.retrieve(batch.id)).status == "in_progress":
            time.sleep(0.05)
        assert batch.status == "completed" and batch.output_file_id is not None, batch
        found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(f["custom_id"] for f in found) == sorted(f"q{i}" for i in range(LINES))
        assert all(f["response"]["body"]["choices"][0]["message"] for f in found)
    finally:
        running.kill()


def test_the_program_of_the_page_works(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(import time, openai.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "requests.jsonl").write_bytes(requests(3))
    running = Server("--files-dir", str(tmp_path / "files"), command=SERVE)
    try:
        program = program.replace("http://127.0.0.1:8000", running.url).replace("sleep(60)", "sleep(0.1)")
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert {json.loads(line)["custom_id"] for line in done.stdout.splitlines() if line} == {"q0", "q1", "q2"}
    finally:
        running.kill()


@pytest.mark.parametrize("bad", ["a file", "another server's"])
def test_a_directory_that_cannot_be_used_is_refused_at_once(tmp_path: Path, bad: str) -> None:
    directory = tmp_path / "files"
    options = ["--files-dir", str(directory)]
    running = None
    if bad == "a file":
        directory.write_text("")
    else:
        running = Server(*options, command=SERVE)
    try:
        done = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert "files_dir: " in done.stderr.splitlines()[-1] and str(directory) in done.stderr.replace("\n", "")
    finally:
        if running is not None:
            running.kill()
