"""What stands between the first attention projection and absorbed attention: q_b, then `mla_absorb_query`.

    q = rmsnorm(q_a) * q_norm  (w_q * w_scale)^T, rounded to q_a's type;  q_full and cache as in mla_absorb_query.py

q_a [T, i], rows may be strided; q_norm [i]; w_q [H (n + r), i] as q_a with w_scale None, or float8_e4m3fn with w_scale
[H (n + r)] float32; the rest as `mla_absorb_query` has it; q_full [T, H, R + r] as q_a.

"cuda" (mla_project_query.cu) is one launch for up to 8 tokens where heads fill the GPU: it saves the start and the end
of a kernel. A token's result does not depend on the batch. "composed" is the two ops.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import cache_rows, mla_absorb_query
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import aligned
from perilune.ops.layouts import latent_cache
from perilune.ops.linear import linear_fp8
from perilune.ops.linear.rmsnorm_linear import reference as dense_reference
from perilune.ops.linear.rmsnorm_linear import rmsnorm_linear

FEW_TOKENS = 8
LEAST_HEADS = 48  # two processors to a head
WIDEST = 1536  # of q_a: what fits shared memory beside the weights


@dataclass(frozen=True)
class Case(Sized):
    T: int
    H: int = NANO.heads
    i: int = NANO.q_rank
    n: int = K2.nope
    R: int = K2.latent
    r: int = K2.rope
    fp8: bool = False
    padding: int = 0  # rows at the end without a slot


CASES = [
    *(Case(t, K2.heads, K2.q_rank, fp8=fp8, big=True) for t in (1, 2, 3, 8, 16) for fp8 in (False, True)),
    Case(7, K2.heads, 512, fp8=True, padding=2, big=True),
    Case(5, 48, 512, padding=5, big=True),
    *(Case(t, fp8=fp8) for t in (1, 5) for fp8 in (False, True)),
    Case(3, 2, 40, 16, 24, 8, padding=1),
    Case(0),
]
TOL = {"q_full": sums(), "cache": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    w, scale = g.randn(c.H * (c.n + c.r), c.i, scale=c.i**-0.5), None
    if c.fp8:
        w, scale = linear_fp8.quantize_rows(w)
    a, rows = g.randn(c.T, c.i + c.R + c.r, scale=3.0), cache_rows.inputs(g, c.T, c.R, c.r, padding=c.padding)
    return {
        "q_a": a[:, : c.i],
        "q_norm": g.randn(c.i),
        "w_q": w,
        "w_scale": scale,
        "ckv": a[:, c.i :],
        "kv_norm": rows["kv_norm"],
        "cos": rows["cos"],
        "sin": rows["sin"],
        "w_uk": g.randn(c.H, c.n, c.R, scale=c.n**-0.5),
        "cache": rows["cache"],
        "slots": rows["slots"],
        "eps": 1e-5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    q = costs.linear(c.T, c.i, c.H * (c.n + c.r), 1 if c.fp8 else dtype.itemsize)
    return q + mla_absorb_query.cost(mla_absorb_query.Case(c.T, c.H, c.n, c.R, c.r), dtype)


def reference(
    q_a: Tensor,
    q_norm: Tensor,
    w_q: Tensor,
    w_scale: Tensor | None,
    ckv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    if w_scale is None:
        q = dense_reference(q_a, q_norm, w_q, eps)
    else:
        q = linear_fp8.reference(q_a, q_norm, w_q, w_scale, eps, False)
    heads = w_uk.shape[0]
    q = q.view(q_a.shape[0], heads, w_q.shape[0] // heads)
    return mla_absorb_query.reference(q, ckv, kv_norm, cos, sin, w_uk, cache, slots, eps)


op = Op("mla_project_query", CASES, TOL, inputs, cost, reference, decides=("q_a", "cache"))


@functools.cache
def _kernel() -> Any:
    return build.function("mla_project_query.cu", "mla_project_query", "pllppp" + cache_rows.SIGNATURE + "pplp")


def _fits(a: Any, device: torch.device) -> bool | str:
    # The number of heads and the type of w_q belong to the same model as the sizes that decide.
    (T, i), (H, n, R) = a.q_a.shape, a.w_uk.shape
    return build.on_hopper(
        "mla_project_query.cu",
        device,
        (a.q_a.dtype == BFLOAT16, "bfloat16"),
        (1 <= T <= FEW_TOKENS, f"1 to {FEW_TOKENS} tokens"),
        (H >= LEAST_HEADS, f"at least {LEAST_HEADS} heads"),
        (i % 512 == 0 and i <= WIDEST, f"an input width in 512s up to {WIDEST}"),
        (n == K2.nope and R == K2.latent, "Kimi's head widths"),
        *cache_rows.needs(a.cache),
    )


@op.impl("cuda", when=_fits)
def cuda(
    q_a: Tensor,
    q_norm: Tensor,
    w_q: Tensor,
    w_scale: Tensor | None,
    ckv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    (T, i), H = q_a.shape, w_uk.shape[0]
    assert w_q.is_contiguous() and w_uk.is_contiguous(), f"{w_q.stride()=} {w_uk.stride()=}"
    q_a, ckv = aligned(q_a), aligned(ckv)
    out = torch.empty(T, H, K2.latent + K2.rope, dtype=q_a.dtype, device=q_a.device)
    failed = _kernel()(
        q_a.data_ptr(),
        q_a.stride(0),
        i,
        q_norm.data_ptr(),
        w_q.data_ptr(),
        None if w_scale is None else w_scale.data_ptr(),
        *cache_rows.arguments(ckv, kv_norm, cos, sin, cache, slots, eps),
        w_uk.data_ptr(),
        out.data_ptr(),
        H,
        torch.cuda.current_stream(q_a.device).cuda_stream,
    )
    assert not failed, f"mla_project_query does not start: CUDA error {failed}"
    return out


@op.impl("composed")
def composed(
    q_a: Tensor,
    q_norm: Tensor,
    w_q: Tensor,
    w_scale: Tensor | None,
    ckv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    if w_scale is None:
        q = rmsnorm_linear(q_a, q_norm, w_q, eps)
    else:
        q = linear_fp8.linear_fp8(q_a, q_norm, w_q, w_scale, eps)
    heads = w_uk.shape[0]
    q = q.view(q_a.shape[0], heads, w_q.shape[0] // heads)
    return mla_absorb_query.mla_absorb_query(q, ckv, kv_norm, cos, sin, w_uk, cache, slots, eps)


def mla_project_query(
    q_a: Tensor,
    q_norm: Tensor,
    w_q: Tensor,
    w_scale: Tensor | None,
    ckv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    (T, i), (H, n, R) = q_a.shape, w_uk.shape
    r = ckv.shape[1] - R
    assert w_q.shape == (H * (n + r), i) and q_norm.shape == (i,), f"{q_a.shape=} {w_q.shape=} {w_uk.shape=}"
    if w_scale is None:
        assert w_q.dtype == q_a.dtype, f"{w_q.dtype=} {q_a.dtype=}"
    else:
        assert w_q.dtype == latent_cache.E4M3 and w_scale.shape == w_q.shape[:1] and w_scale.dtype == FLOAT32, (
            f"{w_q.dtype=} {w_scale.shape=} {w_scale.dtype=}"
        )
    assert q_a.dtype == q_norm.dtype == ckv.dtype == w_uk.dtype, f"{q_a.dtype=} {ckv.dtype=} {w_uk.dtype=}"
    cache_rows.check(T, R, ckv, kv_norm, cos, sin, cache, slots)
    return op(q_a, q_norm, w_q, w_scale, ckv, kv_norm, cos, sin, w_uk, cache, slots, eps)
