"""Turns a StepPlan into the tensors of a step that runs op by op; graphs/inputs.py does so for CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.core.step import PENDING, StepPlan, Work
from perilune.engine.sampler import on_device
from perilune.model.kimi_k2 import Span, Step
from perilune.speculation.drafter import Followed

# Arrays begin at multiples of 256 bytes in the joint copy, as torch's own tensors do: kernels load 16 bytes at a time.
ALIGNED_BYTES = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's tensors, and which of their rows are sampled.

    work      the plan's work in row order
    starts    the first row of each work
    sampled   the S works that sample, in the order of `rows`
    rows      [R] int64: the sampled rows: the last `drafts` + 1 rows of each work in `sampled`
    firsts    [S] int64: the first sampled row of each work in `sampled`
    slots     [S] int64: the row of the last-token buffer that gets each sampled work's last token
    """

    step: Step
    work: tuple[Work, ...]
    starts: tuple[int, ...]
    sampled: tuple[Work, ...]
    rows: Tensor
    firsts: Tensor
    slots: Tensor


def build(plan: StepPlan, last_tokens: Tensor, block_size: int, absorb_limit: int) -> Batch:
    """The tensors of a plan. `last_tokens` [max_num_seqs + 1] int64 on the device: the last token of each slot, for
    PENDING ids. Works of up to `absorb_limit` tokens come first and attend in the absorbed form (MQA over latents), the
    others in the plain form (keys and values of every head)."""
    device = last_tokens.device
    few = [w for w in plan.work if w.count <= absorb_limit]
    many = [w for w in plan.work if w.count > absorb_limit]
    work = (*few, *many)
    counts = np.fromiter((w.count for w in work), np.int64, len(work))
    ends = np.cumsum(counts)
    starts = ends - counts
    total = int(ends[-1])

    tokens = np.fromiter((t for w in work for t in w.tokens), np.int64, total)
    offset = np.repeat(np.fromiter((w.start for w in work), np.int64, len(work)) - starts, counts)
    positions = np.arange(total) + offset
    slots = np.empty(total, np.int64)
    for w, begin, end in zip(work, starts, ends):
        here = positions[begin:end]
        first = w.start // block_size
        table = np.asarray(w.blocks[first:], np.int64)
        slots[begin:end] = table[here // block_size - first] * block_size + here % block_size

    pending = np.flatnonzero(tokens == PENDING)
    sources = np.array([work[i].slot for i in np.searchsorted(ends, pending, side="right")], np.int64)
    sampling = [i for i, w in enumerate(work) if w.sample]
    firsts = [int(ends[i]) - work[i].drafts - 1 for i in sampling]
    spans = [_Arrays.of(few), _Arrays.of(many)]
    ids, at, places, rows, first_rows, stores, pending_at, source, *blocks = _together(
        [
            tokens,
            positions,
            slots,
            np.concatenate([ends[:0], *(np.arange(f, ends[i]) for f, i in zip(firsts, sampling))]),
            np.array(firsts, np.int64),
            np.array([work[i].slot for i in sampling], np.int64),
            pending,
            sources,
            spans[0].tables,
            spans[0].query_start,
            spans[0].context,
            spans[1].tables,
        ],
        device,
    )
    if len(pending):
        ids[pending_at] = last_tokens[source]
    split = int(ends[len(few) - 1]) if few else 0
    # The plain form's kernels are launched per request, so query_start and context stay on the host.
    counted = torch.from_numpy(spans[1].query_start), torch.from_numpy(spans[1].context)
    step = Step(
        tokens=ids,
        positions=at,
        slots=places,
        absorbed=Span(blocks[0], blocks[1], blocks[2], slice(0, split)) if few else None,
        plain=Span(blocks[3], counted[0], counted[1], slice(split, total)) if many else None,
    )
    return Batch(step, work, tuple(starts.tolist()), tuple(work[i] for i in sampling), rows, first_rows, stores)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The arrays of a Span (model/kimi_k2.py), on the host."""

    tables: NDArray[np.int32]
    query_start: NDArray[np.int32]
    context: NDArray[np.int32]

    @staticmethod
    def of(work: list[Work]) -> "_Arrays":
        tables = np.zeros((len(work), max((len(w.blocks) for w in work), default=0)), np.int32)
        for row, w in zip(tables, work):
            row[: len(w.blocks)] = w.blocks
        query_start = np.zeros(len(work) + 1, np.int32)
        np.cumsum([w.count for w in work], out=query_start[1:])
        return _Arrays(tables, query_start, np.fromiter((w.end for w in work), np.int32, len(work)))


def _together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on `device`. On a GPU: one copy from pinned memory, which the host does not wait for."""
    if device.type != "cuda":
        return [torch.from_numpy(a) for a in arrays]
    begins = np.cumsum([0, *(-(-a.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for a in arrays)]).tolist()
    host = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    filled = host.numpy()
    for begin, a in zip(begins, arrays):
        filled[begin : begin + a.nbytes] = a.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)  # torch reuses the pinned memory only after the copy
    types = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
    return [there[b : b + a.nbytes].view(types[a.dtype]).view(a.shape) for b, a in zip(begins, arrays)]


def followed(batch: Batch, features: Tensor, sampled_tokens: Tensor, lengths: Tensor | None) -> Followed:
    """A draft model's inputs from a step. features [T, A D] of its rows; sampled_tokens [R] int64; lengths [S] int64:
    how many of these each request gets, None: one each."""
    device = sampled_tokens.device
    following = batch.step.tokens.roll(-1)
    inside = [(start + w.count - 1, w.next_token) for w, start in zip(batch.work, batch.starts) if not w.sample]
    if inside:
        rows, tokens = on_device(np.array(inside, np.int64).T.copy(), device)
        following[rows] = tokens
    following[batch.rows] = sampled_tokens
    last = batch.firsts if lengths is None else batch.firsts + (lengths - 1).clamp_min(0)
    sampled = tuple(i for i, w in enumerate(batch.work) if w.sample)
    return Followed(batch.work, batch.starts, batch.step, features, following, sampled, last)
