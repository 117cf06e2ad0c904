"""Merges the attention outputs over all ranks' parts of a sharded KV cache, then the output projection: y = o w^T, with
o [T, H v] as `mla_decode_merge` gives it.

o [N, T, H, R] and lse [N, T, H] as in `mla_decode_merge`; weights and roundings as in `mla_decode_output`; y [T, D] as
o.

"cuda" and "cuda_mma" are the launch that follows attention in `mla_decode_output`'s implementations of the same names;
it combines ranks' parts instead of a context's ranges. "composed" calls the ops.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import mla_decode_merge, mla_decode_output
from perilune.ops.attention.mla_decode_output import Ranges
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Tol
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Attention
from perilune.ops.linear import linear_fp8


@dataclass(frozen=True, kw_only=True)
class Case(mla_decode_merge.Case):
    D: int = K2.hidden
    fp8: bool = False


CASES = [
    *(
        Case(N=n, T=t, H=K2.heads // n, strided=t % 2 == 0, fp8=fp8, big=True)
        for n in (2, 4, 8)
        for t in (1, 2, 4)
        for fp8 in (False, True)
    ),
    *(Case(N=2, T=t, H=32, fp8=True, big=True) for t in (3, 5)),
    Case(N=3, T=1, H=16, D=4352, fp8=True, big=True),
    *(Case(N=2, T=t, H=NANO.heads // 2, D=NANO.hidden) for t in (1, 4)),
    Case(N=2, T=3, H=4, R=64, v=16, D=64, fp8=True),
    Case(N=2, T=0, H=2, D=32),
]
TOL = {
    "y": {
        FLOAT32: Tol(1e-4, 2e-4, 1e-5, "fp32 sums in another order"),
        BFLOAT16: Tol(1.6e-2, 1.6e-2, 8e-3, "bf16 rounding of the merged output, o and y"),
    }
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    args = mla_decode_merge.inputs(c, g)
    return args | {"weights": mla_decode_output.output_weights(args.pop("w_uv"), c.D, c.fp8, g)}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return mla_decode_merge.cost(c, dtype) + costs.linear(c.T, c.H * c.v, c.D, 1 if c.fp8 else dtype.itemsize)


def reference(o: Tensor, lse: Tensor, weights: Attention) -> Tensor:
    return linear_fp8.matmul_reference(mla_decode_merge.reference(o, lse, weights.w_uv).flatten(1), weights.o)


op = Op("mla_merge_output", CASES, TOL, inputs, cost, reference, decides=("o", "weights"))


def needs(o: Tensor) -> tuple[tuple[bool, str], ...]:
    """What the kernels ask of ranks' parts: (condition, its name)."""
    H, R = o.shape[2:]
    return (
        (o.dtype == BFLOAT16, "bfloat16"),
        (R == K2.latent, "Kimi's latent width"),
        (H < K2.heads, f"fewer than {K2.heads} heads"),
        (o.stride(0) % 8 == 0, "parts at multiples of 16 bytes"),
    )


def ranges(o: Tensor, lse: Tensor) -> Ranges:
    """The ranks' parts, as `mla_decode_output.launch` takes them."""
    return Ranges(o, lse, len(o), (o.stride(0), lse.stride(0)))


@op.impl(
    "cuda_mma",
    when=lambda a, device: mla_decode_output.fits_mma(a.o.shape[1:3], a.weights, device, *needs(a.o)),
    alone=True,
    waits=("mla_decode_output_mma.cu",),
)
def cuda_mma(o: Tensor, lse: Tensor, weights: Attention) -> Tensor:
    return mla_decode_output.run(lambda: ranges(o, lse), o.shape[1], weights, o.device, True)


@op.impl(
    "cuda",
    when=lambda a, device: mla_decode_output.fits(a.o.shape[1:3], a.weights, device, *needs(a.o)),
    alone=True,
    waits=("mla_decode_output_t1.cu",),
)
def cuda(o: Tensor, lse: Tensor, weights: Attention) -> Tensor:
    return mla_decode_output.run(lambda: ranges(o, lse), 1, weights, o.device, False)


@op.impl("composed")
def composed(o: Tensor, lse: Tensor, weights: Attention) -> Tensor:
    return linear_fp8.matmul(mla_decode_merge.mla_decode_merge(o, lse, weights.w_uv).flatten(1), weights.o)


def check(o: Tensor, lse: Tensor, weights: Attention) -> None:
    mla_decode_merge.check(o, lse, weights.w_uv)
    mla_decode_output.check_weights(weights, o.dtype)


def mla_merge_output(o: Tensor, lse: Tensor, weights: Attention) -> Tensor:
    check(o, lse, weights)
    return op(o, lse, weights)
