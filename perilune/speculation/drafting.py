"""The speculator of an engine: requests and sampled tokens go in, drafts for the next step come out.

Drafts come from matches with earlier text (suffix.py, n-gram lookup), from a draft model (drafter.py; its chain arrives
with the tokens that it continues), or from both: the chain, continued by matches after it. The number to verify is
chosen by measured gain (adaptive.py), or fixed (fixed_length.py).

Everything runs on the planning thread. A chained step is planned while the drafts that it verifies are still being
computed: `observe` gets these drafts, and then the number accepted, only after the step was launched.
"""

from collections.abc import Mapping, Sequence

from perilune.core.messages import Delta, EngineStats
from perilune.core.step import PENDING, Output, StepPlan
from perilune.speculation.acceptance_rates import AcceptanceRates
from perilune.speculation.adaptive import Adaptive
from perilune.speculation.fixed_length import FixedLength
from perilune.speculation.live_costs import LiveCosts
from perilune.speculation.modes import PROMPT_WINDOW_STEPS
from perilune.speculation.pausing import Pause
from perilune.speculation.policy import Candidates
from perilune.speculation.request_state import RequestState
from perilune.speculation.requests import Requests
from perilune.speculation.stats import Tally
from perilune.speculation.step_cost import Costs

# On a CPU, a chain ends when the product of its tokens' probabilities is below this. Larger: shorter chains.
MIN_CONFIDENCE = 0.4


class Speculator:
    """Implements protocol.Drafting.

    suffix   whether matches with earlier text (n-gram lookup) are a source of drafts
    longest  tokens that the draft model can draft; 0: there is none
    fixed    max drafts per request and step; None: the number with the greatest gain, by `costs`
    shared   whether texts of finished requests may match (this never changes an answer)

    min_confidence  see StepPlan
    """

    def __init__(
        self, *, suffix: bool, longest: int = 0, fixed: int | None = None, costs: Costs | None = None, shared: bool
    ) -> None:
        assert (fixed is None) != (costs is None) and (suffix or longest)
        self.longest = longest
        live = None if costs is None else LiveCosts(costs if longest else costs.without_drafter())
        self._pause = Pause()
        self._rates = AcceptanceRates(by_turns=live is not None and live.can_chain)
        self._requests = Requests(suffix=suffix, shared=shared, rates=self._rates)
        self._policy: Adaptive | FixedLength
        if live is None:
            self._policy = FixedLength(fixed, longest, suffix=suffix)
        else:
            self._policy = Adaptive(live, longest, self._requests, self._rates, self._pause)
        self._records = self._policy.records
        self._requests.lookup = self._policy.can_look_up(1)
        self.min_confidence = MIN_CONFIDENCE if fixed is None else 0.0
        self._has_chains = False  # whether any request has a chain
        self._tally = Tally()

    @property
    def paused(self) -> int:
        return self._pause.steps

    def open(self, rid: int, prompt: Sequence[int], root: bytes = b"") -> None:
        if self._pause.steps and self.longest and self._pause.until_trial <= PROMPT_WINDOW_STEPS:
            self._resume()
        self._requests.open(rid, prompt, root)

    def drop(self, rid: int) -> None:
        self._requests.drop(rid)

    def record_paused(self, requests: int, deltas: Sequence[Delta]) -> None:
        """The tokens are added to the texts when the pause ends: a paused step needs hardly any Python here."""
        self._requests.unread.append(deltas)
        if self._records is not None:
            self._records.record_paused()
        self._pause.record_step(requests)
        if not self._pause.steps:
            self._resume()

    def _resume(self) -> None:
        self._pause.end()
        self._requests.read()

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        requests, rates, n = self._requests, self._rates, len(deltas)
        learns = requests.suffix
        if self._records is not None:
            learns = self._records.learns
            self._records.landed = sum([len(d.tokens) for d in deltas]), max([len(o.chain) for o in outputs], default=0)
        rates.turn += 1
        requests.lookup = lookup = self._policy.can_look_up(n)
        deferred = {o.rid for o in outputs if o.chain} if lookup and self._policy.defers_lookup(n) else ()
        for delta in deltas:
            state = requests.states.get(delta.rid)
            if state is None:
                continue
            if delta.drafted:
                self._tally_drafts(delta, state)
            if learns and state.chain and rates.has_turn(delta.rid, n):
                rates.observations += state.chain_observations(delta.rid, delta.tokens)
            if delta.tokens:
                state.chain = ()
                state.known_tokens += len(delta.tokens)
            if state.matcher is not None:
                state.pending += delta.tokens
                if lookup and state.pending and delta.rid not in deferred:
                    rates.observations += state.match_pending(delta.rid)
            if delta.finish_reason is not None:
                self.drop(delta.rid)
        had_chains, self._has_chains = self._has_chains, any(o.chain for o in outputs)
        for output in outputs if self.longest and (self._has_chains or had_chains) else ():
            if output.tokens and (state := requests.states.get(output.rid)) is not None:
                state.set_chain(output.chain)

    def record_time(self, plan: StepPlan, seconds: float, alone: bool) -> None:
        if self._records is not None:
            self._records.record_time(plan, seconds, alone)

    def worth_waiting(self, running: StepPlan) -> bool:
        return self._policy.worth_waiting(running)

    def chained(self, running: StepPlan) -> int | None:
        return self._policy.chained(running)

    def propose(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        if any(w.tokens[-1] == PENDING for w in plan.work):
            return {}
        states, policy = self._requests.states, self._policy
        if not (limit := policy.max_drafts(plan)):
            for work in plan.work:
                if (state := states.get(work.rid)) is not None:
                    state.planned = ()
            return {}
        found, candidates = [], []
        for work in plan.work:
            candidate = Candidates(work.count, work.end)
            candidates.append(candidate)
            if work.sample and work.count == 1 and (state := states.get(work.rid)) is not None:
                if state.matcher is not None:
                    known = state.known_tokens
                    assert known == work.end, f"request {work.rid}: {known} tokens seen of {work.end}"
                drafts, candidate.survival = self._requests.drafts(work.rid, state, min(limit, work.left - 1))
                found.append((work.rid, state, candidate, drafts))
        policy.choose(plan, candidates)
        proposed = {}
        for rid, state, candidate, drafts in found:
            state.planned = drafts[: candidate.taken]
            if candidate.taken:
                proposed[rid] = [token for token, _ in state.planned]
        return proposed

    def chain_length(self, plan: StepPlan) -> int:
        return self._policy.chain_length(plan)

    def maintain(self) -> None:
        """Learns from what was observed, and indexes texts."""
        if self._records is not None:
            self._records.apply()
        self._rates.apply()
        self._requests.index()

    def report(self, stats: EngineStats) -> EngineStats:
        return self._tally.report(stats)

    def _tally_drafts(self, delta: Delta, state: RequestState) -> None:
        planned, state.planned = state.planned, None
        if planned is None:  # a chained step verifies only drafts of the chain
            self._tally.add_chain(min(delta.drafted, len(state.chain)), delta.accepted)
        else:
            self._tally.add(planned[: delta.drafted], delta.accepted)
