"""The records that pass between scheduler and runner: what a step computes (StepPlan), and its result (StepResult).

There are no prefill and decode phases. Every request has known tokens and computed tokens; a step lets computed
catch up with known by `count` positions. A prompt, a chunk of one and a single decoded token differ only in `count`.

`Work` and `Output` are made once per request and step, 64 times in a step of 32 requests, while the device waits. They
are not frozen, because a frozen dataclass of 15 fields takes 4 us to make and a plain one 0.6 us. No code changes one
after its step was launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from perilune.core.sampling import SamplingParams

PENDING = -1  # the id of a token that the step before is still sampling
LEFT_OUT = -1  # StepPlan.chain if the draft model does not read the step's hidden states
MAX_DRAFTS = 8  # drafts of one request in one step


MediaRows = tuple[bytes, int, int, int]  # a picture's digest, its first row, the work's first row, how many rows


@dataclass(slots=True)
class Work:
    """One request's share of a step: compute positions start .. start + count - 1.

    slot            the request's row of the device's buffers (last token, draft chain, token counts)
    tokens          the ids at those positions. The last may be PENDING: the previous step samples it, and the host had
                    not seen it when the step was planned; the runner takes it from row `slot` of its last-token buffer.
                    The last `drafts` of them are drafts
    blocks          the block table covering positions 0 .. start + count - 1; the same tuple until it changes
    sample          the last position's logits choose the token at position start + count
    output_index    that token's index in the output, from 0; with `seed` it determines the random number used
    prompt_targets  the prompt tokens at positions start + 1 .. start + count, if their log-probabilities are wanted
    history         all tokens of the request, prompt and `output_index` outputs: given when its parameters look back
                    (penalties) and the host knows them all: when it starts, and after a preemption. Else (), and row
                    `slot` of the device's token counts is up to date
    left            tokens the request may still get, the one sampled here included
    drafts          how many of `tokens` are drafts. Each of the last drafts + 1 positions samples a token, given the
                    drafts before it. A draft is accepted if it equals the token sampled at the position before it and
                    all drafts before it are accepted. The request gets the accepted drafts and one sampled token more
    next_token      the known token at position start + count, for a draft model; PENDING if it is sampled here
    chained         the step before may bring the request several tokens, and the host has not seen how many. All
                    `tokens` are PENDING: the device puts there the last token of that step and then the chain that a
                    draft model drafted after it. start, output_index and left are as if that step brought one token,
                    and `blocks` reach as far as all its drafts may
    media           rows of pictures that replace the embeddings of `tokens`
    series          works with the same number belong to one request in one slot and differ only in start, output_index
                    and left, each n tokens further: plan_wire.py then sends only `start`. Unique if not given
    """

    rid: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool
    output_index: int
    params: SamplingParams
    seed: int
    prompt_targets: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    left: int = 0
    drafts: int = 0
    next_token: int = PENDING
    chained: bool = False
    media: tuple[MediaRows, ...] = ()
    series: int = field(default_factory=count(-1, -1).__next__, repr=False, compare=False)

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.drafts :]

    @property
    def before(self) -> tuple[int, ...]:
        """As in Sample; a work without drafts has none."""
        return ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Sample(Protocol):
    """One token to be sampled: a Work without drafts, or one Row of a Work with drafts. Fields as in Work.

    `before`: the work's drafts before this token. It is sampled as if all of them were accepted.
    """

    @property
    def rid(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def output_index(self) -> int: ...
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
    """The token that a work with drafts samples after the first `index` of them, as if these were accepted."""

    work: Work
    index: int

    @property
    def rid(self) -> int:
        return self.work.rid

    @property
    def slot(self) -> int:
        return self.work.slot

    @property
    def output_index(self) -> int:
        return self.work.output_index + self.index

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
        return self.work.draft_tokens[: self.index]


def samples(work: Sequence[Work]) -> tuple[Sample, ...]:
    """The tokens to sample for `work`, of which every item samples: one each and one more for every draft, in order of
    position."""
    if not any(w.drafts for w in work):
        return tuple(work)
    return tuple(Row(w, i) if w.drafts else w for w in work for i in range(w.drafts + 1))


@dataclass(frozen=True, slots=True)
class Slice:
    """A share of encoding a picture, which one rank computes before the step's work.

    start, stop  cells of the encoding (engine/vision/cells.py). After the last cell all ranks get the picture's rows
    patches      the pixels, uint8 [patches, 3, P, P], where `start` is 0; rank 0 sends them to other ranks separately
    """

    rank: int
    digest: bytes
    grid: tuple[int, int, int]
    start: int
    stop: int
    patches: memoryview | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the runner needs for one step; printable and replayable.

    chain           tokens that the draft model, if there is one, drafts after the sampled token of each request, for
                    the next step to verify; LEFT_OUT: the draft model does not even read the step's states
    min_confidence  on a CPU, where the host sees the draft model's probabilities at once, drafting stops when the
                    product of the probabilities is below this in every request's chain
    host            a request has a constraint, so rank 0's host takes part in sampling
    slices          of pictures, to encode before the work; a plan may consist of slices alone
    dropped         digests of pictures: their rows, or unfinished encodings, are freed after the work
    """

    step: int
    work: tuple[Work, ...]
    chain: int = 0
    min_confidence: float = 0.0
    host: bool = False
    slices: tuple[Slice, ...] = ()
    dropped: tuple[bytes, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(w.count for w in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log, of the unmodified distribution) of a token and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Output:
    """A step's result for one request: tokens if it sampled, prompt log-probabilities if asked for, or an error.

    tokens    the accepted drafts and one sampled token more
    logprobs  parallel to `tokens`, if asked for
    again     the sampled token is missing, because the logits after the accepted drafts were not finite. A rejected
              draft may be the cause: attention multiplies the values of later rows by zero, and 0 x inf is NaN. So the
              row of the last accepted token counts as not computed, and is computed again without drafts
    chain     (id, probability) of the tokens that the draft model drafted after `tokens`
    """

    rid: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    again: bool = False
    chain: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """`digest`: a hash of the tokens that requests get, the same on every rank."""

    step: int
    outputs: tuple[Output, ...]
    digest: int = 0
