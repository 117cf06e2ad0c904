"""Embedding on one of N ranks, which has V / N rows of the table: this rank's term of the sum that begins a step.

ids [T] int64, PENDING ones as in embed_norm, with rows and last; positions [T] int64; table [V / N, D], the rows of ids
first .. first + V / N - 1; cos, sin [P, r] float32 -> zeros [T, D], the residual stream to which the sum is added; part
[T, D] as table: the tokens' rows of the table, 0 for tokens of other ranks; cos and sin rows [T, r]. Positions are
rows of the rope tables. "cuda" is one launch; "composed" calls the ops that "cuda" replaces.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.core.step import PENDING
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, K2, NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.pointwise import embed_norm
from perilune.ops.pointwise.embed import embed
from perilune.ops.pointwise.embed_norm import Rows, check, resolved


@dataclass(frozen=True)
class Case(Sized):
    T: int
    V: int  # rows of the table on this rank
    ranks: int
    rank: int
    D: int
    r: int
    pending: bool = True


CASES = [
    *(Case(t, K2.vocab // 2, 2, 1, K2.hidden, K2.rope // 2, big=True) for t in (1, 4, 64, 1024)),
    Case(1, NANO.vocab // 2, 2, 0, NANO.hidden, NANO.rope // 2),
    Case(64, NANO.vocab // 4, 4, 3, NANO.hidden, NANO.rope // 2),
    Case(33, NANO.vocab // 2, 2, 0, NANO.hidden, NANO.rope // 2, pending=False),
    Case(0, 16, 2, 0, 8, 4),
    Case(5, 3, 3, 1, 7, 1),
]
TOL = {name: exact() for name in ("zeros", "part", "cos_rows", "sin_rows")}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    whole = embed_norm.inputs(embed_norm.Case(c.T, c.V * c.ranks, c.D, c.r, c.pending), g)
    first = c.V * c.rank
    part = {"table": whole["table"][first : first + c.V].contiguous(), "first": first}
    return {name: (whole | part)[name] for name in op.parameters}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.embed(c.T, c.D, dtype.itemsize)


def reference(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, first: int,
    cos: Tensor, sin: Tensor,
) -> Rows:  # fmt: skip
    part = table.new_zeros(len(ids), table.shape[1])
    for t, token in enumerate(resolved(ids, rows, last).tolist()):
        if 0 <= token - first < len(table):
            part[t] = table[token - first]
    return torch.zeros_like(part), part, cos[positions], sin[positions]


op = Op("embed_part", CASES, TOL, inputs, cost, reference, decides=("ids", "table"))


_kernel = build.launcher("embed_part.cu", "embed_part", "p" * 11 + "llllllp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "embed_part.cu",
        device,
        (a.table.dtype == BFLOAT16, "bfloat16"),
        (a.ids.shape[0] > 0, "a token"),
        (a.table.shape[1] % 8 == 0, "a width in 8s"),
    ),
)
def cuda(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, first: int,
    cos: Tensor, sin: Tensor,
) -> Rows:  # fmt: skip
    T, (V, D), r = len(ids), table.shape, cos.shape[1]
    ids, positions = ids.contiguous(), positions.contiguous()
    zeros, part = table.new_empty(T, D), table.new_empty(T, D)
    cos_rows, sin_rows = cos.new_empty(T, r), cos.new_empty(T, r)
    failed = _kernel()(
        *addresses(ids, rows, last, positions, table, cos, sin, zeros, part, cos_rows, sin_rows),
        T,
        first,
        V,
        D,
        r,
        PENDING,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {ids.shape=} {table.shape=}"
    return zeros, part, cos_rows, sin_rows


@op.impl("composed")
def composed(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, first: int,
    cos: Tensor, sin: Tensor,
) -> Rows:  # fmt: skip
    own = resolved(ids, rows, last) - first
    inside = (own >= 0) & (own < len(table))
    part = torch.where(inside.unsqueeze(1), embed(own.clamp(0, len(table) - 1), table), 0)
    return torch.zeros_like(part), part, cos[positions], sin[positions]


def embed_part(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, first: int,
    cos: Tensor, sin: Tensor,
) -> Rows:  # fmt: skip
    check(ids, rows, last, positions, cos, sin)
    return op(ids, rows, last, positions, table, first, cos, sin)
