"""What stands before absorbed attention in all layers but the first: the residual's norm, qkv_a, then
`mla_project_query`.

    y = add_rmsnorm(residual, x, norm, eps);  q_a, ckv = y (w_a * a_scale)^T, rounded to residual's type;
    q_full and cache as in mla_project_query.py, whose eps is inner_eps here

residual [T, D] is updated in place; x [T, D] or float32 [T, P, D] as `add_rmsnorm` has it; norm [D]; w_a [i + R + r, D]
as residual with a_scale None, or float8_e4m3fn with a_scale [i + R + r] float32; q_norm [i]; w_q and q_scale likewise;
the rest as `mla_project_query` has it; q_full [T, H, R + r] as residual.

"cuda" is one launch for up to four tokens of a model of Kimi K2's widths (mla_pre_attention_t1.cu for one,
mla_pre_attention_mma.cu for more), in which the stream of weights does not stop between the products. Its CTAs tell
each other their results through a board, one to a stream: launches of one stream follow each other. All of them must be
on the GPU at once. "composed" is the three ops. What a token gets does not depend on the others within 2 to 4 tokens;
one token alone, and one of more than four, gets other bits, because sums are taken in another order or the normalised y
is rounded.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import cache_rows, mla_project_query
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, rounded, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts import latent_cache
from perilune.ops.linear import linear, linear_fp8
from perilune.ops.pointwise import add_rmsnorm

OUTER = K2.q_rank + K2.latent + K2.rope  # rows of w_a
PROCESSORS = OUTER // 16  # two tiles of rows to a processor
MOST_TOKENS = 4
BOARD_BYTES = 160 << 10


@dataclass(frozen=True)
class Case(Sized):
    T: int
    H: int = NANO.heads
    D: int = NANO.hidden
    i: int = NANO.q_rank
    n: int = K2.nope
    R: int = K2.latent
    r: int = K2.rope
    parts: int = 0  # 0: x has no parts
    fp8: bool = False
    padding: int = 0  # rows at the end without a slot


CASES = [
    *(
        Case(t, K2.heads, K2.hidden, K2.q_rank, parts=9, fp8=fp8, big=True)
        for t in (1, 2, 3, 4, 5, 16)
        for fp8 in (False, True)
    ),
    *(Case(1, K2.heads, K2.hidden, K2.q_rank, parts=p, fp8=fp8, big=True) for p in (0, 1) for fp8 in (False, True)),
    *(Case(t, K2.heads, K2.hidden, K2.q_rank, parts=9, padding=1, big=True) for t in (1, 2, 4)),
    *(Case(t, 48, K2.hidden, K2.q_rank, parts=2, big=True) for t in (1, 3)),
    Case(4, PROCESSORS // 2 - 1, K2.hidden, K2.q_rank, fp8=True, big=True),
    *(Case(t, parts=5, fp8=fp8) for t in (1, 5) for fp8 in (False, True)),
    Case(3, 2, 48, 40, 16, 24, 8, padding=1),
    Case(0),
]
# Where both sides round the same values at different places, each bf16 rounding sets them 2.3e-3 of the norm apart.
TOL = {
    "q_full": {
        FLOAT32: sums()[FLOAT32],
        BFLOAT16: Tol(3e-2, 3e-2, 8e-3, "bf16 rounding of y, q_a, its norm, q and the result"),
    },
    "residual": rounded(),
    "cache": {FLOAT32: sums()[FLOAT32], BFLOAT16: Tol(3e-2, 3e-2, 6e-3, "bf16 rounding of y, ckv and the result")},
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    def weight(o: int, i: int) -> tuple[Tensor, Tensor | None]:
        w = g.randn(o, i, scale=i**-0.5)
        return linear_fp8.quantize_rows(w) if c.fp8 else (w, None)

    w_a, a_scale = weight(c.i + c.R + c.r, c.D)
    w_q, q_scale = weight(c.H * (c.n + c.r), c.i)
    rows = cache_rows.inputs(g, c.T, c.R, c.r, padding=c.padding)
    return {
        "residual": g.randn(c.T, c.D, scale=2.0),
        "x": g.randn(c.T, c.parts, c.D, dtype=FLOAT32) if c.parts else g.randn(c.T, c.D),
        "norm": g.randn(c.D),
        "w_a": w_a,
        "a_scale": a_scale,
        "q_norm": g.randn(c.i),
        "w_q": w_q,
        "q_scale": q_scale,
        "kv_norm": rows["kv_norm"],
        "cos": rows["cos"],
        "sin": rows["sin"],
        "w_uk": g.randn(c.H, c.n, c.R, scale=c.n**-0.5),
        "cache": rows["cache"],
        "slots": rows["slots"],
        "eps": 1e-6,
        "inner_eps": 1e-5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    norm = costs.add_rmsnorm(c.T, c.D, dtype.itemsize)
    a = costs.linear(c.T, c.D, c.i + c.R + c.r, 1 if c.fp8 else dtype.itemsize)
    return norm + a + mla_project_query.cost(mla_project_query.Case(c.T, c.H, c.i, c.n, c.R, c.r, c.fp8), dtype)


def reference(
    residual: Tensor,
    x: Tensor,
    norm: Tensor,
    w_a: Tensor,
    a_scale: Tensor | None,
    q_norm: Tensor,
    w_q: Tensor,
    q_scale: Tensor | None,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    inner_eps: float,
) -> Tensor:
    y = add_rmsnorm.reference(residual, x, norm, eps)
    if a_scale is None:
        qkv = linear.reference(y, w_a, False)
    else:
        qkv = linear_fp8.reference(y, None, w_a, a_scale, eps, False)
    q_a, ckv = qkv.split([q_norm.shape[0], qkv.shape[1] - q_norm.shape[0]], -1)
    return mla_project_query.reference(q_a, q_norm, w_q, q_scale, ckv, kv_norm, cos, sin, w_uk, cache, slots, inner_eps)


op = Op("mla_pre_attention", CASES, TOL, inputs, cost, reference, decides=(0, 12))


@functools.cache
def board(device: torch.device, stream: int, tokens: int) -> Tensor:
    """Where the CTAs of launches of so many tokens tell each other their results: mla_pre_attention_t1.cu."""
    return torch.zeros(BOARD_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def _kernel(few: bool) -> Any:
    name = "mla_pre_attention_mma" if few else "mla_pre_attention_t1"
    return build.function(f"{name}.cu", name, "ppllpfppppp" + "pppp" + "llpf" + "ppp" + few * "l" + "lp")


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _fits(a: Any, device: torch.device) -> bool | str:
    # The number of heads and the types of weights belong to the same model as the sizes that decide.
    (T, D), (H, n, R) = a.residual.shape, a.w_uk.shape
    kimi = D == K2.hidden and a.q_norm.shape[0] == K2.q_rank and n == K2.nope and R == K2.latent
    least, most = mla_project_query.LEAST_HEADS, (PROCESSORS - 1) // 2
    return build.on_hopper(
        "mla_pre_attention_t1.cu" if T == 1 else "mla_pre_attention_mma.cu",
        device,
        (a.residual.dtype == BFLOAT16, "bfloat16"),
        (1 <= T <= MOST_TOKENS, f"1 to {MOST_TOKENS} tokens"),
        (kimi and least <= H <= most, f"Kimi K2's widths and {least} to {most} heads"),
        ((a.a_scale is None) == (a.q_scale is None), "weights of one type"),
        *cache_rows.needs(a.cache),
        (_processors(device) >= PROCESSORS, f"a GPU of at least {PROCESSORS} processors"),
    )


@op.impl("cuda", when=_fits, alone=True)
def cuda(
    residual: Tensor,
    x: Tensor,
    norm: Tensor,
    w_a: Tensor,
    a_scale: Tensor | None,
    q_norm: Tensor,
    w_q: Tensor,
    q_scale: Tensor | None,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    inner_eps: float,
) -> Tensor:
    assert w_a.is_contiguous() and w_q.is_contiguous() and w_uk.is_contiguous(), f"{w_a.stride()=} {w_q.stride()=}"
    x, T, H = x.contiguous(), x.shape[0], w_uk.shape[0]
    out = torch.empty(T, H, K2.latent + K2.rope, dtype=BFLOAT16, device=residual.device)
    stream = torch.cuda.current_stream(residual.device).cuda_stream
    failed = _kernel(T > 1)(
        residual.data_ptr(),
        x.data_ptr(),
        x.shape[1] if x.dim() == 3 else 1,
        x.dim() == 3,
        norm.data_ptr(),
        eps,
        w_a.data_ptr(),
        None if a_scale is None else a_scale.data_ptr(),
        q_norm.data_ptr(),
        w_q.data_ptr(),
        None if q_scale is None else q_scale.data_ptr(),
        *cache_rows.places(kv_norm, cos, sin, cache, slots),
        inner_eps,
        w_uk.data_ptr(),
        out.data_ptr(),
        board(residual.device, stream, T).data_ptr(),
        *((T,) if T > 1 else ()),
        H,
        stream,
    )
    assert not failed, f"mla_pre_attention does not start: CUDA error {failed}"
    return out


@op.impl("composed")
def composed(
    residual: Tensor,
    x: Tensor,
    norm: Tensor,
    w_a: Tensor,
    a_scale: Tensor | None,
    q_norm: Tensor,
    w_q: Tensor,
    q_scale: Tensor | None,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    inner_eps: float,
) -> Tensor:
    y = add_rmsnorm.add_rmsnorm(residual, x, norm, eps)
    qkv = linear.linear(y, w_a) if a_scale is None else linear_fp8.linear_fp8(y, None, w_a, a_scale)
    q_a, ckv = qkv.split([q_norm.shape[0], qkv.shape[1] - q_norm.shape[0]], -1)
    return mla_project_query.mla_project_query(
        q_a, q_norm, w_q, q_scale, ckv, kv_norm, cos, sin, w_uk, cache, slots, inner_eps
    )


def mla_pre_attention(
    residual: Tensor,
    x: Tensor,
    norm: Tensor,
    w_a: Tensor,
    a_scale: Tensor | None,
    q_norm: Tensor,
    w_q: Tensor,
    q_scale: Tensor | None,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    inner_eps: float,
) -> Tensor:
    (T, D), (i,), (H, n, R) = residual.shape, q_norm.shape, w_uk.shape
    r = 2 * cos.shape[1]
    fits = x.dtype == residual.dtype if x.dim() == 2 else x.dtype == FLOAT32
    assert fits and x.shape[0] == T and x.shape[-1] == D and residual.is_contiguous(), f"{residual.shape=} {x.shape=}"
    assert w_a.shape == (i + R + r, D) and w_q.shape == (H * (n + r), i), f"{w_a.shape=} {w_q.shape=} {w_uk.shape=}"
    for w, scale in ((w_a, a_scale), (w_q, q_scale)):
        if scale is None:
            assert w.dtype == residual.dtype, f"{w.dtype=} {residual.dtype=}"
        else:
            assert w.dtype == latent_cache.E4M3 and scale.shape == w.shape[:1] and scale.dtype == FLOAT32, f"{w.dtype=}"
    types = {t.dtype for t in (residual, norm, q_norm, kv_norm, w_uk)}
    assert len(types) == 1 and norm.shape == (D,), f"{types=} {norm.shape=}"
    cache_rows.check_places(T, R, r, kv_norm, cos, sin, cache, slots)
    return op(
        residual, x, norm, w_a, a_scale, q_norm, w_q, q_scale, kv_norm, cos, sin, w_uk, cache, slots, eps, inner_eps
    )
