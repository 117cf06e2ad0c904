"""Prompt tokens beside requests that decode: a simulation with measured step times, and the scheduler's part."""

import itertools
import math
import random
import statistics
from dataclasses import dataclass

import pytest

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Output, StepPlan, StepResult
from perilune.engine.scheduler import Scheduler
from perilune.engine.step_times import pacing
from perilune.engine.step_times.pacing import Pacer, StepTimes

# Tokens of a step and us of a layer of Kimi K2.5 on one H200 (docs/speed.md), steps of up to 64 tokens decoding.
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1000, 2000, 4000, 10_000)
MICROSECONDS = (131, 280, 774, 1881, 2500, 2800, 3700, 4200, 5600, 8900, 20_500)
LAYERS, WHOLE, PROMPT = 15, 8192, 10_000


def seconds(tokens: int) -> float:
    at = next(i for i in range(len(TOKENS) - 1) if tokens <= TOKENS[i + 1])
    share = math.log(tokens / TOKENS[at]) / math.log(TOKENS[at + 1] / TOKENS[at])
    return LAYERS * 1e-6 * MICROSECONDS[at] * (MICROSECONDS[at + 1] / MICROSECONDS[at]) ** share


@dataclass
class Played:
    median: float
    p99: float
    first_token: float  # median
    left: int  # prompts that were not complete at the end


def play(stretch: float, decoding: int, every_seconds: float, prompt: int = PROMPT, until: float = 60.0) -> Played:
    """`decoding` requests decode throughout; prompts come at random, one `every_seconds` on average."""
    rng = random.Random(3)
    pacer = Pacer(stretch, WHOLE)
    for tokens in (256, 1024, 4096, WHOLE):
        pacer.times.record(tokens, seconds(tokens))
    now, coming = 0.0, 2.0
    waiting: list[list[float]] = []  # [when it came, tokens left]
    intervals, first_tokens = [], []
    while now < until:
        while coming <= now:
            waiting.append([coming, prompt])
            coming += rng.expovariate(1 / every_seconds)
        left = pacer.prompt_tokens(decoding, now - waiting[0][0]) if waiting else 0
        chunk = 0
        for one in waiting:
            part = int(min(one[1], left - chunk))
            one[1] -= part
            chunk += part
        took = seconds(decoding + chunk) * rng.uniform(0.98, 1.04)
        now += took
        intervals.append(took)
        pacer.record(decoding + chunk, decoding, took)
        first_tokens += [now - came for came, rest in waiting if not rest]
        waiting = [one for one in waiting if one[1]]
    intervals.sort()
    return Played(statistics.median(intervals), intervals[int(0.99 * len(intervals))],
                  statistics.median(first_tokens), len(waiting))  # fmt: skip


@pytest.mark.parametrize("decoding, every", [(8, 10.0), (8, 3.0), (16, 10.0), (16, 3.0), (64, 10.0), (64, 3.0)])
def test_99_of_100_intervals_keep_the_bound(decoding: int, every: float) -> None:
    paced = play(2.0, decoding, every)
    assert paced.p99 <= 2.0 * paced.median
    assert paced.left <= 1


def test_what_the_bound_costs() -> None:
    """64 requests, a prompt every 3 s."""
    paced, whole = play(2.0, 64, 3.0), play(0, 64, 3.0)
    assert whole.p99 > 8 * whole.median and paced.p99 <= 2 * paced.median
    assert whole.first_token < 0.5 and paced.first_token < 2.0


def test_short_prompts_wait_for_long_steps_where_small_parts_are_dear() -> None:
    """8 requests, a prompt of 1,000 tokens every 0.5 s: the prompts share long steps."""
    paced, whole = play(2.0, 8, 0.5, 1000), play(0, 8, 0.5, 1000)
    assert whole.p99 > 8 * whole.median
    assert paced.p99 < 1.2 * paced.median and paced.first_token < 1.0


def test_under_too_much_load_prompts_are_not_starved() -> None:
    """8 requests, a prompt of 10,000 tokens every second: 30 % of the time at least, so no p99 is kept."""
    paced = play(2.0, 8, 1.0)
    assert paced.first_token < 2 * pacing.PATIENCE_SECONDS and paced.left < 10


def test_no_bound_before_there_is_a_median_or_beside_no_request() -> None:
    pacer = Pacer(2.0, WHOLE)
    assert pacer.prompt_tokens(0, 0.0) == WHOLE
    assert pacer.prompt_tokens(8, 0.0) == WHOLE - 8
    for _ in range(600):
        pacer.record(8, 8, 0.01)
    assert pacer.prompt_tokens(0, 0.0) == WHOLE
    assert Pacer(0, WHOLE).prompt_tokens(WHOLE, 0.0) == 1


def test_few_steps_are_long_and_none_is_planned_twice_before_it_is_known() -> None:
    pacer = Pacer(2.0, WHOLE)
    for _ in range(200):
        pacer.record(8, 8, 0.01)
    pacer.times.record(WHOLE, 1.0)
    granted = [pacer.prompt_tokens(8, 0.0) for _ in range(10)]
    assert granted[:2] == [WHOLE - 8] * 2 and set(granted[2:]) <= {0}
    for _ in range(20):
        pacer.record(WHOLE, 8, 1.0)
    assert pacer.prompt_tokens(8, 0.0) == 0
    assert pacer.prompt_tokens(8, pacing.PATIENCE_SECONDS + 1) == WHOLE - 8


def test_times_between_known_sizes_are_powers() -> None:
    times = StepTimes()
    assert times.tokens(1.0, WHOLE) == 0
    for tokens in (1, 16, 256, 4096):
        times.record(tokens, 0.001 * tokens**0.5)
    for tokens in (2, 16, 100, 1000, 4096):
        assert abs(times.tokens(0.001 * tokens**0.5, WHOLE) - tokens) <= 1
    assert times.tokens(0.128, 100_000) == 8192 and times.tokens(0.0005, WHOLE) == 0


def test_a_step_has_as_many_prompt_tokens_as_the_pacer_says() -> None:
    """Requests that decode are in every step; two prompts share what is granted, the older one first."""
    granted = itertools.cycle((0, 5, 40))

    class Script(Pacer):
        def prompt_tokens(self, decoding: int, waited_seconds: float) -> int:
            return next(granted) if decoding else 64

    scheduler = Scheduler(num_blocks=64, block_size=4, max_num_seqs=4, max_step_tokens=64, max_model_len=200,
                          prefix_cache=False, pacer=Script(2.0, 64))  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=60)

    def step() -> StepPlan:
        plan = scheduler.plan()
        assert plan is not None
        outputs = tuple(Output(w.rid, (7,) if w.sample else ()) for w in plan.work)
        scheduler.commit(StepResult(plan.step, outputs))
        return plan

    scheduler.submit(Submit(0, (1,), params), 0)
    while not any(w.output_index > 1 for w in step().work):
        pass
    for rid in (1, 2):
        scheduler.submit(Submit(rid, tuple(range(1, 24)), params), 0)
    parts: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(20):
        plan = step()
        assert plan.work[0].rid == 0 and plan.work[0].count == 1
        for work in plan.work[1:]:
            if work.output_index == 0:
                parts[work.rid].append(work.count)
    assert sum(parts[1]) == sum(parts[2]) == 23 and parts[1][0] in (5, 23)


def test_a_bound_below_one_is_refused() -> None:
    for wrong in (-1.0, 0.5, 1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="decode_stretch"):
            EngineConfig(decode_stretch=wrong)
