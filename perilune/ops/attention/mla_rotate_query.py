"""Rotated queries and new cache rows, from the attention projections: input of attention in the plain form.

    q[t, h, n:]     = rope(q[t, h, n:])                                             in place
    pages[slots[t]] = (rmsnorm(ckv[t, :R]) * kv_norm, rope(ckv[t, R:]))             in place

q [T, H, n + r] contiguous; ckv, kv_norm, rotary and latents as in cache_rows.py. fp32 inside, rounded once to q's type.

"cuda" is one launch for Kimi's widths; "composed" is the three ops in turn.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import cache_rows
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, K2, NANO, Make, Sized, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import aligned
from perilune.ops.layouts.operands import Latents, Rotary
from perilune.ops.pointwise.rope import rope


@dataclass(frozen=True)
class Case(Sized):
    T: int
    H: int = NANO.heads
    n: int = K2.nope
    R: int = K2.latent
    r: int = K2.rope
    block_size: int = 64
    strided: bool = False
    elsewhere: int = 1  # every n-th row has a slot on this rank, as with KV sharded over n ranks
    narrow: bool = False  # the cache is bfloat16


CASES = [
    *(Case(t, K2.heads, strided=True, big=True) for t in (17, 1000, 2048)),
    Case(301, 16, strided=True, big=True),
    Case(301, 16, elsewhere=2, big=True),
    *(Case(t) for t in (1, 17, 40)),
    Case(33, strided=True),
    Case(33, elsewhere=4),
    Case(0),
    Case(3, 2, 16, 24, 8, 4, strided=True),
    Case(5, 3, 8, 16, 4, 16, narrow=True),
]
TOL = {"q": rounded(), "latents.pages": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    before, blocks = 8 if c.strided else 0, c.T // c.block_size + 2
    rows = cache_rows.inputs(g, c.T, c.R, c.r, blocks=blocks, block_size=c.block_size, narrow=c.narrow)
    rows["latents"].slots[torch.arange(c.T, device=g.device) % c.elsewhere > 0] = -1
    ckv = g.randn(c.T, before + c.R + c.r, scale=3.0)[:, before:]
    return {"q": g.randn(c.T, c.H, c.n + c.r), "ckv": ckv, **rows, "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    size = dtype.itemsize
    new = costs.Cost(4 * c.T * c.R + 3 * c.T * c.r, size * (2 * c.T * (c.R + c.r) + c.R))
    return new + costs.rope(c.T, c.H, c.r, size)


def reference(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    cache_rows.reference(ckv, kv_norm, rotary, latents, eps)
    pe = q[..., -2 * rotary.cos.shape[1] :]
    pe.copy_(cache_rows.rotated(pe.float(), rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1)))


op = Op("mla_rotate_query", CASES, TOL, inputs, cost, reference, decides=("q", "latents"))


_kernel = build.launcher("mla_rotate_query.cu", "mla_rotate_query", "pplppppllpllfp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "mla_rotate_query.cu",
        device,
        (a.q.dtype == BFLOAT16, "bfloat16"),
        (a.q.shape[2] == K2.nope + K2.rope, "Kimi's head width"),
        *cache_rows.needs(a.latents.pages),
    ),
)
def cuda(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    T, H, _ = q.shape
    ckv = aligned(ckv)
    failed = _kernel()(
        q.data_ptr(),
        ckv.data_ptr(),
        ckv.stride(0),
        *cache_rows.places(kv_norm, rotary, latents),
        T,
        H,
        eps,
        build.stream(q.device),
    )
    assert not failed, f"CUDA error {failed}: {q.shape=} {latents.pages.shape=}"


@op.impl("composed")
def composed(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    cache_rows.composed(ckv, kv_norm, rotary, latents, eps)
    r = 2 * rotary.cos.shape[1]
    q[..., -r:] = rope(q[..., -r:], rotary.cos, rotary.sin)


def mla_rotate_query(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    (T, _, size), (R,) = q.shape, kv_norm.shape
    r = ckv.shape[1] - R
    assert r <= size and q.is_contiguous(), f"{q.shape=} {q.stride()=} {ckv.shape=}"
    assert q.dtype == ckv.dtype, f"{q.dtype=} {ckv.dtype=}"
    cache_rows.check(T, ckv, kv_norm, rotary, latents)
    op(q, ckv, kv_norm, rotary, latents, eps)
