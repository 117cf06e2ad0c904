"""Shared by all tests: where the test data is, and a checkpoint."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

# One thread each, here and in the servers that tests start: the tensors are tiny, and threads that wait for each other
# on a shared machine cost far more than they bring. Before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs tests in the background makes them ignore Ctrl-C, and processes that they start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: one that fails once in a hundred runs stops other people's work. To search for more:
# pytest --hypothesis-profile default.
with contextlib.suppress(ImportError):  # not where the tests of GPUs run
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, deadline=None)
    settings.load_profile("same")

DATA = Path(os.environ.get("PERILUNE_TEST_DATA", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session")
def kimi_k26() -> Path:
    """The directory with Kimi K2.6's real config, vocabulary and tokenizer config."""
    path = DATA / "kimi-k2.6"
    if not (path / "tiktoken.model").is_file():
        pytest.skip(f"the real vocabulary is not at {path} (set PERILUNE_TEST_DATA)")
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of random weights, for everybody to read."""
    from tests import oracle  # torch, which many tests do without

    return oracle.make(tmp_path_factory.mktemp("tiny") / "model").path
