"""Prompt tokens beside requests that decode: a simulation with measured step times, and the scheduler's part."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import pytest

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Output, StepPlan, StepResult
from perilune.engine.scheduler import Scheduler
from perilune.engine.step_times import pacing
from perilune.engine.step_times.pacing import Pacer, StepTimes
from perilune.engine.step_times.prompt_turns import share
from tests.cpu.engine.scheduler_rig import FakeRunner, Rig, prompt_of

# Tokens of a step and us of a layer of Kimi K2.5 on one H200 (docs/speed.md), steps of up to 64 tokens decoding.
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1000, 2000, 4000, 10_000)
MICROSECONDS = (131, 280, 774, 1881, 2500, 2800, 3700, 4200, 5600, 8900, 20_500)
LAYERS, WHOLE, PROMPT = 15, 8192, 10_000
PATIENCE = EngineConfig().prompt_patience


def seconds(tokens: int) -> float:
    at = next(i for i in range(len(TOKENS) - 1) if tokens <= TOKENS[i + 1])
    share = math.log(tokens / TOKENS[at]) / math.log(TOKENS[at + 1] / TOKENS[at])
    ratio: float = (MICROSECONDS[at + 1] / MICROSECONDS[at]) ** share
    return LAYERS * 1e-6 * MICROSECONDS[at] * ratio


# Of all 61 layers on four H200s, measured: seconds of steps.
FOUR_GPUS = {1: 0.0035, 4: 0.0064, 16: 0.0153, 64: 0.0352, 256: 0.062, 1024: 0.129, 5120: 0.302, 10_240: 0.604}


def on_four_gpus(tokens: int) -> float:
    known = sorted(FOUR_GPUS)
    return float(math.exp(numpy.interp(math.log(tokens), numpy.log(known), numpy.log([FOUR_GPUS[n] for n in known]))))


@dataclass
class Coming:
    at: float
    tokens: int
    left: int


@dataclass
class Played:
    median: float
    p99: float
    firsts: dict[int, list[float]]  # seconds to the first token, sorted, by the prompt's tokens
    left: int  # prompts that were not complete at the end

    @property
    def first_token(self) -> float:
        """The median, where all prompts are alike."""
        (times,) = self.firsts.values()
        return statistics.median(times)


def play(
    stretch: float, decoding: int, every_seconds: float, prompt: int = PROMPT, until: float = 60.0, *,
    patience: float = PATIENCE, more: tuple[int, float] | None = None, took_of: Callable[[int], float] = seconds,
) -> Played:  # fmt: skip
    """`decoding` requests decode throughout; prompts come at random, one `every_seconds` on average; `more`: others,
    (tokens, seconds)."""
    rng = random.Random(3)
    pacer = Pacer(stretch, WHOLE, patience)
    for tokens in (256, 1024, 4096, WHOLE):
        pacer.times.record(tokens, took_of(tokens))
    streams = [(prompt, every_seconds, rng), *([(*more, random.Random(4))] if more else [])]
    coming = [2.0] * len(streams)
    now, waiting, intervals = 0.0, list[Coming](), list[float]()
    firsts: dict[int, list[float]] = {}
    while now < until:
        for at, (tokens, every, moments) in enumerate(streams):
            while coming[at] <= now:
                waiting.append(Coming(coming[at], tokens, tokens))
                coming[at] += moments.expovariate(1 / every)
        waiting.sort(key=lambda one: one.at)
        chunk = 0
        if waiting:
            granted = pacer.prompt_tokens(decoding, [(one.tokens, one.left, now - one.at) for one in waiting])
            for one, part in zip(waiting, share(granted, [(0, one.left) for one in waiting])):
                one.left -= part
                chunk += part
            pacer.planned(decoding + chunk, decoding)
        took = took_of(decoding + chunk) * rng.uniform(0.98, 1.04)
        now += took
        intervals.append(took)
        pacer.record(decoding + chunk, decoding, chunk, took)
        for one in waiting:
            if not one.left:
                firsts.setdefault(one.tokens, []).append(now - one.at)
        waiting = [one for one in waiting if one.left]
    intervals.sort()
    for times in firsts.values():
        times.sort()
    return Played(statistics.median(intervals), intervals[int(0.99 * len(intervals))], firsts, len(waiting))


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


def test_a_queue_of_prompts_does_not_raise_the_bound() -> None:
    """Prompts come about as fast as the bound lets them be computed, so that steps without any are few."""
    paced = play(2.0, 64, 3.0, patience=10.0, took_of=on_four_gpus)
    assert paced.p99 <= 2.0 * paced.median


def test_short_prompts_wait_for_long_steps_where_small_parts_are_dear() -> None:
    """8 requests, a prompt of 1,000 tokens every 0.5 s: with patience the prompts share long steps. Without, they are
    computed before long, and more than 1 of 100 intervals are long."""
    paced, whole = play(2.0, 8, 0.5, 1000, patience=10.0), play(0, 8, 0.5, 1000)
    assert whole.p99 > 8 * whole.median
    assert paced.p99 < 1.2 * paced.median and paced.first_token < 1.0
    usual = play(2.0, 8, 0.5, 1000)
    assert usual.first_token < 0.8 * paced.first_token and usual.firsts[1000][-1] < 0.5 < paced.firsts[1000][-1]


@pytest.mark.parametrize("decoding", [8, 16])
def test_short_prompts_find_credit_where_few_come(decoding: int) -> None:
    """A prompt of 1,000 tokens every 2 s has its first token as without a bound, and the bound is kept."""
    paced, whole = play(2.0, decoding, 2.0, 1000, 120.0), play(0, decoding, 2.0, 1000, 120.0)
    assert paced.p99 < 1.2 * paced.median
    assert paced.first_token < 1.1 * whole.first_token < 0.117
    assert paced.firsts[1000][int(0.95 * len(paced.firsts[1000]))] < 0.117


@pytest.mark.parametrize("decoding", [8, 16, 64])
def test_short_prompts_among_long_ones(decoding: int) -> None:
    """1,000 tokens every 2 s and 10,000 every 8 s: the bound is kept, and short ones wait little for long ones."""
    paced = play(2.0, decoding, 2.0, 1000, 120.0, more=(PROMPT, 8.0))
    assert paced.p99 <= 2 * paced.median
    short, long = paced.firsts[1000], paced.firsts[PROMPT]
    assert statistics.median(short) < 0.25 and short[int(0.95 * len(short))] < 0.6
    assert statistics.median(long) < 1.5 and paced.left <= 1


def test_under_too_much_load_prompts_are_not_starved() -> None:
    """8 requests, a prompt of 10,000 tokens every second: 30 % of the time at least, so no p99 is kept."""
    paced = play(2.0, 8, 1.0)
    assert paced.first_token < 2 * PATIENCE and paced.left < 10


def test_no_bound_before_there_is_a_median_or_beside_no_request() -> None:
    pacer, prompts = Pacer(2.0, WHOLE, 2.0), [(PROMPT, PROMPT, 0.0)]
    assert pacer.prompt_tokens(0, prompts) == WHOLE
    assert pacer.prompt_tokens(8, prompts) == WHOLE - 8
    for _ in range(600):
        pacer.record(8, 8, 0, 0.01)
    assert pacer.prompt_tokens(0, prompts) == WHOLE
    assert Pacer(0, WHOLE, 2.0).prompt_tokens(WHOLE, prompts) == 1


def test_few_steps_are_long_and_none_is_planned_twice_before_it_is_known() -> None:
    pacer = Pacer(2.0, WHOLE, 2.0)
    for _ in range(120):
        pacer.record(8, 8, 0, 0.01)
    pacer.times.record(WHOLE, 1.0)
    granted = []
    for _ in range(10):
        granted.append(pacer.prompt_tokens(8, [(WHOLE, WHOLE, 0.0)]))
        assert granted[-1] == pacer.prompt_tokens(8, [(WHOLE, WHOLE, 0.0)]), "asking changes nothing"
        pacer.planned(8 + granted[-1], 8)
    assert granted[:2] == [WHOLE - 8] * 2 and set(granted[2:]) <= {0}
    for _ in range(20):
        pacer.record(WHOLE, 8, WHOLE - 8, 1.0)
    assert pacer.prompt_tokens(8, [(WHOLE, WHOLE, 1.9)]) == 0
    assert pacer.prompt_tokens(8, [(WHOLE, 100, 2.1)]) == WHOLE - 8, "all of the prompt counts, not what is left of it"
    for waited, tokens in ((0.2, 0), (0.3, WHOLE - 8)):
        assert pacer.prompt_tokens(8, [(WHOLE, WHOLE, 0.5), (1000, 1000, waited)]) == tokens, "a short one waits less"


def test_credit_is_saved_and_bounded() -> None:
    pacer = Pacer(2.0, WHOLE, 2.0)
    pacer.times.record(WHOLE, 1.0)
    for _ in range(5000):
        pacer.record(8, 8, 0, 0.01)
    steps = 0
    while pacer.prompt_tokens(8, [(WHOLE, WHOLE, 0.0)]):
        pacer.planned(WHOLE, 8)
        pacer.record(WHOLE, 8, WHOLE - 8, 1.0)
        steps += 1
    assert pacing.MAX_CREDIT_STEPS - 1 <= steps <= pacing.MAX_CREDIT_STEPS
    for seconds in (0.01,) * 600 + (0.03,) * 9:  # as many intervals that are long because of pictures as are saved
        pacer.count(seconds)
    assert not pacer.prompt_tokens(8, [(WHOLE, WHOLE, 0.0)])


def test_tokens_of_a_step_are_shared() -> None:
    """The first prompt has half, then those of its priority that are half as long have theirs; then all by rank."""
    assert share(0, [(0, 5)]) == [0] and share(5, []) == []
    assert share(100, [(0, 1000), (0, 70), (0, 20)]) == [50, 30, 20]
    assert share(100, [(0, 1000), (0, 501), (0, 20)]) == [80, 0, 20]
    assert share(100, [(0, 30), (0, 900), (0, 800), (0, 15)]) == [30, 55, 0, 15]
    assert share(100, [(0, 1000), (0, 10), (0, 20)]) == [70, 10, 20]
    assert share(100, [(0, 1000), (1, 10)]) == [100, 0]
    assert share(1, [(0, 7), (0, 3)]) == [1, 0]
    rng = random.Random(1)
    for _ in range(300):
        prompts = [(rng.randrange(2), rng.randrange(1, 60)) for _ in range(rng.randrange(1, 6))]
        tokens = rng.randrange(100)
        shares = share(tokens, prompts)
        assert sum(shares) == min(tokens, sum(left for _, left in prompts))
        assert all(0 <= part <= left for part, (_, left) in zip(shares, prompts))


def test_times_between_known_sizes_are_powers() -> None:
    times = StepTimes()
    assert times.tokens(1.0, WHOLE) == 0
    for tokens in (1, 16, 256, 4096):
        times.record(tokens, 0.001 * tokens**0.5)
    for tokens in (2, 16, 100, 1000, 4096):
        assert abs(times.tokens(0.001 * tokens**0.5, WHOLE) - tokens) <= 1
    assert times.tokens(0.128, 100_000) == 8192 and times.tokens(0.0005, WHOLE) == 0


def test_a_step_has_as_many_prompt_tokens_as_the_pacer_says() -> None:
    """Requests that decode are in every step; two prompts share what is granted, and the older one has half."""
    granted = itertools.cycle((0, 5, 40))

    class Script(Pacer):
        def prompt_tokens(self, decoding: int, prompts: Sequence[tuple[int, int, float]]) -> int:
            return next(granted) if decoding else 64

        def planned(self, *noted: int) -> None:
            self.noted = noted

    pacer = Script(2.0, 64, 2.0)
    scheduler = Scheduler(num_blocks=64, block_size=4, max_num_seqs=4, max_step_tokens=64, max_model_len=200,
                          prefix_cache=False, pacer=pacer)  # fmt: skip
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
        if plan.tokens > len(plan.work):
            assert pacer.noted == (plan.tokens, sum(w.count == 1 for w in plan.work))
        for work in plan.work[1:]:
            if work.output_index == 0:
                parts[work.rid].append(work.count)
    assert sum(parts[1]) == sum(parts[2]) == 23 and parts[1][0] in (5, 23)


class Granted(Pacer):
    """Gives prompts `tokens`, where requests decode."""

    def __init__(self, tokens: int) -> None:
        super().__init__(2.0, 64, 2.0)
        self.tokens = tokens

    def prompt_tokens(self, decoding: int, prompts: Sequence[tuple[int, int, float]]) -> int:
        return self.tokens if decoding else 64


class PacedRig(Rig):
    def may_wait(self) -> bool:
        return True  # for the pacer


def test_a_short_prompt_is_complete_in_a_step_of_a_long_one() -> None:
    """Computing, and first in the queue."""
    pacer = Granted(16)
    rig = PacedRig(pacer=pacer, num_blocks=100, max_model_len=120)
    rig.submit(0, prompt_of(3), max_tokens=60)
    rig.tick()
    for first in (10, 20):
        rig.submit(first, prompt_of(90, first), max_tokens=2)
        if first == 10:
            rig.tick()
        rig.submit(first + 1, prompt_of(7, first + 1), max_tokens=2)
        plan = rig.tick()
        assert plan is not None
        assert {w.rid: w.count for w in plan.work} == {0: 1, first: 9, first + 1: 7}
        while rig.answers[first].finish is None:
            rig.tick()
    rig.finish()


def test_steps_are_chained_while_prompts_wait_for_the_pacer() -> None:
    pacer = Granted(8)
    scheduler = Scheduler(num_blocks=64, block_size=4, max_num_seqs=4, max_step_tokens=64, max_model_len=100,
                          pacer=pacer)  # fmt: skip
    runner = FakeRunner(4, 4, chain=lambda rid, place: [0, 0])
    params = SamplingParams(temperature=0.0, max_tokens=60)

    def submit(rid: int, tokens: int) -> None:
        scheduler.submit(Submit(rid, prompt_of(tokens, rid), params), rid)
        runner.submit(rid, prompt_of(tokens, rid))

    submit(1, 5)
    before = scheduler.plan()
    assert before is not None
    for waiting in (False, True):
        submit(2 + waiting, 40)
        for granted in (0, 8):
            pacer.tokens = granted
            chained = scheduler.plan_chained(2)
            assert (chained is None) == bool(granted)
            scheduler.commit(runner.run(before))
            before = chained or scheduler.plan()
            assert before is not None and before.work[0].rid == 1
            assert sum(w.count for w in before.work[1:]) == granted
            scheduler.check_integrity()
    assert scheduler.stats().running == 2


@pytest.mark.parametrize("seed", range(4))
def test_random_grants(seed: int) -> None:
    """Answers do not depend on the pacer, and every prompt comes to its end."""
    rng = random.Random(seed)
    pacer = Granted(0)
    rig = PacedRig(pacer=pacer, num_blocks=40, rng=random.Random(seed), trails=random.Random(seed),
                   drafter=lambda prompt, count: [rng.randrange(4)] * rng.randrange(4))  # fmt: skip
    for rid in range(40):
        rig.submit(rid, prompt_of(rng.choice((2, 9, 45)), rng.randrange(9)), max_tokens=rng.randrange(1, 12))
        for _ in range(rng.randrange(6)):
            pacer.tokens = rng.choice((0, 0, 1, 3, 20))
            rig.tick()
    rig.finish()
    for rid in range(40):
        rig.expect(rid)


def test_a_bound_below_one_is_refused() -> None:
    for wrong in (-1.0, 0.5, 1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="decode_stretch"):
            EngineConfig(decode_stretch=wrong)


def test_patience_below_zero_is_refused() -> None:
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="prompt_patience"):
            EngineConfig(prompt_patience=wrong)
