"""Chooses the length of the next draft chains from the gains of recent chains, before the draft model's confidence is
known.

While chains do not pay, a short one is drafted now and then (a probe), to see whether the text has become easier.
"""

from perilune.core.step import StepPlan
from perilune.speculation.acceptance_rates import AcceptanceRates
from perilune.speculation.live_costs import LiveCosts
from perilune.speculation.modes import Batch, ModeChoice
from perilune.speculation.policy import ChainGain, best_length, net_gain
from perilune.speculation.request_state import RequestState

PROBE_LENGTH = 3  # Tokens drafted to test whether chains pay again. Larger: a failed test costs more.
FIRST_PROBE_STEPS, LAST_PROBE_STEPS = 4, 64  # Steps without a chain until a probe: 4, then 8, 16, ... up to 64.
REQUEST_PRIOR_CHAINS = 6.0  # Weight of the mean of all requests, from which a new one starts. Larger: adapts later.
MEMORY_CHAINS = 32.0  # Chains that a mean averages over. Larger: smoother, slower to follow a change of text.


class ChainLengths:
    """Chooses lengths of chains of up to `longest` tokens. `states`: of unfinished requests, by rid, with the mean gain
    of their chains."""

    def __init__(self, longest: int, costs: LiveCosts, rates: AcceptanceRates, states: dict[int, RequestState]) -> None:
        self._longest = longest
        self._costs = costs
        self._rates = rates
        self._states = states
        self._gain: ChainGain | None = None  # mean over all requests
        self._paying: tuple[int, int] | None = None  # (requests, length) last chosen; None: choose anew
        self._steps_without, self._patience = 0, FIRST_PROBE_STEPS  # steps without a chain: so far, and until a probe
        self._probing = False  # whether the last chain was a probe

    def drafter_left_out(self) -> None:
        """Call it when a step is planned without the draft model: the next step with it drafts at least a probe."""
        self._steps_without = self._patience = FIRST_PROBE_STEPS
        self._paying = None

    def choose(self, plan: StepPlan, batch: Batch, choice: ModeChoice) -> int:
        """Length of the chains drafted after this step; at least PROBE_LENGTH while a trial of the mode runs."""
        trying = choice.trial is not None
        if not trying and self._paying is not None and self._paying[0] == batch.requests:
            return self._paying[1]
        if self._gain is None:
            typical = self._rates.typical(-1, self._longest)
            gains = net_gain(typical, *self._token_costs(batch, choice), self._longest, self._costs.can_chain)
            self._gain = ChainGain(gains, 1.0, MEMORY_CHAINS)
        each = []
        for work in plan.work:
            state = self._states.get(work.rid)
            if state is not None and work.sample:
                if state.gain is None:
                    state.gain = ChainGain(self._gain.by_length, REQUEST_PRIOR_CHAINS, MEMORY_CHAINS)
                each.append(state.gain.by_length)
        lost = choice.tokens_per_second(batch) * self._costs.verifying.overhead(batch.requests)
        length, probe = best_length(each, lost), min(PROBE_LENGTH, self._longest)
        if trying:
            length = max(length, probe)
        self._probing = not length
        if length:
            self._steps_without, self._patience = 0, FIRST_PROBE_STEPS
            self._paying = None if trying else (len(each), length)
            return length
        self._steps_without += 1
        if self._steps_without < self._patience:
            return 0
        self._steps_without, self._patience = 0, min(2 * self._patience, LAST_PROBE_STEPS)
        return probe

    def record(self, plan: StepPlan, batch: Batch, choice: ModeChoice) -> None:
        """Adds the expected gains of the chains drafted after this step; call it before they are verified."""
        verifying, drafting = self._token_costs(batch, choice)
        self._paying = None
        total = 0.0
        for work in plan.work:
            state = self._states.get(work.rid)
            if state is None or not state.chain or not self._rates.has_turn(work.rid, len(plan.work)):
                continue
            survival = self._rates.survival(work.rid, state.chain_drafts)
            drafted = len(survival)
            # If low confidence did not end the chain, extrapolate: further tokens survive as those of a mean chain.
            if drafted == plan.chain and drafted < self._longest:
                typical = self._rates.typical(work.rid, self._longest)
                survival += [survival[-1] * t / typical[drafted - 1] for t in typical[drafted:]]
                drafted = self._longest
            survival += [0.0] * (self._longest - len(survival))
            gains = net_gain(survival, verifying, drafting, drafted, self._costs.can_chain)
            total += max(gains)
            if self._gain is not None:
                self._gain.add(gains)
            if state.gain is not None:
                state.gain.add(gains)
        if self._probing and total > 0:
            self._patience = 1  # the probe paid, so the text may have become easier: probe again in the next step

    def _token_costs(self, batch: Batch, choice: ModeChoice) -> tuple[list[float], float]:
        """Costs in tokens, per request: of verifying 1, 2, ... drafts of each request; of drafting one more token."""
        rate = choice.tokens_per_second(batch) / batch.requests
        base = self._costs.verifying.base
        plain = base(batch.requests)
        verifying = [rate * (base((1 + k) * batch.requests) - plain) for k in range(1, self._longest + 1)]
        return verifying, rate * self._costs.draft_token(batch.requests)
