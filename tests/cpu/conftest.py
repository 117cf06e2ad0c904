"""Fixtures of many tests, and what engines under test do not do for themselves: measure what their steps cost, before
the first and at each.

What they measured would decide which steps have drafts, how prompts are cut and which requests are preempted: a busy
machine would run other steps than an idle one, and once in a while a test would find another number of them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perilune.engine.step_times.pacing import Pacer
from perilune.formats.hub import resolve_model
from perilune.kv.worth import Worth
from perilune.speculation.step_cost import Costs, Curve
from perilune.text.tokenizer import Tokenizer
from tests import fake_endpoint
from tests.fake_endpoint import FakeEndpoint

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
    """The same table for every engine, and steps that take what it says, so that each engine drafts alike in every run;
    test_cost_table.py measures one. Prompts beside requests that decode come whole: test_pacing.py cuts them.
    """
    engine = sys.modules.get("perilune.engine.engine")
    if engine is None:
        yield
        return
    build = sys.modules["perilune.engine.build"]

    def measured(runner: Any, config: Any) -> Costs:
        return ALONE if runner.drafter is None else Costs(ALONE.base, ALONE.attention, CHAIN, ALONE.overlapped)

    def interval(plan: Any, before: float, now: float) -> float:
        chain = max(plan.chain, 0) * CHAIN(len(plan.work)) if plan.work else 0.0
        return ALONE.base(max(plan.tokens, 1)) + chain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "measure_costs", measured)
        patch.setattr(engine.Engine, "_interval", staticmethod(interval))
        patch.setattr(build, "Pacer", lambda stretch, most, patience: Pacer(0.0, most, patience))
        yield


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV tiers restore whatever that costs, and count it as free: on a busy machine a model this small is sometimes
    computed sooner."""
    restored = Worth.restored
    monkeypatch.setattr(Worth, "pays", lambda self, tier: True)
    monkeypatch.setattr(Worth, "restored", lambda self, host, disk, seconds: restored(self, host, disk, 0.0))


@pytest.fixture(scope="session")
def path() -> Path:
    """kimi-nano's."""
    return resolve_model("kimi-nano")


@pytest.fixture(scope="session")
def nano() -> Tokenizer:
    return Tokenizer.from_directory(resolve_model("kimi-nano"))


@pytest.fixture(scope="session")
def kimi(kimi_k26: Path) -> Tokenizer:
    return Tokenizer.from_directory(kimi_k26)


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with fake_endpoint.serving() as running:
        yield running


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The machine that runs tests is shared: waiting for a second core costs more than it brings."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
