"""The engine's record of one unfinished request: counters, not phases.

Positions of a request when a step is planned while the previous one still runs:

    0 ........ computed ........ planned ..... known . horizon ......... limit
    |-- committed --|-- in flight --|-- to do --|pending|-- not sampled yet --|

known    prompt and committed output tokens: the host has their ids
pending  tokens that steps in flight will sample: 0 or 1 when a step is planned, 2 while that step and the one before it
         are both in flight. A step with drafts counts as one token, though it may bring more. So a step chained to it
         may compute up to `drafted` positions further than planned: `planned` does not count drafts
horizon  known + pending
limit    tokens the request can ever have; the last of them is never computed, because nothing is sampled after it
"""

from dataclasses import dataclass, field

from perilune.core.sampling import SamplingParams
from perilune.core.step import PENDING, MediaRows

ONE_PENDING = (PENDING,)
NO_BARRIER = 1 << 62


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture in a prompt: its embeddings replace those of positions start .. stop - 1. `item`: its index among the
    prompt's pictures; digest and grid as in core.messages.Media."""

    item: int
    start: int
    stop: int
    digest: bytes
    grid: tuple[int, int, int]


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; only the scheduler changes it. Compared by identity."""

    rid: int
    arrival: int  # serial number: lower arrived earlier
    tokens: list[int] = field(repr=False)  # prompt, then committed outputs
    prompt_len: int
    params: SamplingParams
    seed: int
    limit: int
    rank: tuple[float, ...] = ()  # the sort key of queues: (priority, deadline, arrival); lower runs first
    root: bytes = b""  # parent digest of the first block: kv.prefix.root_of the cache keys
    slot: int | None = None  # row of the device's last-token buffer while running
    blocks: list[int] = field(default_factory=list)  # block table; each entry is one reference this request holds
    registered: int = 0  # leading blocks that are (or were, if since forgotten) in the prefix tree
    digests: list[bytes] = field(default_factory=list, repr=False)  # chained, of leading full blocks, as far as needed
    computed: int = 0
    planned: int = 0
    begun_at: int = 0  # first position computed since it was admitted; the positions before it were cached
    pending: int = 0
    drafted: int = 0  # drafts in flight, of all steps: their KV needs blocks beyond `planned`
    doubted: bool = False  # the next step must not have drafts: logits after a draft of the last step were not finite
    counted: bool = False  # the device's token counts (for penalties) are up to date
    life: int = 0  # preemptions so far; work planned in an earlier life has lost its blocks
    scored: int = 0  # prompt positions for which the log-probability of the next token was delivered
    cached_tokens: int = 0  # prompt tokens from the prefix cache, until the first delta has reported them
    submitted: float = 0.0  # time.monotonic() when it entered the scheduler
    ready: float = 0.0  # since when it could be computed: `submitted`, or when the last picture it needed was encoded
    queue_seconds: float = 0.0  # from `submitted` until it first ran; 0 again after the first delta has reported it
    finished: bool = False
    turn: int = 0  # index of this turn in its conversation, as far as the cache knows: see kv/retention.py
    restoring: bool = False  # its KV is being copied back from a tier; meanwhile it is in no queue
    restores: int = 0  # restores from a tier that were begun
    kept: list[int] = field(default_factory=list)  # its restored blocks, referenced until it starts
    refused: bool = False  # its KV is in a tier, but computing it again is faster
    restored: tuple[int, int] = (0, 0)  # tokens that the last restore brought from host memory and from disk
    pictures: tuple[Placed, ...] = ()
    barrier: int = NO_BARRIER  # positions from here on wait for a picture to be encoded
    series: int = 0  # Work.series of its last work
    steady_table: tuple[int, ...] | None = field(default=None, repr=False)  # its last work's block table, if it decoded
    steady_chain: int | None = None  # drafts of its last work, if that was chained
    _table: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert 0 < self.prompt_len == len(self.tokens) < self.limit, (self.rid, self.prompt_len, self.limit)

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def horizon(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def todo(self) -> int:
        """Positions a step could compute now. 0 when a step in flight samples the request's last token, while a step in
        flight has drafts (the number of tokens it brings is unknown), and while a picture is awaited."""
        horizon = len(self.tokens) + self.pending
        if horizon >= self.limit or self.drafted:
            return 0
        return (horizon if horizon < self.barrier else self.barrier) - self.planned

    @property
    def table(self) -> tuple[int, ...]:
        """`blocks` as a tuple, rebuilt only after a change, so that a long table is not copied in every step."""
        if self._table is None:
            self._table = tuple(self.blocks)
        return self._table

    def add_block(self, block: int) -> None:
        self.blocks.append(block)
        self._table = None

    def swap_block(self, index: int, block: int) -> None:
        self.blocks[index] = block
        self._table = None

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """Ids at the next `count` positions to plan; the last one is PENDING while a step in flight samples it."""
        known, start = len(self.tokens), self.planned
        assert 0 < count <= known + self.pending - start, (self.rid, count, self)
        if count == 1:
            return ONE_PENDING if start == known else (self.tokens[start],)
        ids = tuple(self.tokens[start : start + count])
        return ids if start + count <= known else (*ids, PENDING)

    def targets(self, count: int) -> tuple[int, ...]:
        """The prompt tokens that follow the next `count` positions to plan."""
        return tuple(self.tokens[self.planned + 1 : min(self.planned + count + 1, self.prompt_len)])

    def next_token(self, count: int) -> int:
        """The token that follows the next `count` positions to plan; PENDING if it is not known."""
        end = self.planned + count
        return self.tokens[end] if end < len(self.tokens) else PENDING

    def media(self, count: int) -> tuple[MediaRows, ...]:
        """The rows of pictures at the next `count` positions to plan."""
        start, found = self.planned, list[MediaRows]()
        if not self.pictures or start >= self.pictures[-1].stop:
            return ()
        for p in self.pictures:
            first, end = max(p.start, start), min(p.stop, start + count)
            if first < end:
                found.append((p.digest, first - p.start, first - start, end - first))
        return tuple(found)

    def history(self, count: int) -> tuple[int, ...]:
        """All tokens, if the request has penalties and the next `count` positions sample its first token since it was
        admitted; else (): the device then counts the tokens itself."""
        if self.counted or not self.params.penalized or self.planned + count != self.horizon:
            return ()
        assert not self.pending, self
        return tuple(self.tokens)

    def launch(self, count: int) -> bool:
        """Counts `count` more positions as planned; true when the last of them samples a token."""
        self.planned += count
        sample = self.planned == len(self.tokens) + self.pending
        self.pending += sample
        self.counted |= sample
        return sample

    def land(self, count: int, drafts: int, accepted: int, again: bool) -> None:
        """Counts `count + accepted` more positions as computed, one less with `again` (see Output.again), and `drafts`
        drafts as no longer in flight."""
        self.computed += count + accepted - again
        self.planned += accepted - again
        self.drafted -= drafts
        self.counted &= not again
        assert self.computed <= len(self.tokens) and self.drafted >= 0, self

    def withdraw(self, drafts: int) -> None:
        """Takes back a launch of one position with `drafts` drafts: its result is not used."""
        self.planned -= 1
        self.pending -= 1
        self.drafted -= drafts

    def trim(self, blocks: int) -> list[int]:
        """Removes all blocks but the first `blocks` and returns them; the caller takes over their references."""
        surplus = self.blocks[blocks:]
        if surplus:
            del self.blocks[blocks:]
            self._table = None
        return surplus

    def append(self, token: int) -> None:
        """Adds the token that a step in flight has sampled; the caller takes it out of `pending`."""
        assert token >= 0 and len(self.tokens) + self.pending < self.limit, (self.rid, token, self)
        self.tokens.append(token)

    def start(self, slot: int, blocks: list[int], block_size: int) -> None:
        """Starts to run, with the KV of the leading `blocks` already there."""
        # A token still being sampled will be written to the last-token row of its old slot, not of this one.
        assert self.slot is None and not self.blocks and self.pending == 0, (self.rid, self.slot, self.pending)
        self.slot = slot
        self.blocks = blocks
        self._table = None
        self.registered = len(blocks)
        self.computed = self.planned = self.begun_at = len(blocks) * block_size
        self.counted = False
        self.check()

    def stop(self) -> tuple[int, list[int]]:
        """Stops running: (slot, blocks) now belong to the caller. Tokens and pending samples stay."""
        assert self.slot is not None, self.rid
        slot, blocks = self.slot, self.blocks
        self.slot = None
        self.blocks = []
        self._table = None
        self.registered = self.computed = self.planned = self.drafted = 0
        self.life += 1
        return slot, blocks

    def check(self) -> None:
        """Asserts what holds between any two calls."""
        assert 0 <= self.computed <= self.planned <= self.horizon <= self.limit, self
        assert self.computed <= self.known and 0 <= self.pending <= 2, self
        assert self.registered <= len(self.blocks), self
        assert self.slot is not None or not self.blocks, self
