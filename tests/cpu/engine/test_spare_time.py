"""When the next step is planned: a simulation of a device and its host, and the engine's part."""

import random
import statistics

import pytest

from perilune.core.config import EngineConfig, build
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.engine.step_times import spare
from perilune.engine.step_times.spare import SpareTime
from perilune.formats.hub import resolve_model

CYCLE = 0.0223  # 8 users with 3 drafts on four H200s, measured
PLANNING = 0.001  # seconds of the host for a step


def played(late: bool, handed: float = 0.0003) -> tuple[float, float]:
    """(mean seconds that a prompt waits for steps before its own, in cycles; share of time in which the device idles).
    handed: seconds until other ranks have launched a step."""
    rng, time = random.Random(1), SpareTime()
    now = result = idle = 0.0
    ends, waits, coming = CYCLE, list[float](), None
    for step in range(20_000):
        if step % 100 == 50:
            coming = now + rng.uniform(0, CYCLE)
        begin = max(result + late * time.seconds((8, 32)), now)
        if coming is not None and coming < begin:  # it interrupts the waiting: only the running step is before it
            waits.append(ends - coming)
            begin, coming = max(coming, now), None
        launched = begin + PLANNING + handed
        idle += max(launched - ends, 0.0)
        time.record((8, 32), begin - result + max(ends - begin - PLANNING, 0.0))
        result = now = max(ends, begin + PLANNING)
        ends = max(launched, ends) + CYCLE * rng.uniform(0.98, 1.04)
    return statistics.mean(waits) / CYCLE, idle / ends


def test_a_prompt_waits_for_one_step_less_and_the_device_does_not_idle() -> None:
    wait, idle = played(True)
    assert played(False)[0] > 1.3 and wait < 0.8 and idle < 1e-4


def test_a_launch_that_is_late_does_not_make_the_next_one_later() -> None:
    """Other ranks launch 6 ms after this one: the device idles for 1 ms a step, and not longer and longer."""
    assert 0.02 < played(True, handed=0.006)[1] < 0.08


def test_only_steps_of_one_size_that_take_long_are_waited_for() -> None:
    time = SpareTime()
    for _ in range(spare.SEEN_STEPS):
        assert time.seconds((8, 32)) == 0.0
        time.record((8, 32), 0.02)
    assert time.seconds((8, 32)) == pytest.approx(0.02 - spare.MARGIN_SECONDS)
    assert time.seconds((9, 36)) == time.seconds(None) == 0.0
    time.record((8, 32), 0.5 * spare.FEWEST_SECONDS)
    assert time.seconds((8, 32)) == 0.0


def test_an_engine_has_time_while_requests_decode_and_none_beside_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "FEWEST_SECONDS", 0.0)
    monkeypatch.setattr(spare, "MARGIN_SECONDS", -1.0)  # as if steps took a second longer than they do
    engine = Engine(resolve_model("kimi-nano"), build(EngineConfig, {"draft": "off", "max_num_seqs": 4}))
    try:
        engine.submit(Submit(1, (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
        for _ in range(12):
            engine.step()
        assert engine.spare_seconds == 0.0  # on a CPU
        engine._plans_late = True
        assert 0.0 < engine.spare_seconds < 2.0
        engine.submit(Submit(2, tuple(range(1, 30)), SamplingParams(temperature=0.0, max_tokens=2)))
        engine.step()
        assert engine.spare_seconds == 0.0
    finally:
        engine.close()
