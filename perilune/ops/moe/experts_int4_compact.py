"""experts_int4.py's sum with compact scales: one byte for every 32 values, one bfloat16 for every row.

gate_up: packed [E, 2 I, D / 8] int32, scale [E, 2 I, D / 32] uint8 and row_scale [E, 2 I] bfloat16, the gate's rows
first; down: packed [E, D, I / 8], scale [E, D, I / 32], row_scale [E, D]. D and I are multiples of 32.
W = q * s with s = scale * (row_scale / 255), in fp32, each operation rounded.
"""

import torch
from torch import Tensor

from perilune.ops.harness.case import BFLOAT16, Make, dequantized
from perilune.ops.layouts import int4
from perilune.ops.layouts.operands import Matrix
from perilune.ops.moe import experts_int4
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.experts import Case, Format, define

BITS = 4 + 8 / int4.GROUP  # per weight; the row scales add less than 0.01
TOL = {"y": dequantized()}


def _matrices(c: Case, g: Make) -> tuple[Matrix, Matrix]:
    return Matrix(*g.int4_compact(c.E, 2 * c.I, c.D)), Matrix(*g.int4_compact(c.E, c.D, c.I))


def dequantize(w: Matrix, dtype: torch.dtype) -> Tensor:
    """[..., o, i] of a Matrix as above."""
    assert w.scale is not None and w.row_scale is not None
    return int4.dequantize(w.weight, w.scale.float() * (w.row_scale.float() / 255).unsqueeze(-1), dtype)


FORMAT = Format("experts_int4_compact", BITS, _matrices, dequantize, dequantize, gathers=False)
op = define(FORMAT, experts_int4.CASES, TOL)


def check(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> None:
    experts_int4.check(x, chosen, gate_up, down)
    (E, both, _), D = gate_up.weight.shape, x.shape[1]
    assert gate_up.scale is not None and gate_up.scale.dtype == torch.uint8, f"{gate_up.kind=}"
    assert gate_up.row_scale is not None and gate_up.row_scale.shape == (E, both), f"{gate_up.kind=}"
    assert down.row_scale is not None and down.row_scale.shape == (E, D), f"{down.kind=}"
    assert gate_up.row_scale.dtype == down.row_scale.dtype == BFLOAT16, f"{gate_up.kind=} {down.kind=}"


def experts_int4_compact(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
    check(x, chosen, gate_up, down)
    return op(x, chosen, gate_up, down)
