"""y = w, e4m3 in a wider type: exact.

w [o, i] float8_e4m3fn, contiguous; y as w, bfloat16 or float32, is written. `linear_fp8` calls it for products of many
rows, which take far longer. "cuda" reads 8 bytes and writes 16 at a time; "torch" is one elementwise kernel of torch,
which converts value by value.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, K2, NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op

SOURCE = "widen_fp8.cu"


@dataclass(frozen=True)
class Case(Sized):
    o: int
    i: int
    every: bool = False  # every number of e4m3, nan too


CASES = [
    *(
        Case(o, i, big=True)
        for o, i in ((2112, K2.hidden), (6144, K2.q_rank), (K2.hidden, 4096), (K2.width, K2.hidden), (K2.hidden, 1024))
    ),
    Case(16, 256, every=True),
    Case(NANO.q_rank + NANO.latent + NANO.rope, NANO.hidden),
    Case(5, 24),
    Case(1, 8),
    Case(3, 17),
    Case(0, 64),
]
TOL = {"y": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    if c.every:
        w = g.tensor(range(256), torch.uint8).repeat(c.o * c.i // 256).view(torch.float8_e4m3fn).view(c.o, c.i)
    else:
        w = g.e4m3(c.o, c.i, scale=20.0)
    return {"w": w, "y": g.nan(c.o, c.i)}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(0, c.o * c.i * (1 + dtype.itemsize))


def reference(w: Tensor, y: Tensor) -> None:
    y.copy_(w.float().to(y.dtype))


op = Op("widen_fp8", CASES, TOL, inputs, cost, reference, decides=("w", "y"))


_kernel = build.launcher(SOURCE, "widen_fp8", "pplp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        SOURCE, device, (a.y.dtype == BFLOAT16, "bfloat16"), (a.w.numel() % 8 == 0, "a multiple of 8 values")
    ),
)
def cuda(w: Tensor, y: Tensor) -> None:
    assert w.data_ptr() % 8 == 0 and y.data_ptr() % 16 == 0, f"{w.shape=}"
    failed = _kernel()(w.data_ptr(), y.data_ptr(), w.numel(), build.stream(w.device))
    assert not failed, f"CUDA error {failed}: {w.shape=}"


@op.impl("torch")
def one_pass(w: Tensor, y: Tensor) -> None:
    y.copy_(w)


def widen_fp8(w: Tensor, dtype: torch.dtype) -> Tensor:
    """w as a new tensor of type `dtype`."""
    assert w.dtype == torch.float8_e4m3fn and w.is_contiguous(), f"{w.shape=} {w.dtype=} {w.stride()=}"
    y = torch.empty(w.shape, dtype=dtype, device=w.device)
    op(w, y)
    return y
