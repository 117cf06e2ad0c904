"""How many prompt tokens a step computes while other requests decode: bounds inter-token latency (p99).

The bound: of the intervals between a request's tokens, 99 of 100 take at most `stretch` times the median of the last
WINDOW_STEPS intervals in which no prompt was computed. If intervals with prompts were in the median, it would rise with
the prompt tokens that the bound allows: a queue of prompts doubled the bound, and doubled it again.

1 of 100 intervals may be longer; prompts use these through a credit. Each interval adds LONG_SHARE to the credit, and
an interval longer than the bound takes 1 from it. While the credit is 1 or more, a step is whole: it computes as many
prompt tokens as max_step_tokens allows. Credit saved while no prompts came is used up by several that come at once.
With less credit, prompts get as many tokens as the bound leaves time for, by the measured times of steps. If a token
would then take more than DEAR_RATIO times as long as in a whole step, prompts wait for credit.

A prompt that has waited for `patience_seconds` is computed in whole steps, even if that breaks the bound: under such a
load no chunk size keeps both the bound and a short time to the first token. If no chunk fits the bound, or its tokens
take too long (DEAR_RATIO), a prompt shorter than a whole step waits a proportional share of `patience_seconds`, 0.25 of
2 s for 1,000 of 8,192 tokens: a long wait would cost its user more than its short step costs the others. With larger
`patience_seconds` the bound holds under more load.

Simulated (tests/cpu/engine/test_pacing.py), with Kimi K2.5's measured step times on one GPU (15 layers): while 64
requests decode and a prompt of 10,000 tokens comes every 3 s, the interval p99 is 1.9 medians instead of 8.9, and the
median time to the first token 1.1 s instead of 0.4. While 8 requests decode, few whole steps keep the bound and many
small chunks would not: a chunk of 64 tokens reads as many experts as one of 1,000. While 8 or 16 requests decode,
prompts of 1,000 tokens every 2 s get their first token as soon as without a bound, and the bound holds; every 0.5 s,
they get it after 0.3 s instead of 0.07, and the bound does not hold.

Sarathi-Serve (arXiv 2403.02310) bounds the tokens of a step; here the measured seconds are bounded.
"""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

WINDOW_STEPS = 512  # intervals of which the median is taken. More: the median follows changes of load more slowly.
FEWEST_STEPS = 16  # With fewer intervals there is no median, and no bound.
LONG_SHARE = 0.009  # share of intervals that may exceed the bound: a tenth less than the 1 of 100 of the definition
MAX_CREDIT_STEPS = 8.0  # Limit of the credit. More: more consecutive long steps after a time without prompts.
PLANNED_SHARE = 0.92  # Plan steps for 0.92 of the bound: equal steps differ by a few percent in time.
DEAR_RATIO = 6.0  # Smaller: prompts wait for credit where they would be computed in small chunks.
NEWEST_SHARE = 0.5  # weight of the newest step in the moving average of its size
SIZES_PER_OCTAVE = 2  # More: finer sizes of steps, each learned from fewer steps.
PLANNED_AHEAD_STEPS = 2  # A step may be planned while one is in flight: its own interval is then the second to end.


class StepTimes:
    """Seconds of a step by its number of tokens, learned from steps. Between two known sizes log(seconds) is linear in
    log(tokens): the first tokens of a step cost much more than later ones, because each adds experts to read."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # (log2 of tokens, seconds), by size

    def record(self, tokens: int, seconds: float) -> None:
        at = math.log2(tokens)
        size = round(at * SIZES_PER_OCTAVE)
        x, y = self._known.get(size, (at, seconds))
        self._known[size] = (x + NEWEST_SHARE * (at - x), y + NEWEST_SHARE * (seconds - y))

    def tokens(self, seconds: float, limit: int) -> int:
        """The largest number of tokens, up to `limit`, of a step that takes at most `seconds`. Beyond the largest known
        size time is proportional to tokens. 0: even the smallest known size takes longer."""
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
        """Seconds of `tokens` tokens at the seconds per token of the largest known step."""
        x, seconds = self._known[max(self._known)]
        return seconds * tokens / math.exp2(x)


class Pacer:
    """Decides how many prompt tokens each step computes; learns from the steps that it is given.

    stretch           the bound on 99 of 100 intervals, as a multiple of the median interval; 0: no bound
    max_step_tokens   max tokens of a step, even if more would keep the bound
    patience_seconds  how long a prompt of max_step_tokens waits at most; a shorter one waits in proportion
    """

    def __init__(self, stretch: float, max_step_tokens: int, patience_seconds: float) -> None:
        self._stretch, self._most, self._patience = stretch, max_step_tokens, patience_seconds
        self.times = StepTimes()
        self._newest: deque[float] = deque()  # the last WINDOW_STEPS intervals without prompts, seconds
        self._sorted: list[float] = []  # the same, ascending
        self._steps = 0  # recorded so far
        self._credit = 1.0  # how many intervals may exceed the bound now
        self._long_plans: deque[int] = deque(maxlen=PLANNED_AHEAD_STEPS)  # `_steps` when each long step was planned

    @property
    def _bound(self) -> float:
        """The bound of an interval, seconds; infinite before there is a median."""
        if not self._stretch or len(self._sorted) < FEWEST_STEPS:
            return math.inf
        return self._stretch * self._sorted[len(self._sorted) // 2]

    def prompt_tokens(self, decoding: int, prompts: Sequence[tuple[int, int, float]]) -> int:
        """Prompt tokens of the next step, in which `decoding` requests decode; 0: prompts wait for a later step.
        prompts: (tokens, tokens left to compute, seconds waited) of each prompt that could be computed."""
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
        """Takes note of a planned step of `tokens` tokens, in which `decoding` requests decode."""
        bound = self._bound
        if decoding and bound < math.inf and tokens > self.times.tokens(bound, self._most):
            self._long_plans.append(self._steps)

    def record(self, tokens: int, decoded: int, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step of `tokens` tokens, `prompt_tokens` of them of prompts, in which `decoded` requests
        decoded. Its result came `seconds` after the previous one."""
        if not self._stretch or seconds <= 0:
            return
        self.times.record(tokens, seconds)
        if not decoded:
            self._steps += 1
            return
        self.count(seconds)
        if prompt_tokens:
            return
        self._newest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._newest) > WINDOW_STEPS:
            del self._sorted[bisect_right(self._sorted, self._newest.popleft()) - 1]

    def count(self, seconds: float) -> None:
        """Counts an interval between tokens. Called alone for a step with pictures: nothing else is learned from it."""
        self._steps += 1
        self._credit = min(self._credit + LONG_SHARE, MAX_CREDIT_STEPS)
        if seconds > self._bound:
            # Not below 0: else prompts would later wait long to make up for steps that broke the bound anyway.
            self._credit = max(self._credit - 1.0, 0.0)
