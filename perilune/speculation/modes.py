"""Chooses the mode of steps by measured speed: no drafts, matches with earlier text, or a draft model as well.

Each mode has a moving average of its speed: tokens of one request per second. The fastest known mode is used. Its speed
also converts seconds to tokens when a step's drafts are chosen (policy.py): at 100 tokens/s a draft that costs 1 ms
must bring more than 0.1 tokens.

Step times and acceptance rates are estimates, so the other modes are measured in short trials. After a trial the next
one waits until the tokens that the trial lost are at most TRIAL_LOSS_SHARE of all tokens.
"""

import enum
import math
from collections.abc import Callable
from typing import NamedTuple

from perilune.core.step import StepPlan
from perilune.speculation.acceptance_rates import Rate
from perilune.speculation.live_costs import LiveCosts

RATE_MEMORY_STEPS = 64.0  # Steps that a rate averages over. Larger: smoother, slower to notice a change of text.
RATE_PRIOR_STEPS = 4.0  # Weight of the initial rate, in steps. Larger: a trial needs more steps to show a difference.
# Steps after which a bad trial may end early. Larger: bad trials cost more. Smaller: noise ends good trials.
EARLY_END_STEPS = 6
EARLY_END_RATIO = 0.9  # End a trial early below this share of the old mode's rate. Larger: more trials end early.
CLEAR_GAIN_RATIO = 1.3  # A mode this much faster than plain steps counts as settled after EARLY_END_STEPS.
STAY_RATIO = 1.02  # Another mode must be 2 % faster to replace the present one. Larger: fewer, later changes.
PLAIN_TRIAL_STEPS = 8  # Length of a trial of plain steps. Larger: drafting is interrupted for longer.
DRAFT_TRIAL_STEPS = 32  # Length of a trial with drafts. Larger: less noise, but a losing trial costs more.
FIRST_TRIAL_STEPS = 8  # Steps until the first trial if there are two modes with drafts.
MIN_INTERVAL_STEPS = 128  # Steps between two trials, at least. Larger: a change of text is noticed later.
NEVER_STEPS = 1 << 30  # Steps until a trial where there is only one mode.
# Steps until the first trial of a draft model that, by chains of other batch sizes, is predicted to gain too little.
UNPROMISING_STEPS = 512
# If a prompt starts, a trial of the draft model begins up to this many steps early: it then reads the whole prompt.
PROMPT_WINDOW_STEPS = 64
TRIAL_LOSS_SHARE = (0.001, 0.004, 0.004)  # By Mode: share of all time that its trials may lose. Larger: more trials.
IN_FLIGHT_STEPS = 3  # Steps that are planned and not yet recorded, at most.


class Mode(enum.IntEnum):
    """What steps draft: nothing; matches with earlier text, the draft model left out of the step; all sources."""

    PLAIN = 0
    MATCHES = 1
    ALL = 2


# By Mode: if the mode's speed over that of plain steps is below MIN_GAIN_RATIO after JUDGE_STEPS steps, a trial of
# another mode begins at once. MATCHES has a lower ratio and more steps: without a match its steps cost almost as little
# as plain ones, and matches come in bursts.
MIN_GAIN_RATIO, JUDGE_STEPS = (0.0, 0.98, 1.02), (0.0, 64.0, 24.0)


class Batch(NamedTuple):
    """A step's number of requests, and their mean context in tokens."""

    requests: int
    context: int


ByPromise = Callable[[Batch], list[Mode]]  # the modes that a batch may use, the most promising one first


class ModeChoice:
    """Chooses the mode for batches of one size class (1, 2, 3-4, 5-8, ... requests).

    `mode`: the fastest known; `trial`: the mode under trial, None between trials; `steps_left`: steps until a trial
    begins or ends.
    """

    def __init__(self, costs: LiveCosts, by_promise: ByPromise, batch: Batch) -> None:
        self._costs = costs
        self._by_promise = by_promise
        self.modes = modes = by_promise(batch)
        self.mode = modes[0]
        self.trial: Mode | None = None
        seconds = RATE_PRIOR_STEPS * costs.plain(*batch)  # a Rate's hits here: tokens of one request; total: seconds
        self._rates: dict[Mode, Rate] = {mode: Rate(RATE_PRIOR_STEPS, seconds) for mode in modes if mode != Mode.PLAIN}
        unpromising = modes == [Mode.PLAIN, Mode.ALL]
        left = FIRST_TRIAL_STEPS if len(modes) > 2 else UNPROMISING_STEPS if unpromising else MIN_INTERVAL_STEPS
        # A prompt may begin the draft model's first trial early; measure some steps with matches before that.
        if modes[0] == Mode.MATCHES:
            left += PROMPT_WINDOW_STEPS
        self.steps_left = left if len(modes) > 1 else NEVER_STEPS
        self._steps = 0  # since a trial began or ended
        self._trial_seconds = self._trial_tokens = 0.0  # in the current trial; tokens of one request
        self._trials = 0
        self._tried: dict[Mode, int] = {}  # by mode: `_trials` at its last trial

    @property
    def current(self) -> Mode:
        """The mode of the next step."""
        return self.mode if self.trial is None else self.trial

    @property
    def plain_steps_left(self) -> int:
        """Plain steps until the next trial; 0 if steps have drafts, or a trial runs."""
        return max(self.steps_left, 0) if self.mode == Mode.PLAIN and self.trial is None else 0

    def tokens_per_second(self, batch: Batch) -> float:
        """Tokens per second of all requests of the batch together, in the current mode."""
        return batch.requests * self._rate(self.current, batch)

    def settled(self, batch: Batch) -> bool:
        """Whether no trial runs and the current mode has been measured for enough steps."""
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
        """Learns from a step of `batch`, planned in `mode`, that gave `tokens` in `seconds`. It represents `steps`
        similar steps, of which only this one was recorded."""
        if mode != self.current or len(self.modes) == 1:
            return  # the step was planned before the mode changed, or there is only one mode
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
        """Whether the current mode is so slow that the next trial begins at once."""
        if self.mode == Mode.PLAIN or self._steps < EARLY_END_STEPS:
            return False
        value = self._rates[self.mode].mean * self._costs.plain(*batch)
        # After few steps a low speed may be due to a passage that is hard to draft: the prediction must agree.
        if self._steps < JUDGE_STEPS[self.mode]:
            return value < EARLY_END_RATIO and self._by_promise(batch)[0] != self.mode
        return value < MIN_GAIN_RATIO[self.mode]

    def _next_trial(self) -> Mode:
        """The mode to try next: one that was never tried, else the one with the oldest trial."""
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
        """Keeps the fastest mode, and sets the steps until the next trial so that the loss stays below
        TRIAL_LOSS_SHARE."""
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
        elif best == Mode.PLAIN:  # plain steps won: the old mode's steps lost time
            slower, rate = self.mode, self._rates[self.mode]
            lost = rate.total - rate.hits * plain
        self.steps_left = max(MIN_INTERVAL_STEPS, math.ceil(lost / TRIAL_LOSS_SHARE[slower] / plain))
        self.mode, self.trial, self._steps = best, None, 0

    def _rate(self, mode: Mode, batch: Batch) -> float:
        """Tokens of one request per second."""
        return 1 / self._costs.plain(*batch) if mode == Mode.PLAIN else self._rates[mode].mean


class Modes:
    """A ModeChoice for each size of batch, made at its first step; and the choices of the steps in flight."""

    def __init__(self, costs: LiveCosts, by_promise: ByPromise) -> None:
        self._costs = costs
        self._by_promise = by_promise
        self._choices: dict[int, ModeChoice] = {}
        self._in_flight: dict[int, tuple[Batch, ModeChoice]] = {}  # by StepPlan.step

    def of(self, plan: StepPlan) -> tuple[Batch, ModeChoice]:
        """The batch of a plan and its ModeChoice. Later calls for a plan return what the first one did: drafts that
        were added since do not count as context."""
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
