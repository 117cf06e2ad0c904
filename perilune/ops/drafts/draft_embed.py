"""Inputs of the draft model's layer: x = (rmsnorm(table[id]), rmsnorm(feature)) side by side, and rows of the rope
tables.

ids, positions [T] int64; table [V, D]; features [T, D]; token_norm, feature_norm [D]; angles: [P, r] float32
of positions 0 .. P - 1 -> x [T, 2 D] of the features' type, cos and sin rows [T, r]. Squares are summed in fp32; each
half is rounded once. Ids are row numbers of the table, positions those of the rope tables. "cuda" is one launch in
place of three; for an id outside the table it reads the nearest row. "composed" calls the ops that "cuda" replaces.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, exact, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.layouts.operands import Rotary
from perilune.ops.pointwise.embed_norm import MOST_WIDTH, embed_norm
from perilune.ops.pointwise.rmsnorm import reference as norm_reference
from perilune.ops.pointwise.rmsnorm import rmsnorm

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case(Sized):
    T: int
    V: int
    D: int
    r: int


CASES = [
    *(Case(t, K2.vocab, K2.hidden, K2.rope // 2, big=True) for t in (1, 4, 64)),
    *(Case(t, NANO.vocab, NANO.hidden, NANO.rope // 2) for t in (1, 4, 33)),
    Case(0, 16, 8, 4),
    Case(5, 3, 24, 1),
    Case(2, 5, 7, 3),
]
TOL = {"x": rounded(), "cos_rows": exact(), "sin_rows": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    P = 50
    return {
        "ids": g.integers(0, c.V, c.T),
        "positions": g.integers(0, P, c.T),
        "table": g.randn(c.V, c.D),
        "token_norm": g.randn(c.D),
        "features": g.randn(c.T, c.D, scale=3.0),
        "feature_norm": g.randn(c.D),
        "angles": Rotary(g.randn(P, c.r, dtype=FLOAT32), g.randn(P, c.r, dtype=FLOAT32)),
        "eps": 1e-5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    size = dtype.itemsize
    return costs.embed(c.T, c.D, size) + costs.rmsnorm(c.T, c.D, size) + costs.rmsnorm(c.T, c.D, size)


def reference(
    ids: Tensor, positions: Tensor, table: Tensor, token_norm: Tensor, features: Tensor, feature_norm: Tensor,
    angles: Rotary, eps: float,
) -> Rows:  # fmt: skip
    halves = norm_reference(table[ids], token_norm, eps), norm_reference(features, feature_norm, eps)
    return torch.cat(halves, -1), angles.cos[positions], angles.sin[positions]


op = Op("draft_embed", CASES, TOL, inputs, cost, reference, decides=("ids", "features"))


_kernel = build.launcher("draft_embed.cu", "draft_embed", "p" * 11 + "llllfp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "draft_embed.cu",
        device,
        (a.features.dtype == BFLOAT16, "bfloat16"),
        (a.ids.shape[0] > 0, "a token"),
        (a.features.shape[1] % 8 == 0 and a.features.shape[1] <= MOST_WIDTH, f"a width in 8s up to {MOST_WIDTH}"),
    ),
)
def cuda(
    ids: Tensor, positions: Tensor, table: Tensor, token_norm: Tensor, features: Tensor, feature_norm: Tensor,
    angles: Rotary, eps: float,
) -> Rows:  # fmt: skip
    cos, sin = angles.cos, angles.sin
    T, (V, D), r = len(ids), table.shape, cos.shape[1]
    ids, positions, features = ids.contiguous(), positions.contiguous(), features.contiguous()
    x = features.new_empty(T, 2 * D)
    cos_rows, sin_rows = cos.new_empty(T, r), cos.new_empty(T, r)
    failed = _kernel()(
        *addresses(ids, positions, table, token_norm, features, feature_norm, cos, sin, x, cos_rows, sin_rows),
        T,
        V,
        D,
        r,
        eps,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {ids.shape=} {table.shape=}"
    return x, cos_rows, sin_rows


@op.impl("composed")
def composed(
    ids: Tensor, positions: Tensor, table: Tensor, token_norm: Tensor, features: Tensor, feature_norm: Tensor,
    angles: Rotary, eps: float,
) -> Rows:  # fmt: skip
    _, x, cos_rows, sin_rows = embed_norm(ids, None, None, positions, table, token_norm, angles.cos, angles.sin, eps)
    return torch.cat([x, rmsnorm(features, feature_norm, eps)], -1), cos_rows, sin_rows


def draft_embed(
    ids: Tensor, positions: Tensor, table: Tensor, token_norm: Tensor, features: Tensor, feature_norm: Tensor,
    angles: Rotary, eps: float,
) -> Rows:  # fmt: skip
    (T, D), V, cos, sin = features.shape, table.shape[0], angles.cos, angles.sin
    assert ids.shape == positions.shape == (T,) and table.shape == (V, D), f"{ids.shape=} {features.shape=}"
    assert token_norm.shape == feature_norm.shape == (D,), f"{token_norm.shape=} {feature_norm.shape=} {D=}"
    assert table.dtype == features.dtype == token_norm.dtype == feature_norm.dtype, f"{table.dtype=} {features.dtype=}"
    assert cos.dtype == sin.dtype == FLOAT32 and cos.shape == sin.shape, f"{cos.shape=} {sin.shape=}"
    return op(ids, positions, table, token_norm, features, feature_norm, angles, eps)
