"""What steps cost, measured by an engine that nobody uses yet."""

import math
from pathlib import Path

from perilune.core.config import EngineConfig
from perilune.engine.cost_table import measure_costs
from perilune.engine.engine import Engine
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
            costs = measure_costs(engine.runner, engine.config)
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
