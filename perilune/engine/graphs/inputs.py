"""The inputs of a decode or verify step's CUDA graph: one buffer, which reaches the device in one copy.

The buffer has rows for a fixed number of requests with a fixed number of tokens each. Rows beyond the step's requests
are padding: they repeat the first request, so that they read no other experts, and their results are not used. A
request with fewer tokens than others gets padding rows in front, which repeat its first token at the positions before
it and write no cache; these positions are computed already, so attention may read them.

If a work is chained to a step with a result that the host has not read, the device completes the work's inputs
(ops/drafts/advance_inputs).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.core.step import PENDING, Work
from perilune.engine.sampler import uniforms
from perilune.ops.rows.mapped_copy import mapped_copy

A = TypeVar("A")

_LOW_64_BITS = (1 << 64) - 1


class Key(NamedTuple):
    """A graph's size: B `requests` of m = `each` tokens, block tables M = `width` wide. `whole`: the graph also samples
    and accepts drafts. `followed`: it outputs the features that a draft model reads."""

    requests: int
    each: int
    width: int
    whole: bool
    followed: bool


@dataclass(frozen=True, slots=True)
class Fields(Generic[A]):
    """Views of the buffer, those of eight-byte types first; A is a tensor or an array.

    ids, rows, positions, slots     int64 [B, m]: as in Step; PENDING ids are read from `rows` of the last-token buffer
    u                               float64 [B, m]: the random number of each sample
    stores                          int64 [B]: the row of the last-token buffer that a request's last token goes to
    sources, seeds, output_index    int64 [B], for chained works: the row (slot) of the device's buffers that they
                                    continue from, their request's seed, the output index of their first sample
    context, front, stop            int32 [B]: tokens in the cache after the step; front and stop as in
                                    ops/drafts/accept_drafts
    chained                         int32 [B]: 1 for chained works
    top_k                           int32 [B, m]; temperature, top_p, min_p float32 [B, m]: of each sample
    tables                          int32 [B, M]: block tables
    """

    ids: A
    rows: A
    positions: A
    slots: A
    u: A
    stores: A
    sources: A
    seeds: A
    output_index: A
    context: A
    front: A
    stop: A
    chained: A
    top_k: A
    temperature: A
    top_p: A
    min_p: A
    tables: A


_DTYPES = {
    **dict.fromkeys(("ids", "rows", "positions", "slots", "stores", "sources", "seeds", "output_index"), torch.int64),
    "u": torch.float64,
    **dict.fromkeys(("context", "front", "stop", "chained", "top_k", "tables"), torch.int32),
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
}


def _shapes(size: Key) -> dict[str, tuple[int, ...]]:
    B, m, M, *_ = size
    by_request = ("stores", "sources", "seeds", "output_index", "context", "front", "stop", "chained")
    special = {**dict.fromkeys(by_request, (B,)), "tables": (B, M)}
    return {f.name: special.get(f.name, (B, m)) for f in fields(Fields)}


def _views(buffer: Tensor, size: Key) -> list[Tensor]:
    views, at = [], 0
    for name, shape in _shapes(size).items():
        dtype = _DTYPES[name]
        end = at + dtype.itemsize * int(np.prod(shape))
        views.append(buffer[at:end].view(dtype).view(shape))
        at = end
    return views


@dataclass(slots=True)
class _Host:
    buffer: Tensor  # pinned if the device is a GPU
    fields: Fields[NDArray[Any]]
    tables: list[tuple[int, ...] | None]  # the block table that each row of `tables` holds


class Arrays:
    """Block tables as arrays, cached by slot until a request's table changes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], NDArray[np.int32]]] = {}  # by slot

    def of(self, w: Work) -> NDArray[np.int32]:
        known = self._known.get(w.slot)
        if known is None or known[0] is not w.blocks:
            known = self._known[w.slot] = (w.blocks, np.asarray(w.blocks, np.int32))
        return known[1]


class Inputs:
    """The buffer on the device, and two pinned host buffers that steps fill alternately. `fill` for step N+1 may run
    while step N's copy reads the other host buffer; step N-1, which used the same one, must have ended.

    `padding_row` is the row of the last-token buffer that padding rows write to; it is never read.
    """

    def __init__(self, size: Key, device: torch.device, arrays: Arrays, *, block_size: int, padding_row: int) -> None:
        self.size = size
        nbytes = sum(_DTYPES[name].itemsize * int(np.prod(shape)) for name, shape in _shapes(size).items())
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.fields: Fields[Tensor] = Fields(*_views(self._buffer, size))
        self._arrays, self._block_size, self._padding_row = arrays, block_size, padding_row
        self._hosts = tuple(self._host(nbytes, device.type == "cuda") for _ in range(2))
        self._columns = np.arange(size.each)
        self.turn = 0

    def _host(self, nbytes: int, pinned: bool) -> _Host:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        views: Fields[NDArray[Any]] = Fields(*(view.numpy() for view in _views(buffer, self.size)))
        views.top_p[:] = 1.0
        return _Host(buffer, views, [None] * self.size.requests)

    def fill(self, work: Sequence[Work]) -> bool:
        """Writes a step's inputs and queues the copy. True if works are chained: advance_inputs must complete them."""
        self.turn ^= 1
        host = self._hosts[self.turn]
        to, count = host.fields, len(work)
        to.rows[:count] = np.array([w.slot for w in work])[:, None]
        to.stores[:count] = to.rows[:count, 0]
        to.context[:count] = [w.start + len(w.tokens) for w in work]
        flags = [w.chained for w in work]
        chained, all_chained = any(flags), all(flags)
        if all_chained:
            self._fill_chained(to, work)
        elif self.size.each == 1:
            size = self._block_size
            to.ids[:count, 0] = [w.tokens[0] for w in work]
            to.positions[:count, 0] = [w.start for w in work]
            to.slots[:count, 0] = [w.blocks[w.start // size] * size + w.start % size for w in work]
        else:
            for i, w in enumerate(work):
                self._fill_tokens(to, i, w)
        self._fill_sampling(to, work, numbers=not all_chained)
        for values in (to.ids, to.rows, to.positions, to.context, to.front, to.stop):
            values[count:] = values[:1]
        if chained:
            to.chained[:count] = flags
            to.seeds[:count] = np.array([w.seed & _LOW_64_BITS for w in work], np.uint64).view(np.int64)
            to.output_index[:count] = [w.output_index for w in work]
            to.chained[count:], to.sources[:] = to.chained[0], to.rows[:, 0]
        to.slots[count:], to.stores[count:], to.temperature[count:] = -1, self._padding_row, 0.0
        for i, w in enumerate(work):
            if host.tables[i] is not w.blocks:  # a table that changes is a new tuple (Request.table)
                to.tables[i, : len(w.blocks)] = self._arrays.of(w)
                to.tables[i, len(w.blocks) :] = w.blocks[0]
                host.tables[i] = w.blocks
        first = work[0].blocks
        if any(known is not first for known in host.tables[count:]):
            to.tables[count:] = to.tables[0]
            host.tables[count:] = [first] * (self.size.requests - count)
        mapped_copy(self._buffer, host.buffer, False)
        return chained

    def _fill_tokens(self, to: Fields[NDArray[Any]], i: int, w: Work) -> None:
        """Fills row i of a step in which requests may have several tokens."""
        each, size, blocks = self.size.each, self._block_size, w.blocks
        front = each - w.count
        to.ids[i] = [w.tokens[0]] * front + list(w.tokens)
        to.positions[i] = range(w.end - each, w.end)
        to.slots[i] = [-1] * front + [blocks[p // size] * size + p % size for p in range(w.start, w.end)]
        to.front[i], to.stop[i] = front, each - 1

    def _fill_chained(self, to: Fields[NDArray[Any]], work: Sequence[Work]) -> None:
        """Fills the rows of a step in which all works are chained. Ids are PENDING, and a cache slot says only whether
        there is one (0) or not (-1): the device completes both."""
        count, each = len(work), self.size.each
        front = each - np.array([w.count for w in work])[:, None]
        to.ids[:count] = PENDING
        to.positions[:count] = np.array([w.start for w in work])[:, None] - front + self._columns
        to.slots[:count] = np.where(self._columns < front, -1, 0)
        to.front[:count], to.stop[:count] = front[:, 0], each - 1

    def _fill_sampling(self, to: Fields[NDArray[Any]], work: Sequence[Work], *, numbers: bool) -> None:
        """Fills sampling parameters, and with `numbers` also random numbers; without it the device computes these."""
        count, params = len(work), [w.params for w in work]
        if all(p.greedy for p in params):
            to.temperature[:count] = 0.0
            return
        front = to.front[:count, None]
        to.temperature[:count] = np.array([p.temperature for p in params])[:, None]
        to.temperature[:count][self._columns < front] = 0.0  # padding columns: greedy is the fastest
        to.top_k[:count] = np.array([min(p.top_k, 2**31 - 1) for p in params])[:, None]
        to.top_p[:count] = np.array([p.top_p for p in params])[:, None]
        to.min_p[:count] = np.array([p.min_p for p in params])[:, None]
        if not numbers:
            return
        indices = np.array([w.output_index for w in work])[:, None] + self._columns - front
        to.u[:count] = uniforms([w.seed for w in work], indices.clip(0))
