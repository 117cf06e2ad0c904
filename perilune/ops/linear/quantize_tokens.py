"""Quantises activations to e4m3, with a scale for each row and group of 128 columns: the input of linear_w8a8.py.

x [T, i], rows may be strided; it is normalised first if `norm` [i] as x is given (rmsnorm.py). If `gated`, x is
[T, 2 i], and silu(gate) * up of its halves is quantised (swiglu.py); `gated` and `norm` exclude each other.
values [T, i] float8_e4m3fn; scale [ceil(i / 128), rows] float32; rows: T rounded up to a multiple of `ROWS`; those past
T are 0. Normalised or gated values are rounded to x's type first. A group's scale maps its largest magnitude to 448; a
group of zeros has scale 1. The error of a value is at most 2^-4 of it, or 2^-10 / 448 of its group's largest.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import address, aligned
from perilune.ops.pointwise.rmsnorm import reference as norm_reference
from perilune.ops.pointwise.swiglu import reference as gate_reference

GROUP = 128  # columns that share a scale
ROWS = 256  # rows of a tile: scales are stored for whole tiles
LARGEST, LEAST = 448.0, 1e-30  # e4m3's largest number; lower bound of a group's largest magnitude, unless that is 0
MOST_NORMED = 8192  # max columns of a row with a norm


@dataclass(frozen=True)
class Case(Sized):
    T: int
    i: int
    norm: bool = False
    gated: bool = False


CASES = [
    *(
        Case(t, i, norm, gated, big=True)
        for t in (129, 1000)
        for i, norm, gated in (
            (K2.hidden, False, False),
            (K2.heads * K2.value, False, False),
            (K2.q_rank, True, False),
            (K2.width, False, True),
            (18432, False, True),
        )
    ),
    Case(5, NANO.hidden),
    Case(3, NANO.q_rank, norm=True),
    Case(4, NANO.width, gated=True),
    Case(2, 8, gated=True),
    Case(0, 256),
]
_STEP = Tol(2**-9, 0.126, 2e-2, "a step of e4m3, where a last bit decides what is nearest")
TOL = {
    "values": {FLOAT32: _STEP, BFLOAT16: _STEP},
    "scale": {FLOAT32: rounded()[FLOAT32], BFLOAT16: rounded()[BFLOAT16]},
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    width = 2 * c.i if c.gated else c.i
    return {
        "x": g.randn(c.T, width + 8, scale=3.0)[:, :width],
        "norm": g.randn(c.i) if c.norm else None,
        "eps": 1e-5,
        "gated": c.gated,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(4 * c.T * c.i, c.T * c.i * (dtype.itemsize * (2 if c.gated else 1) + 1 + 4 / GROUP))


def reference(x: Tensor, norm: Tensor | None, eps: float, gated: bool) -> tuple[Tensor, Tensor]:
    y = gate_reference(x) if gated else x if norm is None else norm_reference(x, norm, eps)
    (T, i), groups = y.shape, -(-y.shape[1] // GROUP)
    padded = torch.nn.functional.pad(y.float(), (0, groups * GROUP - i)).view(T, groups, GROUP)
    largest = padded.abs().amax(-1)
    largest = torch.where(largest > 0, largest.clamp(min=LEAST), largest)
    zeros = largest == 0
    factor = torch.where(zeros, 1.0, LARGEST / largest)
    values = (padded * factor.unsqueeze(-1)).clamp(-LARGEST, LARGEST).view(T, groups * GROUP)[:, :i]
    scale = torch.zeros(groups, rows(T), device=x.device)
    scale[:, :T] = torch.where(zeros, 1.0, largest / LARGEST).T
    return values.to(torch.float8_e4m3fn), scale


op = Op("quantize_tokens", CASES, TOL, inputs, cost, reference, decides=("x", "norm", "gated"))


def rows(T: int) -> int:
    """Rows of scales for T rows of values."""
    return -(-T // ROWS) * ROWS


def empty(T: int, i: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """values and scale, for a kernel to write."""
    values = torch.empty(T, i, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(-(-i // GROUP), rows(T), dtype=FLOAT32, device=device)


_kernel = build.launcher("quantize_tokens.cu", "quantize_tokens", "plppp" + "l" * 4 + "fp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "quantize_tokens.cu",
        device,
        (a.x.dtype == BFLOAT16, "bfloat16"),
        (a.x.shape[0] > 0, "rows"),
        (a.x.shape[1] % (16 if a.gated else 8) == 0, "a width that is a multiple of 8"),
        (a.norm is None or a.x.shape[1] <= MOST_NORMED, f"at most {MOST_NORMED} columns with a norm"),
    ),
)
def cuda(x: Tensor, norm: Tensor | None, eps: float, gated: bool) -> tuple[Tensor, Tensor]:
    x = aligned(x)
    T, i = x.shape[0], x.shape[1] // (2 if gated else 1)
    values, scale = empty(T, i, x.device)
    stream = build.stream(x.device)
    failed = _kernel()(
        x.data_ptr(),
        x.stride(0),
        address(norm),
        values.data_ptr(),
        scale.data_ptr(),
        T,
        i,
        scale.shape[1],
        gated,
        eps,
        stream,
    )
    assert not failed, f"CUDA error {failed}: {x.shape=}"
    return values, scale


def quantize_tokens(
    x: Tensor, norm: Tensor | None = None, eps: float = 0.0, gated: bool = False
) -> tuple[Tensor, Tensor]:
    assert x.dim() == 2 and not (gated and norm is not None) and not (gated and x.shape[1] % 2), f"{x.shape=} {gated=}"
    assert norm is None or (norm.shape[0] == x.shape[1] and norm.dtype == x.dtype), f"{x.shape=} {x.dtype=}"
    return op(x, norm, eps, gated)
