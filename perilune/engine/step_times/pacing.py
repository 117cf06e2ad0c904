"""How many prompt tokens a step computes while other requests decode, so that these keep their pace.

The bound: of the intervals between a request's tokens, 99 of 100 take at most `stretch` times the median of the last
WINDOW_STEPS intervals. 1 of 100 may be longer, and prompts use those first: a step computes max_step_tokens of a prompt
while fewer than LONG_SHARE of the intervals were longer than the bound. Otherwise prompts get as many tokens as the
bound leaves time for, by the measured times of steps; if a token would then take more than DEAR_RATIO times as long as
in a whole step, prompts wait for the next long step. A prompt that has waited for PATIENCE_SECONDS is computed in whole
steps, whatever the bound: under such a load no size keeps both, and small parts lower the throughput of all.

With Kimi K2.5's measured step times on one GPU (15 layers, a prompt of 10,000 tokens every 3 s) the simulation of
tests/cpu/engine/test_pacing.py gives for 64 requests an interval p99 of 1.9 medians instead of 8.9, and a median time
to the first token of 1.4 s instead of 0.4. For 8 requests few whole steps keep the bound and small parts would not:
64 tokens read all experts as 1,000 do.

Sarathi-Serve (arXiv 2403.02310) bounds steps by a number of tokens; here seconds decide.
"""

import math
from bisect import bisect_right, insort
from collections import deque

WINDOW_STEPS = 512  # intervals; larger: a slower change of the median when load changes
FEWEST_STEPS = 16  # intervals below which there is no median yet
LONG_SHARE = 0.008  # of intervals that may be longer than the bound: a fifth below the hundredth that the bound leaves
PLANNED_SHARE = 0.92  # of the bound is planned: a step takes a few percent more or less than the last of its size
DEAR_RATIO = 6.0
PATIENCE_SECONDS = 2.0
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
    """stretch          how many times the median interval 99 of 100 may take; 0: no bound
    max_step_tokens  of a step, whatever the time"""

    def __init__(self, stretch: float, max_step_tokens: int) -> None:
        self._stretch, self._most = stretch, max_step_tokens
        self.times = StepTimes()
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []
        self._steps = 0
        self._long_plans: deque[int] = deque(maxlen=PLANNED_AHEAD_STEPS)  # steps recorded when long ones were planned

    def prompt_tokens(self, decoding: int, waited_seconds: float) -> int:
        """For the next step, in which `decoding` requests decode; the prompt that came first has waited so long.
        0: prompts wait for another step."""
        most = max(self._most - decoding, 1)
        if not self._stretch or not decoding or len(self._sorted) < FEWEST_STEPS or waited_seconds > PATIENCE_SECONDS:
            return most
        bound = self._stretch * self._sorted[len(self._sorted) // 2]
        fitting = self.times.tokens(PLANNED_SHARE * bound, self._most) - decoding
        if fitting >= most:
            return most
        long = len(self._sorted) - bisect_right(self._sorted, bound)
        long += sum(self._steps < plan + PLANNED_AHEAD_STEPS for plan in self._long_plans)
        if long < max(LONG_SHARE * len(self._sorted), 1):
            self._long_plans.append(self._steps)
            return most
        dear = fitting <= 0 or bound > DEAR_RATIO * self.times.seconds_of_whole(fitting)
        return 0 if dear else fitting

    def record(self, tokens: int, decoded: int, seconds: float) -> None:
        """A step of `tokens` tokens, in which `decoded` requests decoded, came `seconds` after the one before it."""
        if not self._stretch or seconds <= 0:
            return
        self._steps += 1
        self.times.record(tokens, seconds)
        if not decoded:
            return
        self._newest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._newest) > WINDOW_STEPS:
            del self._sorted[bisect_right(self._sorted, self._newest.popleft()) - 1]
