"""The records that cross between a front end (server, `LLM`) and the engine.

Between processes they travel as msgpack over a private socket pair (engine/wire.py): never pickle.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from perilune.core.constraint import Constraint
from perilune.core.sampling import SamplingParams
from perilune.core.step import TokenLogprob


@dataclass(frozen=True, slots=True)
class Submit:
    """Front end -> engine: run this prompt. `rid` is unique among the front end's unfinished requests.

    `params.stop_token_ids` already holds the model's end tokens (unless ignore_eos): only for a `constraint` on the
    answer does the engine read the tokenizer.
    `cache_keys` are what the KV depends on besides the token ids, or who may share it: "image:HASH", "adapter:NAME",
    "salt:TENANT". Only requests with equal keys, in the same order, share cached blocks.
    """

    rid: int
    prompt: tuple[int, ...]
    params: SamplingParams
    constraint: Constraint | None = None
    cache_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Front end -> engine: end this request without a Delta. Unknown ids are ignored."""

    rid: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Front end -> engine: finish the step and exit."""


@dataclass(slots=True)
class Delta:
    """Engine -> front end: new tokens of a request. Not frozen for speed, as core/step.py's Work.

    tokens             the end token that ended the request is included
    logprobs           parallel to `tokens`, if asked for
    prompt_logprobs    arrive in pieces, in order of position
    finish_reason      None until the last delta: "stop" (an id of stop_token_ids), "length" or "error"
    error              one line for the user, with finish_reason "error"
    cached_tokens      prompt tokens taken from the prefix cache; in the first delta only
    drafted, accepted  drafts that the step verified for the request; the first `accepted` of `tokens` were drafts
    closed_by_grammar  the answer's form is complete only because the grammar replaced tokens of the model near
                       max_tokens; finish_reason is then "length"
    """

    rid: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    closed_by_grammar: bool = False

    def singly(self) -> "Iterator[Delta]":
        """The same, one delta per token: for callers that may stop at any token."""
        if len(self.tokens) < 2:
            yield self
            return
        last = len(self.tokens) - 1
        for i, token in enumerate(self.tokens):
            yield Delta(
                self.rid,
                (token,),
                self.logprobs[i : i + 1],
                self.prompt_logprobs if i == 0 else (),
                self.finish_reason if i == last else None,
                self.error if i == last else None,
                self.cached_tokens if i == 0 else 0,
                self.drafted if i == 0 else 0,
                int(i < self.accepted),
                self.closed_by_grammar and i == last,
            )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Engine -> front end, once, when it is ready. `choices` are the automatic decisions with their reasons."""

    model: str
    max_model_len: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]  # from config.json; the tokenizer's end tokens come on top
    num_blocks: int
    block_size: int
    max_num_seqs: int
    choices: tuple[tuple[str, str, str], ...] = ()  # (key, value, reason)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Engine -> front end, at most twice a second. Counters grow from engine start."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_cached: int = 0
    blocks_owned: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    verified: int = 0  # shares of steps that had drafts: one request in one step
    drafts: tuple[tuple[str, int, int, int], ...] = ()  # (source, position in the step, drafted, accepted)
    graphs: int = 0  # CUDA graphs of steps, as of now; not those of draft chains
    graph_bytes: int = 0  # device memory that all of them hold
    tiers: tuple[tuple[str, int, int, int], ...] = ()  # of KV: (name, hit tokens, blocks, blocks at most)
    restore_seconds: float = 0.0  # that restores from the tiers took
    saved_seconds: float = 0.0  # less than computing the same would have taken, by the measured speed of prompts
    blocks_dropped: int = 0  # evicted blocks for which no tier had room
    blocks_damaged: int = 0  # stored blocks found damaged or missing, which were computed again


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine -> front end: the engine cannot start or go on."""

    error: str
