"""What one engine step does, and what came of it: the records that pass between scheduler and runner.

There are no prefill and decode phases. Every request has known tokens and computed tokens; a step lets computed
catch up with known by `count` positions. A prompt, a chunk of one and a single decoded token differ only in `count`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perilune.core.sampling import SamplingParams

PENDING = -1
LEFT_OUT = -1  # as a chain's length
MAX_DRAFTS = 8  # tokens guessed ahead of a request in one step


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: compute positions start .. start + count - 1.

    `tokens` are the ids at those positions. The last id may be `PENDING`: it is the token the previous step samples
    for this request, which the host has not seen when the step is planned; the runner takes it from row `slot` of its
    last-token buffer. `blocks` is the block table covering positions 0 .. start + count - 1.
    `sample` is true when the last position's logits choose the token at position start + count; `draw` is that
    token's index in the output (0-based), which with the seed determines the random number used.
    `history` is every token of the request, prompt and the `draw` outputs: given when its parameters look back and the
    host knows them all (so at each start and resumption); otherwise row `slot` of the token counts is up to date.
    `left` is how many tokens the request may still come to have, the one sampled here included.
    `ahead` is the known token at position start + count, for a draft model; PENDING where it is sampled here.
    `prompt_logprobs` asks for the log-probability of the prompt tokens at positions start+1 .. start+count.
    The last `drafts` of `tokens` are guesses. Each of the last drafts + 1 positions then draws a token, as if the
    guesses before it were right; what stands are the draws up to and including the first that is not the next guess.
    `behind` a step in flight that may bring the request several tokens: all `tokens` are PENDING, what that step draws
    last and then the chain a draft model drafts behind it; start, draw and left are as if it brought one token only,
    and `blocks` reach as far as all of them may.
    """

    rid: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool
    draw: int
    params: SamplingParams
    seed: int
    prompt_targets: tuple[int, ...] = ()  # ids whose log-probability is wanted, one per position
    history: tuple[int, ...] = ()
    left: int = 0
    drafts: int = 0
    ahead: int = PENDING
    behind: bool = False

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def guesses(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.drafts :]

    @property
    def before(self) -> tuple[int, ...]:
        """As a Draw: a work's first token is drawn after no guess."""
        return ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Draw(Protocol):
    """One token to be drawn: a Work without drafts, or one Row of a Work with some. Fields as there.

    `before` are the guesses that this draw supposes to be right.
    """

    @property
    def rid(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def draw(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def history(self) -> tuple[int, ...]: ...
    @property
    def before(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """Where a work with drafts draws its token number `index`, should the guesses before it be right."""

    work: Work
    index: int

    @property
    def rid(self) -> int:
        return self.work.rid

    @property
    def slot(self) -> int:
        return self.work.slot

    @property
    def draw(self) -> int:
        return self.work.draw + self.index

    @property
    def left(self) -> int:
        return self.work.left - self.index

    @property
    def params(self) -> SamplingParams:
        return self.work.params

    @property
    def seed(self) -> int:
        return self.work.seed

    @property
    def history(self) -> tuple[int, ...]:
        return self.work.history if self.index == 0 else ()

    @property
    def before(self) -> tuple[int, ...]:
        return self.work.guesses[: self.index]


def draws(work: Sequence[Work]) -> tuple[Draw, ...]:
    """What is drawn for works that sample: a token each, and one more for every draft, in order of position."""
    if not any(w.drafts for w in work):
        return tuple(work)
    return tuple(Row(w, i) if w.drafts else w for w in work for i in range(w.drafts + 1))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the runner needs for one step; printable and replayable.

    A draft model, if there is one, drafts `chain` tokens behind what the step draws, for the next one to verify; with
    LEFT_OUT it does not even follow the step. Where that can be seen for free, it stops when every request's chain is
    less probable than `hope` by its own confidence.
    """

    step: int
    work: tuple[Work, ...]
    chain: int = 0
    hope: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(w.count for w in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log, of the unmodified distribution) of a token and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought one request: tokens if it sampled, prompt log-probabilities if asked, or an error.

    The tokens are the accepted drafts and one more. `logprobs` is parallel to them, if asked for. `again`: there is no
    such one more, because logits behind accepted drafts were not finite. A wrong draft may be to blame, whose values
    reach the rows before it where an attention kernel multiplies them by zero; so that row counts as not computed, and
    must be computed again without drafts.
    """

    rid: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    again: bool = False
    chain: tuple[tuple[int, float], ...] = ()  # what a draft model drafts behind the tokens: id, its probability


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    outputs: tuple[Output, ...]
