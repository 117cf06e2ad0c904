"""`bench decode` and `bench prefill` over ranks, on the CPU: every row says on how many, and how they exchanged."""

import json

import pytest
from click.testing import CliRunner

from perilune.cli.bench import decode, prefill
from tests.cpu.conftest import steps_have_a_price as steps_have_a_price

SHAPE = ["--shape", "tiny", "--layers", "4", "--device", "cpu"]


@pytest.mark.parametrize("ranks", [["--tp", "2"], ["--ep", "2"], ["--tp", "4"]], ids=" ".join)
def test_rows_of_ranks(ranks: list[str]) -> None:
    for command, more in ((decode.command, ["--batch", "2", "--context", "70"]), (prefill.command, ["--tokens", "90"])):
        result = CliRunner().invoke(command, [*SHAPE, *ranks, *more])
        assert result.exit_code == 0, result.output
        row = json.loads(result.output.splitlines()[-1])
        tp = int(ranks[1])
        assert (row["tp"], row["ep"], row["exchange"]) == (tp, tp if "--ep" in ranks else 1, "gloo")


def test_a_checkpoint_with_whole_experts_on_ranks() -> None:
    more = ["kimi-nano", "--ep", "2", "--batch", "1", "--context", "32", "--tokens", "8", "--device", "cpu"]
    row = json.loads(CliRunner().invoke(decode.command, more).output.splitlines()[-1])
    assert (row["tp"], row["ep"]) == (2, 2) and row["order_send_us"] > 0
