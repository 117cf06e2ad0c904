"""The new rows of a step in the latent cache (latents, rope keys and their slots), as `mla_absorb_query`,
`mla_project_query` and `mla_pre_attention` take them.

    pages[slots[t]] = (rmsnorm(ckv[t, :R]) * kv_norm, rope(ckv[t, R:]))             in place

ckv [T, R + r], rows may be strided; kv_norm [R]; rotary: cos and sin [T, r / 2] float32 (pairs as in `rope`); latents:
pages [N, block_size, R + r] contiguous, of any float type or packed (latent_cache.py), and slots [T] int64 = block *
block_size + offset, distinct, or below 0: nothing is written for that row. Values are rounded to ckv's type and then to
the cache's.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perilune.ops.attention.write_cache import write_cache
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Attention, Latents, Matrix, Rotary
from perilune.ops.pointwise.rmsnorm import rmsnorm
from perilune.ops.pointwise.rope import rope

SIGNATURE = "plpppp" + "llp" + "lf"  # types of `arguments`, for build.function


def inputs(
    g: Make, T: int, R: int, r: int, *, blocks: int = 2, block_size: int = 64, padding: int = 0, narrow: bool = False
) -> dict[str, Any]:
    """Test inputs except ckv. The last `padding` rows have slot -1; if `narrow`, the cache is bfloat16."""
    slots = g.permutation(blocks * block_size)[:T]
    slots[T - padding :] = -1
    angles, pages = g.rand(T, r // 2) * 6.0, g.nan(blocks, block_size, R + r)
    return {
        "kv_norm": g.randn(R),
        "rotary": Rotary(angles.cos(), angles.sin()),
        "latents": Latents(pages.to(BFLOAT16) if narrow else pages, slots),
    }


def weights(**held: Any) -> Attention:
    """An Attention record with these fields; the others, which the op under test does not read, are empty."""
    empty = torch.empty(0)
    own = dict.fromkeys(("q_a_norm", "kv_a_norm", "w_uk", "w_uv"), empty)
    return Attention(**{**own, **{name: Matrix(empty) for name in ("qkv_a", "q_b", "o")}, **held})


def check(T: int, ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents) -> None:
    assert ckv.shape[0] == T and ckv.dtype == kv_norm.dtype, f"{T=} {ckv.shape=} {ckv.dtype=} {kv_norm.dtype=}"
    check_places(T, ckv.shape[1] - kv_norm.shape[0], kv_norm, rotary, latents)


def check_places(T: int, r: int, kv_norm: Tensor, rotary: Rotary, latents: Latents) -> None:
    """As `check`, without ckv."""
    (R,), cos, sin, pages, slots = kv_norm.shape, rotary.cos, rotary.sin, latents.pages, latents.slots
    assert pages.shape[2] == latent_cache.width(R, r, pages.dtype), f"{R=} {r=} {pages.shape=} {pages.dtype=}"
    assert pages.is_contiguous(), f"{pages.shape=} {pages.stride()=}"
    assert cos.shape == sin.shape == (T, r // 2) and cos.dtype == sin.dtype == FLOAT32, f"{cos.shape=} {cos.dtype=}"
    assert slots.shape == (T,) and slots.dtype == torch.int64, f"{slots.shape=} {slots.dtype=}"


def needs(pages: Tensor) -> tuple[tuple[bool, str], ...]:
    """Conditions of cache_row.cuh, for `build.on_hopper`."""
    kinds = (pages.dtype in (BFLOAT16, latent_cache.PACKED), "a bfloat16 or packed cache")
    return kinds, (pages.shape[2] == latent_cache.width(K2.latent, K2.rope, pages.dtype), "Kimi's latent width")


def reference(ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    R, new, pages, slots = kv_norm.shape[0], ckv.float(), latents.pages, latents.slots
    c = new[:, :R] * (new[:, :R].square().mean(-1, keepdim=True) + eps).rsqrt() * kv_norm.float()
    k_pe = rotated(new[:, R:], rotary.cos, rotary.sin)
    rows = latent_cache.pack(c.to(ckv.dtype), k_pe.to(ckv.dtype), pages.dtype)
    pages.view(-1, pages.shape[2])[slots[slots >= 0]] = rows[slots >= 0]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., r] float32, pairs rotated."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def composed(ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> None:
    """As `reference`, by three ops: rmsnorm, rope and write_cache."""
    R = kv_norm.shape[0]
    c, k_pe = rmsnorm(ckv[:, :R], kv_norm, eps), rope(ckv[:, R:].unsqueeze(1), rotary.cos, rotary.sin)
    write(latents, c, k_pe.squeeze(1))


def write(latents: Latents, c: Tensor, k_pe: Tensor) -> None:
    """Writes rows of c [T, R] and k_pe [T, r] to their slots; on a GPU without a synchronisation with the host."""
    pages, slots = latents.pages, latents.slots
    if slots.device.type != "cuda":
        kept = (slots >= 0).nonzero().squeeze(1)
        if len(kept) < len(slots):
            c, k_pe, latents = c[kept], k_pe[kept], replace(latents, slots=slots[kept])
        write_cache(latents, c, k_pe)
    elif len(slots):
        # Selecting the rows with a slot would make the host wait for their number. So a row without a slot repeats the
        # write of a row with one; if no row has a slot, all rows write slot 0's present values to slot 0.
        flat, rows, real = pages.view(-1, pages.shape[2]), latent_cache.pack(c, k_pe, pages.dtype), slots >= 0
        other, some = real.int().argmax(0, keepdim=True), real.any()  # keepdim: torch reads a 0-d index on the host
        spare = torch.where(some, slots[other], 0)
        values = torch.where(some, rows[other], flat[0])
        flat[torch.where(real, slots, spare)] = torch.where(real.unsqueeze(1), rows, values)


def arguments(ckv: Tensor, kv_norm: Tensor, rotary: Rotary, latents: Latents, eps: float) -> tuple[Any, ...]:
    """Arguments of a launcher for new_rows() of cache_row.cuh. The caller keeps the tensors."""
    return ckv.data_ptr(), ckv.stride(0), *places(kv_norm, rotary, latents), ckv.shape[0], eps


def places(kv_norm: Tensor, rotary: Rotary, latents: Latents) -> tuple[Any, ...]:
    """`arguments` without ckv, T and eps."""
    cos, sin, pages, slots = rotary.cos, rotary.sin, latents.pages, latents.slots
    assert cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous(), f"{cos.stride()=} {slots.stride()=}"
    return (
        kv_norm.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        pages.data_ptr(),
        pages.shape[0] * pages.shape[1],
        pages.dtype == latent_cache.PACKED,
        slots.data_ptr(),
    )
