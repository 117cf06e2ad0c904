"""What the engine asks about drafts: requests and tokens go in, drafts for the next step come out.

Drafts come from matches with earlier text (suffix.py), from a draft model (drafter.py; its chain arrives with the
tokens that it continues), or from both: the chain, continued by matches after it. How many are verified is decided by
measured gain (adaptive.py), or fixed (fixed_length.py).

Everything runs on the planning thread. The next step waits for `propose` and `chain_length`; `maintain` is called while
a step runs, and does what can wait. Where steps are chained (queued behind drafts in flight), what a step verifies is
known here one step late.
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

MIN_CONFIDENCE = 0.4  # On a CPU, a chain ends when the model's confidence in all of it is less. Larger: shorter chains.


class Speculator:
    """Drafts for the requests of one engine.

    suffix   matches with earlier text are looked up
    longest  tokens that a draft model can draft; 0 without one
    fixed    number of drafts whenever they can be had; None: as many as pay, by `costs`
    shared   texts of finished requests may match (never changes an answer)

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
        self._has_chains = False  # some request has a chain
        self._tally = Tally()

    @property
    def paused(self) -> int:
        """Steps, at most, for which nothing is asked here: see `record_paused`."""
        return self._pause.steps

    def open(self, rid: int, prompt: Sequence[int], root: bytes = b"") -> None:
        if self._pause.steps and self.longest and self._pause.until_trial <= PROMPT_WINDOW_STEPS:
            self._resume()
        self._requests.open(rid, prompt, root)

    def drop(self, rid: int) -> None:
        """The request has ended; unknown ids are ignored."""
        self._requests.drop(rid)

    def record_paused(self, requests: int, deltas: Sequence[Delta]) -> None:
        """A step of so many requests landed while `paused` is not 0. Such steps are those of an engine without drafts:
        this is the only call, and their tokens are read when the pause ends."""
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
        """A step has landed."""
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
        """The step last observed took `seconds` from when its predecessor landed; `alone`: planned after that."""
        if self._records is not None:
            self._records.record_time(plan, seconds, alone)

    def worth_waiting(self, running: StepPlan) -> bool:
        """Whether drafts for the step after `running` promise more than planning that step before `running` lands."""
        return self._policy.worth_waiting(running)

    def chained(self, running: StepPlan) -> int | None:
        """How many tokens of the chain after `running` the next step verifies, planned before they are known; None if
        it is not planned so."""
        return self._policy.chained(running)

    def propose(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        """Drafts by rid for a step about to run; none if its predecessor has not been observed."""
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
        """How many tokens the draft model drafts after this step, or LEFT_OUT; may begin a pause."""
        return self._policy.chain_length(plan)

    def maintain(self) -> None:
        """Learns from what was observed and indexes texts; best called while the device is busy."""
        if self._records is not None:
            self._records.apply()
        self._rates.apply()
        self._requests.index()

    def report(self, stats: EngineStats) -> EngineStats:
        """`stats` with the numbers of drafts."""
        return self._tally.report(stats)

    def _tally_drafts(self, delta: Delta, state: RequestState) -> None:
        planned, state.planned = state.planned, None
        if planned is None:  # of a chained step: all were of the chain
            self._tally.add_chain(min(delta.drafted, len(state.chain)), delta.accepted)
        else:
            self._tally.add(planned[: delta.drafted], delta.accepted)
