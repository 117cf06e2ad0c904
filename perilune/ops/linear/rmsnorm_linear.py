"""y = rmsnorm(x) w^T: a linear layer that normalises its input itself.

x [T, i], rows may be strided; norm [i]; w [o, i]; y [T, o] as x. The normalised x is rounded to x's type, as the
two ops would; sums in fp32, rounded once. "cuda" (linear.cu) saves a launch and its latency, "cpp" a call
from Python, for few rows of float32; "composed" is the two ops.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import FEW_ROWS_ON_CPU
from perilune.ops.linear.linear import linear, run_streamed, streamable
from perilune.ops.pointwise.rmsnorm import reference as norm_reference
from perilune.ops.pointwise.rmsnorm import rmsnorm


@dataclass(frozen=True)
class Case(Sized):
    T: int
    i: int
    o: int


CASES = [
    *(Case(t, K2.q_rank, K2.heads * (K2.nope + K2.rope), big=True) for t in (1, 3, 8, 16, 64)),
    *(Case(t, NANO.q_rank, NANO.heads * (NANO.nope + NANO.rope)) for t in (1, 5, 16)),
    Case(0, 64, 8),
    Case(3, 40, 17),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    return {
        "x": g.randn(c.T, c.i + 8, scale=3.0)[:, : c.i],
        "norm": g.randn(c.i),
        "w": g.randn(c.o, c.i, scale=c.i**-0.5),
        "eps": 1e-5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.linear(c.T, c.i, c.o, dtype.itemsize)


def reference(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    return (norm_reference(x, norm, eps).float() @ w.float().T).to(x.dtype)


op = Op("rmsnorm_linear", CASES, TOL, inputs, cost, reference, decides=("x", "w"))


@op.impl("cuda", when=lambda a, device: build.on_hopper("linear.cu", device, *streamable(a.x, a.w)))
def cuda(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    return run_streamed(x, w, False, norm=norm, eps=eps)


_kernel = build.launcher("linear", "rmsnorm_linear", "plpppllllf")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "linear",
        device,
        (a.x.dtype == FLOAT32 and a.x.shape[0] <= FEW_ROWS_ON_CPU, f"at most {FEW_ROWS_ON_CPU} rows of float32"),
        (a.x.shape[1] % 8 == 0, "an input width that is a multiple of 8"),
    ),
)
def cpp(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    w = w.contiguous()
    (T, i), o = x.shape, w.shape[0]
    y = torch.empty(T, o)
    _kernel()(x.data_ptr(), x.stride(0), norm.data_ptr(), w.data_ptr(), y.data_ptr(), T, i, o, threads.count(), eps)
    return y


@op.impl("composed")
def composed(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    return linear(rmsnorm(x, norm, eps), w)


def rmsnorm_linear(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    assert x.shape[1] == w.shape[1] == norm.shape[0], f"{x.shape=} {norm.shape=} {w.shape=}"
    assert x.dtype == norm.dtype == w.dtype, f"{x.dtype=} {norm.dtype=} {w.dtype=}"
    return op(x, norm, w, eps)
