"""y = x / sqrt(mean(x^2) + eps) * w.

x [T, D], rows may be strided; w [D]; y [T, D] as x. Squares are summed in fp32, y is rounded once.
"cpp" takes 4 us for one row of 384, a chain of small torch calls 14; "cuda" reads strided rows without a copy.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import aligned


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    strided: bool = False


CASES = [
    *(Case(t, d, big=t > 8) for d in (K2.hidden, K2.latent) for t in (1, 8, 64, 512, 8192)),
    Case(1, NANO.hidden),
    Case(16, NANO.hidden),
    Case(512, NANO.hidden),
    Case(0, 7168),
    Case(3, 514),
    Case(5, 8, strided=True),
    Case(7, NANO.latent, strided=True),
    *(Case(t, K2.q_rank, strided=True, big=True) for t in (1, 300, 1001)),
    Case(9, 4096, strided=True, big=True),
]
TOL = {"y": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x = g.randn(c.T, c.D + 8, scale=3.0)[:, : c.D] if c.strided else g.randn(c.T, c.D, scale=3.0)
    return {"x": x, "w": g.randn(c.D), "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.rmsnorm(c.T, c.D, dtype.itemsize)


def reference(x: Tensor, w: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * (f.square().mean(-1, keepdim=True) + eps).rsqrt() * w.float()).to(x.dtype)


op = Op("rmsnorm", CASES, TOL, inputs, cost, reference)


_kernel = build.launcher("rmsnorm", "rmsnorm", "plpplllf")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "rmsnorm",
        device,
        (a.x.dtype == FLOAT32, "float32"),
        (a.x.shape[-1] % 8 == 0, "a width that is a multiple of 8"),
    ),
)
def cpp(x: Tensor, w: Tensor, eps: float) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape)
    T, D = x.shape
    _kernel()(x.data_ptr(), x.stride(0), w.data_ptr(), y.data_ptr(), T, D, threads.count(), eps)
    return y


_on_gpu = build.launcher("rmsnorm.cu", "rmsnorm", "plppllfp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "rmsnorm.cu",
        device,
        (a.x.dtype == BFLOAT16, "bfloat16"),
        (a.x.shape[1] % 8 == 0 and a.x.shape[1] <= 8192, "a width in 8s up to 8,192"),
    ),
)
def cuda(x: Tensor, w: Tensor, eps: float) -> Tensor:
    x = aligned(x)
    T, D = x.shape
    y = torch.empty(T, D, dtype=x.dtype, device=x.device)
    stream = build.stream(x.device)
    failed = _on_gpu()(x.data_ptr(), x.stride(0), w.data_ptr(), y.data_ptr(), T, D, eps, stream)
    assert not failed, f"CUDA error {failed}: {x.shape=}"
    return y


@op.impl("torch")
def fused(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    assert w.shape[0] == x.shape[1] and w.dtype == x.dtype, f"{x.shape=} {x.dtype=} {w.shape=} {w.dtype=}"
    return op(x, w, eps)
