"""Absorbed MLA and the output projection: y = o w^T, with o [T, H v] as `mla_decode` gives it.

q_full [T, H, R + r], cache, tables, query_start, context, scale and w_uv [H, R, v] are those of `mla_decode`, and so is
what it says on reading without waiting. w [D, H v] as q_full, or e4m3 with w_scale [D] float32, by which the sums are
multiplied; then uv_fp8 [H, R, v] e4m3 and uv_scale [H, v] float32 are the very numbers of w_uv, else None; y [T, D] as
q_full. The latent output and o are rounded to q_full's type; sums are fp32, rounded once.

"cuda" is for one token: attention's launch, and one for all that follows (mla_decode_output_t1.cu), which reads w and
w_uv from before attention has ended, or has its queries if the table is narrow (split_kv_short.cuh): so a token's last
bits depend on the table's width too. "composed" is the ops one by one.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import mla_decode
from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make, Tol
from perilune.ops.harness.registry import Op
from perilune.ops.layouts import latent_cache
from perilune.ops.linear import linear, linear_fp8

HEADS = (32, 64)
MOST_PROCESSORS = 160
LEAST_ROWS = 32  # of w, for each processor


@dataclass(frozen=True, kw_only=True)
class Case(mla_decode.Case):
    D: int
    fp8: bool = False


def _one(context: int, **other: Any) -> Case:
    """One token, the sizes of Kimi K2."""
    return Case(
        counts=(1,), contexts=(context,), **{"H": K2.heads, "block_size": 64, "D": K2.hidden, "big": True} | other
    )


CASES = [
    *(_one(c, fp8=fp8) for c in (1, 64, 500, 1024, 2000, 10240, 102400) for fp8 in (False, True)),
    *(_one(300, H=32, block_size=16, fp8=fp8) for fp8 in (False, True)),
    *(_one(70, D=4232, block_size=16, fp8=fp8) for fp8 in (False, True)),
    *(_one(1030, packed=True, fp8=fp8) for fp8 in (False, True)),
    *(_one(c, fp8=c % 2 == 0) for c in (16, 47, 48, 49, 97, 1472, 1473)),  # tables of more are wide
    *(_one(c, H=32, block_size=16) for c in (48, 1999, 3152, 3153)),
    _one(1500, scale=200.0),
    _one(0),
    _one(130, H=16),
    _one(300, block_size=8),
    Case(counts=(0, 1, 0), contexts=(0, 777, 0), H=K2.heads, D=K2.hidden, big=True),
    Case(counts=(2, 1), contexts=(40, 100), H=K2.heads, D=K2.hidden, big=True),
    Case(counts=(1,), contexts=(256,), D=384),
    Case(counts=(3, 1, 0, 5), contexts=(3, 16, 9, 17), H=3, D=40),
    Case(counts=(1, 2), contexts=(20, 30), H=4, R=64, r=16, v=16, D=64, fp8=True, rows=1),
    Case(counts=(), contexts=(), H=2, R=8, r=8, v=8, D=8),
]  # fmt: skip
TOL = {
    "y": {
        FLOAT32: mla_decode.TOL["o"][FLOAT32],
        BFLOAT16: Tol(1.6e-2, 1.6e-2, 8e-3, "bf16 rounding of probabilities, ranges, the latent output, o and y"),
    }
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    args = mla_decode.inputs(c, g)
    w, w_scale, uv_fp8, uv_scale = g.randn(c.D, c.H * c.v, scale=(c.H * c.v) ** -0.5), None, None, None
    if c.fp8:
        w, w_scale = linear_fp8.quantize_rows(w)
        w_uv = args["w_uv"] * torch.exp2(g.randn(c.H, 1, c.v)).to(w_scale.dtype)
        uv_fp8, uv_scale = linear_fp8.quantize_exactly(w_uv, 1)
        args["w_uv"] = (uv_fp8.float() * uv_scale).to(args["w_uv"].dtype)
        uv_scale = uv_scale.squeeze(1)
    return {**args, "uv_fp8": uv_fp8, "uv_scale": uv_scale, "w": w, "w_scale": w_scale}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    T = sum(c.counts)
    rest = mla_decode.cost(c, dtype) + costs.linear(T, c.H * c.v, c.D, 1 if c.fp8 else dtype.itemsize)
    return rest + costs.Cost(0, (1 - dtype.itemsize) * c.H * c.R * c.v if c.fp8 and T == 1 else 0)


def reference(
    q_full: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    scale: float,
    w_uv: Tensor,
    uv_fp8: Tensor | None,
    uv_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
) -> Tensor:
    o = mla_decode.reference(q_full, cache, tables, query_start, context, scale, w_uv).flatten(1)
    if w_scale is None:
        return linear.reference(o, w, wide=False)
    return linear_fp8.reference(o, None, w, w_scale, 0.0, wide=False)


op = Op("mla_decode_output", CASES, TOL, inputs, cost, reference, decides=("q_full", "cache", "w"))


@functools.cache
def _kernel() -> Any:
    return build.function("mla_decode_output_t1.cu", "mla_decode_output", "p" * 12 + "l" * 6 + "p")


def _fits(a: Any, device: torch.device) -> bool | str:
    (T, H, _), D = a.q_full.shape, a.w.shape[0]
    found = build.on_hopper(
        "mla_decode_output_t1.cu",
        device,
        (T == 1, "one token"),
        *mla_decode.needs(a.q_full, a.cache),
        (H in HEADS, f"{' or '.join(map(str, HEADS))} heads"),
        (D % 8 == 0, "an output width in 8s"),
    )
    if found is not True:
        return found
    processors = mla_decode.processors(device)
    return build.on_hopper(
        "mla_decode.cu",
        device,
        (H <= processors <= MOST_PROCESSORS, f"a processor for each head, and at most {MOST_PROCESSORS}"),
        (D >= LEAST_ROWS * processors, f"{LEAST_ROWS} outputs for each processor"),
    )


def launch(
    q_full: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    scale: float,
    w_uv: Tensor,
    uv_fp8: Tensor | None,
    uv_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    board: Tensor,
    y: Tensor | None,
    residual: Tensor | None = None,
    fresh: Tensor | None = None,
) -> None:
    """Both launches of one token. The second one writes `y` [1, D], or if that is None adds to `residual` [1, D] and
    hands the sums over by `fresh`; `board` is its own. Whoever writes before it has ended must have his memory before
    this is called: what it reads besides is free again afterwards."""
    (_, H, _), D, device = q_full.shape, w.shape[0], q_full.device
    assert w_uv.shape == (H, K2.latent, K2.value) and w_uv.is_contiguous(), f"{w_uv.shape=} {w_uv.stride()=}"
    assert all(t.is_contiguous() for t in (w, uv_fp8, uv_scale) if t is not None), f"{w.stride()=}"
    tables, query_start, context = tables.contiguous(), query_start.contiguous(), context.contiguous()
    partials, weights, least = mla_decode.attend_one(q_full, cache, tables, query_start, context, scale)

    def at(t: Tensor | None) -> int | None:
        return None if t is None else t.data_ptr()

    failed = _kernel()(
        partials.data_ptr(),
        weights.data_ptr(),
        query_start.data_ptr(),
        context.data_ptr(),
        at(w_uv if uv_fp8 is None else uv_fp8),
        at(uv_scale),
        w.data_ptr(),
        at(w_scale),
        board.data_ptr(),
        at(y),
        at(residual),
        at(fresh),
        len(partials),
        len(context),
        H,
        D,
        least,
        mla_decode.processors(device),
        torch.cuda.current_stream(device).cuda_stream,
    )
    assert not failed, f"mla_decode_output does not start: CUDA error {failed}"


@op.impl("cuda", when=_fits, alone=True)
def cuda(
    q_full: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    scale: float,
    w_uv: Tensor,
    uv_fp8: Tensor | None,
    uv_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
) -> Tensor:
    y = torch.empty(1, w.shape[0], dtype=q_full.dtype, device=q_full.device)
    H = q_full.shape[1]
    board = workspace.current(q_full.device).zeros(("mla_decode_output", H), H * K2.value + 2)
    launch(q_full, cache, tables, query_start, context, scale, w_uv, uv_fp8, uv_scale, w, w_scale, board, y)
    return y


@op.impl("composed")
def composed(
    q_full: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    scale: float,
    w_uv: Tensor,
    uv_fp8: Tensor | None,
    uv_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
) -> Tensor:
    o = mla_decode.mla_decode(q_full, cache, tables, query_start, context, scale, w_uv).flatten(1)
    return linear.linear(o, w) if w_scale is None else linear_fp8.linear_fp8(o, None, w, w_scale)


def check(
    q_full: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    w_uv: Tensor,
    uv_fp8: Tensor | None,
    uv_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
) -> None:
    mla_decode.check(q_full, cache, tables, query_start, context, w_uv)
    assert w.shape[1] == w_uv.shape[0] * w_uv.shape[2], f"{w.shape=} {w_uv.shape=}"
    if w_scale is None:
        assert w.dtype == q_full.dtype and uv_fp8 is None and uv_scale is None, f"{w.dtype=} {q_full.dtype=}"
    else:
        assert uv_fp8 is not None and uv_fp8.shape == w_uv.shape and uv_fp8.dtype == latent_cache.E4M3, f"{w_uv.shape=}"
        assert uv_scale is not None and uv_scale.shape == w_uv.shape[::2] and uv_scale.dtype == FLOAT32
        assert w.dtype == latent_cache.E4M3 and w_scale.shape == w.shape[:1] and w_scale.dtype == FLOAT32, (
            f"{w.dtype=} {w_scale.shape=} {w_scale.dtype=}"
        )


def mla_decode_output(
    q_full: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    scale: float,
    w_uv: Tensor,
    uv_fp8: Tensor | None,
    uv_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
) -> Tensor:
    check(q_full, cache, tables, query_start, context, w_uv, uv_fp8, uv_scale, w, w_scale)
    return op(q_full, cache, tables, query_start, context, scale, w_uv, uv_fp8, uv_scale, w, w_scale)
