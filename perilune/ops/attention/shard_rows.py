"""For one rank of a KV cache that is sharded along the sequence: the cache rows of a step's tokens, and their contexts.

Of each block of ranks * tokens tokens, rank i holds tokens i * tokens .. + tokens - 1 (dist/kv_shards.py).

    own[t]     = the rank's cache row of slots[t]; -1 if another rank holds the token, or slots[t] < 0
    context[t] = how many of the positions 0 .. positions[t] this rank holds, the first rows of its block table

slots [T] int64, block * (ranks * tokens) + offset; positions [T] int64, not negative; own [T] int64, context [T] int32.

"cuda" is one launch instead of about twenty.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, Make, Sized, exact
from perilune.ops.harness.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    T: int
    rank: int = 0
    ranks: int = 2
    tokens: int = 64


CASES = [*(Case(t, rank, ranks) for t in (1, 300) for rank, ranks in ((0, 2), (3, 4))), Case(9, 1, 3, 5), Case(0)]
TOL = {"own": exact(), "context": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    slots, positions = g.integers(-1, 40 * c.ranks * c.tokens, c.T), g.integers(0, 9 * c.ranks * c.tokens, c.T)
    return {"slots": slots, "positions": positions, "rank": c.rank, "ranks": c.ranks, "tokens": c.tokens}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(0, 28 * c.T)


def reference(slots: Tensor, positions: Tensor, rank: int, ranks: int, tokens: int) -> tuple[Tensor, Tensor]:
    shard, length = slots // tokens, positions + 1
    here = (slots >= 0) & (shard % ranks == rank)
    rest = length % (ranks * tokens) - rank * tokens
    held = length // (ranks * tokens) * tokens + rest.clamp(0, tokens)
    return torch.where(here, shard // ranks * tokens + slots % tokens, -1), held.to(torch.int32)


op = Op("shard_rows", CASES, TOL, inputs, cost, reference, decides=("slots",), dtypes=(FLOAT32,))


_kernel = build.launcher("shard_rows.cu", "shard_rows", "ppppllllp")


@op.impl("cuda", when=lambda a, device: build.on_hopper("shard_rows.cu", device))
def cuda(slots: Tensor, positions: Tensor, rank: int, ranks: int, tokens: int) -> tuple[Tensor, Tensor]:
    slots, positions = slots.contiguous(), positions.contiguous()
    T, device = len(slots), slots.device
    own, context = torch.empty_like(slots), torch.empty(T, dtype=torch.int32, device=device)
    failed = _kernel()(
        slots.data_ptr(),
        positions.data_ptr(),
        own.data_ptr(),
        context.data_ptr(),
        T,
        rank,
        ranks,
        tokens,
        build.stream(device),
    )
    assert not failed, f"shard_rows does not start: CUDA error {failed}"
    return own, context


def shard_rows(slots: Tensor, positions: Tensor, rank: int, ranks: int, tokens: int) -> tuple[Tensor, Tensor]:
    assert slots.shape == positions.shape and slots.dim() == 1, f"{slots.shape=} {positions.shape=}"
    assert slots.dtype == positions.dtype == torch.int64 and 0 <= rank < ranks, f"{slots.dtype=} {rank=} {ranks=}"
    return op(slots, positions, rank, ranks, tokens)
