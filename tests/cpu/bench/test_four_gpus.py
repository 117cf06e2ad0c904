"""The run on four GPUs: its plan, what it leaves out when it is continued, and its parts on a CPU."""

import dataclasses
import itertools
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError
from perilune.engine import fit
from perilune.engine.engine import Engine
from perilune.plan import memory
from runs.docs import whole_model
from runs.four_gpus import __main__ as script
from runs.four_gpus import over_http, steps
from runs.four_gpus.predictions import predictions
from runs.four_gpus.setting import CPU_SIZES, DECODING, PARTS, SHAPE, STARTS, USUAL, WANTED, Setting
from tests.cpu.bench.test_forecast import decode, prefill
from tests.cpu.conftest import steps_have_a_price as steps_have_a_price

SMALL = dataclasses.replace(CPU_SIZES, prompt=160, short=64, context=300, arrival_seconds=0.2)
ON_CPU = Setting(1, device="cpu", chunk=128, sizes=SMALL)


@pytest.mark.parametrize(("gpus", "layers"), [(4, None), (8, None), (2, 27)])
def test_every_start_fits_the_memory_of_so_many_gpus(gpus: int, layers: int | None) -> None:
    setting = Setting(gpus, layers)
    for start in STARTS:
        config = build(EngineConfig, setting.engine(start))
        with setting.directory() as path:
            wanted = fit.demand(path, config, torch.device("cuda")).demand
        plan = memory.plan(wanted, gpus, script.H200_FREE_BYTES)
        assert plan.fits, f"{start}: {plan.tokens} tokens for {wanted.least}"
        assert start != "sharded" or plan.tokens >= setting.sizes.context


def test_one_memory_plan_for_all_starts() -> None:
    of_layout = {"kv_shards", "kv_blocks", "block_size", "max_num_seqs", "max_model_len", "prompt_patience"}
    of_drafts = {"draft", "draft_tokens", "declared_acceptance", "decode_stretch"}
    plans = [{k: v for k, v in Setting(4).engine(start).items() if k not in of_layout | of_drafts} for start in STARTS]
    assert all(plan == plans[0] for plan in plans) and plans[0]["kv_dtype"] == "fp8"


def test_every_figure_wanted_has_a_part_and_a_prediction(tmp_path: Path) -> None:
    counts, ranks = (1, 4, 16, 64), (2, 4)
    rows = [decode(n, b, 30.0 * b, slice=n) for n, b in itertools.product(ranks, counts)]
    rows += [decode(2, b, 31.0 * b) for b in counts]
    rows.append(decode(1, 1, 99.0, draft=3, drafter="EAGLE-3, fp8", draft_ms=1.4))
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prefill.jsonl").write_text("".join(json.dumps(prefill(n, 20 / n)) + "\n" for n in (1, 2)))
    found = predictions(Setting(4), tmp_path)
    assert set(USUAL) < set(PARTS) and {part for part, _ in WANTED} < set(USUAL)
    for _, figure in WANTED:
        if "p99" not in figure:  # of those there is no model
            assert isinstance(found[figure], float) and found[figure] > 0, figure
    assert found["tokens_per_s of 16"] == pytest.approx(16e3 / (60 * 31 * 0.016 + 0.2 + 0.2), rel=1e-3)
    without = predictions(Setting(4), tmp_path / "none")
    assert "bench decode --shape kimi-k2.5 --slice 4" in str(without["tokens_per_s"])
    assert predictions(ON_CPU, tmp_path) == {}


def test_rows_have_what_was_wanted_of_the_whole_model_alone() -> None:
    row = {"part": "c", "figure": "verify ms at 1024", "measured": 5.5}
    whole = script._with_targets(Setting(4), dict(row), {"verify ms at 1024": 7.2})
    assert (whole["predicted"], whole["wanted"], whole["met"]) == (7.2, 5.4, False)
    assert script._with_targets(Setting(4), row | {"measured": 5.3}, {})["met"]
    assert "wanted" not in script._with_targets(Setting(2, 27), dict(row), {})


def test_parts_with_rows_of_this_commit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.ledger, "circumstances", lambda: {"commit": "now"})
    row = {"bench": "decode", "run": "four-gpus", "tp": 4, "shape": SHAPE, "layers": 61}
    others = [{"part": "c", "commit": "before"}, {"part": "d", "commit": "now", "tp": 8}]
    others += [{"part": "p", "commit": "now", "layers": 27}, {"part": "b", "commit": "now"}]
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(row | other) + "\n" for other in others))
    assert script._measured(Setting(4), tmp_path) == ["b"]


def test_parts_in_an_engine_of_this_process() -> None:
    with ON_CPU.directory() as path:
        engine = Engine(path, build(EngineConfig, ON_CPU.engine("whole")))
        try:
            found = [row for part in "bcpd" for row in steps.rows(engine, ON_CPU, part)]
        finally:
            engine.close()
        longest = Engine(path, build(EngineConfig, ON_CPU.engine("sharded")))
        try:
            found += steps.rows(longest, ON_CPU, "a")
        finally:
            longest.close()
        drafting = Engine(path, build(EngineConfig, ON_CPU.engine("drafting")))
        try:
            (cycle,) = steps.rows(drafting, ON_CPU, "v")
        finally:
            drafting.close()
    figures = {row["figure"] for row in found}
    assert {"tokens_per_s", "verify ms at 64", "prefill ms a layer", "p99 over median of 4"} < figures
    assert all(row["measured"] > 0 and row["prefill_chunk_tokens"] == 128 for row in found)
    verifying = next(row for row in found if row["figure"] == "verify ms at 64")
    assert (verifying["draft"], verifying["part"], verifying["kv_dtype"]) == (3, "c", "fp8")
    assert (found[-1]["context"], found[-1]["decoded_tokens"]) == (300, 4)
    assert (cycle["draft"], cycle["acceptance_length"], cycle["draft_ms"]) == (3, 2.88, None) and cycle["measured"] > 0


def test_a_prompt_with_another_end_has_as_many_words_before_it() -> None:
    text: list[dict[str, Any]] = [{"role": "user", "content": "a" * 900 + "b" * 100}]
    (other,) = over_http._other_end(text)
    assert other["content"].startswith("a" * 900) and "b" * 50 not in other["content"]
    assert len(other["content"]) == 1000


def test_the_pace_of_users_while_prompts_come() -> None:
    row = over_http._pace(64, [0.1, 0.3, 0.2], [0.01] * 99 + [0.05])
    assert (row["ttft_s"], row["p99_over_median"], row["decoding"]) == (0.2, 5.0, DECODING)
    with pytest.raises(script.PeriluneError, match="no user's answer"):
        over_http._pace(64, [0.1], [])


def test_an_unknown_part_says_which_there_are() -> None:
    with pytest.raises(
        ConfigError, match="'z' is no part: give some of f, e, b, c, p, d, a, h, v, separated by commas"
    ):
        script._letters("b, z")


def test_too_few_gpus_are_an_error_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(script.ops_build, "sources", lambda: pytest.fail("kernels are built"))
    monkeypatch.setattr("sys.argv", ["four_gpus", "--part", "b"])
    with pytest.raises(ConfigError, match="4 GPUs are needed and 2 are here"):
        script._all(Setting(4), ["b"], script._arguments())


def test_a_start_whose_time_is_over_leaves_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Started(subprocess.Popen[bytes]):
        """One for which the time is over when it has said what it has started."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout == 1.0 and not (tmp_path / "said").exists():
                time.sleep(0.01)
            return super().wait(0.0 if timeout == 1.0 else timeout)

    monkeypatch.setattr(subprocess, "Popen", Started)
    starts = f"cd {tmp_path}; sleep 200 & echo $! $PYTHONFAULTHANDLER > part; mv part said; wait"
    assert script._run(["sh", "-c", starts], 1.0) == 1
    pid, prints_stacks = (tmp_path / "said").read_text().split()
    assert prints_stacks == "1" and capfd.readouterr().out == "stopped after 1 s, where:\n"
    status, until = Path(f"/proc/{pid}/stat"), time.monotonic() + 60
    while status.exists() and status.read_text().split()[2] != "Z":  # a killed process takes a moment to end
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_page_shows_predictions_beside_what_was_wanted_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_model, "RESULTS", tmp_path)
    assert "Not predicted: no row of: bench decode --shape kimi-k2.5 --slice 4" in whole_model.whole()
    assert whole_model.two() == "No rows yet."
    rows = [decode(n, 1, 240.0 / n, slice=n) for n in (2, 4, 8)] + [decode(2, 1, 124.0)]
    run = {"run": "four-gpus", "figure": "tokens_per_s", "shape": "kimi-k2.5", "step_ms": 1.0, "graph_ms": None}
    rows += [decode(4, 1, 0.0) | run | {"gpus": 4, "layers": 61, "measured": 200.0}]
    rows += [decode(4, 1, 0.0) | run | {"gpus": 4, "layers": 61, "measured": 250.0, "fp8_activations": True}]
    rows += [decode(2, 1, 0.0) | run | {"gpus": 2, "layers": 27, "measured": 500.0}]
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = whole_model.whole().splitlines()
    step, rate = (
        next(line for line in lines if line.startswith(words)) for words in ("| step, 1 request", "| the same, tok")
    )
    _, _, four, wanted, measured, _, eight, _, _ = (cell.strip() for cell in step.split("|"))
    assert (wanted, measured) == ("-", "5.00") and float(eight) < float(four)
    assert [cell.strip() for cell in rate.split("|")][4:6] == ["200", "250"]  # without and with FP8 activations
    assert float(four) == pytest.approx((60 * (64 + 656 * 8976 / 4.3e6) + 200) / 1e3 + 0.2, abs=0.006)
    assert "| step, 1 request at 10,000 tokens, no drafts, ms | 2.00 |" in whole_model.two()
