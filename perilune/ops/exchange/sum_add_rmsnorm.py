"""residual += the sum of all ranks' partial outputs, which are all on this device; then y = rmsnorm(residual).

residual [T, D] is updated in place. own [T, D] is this rank's partial output. others [N - 1, T, D] holds those of the
other ranks in their order; its first stride is free. Both have the residual's type. w [D]; y [T, D] is written. As in
exchange_add_rmsnorm.py, parts are added in fp32 in the order of ranks, then the residual, and the sum is rounded. So
all ranks get the same bits, the same as from exchange_add_rmsnorm.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.exchange.peers import MAX_RANKS
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm
from perilune.ops.pointwise.add_rmsnorm import reference as add_reference

SOURCE = "rmsnorm.cu"


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    ranks: int = 2
    rank: int = 0


CASES = [
    *(Case(t, K2.hidden, n, r, big=True) for t, n, r in ((2816, 2, 0), (700, 2, 1), (300, 4, 2), (130, 8, 7))),
    Case(5, NANO.hidden, 2, 1),
    Case(64, NANO.hidden, 4, 2),
    Case(0, NANO.hidden),
    Case(3, 8, 8, 3),
    Case(40, 2048, 2, 1, big=True),
]
TOL = {"residual": rounded(), "y": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    return {
        "residual": g.randn(c.T, c.D),
        "own": g.randn(c.T, c.D),
        "others": g.randn(c.ranks - 1, c.T + 3, c.D)[:, : c.T],
        "rank": c.rank,
        "w": g.randn(c.D),
        "y": g.nan(c.T, c.D),
        "eps": 1e-5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    own = costs.add_rmsnorm(c.T, c.D, dtype.itemsize)
    return own + costs.Cost((c.ranks - 1) * c.T * c.D, (c.ranks - 1) * c.T * c.D * dtype.itemsize)


def reference(residual: Tensor, own: Tensor, others: Tensor, rank: int, w: Tensor, y: Tensor, eps: float) -> None:
    y.copy_(add_reference(residual, _sum(own, others, rank).unsqueeze(1), w, eps))


def _sum(own: Tensor, others: Tensor, rank: int) -> Tensor:
    """The sum of all parts, added in the order of ranks: [T, D] float32."""
    whole = torch.zeros_like(own, dtype=FLOAT32)
    for part in (*others[:rank], own, *others[rank:]):
        whole += part
    return whole


op = Op("sum_add_rmsnorm", CASES, TOL, inputs, cost, reference, decides=("residual", "others"))


@functools.cache
def _kernel() -> Any:
    return build.function(SOURCE, "sum_add_rmsnorm", "pppl" + "llpp" + "llfp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        SOURCE,
        device,
        (a.residual.dtype == BFLOAT16, "bfloat16"),
        (a.residual.shape[0] > 0, "rows"),
        (a.residual.shape[1] % 8 == 0 and a.residual.shape[1] <= 8192, "a width in 8s up to 8,192"),
        (a.others.shape[0] < MAX_RANKS, f"at most {MAX_RANKS} ranks"),
    ),
)
def cuda(residual: Tensor, own: Tensor, others: Tensor, rank: int, w: Tensor, y: Tensor, eps: float) -> None:
    T, D = residual.shape
    failed = _kernel()(
        residual.data_ptr(),
        own.data_ptr(),
        others.data_ptr(),
        others.stride(0),
        others.shape[0] + 1,
        rank,
        w.data_ptr(),
        y.data_ptr(),
        T,
        D,
        eps,
        build.stream(residual.device),
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {others.shape=} {others.stride()=}"


@op.impl("torch")
def in_two(residual: Tensor, own: Tensor, others: Tensor, rank: int, w: Tensor, y: Tensor, eps: float) -> None:
    y.copy_(add_rmsnorm(residual, _sum(own, others, rank).unsqueeze(1), w, eps))


def sum_add_rmsnorm(residual: Tensor, own: Tensor, others: Tensor, rank: int, w: Tensor, y: Tensor, eps: float) -> None:
    assert own.shape == residual.shape == y.shape == others.shape[1:], f"{residual.shape=} {own.shape=} {others.shape=}"
    assert residual.dtype == own.dtype == others.dtype == y.dtype == w.dtype, f"{residual.dtype=} {own.dtype=}"
    assert residual.is_contiguous() and own.is_contiguous() and y.is_contiguous(), f"{own.stride()=} {y.stride()=}"
    assert others.stride()[1:] == (residual.shape[1], 1) and 0 <= rank <= len(others), f"{others.stride()=} {rank=}"
    op(residual, own, others, rank, w, y, eps)
