"""Predicts the seconds of a step from a table that is measured when the engine starts.

    seconds = base(tokens of the step) + sum over requests of attention(tokens of the request) * its context

`base` is for steps planned after the step before was committed. For steps queued while the step before runs, two more
curves replace it: `overlapped` by requests, where each decodes one token without a draft model; `chained` by tokens,
with a draft model. The table is measured with the engine's own model, kernels and sampler on this machine, and with
random tokens, which are routed to different experts. Neighbouring tokens of a real text share experts, and planning
takes time that is not in the table: live_costs.py corrects both.
"""

import enum
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from perilune.core.step import LEFT_OUT

STEP_TOKENS = (1, 2, 3, 4, 6, 9, 16, 32, 64)  # Sizes of steps that are timed. More: a finer table, a slower start.
ONE_REQUEST_TOKENS = 9  # Sizes up to this are timed with one request, larger ones with several.
EACH_REQUEST_TOKENS = 4  # Tokens of each of several requests.
ATTENTION_TOKENS = (1, 4, 9)  # Tokens of one request in the steps timed at the long context.
SHORT_TOKENS, LONG_TOKENS = 32, 2048  # Attention is timed as the difference of steps at these two contexts.
# A draft model's token costs at least this share of a step. Larger: less drafting if timing is noisy.
MIN_DRAFT_SHARE = 0.005
CHAIN_TOKENS = 4  # Length of the chains that are timed.
CHAIN_REQUESTS = (1, 8)  # Batches for which a chain is timed.
PLAIN_REQUESTS = (1, 2, 4, 8, 16, 32)  # Batches for which plain steps are timed.
QUEUED_STEPS = 6  # Steps queued one after the other when overlapped steps are timed. More: a slower start, less noise.
REPEATS = 3  # Timings of which the fastest counts.


class StepKind(enum.IntEnum):
    """How a step was planned, as far as that changes its time.

    OVERLAPPED               while the step before ran; drafts were not considered
    WAITED                   after the step before was committed
    CHAINED                  while the step before ran, to verify the chain that the draft model drafts at its end
    NO_DRAFTER               as WAITED, but the draft model does not read the step
    OVERLAPPED_AFTER_LOOKUP  as OVERLAPPED, after drafts were looked up and found not to pay
    """

    OVERLAPPED = 0
    WAITED = 1
    CHAINED = 2
    NO_DRAFTER = 3
    OVERLAPPED_AFTER_LOOKUP = 4


class Timer(Protocol):
    def __call__(self, counts: Sequence[int], context: int, chain: int = 0, steps: int = 1, /) -> float:
        """Seconds per step of `steps` steps, each queued while the one before it runs.

        Requests advance by `counts` tokens at a context of `context` tokens. A draft model drafts `chain` tokens after
        them; with LEFT_OUT it does not read the step.
        """
        ...


@dataclass(frozen=True, slots=True)
class Curve:
    """Linear interpolation between points; beyond the last point the last segment is extended."""

    xs: tuple[int, ...]
    ys: tuple[float, ...]

    def __call__(self, x: float) -> float:
        if len(self.xs) == 1 or x <= self.xs[0]:
            return self.ys[0]
        i = min(bisect_right(self.xs, x), len(self.xs) - 1)
        (x0, x1), (y0, y1) = self.xs[i - 1 : i + 1], self.ys[i - 1 : i + 1]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def run(self, first: int, count: int) -> list[float]:
        """The values at `first`, first + 1, ...: `count` in all."""
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
        """The weight of each point in the value at x, by index; 1 in all."""
        if x <= self.xs[0]:
            return {0: 1.0}
        if x >= self.xs[-1]:
            return {len(self.xs) - 1: 1.0}
        i = bisect_right(self.xs, x)
        right = (x - self.xs[i - 1]) / (self.xs[i] - self.xs[i - 1])
        return {i - 1: 1 - right, i: right}


@dataclass(frozen=True, slots=True)
class Costs:
    """The table, in seconds.

    base         by tokens of a step at context 0, planned after the step before was committed
    attention    per token of a request's context, by the tokens of that request in the step
    draft_token  by requests: of drafting one more token for each
    overlapped   by requests: steps that decode one token of each without a draft model, queued while the step before
                 runs; None: as `base`
    chained      as `base`, for steps with a draft model that are queued while the step before runs; None: steps cannot
                 be chained
    drafter      by tokens of a step: the part of `base` that the draft model takes
    """

    base: Curve
    attention: Curve
    draft_token: Curve = Curve((1,), (0.0,))
    overlapped: Curve | None = None
    chained: Curve | None = None
    drafter: Curve = Curve((1,), (0.0,))

    def bases(self, first: int, count: int) -> list[float]:
        """`base` of `first` tokens, of one more, and so on: `count` in all."""
        return self.base.run(first, count)

    @property
    def base_without_drafter(self) -> Curve:
        return Curve(self.base.xs, tuple(y - self.drafter(x) for x, y in zip(self.base.xs, self.base.ys)))

    def without_drafter(self) -> "Costs":
        """The costs of the same engine without a draft model."""
        return Costs(self.base_without_drafter, self.attention, overlapped=self.overlapped)

    def __str__(self) -> str:
        def points(curve: Curve, unit: float = 1e3, digits: int = 2) -> str:
            return ", ".join(f"{n}: {unit * s:.{digits}f}" for n, s in zip(curve.xs, curve.ys))

        chained = "" if self.chained is None else f"queued ahead and followed {points(self.chained)}; "
        return (
            f"ms by tokens of a step {points(self.base)}, a draft model's part {points(self.drafter)}; "
            f"{chained}queued ahead, by requests "
            f"{points(self.overlapped or self.base)}; us per 1000 tokens of context, by tokens of its request "
            f"{points(self.attention, 1e9, 0)}; ms for a draft model's token, by requests {points(self.draft_token)}"
        )


def measure(
    time: Timer, *, max_requests: int, max_tokens: int, max_context: int, drafter: bool, can_chain: bool = False
) -> Costs:
    """The table, from steps of up to `max_requests` requests and `max_tokens` tokens at up to `max_context` tokens of
    context. `drafter`: a draft model reads the steps; `can_chain`: steps may be chained."""

    def fastest(counts: Sequence[int], context: int, chain: int = 0, steps: int = 1) -> float:
        time(counts, context, chain, steps)  # warm-up
        return min(time(counts, context, chain, steps) for _ in range(REPEATS))  # other processes only add time

    short, long = min(SHORT_TOKENS, max_context), min(LONG_TOKENS, max_context)
    shapes = [
        [n] if n <= ONE_REQUEST_TOKENS else [EACH_REQUEST_TOKENS] * (n // EACH_REQUEST_TOKENS) for n in STEP_TOKENS
    ]
    shapes = [counts for counts in shapes if sum(counts) <= max_tokens and len(counts) <= max_requests]
    ys = [fastest(counts, short) for counts in shapes]
    ys = [min(ys[i:]) for i in range(len(ys))]  # monotone: a larger step that took less time shows noise
    base = Curve(tuple(map(sum, shapes)), tuple(ys))
    sizes = [n for n in ATTENTION_TOKENS if n <= max_tokens]
    slopes = [0.0] * len(sizes)
    if long >= 4 * short:
        slopes = [max(fastest([n], long) - base(n), 0.0) / (long - short) for n in sizes]
    draft_token = drafter_part = Curve((1,), (0.0,))
    if drafter:
        ends = [(shapes[i], ys[i]) for i in sorted({0, len(shapes) - 1})]
        parts = (max(y - fastest(counts, short, LEFT_OUT), 0.0) for counts, y in ends)
        drafter_part = Curve(tuple(sum(counts) for counts, _ in ends), tuple(accumulate(parts, max)))
        requests = [n for n in CHAIN_REQUESTS if n <= max_requests]
        seconds = []
        for n in requests:  # alternately with and without a chain, because only the difference is used
            pairs = [(time([1] * n, short, CHAIN_TOKENS), time([1] * n, short)) for _ in range(2 * REPEATS)]
            seconds.append(min(one for one, _ in pairs[1:]) - min(other for _, other in pairs[1:]))
        least = MIN_DRAFT_SHARE * base(1)
        ys = list(accumulate((max(s / CHAIN_TOKENS, least) for s in seconds), max))
        draft_token = Curve(tuple(requests), tuple(ys))
    plain = [n for n in PLAIN_REQUESTS if n <= min(max_requests, max_tokens)]
    queued = [fastest([1] * n, short, LEFT_OUT if drafter else 0, QUEUED_STEPS) for n in plain]
    overlapped = Curve(tuple(plain), tuple(min(queued[i:]) for i in range(len(queued))))
    chained = None
    if can_chain:
        ys = list(accumulate((fastest(counts, short, 0, QUEUED_STEPS) for counts in shapes), max))
        chained = Curve(base.xs, tuple(ys))
    return Costs(base, Curve(tuple(sizes), tuple(slopes)), draft_token, overlapped, chained, drafter_part)
