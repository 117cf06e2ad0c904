"""One server for all tests that only ask it something."""

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    # One thread: on a busy machine two wait for each other, and answers took several times as long.
    # Text alone: what such a server says of pictures is tested with it; test_pictures.py has one that sees.
    running = Server("--set", "threads=1", "--set", "vision=off")
    yield running
    try:
        assert running.process.poll() is None, "the server died:\n" + "".join(running.lines)
        running.stop(signal.SIGTERM)
        assert not any("Traceback" in line for line in running.lines), "".join(running.lines)
    finally:
        running.kill()
