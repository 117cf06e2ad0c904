"""experts.py's sum with the experts in NVFP4: e2m1 values, an e4m3 scale for every 16, an fp32 scale for each matrix.

gate_up: packed [E, 2 I, D / 2] uint8, the gate's rows first, element 2b of a row in the low nibble of byte b; scale
[E, 2 I, D / 16] float8_e4m3fn; row_scale [E, 2] float32, one for the gate and one for up; down: packed [E, D, I / 2],
scale [E, D, I / 16], row_scale [E]. D and I are multiples of 16, scales are not nan. W = e2m1 * s with
s = scale * row_scale, in fp32, each operation rounded. Activations stay as they are (W4A16).
"""

import torch
from torch import Tensor

from perilune.ops.harness import workspace
from perilune.ops.harness.case import FLOAT32, Make, dequantized
from perilune.ops.layouts.operands import Matrix
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.experts import Case, Format, define, quantized_cases

GROUP = 16
BITS = 4 + 8 / GROUP
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 of a code is the sign

CASES = quantized_cases(Case(1, 1, 1, 16, 16), Case(9, 3, 5, 48, 16), Case(7, 2, 4, 80, 176))
TOL = {"y": dequantized()}
_VALUES = torch.tensor((*E2M1, *(-v for v in E2M1)))


def _matrices(c: Case, g: Make) -> tuple[Matrix, Matrix]:
    gate_up, down = g.nvfp4(c.E, 2 * c.I, c.D), g.nvfp4(c.E, c.D, c.I)
    factors = (g.rand(c.E, 2) + 0.5) * (c.D**-0.5 / 360), (g.rand(c.E) + 0.5) * (c.I**-0.5 / 360)
    return Matrix(*gate_up, factors[0]), Matrix(*down, factors[1])


def _values(device: torch.device) -> Tensor:
    """[16] float32, the value of each code. Cached: a CUDA graph must not contain the copy from the host."""
    if device.type == "cpu":
        return _VALUES
    return workspace.current(device).kept("experts_nvfp4.values", lambda: _VALUES.to(device))


def dequantize(w: Matrix, dtype: torch.dtype) -> Tensor:
    """[..., o, i] from packed [..., o, i / 2], scale [..., o, i / 16] and row_scale [...], one per matrix."""
    assert w.scale is not None and w.row_scale is not None
    codes = torch.stack((w.weight & 15, w.weight >> 4), dim=-1).flatten(-2)
    step = w.scale.float() * w.row_scale[..., None, None]
    values = _values(codes.device)[codes.int()].view(*step.shape, GROUP)
    return (values * step.unsqueeze(-1)).flatten(-2).to(dtype)


def _gate_up(w: Matrix, dtype: torch.dtype) -> Tensor:
    """Gate and up have a row_scale each."""
    assert w.scale is not None
    halves = [t.view(*t.shape[:-2], 2, t.shape[-2] // 2, t.shape[-1]) for t in (w.weight, w.scale)]
    return dequantize(Matrix(halves[0], halves[1], w.row_scale), dtype).flatten(-3, -2)


op = define(Format("experts_nvfp4", BITS, _matrices, _gate_up, dequantize), CASES, TOL)


def experts_nvfp4(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
    (T, D), (E, both, half) = x.shape, gate_up.weight.shape
    assert D == 2 * half and D % GROUP == 0 and both % (2 * GROUP) == 0, f"{x.shape=} {gate_up.kind=}"
    assert gate_up.scale is not None and gate_up.scale.shape == (E, both, D // GROUP), f"{gate_up.kind=}"
    assert down.weight.shape == (E, D, both // 4), f"{gate_up.kind=} {down.kind=}"
    assert down.scale is not None and down.scale.shape == (E, D, both // (2 * GROUP)), f"{down.kind=}"
    assert gate_up.row_scale is not None and gate_up.row_scale.shape == (E, 2), f"{gate_up.kind=}"
    assert down.row_scale is not None and down.row_scale.shape == (E,), f"{down.kind=}"
    assert gate_up.weight.dtype == down.weight.dtype == torch.uint8, f"{gate_up.kind=} {down.kind=}"
    assert gate_up.scale.dtype == down.scale.dtype == torch.float8_e4m3fn, f"{gate_up.kind=} {down.kind=}"
    assert gate_up.row_scale.dtype == down.row_scale.dtype == FLOAT32, f"{gate_up.kind=} {down.kind=}"
    chosen.check(T)
    return op(x, chosen, gate_up, down)
