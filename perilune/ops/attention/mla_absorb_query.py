"""New cache rows and q_full, from the attention projections of a step with few tokens: input of absorbed attention.

    q_full[t, h] = (q[t, h, :n] w_uk[h], rope(q[t, h, n:]))

q [T, H, n + r] contiguous; w_uk [H, n, R]; q_full [T, H, R + r] as q; ckv, kv_norm, rotary and latents as in
cache_rows.py. Sums in fp32, each part of the result rounded once. Padding rows (slot below 0) get a q_full too.

"cuda" is one launch for Kimi's widths and loads W_UK while the previous kernel runs; a token's result does not depend
on the batch. "cpp" is one call for few tokens of float32. "composed" calls rmsnorm, rope, write_cache and
per_head_matmul.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import cache_rows
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import aligned
from perilune.ops.layouts.operands import Latents, Rotary
from perilune.ops.linear.per_head_matmul import FEW_TOKENS, per_head_matmul
from perilune.ops.pointwise.rope import rope


@dataclass(frozen=True)
class Case(Sized):
    T: int
    H: int = NANO.heads
    n: int = K2.nope
    R: int = K2.latent
    r: int = K2.rope
    block_size: int = 64
    padding: int = 0  # rows at the end without a slot
    strided: bool = False
    narrow: bool = False  # the cache is bfloat16


CASES = [
    *(Case(t, heads, strided=True, big=True) for heads in (K2.heads, 16) for t in (1, 4, 8, 64, 512)),
    Case(40, 32, padding=3, big=True),
    *(Case(t) for t in (1, 2, 5, 16)),
    Case(33, strided=True),
    Case(8, padding=3, strided=True),
    Case(3, padding=3),
    Case(0),
    Case(3, 2, 16, 24, 8, 4, strided=True),
    Case(5, 3, 8, 16, 4, 16, padding=1, narrow=True),
    Case(3, 2, 20, 28, 4, 4),
]
TOL = {"q_full": sums(), "latents.pages": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    before, blocks = 8 if c.strided else 0, c.T // c.block_size + 2
    rows = cache_rows.inputs(
        g, c.T, c.R, c.r, blocks=blocks, block_size=c.block_size, padding=c.padding, narrow=c.narrow
    )
    rows["q"] = g.randn(c.T, c.H, c.n + c.r)
    rows["ckv"] = g.randn(c.T, before + c.R + c.r, scale=3.0)[:, before:]
    rows |= {"w_uk": g.randn(c.H, c.n, c.R, scale=c.n**-0.5), "eps": 1e-5}
    return {name: rows[name] for name in op.parameters}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    size, width = dtype.itemsize, c.R + c.r
    new = costs.Cost(4 * c.T * c.R + 3 * c.T * c.r, size * (2 * c.T * width + c.R))
    return new + costs.per_head_matmul(c.T, c.H, c.n, c.R, size) + costs.rope(c.T, c.H, c.r, size)


def reference(
    q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, w_uk: Tensor, latents: Latents, eps: float
) -> Tensor:
    n, f = w_uk.shape[1], q.float()
    cache_rows.reference(ckv, kv_norm, rotary, latents, eps)
    latent = torch.einsum("thn,hnr->thr", f[..., :n], w_uk.float())
    pe = cache_rows.rotated(f[..., n:], rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1))
    return torch.cat([latent, pe], -1).to(q.dtype)


op = Op("mla_absorb_query", CASES, TOL, inputs, cost, reference, decides=("q", "w_uk", "latents"))


_kernel = build.launcher("mla_absorb_query.cu", "mla_absorb_query", "p" + cache_rows.SIGNATURE + "pplp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "mla_absorb_query.cu",
        device,
        (a.q.dtype == BFLOAT16, "bfloat16"),
        (a.q.shape[2] == K2.nope + K2.rope, "Kimi's head width"),
        *cache_rows.needs(a.latents.pages),
    ),
)
def cuda(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, w_uk: Tensor, latents: Latents, eps: float) -> Tensor:
    (T, H, _), width = q.shape, ckv.shape[1]
    assert w_uk.shape == (H, K2.nope, K2.latent) and w_uk.is_contiguous(), f"{w_uk.shape=} {w_uk.stride()=}"
    q, ckv = q.contiguous(), aligned(ckv)
    out = torch.empty(T, H, width, dtype=q.dtype, device=q.device)
    failed = _kernel()(
        q.data_ptr(),
        *cache_rows.arguments(ckv, kv_norm, rotary, latents, eps),
        w_uk.data_ptr(),
        out.data_ptr(),
        H,
        build.stream(q.device),
    )
    assert not failed, f"mla_absorb_query does not start: CUDA error {failed}"
    return out


_on_cpu = build.launcher_by_type("mla_absorb_query", "mla_query", "pplpppppl" + "pp" + "l" * 6 + "f")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "mla_absorb_query",
        device,
        (a.q.dtype == FLOAT32 and a.q.shape[0] <= FEW_TOKENS, f"at most {FEW_TOKENS} tokens of float32"),
        (a.latents.pages.dtype in (FLOAT32, BFLOAT16), "a float32 or bfloat16 cache"),
        (a.w_uk.shape[2] % 8 == 0, "a latent width that is a multiple of 8"),
    ),
)
def cpp(q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, w_uk: Tensor, latents: Latents, eps: float) -> Tensor:
    (T, H, _), (_, n, R), (N, block_size, width) = q.shape, w_uk.shape, latents.pages.shape
    if ckv.stride(1) != 1:
        ckv = ckv.contiguous()
    q, w_uk, slots = q.contiguous(), w_uk.contiguous(), latents.slots.contiguous()
    cos, sin = rotary.cos.contiguous(), rotary.sin.contiguous()
    out = torch.empty(T, H, width)
    failed = _on_cpu(latents.pages.dtype)(
        q.data_ptr(),
        ckv.data_ptr(),
        ckv.stride(0),
        kv_norm.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        w_uk.data_ptr(),
        latents.pages.data_ptr(),
        N * block_size,
        slots.data_ptr(),
        out.data_ptr(),
        T,
        H,
        n,
        R,
        width - R,
        threads.count(),
        eps,
    )
    assert not failed, f"a slot is outside the cache: {slots.max()=} {latents.pages.shape=}"
    return out


@op.impl("composed")
def composed(
    q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, w_uk: Tensor, latents: Latents, eps: float
) -> Tensor:
    n = w_uk.shape[1]
    cache_rows.composed(ckv, kv_norm, rotary, latents, eps)
    return torch.cat([per_head_matmul(q[..., :n], w_uk), rope(q[..., n:], rotary.cos, rotary.sin)], -1)


def mla_absorb_query(
    q: Tensor, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, w_uk: Tensor, latents: Latents, eps: float
) -> Tensor:
    (T, H, _), (heads, n, R) = q.shape, w_uk.shape
    assert heads == H and ckv.shape[1] - R == q.shape[2] - n, f"{q.shape=} {ckv.shape=} {w_uk.shape=}"
    assert q.dtype == ckv.dtype == w_uk.dtype, f"{q.dtype=} {ckv.dtype=} {w_uk.dtype=}"
    assert kv_norm.shape == (R,), f"{kv_norm.shape=} {w_uk.shape=}"
    cache_rows.check(T, ckv, kv_norm, rotary, latents)
    return op(q, ckv, kv_norm, rotary, w_uk, latents, eps)
