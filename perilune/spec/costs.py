"""What a step costs, by a table measured when the engine starts: on its own model, kernels, sampler and machine.

    seconds = base(tokens of the step) + sum over requests of reach(tokens of the request) * its context

The tokens timed are random, so they meet as many distinct experts as independent ones do; the neighbouring tokens of a
real text share some, which makes drafts a little cheaper than the table says, never dearer.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

TOKENS = (1, 2, 3, 4, 6, 9, 16, 32, 64)  # of a step: of one request up to SHARED, else of several
SHARED, SHARE = 9, 4
REACHES = (1, 4, 9)  # tokens of one request at a long context
SHORT, LONG = 32, 2048  # tokens of context
CHAIN = 4  # tokens of the chain that is timed
REQUESTS = (1, 8)  # for which it is
REPEATS = 3


class Timer(Protocol):
    def __call__(self, counts: Sequence[int], context: int, chain: int = 0) -> float:
        """Runs a step of requests that advance by `counts` tokens behind so much context, with that many tokens
        drafted behind by a draft model; gives its seconds."""
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


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. `base` by tokens of the step at no context, `reach` by tokens of a request, per token of its context,
    `chain` for a draft model's next token, by requests."""

    base: Curve
    reach: Curve
    chain: Curve = Curve((1,), (0.0,))

    def step(self, counts: Sequence[int], contexts: Sequence[int]) -> float:
        """Of requests that advance by `counts` tokens each, behind `contexts`."""
        return self.base(sum(counts)) + sum(self.reach(n) * c for n, c in zip(counts, contexts))

    def __str__(self) -> str:
        points = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in zip(self.base.xs, self.base.ys))
        reach = ", ".join(f"{n}: {1e9 * s:.0f}" for n, s in zip(self.reach.xs, self.reach.ys))
        chain = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in zip(self.chain.xs, self.chain.ys))
        return (
            f"ms by tokens of a step {points}; us per 1000 tokens of context, by tokens of its request {reach}; "
            f"ms for a draft model's token, by requests {chain}"
        )


def measure(time: Timer, *, most_requests: int, most_tokens: int, longest: int, chains: bool) -> Costs:
    """Up to `most_requests` and `most_tokens` in a step and `longest` tokens of context; `chains`: of a draft model."""

    def typical(counts: Sequence[int], context: int, chain: int = 0) -> float:
        time(counts, context, chain)  # what is slow only once
        return min(time(counts, context, chain) for _ in range(REPEATS))  # others' work only ever adds

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
    chain = Curve((1,), (0.0,))
    if chains:
        requests = [n for n in REQUESTS if n <= most_requests]
        spent = [typical([1] * n, short, CHAIN) - typical([1] * n, short) for n in requests]
        chain = Curve(tuple(requests), tuple(max(s, 0.0) / CHAIN for s in spent))
    return Costs(base, Curve(tuple(reaches), tuple(slopes)), chain)
