"""Requests made from /openapi.json by schemathesis, right and wrong ones, to a server around the scripted engine."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.server.description.operation import OPERATIONS
from tests.e2e.server import Server, needs_nano

pytest.importorskip("schemathesis", reason="part of the test extra: pip install -e '.[test]'")
pytestmark = needs_nano
SCRIPTED = [sys.executable, "-m", "tests.scripted_engine", "--answer-tokens", "2"]
SERVE = [*SCRIPTED, "serve", "kimi-nano", "--port", "0"]
# The rest is checked: no 5xx; statuses, types, headers and schemas of answers as described; what the document does not
# allow is refused; other methods are 405 and say which are allowed; no access without a key.
# Left out: that all a schema allows is accepted. No schema has rules over several fields (top_logprobs needs logprobs).
UNCHECKED = "positive_data_acceptance"
# A number of cases, not of seconds: a busy machine ended 8 s before each operation had its turn. All 6,351 cases of the
# coverage phase take 20 s of CPU: tests/soak runs these.
OPTIONS = ("--phases", "examples,fuzzing", "--max-examples", "5")
LEAST_CASES = 100


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Server]:
    running = Server("--files-dir", str(tmp_path / "files"), command=SERVE)
    try:
        yield running
        assert running.process.poll() is None, "".join(running.lines[-20:])
        assert not any("Traceback" in line for line in running.lines), "".join(running.lines[-50:])
    finally:
        running.kill()


def fuzz(url: str, where: Path, *options: str) -> int:
    """Cases that were sent; the test fails with the report if one was not answered as described."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--seed", "26", "--no-color"]
    command += ["--exclude-checks", UNCHECKED, "--continue-on-failure", "--no-shrink"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=where)
    assert done.returncode == 0, done.stdout[-20_000:]
    tested, cases = re.search(r"Tested: (\d+)", done.stdout), re.search(r"(\d+) generated", done.stdout)
    assert tested and cases and int(tested[1]) == len(OPERATIONS) - 1, done.stdout  # all but that of the document
    return int(cases[1])


def test_requests_made_from_the_description(scripted: Server, tmp_path: Path) -> None:
    assert fuzz(scripted.url, tmp_path, *OPTIONS) >= LEAST_CASES
