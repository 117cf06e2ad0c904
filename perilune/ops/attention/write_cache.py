"""pages[slots[t]] = (c[t], k_pe[t]), in place.

latents: pages [N, block_size, R + r] contiguous, of a float type or packed (latent_cache.py), and slots [T] int64 =
block * block_size + offset, distinct; c [T, R]; k_pe [T, r]. Values are converted to the cache's type. A slot outside
the cache is an error, and nothing is written.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, K2, NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Latents


@dataclass(frozen=True)
class Case(Sized):
    T: int
    N: int
    block_size: int
    R: int
    r: int
    narrow: bool = False  # the cache is bfloat16
    packed: bool = False


CASES = [
    *(Case(t, 1024, 64, K2.latent, K2.rope, big=True) for t in (1, 64, 8192)),
    *(Case(t, 64, 16, NANO.latent, NANO.rope) for t in (1, 16, 512)),
    Case(0, 2, 4, 8, 8),
    Case(3, 1, 3, 5, 2),
    Case(5, 3, 4, 8, 8, narrow=True),
    Case(16, 64, 16, NANO.latent, NANO.rope, packed=True),
    Case(3, 2, 4, 6, 3, packed=True),
]
TOL = {"latents.pages": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    cache = g.nan(c.N, c.block_size, c.R + c.r)
    if c.packed:
        cache = latent_cache.pack(cache[..., : c.R], cache[..., c.R :], latent_cache.PACKED)
    values = {"c": g.randn(c.T, c.R, scale=100.0 if c.packed else 1.0), "k_pe": g.randn(c.T, c.r)}
    slots = g.permutation(c.N * c.block_size)[: c.T]
    return {"latents": Latents(cache.to(BFLOAT16) if c.narrow else cache, slots), **values}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.write_cache(c.T, c.R + c.r, dtype.itemsize)


def reference(latents: Latents, c: Tensor, k_pe: Tensor) -> None:
    pages = latents.pages
    pages.view(-1, pages.shape[2])[latents.slots] = latent_cache.pack(c, k_pe, pages.dtype)


op = Op("write_cache", CASES, TOL, inputs, cost, reference, decides=("c", "latents"))


_kernel = build.launcher("write_cache", "write_cache", "plppplll")


def _fits(a: Any, device: torch.device) -> bool | str:
    return build.on_cpu("write_cache", device, (a.c.dtype == a.latents.pages.dtype, "a cache typed as c"))


@op.impl("cpp", when=_fits)
def cpp(latents: Latents, c: Tensor, k_pe: Tensor) -> None:
    pages, c, k_pe, slots = latents.pages, c.contiguous(), k_pe.contiguous(), latents.slots.contiguous()
    failed = _kernel()(
        pages.data_ptr(),
        pages.shape[0] * pages.shape[1],
        c.data_ptr(),
        k_pe.data_ptr(),
        slots.data_ptr(),
        c.shape[0],
        c.shape[1] * c.itemsize,
        k_pe.shape[1] * c.itemsize,
    )
    assert not failed, f"a slot is outside the cache: {slots.min()=} {slots.max()=} {pages.shape=}"


@op.impl("torch")
def index_copy(latents: Latents, c: Tensor, k_pe: Tensor) -> None:
    pages = latents.pages
    pages.view(-1, pages.shape[2]).index_copy_(0, latents.slots, latent_cache.pack(c, k_pe, pages.dtype))


def write_cache(latents: Latents, c: Tensor, k_pe: Tensor) -> None:
    pages, slots = latents.pages, latents.slots
    width = latent_cache.width(c.shape[1], k_pe.shape[1], pages.dtype)
    assert pages.shape[2] == width and pages.is_contiguous(), f"{pages.shape=} {pages.dtype=} {c.shape=}"
    assert c.shape[0] == k_pe.shape[0] == slots.shape[0], f"{c.shape=} {k_pe.shape=} {slots.shape=}"
    assert c.dtype == k_pe.dtype and slots.dtype == torch.int64, f"{c.dtype=} {k_pe.dtype=} {slots.dtype=}"
    op(latents, c, k_pe)
