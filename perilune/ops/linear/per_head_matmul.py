"""y[t, h] = x[t, h] w[h]: one small matrix per head; absorbs W_UK into the queries and applies W_UV.

x [T, H, a], strided in T and H if need be; w [H, a, b]; y [T, H, b] as x. Sums in fp32, rounded once.
"cpp" is no slower than torch on CPU for few tokens, and there a token's result does not depend on the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, sums
from perilune.ops.harness.registry import Op

FEW_TOKENS = 16


@dataclass(frozen=True)
class Case(Sized):
    T: int
    H: int
    a: int
    b: int
    strided: bool = False


CASES = [
    *(Case(t, K2.heads, a, b, big=True) for t in (1, 8, 64, 512) for a, b in ((128, 512), (512, 128))),
    *(Case(t, NANO.heads, NANO.nope, NANO.latent, strided=True) for t in (1, 4, 16, 64)),
    *(Case(t, NANO.heads, NANO.latent, NANO.value) for t in (1, 4, 16, 64)),
    Case(0, 4, 8, 8),
    Case(5, 3, 8, 40, strided=True),
    Case(2, 1, 3, 5),
    Case(7, 2, 16, 72),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x = g.randn(c.T, c.H, c.a + 4)[..., : c.a] if c.strided else g.randn(c.T, c.H, c.a)
    return {"x": x, "w": g.randn(c.H, c.a, c.b, scale=c.a**-0.5)}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.per_head_matmul(c.T, c.H, c.a, c.b, dtype.itemsize)


def reference(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("tha,hab->thb", x.float(), w.float()).to(x.dtype)


op = Op("per_head_matmul", CASES, TOL, inputs, cost, reference, decides=("x", "w"))


_kernel = build.launcher_by_type("per_head_matmul", "head_matmul", "pllpplllll")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "per_head_matmul",
        device,
        (a.x.dtype != FLOAT32 or a.x.shape[0] <= FEW_TOKENS, f"at most {FEW_TOKENS} tokens of float32"),
        (a.w.shape[2] % 8 == 0, "an output width that is a multiple of 8"),
    ),
)
def cpp(x: Tensor, w: Tensor) -> Tensor:
    f, w = x.float(), w.contiguous()
    if f.stride(2) != 1:
        f = f.contiguous()
    (T, H, a), (by_token, by_head, _), b = f.shape, f.stride(), w.shape[2]
    y = torch.empty(T, H, b)
    _kernel(w.dtype)(f.data_ptr(), by_token, by_head, w.data_ptr(), y.data_ptr(), T, H, a, b, threads.count())
    return y if x.dtype == FLOAT32 else y.to(x.dtype)


@op.impl("torch")
def batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def per_head_matmul(x: Tensor, w: Tensor) -> Tensor:
    (_, H, a), (heads, rows, _) = x.shape, w.shape
    assert H == heads and a == rows and x.dtype == w.dtype, f"{x.shape=} {x.dtype=} {w.shape=} {w.dtype=}"
    return op(x, w)
