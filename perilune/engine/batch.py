"""StepPlan -> the tensors of one step. The only place where plans become numbers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.core.plan import PENDING, StepPlan, Work
from perilune.engine.sampler import on_device
from perilune.model.kimi_k2 import Span, Step
from perilune.spec.drafter import Followed


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's tensors, and which of its rows are read out.

    work           the plan's work in row order
    sampled        the works that sample, in the order of `rows`
    rows           [R] the rows they draw from: the last of each, and one more for every draft it has
    firsts         [S] the first of each one's rows
    slots          [S] last-token row that each of them stores its last token to
    """

    step: Step
    work: tuple[Work, ...]
    starts: tuple[int, ...]
    sampled: tuple[Work, ...]
    rows: Tensor
    firsts: Tensor
    slots: Tensor


def build(plan: StepPlan, last_tokens: Tensor, block_size: int, absorb_limit: int) -> Batch:
    """`last_tokens` [max_num_seqs] int64 on the device: what each slot sampled last, for PENDING ids."""
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

    ids = on_device(tokens, device)
    pending = np.flatnonzero(tokens == PENDING)
    if len(pending):
        owner = np.searchsorted(ends, pending, side="right")
        sources = on_device(np.fromiter((work[i].slot for i in owner), np.int64, len(owner)), device)
        ids[on_device(pending, device)] = last_tokens[sources]

    split = int(ends[len(few) - 1]) if few else 0
    step = Step(
        tokens=ids,
        positions=on_device(positions, device),
        slots=on_device(slots, device),
        absorbed=_span(few, slice(0, split), device),
        plain=_span(many, slice(split, total), device, counts_on_host=True),
    )
    sampling = [i for i, w in enumerate(work) if w.sample]
    firsts = [int(ends[i]) - work[i].drafts - 1 for i in sampling]
    return Batch(
        step=step,
        work=work,
        starts=tuple(starts.tolist()),
        sampled=tuple(work[i] for i in sampling),
        rows=on_device(np.concatenate([ends[:0], *(np.arange(f, ends[i]) for f, i in zip(firsts, sampling))]), device),
        firsts=on_device(np.array(firsts, np.int64), device),
        slots=on_device(np.array([work[i].slot for i in sampling], np.int64), device),
    )


def _span(work: list[Work], rows: slice, device: torch.device, *, counts_on_host: bool = False) -> Span | None:
    if not work:
        return None
    width = max(len(w.blocks) for w in work)
    tables = np.zeros((len(work), width), np.int32)
    for row, w in zip(tables, work):
        row[: len(w.blocks)] = w.blocks
    query_start = np.zeros(len(work) + 1, np.int32)
    np.cumsum([w.count for w in work], out=query_start[1:])
    context = np.fromiter((w.end for w in work), np.int32, len(work))
    return Span(
        rows,
        on_device(tables, device),
        torch.from_numpy(query_start) if counts_on_host else on_device(query_start, device),
        torch.from_numpy(context) if counts_on_host else on_device(context, device),
    )


def followed(batch: Batch, features: Tensor, drawn: Tensor, lengths: Tensor | None) -> Followed:
    """What a drafter has to know of a step that drew `drawn` [R], of which each request keeps `lengths` [S], or one."""
    device = drawn.device
    following = batch.step.tokens.roll(-1)
    inside = [(start + w.count - 1, w.ahead) for w, start in zip(batch.work, batch.starts) if not w.sample]
    if inside:
        rows, tokens = on_device(np.array(inside, np.int64).T.copy(), device)
        following[rows] = tokens
    following[batch.rows] = drawn
    last = batch.firsts if lengths is None else batch.firsts + (lengths - 1).clamp_min(0)
    sampled = tuple(i for i, w in enumerate(batch.work) if w.sample)
    return Followed(batch.work, batch.starts, batch.step, features, following, sampled, last)
