"""Paged latents for the attention ops: checks of arguments, and test inputs in which every position outside the
requests' contexts is NaN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.ops.harness.case import BFLOAT16, Make
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Span


def cache(g: Make, contexts: Sequence[int], block_size: int, width: int) -> dict[str, Tensor]:
    """`cache` [N, block_size, width], NaN outside the requests' contexts; `tables` [B, M] int32, padded with a block of
    NaNs; `context` [B] int32."""
    needed = [-(-c // block_size) for c in contexts]
    M = max(needed, default=0) + 1
    free = g.permutation(sum(needed) + 2).tolist()
    poisoned = free.pop()
    pages = g.nan(sum(needed) + 2, block_size, width)
    tables = []
    for context, blocks in zip(contexts, needed):
        table = [free.pop() for _ in range(blocks)]
        flat = torch.tensor(table, device=g.device).repeat_interleave(block_size) * block_size
        slots = (flat + torch.arange(block_size, device=g.device).repeat(blocks))[:context]
        pages.view(-1, width)[slots] = g.randn(context, width)
        tables.append(table + [poisoned] * (M - blocks))
    return {
        "cache": pages,
        "tables": g.tensor(tables, torch.int32).view(len(contexts), M),
        "context": g.tensor(list(contexts), torch.int32),
    }


def packed(cache: Tensor, R: int) -> Tensor:
    """Packs a float cache [N, block_size, R + r], with latents times 16 as loading/fp8_latents.py scales them."""
    return latent_cache.pack(cache[..., :R] * 16.0, cache[..., R:], latent_cache.PACKED)


def inputs(g: Make, c: Any, counts: Sequence[int]) -> tuple[Tensor, Span]:
    """Pages and span of a case with contexts, block_size, R, r, packed and narrow. A request without context has a
    block of NaNs."""
    made = cache(g, [max(length, 1) for length in c.contexts], c.block_size, c.R + c.r)
    pages, tables, context = made["cache"], made["tables"], g.tensor(list(c.contexts), torch.int32)
    tables[context == 0] = tables[:, -1:][context == 0]
    if c.packed:
        pages = packed(pages, c.R)
    return pages.to(BFLOAT16) if c.narrow else pages, Span(tables, query_start(g, counts), context)


def query_start(g: Make, counts: Sequence[int]) -> Tensor:
    return g.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], torch.int32)


def slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Flat cache rows of `positions` [..., L] of the requests with block tables [..., M]."""
    blocks = tables.long().gather(-1, positions // block_size)
    return blocks * block_size + positions % block_size


def latents(pages: Tensor, span: Span, b: int, R: int) -> Tensor:
    """Latents and rope keys [context, R + r] of request b, in float32."""
    positions = torch.arange(int(span.context[b]), device=pages.device)
    return latent_cache.unpack(pages.view(-1, pages.shape[2])[slots(span.tables[b], positions, pages.shape[1])], R)


def check(pages: Tensor, span: Span, R: int, r: int) -> None:
    """Asserts shapes and types for an op that reads latents of width R and rope keys of width r."""
    tables, start, context, B = span.tables, span.query_start, span.context, span.tables.shape[0]
    assert pages.shape[2] == latent_cache.width(R, r, pages.dtype), f"{pages.shape=} {pages.dtype=} {R=} {r=}"
    assert pages.is_contiguous(), f"{pages.shape=} {pages.stride()=}"
    assert start.shape == (B + 1,) and context.shape == (B,), f"{tables.shape=} {start.shape=} {context.shape=}"
    assert tables.dtype == start.dtype == context.dtype == torch.int32, f"{tables.dtype=} {context.dtype=}"
