"""Ten minutes of requests made from /openapi.json, with sequences of them, to a server that asks for a key."""

from pathlib import Path

import pytest

from tests.e2e.server import Server, needs_nano
from tests.e2e.test_description import SERVE, fuzz

pytestmark = [needs_nano, pytest.mark.timeout(0)]
SECONDS = 600


def test_ten_minutes_of_requests_made_from_the_description(tmp_path: Path, share: float) -> None:
    key = tmp_path / "key"
    key.write_text("sesame")
    key.chmod(0o600)
    running = Server("--files-dir", str(tmp_path / "files"), "--api-key-file", str(key), command=SERVE)
    try:
        options = (
            "--max-time",
            str(max(int(SECONDS * share), 30)),
            "--phases",
            "examples,coverage,fuzzing,stateful",
            "--header",
            "Authorization: Bearer sesame",
        )
        cases = fuzz(running.url, tmp_path, *options)
        print(f"{cases} requests made from the description, each answered as described")
        assert running.process.poll() is None and not any("Traceback" in line for line in running.lines)
    finally:
        running.kill()
