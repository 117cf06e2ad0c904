"""residual += the weighted sum of each token's experts (ExpertRows), then y = rmsnorm(residual).

residual [T, D] is updated in place and rounded to its type before the norm; rows as there, with rows.rows [R, D] of the
same type; w [D]; y [T, D] as residual. Sums and squares are fp32. "cuda" gives the bits of moe_int4's own sum followed
by add_rmsnorm, without 8 bytes a value that go to memory and come back.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import address
from perilune.ops.layouts.operands import ExpertRows
from perilune.ops.pointwise.add_rmsnorm import reference as add_reference

MAX_CHOICES = 32
MAX_WIDTH = 8192


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    k: int
    shared: bool = True
    absent: bool = False  # some choices have no row


CASES = [
    *(Case(t, K2.hidden, K2.top_k, big=True) for t in (129, 1000)),
    Case(300, K2.hidden, 1, shared=False, big=True),
    Case(100, 2056, 3, big=True),
    Case(20, NANO.hidden, NANO.top_k, absent=True),
    Case(7, 64, 2, shared=False),
    Case(0, 64, 2),
]
TOL = {"y": rounded(), "residual": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    position = g.permutation(c.T * c.k).to(torch.int32).view(c.T, c.k)
    if c.absent:
        position[::3, 1:] = -1
    rows = ExpertRows(g.randn(c.T * c.k + 9, c.D), position, g.rand(c.T, c.k), g.randn(c.T, c.D) if c.shared else None)
    return {"residual": g.randn(c.T, c.D), "rows": rows, "w": g.randn(c.D), "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.add_rmsnorm(c.T, c.D, dtype.itemsize) + costs.Cost(
        2 * c.T * c.k * c.D, dtype.itemsize * c.T * c.k * c.D
    )


def reference(residual: Tensor, rows: ExpertRows, w: Tensor, eps: float) -> Tensor:
    chosen = rows.rows[rows.position.clamp(min=0).long()].float()
    total = (chosen * (rows.weights * (rows.position >= 0)).unsqueeze(-1)).sum(1)
    if rows.shared is not None:
        total = total + rows.shared.float()
    return add_reference(residual, total.unsqueeze(1), w, eps)


op = Op("combine_add_rmsnorm", CASES, TOL, inputs, cost, reference, decides=("residual", "rows"))


@functools.cache
def _kernel() -> Any:
    return build.function("combine_add_rmsnorm.cu", "combine_add_rmsnorm", "p" * 7 + "lllfp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "combine_add_rmsnorm.cu",
        device,
        (a.residual.dtype == BFLOAT16, "bfloat16"),
        (a.rows.weights.shape[1] <= MAX_CHOICES, f"at most {MAX_CHOICES} experts of a token"),
        (a.residual.shape[1] % 8 == 0 and a.residual.shape[1] <= MAX_WIDTH, f"a width in 8s up to {MAX_WIDTH}"),
    ),
)
def cuda(residual: Tensor, rows: ExpertRows, w: Tensor, eps: float) -> Tensor:
    (T, D), k = residual.shape, rows.weights.shape[1]
    y = torch.empty_like(residual)
    failed = _kernel()(
        residual.data_ptr(),
        rows.rows.data_ptr(),
        rows.position.data_ptr(),
        rows.weights.data_ptr(),
        address(rows.shared),
        w.data_ptr(),
        y.data_ptr(),
        T,
        k,
        D,
        eps,
        torch.cuda.current_stream(residual.device).cuda_stream,
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {rows.kind=}"
    return y


def combine_add_rmsnorm(residual: Tensor, rows: ExpertRows, w: Tensor, eps: float) -> Tensor:
    (T, D), held = residual.shape, (rows.rows, rows.position, rows.weights, rows.shared, residual, w)
    assert rows.rows.shape[1] == D and rows.rows.dtype == residual.dtype == w.dtype, f"{residual.shape=} {rows.kind=}"
    assert rows.position.shape == rows.weights.shape and rows.position.shape[0] == T, f"{rows.position.shape=} {T=}"
    assert rows.position.dtype == torch.int32 and rows.weights.dtype == FLOAT32, f"{rows.weights.dtype=}"
    assert rows.shared is None or (rows.shared.shape == residual.shape and rows.shared.dtype == residual.dtype)
    assert all(t is None or t.is_contiguous() for t in held), f"{rows.kind=}: not contiguous"
    return op(residual, rows, w, eps)
