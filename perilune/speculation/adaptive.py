"""The drafting policy by measured gain: whether to wait for drafts, how many to verify, how long chains should be."""

from collections.abc import Sequence

from perilune.core.step import LEFT_OUT, MAX_DRAFTS, StepPlan
from perilune.speculation.acceptance_rates import AcceptanceRates, of_match
from perilune.speculation.chain_length import ChainLengths
from perilune.speculation.live_costs import KindCosts, LiveCosts
from perilune.speculation.modes import Batch, Mode, ModeChoice, Modes
from perilune.speculation.pausing import Pause
from perilune.speculation.policy import Candidates, choose
from perilune.speculation.requests import Requests
from perilune.speculation.step_records import StepRecords

# About 60 us of Python for the n-gram lookup of one request. Larger: lookups only where steps take longer.
LOOKUP_SECONDS = 60e-6
# For requests that already have a draft chain: if n-gram lookups would take more than 3 % of a step, do them while the
# next step runs. Larger: more chains are continued by matches, and more steps wait for Python.
LOOKUP_BUDGET_SHARE = 0.03
# For chained and plain steps, which do not wait for Python: if n-gram lookups would take more than 10 % of a step, do
# none. Larger: matches are used with smaller models too, and slow their steps.
LOOKUP_LIMIT_SHARE = 0.1
# Until this many chains were learned from, every batch size begins in the draft model's mode. Larger: more of them do.
KNOWN_CHAINS = 8.0
# After that, a batch size begins in it if it is predicted to be 5 % faster than plain steps. Larger: fewer do.
PROMISING_RATIO = 1.05


class Adaptive:
    """The policy of an engine with measured step times. `longest`: tokens that the draft model can draft; 0: none."""

    def __init__(
        self, costs: LiveCosts, longest: int, requests: Requests, rates: AcceptanceRates, pause: Pause
    ) -> None:
        self._costs = costs
        self._longest = longest
        self._requests = requests
        self._rates = rates
        self._pause = pause
        self.modes = Modes(costs, self._by_promise)
        self._lengths = ChainLengths(longest, costs, rates, requests.states)
        self.records = StepRecords(costs, self.modes, self._lengths, rates, pause, drafter=longest > 0)
        self._last_mode = Mode.ALL

    def can_look_up(self, requests: int) -> bool:
        """Whether a step of `requests` requests is long enough for Python to look up matches while it runs."""
        if not self._requests.suffix or (self._longest and not self._costs.can_chain):
            return self._requests.suffix
        step = self._costs.verifying.base(requests) if self._longest else self._costs.plain(requests, 0)
        return requests * LOOKUP_SECONDS <= LOOKUP_LIMIT_SHARE * step

    def defers_lookup(self, requests: int) -> bool:
        """Whether n-gram lookup for requests that have a chain is deferred until the next step runs."""
        return requests * LOOKUP_SECONDS > LOOKUP_BUDGET_SHARE * self._costs.waited.base(requests)

    def worth_waiting(self, running: StepPlan) -> bool:
        """Whether the expected gain of drafts exceeds the time saved by planning the next step while `running` runs."""
        if running.chain <= 0 and not self._requests.lookup:
            return False
        batch, choice = self.modes.of(running)
        if choice.current == Mode.PLAIN:
            return False
        if running.chain > 0:
            return True
        candidates = []
        for work in running.work:
            state = self._requests.states.get(work.rid)
            candidate = Candidates(1 if work.sample else work.count, work.end)
            candidates.append(candidate)
            if state is None or not work.sample:
                continue
            if (matcher := state.ready) is not None and matcher.next_match() is not None:
                # The first match is the token that `running` still samples: drafts need that match to be right.
                candidate.possible, *rest = self._rates.survival(
                    work.rid, map(of_match, matcher.drafts(MAX_DRAFTS + 1))
                )
                candidate.survival = [s / candidate.possible for s in rest]
        if not any(c.survival for c in candidates):
            return False
        n, costs = batch.requests, self._waiting_costs(choice)
        return choose(candidates, costs, MAX_DRAFTS * n, choice.tokens_per_second(batch), costs.overhead(n)) > 0.0

    def chained(self, running: StepPlan) -> int | None:
        """As protocol.Drafting.chained."""
        drafted = any(w.drafts for w in running.work)
        if running.chain <= 0 and not drafted:
            return None
        batch, choice = self.modes.of(running)
        if running.chain <= 0 or choice.current != Mode.ALL:
            return 0 if drafted else None
        return None if self.can_look_up(batch.requests) and self._matches_win(running, batch, choice) else running.chain

    def max_drafts(self, plan: StepPlan) -> int:
        """The largest number of drafts of one request; 0 if the step's mode has no drafts."""
        return 0 if self.modes.of(plan)[1].current == Mode.PLAIN else MAX_DRAFTS

    def choose(self, plan: StepPlan, candidates: Sequence[Candidates]) -> None:
        """Sets how many drafts of each request the step verifies."""
        if any(c.survival for c in candidates):
            batch, choice = self.modes.of(plan)
            tokens_per_second = choice.tokens_per_second(batch)
            choose(candidates, self._waiting_costs(choice), MAX_DRAFTS * batch.requests, tokens_per_second)

    def chain_length(self, plan: StepPlan) -> int:
        """How many tokens the draft model drafts after this step, or LEFT_OUT; may begin a pause."""
        batch, choice = self.modes.of(plan)
        if self._longest and any(w.count > MAX_DRAFTS + 1 for w in plan.work):
            choice.prompt_started(batch)
        mode = choice.current
        plain_twice = mode == self._last_mode == Mode.PLAIN
        if plain_twice and not self._pause.resumed and not any(w.drafts or w.chained for w in plan.work):
            self._pause.begin(choice.plain_steps_left, batch.requests)
        self._last_mode = mode
        self.records.plan(plan.step, mode)
        if self._longest and mode != Mode.ALL:
            self._lengths.drafter_left_out()
            return LEFT_OUT
        if not self._longest or not any(w.sample for w in plan.work):
            return 0
        return self._lengths.choose(plan, batch, choice)

    def _by_promise(self, batch: Batch) -> list[Mode]:
        """The modes that the batch may use, the one predicted to be fastest first (see modes.ByPromise)."""
        matches = [Mode.MATCHES] if self.can_look_up(batch.requests) else []
        if not self._longest:
            return [*matches, Mode.PLAIN]
        if self._rates.chains < KNOWN_CHAINS:
            return [Mode.ALL, *matches, Mode.PLAIN]
        n, plain = batch.requests, self._costs.plain(batch.requests, 0)
        tokens, best = 1.0, 0.0
        for length, survival in enumerate(self._rates.typical(-1, self._longest), 1):
            tokens += survival
            step = self._costs.verifying.base((1 + length) * n) + length * self._costs.draft_token(n)
            best = max(best, tokens * plain / step)
        return [Mode.ALL, *matches, Mode.PLAIN] if best >= PROMISING_RATIO else [*matches, Mode.PLAIN, Mode.ALL]

    def _waiting_costs(self, choice: ModeChoice) -> KindCosts:
        """Step times for steps that are planned after the result of the step before."""
        left_out = self._longest and choice.current != Mode.ALL
        return self._costs.waited_without_drafter if left_out else self._costs.waited

    def _matches_win(self, running: StepPlan, batch: Batch, choice: ModeChoice) -> bool:
        """Whether drafts from matches are expected to gain more tokens than the chains of `running`, by more than the
        wait for its result costs."""
        gain, longest = 0.0, 0
        for work in running.work:
            state = self._requests.states.get(work.rid)
            if state is None or not work.sample:
                continue
            self._rates.observations += state.match_pending(work.rid)
            if (matcher := state.ready) is None:
                continue
            before = [token for token, _ in state.chain[: work.drafts]] if work.chained else list(work.draft_tokens)
            if len(before) < work.drafts:
                continue
            matched = matcher.drafts(MAX_DRAFTS + 1, before)
            if len(matched) <= running.chain + 1:
                continue
            drafts = state.chain_drafts if state.planned is None else state.planned
            drafts = [*drafts[: len(before)], *map(of_match, matched)]
            possible, *rest = self._rates.survival(work.rid, drafts)[len(before) :]
            more = sum(rest) / possible - sum(self._rates.typical(work.rid, running.chain))
            if more > 0:
                gain, longest = gain + possible * more, max(longest, len(matched) - 1)
        if not gain:
            return False
        n = batch.requests
        seconds = self._costs.waited.base(n * (1 + longest)) - self._costs.verifying.base(n * (1 + running.chain))
        return gain > choice.tokens_per_second(batch) * seconds
