"""From the end of one layer to absorbed attention of the next one: the residual's norm, qkv_a, then
`mla_project_query`.

    y = add_rmsnorm(residual, x, norm);  q_a, ckv = y qkv_a^T, rounded to residual's type;
    q_full and new cache rows as in mla_project_query.py, with inner_eps for its eps

residual [T, D] is updated in place. x: [T, D] or float32 [T, P, D] as in `add_rmsnorm`; if the norm has peers, this
rank's partial output as in `exchange_add_rmsnorm`. Of weights: qkv_a [i + R + r, D] dense or FP8, and the fields that
`mla_project_query` reads. rotary and latents as there; q_full [T, H, R + r] as residual.

"cuda" is one launch for up to four tokens of Kimi K2's widths (mla_pre_attention_t1.cu for one token,
mla_pre_attention_mma.cu for more). All of its CTAs must be co-resident on the GPU. "composed" is the three ops. With 2
to 4 tokens, a token's result does not depend on the others. With 1 or more than 4 its bits differ, because sums are
taken in another order or the normalised y is rounded.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import cache_rows, mla_project_query
from perilune.ops.exchange import exchange_add_rmsnorm, peers
from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, rounded, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.layouts.operands import Attention, Latents, Matrix, Norm, Rotary
from perilune.ops.linear import linear_fp8
from perilune.ops.pointwise import add_rmsnorm

OUTER = K2.q_rank + K2.latent + K2.rope  # rows of qkv_a
PROCESSORS = OUTER // 16  # SMs that "cuda" needs: each computes two tiles of 8 rows
MOST_TOKENS = 4
BOARD_BYTES = 224 << 10  # size of a mailbox
MOST_SPLIT_HEADS = 32  # max heads of a rank with peers, where four or eight CTAs share a head


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
    ranks: int = 0  # number of ranks over which x is summed; 0: x is whole


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
    *(
        Case(t, K2.heads // n, K2.hidden, K2.q_rank, parts=9, fp8=fp8, ranks=n, big=True)
        for t in (1, 2, 3, 4)
        for n, fp8 in ((2, False), (4, True), (8, t % 2 == 0))
    ),
    *(Case(t, 16, K2.hidden, K2.q_rank, ranks=4, padding=t > 1, big=True) for t in (1, 3, 5)),
    *(Case(t, parts=5, fp8=fp8, ranks=2 * fp8) for t in (1, 5) for fp8 in (False, True)),
    Case(3, 2, 48, 40, 16, 24, 8, padding=1),
    Case(0),
]
# Two implementations round the same values at different places. Each bf16 rounding adds an error of 2.3e-3 of the norm.
TOL = {
    "q_full": {
        FLOAT32: sums()[FLOAT32],
        BFLOAT16: Tol(3e-2, 3e-2, 8e-3, "bf16 rounding of y, q_a, its norm, q and the result"),
    },
    "residual": rounded(),
    "latents.pages": {
        FLOAT32: sums()[FLOAT32],
        BFLOAT16: Tol(3e-2, 3e-2, 6e-3, "bf16 rounding of y, ckv and the result"),
    },
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    def matrix(o: int, i: int) -> Matrix:
        w = g.randn(o, i, scale=i**-0.5)
        return Matrix(*linear_fp8.quantize_rows(w)) if c.fp8 else Matrix(w)

    qkv_a, q_b = matrix(c.i + c.R + c.r, c.D), matrix(c.H * (c.n + c.r), c.i)
    rows = cache_rows.inputs(g, c.T, c.R, c.r, padding=c.padding)
    residual = g.randn(c.T, c.D, scale=2.0)
    x, norm = g.randn(c.T, c.parts, c.D, dtype=FLOAT32) if c.parts else g.randn(c.T, c.D), g.randn(c.D)
    others = peers.loopback(c.ranks, g.device, 1.0) if c.ranks else None
    q_a_norm, w_uk = g.randn(c.i), g.randn(c.H, c.n, c.R, scale=c.n**-0.5)
    return {
        "residual": residual,
        "x": x,
        "norm": Norm(norm, 1e-6, others),
        "weights": cache_rows.weights(qkv_a=qkv_a, q_a_norm=q_a_norm, q_b=q_b, kv_a_norm=rows["kv_norm"], w_uk=w_uk),
        "rotary": rows["rotary"],
        "latents": rows["latents"],
        "inner_eps": 1e-5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    norm = costs.add_rmsnorm(c.T, c.D, dtype.itemsize)
    a = costs.linear(c.T, c.D, c.i + c.R + c.r, 1 if c.fp8 else dtype.itemsize)
    return norm + a + mla_project_query.cost(mla_project_query.Case(c.T, c.H, c.i, c.n, c.R, c.r, c.fp8), dtype)


def reference(
    residual: Tensor, x: Tensor, norm: Norm, weights: Attention, rotary: Rotary, latents: Latents, inner_eps: float
) -> Tensor:
    qkv = linear_fp8.matmul_reference(exchange_add_rmsnorm.add_norm_reference(residual, x, norm), weights.qkv_a)
    q_a, ckv = qkv.tensor_split((len(weights.q_a_norm),), -1)
    return mla_project_query.reference(q_a, ckv, weights, rotary, latents, inner_eps)


op = Op("mla_pre_attention", CASES, TOL, inputs, cost, reference, decides=("residual", "norm", "weights", "latents"))


@functools.cache
def _kernel(few: bool) -> Any:
    name = "mla_pre_attention_mma" if few else "mla_pre_attention_t1"
    return build.function(f"{name}.cu", name, "ppllpfppppp" + "pppp" + "llpf" + "ppp" + few * "l" + "lpp")


def _fits(a: Any, device: torch.device) -> bool | str:
    (T, D), (H, n, R) = a.residual.shape, a.weights.w_uk.shape
    kimi = D == K2.hidden and len(a.weights.q_a_norm) == K2.q_rank and n == K2.nope and R == K2.latent
    least, most = mla_project_query.LEAST_HEADS, (PROCESSORS - 1) // 2
    return build.on_hopper(
        "mla_pre_attention_t1.cu" if T == 1 else "mla_pre_attention_mma.cu",
        device,
        (a.residual.dtype == BFLOAT16, "bfloat16"),
        (1 <= T <= MOST_TOKENS, f"1 to {MOST_TOKENS} tokens"),
        (kimi and least <= H <= most, f"Kimi K2's widths and {least} to {most} heads"),
        (a.weights.qkv_a.format == a.weights.q_b.format, "weights of one type"),
        *cache_rows.needs(a.latents.pages),
        *peers.needs(a.norm.peers),
        (a.norm.peers is None or H <= MOST_SPLIT_HEADS, f"at most {MOST_SPLIT_HEADS} heads of a rank among others"),
        (build.sm_count(device) >= PROCESSORS, f"a GPU of at least {PROCESSORS} processors"),
    )


@op.impl("cuda", when=_fits, alone=True, waits=("mla_pre_attention_t1.cu", "mla_pre_attention_mma.cu"))
def cuda(
    residual: Tensor, x: Tensor, norm: Norm, weights: Attention, rotary: Rotary, latents: Latents, inner_eps: float
) -> Tensor:
    w, a, q = weights, weights.qkv_a, weights.q_b
    assert all(t.is_contiguous() for t in (a.weight, q.weight, w.w_uk)), f"{a.weight.stride()=} {q.weight.stride()=}"
    x, T, H = x.contiguous(), x.shape[0], len(w.w_uk)
    out = torch.empty(T, H, K2.latent + K2.rope, dtype=BFLOAT16, device=residual.device)
    memory = workspace.current(residual.device)
    failed = _kernel(T > 1)(
        residual.data_ptr(),
        x.data_ptr(),
        x.shape[1] if x.dim() == 3 else 1,
        x.dim() == 3,
        norm.weight.data_ptr(),
        norm.eps,
        *addresses(a.weight, a.scale, w.q_a_norm, q.weight, q.scale),
        *cache_rows.places(w.kv_a_norm, rotary, latents),
        inner_eps,
        w.w_uk.data_ptr(),
        out.data_ptr(),
        memory.zeros(("mla_pre_attention", T, H), BOARD_BYTES, torch.uint8).data_ptr(),
        *((T,) if T > 1 else ()),
        H,
        peers.table(norm.peers),
        memory.stream,
    )
    assert not failed, f"mla_pre_attention does not start: CUDA error {failed}"
    return out


@op.impl("composed")
def composed(
    residual: Tensor, x: Tensor, norm: Norm, weights: Attention, rotary: Rotary, latents: Latents, inner_eps: float
) -> Tensor:
    qkv = linear_fp8.matmul(exchange_add_rmsnorm.add_norm(residual, x, norm), weights.qkv_a)
    q_a, ckv = qkv.tensor_split((len(weights.q_a_norm),), -1)
    return mla_project_query.mla_project_query(q_a, ckv, weights, rotary, latents, inner_eps)


def mla_pre_attention(
    residual: Tensor, x: Tensor, norm: Norm, weights: Attention, rotary: Rotary, latents: Latents, inner_eps: float
) -> Tensor:
    (T, D), a, r = residual.shape, weights.qkv_a, 2 * rotary.cos.shape[1]
    add_rmsnorm.check(residual, x, norm.weight)
    outputs = weights.q_a_norm.shape[0] + weights.kv_a_norm.shape[0] + r
    assert a.weight.shape == (outputs, D), f"{a.weight.shape=} {outputs=} {D=}"
    mla_project_query.check_matrix(a, residual.dtype)
    mla_project_query.check_weights(weights, r, residual.dtype)
    cache_rows.check_places(T, r, weights.kv_a_norm, rotary, latents)
    return op(residual, x, norm, weights, rotary, latents, inner_eps)
