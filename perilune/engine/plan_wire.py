"""Encodes step plans for the other ranks, as msgpack frames with only what has changed since the last plan.

A decode step differs from the one before mostly in its positions. Both ends therefore keep, for each slot, the fields
that all works of a series share (Work.series in core/step.py). A frame has the start position of every work. For a work
that begins a series it also has a row of these fields: sampling parameters only if the slot has another request than
before, and of the block table only the blocks added at its end.
"""

import struct
from collections.abc import Sequence

import msgspec

from perilune.core.errors import EngineError
from perilune.core.sampling import SamplingParams
from perilune.core.step import MediaRows, Slice, StepPlan, Work

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20

# The terms that works of a series share: slot, rid, params, seed, blocks, tokens, sample, prompt_targets,
# history, drafts, next_token, chained, media; start - output_index; output_index + left.
Terms = tuple[
    int, int, SamplingParams, int, tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], tuple[int, ...], int, int,
    bool, tuple[MediaRows, ...], int, int,
]  # fmt: skip
# Terms of a work that begins a series: its index in the plan; rid; (params, seed), None: those of the slot's last work;
# how many leading blocks of the slot's last table stay, -1: the whole table, with no new block; the new blocks; then
# the fields of Terms from tokens on.
Row = tuple[
    int, int, tuple[SamplingParams, int] | None, int, tuple[int, ...], tuple[int, ...], bool, tuple[int, ...],
    tuple[int, ...], int, int, bool, tuple[MediaRows, ...], int, int,
]  # fmt: skip
Cut = tuple[int, bytes, tuple[int, int, int], int, int]  # Slice's fields but patches


class Order(msgspec.Struct, array_like=True, frozen=True):
    """An order of rank 0. The other ranks execute orders in sequence.

    kind     "plan": run the step; "time": run it without sending a digest; "zero": clear blocks 0 .. `number` of the
             cache; "drafter": run the draft model with each step from now on (`number` 1), or no longer (0); "replay":
             measure the CUDA graph that ran last, `number` times; "pixels": patches of the picture that rank `number`
             begins to encode in the next plan; "move": copy the blocks of KV in `move` once at most `number` steps are
             in flight; "close": end
    number   StepPlan.step, or as above
    slots    of the plan's work, in order; None: those of the plan before
    starts   of the plan's work
    rows     of those works that begin a series
    chain, min_confidence, host, slices, dropped   of StepPlan
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
    move: bytes = b""


class Writer:
    """Encodes plans on rank 0."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._known: dict[int, Work] = {}  # by slot: the first work of the slot's last series
        self._slots: list[int] = []  # slots of the last plan
        self._series: list[int] = []

    def plan(self, plan: StepPlan, kind: str = "plan") -> bytes:
        starts = [w.start for w in plan.work]
        series = [w.series for w in plan.work]
        slots, rows = None, list[Row]()
        if series != self._series:
            slots, rows = self._changes(plan.work, series)
        cuts = [(s.rank, s.digest, s.grid, s.start, s.stop) for s in plan.slices]
        chain, confidence = plan.chain, plan.min_confidence
        return self.order(Order(kind, plan.step, chain, confidence, plan.host, slots, starts, rows, cuts, plan.dropped))

    def _changes(self, work: Sequence[Work], series: list[int]) -> tuple[list[int] | None, list[Row]]:
        """(slots, None if they are those of the last plan; rows of the works that begin a series)."""
        known, slots = self._known, None
        changed = [i for i, (before, now) in enumerate(zip(self._series, series)) if before != now]
        if len(series) != len(self._series) or any(work[i].slot != self._slots[i] for i in changed):
            slots = self._slots = [w.slot for w in work]
            changed = [i for i, w in enumerate(work) if w.slot not in known or known[w.slot].series != w.series]
        rows = [_row(i, known.get(work[i].slot), work[i]) for i in changed]
        for i in changed:
            known[work[i].slot] = work[i]
        self._series = series
        return slots, rows

    def order(self, order: Order) -> bytes:
        return self._encoder.encode(order)


def _row(place: int, last: Work | None, w: Work) -> Row:
    kept, added, fresh = 0, w.blocks, None
    if last is None or (last.rid, last.params, last.seed) != (w.rid, w.params, w.seed):
        fresh = w.params, w.seed
    if last is not None and (table := last.blocks):
        if table is w.blocks:
            kept, added = -1, ()
        elif w.blocks[: len(table)] == table:
            kept, added = len(table), w.blocks[len(table) :]
    return (
        place, w.rid, fresh, kept, added, w.tokens, w.sample, w.prompt_targets, w.history, w.drafts, w.next_token,
        w.chained, w.media, w.start - w.output_index, w.output_index + w.left,
    )  # fmt: skip


class Reader:
    """Decodes plans on another rank."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._known: dict[int, Terms] = {}  # by slot
        self._slots: Sequence[int] = ()  # slots of the last plan

    def order(self, body: bytes) -> Order:
        """The decoded order. EngineError if it is malformed."""
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as e:
            raise EngineError(f"a malformed order reached this rank: {e}") from e

    def plan(self, order: Order) -> StepPlan:
        """The plan of an order of kind "plan" or "time". EngineError if it continues the series of a slot that had no
        work yet."""
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
