"""The state of one request for drafting: its text, the draft model's chain after it, and matches for each chain
token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.core.step import MAX_DRAFTS
from perilune.speculation.acceptance_rates import Draft, Observation, of_match, of_model
from perilune.speculation.policy import ChainGain
from perilune.speculation.suffix import Match, SuffixMatcher

# If more tokens are pending, acceptance rates do not learn from them. Larger: more learned, longer Python calls.
LEARNED_TOKENS = 32

Chain = tuple[tuple[int, float], ...]  # a draft model's tokens, each with the probability that the model gives it


@dataclass(slots=True)
class RequestState:
    matcher: SuffixMatcher | None  # None: n-gram lookup is not a source of drafts
    known_tokens: int  # number of prompt and output tokens
    pending: list[int] = field(default_factory=list)  # the last known tokens, not given to the matcher yet
    chain: Chain = ()  # the draft model's chain after the known tokens
    alternatives: list[Match | None] = field(default_factory=list)  # for each chain token the match at its position
    continuation: list[Match] = field(default_factory=list)  # matches after the chain
    planned: Sequence[Draft] | None = None  # drafts in flight; None in a chained step: the first tokens of `chain`
    gain: ChainGain | None = None  # mean gain of its chains
    _chain_drafts: list[Draft] | None = None

    @property
    def ready(self) -> SuffixMatcher | None:
        """The matcher, if it has seen the whole text."""
        return self.matcher if self.matcher is not None and not self.matcher.unindexed and not self.pending else None

    @property
    def chain_drafts(self) -> list[Draft]:
        """The chain with the AcceptanceRates cell of each token, made at the first call."""
        if self._chain_drafts is None:
            self._chain_drafts = [
                of_model(token, i, confidence, None if match is None else match.token == token)
                for i, ((token, confidence), match) in enumerate(zip(self.chain, self.alternatives))
            ]
        return self._chain_drafts

    def set_chain(self, chain: Chain) -> None:
        """Stores the chain after the known tokens, with the matches at its positions and after it."""
        self.chain, self._chain_drafts, self.alternatives, self.continuation = chain, None, [None] * len(chain), []
        if chain and (matcher := self.ready) is not None:
            self.alternatives, self.continuation = matcher.compare(
                MAX_DRAFTS - len(chain), [token for token, _ in chain]
            )

    def chain_observations(self, rid: int, tokens: Sequence[int]) -> list[Observation]:
        """Which tokens of the chain the sampled `tokens` confirm, up to its first wrong one."""
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
