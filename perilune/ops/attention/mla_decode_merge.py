"""Merges the attention outputs over all ranks' parts of a sharded KV cache (from `mla_decode_partial`), then applies
W_UV.

    y[t, h] = (sum over ranks i of w[i] o[i, t, h] / sum of w[i]) w_uv[h],  w[i] = 2 ** lse[i, t, h]

o [N, T, H, R], each rank's part contiguous and at a multiple of 16 bytes, and lse [N, T, H] float32, each rank's part
contiguous, of N <= 8 ranks for this rank's H heads; w_uv [H, R, v]; y [T, H, v] as o. A rank with lse -inf has weight
0; if all have, y is 0. Sums in fp32; the sum over ranks is rounded before it is multiplied by w_uv.

"cuda" is one launch: a cluster of CTAs per head and 32 tokens, like the one that merges ranges in mla_decode.cu.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention.mla_decode_partial import MAX_GROUPS
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, sums
from perilune.ops.harness.registry import Op
from perilune.ops.linear.per_head_matmul import per_head_matmul


@dataclass(frozen=True)
class Case(Sized):
    N: int
    T: int
    H: int
    R: int = K2.latent
    v: int = K2.value
    strided: bool = False  # a gap between ranks' parts, as in an exchange's buffer


CASES = [
    *(Case(n, t, K2.heads // n, strided=t % 2 == 0, big=True) for n in (2, 4, 8) for t in (1, 2, 3, 4, 8, 9, 16, 64)),
    *(Case(2, t, 32, big=True) for t in (33, 200)),
    *(Case(2, t, NANO.heads // 2) for t in (1, 5, 40)),
    Case(4, 3, 1, strided=True),
    Case(1, 2, 3, 24, 16),
    Case(3, 2, 5, 40, 24, strided=True),
    Case(2, 0, 2),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    values, some = c.T * c.H * c.R, 16 if c.strided else 0
    lse = 8.0 * g.randn(c.N, c.T * c.H + some, dtype=FLOAT32)[:, : c.T * c.H].view(c.N, c.T, c.H)
    lse[0, ::2] = float("-inf")
    if c.T > 2:
        lse[:, 2] = float("-inf")
    return {
        "o": g.randn(c.N, values + some)[:, :values].view(c.N, c.T, c.H, c.R),
        "lse": lse,
        "w_uv": g.randn(c.H, c.R, c.v, scale=c.R**-0.5),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    size = dtype.itemsize
    merged = costs.Cost(2 * c.N * c.T * c.H * c.R, c.N * c.T * c.H * (c.R * size + 4) - c.T * c.H * c.R * size)
    return merged + costs.per_head_matmul(c.T, c.H, c.R, c.v, size)


def _merged(o: Tensor, lse: Tensor) -> Tensor:
    """The weighted sum over ranks, [T, H, R] in o's type."""
    shares = (lse - lse.amax(0).clamp_min(torch.finfo(FLOAT32).min)).exp2()
    shares = shares / shares.sum(0).clamp_min(torch.finfo(FLOAT32).tiny)
    return (o.float() * shares.unsqueeze(-1)).sum(0).to(o.dtype)


def reference(o: Tensor, lse: Tensor, w_uv: Tensor) -> Tensor:
    return torch.einsum("thr,hrv->thv", _merged(o, lse).float(), w_uv.float()).to(o.dtype)


op = Op("mla_decode_merge", CASES, TOL, inputs, cost, reference, decides=("o", "w_uv"))


_kernel = build.launcher("mla_decode_merge.cu", "mla_decode_merge", "plplpplllp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "mla_decode_merge.cu",
        device,
        (a.o.dtype == BFLOAT16, "bfloat16"),
        (a.w_uv.shape[1:] == (K2.latent, K2.value), "Kimi's latent and value widths"),
    ),
)
def cuda(o: Tensor, lse: Tensor, w_uv: Tensor) -> Tensor:
    (N, T, H, _), device = o.shape, o.device
    assert w_uv.is_contiguous() and o.data_ptr() % 16 == 0 and o.stride(0) % 8 == 0, f"{w_uv.stride()=} {o.stride()=}"
    out = torch.empty(T, H, K2.value, dtype=BFLOAT16, device=device)
    failed = _kernel()(
        o.data_ptr(),
        o.stride(0),
        lse.data_ptr(),
        lse.stride(0),
        w_uv.data_ptr(),
        out.data_ptr(),
        N,
        T,
        H,
        build.stream(device),
    )
    assert not failed, f"mla_decode_merge does not start: CUDA error {failed}"
    return out


@op.impl("composed")
def composed(o: Tensor, lse: Tensor, w_uv: Tensor) -> Tensor:
    return per_head_matmul(_merged(o, lse), w_uv)


def check(o: Tensor, lse: Tensor, w_uv: Tensor) -> None:
    N, T, H, R = o.shape
    assert 1 <= N <= MAX_GROUPS and lse.shape == (N, T, H) and lse.dtype == FLOAT32, f"{o.shape=} {lse.shape=}"
    assert w_uv.shape[:2] == (H, R) and w_uv.dtype == o.dtype, f"{o.shape=} {o.dtype=} {w_uv.shape=} {w_uv.dtype=}"
    assert o.stride()[1:] == (H * R, R, 1) and lse.stride()[1:] == (H, 1), f"{o.stride()=} {lse.stride()=}"


def mla_decode_merge(o: Tensor, lse: Tensor, w_uv: Tensor) -> Tensor:
    check(o, lse, w_uv)
    return op(o, lse, w_uv)
