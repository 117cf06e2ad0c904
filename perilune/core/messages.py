"""The records that cross between a front end (server, `LLM`) and the engine.

Between processes they travel over private socket pairs (engine/wire.py): as msgpack, never pickle, and pixels as the
descriptor of the memory that holds them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from perilune.core.constraint import Constraint
from perilune.core.sampling import SamplingParams
from perilune.core.sealed import SealedFile
from perilune.core.step import TokenLogprob


@dataclass(frozen=True, slots=True)
class Order:
    """A request's place in the queue, and its deadline.

    priority          lower numbers are admitted first and preempted last
    deadline_seconds  from the submission; of equal priorities the earlier deadline is admitted first. A request that
                      has not ended by then ends with the finish reason "deadline"
    """

    priority: int = 0
    deadline_seconds: float | None = None


FIRST_COME = Order()


class Picture(Protocol):
    """A decoded picture, as media.decoder makes it: a Media with its pixels."""

    @property
    def digest(self) -> bytes: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def patches(self) -> Any:
        """A contiguous buffer of uint8, [patches, 3, P, P] by frame, then row, then column."""
        ...

    @property
    def shared(self) -> tuple[SealedFile, int] | None:
        """The file that holds `patches`, and where they begin in it; None: they lie in this process only."""
        ...


@dataclass(frozen=True, slots=True)
class Video:
    """A decoded video: chunks of up to four frames, each of which the engine takes as it takes a picture.

    times  HH:MM:SS.mmm of each chunk's first frame: the prompt has it in front of the chunk
    """

    chunks: tuple[Picture, ...]
    times: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Placeholder tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)


def pictures_of(media: Iterable[Picture | Video]) -> list[Picture]:
    """The pictures, and the chunks of the videos, in order: what the engine takes."""
    return [p for item in media for p in (item.chunks if isinstance(item, Video) else (item,))]


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, or a chunk of a video, without its pixels: the engine asks for those that it needs (`Want`).

    digest  32 bytes: of pixels and grid; equal digests share KV and embeddings
    grid    (frames, rows, columns) of patches; rows and columns are even, a picture has one frame
    tokens  consecutive placeholder tokens that the prompt has for it: a fourth of the patches of one frame
    """

    digest: bytes
    grid: tuple[int, int, int]
    tokens: int

    @classmethod
    def of(cls, picture: Picture) -> "Media":
        return cls(picture.digest, picture.grid, picture.tokens)


@dataclass(frozen=True, slots=True)
class Submit:
    """Front end -> engine: run this prompt. `rid` is unique among the front end's unfinished requests.

    `params.stop_token_ids` already holds the model's end tokens (unless ignore_eos), so that the engine reads the
    tokenizer only for a `constraint`.
    `cache_keys` name what the KV depends on besides token ids, or who may share it: "adapter:NAME", "salt:TENANT".
    Only requests with equal keys, in the same order, share cached blocks.
    `pictures` in the order of the prompt, in which each is a run of EngineInfo.media_pad; blocks are shared up to the
    first picture that differs.
    """

    rid: int
    prompt: tuple[int, ...]
    params: SamplingParams
    constraint: Constraint | None = None
    cache_keys: tuple[str, ...] = ()
    order: Order = FIRST_COME
    pictures: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """Engine -> front end: send the pixels of picture `item` of this request. Unknown ids are ignored."""

    rid: int
    item: int


@dataclass(frozen=True, slots=True)
class Pixels:
    """Front end -> engine: the answer to a `Want`. `patches` and `shared` as Picture's."""

    rid: int
    item: int
    patches: memoryview
    shared: tuple[SealedFile, int] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Front end -> engine: end this request without a Delta. Unknown ids are ignored."""

    rid: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Front end -> engine: finish the step and exit."""


@dataclass(slots=True)
class Delta:
    """Engine -> front end: new tokens of a request. Not frozen, because that is slower to make (core/step.py).

    tokens             the end token that ended the request is included
    logprobs           parallel to `tokens`, if asked for
    prompt_logprobs    arrive in pieces, in order of position
    finish_reason      None until the last delta: "stop" (an id of stop_token_ids), "length", "deadline" or "error"
    error              one line for the user, with finish_reason "error"
    cached_tokens      prompt tokens taken from the prefix cache; in the first delta only
    queue_seconds      that the request waited in the scheduler; in the first delta only. Not part of equality
    drafted, accepted  drafts that the step verified for the request; the first `accepted` of `tokens` were drafts
    closed_by_grammar  the answer's form is complete only because the grammar replaced tokens of the model near
                       max_tokens; finish_reason is then "length"
    verified           how many of the deltas joined into this one had drafts. Does not cross between processes
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
    verified: int = field(default=0, kw_only=True)
    queue_seconds: float = field(default=0.0, compare=False)

    def singly(self) -> "Iterator[Delta]":
        """This delta split into one per token, for callers that may stop at any token."""
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
                self.queue_seconds if i == 0 else 0.0,
            )


def joined(deltas: "Sequence[Delta]") -> "list[Delta]":
    """Consecutive deltas of one request joined into one; a delta with an error or a missed deadline stays apart."""
    first, *rest = deltas
    found = [first]
    for delta in rest:
        if delta.finish_reason in ("error", "deadline"):
            found.append(delta)
            continue
        first.verified = (first.verified or first.drafted > 0) + (delta.drafted > 0)
        first.tokens += delta.tokens
        first.logprobs += delta.logprobs
        first.prompt_logprobs += delta.prompt_logprobs
        first.drafted += delta.drafted
        first.accepted += delta.accepted
        first.cached_tokens = max(first.cached_tokens, delta.cached_tokens)
        first.finish_reason, first.closed_by_grammar = delta.finish_reason, delta.closed_by_grammar
    return found


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
    tp: int = 1  # ranks that run
    ep: int = 1  # ranks over which whole routed experts are distributed; 1: each rank has a part of every expert
    exchange: str = "none"  # how ranks add their partial outputs, as rows of the ledger say
    synthetic: str = ""  # what random weights the engine runs on; empty for a real model
    declared_acceptance: float | None = None  # tokens per step with drafts that are declared, not measured
    kv_shards: int = 1  # ranks that each store a part of every request's KV, along the sequence; 1: each stores all
    pids: tuple[int, ...] = ()  # process ids of rank 0 and of the other ranks, in order
    media_pad: int | None = None  # the placeholder token of pictures; None: the model as loaded takes no pictures

    @property
    def media(self) -> bool:
        """Whether prompts may have pictures."""
        return self.media_pad is not None

    @property
    def marks(self) -> dict[str, str | float | None]:
        """What /health and the list of models add for random weights and for several ranks; else empty."""
        found: dict[str, str | float | None] = {}
        if self.tp > 1:
            found |= {"tp": self.tp, "ep": self.ep, "exchange": self.exchange}
        if self.synthetic:
            found |= {"synthetic": self.synthetic, "declared_acceptance": self.declared_acceptance}
        return found

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers from random weights; empty for a real model."""
        if not self.synthetic:
            return ""
        declared = self.declared_acceptance
        return f"synthetic: {self.synthetic}" + (f"; declared acceptance {declared:g}" if declared else "")


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
    verified: int = 0  # (request, step) pairs with drafts
    drafts: tuple[tuple[str, int, int, int], ...] = ()  # (source, position in the step, drafted, accepted)
    graphs: int = 0  # CUDA graphs of steps, as of now; not those of draft chains
    graph_bytes: int = 0  # device memory that all of them hold
    tiers: tuple[tuple[str, int, int, int], ...] = ()  # of KV: (name, hit tokens, blocks in use, most blocks)
    host_blocks_ready: int = 0  # blocks of host memory that are pinned, so usable; the others are being pinned
    restore_seconds: float = 0.0  # spent on restores from the tiers
    saved_seconds: float = 0.0  # time to compute the restored tokens, by measured speed, minus restore_seconds
    blocks_dropped: int = 0  # evicted blocks for which no tier had room
    blocks_damaged: int = 0  # stored blocks found damaged or missing, which were computed again
    pictures: int = 0  # encoded; those found in a cache are not counted
    picture_seconds: float = 0.0  # spent by rank 0 on encoding


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine -> front end: the engine cannot start or go on."""

    error: str
