"""What steps cost, measured by an engine that nobody uses yet."""

import math
import os
from pathlib import Path

import pytest

from perilune import LLM, SamplingParams
from perilune.core.config import EngineConfig
from perilune.engine.engine import Engine
from perilune.engine.step_times import cost_table
from perilune.engine.step_times.cost_table import measure_costs, time_steps
from perilune.speculation.step_cost import ONE_REQUEST_TOKENS, STEP_TOKENS
from tests import oracle


def test_an_engine_measures_what_it_can_run(tmp_path: Path) -> None:
    path = oracle.make(tmp_path / "model").path
    for most_requests, most_tokens in ((8, 512), (1, 512), (8, 3)):
        config = EngineConfig(
            device="cpu", threads=1, max_model_len=256, max_num_seqs=most_requests, max_step_tokens=most_tokens
        )
        engine = Engine(path, config)
        try:
            costs = time_steps(engine.runner, engine.config)
        finally:
            engine.close()
        largest = min(most_tokens, 4 * most_requests if most_requests > 1 else ONE_REQUEST_TOKENS)
        assert costs.base.xs == tuple(n for n in STEP_TOKENS if n <= largest)
        assert costs.overlapped is not None and max(costs.overlapped.xs) == min(
            most_requests, most_tokens // 2 * 2 or 1, 8
        )
        for curve in (costs.base, costs.overlapped):
            assert all(0 < y < math.inf for y in curve.ys) and list(curve.ys) == sorted(curve.ys)
        assert costs.draft_token(1) == 0 and min(costs.attention.ys) >= 0


@pytest.mark.parametrize("longest", [2, 5, 9])
def test_an_engine_for_very_short_requests_starts(tiny: Path, longest: int) -> None:
    config = dict(device="cpu", threads=1, max_model_len=longest, draft="suffix")
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    with LLM(tiny, **config) as llm:  # type: ignore[arg-type]
        time_steps(llm._engine.runner, llm.config)  # type: ignore[union-attr]  # also if a kept table was read
        (found,) = llm.generate([7], params)
    assert len(found.token_ids) == longest - 1


def test_a_measured_table_is_kept_for_the_same_engine_only(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = 0

    def count(*args: object) -> object:
        nonlocal measured
        measured += 1
        return time_steps(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cost_table, "time_steps", count)

    def costs(**options: object) -> object:
        engine = Engine(tiny, EngineConfig(device="cpu", threads=1, draft="off", max_step_tokens=4, **options))  # type: ignore[arg-type]
        try:
            return measure_costs(engine.runner, engine.config)
        finally:
            engine.close()

    first = costs(max_model_len=64)
    assert costs(max_model_len=64) == first and measured == 1
    (kept,) = (tmp_path / "perilune" / "costs").glob("*.json")
    costs(max_model_len=32)
    assert measured == 2
    os.utime(kept, (0, 0))  # old
    costs(max_model_len=64)
    assert measured == 3
    kept.write_text("{")
    costs(max_model_len=64)
    assert measured == 4
