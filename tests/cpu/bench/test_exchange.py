"""`perilune bench exchange` and `bench decode --slice` where there are no GPUs: one line says what is missing."""

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from perilune.bench.ranks import orders
from perilune.bench.ranks.exchange import _outputs
from perilune.cli.bench import decode, exchange
from perilune.core.errors import ConfigError, EngineError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_asks_for_a_gpu_for_every_rank() -> None:
    result = CliRunner().invoke(exchange.command, ["--tp", "4"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "bench exchange runs one rank per GPU: 4 are asked for, torch sees 0"


def test_ranks_are_2_4_or_8() -> None:
    result = CliRunner().invoke(exchange.command, ["--tp", "3"])
    assert isinstance(result.exception, ConfigError) and "must be one of 2, 4, 8, not 3" in str(result.exception)


def test_a_slice_goes_with_a_shape_alone() -> None:
    for more in ([], ["--shape", "kimi-k2.5", "--draft", "2", "--accepted", "2"]):
        result = CliRunner().invoke(decode.command, ["--slice", "2", *more])
        assert result.exit_code == 2 and "goes with --shape, and without --draft" in result.output


def test_a_shape_over_ranks_goes_without_drafts_and_has_layers_to_compare() -> None:
    shape = ["--shape", "tiny", "--tp", "2", "--device", "cpu"]
    for more in (["--draft", "2", "--accepted", "2"], ["--slice", "2"]):
        result = CliRunner().invoke(decode.command, [*shape, *more])
        assert result.exit_code == 2 and "goes without --draft and --slice" in result.output
    result = CliRunner().invoke(decode.command, [*shape, "--kernels"])
    assert isinstance(result.exception, ConfigError) and "there is none here" in str(result.exception)
    result = CliRunner().invoke(decode.command, [*shape, "--layers", "2"])
    assert isinstance(result.exception, ConfigError) and "layers must be at least 3, not 2" in str(result.exception)


def test_sending_a_step_is_timed_with_processes_that_read_it() -> None:
    lines: list[str] = []
    (row,) = orders.measure(3, [2], lines.append, polling=False)
    assert 0 < row["read_us"] < row["arrive_us"] and 0 < row["send_us"] and row["tp"] == 3
    assert lines[0].startswith("3 ranks, batch   2: rank 0 encodes and sends a step in")


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    waits, fails = "import time; time.sleep(600)", "raise ValueError('no link')"
    with pytest.raises(EngineError, match="rank 1 failed: ValueError: no link"):
        _outputs([[sys.executable, "-c", script] for script in (waits, fails)], tmp_path)


def test_rank_0_gives_the_rows(tmp_path: Path) -> None:
    assert _outputs([[sys.executable, "-c", f"print({r})"] for r in range(3)], tmp_path) == "0\n"
