"""Part d of the run on four GPUs, on a clock that steps advance by their times there."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perilune.core.messages import Delta, Submit
from perilune.engine.engine import Engine
from perilune.engine.step_times.pacing import Pacer
from runs import prompt_arrivals
from runs.four_gpus.setting import PATIENCE_SECONDS, Sizes
from runs.four_gpus.steps import ARRIVAL_EVERY_SECONDS

# Seconds of steps of 61 layers on four H200s, measured on 30 November.
DECODE_SECONDS = {16: 0.01464, 64: 0.03444}
PROMPT_SECONDS = 0.482
DELAYED_SECONDS = 0.0934  # a step that was delayed for another reason
CHUNK, VOCAB = 10_240, 163_840


class Paced:
    """A simulated engine with the real pacer. The first decode step after each time of `delayed` (seconds)
    takes DELAYED_SECONDS."""

    info = SimpleNamespace(max_model_len=20_000)
    busy = False

    def __init__(self, *delayed: float) -> None:
        self.now = 0.0
        self._delayed = sorted(delayed)
        self._decoding: list[int] = []
        self._prompts: list[tuple[int, int, float]] = []  # (rid, tokens, time of submission)
        self._pacer = Pacer(2.0, CHUNK, PATIENCE_SECONDS)
        for tokens, seconds in ((256, 0.090), (1024, 0.094), (4096, 0.205), (CHUNK, 0.492)):
            self._pacer.times.record(tokens, seconds)

    def submit(self, request: Submit) -> None:
        if request.params.max_tokens == 1:
            self._prompts.append((request.rid, len(request.prompt), self.now))
        else:
            self._decoding.append(request.rid)

    def cancel(self, rid: int) -> None:
        pass

    def step(self) -> list[Delta]:
        count, computed = len(self._decoding), 0
        rids = list(self._decoding)
        waiting = [(tokens, tokens, self.now - since) for _, tokens, since in self._prompts]
        if waiting and self._pacer.prompt_tokens(count, waiting) >= waiting[0][0]:
            rid, computed, _ = self._prompts.pop(0)
            rids.append(rid)
            self._pacer.planned(count + computed, count)
        seconds = PROMPT_SECONDS if computed else DECODE_SECONDS[count]
        if not computed and self._delayed and self.now >= self._delayed[0]:
            seconds = DELAYED_SECONDS
            self._delayed.pop(0)
        self.now += seconds
        self._pacer.record(count + computed, count, computed, seconds)
        return [Delta(rid, (7,)) for rid in rids]


def played(monkeypatch: pytest.MonkeyPatch, decoding: int, *delayed: float) -> dict[str, Any]:
    engine = Paced(*delayed)
    monkeypatch.setattr(prompt_arrivals, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    sizes, every = Sizes(), ARRIVAL_EVERY_SECONDS
    return prompt_arrivals.played(cast(Engine, engine), decoding, sizes.prompt, every, sizes.arrival_seconds, VOCAB)


@pytest.mark.parametrize("delayed", [(), (0.5,), (4.7,), (8.5,), (1.0, 5.0, 9.0)])
def test_few_delayed_steps_do_not_decide_the_p99_of_part_d(
    delayed: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = played(monkeypatch, 16, *delayed)
    assert found["p99_over_median"] <= 2.0 and (found["prompts"], found["prompts_left"]) == (5, 0)
    assert found["long_share"] == pytest.approx(16 * (5 + len(delayed)) / found["intervals"])
    assert math.isclose(found["interval_max_ms"], 1e3 * PROMPT_SECONDS)
    assert math.isclose(found["busy_p99_ms"], 1e3 * PROMPT_SECONDS)
    assert math.isclose(found["quiet_median_ms"], 1e3 * DECODE_SECONDS[16])


def test_prompts_are_computed_beside_64_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = played(monkeypatch, 64)
    assert found["p99_over_median"] <= 2.0 and found["prompts"] > 0
