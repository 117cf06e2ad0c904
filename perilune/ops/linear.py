"""y = x w^T.  x [T, i], rows may be strided; w [o, i]; y [T, o] as x. Sums in fp32, rounded once.

"cpp" wins on CPU below about 16 rows (one row of 384 against 4096 outputs: 68 us, torch 147, two cores), and for
bfloat16, which torch multiplies slowly on processors without bfloat16 instructions, at any size. Its sums do not
depend on the number of rows.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops import compile
from perilune.ops.case import FLOAT32, K2, NANO, Make, Sized, sums
from perilune.ops.registry import Op

FEW_ROWS = 16


@dataclass(frozen=True)
class Case(Sized):
    T: int
    i: int
    o: int
    strided: bool = False


CASES = [
    *(
        Case(t, i, o, big=True)
        for i, o in ((K2.hidden, K2.q_rank + K2.latent + K2.rope), (K2.heads * K2.value, K2.hidden), (K2.hidden, 4096))
        for t in (1, 8, 64, 512)
    ),
    *(Case(t, NANO.hidden, NANO.q_rank + NANO.latent + NANO.rope) for t in (1, 4, 16, 512)),
    Case(1, NANO.hidden, NANO.vocab),
    Case(16, NANO.hidden, NANO.vocab),
    Case(0, 64, 8),
    Case(3, 40, 17),
    Case(5, 24, 1, strided=True),
    Case(4, 7, 5),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x = g.randn(c.T, c.i + 8)[:, : c.i] if c.strided else g.randn(c.T, c.i)
    return {"x": x, "w": g.randn(c.o, c.i, scale=c.i**-0.5)}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.linear(c.T, c.i, c.o, dtype.itemsize)


def reference(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() @ w.float().T).to(x.dtype)


op = Op("linear", CASES, TOL, inputs, cost, reference, decides=(0, 1))


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    return compile.function("linear", "linear_f32" if dtype == FLOAT32 else "linear_bf16", "plppllll")


@op.impl(
    "cpp",
    when=lambda a, device: compile.on_cpu(
        "linear",
        device,
        (a.x.dtype != FLOAT32 or a.x.shape[0] <= FEW_ROWS, f"at most {FEW_ROWS} rows of float32"),
        (a.x.shape[1] % 8 == 0, "an input width that is a multiple of 8"),
    ),
)
def cpp(x: Tensor, w: Tensor) -> Tensor:
    f, w = x.float(), w.contiguous()
    if f.stride(1) != 1:
        f = f.contiguous()
    (T, i), o = x.shape, w.shape[0]
    y = torch.empty(T, o)
    _kernel(w.dtype)(f.data_ptr(), f.stride(0), w.data_ptr(), y.data_ptr(), T, i, o, torch.get_num_threads())
    return y if x.dtype == FLOAT32 else y.to(x.dtype)


@op.impl("torch")
def library(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


def linear(x: Tensor, w: Tensor) -> Tensor:
    assert x.shape[1] == w.shape[1] and x.dtype == w.dtype, f"{x.shape=} {x.dtype=} {w.shape=} {w.dtype=}"
    return op(x, w)
