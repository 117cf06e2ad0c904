"""Rows of the ledger say what was used, not what the machine has."""

import json
import resource
import signal
from pathlib import Path

import pytest
import torch

from perilune.bench import ledger
from perilune.core.errors import ConfigError


@pytest.mark.parametrize(
    ("assignments", "used"), [((), 1), (("threads=3",), 1), (("tp=2",), 2), (("ep=4",), 4), (("tp=auto",), 8)]
)
def test_gpus_are_those_that_were_used(
    monkeypatch: pytest.MonkeyPatch, assignments: tuple[str, ...], used: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    row = ledger.origin("kimi-nano", assignments)
    assert row["gpus"] == used and (row["threads"] == 3) == ("threads=3" in assignments)


def test_gpus_of_several_ranks_without_a_gpu() -> None:
    assert ledger.circumstances(2)["gpus"] == 0 or torch.cuda.is_available()


def test_a_full_disk_leaves_no_half_row(tmp_path: Path) -> None:
    ledger.append([{"bench": "x", "a": 1}], tmp_path)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))  # a write beyond it is short, the next one fails
    try:
        with pytest.raises(ConfigError, match="cannot write the ledger"):
            ledger.append([{"bench": "x", "a": "long" * 10}], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    file = ledger.append([{"bench": "x", "a": 2}], tmp_path)
    assert [json.loads(line)["a"] for line in file.read_text().splitlines()] == [1, 2]
