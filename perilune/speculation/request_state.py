"""What is known of one request: its text, the draft model's chain after it, and the matches in the chain's place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.core.step import MAX_DRAFTS
from perilune.speculation.acceptance_rates import Draft, Observation, of_match, of_model
from perilune.speculation.policy import ChainGain
from perilune.speculation.suffix import Match, SuffixMatcher

LEARNED_TOKENS = 32  # A matcher that is more tokens behind skips them. Larger: more learned, longer pauses in Python.

Chain = tuple[tuple[int, float], ...]  # a draft model's tokens, each with the probability that the model gives it


@dataclass(slots=True)
class RequestState:
    matcher: SuffixMatcher | None  # None: no source of drafts looks for matches
    known_tokens: int  # prompt and output
    pending: list[int] = field(default_factory=list)  # the last of them, which the matcher has not seen
    chain: Chain = ()  # the draft model's, after the known tokens
    alternatives: list[Match | None] = field(default_factory=list)  # the match in the place of each chain token
    continuation: list[Match] = field(default_factory=list)  # matches after the chain
    planned: Sequence[Draft] | None = None  # the drafts in flight; None: the chain, as far as the step verifies it
    gain: ChainGain | None = None  # of its chains
    _chain_drafts: list[Draft] | None = None

    @property
    def ready(self) -> SuffixMatcher | None:
        """The matcher, if it has seen the whole text."""
        return self.matcher if self.matcher is not None and not self.matcher.unindexed and not self.pending else None

    @property
    def chain_drafts(self) -> list[Draft]:
        """The chain with the cells of its tokens, made on first use."""
        if self._chain_drafts is None:
            self._chain_drafts = [
                of_model(token, i, confidence, None if match is None else match.token == token)
                for i, ((token, confidence), match) in enumerate(zip(self.chain, self.alternatives))
            ]
        return self._chain_drafts

    def set_chain(self, chain: Chain) -> None:
        """Stores the chain after the known tokens, with the matches in its place and after it."""
        self.chain, self._chain_drafts, self.alternatives, self.continuation = chain, None, [None] * len(chain), []
        if chain and (matcher := self.ready) is not None:
            self.alternatives, self.continuation = matcher.compare(
                MAX_DRAFTS - len(chain), [token for token, _ in chain]
            )

    def chain_observations(self, rid: int, tokens: Sequence[int]) -> list[Observation]:
        """What the sampled `tokens` show about the chain, up to its first wrong draft."""
        found = []
        for draft, token in zip(self.chain_drafts, tokens):
            found.append((rid, draft, draft[0] == token))
            if draft[0] != token:
                break
        return found

    def skip_pending(self) -> None:
        """Gives the matcher the pending tokens; nothing is learned from them."""
        if self.matcher is not None:
            self.matcher.skip(self.pending)
        self.pending.clear()

    def match_pending(self, rid: int) -> list[Observation]:
        """Gives the matcher the pending tokens; returns which of its next drafts were right."""
        found: list[Observation] = []
        if len(self.pending) > LEARNED_TOKENS:
            self.skip_pending()
        if self.matcher is not None:
            for token in self.pending:
                if (match := self.matcher.next_match()) is not None:
                    found.append((rid, of_match(match), match.token == token))
                self.matcher.append(token)
        self.pending.clear()
        return found
