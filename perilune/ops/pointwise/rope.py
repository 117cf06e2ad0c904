"""Rotary embedding of interleaved pairs (docs/formats.md section 2.2): y[2i] = x[2i] cos_i - x[2i+1] sin_i,
y[2i+1] = x[2i+1] cos_i + x[2i] sin_i.

x [T, H, r], strided in T and H if need be; cos and sin [T, r / 2] float32; y [T, H, r] contiguous, as x.
Computed in fp32, rounded once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, rounded
from perilune.ops.harness.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    T: int
    H: int
    r: int
    strided: bool = False


CASES = [
    *(Case(t, K2.heads, K2.rope, big=t > 64) for t in (1, 8, 64, 512, 8192)),
    Case(512, 1, K2.rope),
    *(Case(t, NANO.heads, NANO.rope, strided=True) for t in (1, 16, 512)),
    Case(0, 4, 64),
    Case(3, 2, 2),
    Case(5, 3, 6, strided=True),
]
TOL = {"y": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x = g.randn(c.T, c.H, c.r + 10)[..., 10:] if c.strided else g.randn(c.T, c.H, c.r)
    angles = g.rand(c.T, c.r // 2) * 6.0
    return {"x": x, "cos": angles.cos(), "sin": angles.sin()}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.rope(c.T, c.H, c.r, dtype.itemsize)


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2).to(x.dtype)


op = Op("rope", CASES, TOL, inputs, cost, reference)


_kernel = build.launcher("rope", "rope", "pllpppllll")


@op.impl("cpp", when=lambda a, device: build.on_cpu("rope", device, (a.x.dtype == FLOAT32, "float32")))
def cpp(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty(x.shape)
    (T, H, r), (by_token, by_head, _) = x.shape, x.stride()
    _kernel()(x.data_ptr(), by_token, by_head, cos.data_ptr(), sin.data_ptr(), y.data_ptr(), T, H, r, threads.count())
    return y


@op.impl("torch")
def complex_product(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin).unsqueeze(1)).flatten(-2).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = (x.shape[0], x.shape[2] // 2)
    assert cos.shape == half and sin.shape == half and x.shape[2] % 2 == 0, f"{x.shape=} {cos.shape=} {sin.shape=}"
    assert cos.dtype == sin.dtype == FLOAT32, f"{cos.dtype=} {sin.dtype=}"
    return op(x, cos, sin)
