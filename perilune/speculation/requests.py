"""The requests that drafts are made for, and the texts that may match: theirs, and those of finished requests."""

from collections.abc import Sequence

from perilune.core.messages import Delta
from perilune.core.step import Work
from perilune.speculation.acceptance_rates import AcceptanceRates, Cell, Learning, suffix_cell
from perilune.speculation.request_state import RequestState
from perilune.speculation.suffix import Store, SuffixDraft, SuffixMatcher

INDEX_TOKENS = 4096  # Prompt tokens indexed per step: 1-2 ms. Larger: first matches earlier, longer pauses in Python.

Drafts = tuple[list[int], list[Cell], list[float]]  # tokens, their cells, P(the first k are right)


class Requests:
    """`suffix`: matches with earlier text are looked up; `shared`: also in the texts of finished requests."""

    def __init__(self, *, suffix: bool, shared: bool, learning: Learning) -> None:
        self.states: dict[int, RequestState] = {}  # by rid
        self.lookup = suffix  # matches are looked up at present
        self.unread: list[Sequence[Delta]] = []  # of steps while drafting was paused
        self._suffix = suffix
        self._store = Store() if shared and suffix else None
        self._finished: list[SuffixMatcher] = []
        self._learning = learning

    def open(self, rid: int, prompt: Sequence[int]) -> None:
        self.states[rid] = RequestState(SuffixMatcher(prompt, self._store) if self._suffix else None, len(prompt))

    def drop(self, rid: int) -> None:
        """The request has ended; unknown ids are ignored."""
        if self.unread and rid in self.states:
            self.read()
        state = self.states.pop(rid, None)
        if state is not None:
            state.skip_pending()
            self._learning.ended.append(rid)
            if self._store is not None and state.matcher is not None:
                self._finished.append(state.matcher)

    def read(self) -> None:
        """Adds the tokens of steps during a pause to their requests."""
        for deltas in self.unread if self._suffix else ():
            for delta in deltas:
                if (state := self.states.get(delta.rid)) is not None:
                    state.pending += delta.tokens
                    state.known_tokens += len(delta.tokens)
        self.unread.clear()

    def index(self) -> None:
        """Indexes texts for later matches: takes 1-2 ms with a long prompt, so a step should be running."""
        room = INDEX_TOKENS
        for rid, state in self.states.items() if self.lookup else ():
            if state.pending:
                self._learning.observations += state.match_pending(rid)
            if state.matcher is not None and state.matcher.unindexed and room:
                room -= state.matcher.index_prompt(room)
        for matcher in self._finished:
            assert self._store is not None
            self._store.add(matcher.answer())
        self._finished.clear()

    def drafts(self, work: Work, state: RequestState, max_drafts: int) -> Drafts:
        """The most promising of: the chain, continued by matches after it; the chain up to its first token in whose
        place a match is likelier, continued by that match; a match without the chain."""
        matcher, rates = state.ready, self._learning.rates
        found: list[tuple[list[int], list[Cell]]] = []
        if state.chain:
            tokens, cells = [token for token, _ in state.chain[:max_drafts]], state.chain_cells[:max_drafts]
            found.append(_joined(tokens, cells, state.continuation[: max_drafts - len(tokens)]))
            cut = _cut(work.rid, tokens, cells, state.alternatives, rates)
            if cut and matcher is not None:
                matched = matcher.drafts(max_drafts - cut, tokens[:cut])
                found.append(_joined(tokens[:cut], cells[:cut], matched))
        if matcher is not None:
            found.append(_joined([], [], matcher.drafts(max_drafts)))
        scored = [(tokens, cells, rates.survival(work.rid, cells, tokens)) for tokens, cells in found]
        return max(scored, key=lambda drafts: sum(drafts[2]), default=([], [], []))


def _joined(tokens: list[int], cells: list[Cell], matched: Sequence[SuffixDraft]) -> tuple[list[int], list[Cell]]:
    return tokens + [d.token for d in matched], cells + [suffix_cell(d) for d in matched]


def _cut(
    rid: int,
    tokens: Sequence[int],
    cells: Sequence[Cell],
    alternatives: Sequence[SuffixDraft | None],
    rates: AcceptanceRates,
) -> int:
    """How many tokens of a chain come before the first in whose place a match is likelier; 0 if there is none."""
    for i, (token, cell, match) in enumerate(zip(tokens, cells, alternatives)):
        if match is not None and match.token != token:
            likelihood = rates.probability(rid, suffix_cell(match), match.token)
            if likelihood > rates.probability(rid, cell, token):
                return i
    return 0
