"""residual += x, then y = rmsnorm(residual).

residual [T, D] is updated in place and rounded to its type before the norm; x [T, D] of the same type, or float32
[T, P, D]: the sum of its P parts (in order, fp32) is added; w [D]; y [T, D] as residual. Squares are summed in fp32,
y is rounded once. "cpp" is in rmsnorm.cpp. "cuda" uses a cluster of CTAs per row, "cuda_many" (rmsnorm.cu) a CTA for
one or several rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.pointwise.rmsnorm import reference as norm_reference


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    parts: int = 0  # 0: x has no parts


CASES = [
    *(Case(t, K2.hidden, big=t > 8) for t in (1, 8, 64, 512, 8192)),
    Case(1, NANO.hidden),
    Case(16, NANO.hidden),
    Case(512, NANO.hidden),
    Case(0, 7168),
    Case(3, 514),
    Case(1, 8),
    Case(1, NANO.hidden, 5),
    Case(3, 520, 2),
    *(Case(t, K2.hidden, 9, big=True) for t in (1, 16, 64)),
    *(Case(t, K2.hidden, 1, big=True) for t in (600, 2048)),
    Case(700, NANO.hidden, 1, big=True),
    *(Case(t, d, big=True) for t, d in ((513, 1536), (777, 3072), (600, 8), (515, 2048))),
    Case(530, 1536, 3, big=True),
]
TOL = {"y": rounded(), "residual": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x = g.randn(c.T, c.parts, c.D, dtype=FLOAT32) if c.parts else g.randn(c.T, c.D)
    return {"residual": g.randn(c.T, c.D), "x": x, "w": g.randn(c.D), "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.add_rmsnorm(c.T, c.D, dtype.itemsize)


def reference(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    whole = x.float() if x.dim() == 2 else x.sum(1)
    residual.copy_((residual.float() + whole).to(residual.dtype))
    return norm_reference(residual, w, eps)


op = Op("add_rmsnorm", CASES, TOL, inputs, cost, reference, decides=("residual", "x"))


_kernel = build.launcher("rmsnorm", "add_rmsnorm", "pppplllf")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "rmsnorm",
        device,
        (a.residual.dtype == FLOAT32, "float32"),
        (a.residual.shape[-1] % 8 == 0, "a width that is a multiple of 8"),
    ),
)
def cpp(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    x = (x if x.dim() == 2 else x[:, 0] if x.shape[1] == 1 else x.sum(1)).contiguous()
    y = torch.empty(x.shape)
    T, D = x.shape
    _kernel()(residual.data_ptr(), x.data_ptr(), w.data_ptr(), y.data_ptr(), T, D, threads.count(), eps)
    return y


MOST_CUDA = 8 * 4096  # max width of "cuda": 8 CTAs, 256 threads of 16 values each
FEW_ROWS = 512  # max rows of "cuda", which uses a cluster of CTAs per row


_cluster = build.launcher("add_rmsnorm.cu", "add_rmsnorm", "ppllpplllfp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "add_rmsnorm.cu",
        device,
        (a.residual.dtype == BFLOAT16, "bfloat16"),
        (0 < a.residual.shape[0] <= FEW_ROWS, f"1 to {FEW_ROWS} rows"),
        (a.residual.shape[1] % 4 == 0 and a.residual.shape[1] <= MOST_CUDA, f"a width in 4s up to {MOST_CUDA}"),
    ),
)
def cuda(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    (T, D), x = residual.shape, x.contiguous()
    y = torch.empty_like(residual)
    failed = _cluster()(
        residual.data_ptr(),
        x.data_ptr(),
        1 if x.dim() == 2 else x.shape[1],
        x.dim() == 3,
        w.data_ptr(),
        y.data_ptr(),
        T,
        D,
        8 if D >= 4096 else 1,
        eps,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {x.shape=}"
    return y


_many = build.launcher("rmsnorm.cu", "add_rmsnorm", "ppllppllfp")


def fits_many(a: Any, device: torch.device) -> bool | str:
    """`when` of an implementation in rmsnorm.cu."""
    T, D = a.residual.shape
    return build.on_hopper(
        "rmsnorm.cu",
        device,
        (a.residual.dtype == BFLOAT16, "bfloat16"),
        (T > FEW_ROWS, f"more than {FEW_ROWS} rows"),
        (D % 8 == 0 and D <= 8192, "a width in 8s up to 8,192"),
    )


@op.impl("cuda_many", when=fits_many)
def cuda_many(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    (T, D), x = residual.shape, x.contiguous()
    y = torch.empty_like(residual)
    wide = x.dim() == 3
    stream = build.stream(residual.device)
    failed = _many()(
        residual.data_ptr(),
        x.data_ptr(),
        x.shape[1] if wide else 1,
        wide,
        w.data_ptr(),
        y.data_ptr(),
        T,
        D,
        eps,
        stream,
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {x.shape=}"
    return y


@op.impl("torch")
def two_calls(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    if x.dim() == 3:
        x = x[:, 0] if x.shape[1] == 1 else x.sum(1)
    residual.copy_(residual + x)
    return torch.nn.functional.rms_norm(residual, (residual.shape[-1],), w, eps)


def check(residual: Tensor, x: Tensor, w: Tensor) -> None:
    T, D = residual.shape
    fits = x.dtype == residual.dtype if x.dim() == 2 else x.dtype == FLOAT32
    assert fits and x.shape[0] == T and x.shape[-1] == D, f"{residual.shape=} {x.shape=} {x.dtype=}"
    assert w.shape[0] == D and residual.dtype == w.dtype and residual.is_contiguous(), f"{w.shape=} {w.dtype=}"


def add_rmsnorm(residual: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    check(residual, x, w)
    return op(residual, x, w, eps)
