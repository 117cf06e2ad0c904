"""residual += x, then its norm in e4m3, as linear_w8a8.py reads it: add_rmsnorm.py and quantize_tokens.py in one.

residual [T, D] is updated in place; x [T, D] of the same type, or float32 [T, P, D], P parts; w [D]; values [T, D]
float8_e4m3fn and scale [ceil(D / 128), T rounded up to whole tiles] float32 as quantize_tokens gives them, of the norm
rounded to the residual's type. "cuda" keeps the norm in registers: that saves 4 of 13 bytes per value if x is float32.
"composed" calls both ops; "cuda" gives the same bits.
"""

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, K2, NANO, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.linear import quantize_tokens as to_e4m3
from perilune.ops.linear.quantize_tokens import GROUP, quantize_tokens
from perilune.ops.pointwise import add_rmsnorm as plain
from perilune.ops.pointwise.add_rmsnorm import Case, add_rmsnorm

CASES = [
    *(Case(t, K2.hidden, 1, big=True) for t in (129, 1000, 4000, 10_000)),
    *(Case(t, K2.hidden, big=True) for t in (513, 1000)),
    *(Case(t, d, 3, big=True) for t, d in ((600, 1536), (777, 3072), (513, 8192))),
    Case(515, 2056, 2, big=True),
    Case(513, NANO.hidden, 1),
    Case(600, 136),
    Case(513, 8, 2),
    Case(5, NANO.hidden, 5),
    Case(3, 514),
    Case(0, NANO.hidden),
]
TOL = {"values": to_e4m3.TOL["values"], "scale": to_e4m3.TOL["scale"], "residual": rounded()}
inputs = plain.inputs


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    added = c.parts * FLOAT32.itemsize if c.parts else dtype.itemsize
    return costs.Cost(9 * c.T * c.D, c.T * c.D * (2 * dtype.itemsize + added + 1 + 4 / GROUP))


def reference(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return to_e4m3.reference(plain.reference(residual, x, w, eps), None, 0.0, False)


op = Op("add_rmsnorm_quantize", CASES, TOL, inputs, cost, reference, decides=("residual", "x"))


_kernel = build.launcher("rmsnorm.cu", "add_rmsnorm_quantize", "ppllppplllfp")


# With fewer rows add_rmsnorm adds squares in another order, so the bits would not be those of "composed".
@op.impl("cuda", when=plain.fits_many)
def cuda(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (T, D), x = residual.shape, x.contiguous()
    values, scale = to_e4m3.empty(T, D, residual.device)
    wide = x.dim() == 3
    failed = _kernel()(
        residual.data_ptr(),
        x.data_ptr(),
        x.shape[1] if wide else 1,
        wide,
        w.data_ptr(),
        values.data_ptr(),
        scale.data_ptr(),
        scale.shape[1],
        T,
        D,
        eps,
        build.stream(residual.device),
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {x.shape=}"
    return values, scale


@op.impl("composed")
def composed(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return quantize_tokens(add_rmsnorm(residual, x, w, eps))


def add_rmsnorm_quantize(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    plain.check(residual, x, w)
    return op(residual, x, w, eps)
