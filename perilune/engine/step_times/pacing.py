"""How many prompt tokens a step computes while other requests decode, so that these keep their pace.

The bound: of the intervals between a request's tokens, 99 of 100 take at most `stretch` times the median of the last
WINDOW_STEPS intervals. 1 of 100 may be longer, and prompts use those: each interval adds LONG_SHARE to a credit, and
one that is longer than the bound takes 1 from it. While there is credit, a step computes all prompt tokens that it has
room for; credit saved while no prompts came serves several that come at once. Without credit prompts get as many tokens
as the bound leaves time for, by the measured times of steps; if a token would then take more than DEAR_RATIO times as
long as in a whole step, prompts wait for credit.

A prompt that has waited for `patience_seconds` is computed in whole steps, bound or not: under such a load no sizes
keep both the bound and a time to the first token. Where no part fits the bound, a prompt shorter than a whole step
waits in proportion, 0.25 of 2 seconds for 1,000 of 8,192 tokens: to wait ten times as long as it takes would cost its
user more than its step costs the others. With larger `patience_seconds` the bound holds under more load.

The simulation of tests/cpu/engine/test_pacing.py, with Kimi K2.5's measured step times on one GPU (15 layers): 64
requests and a prompt of 10,000 tokens every 3 s have an interval p99 of 1.9 medians instead of 8.9, and a median time
to the first token of 1.1 s instead of 0.4. For 8 requests few whole steps keep the bound and small parts would not: 64
tokens read all experts as 1,000 do. 1,000 tokens every 2 s beside 8 or 16 requests have their first token as soon as
without a bound, which is kept; every 0.5 s after 0.3 s instead of 0.07, and the bound is lost.

Sarathi-Serve (arXiv 2403.02310) bounds steps by a number of tokens; here seconds decide.
"""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

WINDOW_STEPS = 512  # intervals; larger: a slower change of the median when load changes
FEWEST_STEPS = 16  # intervals below which there is no median yet
LONG_SHARE = 0.009  # of intervals that may be longer than the bound: a tenth below the hundredth that the bound leaves
MAX_CREDIT_STEPS = 8.0  # More: more long steps on end after a time without prompts.
PLANNED_SHARE = 0.92  # of the bound is planned: a step takes a few percent more or less than the last of its size
DEAR_RATIO = 6.0
NEWEST_SHARE = 0.5  # weight of a step among those of its size
SIZES_PER_OCTAVE = 2
PLANNED_AHEAD_STEPS = 2  # A step is planned while one other may be in flight: its own interval is the second one after.


class StepTimes:
    """Seconds of a step by its tokens, learned from steps. Between two known sizes seconds are a power of tokens: a
    mixture of experts costs much more for the first tokens than for later ones, and no straight line shows that."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # (log2 of tokens, seconds), by size

    def record(self, tokens: int, seconds: float) -> None:
        at = math.log2(tokens)
        size = round(at * SIZES_PER_OCTAVE)
        x, y = self._known.get(size, (at, seconds))
        self._known[size] = (x + NEWEST_SHARE * (at - x), y + NEWEST_SHARE * (seconds - y))

    def tokens(self, seconds: float, limit: int) -> int:
        """The most tokens, up to `limit`, of a step that takes at most so long; beyond the largest known size time
        grows with tokens. 0: even the smallest known takes longer."""
        found, before = 0.0, None
        for size in sorted(self._known):
            x, y = self._known[size]
            if y > seconds:
                if before is not None:
                    share = math.log(seconds / before[1]) / math.log(y / before[1])
                    found = 2.0 ** (before[0] + share * (x - before[0]))
                break
            found, before = 2.0**x, (x, y)
        else:
            if before is not None:
                found = min(2.0 ** before[0] * seconds / before[1], limit)
        return min(int(found + 1e-6), limit)

    def seconds_of_whole(self, tokens: int) -> float:
        """Of a step of `tokens` tokens, as the largest known step took for each of its tokens."""
        x, seconds = self._known[max(self._known)]
        return seconds * tokens / math.exp2(x)


class Pacer:
    """stretch           how many times the median interval 99 of 100 may take; 0: no bound
    max_step_tokens   of a step, whatever the time
    patience_seconds  that a prompt of max_step_tokens waits at most; a shorter one in proportion
    """

    def __init__(self, stretch: float, max_step_tokens: int, patience_seconds: float) -> None:
        self._stretch, self._most, self._patience = stretch, max_step_tokens, patience_seconds
        self.times = StepTimes()
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []
        self._steps = 0
        self._credit = 1.0
        self._long_plans: deque[int] = deque(maxlen=PLANNED_AHEAD_STEPS)  # steps recorded when long ones were planned

    @property
    def _bound(self) -> float:
        """Seconds; no bound before there is a median."""
        if not self._stretch or len(self._sorted) < FEWEST_STEPS:
            return math.inf
        return self._stretch * self._sorted[len(self._sorted) // 2]

    def prompt_tokens(self, decoding: int, prompts: Sequence[tuple[int, int, float]]) -> int:
        """For the next step, in which `decoding` requests decode. prompts: of each that could be computed its tokens,
        how many of them are left, and the seconds that it has waited. 0: prompts wait for another step."""
        most = max(self._most - decoding, 1)
        bound = self._bound
        if not decoding or bound == math.inf:
            return most
        fitting = self.times.tokens(PLANNED_SHARE * bound, self._most) - decoding
        if fitting >= min(most, sum(left for _, left, _ in prompts)):
            return min(fitting, most)
        planned = sum(self._steps < plan + PLANNED_AHEAD_STEPS for plan in self._long_plans)
        dear = fitting <= 0 or bound > DEAR_RATIO * self.times.seconds_of_whole(fitting)
        patience = [self._patience * (min(tokens / self._most, 1.0) if dear else 1.0) for tokens, _, _ in prompts]
        late = any(waited > seconds for seconds, (_, _, waited) in zip(patience, prompts))
        if late or self._credit - planned >= 1.0:
            return most
        return 0 if dear else fitting

    def planned(self, tokens: int, decoding: int) -> None:
        """A step of `tokens` tokens is planned, in which `decoding` requests decode."""
        bound = self._bound
        if decoding and bound < math.inf and tokens > self.times.tokens(bound, self._most):
            self._long_plans.append(self._steps)

    def record(self, tokens: int, decoded: int, seconds: float) -> None:
        """A step of `tokens` tokens, in which `decoded` requests decoded, came `seconds` after the one before it."""
        if not self._stretch or seconds <= 0:
            return
        self._steps += 1
        self.times.record(tokens, seconds)
        if not decoded:
            return
        self._credit = min(self._credit + LONG_SHARE, MAX_CREDIT_STEPS)
        if seconds > self._bound:
            # Not below 0: after steps that no credit was left for, prompts would wait long for a bound that is lost.
            self._credit = max(self._credit - 1.0, 0.0)
        self._newest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._newest) > WINDOW_STEPS:
            del self._sorted[bisect_right(self._sorted, self._newest.popleft()) - 1]
