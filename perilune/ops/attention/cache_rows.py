"""What a step adds to the cache, as `mla_absorb_query`, `mla_project_query` and `mla_pre_attention` take it: new
latents and rope keys, and their places.

    cache[slots[t]] = (rmsnorm(ckv[t, :R]) * kv_norm, rope(ckv[t, R:]))             in place

ckv [T, R + r], rows may be strided; kv_norm [R]; cos and sin [T, r / 2] float32 (pairs as in `rope`); cache
[N, block_size, R + r] contiguous, of any float type or packed (latent_cache.py); slots [T] int64 = block * block_size +
offset, distinct, or below 0: nothing is written for that row. What is cached is rounded to ckv's type and then to the
cache's.
"""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make
from perilune.ops.layouts import latent_cache

SIGNATURE = "plpppp" + "llp" + "lf"  # of `arguments`, for compile.function


def inputs(
    g: Make, T: int, R: int, r: int, *, blocks: int = 2, block_size: int = 64, padding: int = 0
) -> dict[str, Any]:
    """All but ckv; the last `padding` rows have no slot."""
    slots = g.permutation(blocks * block_size)[:T]
    slots[T - padding :] = -1
    angles = g.rand(T, r // 2) * 6.0
    return {
        "kv_norm": g.randn(R),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "cache": g.nan(blocks, block_size, R + r),
        "slots": slots,
    }


def check(T: int, R: int, ckv: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    assert ckv.shape[0] == T and ckv.dtype == kv_norm.dtype, f"{T=} {ckv.shape=} {ckv.dtype=} {kv_norm.dtype=}"
    check_places(T, R, ckv.shape[1] - R, kv_norm, cos, sin, cache, slots)


def check_places(
    T: int, R: int, r: int, kv_norm: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """All but ckv."""
    assert kv_norm.shape == (R,), f"{T=} {R=} {kv_norm.shape=}"
    assert cache.shape[2] == latent_cache.width(R, r, cache.dtype), f"{R=} {r=} {cache.shape=} {cache.dtype=}"
    assert cache.is_contiguous(), f"{cache.shape=} {cache.stride()=}"
    assert cos.shape == sin.shape == (T, r // 2) and cos.dtype == sin.dtype == FLOAT32, f"{cos.shape=} {cos.dtype=}"
    assert slots.shape == (T,) and slots.dtype == torch.int64, f"{slots.shape=} {slots.dtype=}"


def needs(cache: Tensor) -> tuple[tuple[bool, str], ...]:
    """What cache_row.cuh needs."""
    kinds = (cache.dtype in (BFLOAT16, latent_cache.PACKED), "a bfloat16 or packed cache")
    return kinds, (cache.shape[2] == latent_cache.width(K2.latent, K2.rope, cache.dtype), "Kimi's latent width")


def reference(ckv: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, eps: float) -> None:
    R, new = kv_norm.shape[0], ckv.float()
    c = new[:, :R] * (new[:, :R].square().mean(-1, keepdim=True) + eps).rsqrt() * kv_norm.float()
    rows = latent_cache.pack(c.to(ckv.dtype), rotated(new[:, R:], cos, sin).to(ckv.dtype), cache.dtype)
    cache.view(-1, cache.shape[2])[slots[slots >= 0]] = rows[slots >= 0]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., r] float32, pairs rotated."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def arguments(
    ckv: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, eps: float
) -> tuple[Any, ...]:
    """What a launcher hands to new_rows() of cache_row.cuh. The caller keeps the tensors."""
    return ckv.data_ptr(), ckv.stride(0), *places(kv_norm, cos, sin, cache, slots), ckv.shape[0], eps


def places(kv_norm: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> tuple[Any, ...]:
    """Of these, what does not come with ckv."""
    assert cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous(), f"{cos.stride()=} {slots.stride()=}"
    return (
        kv_norm.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cache.data_ptr(),
        cache.shape[0] * cache.shape[1],
        cache.dtype == latent_cache.PACKED,
        slots.data_ptr(),
    )
