"""Step plans on their way to the other ranks: msgpack frames that say only what those do not know yet.

A request's parameters, its seed and its block table hardly change from step to step, so both ends keep them by slot: a
frame has the parameters when the slot gets another request, and of the table what is new at its end.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from perilune.core.errors import EngineError
from perilune.core.sampling import SamplingParams
from perilune.core.step import MediaRows, Slice, StepPlan, Work

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20

# How a share of a step is written: Work's fields but params, seed and blocks; (params, seed) or None; how many blocks
# of the table known before are kept (-1: it is the same); the blocks after those.
Row = tuple[
    int, int, int, tuple[int, ...], bool, int, tuple[int, ...], tuple[int, ...], int, int, int, bool,
    tuple[MediaRows, ...], tuple[SamplingParams, int] | None, int, tuple[int, ...],
]  # fmt: skip
Cut = tuple[int, bytes, tuple[int, int, int], int, int]  # Slice's fields but patches
Known = tuple[int, SamplingParams, int, tuple[int, ...]]  # of a slot: rid, params, seed, blocks


class Order(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 has the other ranks do, in order.

    kind     "plan": run the step; "time": run it, without a report; "zero": clear blocks 0 .. `number` of the cache;
             "drafter": from now on the draft model goes along (`number` 1), or not (0); "replay": the graph that ran
             last, in `number` rounds, for measurements; "pixels": the picture with which the next plan has rank
             `number` begin; "move": blocks of KV, as `move` says, when at most `number` steps are in flight; "close":
             end
    number, step, chain, min_confidence, host   of StepPlan, or as above
    rows     the plan's work
    slices, dropped   of StepPlan
    pixels   (digest, patches)
    """

    kind: str
    number: int = 0
    chain: int = 0
    min_confidence: float = 0.0
    host: bool = False
    rows: Sequence[Row] = ()
    slices: Sequence[Cut] = ()
    dropped: tuple[bytes, ...] = ()
    pixels: tuple[bytes, memoryview] | None = None
    move: bytes = b""


class Writer:
    """Rank 0's end."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._known: dict[int, Known] = {}

    def plan(self, plan: StepPlan, kind: str = "plan") -> bytes:
        rows = [self._row(w) for w in plan.work]
        cuts = [(s.rank, s.digest, s.grid, s.start, s.stop) for s in plan.slices]
        return self.order(Order(kind, plan.step, plan.chain, plan.min_confidence, plan.host, rows, cuts, plan.dropped))

    def order(self, order: Order) -> bytes:
        return self._encoder.encode(order)

    def _row(self, w: Work) -> Any:
        known, blocks = self._known.get(w.slot), w.blocks
        same = known is not None and known[0] == w.rid and known[1] is w.params and known[2] == w.seed
        kept, added = 0, blocks
        if known is not None and (before := known[3]):
            if before is blocks:
                kept, added = -1, ()
            elif blocks[: len(before)] == before:
                kept, added = len(before), blocks[len(before) :]
        if not same or kept != -1:
            self._known[w.slot] = w.rid, w.params, w.seed, blocks
        fresh = None if same else (w.params, w.seed)
        return (
            w.rid, w.slot, w.start, w.tokens, w.sample, w.output_index, w.prompt_targets, w.history, w.left, w.drafts,
            w.next_token, w.chained, w.media, fresh, kept, added,
        )  # fmt: skip


class Reader:
    """Another rank's end."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._known: dict[int, Known] = {}

    def order(self, body: bytes) -> Order:
        """EngineError if it is malformed."""
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as e:
            raise EngineError(f"a malformed order reached this rank: {e}") from e

    def plan(self, order: Order) -> StepPlan:
        work = tuple([self._work(row) for row in order.rows])
        slices = tuple([Slice(*cut) for cut in order.slices])
        return StepPlan(
            order.number, work, order.chain, order.min_confidence, order.host, slices, order.dropped
        )  # fmt: skip

    def _work(self, row: Row) -> Work:
        (rid, slot, start, tokens, sample, output_index, targets, history, left, drafts, next_token, chained,
         media, fresh, kept, blocks) = row  # fmt: skip
        known = self._known.get(slot)
        if known is None and (fresh is None or kept):
            raise EngineError(f"an order speaks of slot {slot}, which this rank does not know")
        _, params, seed, before = known or (0, *fresh, ())  # type: ignore[misc]  # fresh is given where known is not
        if fresh is not None:
            params, seed = fresh
        if kept:
            blocks = before if kept == -1 else before[:kept] + blocks
        if fresh or kept != -1:
            self._known[slot] = rid, params, seed, blocks
        return Work(
            rid, slot, start, tokens, blocks, sample, output_index, params, seed, targets, history, left, drafts,
            next_token, chained, media,
        )  # fmt: skip
