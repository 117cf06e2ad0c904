"""y = x W^T, W in the checkpoint's INT4 (int4.py).

x [T, i]; packed [o, i / 8] int32; scale [o, i / 32]; y [T, o] as x. i is a multiple of 32. Sums in fp32, y rounded
once. "cpp" (linear.cpp) reads the packed weights as they are, multiplies exact dequantised values, and its sums do not
depend on the number of rows; "torch" dequantises everything each call (in bfloat16 that rounds each weight).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.int4 import GROUP, dequantize


@dataclass(frozen=True)
class Case(Sized):
    T: int
    i: int
    o: int


CASES = [
    *(Case(t, K2.hidden, 2 * K2.width, big=True) for t in (1, 8, 64, 512)),
    *(Case(t, NANO.hidden, 2 * NANO.width) for t in (1, 4, 16, 512)),
    Case(0, 64, 8),
    Case(1, 32, 1),
    Case(7, 96, 19),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    packed, scale = g.int4(c.o, c.i)
    return {"x": g.randn(c.T, c.i), "packed": packed, "scale": scale}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.linear_int4(c.T, c.i, c.o, dtype.itemsize)


def reference(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return (x.float() @ dequantize(packed, scale, FLOAT32).T).to(x.dtype)


op = Op("linear_int4", CASES, TOL, inputs, cost, reference, decides=("x", "scale"))


_kernel = build.launcher("linear", "linear_int4", "plpppllll")


@op.impl("cpp", when=lambda a, device: build.on_cpu("linear", device, (a.scale.dtype == BFLOAT16, "bfloat16 scales")))
def cpp(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    f, packed, scale = x.float(), packed.contiguous(), scale.contiguous()
    if f.stride(1) != 1:
        f = f.contiguous()
    (T, i), o = x.shape, packed.shape[0]
    y = torch.empty(T, o)
    _kernel()(f.data_ptr(), f.stride(0), packed.data_ptr(), scale.data_ptr(), y.data_ptr(), T, i, o, threads.count())
    return y if x.dtype == FLOAT32 else y.to(x.dtype)


@op.impl("torch")
def dequantized(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, dequantize(packed, scale, x.dtype))


def linear_int4(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    i = x.shape[1]
    assert i % GROUP == 0 and packed.shape[1] * 8 == i and packed.dtype == torch.int32, f"{x.shape=} {packed.shape=}"
    assert scale.shape == (packed.shape[0], i // GROUP), f"{x.shape=} {packed.shape=} {scale.shape=}"
    return op(x, packed, scale)
