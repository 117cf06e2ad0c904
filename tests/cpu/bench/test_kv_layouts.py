"""`bench decode --kv-shards` says from which context on sharded KV is faster."""

import pytest
from click.testing import CliRunner

from perilune.bench.ranks.kv_layouts import summary
from perilune.cli.bench.decode import command


def rows(*steps: tuple[int, float, float]) -> list[dict[str, object]]:
    return [
        {"batch": 1, "context": context, "kv_layout": layout, "step_ms": ms}
        for context, whole, sharded in steps
        for layout, ms in (("replicated", whole), ("sequence", sharded))
    ]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (((10_000, 2.0, 2.4), (50_000, 3.0, 2.6)), "sharded KV is faster from about 30,000 tokens on"),
        (((10_000, 2.0, 2.4), (50_000, 3.0, 3.0)), "sharded KV is not faster up to 50,000 tokens"),
        (((10_000, 2.0, 1.9),), "sharded KV is faster from 10,000 tokens on, the shortest measured"),
        (((10_000, 2.0, 1.9), (20_000, 2.0, 2.1)), "measure again"),
    ],
)
def test_the_crossover_lies_between_contexts_measured(steps: tuple[tuple[int, float, float], ...], said: str) -> None:
    (line,) = summary(rows(*steps))
    assert said in line and "batch 1" in line


def test_several_turns_count_by_their_median_and_one_layout_says_nothing() -> None:
    assert summary(rows((10, 1.0, 2.0))[:1]) == []
    (line,) = summary([*rows((10, 1.0, 2.0)), *rows((10, 3.0, 2.0)), *rows((10, 9.0, 2.0))])
    assert "10: 3.000 / 2.000" in line


@pytest.mark.parametrize("args", [["--kv-shards", "1,2"], ["--tp", "2", "--kv-shards", "1,2", "--draft", "2"]])
def test_layouts_need_ranks_and_no_drafts(args: list[str]) -> None:
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 2 and "goes with --tp, without --draft, --kernels and --slice" in result.output
