"""Step plans on their way to the other ranks: msgpack frames that say only what those do not know yet.

A decode step is nearly the step before, one token further. So both ends keep by slot what stays of a request from step
to step, and a frame has of most requests only where they are. Another one has a row, and of that the parameters only
where the slot has got another request, and of the block table what is new at its end.
"""

import struct
from collections.abc import Sequence
from itertools import compress, count
from operator import ne

import msgspec

from perilune.core.errors import EngineError
from perilune.core.sampling import SamplingParams
from perilune.core.step import MediaRows, Slice, StepPlan, Work

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20

# What stays of a request while it decodes: Work's slot, rid, params, seed, blocks, tokens, sample, prompt_targets,
# history, drafts, next_token, chained, media; start - output_index; output_index + left.
Terms = tuple[
    int, int, SamplingParams, int, tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], tuple[int, ...], int, int,
    bool, tuple[MediaRows, ...], int, int,
]  # fmt: skip
# New terms of the request at a place of the plan: (place, rid; (params, seed), or None: as before; how many blocks of
# the table before are kept, -1: it is the same; the blocks after those; the terms from tokens on).
Row = tuple[
    int, int, tuple[SamplingParams, int] | None, int, tuple[int, ...], tuple[int, ...], bool, tuple[int, ...],
    tuple[int, ...], int, int, bool, tuple[MediaRows, ...], int, int,
]  # fmt: skip
NOTHING: Terms = (-1, -1, SamplingParams(), 0, (), (), False, (), (), 0, 0, False, (), 0, 0)  # of an unused slot
Cut = tuple[int, bytes, tuple[int, int, int], int, int]  # Slice's fields but patches


class Order(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 has the other ranks do, in order.

    kind     "plan": run the step; "time": run it, without a report; "zero": clear blocks 0 .. `number` of the cache;
             "drafter": from now on the draft model goes along (`number` 1), or not (0); "replay": the graph that ran
             last, in `number` rounds, for measurements; "pixels": the picture with which the next plan has rank
             `number` begin; "close": end
    number, step, chain, min_confidence, host   of StepPlan, or as above
    slots    of the plan's work, in order; None: those of the plan before
    starts   of the plan's work
    rows     of those requests of the plan that do not go on as they did
    slices, dropped   of StepPlan
    pixels   (digest, patches)
    """

    kind: str
    number: int = 0
    chain: int = 0
    min_confidence: float = 0.0
    host: bool = False
    slots: Sequence[int] | None = None
    starts: Sequence[int] = ()
    rows: Sequence[Row] = ()
    slices: Sequence[Cut] = ()
    dropped: tuple[bytes, ...] = ()
    pixels: tuple[bytes, memoryview] | None = None


class Writer:
    """Rank 0's end."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._known: dict[int, Terms] = {}  # by slot
        self._last: list[Terms] = []  # of the last plan's work

    def plan(self, plan: StepPlan, kind: str = "plan") -> bytes:
        # Without a call for each request: of 64 nearly all go on as they did, and 10 us find the others.
        terms: list[Terms] = [
            (
                w.slot, w.rid, w.params, w.seed, w.blocks, w.tokens, w.sample, w.prompt_targets, w.history, w.drafts,
                w.next_token, w.chained, w.media, w.start - w.output_index, w.output_index + w.left,
            )
            for w in plan.work
        ]  # fmt: skip
        starts = [w.start for w in plan.work]
        slots, before = None, self._last
        changed = _differing(before, terms)
        if len(before) != len(terms) or any(before[i][0] != terms[i][0] for i in changed):
            slots = [w.slot for w in plan.work]
            before = [self._known.get(slot, NOTHING) for slot in slots]
            changed = _differing(before, terms)
        rows = [_row(i, before[i], terms[i]) for i in changed]
        for i in changed:
            self._known[terms[i][0]] = terms[i]
        self._last = terms
        cuts = [(s.rank, s.digest, s.grid, s.start, s.stop) for s in plan.slices]
        chain, confidence = plan.chain, plan.min_confidence
        return self.order(Order(kind, plan.step, chain, confidence, plan.host, slots, starts, rows, cuts, plan.dropped))

    def order(self, order: Order) -> bytes:
        return self._encoder.encode(order)


def _differing(before: list[Terms], terms: list[Terms]) -> list[int]:
    return list(compress(count(), map(ne, before, terms)))


def _row(place: int, before: Terms, terms: Terms) -> Row:
    _, rid, params, seed, blocks, *others = terms
    table, kept, added = before[4], 0, blocks
    if table and blocks == table:
        kept, added = -1, ()
    elif table and blocks[: len(table)] == table:
        kept, added = len(table), blocks[len(table) :]
    fresh = None if before[1:4] == terms[1:4] else (params, seed)
    return place, rid, fresh, kept, added, *others  # type: ignore[return-value]  # a list of unlike things


class Reader:
    """Another rank's end."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._known: dict[int, Terms] = {}  # by slot
        self._slots: Sequence[int] = ()  # of the last plan

    def order(self, body: bytes) -> Order:
        """EngineError if it is malformed."""
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as e:
            raise EngineError(f"a malformed order reached this rank: {e}") from e

    def plan(self, order: Order) -> StepPlan:
        """EngineError if it is about a slot that this rank does not know."""
        if order.slots is not None:
            self._slots = order.slots
        if len(self._slots) != len(order.starts):
            raise EngineError(f"an order has {len(order.starts)} shares of work for {len(self._slots)} slots")
        for row in order.rows:
            slot = self._slots[row[0]]
            self._known[slot] = self._terms(slot, row)
        work = tuple([_work(self._of(slot), start) for slot, start in zip(self._slots, order.starts)])
        slices = tuple([Slice(*cut) for cut in order.slices])
        return StepPlan(
            order.number, work, order.chain, order.min_confidence, order.host, slices, order.dropped
        )  # fmt: skip

    def _of(self, slot: int) -> Terms:
        found = self._known.get(slot)
        if found is None:
            raise EngineError(f"an order speaks of slot {slot}, which this rank does not know")
        return found

    def _terms(self, slot: int, row: Row) -> Terms:
        _, rid, fresh, kept, blocks, *others = row
        if kept:
            table = self._of(slot)[4]
            blocks = table if kept == -1 else table[:kept] + blocks
        params, seed = fresh or self._of(slot)[2:4]
        return slot, rid, params, seed, blocks, *others  # type: ignore[return-value]  # a list of unlike things


def _work(terms: Terms, start: int) -> Work:
    (slot, rid, params, seed, blocks, tokens, sample, targets, history, drafts, next_token, chained, media, lag,
     total) = terms  # fmt: skip
    index = start - lag
    return Work(
        rid, slot, start, tokens, blocks, sample, index, params, seed, targets, history, total - index, drafts,
        next_token, chained, media,
    )  # fmt: skip
