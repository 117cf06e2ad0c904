"""The requests that get drafts, and the texts in which matches are looked up: their own and those of finished
requests."""

from collections.abc import Sequence

from perilune.core.messages import Delta
from perilune.speculation.acceptance_rates import AcceptanceRates, Draft, of_match
from perilune.speculation.request_state import RequestState
from perilune.speculation.suffix import Store, SuffixMatcher, salted

INDEX_TOKENS = 4096  # Prompt tokens indexed per step: 1-2 ms. Larger: first matches earlier, longer Python calls.


class Requests:
    """`suffix`: whether matches with earlier text are a source of drafts; `shared`: also in texts of finished requests.

    `lookup`: whether matches are looked up now. `unread`: deltas of steps during a pause; `read` adds their tokens to
    the texts.
    """

    def __init__(self, *, suffix: bool, shared: bool, rates: AcceptanceRates) -> None:
        self.states: dict[int, RequestState] = {}  # by rid
        self.suffix = self.lookup = suffix
        self.unread: list[Sequence[Delta]] = []
        self._store = Store() if shared and suffix else None
        self._finished: list[SuffixMatcher] = []
        self._rates = rates

    def open(self, rid: int, prompt: Sequence[int], root: bytes) -> None:
        """`root`: as Observer.open."""
        matcher = SuffixMatcher(prompt, self._store, salted(root)) if self.suffix else None
        self.states[rid] = RequestState(matcher, len(prompt))

    def drop(self, rid: int) -> None:
        """Forgets a request that has ended, and keeps its text for others if `shared`; unknown ids are ignored."""
        if self.unread and rid in self.states:
            self.read()
        state = self.states.pop(rid, None)
        if state is not None:
            state.skip_pending()
            self._rates.ended.append(rid)
            if self._store is not None and state.matcher is not None:
                self._finished.append(state.matcher)

    def read(self) -> None:
        """Adds the tokens of steps during a pause to the texts of their requests."""
        for deltas in self.unread if self.suffix else ():
            for delta in deltas:
                if (state := self.states.get(delta.rid)) is not None:
                    state.pending += delta.tokens
                    state.known_tokens += len(delta.tokens)
        self.unread.clear()

    def index(self) -> None:
        """Indexes up to INDEX_TOKENS tokens of texts for later matches, 1-2 ms: call it while a step runs."""
        room = INDEX_TOKENS
        for rid, state in self.states.items() if self.lookup else ():
            if state.pending:
                self._rates.observations += state.match_pending(rid)
            if state.matcher is not None and state.matcher.unindexed and room:
                room -= state.matcher.index_prompt(room)
        for matcher in self._finished:
            assert self._store is not None
            self._store.add(matcher.answer(), matcher.salt)
        self._finished.clear()

    def drafts(self, rid: int, state: RequestState, max_drafts: int) -> tuple[list[Draft], list[float]]:
        """The drafts with the greatest expected number accepted, and P(the first k of them are right), k = 1, 2, ...

        Three candidates are compared: the chain, continued by matches after it; the chain up to its first token that
        is less likely to be right than the match at its position, continued by matches; matches only.
        """
        matcher, rates = state.ready, self._rates
        found: list[list[Draft]] = []
        if state.chain:
            drafts = state.chain_drafts[:max_drafts]
            found.append([*drafts, *map(of_match, state.continuation[: max_drafts - len(drafts)])])
            for i, (draft, match) in enumerate(zip(drafts, state.alternatives)):
                if match is None or match.token == draft[0]:
                    continue
                if rates.probability(rid, of_match(match)) > rates.probability(rid, draft):
                    if i and matcher is not None:
                        before = [token for token, _ in drafts[:i]]
                        found.append([*drafts[:i], *map(of_match, matcher.drafts(max_drafts - i, before))])
                    break
        if matcher is not None:
            found.append([*map(of_match, matcher.drafts(max_drafts))])
        scored = [(drafts, rates.survival(rid, drafts)) for drafts in found]
        return max(scored, key=lambda one: sum(one[1]), default=([], []))
