"""Records measured steps (how each was planned, seconds, tokens), from which costs and modes learn."""

from dataclasses import dataclass

from perilune.core.step import LEFT_OUT, MAX_DRAFTS, StepPlan
from perilune.speculation.acceptance_rates import AcceptanceRates
from perilune.speculation.chain_length import ChainLengths
from perilune.speculation.live_costs import LiveCosts
from perilune.speculation.modes import IN_FLIGHT_STEPS, Mode, Modes
from perilune.speculation.pausing import Pause
from perilune.speculation.step_cost import StepKind

# If steps can be chained, record one of this many plain steps. Larger: less Python per step.
PLAIN_STEPS_PER_SAMPLE = 8
DRAFT_STEPS_PER_SAMPLE = 3  # As above, for steps of a settled mode with a draft model.
# Every step is recorded until this many chains were learned from. Larger: better estimates, more Python at first.
SETTLED_CHAINS = 16.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that was committed."""

    plan: StepPlan
    seconds: float
    mode: Mode
    kind: StepKind
    tokens: int  # accepted and sampled, of all requests
    chain: int  # length of the longest chain drafted after it
    steps: int  # number of similar steps that this sample represents


class StepRecords:
    """Decides which steps are recorded, by how they were planned. `drafter`: whether there is a draft model."""

    def __init__(
        self,
        costs: LiveCosts,
        modes: Modes,
        lengths: ChainLengths,
        rates: AcceptanceRates,
        pause: Pause,
        *,
        drafter: bool,
    ) -> None:
        self._costs, self._modes, self._lengths = costs, modes, lengths
        self._rates, self._pause, self._drafter = rates, pause, drafter
        self._planned: dict[int, Mode] = {}  # by StepPlan.step
        self.landed = 0, 0  # the step committed last: its tokens, and the longest chain drafted after it
        self._samples: list[Sample] = []
        self._unrecorded, self._mode = 0, Mode.PLAIN  # steps since the last sample, all planned in this mode
        self.learns = True  # whether to learn from the chains of the step that is committed next

    def plan(self, step: int, mode: Mode) -> None:
        """Notes the mode in which a step was planned."""
        self._planned[step] = mode
        if len(self._planned) > IN_FLIGHT_STEPS:
            del self._planned[next(iter(self._planned))]

    def record_paused(self) -> None:
        """Call it for each step committed during a pause."""
        self._planned.clear()
        self._unrecorded += 1

    def record_time(self, plan: StepPlan, seconds: float, alone: bool) -> None:
        """As protocol.Drafting.record_time."""
        mode = self._planned.pop(plan.step, Mode.PLAIN)
        if any(w.count > MAX_DRAFTS + 1 for w in plan.work):  # a prompt is in the step: it does not measure decoding
            return
        if mode != self._mode:
            self._unrecorded, self._mode = 0, mode
        self._unrecorded += 1
        every = self._steps_per_sample(plan, mode)
        self.learns = mode != Mode.ALL or self._unrecorded + 1 >= every
        if self._unrecorded < every and not self._pause.resumed:
            return
        self.learns = mode != Mode.ALL or every == 1
        kind = self._kind(plan, mode, alone)
        self._samples.append(Sample(plan, seconds, mode, kind, *self.landed, self._unrecorded))
        self._unrecorded, self._pause.resumed = 0, False

    def apply(self) -> None:
        """Updates costs, modes and chain lengths by the samples; call it while a step runs."""
        for s in self._samples:
            counts, contexts = [w.count for w in s.plan.work], [w.end for w in s.plan.work]
            batch, choice = self._modes.of(s.plan)
            self._costs.record(counts, contexts, s.chain, s.kind, s.seconds)
            # Credit the mode with predicted seconds, not measured ones: a page fault or another process must not make a
            # mode look slow.
            seconds = self._costs.step(counts, contexts, s.chain, s.kind)
            choice.record_step(batch, s.mode, s.tokens, seconds, s.steps)
            if s.plan.chain > 0:
                self._lengths.record(s.plan, batch, choice)
        self._samples.clear()

    def _steps_per_sample(self, plan: StepPlan, mode: Mode) -> int:
        """N: one of N steps is recorded. Above 1 only if steps can be chained: these leave little time for Python."""
        if not self._costs.can_chain or mode == Mode.MATCHES:
            return 1
        if mode == Mode.PLAIN:
            return PLAIN_STEPS_PER_SAMPLE
        batch, choice = self._modes.of(plan)
        settled = self._rates.chains >= SETTLED_CHAINS and choice.settled(batch)
        return DRAFT_STEPS_PER_SAMPLE if settled else 1

    def _kind(self, plan: StepPlan, mode: Mode, alone: bool) -> StepKind:
        with_drafter = self._drafter and plan.chain != LEFT_OUT
        if alone:
            return StepKind.NO_DRAFTER if self._drafter and not with_drafter else StepKind.WAITED
        if with_drafter and self._costs.can_chain:
            return StepKind.CHAINED
        return StepKind.OVERLAPPED if mode == Mode.PLAIN else StepKind.OVERLAPPED_AFTER_LOOKUP
