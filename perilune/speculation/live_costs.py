"""Predicted seconds of a step: the table of step_cost.py, corrected by every measured step.

Every point of the table has a factor for each kind of step (StepKind). A measured step changes the factors of the
points nearest to it, and by a smaller amount all others, because a machine that slows down slows every kind of step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from perilune.speculation.step_cost import Costs, Curve, StepKind

# Initial factor of steps planned after the result of the step before: the table does not include planning.
FIRST_WAITED_RATIO = 1.03
LEARNING_SHARE = 0.06  # Weight of one step in the factor of its point. Larger: follows changes faster, noisier.
COMMON_SHARE = 0.3  # Share of a correction that all points get. Larger: one odd step disturbs all predictions.
# Added to the denominator of the regression in `_record_chain`. Larger: draft_token changes more slowly.
STEADY_VARIANCE = 7e-4
# About ln 2: an error beyond a factor of 2 counts as 2, because other processes probably caused it.
MAX_LOG_ERROR = 0.7


class _Mean:
    """Running mean over about 1 / LEARNING_SHARE values."""

    def __init__(self) -> None:
        self.value = self._count = 0.0

    def add(self, value: float) -> float:
        self._count = min(self._count + 1, 1 / LEARNING_SHARE)
        self.value += (value - self.value) / self._count
        return self.value


class LiveCosts:
    """Predictions in seconds. `can_chain`: whether steps may be chained (the table has times of such steps).

    `waited`, `waited_without_drafter` and `verifying` are the costs of one kind of step each. `verifying`: CHAINED, or
    WAITED if steps cannot be chained: the kind that verifies a draft model's chain.
    """

    def __init__(self, table: Costs) -> None:
        self.table = table
        self.can_chain = table.chained is not None
        overlapped, chained = table.overlapped or table.base, table.chained or table.base
        self._curves = (overlapped, table.base, chained, table.base_without_drafter, overlapped)  # by StepKind
        firsts = (1.0, FIRST_WAITED_RATIO, 1.0, FIRST_WAITED_RATIO, 1.0)
        self._factors = [[first] * len(curve.xs) for first, curve in zip(firsts, self._curves)]
        self.scale = 1.0  # a common factor of all points
        self.current = [self._scaled(kind) for kind in StepKind]  # the curves times the factors of their points
        self._chain_factor = 1.0
        self._share, self._error = _Mean(), _Mean()  # the chain's share of predicted time; log(measured / predicted)
        self._variance, self._covariance = _Mean(), _Mean()
        self.waited = KindCosts(self, StepKind.WAITED)
        self.waited_without_drafter = KindCosts(self, StepKind.NO_DRAFTER)
        self.verifying = KindCosts(self, StepKind.CHAINED) if self.can_chain else self.waited

    def draft_token(self, requests: int) -> float:
        """Seconds of drafting one more token for `requests` requests."""
        return self._chain_factor * self.table.draft_token(requests)

    def plain(self, requests: int, context: int) -> float:
        """Seconds of a step, planned while the step before runs, that decodes one token each at this mean context."""
        attention = requests * self.table.attention(1) * context
        return self.scale * self.current[StepKind.OVERLAPPED](requests) + attention

    def step(self, counts: Sequence[int], contexts: Sequence[int], chain: int, kind: StepKind) -> float:
        """Seconds of a step: requests advance by `counts` tokens at `contexts`, and `chain` tokens are drafted
        after."""
        attention = {n: self.table.attention(n) for n in set(counts)}
        seconds = self.scale * self.current[kind](sum(counts)) + sum(attention[n] * c for n, c in zip(counts, contexts))
        return seconds + chain * self.draft_token(len(counts))

    def record(
        self, counts: Sequence[int], contexts: Sequence[int], chain: int, kind: StepKind, seconds: float
    ) -> None:
        """Learns from a step that took `seconds` since the step before it was committed."""
        expected = self.step(counts, contexts, chain, kind)
        error = min(max(math.log(seconds / expected), -MAX_LOG_ERROR), MAX_LOG_ERROR)
        share = chain * self.draft_token(len(counts)) / expected
        self._record_chain(share, error)
        change = LEARNING_SHARE * (1 - share) * error
        self.scale *= math.exp(COMMON_SHARE * change)
        for i, weight in self._curves[kind].weights(sum(counts)).items():
            self._factors[kind][i] *= math.exp((1 - COMMON_SHARE) * weight * change)
        self.current[kind] = self._scaled(kind)

    def _record_chain(self, share: float, error: float) -> None:
        """Corrects draft_token by linear regression of `error` on `share`, the chain's share of the predicted time: if
        steps with larger shares have larger errors, draft_token is too low."""
        x, y = share - self._share.add(share), error - self._error.add(error)
        self._covariance.add(x * y)
        variance = self._variance.add(x * x)
        change = LEARNING_SHARE * min(max(self._covariance.value / (variance + STEADY_VARIANCE), -0.5), 0.5)
        self._chain_factor *= math.exp(change)
        # Convert the means to what they would be if the new factor had been used from the start.
        mean = self._share.value
        self._covariance.value -= change * variance
        self._error.value -= change * mean
        self._share.value += change * mean * (1 - mean)

    def _scaled(self, kind: StepKind) -> Curve:
        curve = self._curves[kind]
        ys = (y * f for y, f in zip(curve.ys, self._factors[kind]))
        return Curve(curve.xs, tuple(accumulate(ys, max)))  # monotone: a larger step never takes less time


@dataclass(frozen=True, slots=True, eq=False)
class KindCosts:
    """The current predictions for steps of one kind, in seconds."""

    live: LiveCosts
    kind: StepKind

    def base(self, tokens: float) -> float:
        """Seconds of a step of `tokens` tokens at context 0."""
        return self.live.scale * self.live.current[self.kind](tokens)

    def bases(self, first: int, count: int) -> list[float]:
        """`base` of `first` tokens, of one more, and so on: `count` in all."""
        return [self.live.scale * y for y in self.live.current[self.kind].run(first, count)]

    def attention(self, tokens: float) -> float:
        """Seconds per token of context, for a request with `tokens` tokens in the step."""
        return self.live.table.attention(tokens)

    def overhead(self, requests: int) -> float:
        """Seconds by which a step of this kind that verifies no draft is longer than a plain step."""
        return max(self.base(requests) - self.live.plain(requests, 0), 0.0)
