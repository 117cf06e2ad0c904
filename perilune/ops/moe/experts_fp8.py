"""experts.py's sum with the experts in FP8, one scale for every block of 128 x 128 weights.

gate_up: [E, 2 I, D] float8_e4m3fn without nan, the gate's rows first, with scale [E, 2, ceil(I / 128), ceil(D / 128)]
float32, the gate's blocks first: no block has rows of both gate and up; down: [E, D, I] with scale
[E, ceil(D / 128), ceil(I / 128)]. W = e4m3 * scale in fp32. Activations stay as they are: no FP8 arithmetic.
"""

import math

import torch
from torch import Tensor

from perilune.ops.harness.case import FLOAT32, Make, dequantized
from perilune.ops.layouts.operands import Matrix
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.experts import Case, Format, define, in_eights, quantized_cases

BLOCK = 128
BITS = 8 + 32 / BLOCK**2

CASES = quantized_cases(
    Case(1, 1, 1, 8, 8), Case(9, 3, 5, 136, 72), Case(7, 2, 4, 264, 200), Case(5, 2, 3, 36, 20)  # no multiple of 8
)  # fmt: skip
TOL = {"y": dequantized()}


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def _matrices(c: Case, g: Make) -> tuple[Matrix, Matrix]:
    def scale(*shape: int, width: int) -> Tensor:
        return (g.rand(*shape) + 0.5) * (0.009 / math.sqrt(width))

    gate_up = Matrix(g.e4m3(c.E, 2 * c.I, c.D, scale=100), scale(c.E, 2, blocks(c.I), blocks(c.D), width=c.D))
    return gate_up, Matrix(g.e4m3(c.E, c.D, c.I, scale=100), scale(c.E, blocks(c.D), blocks(c.I), width=c.I))


def dequantize(w: Matrix, dtype: torch.dtype) -> Tensor:
    """[..., o, i] of weight [..., o, i] and scale [..., ceil(o / 128), ceil(i / 128)]."""
    assert w.scale is not None
    o, i = w.weight.shape[-2:]
    spread = w.scale.repeat_interleave(BLOCK, -2)[..., :o, :].repeat_interleave(BLOCK, -1)[..., :i]
    return (w.weight.float() * spread).to(dtype)


def _gate_up(w: Matrix, dtype: torch.dtype) -> Tensor:
    """Dequantises gate and up separately: no block spans both."""
    o, i = w.weight.shape[-2:]
    halves = w.weight.view(*w.weight.shape[:-2], 2, o // 2, i)
    return dequantize(Matrix(halves, w.scale), dtype).flatten(-3, -2)


op = define(Format("experts_fp8", BITS, _matrices, _gate_up, dequantize, in_eights, gathers=False), CASES, TOL)


def experts_fp8(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
    (T, D), (E, both, _) = x.shape, gate_up.weight.shape
    I = both // 2  # noqa: E741
    assert gate_up.weight.shape == (E, 2 * I, D) and down.weight.shape == (E, D, I), (
        f"{x.shape=} {gate_up.kind=} {down.kind=}"
    )
    assert gate_up.scale is not None and gate_up.scale.shape == (E, 2, blocks(I), blocks(D)), f"{gate_up.kind=}"
    assert down.scale is not None and down.scale.shape == (E, blocks(D), blocks(I)), f"{down.kind=}"
    assert gate_up.weight.dtype == down.weight.dtype == torch.float8_e4m3fn, f"{gate_up.kind=} {down.kind=}"
    assert gate_up.scale.dtype == down.scale.dtype == FLOAT32, f"{gate_up.kind=} {down.kind=}"
    chosen.check(T)
    return op(x, chosen, gate_up, down)
