"""y *= scale: every column of y by its own number, in place.

y [T, o] bfloat16 or float32, contiguous; scale [o] float32. Each product is taken in fp32 and rounded once to y's type,
so all implementations give the same bits. `linear_fp8` calls it with products of many rows and the weights' scales.
"cuda" moves 16 bytes at a time; "torch" is one elementwise kernel of torch, which converts value by value.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op

SOURCE = "scale_columns.cu"


@dataclass(frozen=True)
class Case(Sized):
    T: int
    o: int


CASES = [
    *(Case(t, o, big=True) for o in (2112, 6144, K2.hidden, K2.width) for t in (1000, 4000, 10_000)),
    *(Case(t, 2112, big=True) for t in (17, 129)),
    Case(5, NANO.hidden),
    Case(33, 264),
    Case(8, 8),
    Case(1, 1032),
    Case(7, 20),
    Case(3, 17),
    Case(0, 64),
]
TOL = {"y": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    return {"y": g.randn(c.T, c.o, scale=300.0), "scale": (g.rand(c.o) + 0.5) * 1e-3}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(c.T * c.o, 2 * c.T * c.o * dtype.itemsize + 4 * c.o)


def reference(y: Tensor, scale: Tensor) -> None:
    y.copy_((y.float() * scale).to(y.dtype))


op = Op("scale_columns", CASES, TOL, inputs, cost, reference)


_kernel = build.launcher(SOURCE, "scale_columns", "pplllp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        SOURCE, device, (a.y.shape[1] * a.y.itemsize % 16 == 0, "rows of a multiple of 16 bytes")
    ),
)
def cuda(y: Tensor, scale: Tensor) -> None:
    assert y.data_ptr() % 16 == 0 and scale.data_ptr() % 16 == 0, f"{y.shape=} {scale.shape=}"
    stream = build.stream(y.device)
    failed = _kernel()(y.data_ptr(), scale.data_ptr(), *y.shape, y.dtype == FLOAT32, stream)
    assert not failed, f"CUDA error {failed}: {y.shape=}"


@op.impl("torch")
def one_pass(y: Tensor, scale: Tensor) -> None:
    y.mul_(scale)


def scale_columns(y: Tensor, scale: Tensor) -> Tensor:
    """Scales y in place and returns it."""
    assert y.dim() == 2 and scale.shape == (y.shape[1],) and scale.dtype == FLOAT32, f"{y.shape=} {scale.shape=}"
    assert y.is_contiguous() and scale.is_contiguous(), f"{y.stride()=} {scale.stride()=}"
    op(y, scale)
    return y
