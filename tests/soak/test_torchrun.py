"""A verb that torchrun starts, as users of PyTorch start programs of several processes."""

import subprocess
import sys

import pytest

from tests.e2e.server import needs_nano

pytestmark = [needs_nano, pytest.mark.timeout(0)]


def generate(ranks: int) -> "subprocess.CompletedProcess[str]":
    options = ["--max-tokens", "6", "--device", "cpu", "--draft", "off", "--set", "max_model_len=256", "-p", "Hello"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "-m", "perilune.cli.main", "generate", "kimi-nano", "--temperature", "0", "--no-thinking"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=180)


def test_torchrun_gives_one_answer() -> None:
    found = generate(2)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() and found.stdout.count("\n") == 1, "of one process"


def test_torchrun_says_how_many_ranks() -> None:
    found = generate(3)
    assert found.returncode != 0 and "heads cannot be shared out evenly" in found.stderr, found.stderr
