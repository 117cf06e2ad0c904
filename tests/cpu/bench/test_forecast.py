"""Steps of a whole model on several GPUs, predicted from rows of a few layers."""

from typing import Any

import pytest

from perilune.bench.forecast import Forecast
from perilune.core.errors import ConfigError

KV_BYTES = 656


def decode(tp: int, batch: int, us: float, **more: Any) -> dict[str, Any]:
    return {
        "shape": "kimi-k2.5", "layers": 9, "tp": tp, "batch": batch, "context": 1024, "rest_dtype": "fp8",
        "expert_format": "int4-compact", "us_per_layer": us, "outside_us": 200.0, "step_ms": 1.2, "graph_ms": 1.0,
        "commit": "one", **more,
    }  # fmt: skip


def prefill(tp: int, ms: float, tokens: int = 10_000, **more: Any) -> dict[str, Any]:
    row = {"shape": "kimi-k2.5", "layers": 9, "tp": tp, "tokens": tokens, "ms_per_layer": ms, "step_ms": 9 * ms}
    return row | {"rest_dtype": "fp8", "commit": "one", **more}


SLICES = [decode(n, 1, us, slice=n) for n, us in ((2, 60.0), (4, 40.0), (8, 30.0))]
REAL = decode(2, 1, 66.0, outside_us=230.0)


def test_a_step_is_a_slice_and_what_two_real_ranks_take_more() -> None:
    step = Forecast([*SLICES, REAL], [], 4).step(1, 1024, KV_BYTES)
    assert step.us_per_layer == pytest.approx(46.0)
    assert step.graph_ms == pytest.approx((60 * 46.0 + 230.0) / 1e3)
    assert step.ms == pytest.approx(step.graph_ms + 0.2)  # what two ranks need between two graphs
    longer = Forecast([*SLICES, REAL], [], 4).step(1, 1024 + 43_000, KV_BYTES)
    assert longer.us_per_layer == pytest.approx(46.0 + 43_000 * KV_BYTES / 4.3e6)


def test_real_ranks_count_before_slices_and_the_most_before_fewer() -> None:
    rows = [*SLICES, REAL, decode(4, 1, 41.0, outside_us=210.0)]
    step = Forecast(rows, [], 4).step(1, 1024, KV_BYTES)
    assert (step.us_per_layer, step.outside_us) == (pytest.approx(41.0), pytest.approx(210.0))
    of_8 = Forecast(rows, [], 8).step(1, 1024, KV_BYTES)
    assert (of_8.us_per_layer, of_8.outside_us) == (pytest.approx(30.0 + 41.0 - 40.0), pytest.approx(210.0))
    deep = [*rows, decode(4, 1, 55.0, slice=4, context=10_000), decode(4, 1, 57.0, context=10_000)]
    same = Forecast(deep, [], 8).step(1, 10_000, KV_BYTES)  # there is no slice of eight at 10,000 tokens
    assert same.us_per_layer == pytest.approx(of_8.us_per_layer + (10_000 - 1024) * KV_BYTES / 4.3e6)


def test_a_row_of_one_depth_counts_without_what_is_outside_its_layers() -> None:
    whole = decode(2, 1, 0.0, layers=27, step_ms=2.0, graph_ms=1.8)
    del whole["us_per_layer"], whole["outside_us"]
    step = Forecast([*SLICES, whole], [], 8).step(1, 1024, KV_BYTES)
    assert step.us_per_layer == pytest.approx(30.0 + (1800 - 200) / 26 - 60.0)


def test_steps_that_verify_drafts_count_by_their_tokens_and_the_newest_commit_by_its_median() -> None:
    slices = [decode(n, 4, us, slice=n) for n, us in ((2, 150.0), (4, 100.0))]
    newer = [decode(2, 1, us, draft=3, step_ms=us / 100, graph_ms=us / 100, commit="two") for us in (170, 160, 180)]
    step = Forecast([*slices, decode(2, 4, 900.0), *newer], [], 4).step(4, 1024, KV_BYTES)
    assert step.us_per_layer == pytest.approx(100 + 170 - 150)


def test_drafting_from_one_rank_and_two() -> None:
    alone = decode(1, 1, 0.0, draft=3, draft_ms=1.4, drafter="EAGLE, fp8")
    assert Forecast([alone], [], 4).draft_ms(3) == pytest.approx(1.4)
    assert Forecast([alone, decode(2, 1, 0.0, draft=3, draft_ms=0.9)], [], 4).draft_ms(3) == pytest.approx(0.65)


def test_prompts_from_one_rank_and_two() -> None:
    forecast = Forecast([], [prefill(1, 20.0), prefill(2, 11.0), prefill(1, 4.0, 1000), prefill(2, 3.0, 1000)], 4)
    assert forecast.prompt_ms(10_000) == pytest.approx(61 * (18 / 4 + 2))
    assert forecast.prompt_ms(1_000) == pytest.approx(61 * (2 / 4 + 2))
    assert forecast.prompt_ms(2_000) == pytest.approx(
        forecast.prompt_ms(1_000) * 8 / 9 + forecast.prompt_ms(10_000) / 9
    )
    fewer = Forecast([], [prefill(1, 20.0), prefill(2, 11.0), prefill(1, 4.0, 1000)], 4)  # two ranks: only the long one
    assert fewer.prompt_ms(1_000) == pytest.approx(61 * 4 * (18 / 4 + 2) / 20)
    assert forecast.prompt_ms(2_000, 8_000) < forecast.prompt_ms(10_000) < forecast.prompt_ms(10_000, 90_000)


def test_what_is_predicted_is_no_row_of_it_and_a_missing_row_names_its_command() -> None:
    whole = decode(2, 1, 66.0, layers=61)
    with pytest.raises(ConfigError, match=r"bench decode --shape kimi-k2\.5 --tp 2 --batch 1"):
        Forecast([*SLICES, whole], [], 4).step(1, 1024, KV_BYTES)
    other = [row | {"expert_format": "int4-g32"} for row in SLICES]
    assert Forecast([*other, REAL], [], 4).step(1, 1024, KV_BYTES).us_per_layer == pytest.approx(46.0)
    with pytest.raises(ConfigError, match="--slice 4 --batch 16"):
        Forecast([*SLICES, REAL], [], 4).step(16, 1024, KV_BYTES)
    with pytest.raises(ConfigError, match="--tp 2 and without"):
        Forecast([], [prefill(1, 20.0)], 4).prompt_ms(10_000)
    with pytest.raises(ConfigError, match="--tp 2 and without"):
        Forecast([], [prefill(1, 20.0), prefill(2, 11.0, rest_dtype="bfloat16")], 4).prompt_ms(10_000)
    narrow = [prefill(n, 20.0 / n) for n in (1, 2)] + [prefill(n, 99.0, rest_dtype="bf16") for n in (1, 2)]
    assert Forecast([], narrow, 4).prompt_ms(10_000) == pytest.approx(61 * 5)
    of_one = [prefill(1, 20.0, rest_dtype="bf16"), prefill(2, 10.0)]
    assert Forecast([], of_one, 4).prompt_ms(10_000) == pytest.approx(61 * 5)
    with pytest.raises(ConfigError, match="--draft 3"):
        Forecast([], [], 4).draft_ms(3)
