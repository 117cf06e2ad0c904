"""Rows of the ledger say what was used, not what the machine has."""

import pytest
import torch

from perilune.bench import ledger


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
