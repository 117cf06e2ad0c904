"""The query path from the first attention projection to absorbed attention: q_b, then `mla_absorb_query`.

    q = rmsnorm(q_a) * q_a_norm  q_b^T, rounded to q_a's type;  q_full and new cache rows as in mla_absorb_query.py

q_a [T, i], rows may be strided; of weights: q_a_norm [i], q_b [H (n + r), i] dense or FP8, kv_a_norm [R], w_uk
[H, n, R]; ckv, rotary and latents as in `mla_absorb_query`; q_full [T, H, R + r] as q_a.

"cuda" (mla_project_query.cu) is one launch for up to 8 tokens; a token's result does not depend on the batch.
"composed" is the two ops.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import cache_rows, mla_absorb_query
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import address, aligned
from perilune.ops.layouts.operands import Attention, Latents, Matrix, Rotary
from perilune.ops.linear import linear_fp8

FEW_TOKENS = 8
LEAST_HEADS = 8  # min heads: 8 SMs then share a head
PAIRED_HEADS = 48  # from 48 heads on, 2 SMs share a head
WIDEST = 1536  # max columns of q_a: a wider row does not fit shared memory beside the weights


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
    *(Case(t, h, K2.q_rank, fp8=fp8, big=True) for h in (32, 16, 8) for t in (1, 4, 8) for fp8 in (False, True)),
    *(Case(t, fp8=fp8) for t in (1, 5) for fp8 in (False, True)),
    Case(3, 2, 40, 16, 24, 8, padding=1),
    Case(0),
]
TOL = {"q_full": sums(), "latents.pages": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    w = g.randn(c.H * (c.n + c.r), c.i, scale=c.i**-0.5)
    a, rows = g.randn(c.T, c.i + c.R + c.r, scale=3.0), cache_rows.inputs(g, c.T, c.R, c.r, padding=c.padding)
    weights = cache_rows.weights(
        q_a_norm=g.randn(c.i),
        q_b=Matrix(*linear_fp8.quantize_rows(w)) if c.fp8 else Matrix(w),
        kv_a_norm=rows["kv_norm"],
        w_uk=g.randn(c.H, c.n, c.R, scale=c.n**-0.5),
    )
    placed = {"rotary": rows["rotary"], "latents": rows["latents"]}
    return {"q_a": a[:, : c.i], "ckv": a[:, c.i :], "weights": weights, **placed, "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    q = costs.linear(c.T, c.i, c.H * (c.n + c.r), 1 if c.fp8 else dtype.itemsize)
    return q + mla_absorb_query.cost(mla_absorb_query.Case(c.T, c.H, c.n, c.R, c.r), dtype)


def reference(q_a: Tensor, ckv: Tensor, weights: Attention, rotary: Rotary, latents: Latents, eps: float) -> Tensor:
    w = weights
    q = linear_fp8.matmul_reference(q_a, w.q_b, w.q_a_norm, eps)
    T, H = q_a.shape[0], w.w_uk.shape[0]
    q = q.view(T, H, q.shape[1] // H)
    return mla_absorb_query.reference(q, ckv, w.kv_a_norm, rotary, w.w_uk, latents, eps)


op = Op("mla_project_query", CASES, TOL, inputs, cost, reference, decides=("q_a", "weights", "latents"))


_kernel = build.launcher("mla_project_query.cu", "mla_project_query", "pllppp" + cache_rows.SIGNATURE + "pplp")


def _fits(a: Any, device: torch.device) -> bool | str:
    (T, i), (H, n, R) = a.q_a.shape, a.weights.w_uk.shape
    return build.on_hopper(
        "mla_project_query.cu",
        device,
        (a.q_a.dtype == BFLOAT16, "bfloat16"),
        (1 <= T <= FEW_TOKENS, f"1 to {FEW_TOKENS} tokens"),
        (H >= LEAST_HEADS, f"at least {LEAST_HEADS} heads"),
        (i % 512 == 0 and i <= WIDEST, f"an input width in 512s up to {WIDEST}"),
        (H >= PAIRED_HEADS or i == WIDEST, f"an input width of {WIDEST} below {PAIRED_HEADS} heads"),
        (n == K2.nope and R == K2.latent, "Kimi's head widths"),
        *cache_rows.needs(a.latents.pages),
    )


@op.impl("cuda", when=_fits)
def cuda(q_a: Tensor, ckv: Tensor, weights: Attention, rotary: Rotary, latents: Latents, eps: float) -> Tensor:
    (T, i), H, w_uk, w_q = q_a.shape, len(weights.w_uk), weights.w_uk, weights.q_b.weight
    assert w_q.is_contiguous() and w_uk.is_contiguous(), f"{w_q.stride()=} {w_uk.stride()=}"
    q_a, ckv = aligned(q_a), aligned(ckv)
    out = torch.empty(T, H, K2.latent + K2.rope, dtype=q_a.dtype, device=q_a.device)
    failed = _kernel()(
        q_a.data_ptr(),
        q_a.stride(0),
        i,
        weights.q_a_norm.data_ptr(),
        w_q.data_ptr(),
        address(weights.q_b.scale),
        *cache_rows.arguments(ckv, weights.kv_a_norm, rotary, latents, eps),
        w_uk.data_ptr(),
        out.data_ptr(),
        H,
        build.stream(q_a.device),
    )
    assert not failed, f"mla_project_query does not start: CUDA error {failed}"
    return out


@op.impl("composed")
def composed(q_a: Tensor, ckv: Tensor, weights: Attention, rotary: Rotary, latents: Latents, eps: float) -> Tensor:
    w = weights
    q = linear_fp8.matmul(q_a, w.q_b, w.q_a_norm, eps)
    T, H = q_a.shape[0], w.w_uk.shape[0]
    q = q.view(T, H, q.shape[1] // H)
    return mla_absorb_query.mla_absorb_query(q, ckv, w.kv_a_norm, rotary, w.w_uk, latents, eps)


def check_weights(weights: Attention, r: int, dtype: torch.dtype) -> None:
    """Asserts shapes and types of q_b, the norms and w_uk, for activations of `dtype`."""
    w, (i,), (H, n, R) = weights, weights.q_a_norm.shape, weights.w_uk.shape
    assert w.q_b.weight.shape == (H * (n + r), i) and w.kv_a_norm.shape == (R,), (
        f"{w.q_b.weight.shape=} {w.w_uk.shape=}"
    )
    check_matrix(w.q_b, dtype)
    assert dtype == w.q_a_norm.dtype == w.kv_a_norm.dtype == w.w_uk.dtype, f"{dtype=} {w.w_uk.dtype=}"


def check_matrix(w: Matrix, dtype: torch.dtype) -> None:
    """Asserts that w is dense in the activations' `dtype`, or FP8."""
    if w.scale is None:
        assert w.weight.dtype == dtype, f"{w.weight.dtype=} {dtype=}"
    else:
        assert w.weight.dtype == torch.float8_e4m3fn, f"{w.weight.dtype=}"
        assert w.scale.shape == w.weight.shape[:1] and w.scale.dtype == FLOAT32, f"{w.scale.shape=} {w.scale.dtype=}"


def mla_project_query(
    q_a: Tensor, ckv: Tensor, weights: Attention, rotary: Rotary, latents: Latents, eps: float
) -> Tensor:
    check_weights(weights, ckv.shape[1] - weights.w_uk.shape[2], q_a.dtype)
    assert q_a.shape[1:] == weights.q_a_norm.shape and q_a.dtype == ckv.dtype, f"{q_a.shape=} {q_a.dtype=} {ckv.dtype=}"
    cache_rows.check(q_a.shape[0], ckv, weights.kv_a_norm, rotary, latents)
    return op(q_a, ckv, weights, rotary, latents, eps)
