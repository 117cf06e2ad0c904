"""Attention over the parts of a KV cache that is sharded along the sequence, merged, is attention over the whole."""

import pytest
import torch
from torch import Tensor

from perilune.dist.kv_shards import KvShards
from perilune.ops.attention import mla_decode, mla_decode_merge, mla_decode_partial, paged_inputs
from perilune.ops.harness.case import FLOAT32, NANO, Make
from perilune.ops.layouts.operands import Span

R, ROPE, VALUE = NANO.latent, NANO.rope, NANO.value


def parts(
    g: Make, ranks: int, counts: list[int], contexts: list[int], heads: int, *, tokens: int = 16, packed: bool = False
) -> tuple[list[Tensor], Tensor]:
    """(what each rank gives for its heads [T, heads / ranks, v], [T, heads, v] of attention over the whole cache)."""
    whole = paged_inputs.cache(g, contexts, ranks * tokens, R + ROPE)
    pages, tables = whole["cache"], whole["tables"]
    if packed:
        pages = paged_inputs.packed(pages, R)
    q = g.randn(sum(counts), heads, R + ROPE, scale=1 / 16 if packed else 1.0)
    w_uv, scale = g.randn(heads, R, VALUE, scale=R**-0.5 / (16 if packed else 1)), (R + ROPE) ** -0.5
    start = paged_inputs.query_start(g, counts)
    expected = mla_decode.mla_decode(q, pages, Span(tables, start, whole["context"]), w_uv, scale)

    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(g.device)
    positions = torch.cat([torch.arange(c - n, c) for n, c in zip(counts, contexts)]).to(g.device)
    sent = []
    for rank in range(ranks):
        own = pages[:, rank * tokens : (rank + 1) * tokens].contiguous()
        _, context = KvShards(rank, ranks, tokens).rows(positions, positions)
        span = Span(tables[owner], paged_inputs.query_start(g, [1] * len(q)), context)
        o, lse = mla_decode_partial.mla_decode_partial(q, own, span, R, ranks, scale)
        rows = mla_decode_partial.joined(o, lse)
        assert all(torch.equal(a, b) for a, b in zip(mla_decode_partial.parted(rows, o, lse), (o, lse)))
        sent.append(rows)
    found, each = [], heads // ranks
    for rank in range(ranks):
        received = mla_decode_partial.parted(torch.stack([rows[rank] for rows in sent]), o, lse)
        found.append(mla_decode_merge.mla_decode_merge(*received, w_uv[rank * each : (rank + 1) * each]))
    return found, expected


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("ranks", "counts", "contexts"),
    [(2, [1], [1]), (2, [1, 1], [16, 17]), (2, [4, 1, 3], [35, 300, 3]), (4, [2, 1], [49, 130]), (4, [3], [66])],
)
def test_merged_parts_are_the_whole(ranks: int, counts: list[int], contexts: list[int], packed: bool) -> None:
    g = Make(FLOAT32, torch.device("cpu"), 3)
    found, expected = parts(g, ranks, counts, contexts, 4, packed=packed)
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-4)
