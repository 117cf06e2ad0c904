"""Which mode steps use, by measured speed: no drafts, matches with earlier text, or a draft model as well.

Each mode has a running rate: tokens of one request per second. The fastest known mode is used. That rate is also the
exchange rate between seconds and tokens by which a step's drafts are chosen (policy.py): at 100 tokens/s a draft that
costs 1 ms must bring more than 0.1 tokens.

Costs and probabilities are estimates, so the other modes are measured in short trials. After each trial the next one
waits until the tokens that the trial lost are at most TRIAL_LOSS_SHARE of all tokens.
"""

import enum
import math
from collections.abc import Callable
from typing import NamedTuple

from perilune.core.step import StepPlan
from perilune.speculation.acceptance_rates import Rate
from perilune.speculation.live_costs import LiveCosts

RATE_MEMORY_STEPS = 64.0  # Steps that a rate averages over. Larger: smoother, slower to notice a change of text.
RATE_PRIOR_STEPS = 4.0  # Steps that the initial rate counts for. Larger: a trial needs more steps to show a difference.
EARLY_END_STEPS = (
    6  # Steps after which a bad trial may end early. Larger: bad trials cost more; smaller: noise ends good ones.
)
EARLY_END_RATIO = 0.9  # End a trial early below this share of the old mode's rate. Larger: more trials end early.
CLEAR_GAIN_RATIO = 1.3  # A mode this much faster than plain steps counts as settled after EARLY_END_STEPS.
STAY_RATIO = 1.02  # Another mode must be 2 % faster to replace the present one. Larger: fewer, later changes.
PLAIN_TRIAL_STEPS = 8  # Length of a trial of plain steps. Larger: drafting is interrupted for longer.
DRAFT_TRIAL_STEPS = 32  # Length of a trial with drafts. Larger: surer, but a losing trial costs more.
FIRST_TRIAL_STEPS = 8  # Steps until the first trial if there are two modes with drafts.
MIN_INTERVAL_STEPS = 128  # Steps between two trials, at least. Larger: a change of text is noticed later.
NEVER_STEPS = 1 << 30  # Steps until a trial where there is only one mode.
UNPROMISING_STEPS = 512  # Steps until the first trial of a draft model that other batch sizes found too slow.
PROMPT_WINDOW_STEPS = (
    64  # A trial of the draft model moves by up to this many steps, to begin with a prompt (full context).
)
TRIAL_LOSS_SHARE = (0.001, 0.004, 0.004)  # By Mode: share of all time that trials may lose. Larger: more trials.
IN_FLIGHT_STEPS = 3  # Steps that are planned and not yet recorded, at most.


class Mode(enum.IntEnum):
    """What steps draft: nothing; matches with earlier text, the draft model left out of the step; all sources."""

    PLAIN = 0
    MATCHES = 1
    ALL = 2


# By Mode: rate over that of plain steps below which the mode is given up, and steps before that is judged. Steps with
# MATCHES cost almost as little as plain ones where nothing matches, and gain in bursts: lower ratio, more steps.
MIN_GAIN_RATIO, JUDGE_STEPS = (0.0, 0.98, 1.02), (0.0, 64.0, 24.0)


class Batch(NamedTuple):
    """A step's number of requests, and their mean context in tokens."""

    requests: int
    context: int


ByPromise = Callable[[Batch], list[Mode]]  # the modes that a batch may use, the most promising one first


class ModeChoice:
    """The mode of batches of about one size (1, 2, 3-4, 5-8, ... requests).

    `mode` is the fastest known, `trial` another one while it is measured; `steps_left` until a trial begins or ends.
    """

    def __init__(self, costs: LiveCosts, by_promise: ByPromise, batch: Batch) -> None:
        self._costs = costs
        self._by_promise = by_promise
        self.modes = modes = by_promise(batch)
        self.mode = modes[0]
        self.trial: Mode | None = None
        seconds = RATE_PRIOR_STEPS * costs.plain(*batch)  # rates are of tokens of one request over seconds
        self._rates: dict[Mode, Rate] = {mode: Rate(RATE_PRIOR_STEPS, seconds) for mode in modes if mode != Mode.PLAIN}
        unpromising = modes == [Mode.PLAIN, Mode.ALL]
        left = FIRST_TRIAL_STEPS if len(modes) > 2 else UNPROMISING_STEPS if unpromising else MIN_INTERVAL_STEPS
        if (
            modes[0] == Mode.MATCHES
        ):  # the model's first trial may begin early with a prompt: not before any step of matches
            left += PROMPT_WINDOW_STEPS
        self.steps_left = left if len(modes) > 1 else NEVER_STEPS
        self._steps = 0  # since a trial began or ended
        self._trial_seconds = self._trial_tokens = 0.0  # tokens of one request
        self._trials = 0
        self._tried: dict[Mode, int] = {}  # the number of each mode's last trial

    @property
    def current(self) -> Mode:
        """The mode of the next step."""
        return self.mode if self.trial is None else self.trial

    @property
    def plain_steps_left(self) -> int:
        """Plain steps until the next trial; 0 if steps have drafts, or a trial runs."""
        return max(self.steps_left, 0) if self.mode == Mode.PLAIN and self.trial is None else 0

    def tokens_per_second(self, batch: Batch) -> float:
        """Of all requests of the batch, in the present mode."""
        return batch.requests * self._rate(self.current, batch)

    def settled(self, batch: Batch) -> bool:
        """Whether no trial runs and the present mode has been measured for long enough."""
        if self.trial is not None or self.mode == Mode.PLAIN:
            return self.trial is None
        rate = self._rates[self.mode]
        clear = rate.samples >= EARLY_END_STEPS and rate.mean * self._costs.plain(*batch) >= CLEAR_GAIN_RATIO
        return clear or rate.samples >= JUDGE_STEPS[self.mode]

    def prompt_started(self, batch: Batch) -> None:
        """Begins a trial of the draft model now if one is due soon: the model then sees the whole prompt."""
        if self.trial is None and self.steps_left <= PROMPT_WINDOW_STEPS and self._next_trial() == Mode.ALL:
            self._begin_trial(batch)

    def record_step(self, batch: Batch, mode: Mode, tokens: int, seconds: float, steps: int = 1) -> None:
        """A step of `batch` planned in `mode` gave `tokens` in `seconds`, one sample of `steps` such steps."""
        if mode != self.current or len(self.modes) == 1:
            return  # planned before the mode changed, or there is no choice
        self.steps_left -= steps
        self._steps += steps
        if mode != Mode.PLAIN:
            self._rates[mode].add(tokens / batch.requests, seconds, RATE_MEMORY_STEPS)
        if self.trial is None:
            due = self.steps_left <= (-PROMPT_WINDOW_STEPS if self._next_trial() == Mode.ALL else 0)
            if due or self._too_slow(batch):
                self._begin_trial(batch)
            return
        self._trial_seconds += seconds
        self._trial_tokens += tokens / batch.requests
        hopeless = False
        if mode != Mode.PLAIN and self._rates[mode].samples >= EARLY_END_STEPS:
            hopeless = self._rates[mode].mean < EARLY_END_RATIO * self._rate(self.mode, batch)
        if self.steps_left <= 0 or hopeless:
            self._end_trial(batch)

    def _too_slow(self, batch: Batch) -> bool:
        """Whether the present mode is so slow that the next trial begins at once."""
        if self.mode == Mode.PLAIN or self._steps < EARLY_END_STEPS:
            return False
        value = self._rates[self.mode].mean * self._costs.plain(*batch)
        if self._steps < JUDGE_STEPS[self.mode]:  # few steps may be a hard passage: the predicted order must agree
            return value < EARLY_END_RATIO and self._by_promise(batch)[0] != self.mode
        return value < MIN_GAIN_RATIO[self.mode]

    def _next_trial(self) -> Mode:
        """The mode that has not been tried for longest."""
        return min((mode for mode in self.modes if mode != self.mode), key=lambda m: (self._tried.get(m, -1), -m))

    def _begin_trial(self, batch: Batch) -> None:
        self.trial = mode = self._next_trial()
        self._trials += 1
        self._tried[mode] = self._trials
        self.steps_left = PLAIN_TRIAL_STEPS if mode == Mode.PLAIN else DRAFT_TRIAL_STEPS
        self._steps, self._trial_seconds, self._trial_tokens = 0, 0.0, 0.0
        if mode != Mode.PLAIN:
            self._rates[mode] = Rate(RATE_PRIOR_STEPS, RATE_PRIOR_STEPS / self._rate(self.mode, batch))

    def _end_trial(self, batch: Batch) -> None:
        """Keeps the fastest mode; the next trial waits until the loss is a small enough share of the time."""
        assert self.trial is not None
        plain = self._costs.plain(*batch)

        def measured(mode: Mode) -> float:
            value = self._rate(mode, batch)
            if mode != Mode.PLAIN:
                enough = EARLY_END_STEPS if mode == self.trial else JUDGE_STEPS[mode]
                if self._rates[mode].samples >= enough and value < MIN_GAIN_RATIO[mode] / plain:
                    return 0.0
            return value * STAY_RATIO if mode == self.mode else value

        best = max({Mode.PLAIN, self.mode, self.trial}, key=measured)
        slower, lost = self.trial, 0.0  # seconds
        if best != self.trial:
            lost = self._trial_seconds - self._trial_tokens / self._rate(best, batch)
        elif best == Mode.PLAIN:  # the loss is that of the mode before
            slower, rate = self.mode, self._rates[self.mode]
            lost = rate.total - rate.hits * plain
        self.steps_left = max(MIN_INTERVAL_STEPS, math.ceil(lost / TRIAL_LOSS_SHARE[slower] / plain))
        self.mode, self.trial, self._steps = best, None, 0

    def _rate(self, mode: Mode, batch: Batch) -> float:
        """Tokens of one request per second."""
        return 1 / self._costs.plain(*batch) if mode == Mode.PLAIN else self._rates[mode].mean


class Modes:
    """A ModeChoice for each size of batch, made when the size is first met; kept at hand for the steps in flight."""

    def __init__(self, costs: LiveCosts, by_promise: ByPromise) -> None:
        self._costs = costs
        self._by_promise = by_promise
        self._choices: dict[int, ModeChoice] = {}
        self._in_flight: dict[int, tuple[Batch, ModeChoice]] = {}  # by number of the step

    def of(self, plan: StepPlan) -> tuple[Batch, ModeChoice]:
        """The batch of a plan as first asked for: drafts that are added later do not count."""
        found = self._in_flight.get(plan.step)
        if found is None:
            n = len(plan.work)
            batch = Batch(n, sum([w.end for w in plan.work]) // n)
            found = self._in_flight[plan.step] = batch, self.choice(batch)
            if len(self._in_flight) > IN_FLIGHT_STEPS:
                del self._in_flight[next(iter(self._in_flight))]
        return found

    def choice(self, batch: Batch) -> ModeChoice:
        size = (batch.requests - 1).bit_length()
        choice = self._choices.get(size)
        if choice is None:
            choice = self._choices[size] = ModeChoice(self._costs, self._by_promise, batch)
        return choice
