"""y = x (w * scale)^T with w in e4m3 and a scale for each of its rows; x is normalised first if `norm` is given.

x [T, i], rows may be strided; norm [i] as x, or None; w [o, i] float8_e4m3fn; scale [o] float32; y [T, o] as x, or
float32 if `wide`. Dequantised weights are exact, sums are fp32, the scale is applied to the sum. "cuda" (linear.cu) is
for decode steps of a few rows. It multiplies in fp16: each row of x is first multiplied by the power of two that brings
its largest magnitude to between 2^14 and 2^15, exact for values down to 2^-28 of the largest. "cuda_many"
(skinny_gemm.cu) is for up to 128 rows and multiplies in bf16. "torch" is for prompts: it converts the weights to x's
type first (widen_fp8.py) and scales the product (scale_columns.py), which takes little time beside the product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, K2, Make, Sized, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Matrix
from perilune.ops.linear import rmsnorm_linear, skinny_gemm
from perilune.ops.linear.linear import linear, run_streamed, streamable
from perilune.ops.linear.linear import reference as dense_reference
from perilune.ops.linear.scale_columns import scale_columns
from perilune.ops.linear.widen_fp8 import widen_fp8
from perilune.ops.pointwise.rmsnorm import reference as norm_reference
from perilune.ops.pointwise.rmsnorm import rmsnorm

LARGEST = 448.0  # e4m3's largest number
FEW_ROWS = 4  # max rows of "cuda"
FEW_LONG, LONG = 8, 1 << 15  # max rows of "cuda" if w has LONG rows or more


@dataclass(frozen=True)
class Case(Sized):
    T: int
    i: int
    o: int
    norm: bool = False
    wide: bool = False


CASES = [
    *(
        Case(t, i, o, norm, big=True)
        for i, o, norm in ((K2.hidden, 2112, False), (8192, K2.hidden, False), (K2.q_rank, 12288, True))
        for t in (1, 3, 8, 13, 16, 32, 64, 100, 200)
    ),
    Case(2, K2.hidden, 4096, wide=True, big=True),
    Case(0, 64, 8),
    Case(1, 384, 768),
    Case(5, 192, 768, norm=True),
    Case(16, 512, 384, wide=True),
    Case(3, 40, 17, norm=True),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    w, scale = quantize_rows(g.randn(c.o, c.i, scale=c.i**-0.5))
    norm = g.randn(c.i) if c.norm else None
    return {"x": g.randn(c.T, c.i + 8)[:, : c.i], "norm": norm, "w": w, "scale": scale, "eps": 1e-5, "wide": c.wide}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(2 * c.T * c.i * c.o, c.i * c.o + dtype.itemsize * c.T * (c.i + c.o))


def quantize_rows(w: Tensor, agree: Callable[[Tensor], Tensor] = lambda largest: largest) -> tuple[Tensor, Tensor]:
    """(e4m3 [o, i], scale [o] float32): each row's largest magnitude becomes e4m3's, 448.

    agree  if w is a slice of a matrix's columns: maps the slice's largest magnitudes [o] to those of the whole rows
    """
    largest = agree(w.float().abs().amax(-1))
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return (w.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def quantize_exactly(w: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(e4m3 as w, float32 scale with w's shape but 1 for `dim`). Scales are the smallest powers of two with which no
    value along `dim` exceeds e4m3's largest, so that bfloat16 represents value * scale exactly."""
    largest = w.float().abs().amax(dim, keepdim=True)
    mantissa, exponent = torch.frexp(largest / LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-100, 100)
    scale = (exponent + 127 << 23).view(torch.float32)
    return (w.float() / scale).to(torch.float8_e4m3fn), scale


def reference(x: Tensor, norm: Tensor | None, w: Tensor, scale: Tensor, eps: float, wide: bool) -> Tensor:
    x32 = (x if norm is None else norm_reference(x, norm, eps)).float()
    y = x32 @ (w.float() * scale.unsqueeze(-1)).T
    return y if wide else y.to(x.dtype)


op = Op("linear_fp8", CASES, TOL, inputs, cost, reference, decides=("x", "w"))


def _fits(a: Any, device: torch.device) -> bool | str:
    most = FEW_LONG if a.w.shape[0] >= LONG else FEW_ROWS
    few = (a.x.shape[0] <= most, f"at most {most} rows")
    return build.on_hopper("linear.cu", device, few, *streamable(a.x, a.w))


@op.impl("cuda", when=_fits)
def cuda(x: Tensor, norm: Tensor | None, w: Tensor, scale: Tensor, eps: float, wide: bool) -> Tensor:
    return run_streamed(x, w, wide, scale=scale, norm=norm, eps=eps)


@op.impl("cuda_many", when=lambda a, device: build.on_hopper(skinny_gemm.SOURCE, device, *skinny_gemm.needs(a.x, a.w)))
def cuda_many(x: Tensor, norm: Tensor | None, w: Tensor, scale: Tensor, eps: float, wide: bool) -> Tensor:
    return skinny_gemm.run(x if norm is None else rmsnorm(x, norm, eps), w, scale=scale, wide=wide)


@op.impl("torch")
def dequantised(x: Tensor, norm: Tensor | None, w: Tensor, scale: Tensor, eps: float, wide: bool) -> Tensor:
    if norm is not None:
        x = rmsnorm(x, norm, eps)
    # Multiply the sums by the scales, not the weights: e4m3 values are exact in bfloat16, scaled ones are not.
    y = torch.nn.functional.linear(x, widen_fp8(w, x.dtype))
    return scale_columns(y.float() if wide else y, scale)


def linear_fp8(
    x: Tensor, norm: Tensor | None, w: Tensor, scale: Tensor, eps: float = 0.0, wide: bool = False
) -> Tensor:
    assert x.shape[1] == w.shape[1] and w.dtype == torch.float8_e4m3fn, f"{x.shape=} {w.shape=} {w.dtype=}"
    assert scale.shape == (w.shape[0],) and scale.dtype == FLOAT32, f"{scale.shape=} {scale.dtype=}"
    assert norm is None or (norm.shape[0] == x.shape[1] and norm.dtype == x.dtype), f"{x.dtype=}"
    return op(x, norm, w, scale, eps, wide)


def matmul(x: Tensor, w: Matrix, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x w^T; w is dense or FP8; x is normalised first if `norm` is given."""
    if w.scale is not None:
        return linear_fp8(x, norm, w.weight, w.scale, eps)
    return linear(x, w.weight) if norm is None else rmsnorm_linear.rmsnorm_linear(x, norm, w.weight, eps)


def matmul_reference(x: Tensor, w: Matrix, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    if w.scale is not None:
        return reference(x, norm, w.weight, w.scale, eps, False)
    return dense_reference(x, w.weight, False) if norm is None else rmsnorm_linear.reference(x, norm, w.weight, eps)
