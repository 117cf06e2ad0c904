"""experts.py's sum with the experts in the checkpoint's INT4 (layouts/int4.py).

gate_up: packed [E, 2 I, D / 8] int32 and scale [E, 2 I, D / 32], the gate's rows first; down: packed [E, D, I / 8],
scale [E, D, I / 32]. D and I are multiples of 32. Dequantised values are exact in float32 and rounded once in bfloat16.
"""

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness.case import BFLOAT16, Make
from perilune.ops.layouts import int4
from perilune.ops.layouts.int4 import GROUP
from perilune.ops.layouts.operands import Matrix
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.experts import TOL, Case, Format, define, quantized_cases

CASES = quantized_cases(Case(1, 1, 1, 32, 32), Case(9, 3, 5, 64, 32), Case(7, 2, 4, 96, 160))


def _matrices(c: Case, g: Make) -> tuple[Matrix, Matrix]:
    return Matrix(*g.int4(c.E, 2 * c.I, c.D)), Matrix(*g.int4(c.E, c.D, c.I))


def dequantize(w: Matrix, dtype: torch.dtype) -> Tensor:
    assert w.scale is not None
    return int4.dequantize(w.weight, w.scale, dtype)


FORMAT = Format(
    "experts_int4",
    costs.INT4_BITS,
    _matrices,
    dequantize,
    dequantize,
    lambda a: ((a.gate_up.scale.dtype == BFLOAT16, "bfloat16 scales"),),
)
op = define(FORMAT, CASES, TOL)


def check(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> None:
    """Asserts what INT4 with bfloat16 scales and with compact scales have in common."""
    (T, D), (E, both, words) = x.shape, gate_up.weight.shape
    assert D == 8 * words and D % GROUP == 0 and both % (2 * GROUP) == 0, f"{x.shape=} {gate_up.kind=}"
    assert gate_up.scale is not None and gate_up.scale.shape == (E, both, D // GROUP), f"{gate_up.kind=}"
    assert down.weight.shape == (E, D, both // 16), f"{gate_up.kind=} {down.kind=}"
    assert down.scale is not None and down.scale.shape == (E, D, both // (2 * GROUP)), f"{down.kind=}"
    assert gate_up.weight.dtype == down.weight.dtype == torch.int32, f"{gate_up.kind=} {down.kind=}"
    assert gate_up.scale.dtype == down.scale.dtype, f"{gate_up.kind=} {down.kind=}"
    chosen.check(T)


def experts_int4(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
    check(x, chosen, gate_up, down)
    assert gate_up.row_scale is None and down.row_scale is None, f"compact scales: {gate_up.kind=} {down.kind=}"
    return op(x, chosen, gate_up, down)
