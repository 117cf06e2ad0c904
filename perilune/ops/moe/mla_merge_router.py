"""`mla_merge_output`, the residual, its norm, and the router: with a sharded KV cache, everything in a MoE layer
between the exchange of attention's outputs and the experts.

As `mla_decode_router`, with y = `mla_merge_output`(o, lse, attention). "cuda" and "cuda_mma" are that op's launches
after attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import mla_merge_output
from perilune.ops.exchange import exchange_add_rmsnorm
from perilune.ops.harness.case import K2, NANO, Make
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Attention, Gate, Norm
from perilune.ops.moe import mla_decode_router, router
from perilune.ops.moe.chosen import Chosen


@dataclass(frozen=True, kw_only=True)
class Case(mla_decode_router.Stream, mla_merge_output.Case):
    pass


CASES = [
    *(
        Case(N=n, T=1, H=K2.heads // n, fp8=fp8, strided=fp8, ranks=ranks, against=fp8, big=True)
        for n in (2, 4, 8)
        for fp8 in (False, True)
        for ranks in (0, n)
    ),
    Case(N=2, T=3, H=32, fp8=True, ranks=2, big=True),
    *(Case(N=2, T=t, H=NANO.heads // 2, D=NANO.hidden, E=NANO.experts, k=NANO.top_k, ranks=2) for t in (1, 4)),
    Case(N=2, T=0, H=2, D=32, E=8, k=2),
]
TOL = mla_decode_router.TOL


def inputs(c: Case, g: Make) -> dict[str, Any]:
    args = mla_merge_output.inputs(c, g)
    args["attention"] = args.pop("weights")
    return args | mla_decode_router.stream_inputs(c.T, c.D, c, g)


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    rest = costs.add_rmsnorm(c.T, c.D, dtype.itemsize) + costs.router(c.T, c.D, c.E, c.k, dtype.itemsize)
    return mla_merge_output.cost(c, dtype) + rest


def reference(
    o: Tensor, lse: Tensor, attention: Attention, residual: Tensor, norm: Norm, gate: Gate
) -> tuple[Tensor, Chosen]:
    y = mla_merge_output.reference(o, lse, attention)
    x = exchange_add_rmsnorm.add_norm_reference(residual, y, norm)
    return x, router.reference(x, gate.weight, gate.bias, gate.routing)


op = Op("mla_merge_router", CASES, TOL, inputs, cost, reference, decides=("o", "attention", "norm", "gate"))


def _fits(a: Any, device: torch.device, mma: bool) -> bool | str:
    return mla_decode_router.fits(a.o.shape[1:3], a, device, mma, *mla_merge_output.needs(a.o))


@op.impl(
    "cuda_mma",
    when=lambda a, device: _fits(a, device, mma=True),
    alone=True,
    waits=("mla_decode_output_mma.cu", "mla_decode_router_t1.cu"),
)
def cuda_mma(
    o: Tensor, lse: Tensor, attention: Attention, residual: Tensor, norm: Norm, gate: Gate
) -> tuple[Tensor, Chosen]:
    return mla_decode_router.run(True, lambda: mla_merge_output.ranges(o, lse), attention, residual, norm, gate)


@op.impl(
    "cuda",
    when=lambda a, device: _fits(a, device, mma=False),
    alone=True,
    waits=("mla_decode_output_t1.cu", "mla_decode_router_t1.cu"),
)
def cuda(
    o: Tensor, lse: Tensor, attention: Attention, residual: Tensor, norm: Norm, gate: Gate
) -> tuple[Tensor, Chosen]:
    return mla_decode_router.run(False, lambda: mla_merge_output.ranges(o, lse), attention, residual, norm, gate)


@op.impl("composed")
def composed(
    o: Tensor, lse: Tensor, attention: Attention, residual: Tensor, norm: Norm, gate: Gate
) -> tuple[Tensor, Chosen]:
    x = exchange_add_rmsnorm.add_norm(residual, mla_merge_output.mla_merge_output(o, lse, attention), norm)
    return x, router.router(x, gate.weight, gate.bias, gate.routing)


def mla_merge_router(
    o: Tensor, lse: Tensor, attention: Attention, residual: Tensor, norm: Norm, gate: Gate
) -> tuple[Tensor, Chosen]:
    mla_merge_output.check(o, lse, attention)
    mla_decode_router.check_stream(o.shape[1], attention, residual, norm, gate)
    return op(o, lse, attention, residual, norm, gate)
