"""Attention over the parts of a KV cache that is sharded along the sequence, merged, is attention over the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.dist.kv_shards import KvShards
from perilune.ops.attention import mla_decode, mla_decode_merge, mla_decode_partial, paged_inputs
from perilune.ops.harness import check
from perilune.ops.harness.case import BFLOAT16, FLOAT32, NANO, Make
from perilune.ops.layouts import latent_cache
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


@pytest.mark.parametrize("packed", [False, True])
def test_the_bound_holds_for_rounded_probabilities_and_for_no_coarser_ones(packed: bool) -> None:
    op = mla_decode_partial.op
    case = mla_decode_partial.Case((5, 16, 17) * 8, 2, 64, packed=packed)
    args: dict[str, Any] = op.inputs(case, Make(BFLOAT16, torch.device("cpu"), 1))
    want, tol = op.reference(*args.values())[0], check.tolerances(op, case, BFLOAT16)["o"]
    q, pages, span = args["q_full"].float(), args["pages"], args["span"]

    def rounded(dtype: torch.dtype) -> Tensor:
        """o as the kernel computes it for a context of one range, with probabilities in dtype."""
        o = []
        for t, length in enumerate(case.contexts):
            at = paged_inputs.slots(span.tables[t], torch.arange(length), pages.shape[1])
            rows = latent_cache.unpack(pages.view(-1, pages.shape[2])[at], case.R)
            scores = args["scale"] * (q[t] @ rows.T)
            odds = (scores - scores.amax(-1, keepdim=True)).exp()
            o.append(odds.to(dtype).float() @ rows[:, : case.R] / odds.sum(-1, keepdim=True))
        return torch.stack(o).to(BFLOAT16).view(len(o), 2, 32, case.R).transpose(0, 1)

    assert check.difference(rounded(BFLOAT16), want, tol) is None
    assert "are off" in (check.difference(rounded(latent_cache.E4M3), want, tol) or "")
