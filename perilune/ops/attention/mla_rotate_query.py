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
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Latents, Rotary
from perilune.ops.pointwise.rmsnorm import rmsnorm
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
    elsewhere: int = 1  # one of so many rows has a slot on this rank, as with sharded KV
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
    width = c.R + c.r
    blocks = c.T // c.block_size + 2
    before = 8 if c.strided else 0
    cache = g.nan(blocks, c.block_size, width)
    angles = g.rand(c.T, c.r // 2) * 6.0
    args = {
        "q": g.randn(c.T, c.H, c.n + c.r),
        "ckv": g.randn(c.T, before + width, scale=3.0)[:, before:],
        "kv_norm": g.randn(c.R),
        "rotary": Rotary(angles.cos(), angles.sin()),
    }
    slots = g.permutation(blocks * c.block_size)[: c.T]
    slots[torch.arange(c.T, device=g.device) % c.elsewhere > 0] = -1
    return {**args, "latents": Latents(cache.to(BFLOAT16) if c.narrow else cache, slots), "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    size = dtype.itemsize
    new = costs.Cost(4 * c.T * c.R + 3 * c.T * c.r, size * (2 * c.T * (c.R + c.r) + c.R))
    return new + costs.rope(c.T, c.H, c.r, size)


def reference(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    (R,), pages, cos, sin = kv_norm.shape, latents.pages, rotary.cos, rotary.sin
    r = 2 * cos.shape[1]

    def rotated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2).to(x.dtype)

    latent = ckv[:, :R].float()
    c = latent * (latent.square().mean(-1, keepdim=True) + eps).rsqrt() * kv_norm.float()
    rows = latent_cache.pack(c.to(q.dtype), rotated(ckv[:, R:], cos, sin), pages.dtype)
    real = latents.slots >= 0
    pages.view(-1, pages.shape[2])[latents.slots[real]] = rows[real]
    q[..., -r:] = rotated(q[..., -r:], cos.unsqueeze(1), sin.unsqueeze(1))


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
    (T, H, _), (N, block_size, _), dtype = q.shape, latents.pages.shape, latents.pages.dtype
    ckv = aligned(ckv)
    failed = _kernel()(
        q.data_ptr(),
        ckv.data_ptr(),
        ckv.stride(0),
        kv_norm.data_ptr(),
        rotary.cos.contiguous().data_ptr(),
        rotary.sin.contiguous().data_ptr(),
        latents.pages.data_ptr(),
        N * block_size,
        dtype == latent_cache.PACKED,
        latents.slots.contiguous().data_ptr(),
        T,
        H,
        eps,
        build.stream(q.device),
    )
    assert not failed, f"CUDA error {failed}: {q.shape=} {latents.pages.shape=}"


@op.impl("composed")
def composed(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    (R,), cos, sin = kv_norm.shape, rotary.cos, rotary.sin
    r = 2 * cos.shape[1]
    cache_rows.write(latents, rmsnorm(ckv[:, :R], kv_norm, eps), rope(ckv[:, R:].unsqueeze(1), cos, sin).squeeze(1))
    q[..., -r:] = rope(q[..., -r:], cos, sin)


def mla_rotate_query(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    (T, _, size), (R,) = q.shape, kv_norm.shape
    r = ckv.shape[1] - R
    assert r <= size and q.is_contiguous(), f"{q.shape=} {q.stride()=} {ckv.shape=}"
    assert q.dtype == ckv.dtype, f"{q.dtype=} {ckv.dtype=}"
    cache_rows.check(T, ckv, kv_norm, rotary, latents)
    op(q, ckv, kv_norm, rotary, latents, eps)
