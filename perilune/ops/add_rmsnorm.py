"""residual += x, then y = rmsnorm(residual).

residual [T, D] is updated in place and rounded to its type before the norm; x [T, D]; w [D]; y [T, D] as x.
Squares are summed in fp32, y is rounded once. The C++ is in rmsnorm.cpp.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops import compile
from perilune.ops.case import FLOAT32, K2, NANO, Make, Sized, rounded
from perilune.ops.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int


CASES = [
    *(Case(t, K2.hidden, big=t > 8) for t in (1, 8, 64, 512, 8192)),
    Case(1, NANO.hidden),
    Case(16, NANO.hidden),
    Case(512, NANO.hidden),
    Case(0, 7168),
    Case(3, 514),
    Case(1, 8),
]
TOL = {"y": rounded(), "residual": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    return {"residual": g.randn(c.T, c.D), "x": g.randn(c.T, c.D), "w": g.randn(c.D), "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.add_rmsnorm(c.T, c.D, dtype.itemsize)


def reference(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    residual.copy_((residual.float() + x.float()).to(residual.dtype))
    f = residual.float()
    return (f * (f.square().mean(-1, keepdim=True) + eps).rsqrt() * w.float()).to(x.dtype)


op = Op("add_rmsnorm", CASES, TOL, inputs, cost, reference)


@functools.cache
def _kernel() -> Any:
    return compile.function("rmsnorm", "add_rmsnorm", "pppplllf")


@op.impl(
    "cpp",
    when=lambda a, device: compile.on_cpu(
        "rmsnorm",
        device,
        (a.residual.dtype == FLOAT32, "float32"),
        (a.residual.shape[-1] % 8 == 0, "a width that is a multiple of 8"),
    ),
)
def cpp(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty(x.shape)
    T, D = x.shape
    threads = torch.get_num_threads()
    _kernel()(residual.data_ptr(), x.data_ptr(), w.data_ptr(), y.data_ptr(), T, D, threads, eps)
    return y


@op.impl("torch")
def two_calls(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    residual += x
    return torch.nn.functional.rms_norm(residual, (x.shape[-1],), w, eps)


def add_rmsnorm(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    assert residual.shape == x.shape and residual.is_contiguous(), f"{residual.shape=} {x.shape=} {residual.stride()=}"
    assert w.shape[0] == x.shape[1] and residual.dtype == x.dtype == w.dtype, f"{w.shape=} {x.dtype=} {w.dtype=}"
    return op(residual, x, w, eps)
