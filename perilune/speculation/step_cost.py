"""What a step costs: by a table measured when the engine starts, and by what its steps are seen to take from then on.

    seconds = base(tokens of the step) + sum over requests of reach(tokens of the request) * its context

Steps that decode one token each may be planned and queued ahead, and have a curve of their own, by requests; so have
steps that are queued ahead with a draft model following, drafts or not, by tokens. The table
is of the engine's own model, kernels, sampler and machine, but of random tokens, which meet as many distinct experts as
independent ones do, and of steps that nobody plans. A real text's neighbours share experts; planning that
waits for the step before costs what it costs; and machines have company. So every point of the table has a factor that
follows the clock (`Pace`), one for each way of planning.
"""

import enum
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from perilune.core.step import LEFT_OUT

TOKENS = (1, 2, 3, 4, 6, 9, 16, 32, 64)  # of a step: of one request up to SHARED, else of several
SHARED, SHARE = 9, 4
REACHES = (1, 4, 9)  # tokens of one request at a long context
SHORT, LONG = 32, 2048  # tokens of context
CHEAPEST = 0.005  # of a step, that a draft model's token is believed to take at least
CHAIN = 4  # tokens of the chain that is timed
REQUESTS = (1, 8)  # for which it is
PLAIN = (1, 2, 4, 8, 16, 32)  # requests of steps that are queued ahead
AHEAD = 6  # such steps behind one another
REPEATS = 3
WAITING = 1.03  # the first factor of steps whose planning waited
LEARNING = 0.06  # weight of a step in the factor of its point
COMMON = 0.3  # how much of that every other factor gets: a machine that slows down slows all
STILL = 7e-4  # variance of a chain's share of steps, below which its length as good as never changed
MOST = 0.7  # natural logarithm of the error of a step that still counts: the rest came from outside


class How(enum.IntEnum):
    """How a step was planned: before its predecessor had landed, and nobody thought of drafts; after it; before it,
    where drafts are no reason to wait, and with a draft model that follows; after it, the draft model left out; before
    it, because drafts did not promise enough."""

    AHEAD = 0
    WAITED = 1
    FOLLOWED = 2
    BARE = 3
    LOOKED = 4


class Timer(Protocol):
    def __call__(self, counts: Sequence[int], context: int, chain: int = 0, ahead: int = 1) -> float:
        """Runs `ahead` steps, each queued before the one before it has landed, of requests that advance by `counts`
        tokens behind so much context, with `chain` tokens drafted behind by a draft model or LEFT_OUT; gives the
        seconds of one."""
        ...


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight lines between points; beyond the last one, the last line goes on."""

    xs: tuple[int, ...]
    ys: tuple[float, ...]

    def __call__(self, x: float) -> float:
        if len(self.xs) == 1 or x <= self.xs[0]:
            return self.ys[0]
        i = min(bisect_right(self.xs, x), len(self.xs) - 1)
        (x0, x1), (y0, y1) = self.xs[i - 1 : i + 1], self.ys[i - 1 : i + 1]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def run(self, first: int, count: int) -> list[float]:
        """At `first` and the next, `count` in all."""
        xs, ys, found = self.xs, self.ys, list[float]()
        while len(found) < count:
            x = first + len(found)
            i = min(bisect_right(xs, x), len(xs) - 1)
            last = first + count if i == len(xs) - 1 else min(xs[i], first + count)
            if i == 0:
                found += [ys[0]] * (last - x if len(xs) > 1 else count)
                continue
            slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
            begin = ys[i - 1] - slope * xs[i - 1]
            found += [begin + slope * at for at in range(x, last)]
        return found

    def weights(self, x: float) -> dict[int, float]:
        """How much the points have to say at x, by index; 1 in all."""
        if len(self.xs) == 1 or x <= self.xs[0]:
            return {0: 1.0}
        if x >= self.xs[-1]:
            return {len(self.xs) - 1: 1.0}
        i = bisect_right(self.xs, x)
        right = (x - self.xs[i - 1]) / (self.xs[i] - self.xs[i - 1])
        return {i - 1: 1 - right, i: right}


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. `base` by tokens of the step at no context, `reach` by tokens of a request, per token of its context,
    `chain` for a draft model's next token, by requests; `ahead` of steps that decode a token of each, queued before the
    one before has landed and without a draft model, by requests: as `base` if None; `followed` as `base`, of steps
    queued before the one before has landed that a draft model follows: None where drafts have to be waited for;
    `follow` by tokens of the step, what of `base` is the draft model's."""

    base: Curve
    reach: Curve
    chain: Curve = Curve((1,), (0.0,))
    ahead: Curve | None = None
    followed: Curve | None = None
    follow: Curve = Curve((1,), (0.0,))

    def bases(self, first: int, count: int) -> list[float]:
        """`base` of so many tokens, of one more, and so on: `count` in all."""
        return self.base.run(first, count)

    @property
    def bare(self) -> Curve:
        """As `base`, the draft model left out."""
        return Curve(self.base.xs, tuple(y - self.follow(x) for x, y in zip(self.base.xs, self.base.ys)))

    def alone(self) -> "Costs":
        """Of an engine without the draft model."""
        return Costs(self.bare, self.reach, ahead=self.ahead)

    def step(self, counts: Sequence[int], contexts: Sequence[int]) -> float:
        """Of requests that advance by `counts` tokens each, behind `contexts`."""
        return self.base(sum(counts)) + sum(self.reach(n) * c for n, c in zip(counts, contexts))

    def __str__(self) -> str:
        def points(curve: Curve) -> str:
            return ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in zip(curve.xs, curve.ys))

        reach = ", ".join(f"{n}: {1e9 * s:.0f}" for n, s in zip(self.reach.xs, self.reach.ys))
        followed = "" if self.followed is None else f"queued ahead and followed {points(self.followed)}; "
        return (
            f"ms by tokens of a step {points(self.base)}, a draft model's part {points(self.follow)}; "
            f"{followed}queued ahead, by requests "
            f"{points(self.ahead or self.base)}; us per 1000 tokens of context, by tokens of its request {reach}; "
            f"ms for a draft model's token, by requests {points(self.chain)}"
        )


class _Mean:
    """Of what was lately added."""

    def __init__(self) -> None:
        self.value = self._count = 0.0

    def add(self, value: float) -> float:
        self._count = min(self._count + 1, 1 / LEARNING)
        self.value += (value - self.value) / self._count
        return self.value


class Pace:
    """Costs that follow what steps are seen to take. Reads like Costs; `base` is of steps whose planning waited, as it
    must where drafts continue known text."""

    def __init__(self, costs: Costs) -> None:
        self.table = costs
        self.trails = costs.followed is not None
        ahead = costs.ahead or costs.base
        self._curves = (ahead, costs.base, costs.followed or costs.base, costs.bare, ahead)  # by How
        firsts = (1.0, WAITING, 1.0, WAITING, 1.0)
        self._factors = [[first] * len(curve.xs) for first, curve in zip(firsts, self._curves)]
        self._all = 1.0  # the factor of every point
        self._now = [self._drawn(how) for how in How]
        self._chain = 1.0
        self._share, self._error = _Mean(), _Mean()  # a chain's of the steps, and what was seen over what was expected
        self._spread, self._both = _Mean(), _Mean()

    def base(self, tokens: float) -> float:
        return self._all * self._now[How.WAITED](tokens)

    def bases(self, first: int, count: int) -> list[float]:
        """As of Costs."""
        return [self._all * y for y in self._now[How.WAITED].run(first, count)]

    @property
    def bare(self) -> "Bare":
        return Bare(self)

    def without(self, tokens: float) -> float:
        """As `base`, the draft model left out."""
        return self._all * self._now[How.BARE](tokens)

    def without_each(self, first: int, count: int) -> list[float]:
        """As `bases`, the draft model left out."""
        return [self._all * y for y in self._now[How.BARE].run(first, count)]

    def reach(self, tokens: float) -> float:
        return self.table.reach(tokens)

    def chain(self, requests: int) -> float:
        return self._chain * self.table.chain(requests)

    def drafting(self, tokens: float) -> float:
        """As `base`, of steps that verify a draft model's chain."""
        return self._all * self._now[How.FOLLOWED if self.trails else How.WAITED](tokens)

    def plain(self, requests: int, context: int) -> float:
        """Seconds of a step in which they decode a token each at this mean context, planned ahead."""
        return self._all * self._now[How.AHEAD](requests) + requests * self.table.reach(1) * context

    def overhead(self, requests: int) -> float:
        """Seconds lost by planning such a step after the one before has landed."""
        return max(self.base(requests) - self.plain(requests, 0), 0.0)

    def following(self, requests: int) -> float:
        """Seconds lost by planning it so that there may be a chain, even if nothing of that is verified."""
        return max(self.drafting(requests) - self.plain(requests, 0), 0.0)

    def step(self, counts: Sequence[int], contexts: Sequence[int], chain: int = 0, how: How = How.WAITED) -> float:
        """Of requests that advance by `counts` tokens each, behind `contexts`, and of the chain drafted behind."""
        reach = {n: self.table.reach(n) for n in set(counts)}
        seconds = self._all * self._now[how](sum(counts)) + sum(reach[n] * c for n, c in zip(counts, contexts))
        return seconds + chain * self.chain(len(counts))

    def saw(self, counts: Sequence[int], contexts: Sequence[int], chain: int, how: How, seconds: float) -> None:
        """A step took so long from when the one before it had landed."""
        expected = self.step(counts, contexts, chain, how)
        error = min(max(math.log(seconds / expected), -MOST), MOST)
        share = chain * self.chain(len(counts)) / expected
        self._follow(share, error)
        step = LEARNING * (1 - share) * error
        self._all *= math.exp(COMMON * step)
        for i, weight in self._curves[how].weights(sum(counts)).items():
            self._factors[how][i] *= math.exp((1 - COMMON) * weight * step)
        self._now[how] = self._drawn(how)

    def _follow(self, share: float, error: float) -> None:
        """What goes with the length of chains is theirs: the slope of errors over shares."""
        x, y = share - self._share.add(share), error - self._error.add(error)
        self._both.add(x * y)
        spread = self._spread.add(x * x)
        learned = LEARNING * min(max(self._both.value / (spread + STILL), -0.5), 0.5)
        self._chain *= math.exp(learned)
        # With the chain as it is now, errors and shares so far would have been others.
        usual = self._share.value
        self._both.value -= learned * spread
        self._error.value -= learned * usual
        self._share.value += learned * usual * (1 - usual)

    def _drawn(self, how: How) -> Curve:
        curve = self._curves[how]
        ys = (y * f for y, f in zip(curve.ys, self._factors[how]))
        return Curve(curve.xs, tuple(accumulate(ys, max)))  # more is never cheaper


class Bare:
    """A Pace with the draft model left out."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def base(self, tokens: float) -> float:
        return self._pace.without(tokens)

    def bases(self, first: int, count: int) -> list[float]:
        """As of Costs."""
        return self._pace.without_each(first, count)

    def reach(self, tokens: float) -> float:
        return self._pace.reach(tokens)

    def overhead(self, requests: int) -> float:
        """As a Pace's."""
        return max(self.base(requests) - self._pace.plain(requests, 0), 0.0)


def measure(
    time: Timer, *, most_requests: int, most_tokens: int, longest: int, chains: bool, trails: bool = False
) -> Costs:
    """Up to `most_requests` and `most_tokens` in a step and `longest` tokens of context; `chains`: of a draft model;
    `trails`: steps may be planned behind drafts in flight."""

    def typical(counts: Sequence[int], context: int, chain: int = 0, ahead: int = 1) -> float:
        time(counts, context, chain, ahead)  # what is slow only once
        return min(time(counts, context, chain, ahead) for _ in range(REPEATS))  # others' work only ever adds

    short, long = min(SHORT, longest), min(LONG, longest)
    shapes = [[n] if n <= SHARED else [SHARE] * (n // SHARE) for n in TOKENS]
    shapes = [counts for counts in shapes if sum(counts) <= most_tokens and len(counts) <= most_requests]
    ys = [typical(counts, short) for counts in shapes]
    ys = [min(ys[i:]) for i in range(len(ys))]  # a larger step is never cheaper: that was noise
    base = Curve(tuple(map(sum, shapes)), tuple(ys))
    reaches = [n for n in REACHES if n <= most_tokens]
    slopes = [0.0] * len(reaches)
    if long >= 4 * short:
        slopes = [max(typical([n], long) - base(n), 0.0) / (long - short) for n in reaches]
    chain = follow = Curve((1,), (0.0,))
    if chains:
        ends = [(shapes[i], ys[i]) for i in sorted({0, len(shapes) - 1})]
        parts = (max(y - typical(counts, short, LEFT_OUT), 0.0) for counts, y in ends)
        follow = Curve(tuple(sum(counts) for counts, _ in ends), tuple(accumulate(parts, max)))
        requests = [n for n in REQUESTS if n <= most_requests]
        spent = []
        for n in requests:  # in turns: the difference is what matters
            pairs = [(time([1] * n, short, CHAIN), time([1] * n, short)) for _ in range(2 * REPEATS)]
            spent.append(min(one for one, _ in pairs[1:]) - min(other for _, other in pairs[1:]))
        least = CHEAPEST * base(1)
        chain = Curve(tuple(requests), tuple(accumulate((max(s / CHAIN, least) for s in spent), max)))
    plain = [n for n in PLAIN if n <= min(most_requests, most_tokens)]
    queued = [typical([1] * n, short, LEFT_OUT if chains else 0, AHEAD) for n in plain]
    ahead = Curve(tuple(plain), tuple(min(queued[i:]) for i in range(len(queued))))
    followed = None
    if trails:
        followed = Curve(base.xs, tuple(accumulate((typical(counts, short, 0, AHEAD) for counts in shapes), max)))
    return Costs(base, Curve(tuple(reaches), tuple(slopes)), chain, ahead, followed, follow)
