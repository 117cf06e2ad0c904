"""Absorbed MLA and the output projection: y = o w^T, with o [T, H v] as `mla_decode` gives it.

q_full [T, H, R + r], pages, span and scale are as in `mla_decode`, with the same rule on reads before the PDL wait. Of
weights: w_uv [H, R, v] is W_UV; o [D, H v] is w, dense in q_full's type, or FP8. With an FP8 o, uv_fp8 (weight
[H, R, v] e4m3, scale [H, v] float32) has the same values as w_uv; otherwise it is None. y [T, D] as q_full. The latent
output and o are rounded to q_full's type; sums are fp32, rounded once.

"cuda" and "cuda_mma" are two launches: attention, then everything else. The second loads w and w_uv while attention
runs; if one token's block table is narrow, even while attention waits for its queries (split_kv_short.cuh). A narrow
table also changes the split into ranges, so a result's last bits depend on the table's width. "cuda"
(mla_decode_output_t1.cu) takes one token: of 8 to 64 heads in bf16, of 32 or 64 in FP8. "cuda_mma"
(mla_decode_output_mma.cu) takes 1 to 4 tokens of 8 or 16 heads in FP8, 2 to 4 of 32 or 64. "composed" calls the ops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import cache_rows, mla_decode, mla_project_query
from perilune.ops.exchange import peers
from perilune.ops.exchange.peers import Peers
from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make, Tol
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.layouts.operands import Attention, Matrix, Span
from perilune.ops.linear import linear_fp8

HEADS = (8, 16, 32, 64)
MOST_PROCESSORS = 160
LEAST_ROWS = 32  # min rows of o per SM
MMA_HEADS = (8, 16)  # heads for which "cuda_mma" takes one token too
MMA_TOKENS = 4
OWNERS, MOST_TILES = 16, 8  # "cuda_mma": CTAs that compute values; max tiles of 8 rows of o per other CTA


@dataclass(frozen=True, kw_only=True)
class Case(mla_decode.Case):
    D: int
    fp8: bool = False


def _one(context: int, **other: Any) -> Case:
    """One token, the sizes of Kimi K2."""
    usual: dict[str, Any] = {"counts": (1,), "contexts": (context,), "H": K2.heads, "D": K2.hidden}
    return Case(**usual | {"block_size": 64, "big": True} | other)


CASES = [
    *(_one(c, fp8=fp8) for c in (1, 64, 500, 1024, 2000, 10240, 102400) for fp8 in (False, True)),
    *(_one(300, H=32, block_size=16, fp8=fp8) for fp8 in (False, True)),
    *(_one(70, D=4232, block_size=16, fp8=fp8) for fp8 in (False, True)),
    *(_one(1030, packed=True, fp8=fp8) for fp8 in (False, True)),
    *(_one(c, fp8=c % 2 == 0) for c in (16, 47, 48, 49, 97, 1472, 1473)),  # up to 1,472 positions the table is narrow
    *(_one(c, H=32, block_size=16) for c in (48, 1999, 3152, 3153)),
    _one(1500, scale=200.0),
    _one(0),
    *(_one(c, H=16, fp8=fp8) for c in (1, 130, 1024, 10240) for fp8 in (False, True)),
    *(_one(c, H=8, fp8=fp8) for c in (1, 130, 1024, 10240) for fp8 in (False, True)),
    *(_one(c, H=16, packed=True, fp8=True) for c in (1, 40, 1024, 6100, 10000, 14001, 24000)),
    *(_one(1030, H=8, packed=True, block_size=16, fp8=fp8) for fp8 in (False, True)),
    _one(9000, H=16, packed=True, fp8=True, scale=200.0),
    _one(130, H=4),
    _one(300, block_size=8),
    *(
        _one(1, counts=counts, contexts=contexts, H=H, fp8=True)
        for H in HEADS
        for counts, contexts in (
            ((1, 1, 1, 1), (1024, 700, 5, 1000)),
            ((4,), (1024,)),
            ((4,), (10240,)),
            ((1, 2), (40, 3000)),
            ((1, 0, 1), (300, 0, 1)),
        )
    ),
    _one(130, H=16, D=384, fp8=True, rows=2),
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
    weights, scale = output_weights(args.pop("w_uv"), c.D, c.fp8, g), args.pop("scale")
    return {**args, "weights": weights, "scale": scale}


def output_weights(w_uv: Tensor, D: int, fp8: bool, g: Make) -> Attention:
    """Test weights with a random o. In FP8, w_uv is replaced by values that e4m3 with scales represents exactly."""
    H, _, v = w_uv.shape
    o, uv_fp8 = Matrix(g.randn(D, H * v, scale=(H * v) ** -0.5)), None
    if fp8:
        o = Matrix(*linear_fp8.quantize_rows(o.weight))
        q, uv_scale = linear_fp8.quantize_exactly(w_uv * torch.exp2(g.randn(H, 1, v)).to(FLOAT32), 1)
        w_uv, uv_fp8 = (q.float() * uv_scale).to(w_uv.dtype), Matrix(q, uv_scale.squeeze(1))
    return cache_rows.weights(w_uv=w_uv, uv_fp8=uv_fp8, o=o)


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    T = sum(c.counts)
    rest = mla_decode.cost(c, dtype) + costs.linear(T, c.H * c.v, c.D, 1 if c.fp8 else dtype.itemsize)
    return rest + costs.Cost(0, (1 - dtype.itemsize) * c.H * c.R * c.v if c.fp8 and T <= MMA_TOKENS else 0)


def reference(q_full: Tensor, pages: Tensor, span: Span, weights: Attention, scale: float) -> Tensor:
    o = mla_decode.reference(q_full, pages, span, weights.w_uv, scale)
    return linear_fp8.matmul_reference(o.flatten(1), weights.o)


op = Op("mla_decode_output", CASES, TOL, inputs, cost, reference, decides=("q_full", "pages", "weights"))


_kernel = build.launcher("mla_decode_output_t1.cu", "mla_decode_output", "p" * 12 + "l" * 8 + "pp")
_mma = build.launcher("mla_decode_output_mma.cu", "mla_decode_output_mma", "p" * 12 + "l" * 9 + "pp")


@dataclass(frozen=True, slots=True)
class Ranges:
    """Outputs and log-sum-exps (base 2) that the second launch combines: of a context's ranges (`attend`), or of ranks'
    parts of a sharded KV cache (mla_merge_output.py)."""

    outputs: Tensor
    weights: Tensor  # log-sum-exps
    count: int  # CTAs of attention, or ranks
    steps: tuple[int, int] = (0, 0)  # elements between ranks' outputs, and between their log-sum-exps; 0: no ranks
    query_start: Tensor | None = None
    context: Tensor | None = None
    least: int = 0  # as from `mla_decode.attend_one`


def attend(q_full: Tensor, pages: Tensor, span: Span, scale: float) -> Ranges:
    """Launches attention. Returns what the second launch combines."""
    _, query_start, context = span.contiguous()
    if q_full.shape[0] == 1:
        partials, shares, least = mla_decode.attend_one(q_full, pages, span, scale)
    else:
        partials, shares = mla_decode.attend(q_full, pages, span, scale, None, None)
        least = mla_decode.LEAST
    return Ranges(partials, shares, len(partials), (0, 0), query_start, context, least)


def fits_mma(counts: Sequence[int], weights: Attention, device: torch.device, *needs: tuple[bool, str]) -> bool | str:
    """Whether `launch` with mma=True takes counts = (tokens, heads) and `needs` hold: True, or the first unmet need."""
    (T, H), D, processors = counts, len(weights.o.weight), build.sm_count(device)
    return _fits(
        "mla_decode_output_mma.cu",
        H,
        D,
        device,
        (1 <= T <= MMA_TOKENS, f"1 to {MMA_TOKENS} tokens"),
        *needs,
        (H in (MMA_HEADS if T == 1 else HEADS), f"{', '.join(map(str, MMA_HEADS))} heads, more from 2 tokens on"),
        (weights.uv_fp8 is not None, "FP8 weights"),
        (D <= MOST_TILES * 8 * (processors - OWNERS), f"at most {MOST_TILES * 8} outputs for a processor"),
    )


def fits(counts: Sequence[int], weights: Attention, device: torch.device, *needs: tuple[bool, str]) -> bool | str:
    """Whether `launch` takes counts = (tokens, heads) and `needs` hold: True, or the first unmet need."""
    (T, H), D, processors = counts, len(weights.o.weight), build.sm_count(device)
    return _fits(
        "mla_decode_output_t1.cu",
        H,
        D,
        device,
        (T == 1, "one token"),
        *needs,
        (H in HEADS, f"{', '.join(map(str, HEADS))} heads"),
        (H not in MMA_HEADS or weights.uv_fp8 is None, "bfloat16 weights for 8 or 16 heads"),
        (D >= LEAST_ROWS * processors, f"{LEAST_ROWS} outputs for each processor"),
    )


def _fits(source: str, H: int, D: int, device: torch.device, *needs: tuple[bool, str]) -> bool | str:
    processors = build.sm_count(device)
    found = build.on_hopper(
        source,
        device,
        *needs,
        (D % 8 == 0, "an output width in 8s"),
        (H <= processors <= MOST_PROCESSORS, f"a processor for each head, and at most {MOST_PROCESSORS}"),
    )
    return build.on_hopper("mla_decode.cu", device) if found is True else found


def mma_mailbox(H: int, T: int) -> int:
    """32-bit words of the mailbox of `launch` with mma=True. T = 1 and T > 1 need separate mailboxes."""
    return (1 if T == 1 else MMA_TOKENS) * H * K2.value + MOST_PROCESSORS


def launch(
    ranges: Ranges,
    T: int,
    weights: Attention,
    mailbox: Tensor,
    out: Tensor | tuple[Tensor, Tensor, Peers | None],
    mma: bool = False,
) -> None:
    """The launch after attention: combines ranges, multiplies by W_UV and o.

    out      y [T, D]; or (residual [1, D], fresh [D] int32, peers): y, summed over ranks if there are peers, is added
             to the residual, and the new residual is also published in the mailbox `fresh`
    mailbox  through which CTAs of this launch exchange values
    mma      launches mla_decode_output_mma.cu

    Before calling `attend`, allocate the outputs of all later kernels that may write while this launch runs: when this
    function returns, the allocator may reuse the memory of tensors that the two launches still read.
    """
    w, device = weights, ranges.outputs.device
    H = len(w.w_uv)
    assert w.w_uv.shape == (H, K2.latent, K2.value), f"{w.w_uv.shape=}"
    w_uv, uv_scale = (w.w_uv, None) if w.uv_fp8 is None else (w.uv_fp8.weight, w.uv_fp8.scale)
    assert w.w_uv.is_contiguous() and w_uv.is_contiguous() and w.o.weight.is_contiguous(), f"{w.o.weight.stride()=}"
    assert uv_scale is None or uv_scale.is_contiguous(), f"{uv_scale.stride()=}"
    y, (residual, fresh, others) = (out, (None, None, None)) if isinstance(out, Tensor) else (None, out)
    failed = (_mma() if mma else _kernel())(
        *addresses(ranges.outputs, ranges.weights, ranges.query_start, ranges.context),
        *addresses(w_uv, uv_scale, w.o.weight, w.o.scale, mailbox, y, residual, fresh),
        *ranges.steps,
        ranges.count,
        0 if ranges.context is None else len(ranges.context),
        *([T] if mma else []),
        H,
        len(w.o.weight),
        ranges.least,
        build.sm_count(device),
        peers.table(others),
        build.stream(device),
    )
    assert not failed, f"mla_decode_output does not start: CUDA error {failed}"


def run(read: Callable[[], Ranges], T: int, weights: Attention, device: torch.device, mma: bool) -> Tensor:
    """y [T, D]. read() launches attention, if needed, and returns the ranges; y is allocated before (see `launch`)."""
    H = len(weights.w_uv)
    y = torch.empty(T, len(weights.o.weight), dtype=BFLOAT16, device=device)
    words = mma_mailbox(H, T) if mma else H * K2.value + 2
    mailbox = workspace.current(device).zeros((f"mla_decode_output{'.mma' if mma else ''}", H, words), words)
    launch(read(), T, weights, mailbox, y, mma)
    return y


@op.impl(
    "cuda_mma",
    when=lambda a, device: fits_mma(a.q_full.shape[:2], a.weights, device, *mla_decode.needs(a.q_full, a.pages)),
    alone=True,
    waits=("mla_decode_output_mma.cu",),
)
def cuda_mma(q_full: Tensor, pages: Tensor, span: Span, weights: Attention, scale: float) -> Tensor:
    return run(lambda: attend(q_full, pages, span, scale), len(q_full), weights, q_full.device, True)


@op.impl(
    "cuda",
    when=lambda a, device: fits(a.q_full.shape[:2], a.weights, device, *mla_decode.needs(a.q_full, a.pages)),
    alone=True,
    waits=("mla_decode_output_t1.cu",),
)
def cuda(q_full: Tensor, pages: Tensor, span: Span, weights: Attention, scale: float) -> Tensor:
    return run(lambda: attend(q_full, pages, span, scale), 1, weights, q_full.device, False)


@op.impl("composed")
def composed(q_full: Tensor, pages: Tensor, span: Span, weights: Attention, scale: float) -> Tensor:
    return linear_fp8.matmul(mla_decode.mla_decode(q_full, pages, span, weights.w_uv, scale).flatten(1), weights.o)


def check(q_full: Tensor, pages: Tensor, span: Span, weights: Attention) -> None:
    mla_decode.check(q_full, pages, span, weights.w_uv)
    check_weights(weights, q_full.dtype)


def check_weights(w: Attention, dtype: torch.dtype) -> None:
    (H, R, v), uv = w.w_uv.shape, w.uv_fp8
    assert w.o.weight.shape[1] == H * v, f"{w.o.weight.shape=} {w.w_uv.shape=}"
    mla_project_query.check_matrix(w.o, dtype)
    if w.o.scale is None:
        assert uv is None, "W_UV in FP8 goes with o in FP8"
    else:
        assert uv is not None and uv.format == "fp8" and uv.weight.shape == (H, R, v), f"{w.w_uv.shape=}"
        assert uv.scale is not None and uv.scale.shape == (H, v) and uv.scale.dtype == FLOAT32, f"{w.w_uv.shape=}"


def mla_decode_output(q_full: Tensor, pages: Tensor, span: Span, weights: Attention, scale: float) -> Tensor:
    check(q_full, pages, span, weights)
    return op(q_full, pages, span, weights, scale)
