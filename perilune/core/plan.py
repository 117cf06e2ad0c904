"""What one engine step does, and what came of it: the records that pass between scheduler and runner.

There are no prefill and decode phases. Every request has known tokens and computed tokens; a step lets computed
catch up with known by `count` positions. A prompt, a chunk of one and a single decoded token differ only in `count`.
"""

from dataclasses import dataclass

from perilune.core.sampling import SamplingParams


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
    `prompt_logprobs` asks for the log-probability of the prompt tokens at positions start+1 .. start+count.
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

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


PENDING = -1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the runner needs for one step; printable and replayable."""

    step: int
    work: tuple[Work, ...]

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
    """What a step brought one request: a token if it sampled, prompt log-probabilities if asked, or an error."""

    rid: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    outputs: tuple[Output, ...]
