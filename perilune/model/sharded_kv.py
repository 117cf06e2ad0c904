"""Attention where every rank has its heads' weights, but only a part of every request's KV (dist/kv_shards.py).

Few tokens: all ranks gather the queries of all heads; each rank attends to its own positions with all heads and sends
each head's partial output to the rank of that head, which merges the parts by their log-sum-exp. Two exchanges, of 576
and 514 values per token and head. Many tokens: ranks gather the latents of whole contexts and attend with their own
heads, as without sharding. One exchange of 576 values per token of context, small beside a long chunk's attention.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.dist.group import Group, exchanged
from perilune.dist.kv_shards import KvShards
from perilune.ops.attention.mla_decode_merge import mla_decode_merge
from perilune.ops.attention.mla_decode_partial import joined, mla_decode_partial, parted
from perilune.ops.attention.mla_prefill import mla_prefill
from perilune.ops.layouts.operands import Attention, Span

# Latents gathered at a time for prefill, unless one request has more. Larger: fewer exchanges, more memory.
CONTEXT_BYTES = 256 << 20


class ShardedKv:
    """Each rank of `group` holds `tokens` tokens of each KV block."""

    def __init__(self, group: Group, tokens: int) -> None:
        self._group = group
        self.shards = KvShards(group.slicing.rank, group.ranks, tokens)

    def span(self, span: Span, context: Tensor) -> Span:
        """Makes each row of `span` a request of its own. `context` [T] int32: the row's tokens on this rank. The host
        does not wait for the device."""
        T, tables = len(context), span.tables
        starts = torch.arange(T + 1, dtype=torch.int32, device=tables.device)
        if T != len(tables):
            owner = torch.searchsorted(span.query_start[1:], starts[:-1], right=True)
            tables = tables[owner.clamp_max_(len(tables) - 1)]
        return Span(tables, starts, context)

    def decode(self, w: Attention, q_full: Tensor, span: Span, pages: Tensor, scale: float) -> Tensor:
        """mla_decode over all ranks' positions, [T, h, v]; arguments as in `parts`."""
        return mla_decode_merge(*self.parts(w, q_full, span, pages, scale), w.w_uv)

    def parts(self, w: Attention, q_full: Tensor, span: Span, pages: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Outputs [N, T, h, R] and log-sum-exps [N, T, h] of all ranks' positions, as mla_decode_merge takes them;
        q_full [T, h, R + r] of this rank's h heads, `span` from `self.span`."""
        ranks, R = self._group.ranks, w.w_uv.shape[1]
        own = q_full.view(1, -1).view(torch.uint8)
        gathered = exchanged(self._group, own).view(q_full.dtype).view(ranks, *q_full.shape)
        queries = gathered.transpose(0, 1).flatten(1, 2).contiguous()
        o, lse = mla_decode_partial(queries, pages, span, R, ranks, scale)
        return parted(exchanged(self._group, joined(o, lse)), o, lse)

    def prefill(self, w: Attention, q: Tensor, span: Span, pages: Tensor, scale: float) -> Tensor:
        """mla_prefill over all ranks' positions with this rank's h heads, [T, h, v]."""
        starts, lengths = span.query_start.tolist(), span.context.tolist()
        out = []
        for some in self._together(lengths, pages):
            rows = slice(starts[some.start], starts[some.stop])
            tables, whole = self._whole(span.tables[some], lengths[some], pages)
            given = Span(tables, span.query_start[some.start : some.stop + 1] - rows.start, span.context[some])
            out.append(mla_prefill(q[rows], whole, w.w_uk, w.w_uv, given, scale))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _together(self, lengths: list[int], pages: Tensor) -> Iterator[slice]:
        """Runs of requests with at most CONTEXT_BYTES of latents each; a larger request is alone."""
        row = pages.shape[2] * pages.itemsize
        first, held = 0, 0
        for i, length in enumerate(lengths):
            if held and (held + length) * row > CONTEXT_BYTES:
                yield slice(first, i)
                first, held = i, 0
            held += length
        yield slice(first, len(lengths))

    def _whole(self, tables: Tensor, lengths: list[int], pages: Tensor) -> tuple[Tensor, Tensor]:
        """(tables [B, M] int32, pages [blocks, tokens, width]): all ranks' rows of these requests' blocks."""
        ranks, device = self.shards.ranks, tables.device
        counts = [-(-length // (ranks * self.shards.tokens)) for length in lengths]
        used = torch.cat([table[:count] for table, count in zip(tables, counts)])
        own = pages.index_select(0, used).view(torch.uint8)
        rows = self._group.gather(own).flatten(0, 1).view(pages.dtype)
        # In `rows`, block r * len(used) + i is rank r's part of block used[i].
        numbers = torch.arange(len(rows), dtype=torch.int32, device=device).view(ranks, -1).T
        found = torch.zeros(len(counts), max(counts) * ranks, dtype=torch.int32, device=device)
        first = 0
        for row, count in zip(found, counts):
            row[: count * ranks] = numbers[first : first + count].flatten()
            first += count
        return found, rows
