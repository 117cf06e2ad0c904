"""experts_int4.py's sum with compact scales: one byte for every 32 values, one bfloat16 for every row.

x [T, D]; ids [T, k] int32, distinct within a row; weights [T, k] float32; gate_up_packed [E, 2 I, D / 8] int32,
gate_up_scale [E, 2 I, D / 32] uint8 and gate_up_row [E, 2 I] bfloat16, the gate's rows first; down_packed
[E, D, I / 8], down_scale [E, D, I / 32], down_row [E, D]; y [T, D] as x. D and I are multiples of 32.
W = q * s with s = scale * (row / 255), in fp32, each operation rounded.

"cpp" (experts.cpp) reads the weights as they are, once per call for all tokens of an expert; fp32 throughout, experts
added in ascending order: the same bits as experts.py's "cpp" on dequantised float32 weights. "torch" dequantises each
expert that was hit to x's type.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, Make, dequantized
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.int4 import GROUP
from perilune.ops.layouts.int4 import dequantize as dequantize_int4
from perilune.ops.moe.experts import Case, each, routing
from perilune.ops.moe.experts import reference as dense_reference
from perilune.ops.moe.experts_int4 import CASES

BITS = 4 + 8 / GROUP  # of a weight; a row's factor weighs nothing beside it
TOL = {"y": dequantized()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    gate_up = dict(zip(("gate_up_packed", "gate_up_scale", "gate_up_row"), g.int4_compact(c.E, 2 * c.I, c.D)))
    down = dict(zip(("down_packed", "down_scale", "down_row"), g.int4_compact(c.E, c.D, c.I)))
    return {"x": g.randn(c.T, c.D), **routing(c, g), **gate_up, **down}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, BITS)


def dequantize(packed: Tensor, scale: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    """packed [..., o, i / 8] int32, scale [..., o, i / 32] uint8, row [..., o] -> [..., o, i]."""
    return dequantize_int4(packed, scale.float() * (row.float() / 255).unsqueeze(-1), dtype)


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor,
) -> Tensor:
    gate_up = dequantize(gate_up_packed, gate_up_scale, gate_up_row, FLOAT32)
    return dense_reference(x, ids, weights, gate_up, dequantize(down_packed, down_scale, down_row, FLOAT32))


op = Op("experts_int4_compact", CASES, TOL, inputs, cost, reference, decides=("x", "gate_up_scale"))


@functools.cache
def _kernel() -> Any:
    return build.function("experts", "experts_int4_compact", "p" * 11 + "l" * 6)


@op.impl("cpp", when=lambda a, device: build.on_cpu("experts", device))
def cpp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor,
) -> Tensor:
    f, ids, weights = x.float().contiguous(), ids.contiguous(), weights.contiguous()
    gate_up = [t.contiguous() for t in (gate_up_packed, gate_up_scale, gate_up_row)]
    down = [t.contiguous() for t in (down_packed, down_scale, down_row)]
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 8  # noqa: E741
    h, y = torch.empty(T * k, I), torch.empty(T, D)
    pointers = [t.data_ptr() for t in (f, ids, weights, *gate_up, *down, h, y)]
    failed = _kernel()(*pointers, T, k, E, D, I, threads.count())
    assert not failed, f"an id is no expert: {ids.min()=} {ids.max()=} {E=}"
    return y if x.dtype == FLOAT32 else y.to(x.dtype)


@op.impl("torch")
def per_expert(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor,
) -> Tensor:
    def expert(e: int) -> tuple[Tensor, Tensor]:
        return (
            dequantize(gate_up_packed[e], gate_up_scale[e], gate_up_row[e], x.dtype),
            dequantize(down_packed[e], down_scale[e], down_row[e], x.dtype),
        )

    return each(x, ids, weights, expert)


def experts_int4_compact(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor,
) -> Tensor:
    (T, D), (E, both, words) = x.shape, gate_up_packed.shape
    assert D == 8 * words and D % GROUP == 0 and both % (2 * GROUP) == 0, f"{x.shape=} {gate_up_packed.shape=}"
    assert gate_up_scale.shape == (E, both, D // GROUP), f"{gate_up_packed.shape=} {gate_up_scale.shape=}"
    assert down_packed.shape == (E, D, both // 16), f"{gate_up_packed.shape=} {down_packed.shape=}"
    assert down_scale.shape == (E, D, both // (2 * GROUP)), f"{down_packed.shape=} {down_scale.shape=}"
    assert gate_up_row.shape == (E, both) and down_row.shape == (E, D), f"{gate_up_row.shape=} {down_row.shape=}"
    assert down_packed.dtype == gate_up_packed.dtype == torch.int32, f"{gate_up_packed.dtype=} {down_packed.dtype=}"
    assert down_scale.dtype == gate_up_scale.dtype == torch.uint8, f"{gate_up_scale.dtype=} {down_scale.dtype=}"
    assert down_row.dtype == gate_up_row.dtype == BFLOAT16, f"{gate_up_row.dtype=} {down_row.dtype=}"
    assert ids.shape == weights.shape and ids.shape[0] == T, f"{x.shape=} {ids.shape=} {weights.shape=}"
    assert ids.dtype == torch.int32 and weights.dtype == FLOAT32, f"{ids.dtype=} {weights.dtype=}"
    return op(
        x, ids, weights, gate_up_packed, gate_up_scale, gate_up_row, down_packed, down_scale, down_row
    )  # fmt: skip
