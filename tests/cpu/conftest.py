"""What engines under test do not do for themselves: measure what their steps cost, for seconds each, and give prompts
the time that these steps leave, so that what a step computes never depends on the load of the machine."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from perilune.engine.step_times.pacing import Pacer
from perilune.speculation.step_cost import Costs, Curve

ALONE = Costs(  # kimi-nano's on two cores, once
    base=Curve(
        (1, 2, 3, 4, 6, 9, 16, 32, 64), (7.9e-3, 9.2e-3, 9.8e-3, 10.1e-3, 11e-3, 14e-3, 18.7e-3, 31.6e-3, 48.8e-3)
    ),
    attention=Curve((1, 4, 9), (2.4e-6, 3.8e-6, 19e-6)),
    overlapped=Curve((1, 2, 4, 8, 16, 32), (7.2e-3, 8.8e-3, 10e-3, 14e-3, 18e-3, 31e-3)),
)
CHAIN = Curve((1, 8), (1.2e-3, 2.4e-3))


@pytest.fixture(scope="session", autouse=True)
def steps_have_a_price() -> Iterator[None]:
    """The same table for every engine, so that it drafts alike in every run; test_cost_table.py measures one."""
    engine = sys.modules.get("perilune.engine.engine")
    if engine is None:
        yield
        return

    def measured(runner: Any, config: Any) -> Costs:
        return ALONE if runner.drafter is None else Costs(ALONE.base, ALONE.attention, CHAIN, ALONE.overlapped)

    def unpaced(stretch: float, max_step_tokens: int, patience_seconds: float) -> Pacer:
        return Pacer(0, max_step_tokens, patience_seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "measure_costs", measured)
        patch.setattr("perilune.engine.build.Pacer", unpaced)
        yield
