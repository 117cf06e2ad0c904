"""MLA attention over the latent cache for few tokens a request, W_UV included: `mla_absorbed`, then `per_head_matmul`.

o[t, h] = (softmax(scale * q_full[t, h] . (c, k_pe)) c) w_uv[h], over the positions up to the token's own.
q_full [T, H, R + r] contiguous, as `mla_absorb_query` makes it; pages [N, block_size, R + r] contiguous, of any float
type or packed (latent_cache.py); span: tables [B, M], query_start [B + 1] and context [B] int32; a request's rows are
the last positions of its context, already in the pages; w_uv [H, R, v]; o [T, H, v] as q_full.
A request with context 0 is padding, as are rows from query_start[B] on: they get zeros, and nothing is read for them.
Positions outside a request's context are never used: they may hold anything, nan included.
Softmax and sums in fp32; the latent output is rounded before the product with w_uv. "cuda" also rounds probabilities,
and the outputs of the ranges it splits a long context into.

"cuda" is two launches (see mla_decode.cu). Their grids depend only on T, B and the GPU, as a CUDA graph needs. The
split of contexts into ranges, and whether four CTAs share a tile of query rows (short contexts), depend on the contexts
of the whole batch. So a token's last bits depend on the batch, but the same batch always gives the same bits.
Before its PDL wait (cuda/hopper.cuh) it reads the span, and the latents of positions before the step's queries. So what
writes these must end before `mla_absorb_query` starts, as do copies, earlier steps, and kernels that do not trigger
their successor early.
Packed rows are widened while they are copied to shared memory. `perilune bench decode --kernels` times it in a step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import paged_inputs
from perilune.ops.attention.mla_absorbed import GATHER_BYTES, mla_absorbed
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Span
from perilune.ops.linear.per_head_matmul import FEW_TOKENS, per_head_matmul

ROWS = 64  # query rows (token, head) of a tile, as in split_kv_schedule.cuh
GROUP = 16  # positions that one TMA copy loads; a cache block is a multiple of it
LEAST = 64  # min positions of a range: fewer are not worth a CTA
# The next four are for `mla_attend_few` (split_kv_short.cuh): one token with a narrow block table.
FEW = 48  # positions of the block table per range
MOST_RANGES = 128  # max ranges of a packed cache; mla_decode_output_mma.cu reads 32 at a time
MOST_PACKED = 192  # max positions of the block table per range of a packed cache: two passes of 96
QUARTER = 16  # max heads per CTA
MOST_ROWS = 512  # max rows of q_full that implementation "rows" takes


@dataclass(frozen=True)
class Case(Sized):
    counts: tuple[int, ...]  # queries of each request
    contexts: tuple[int, ...]
    H: int = NANO.heads
    R: int = K2.latent
    r: int = K2.rope
    v: int = K2.value
    block_size: int = 16
    narrow: bool = False  # a bfloat16 cache whatever the activations are
    scale: float = 1.0  # factor of the scores
    rows: int = 0  # padding rows after those of the requests
    packed: bool = False


LENGTHS = (1, 5, 16, 17, 63, 64, 65, 127, 500, 1024, 1999, 4096, 10240, 30000, 777, 128)
CASES = [
    *(
        Case((n,) * b, (c,) * b, K2.heads, block_size=64, big=True)
        for b, n, c in (
            *((1, 1, c) for c in (1, 1024, 10240, 102400, 131072)),
            *((b, 1, 1024) for b in (4, 16, 64)),
            *((1, n, 1024) for n in (2, 3, 4, 8)),
            (1, 4, 10240),
            (16, 4, 4096),
            (64, 8, 600),
            (200, 1, 300),
            *((1, 1, c) for c in (63, 65, 2000)),  # up to about 2,100 positions in all, four CTAs share a tile
            *((2, n, c) for n, c in ((1, 500), (1, 1100), (4, 60))),
            (3, 5, 150),
            (1, 8, 100),
        )
    ),
    *(Case((n,), (c,), h, packed=n == 1, big=True) for h in (20, 7) for n, c in ((1, 700), (3, 100), (1, 15))),
    *(Case((1,) * 16, LENGTHS, heads, block_size=size, big=True) for heads in (64, 16, 4) for size in (16, 32, 64)),
    *(Case((1, 2, 3, 4, 5, 6, 7, 8) * 2, tuple(c + 8 for c in LENGTHS), h, big=True) for h in (64, 32, 16, 4)),
    *(Case((n,), (c,), 16, block_size=64, big=True) for n in (1, 4) for c in (1024, 10240, 102400)),
    *(Case((1,) * 4, (1024, 700, 5, 1000), h, block_size=64, big=True) for h in (32, 16, 8)),
    Case((1, 4, 1, 1, 2), (0, 5000, 0, 70, 0), 64, big=True, rows=3),
    Case((2, 1), (1500, 130), 64, scale=200.0, big=True),
    Case((1,), (256,)),
    Case((4,), (300,), block_size=64),
    Case((1,) * 5, (1, 16, 17, 64, 100)),
    Case((3, 1, 0, 5), (3, 16, 9, 17), 3),
    Case((1, 1, 2), (0, 40, 0), rows=2),
    Case((1, 2), (200, 300), scale=200.0),
    Case((), (), 2, 8, 8, 8),
    *(Case((2, 1), (7, 30), 2, R, 24 - R, v) for R, v in ((16, 8), (20, 8), (16, 12))),
    Case((4, 2, 1), (64, 65, 63), 5, 40, 16, 24, 8),
    Case((1, 2), (20, 30), 4, 64, 16, 16, narrow=True),
    Case((1, 2, 1), (20, 30, 0), 4, 64, 16, 16, packed=True, rows=1),
    *(Case((1,), (c,), K2.heads, block_size=64, packed=True, big=True) for c in (1, 1024, 10240, 102400)),
    *(Case((1,) * 16, LENGTHS, 64, block_size=size, packed=True, big=True) for size in (16, 64)),
    Case((1, 2, 3, 4, 5, 6, 7, 8) * 2, tuple(c + 8 for c in LENGTHS), 16, block_size=32, packed=True, big=True),
    Case((1, 4, 1, 1, 2), (0, 5000, 0, 70, 0), 64, packed=True, big=True, rows=3),
]
TOL = {
    "o": {
        FLOAT32: Tol(1e-4, 2e-4, 1e-5, "fp32 sums in another order, then exponentials of scores of some tens"),
        BFLOAT16: sums()[BFLOAT16],
    }
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    pages, span = paged_inputs.inputs(g, c, c.counts)
    q_full = g.randn(sum(c.counts) + c.rows, c.H, c.R + c.r)
    if c.packed:
        q_full[..., : c.R] /= 16
    return {
        "q_full": q_full,
        "pages": pages,
        "span": span,
        "w_uv": g.randn(c.H, c.R, c.v, scale=c.R**-0.5 / (16 if c.packed else 1)),
        "scale": c.scale * (c.R + c.r) ** -0.5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    size = dtype.itemsize
    real = [(n, length) for n, length in zip(c.counts, c.contexts) if length]
    attention = costs.mla_absorbed([n for n, _ in real], [length for _, length in real], c.H, c.R, c.r, size)
    return attention + costs.per_head_matmul(sum(n for n, _ in real), c.H, c.R, c.v, size)


def reference(q_full: Tensor, pages: Tensor, span: Span, w_uv: Tensor, scale: float) -> Tensor:
    (T, H, _), R = q_full.shape, w_uv.shape[1]
    out = torch.zeros(T, H, w_uv.shape[2], dtype=q_full.dtype, device=q_full.device)
    starts, lengths = span.query_start.tolist(), span.context.tolist()
    for b, length in enumerate(lengths):
        first, count = starts[b], starts[b + 1] - starts[b]
        if length == 0 or count == 0:
            continue
        latent = paged_inputs.latents(pages, span, b, R)
        for i in range(count):
            seen = latent[: length - count + i + 1]
            weights = torch.softmax(scale * (q_full[first + i].float() @ seen.T), -1)
            out[first + i] = torch.einsum("hr,hrv->hv", weights @ seen[:, :R], w_uv.float()).to(out.dtype)
    return out


op = Op("mla_decode", CASES, TOL, inputs, cost, reference, decides=("q_full", "pages", "w_uv"))


_kernel = build.launcher("mla_decode.cu", "mla_decode", "pplllplpppppp" + "l" * 5 + "fp")
_few = build.launcher("mla_decode.cu", "mla_attend_few", "pplll" + "plpppp" + "lllfp")


def needs(q_full: Tensor, pages: Tensor) -> tuple[tuple[bool, str], ...]:
    """Conditions of `attend`, for `build.on_hopper`."""
    return (
        (q_full.dtype == BFLOAT16, "bfloat16"),
        (pages.dtype in (BFLOAT16, latent_cache.PACKED), "a bfloat16 or packed cache"),
        (q_full.shape[2] == K2.latent + K2.rope, "Kimi's latent width"),
        (pages.shape[1] % GROUP == 0, f"cache blocks of a multiple of {GROUP}"),
    )


def attend(
    q_full: Tensor, pages: Tensor, span: Span, scale: float, w_uv: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Split-KV attention (mla_decode.cu): partials [C, ROWS, R] bfloat16 and weights [ROWS, C] float32, which are the
    outputs and log-sum-exps (base 2) of the ranges of C CTAs. Unless w_uv is None, they are also combined into `out`
    [T, H, v]."""
    tables, query_start, context = span.contiguous()
    (T, H, _), (N, block_size, _), (B, M), device = q_full.shape, pages.shape, tables.shape, q_full.device
    # One CTA per SM, but at least one per tile. The number of tiles depends on the span; this is an upper bound.
    ctas = max(build.sm_count(device), min(T * -(-H // ROWS), (T * H + (ROWS - 1) * B) // ROWS))
    partials = torch.empty(ctas, ROWS, K2.latent, dtype=BFLOAT16, device=device)
    weights = torch.empty(ROWS, ctas, dtype=FLOAT32, device=device)
    failed = _kernel()(
        q_full.data_ptr(),
        pages.data_ptr(),
        N * block_size,
        pages.dtype == latent_cache.PACKED,
        block_size,
        tables.data_ptr(),
        M,
        *addresses(query_start, context, w_uv, partials, weights, out),
        B,
        T,
        H,
        ctas,
        LEAST,
        scale,
        build.stream(device),
    )
    assert not failed, f"mla_decode does not start: CUDA error {failed}"
    return partials, weights


def attend_one(q_full: Tensor, pages: Tensor, span: Span, scale: float) -> tuple[Tensor, Tensor, int]:
    """(partials, weights, least) of one token of 8, 16, 32 or 64 heads. The combining kernel needs `least`.

    Usually the results of `attend`, with `least` the min positions of a range. If the block table is narrow,
    `mla_attend_few` runs instead: its CTAs are co-resident with those of the next kernel (split_kv_short.cuh). It deals
    groups of 16 positions round robin to n ranges, and `least` is -n.
    """
    tables, query_start, context = span.contiguous()
    (_, H, _), (N, block_size, _), (B, M), device = q_full.shape, pages.shape, tables.shape, q_full.device
    slots, packed = build.sm_count(device), pages.dtype == latent_cache.PACKED
    sharing = -(-H // QUARTER)  # CTAs of a range
    ranges = -(-M * block_size // FEW)
    if packed and sharing == 1 and M * block_size <= MOST_PACKED * min(slots, MOST_RANGES):
        ranges = min(ranges, slots, MOST_RANGES)
    elif packed or ranges * sharing > slots:
        ranges = 0
    if B != 1 or not ranges:
        return *attend(q_full, pages, span, scale, None, None), LEAST
    partials = torch.empty(slots, ROWS, K2.latent, dtype=BFLOAT16, device=device)
    weights = torch.empty(ROWS, slots, dtype=FLOAT32, device=device)
    failed = _few()(
        q_full.data_ptr(),
        pages.data_ptr(),
        N * block_size,
        packed,
        block_size,
        tables.data_ptr(),
        M,
        *addresses(query_start, context, partials, weights),
        H,
        ranges,
        slots,
        scale,
        build.stream(device),
    )
    assert not failed, f"mla_attend_few does not start: CUDA error {failed}"
    return partials, weights, -ranges


@op.impl("cuda", when=lambda a, device: build.on_hopper("mla_decode.cu", device, *needs(a.q_full, a.pages)))
def cuda(q_full: Tensor, pages: Tensor, span: Span, w_uv: Tensor, scale: float) -> Tensor:
    T, H, _ = q_full.shape
    assert w_uv.shape == (H, K2.latent, K2.value) and w_uv.is_contiguous(), f"{w_uv.shape=} {w_uv.stride()=}"
    out = torch.empty(T, H, K2.value, dtype=q_full.dtype, device=q_full.device)
    attend(q_full, pages, span, scale, w_uv, out)
    return out


_on_cpu = build.launcher_by_type("mla_absorbed", "mla_decode", "p" * 7 + "l" * 10 + "f")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "mla_absorbed",
        device,
        (a.q_full.dtype == FLOAT32 and a.q_full.shape[0] <= FEW_TOKENS, f"at most {FEW_TOKENS} tokens of float32"),
        (a.pages.dtype in (FLOAT32, BFLOAT16), "a float32 or bfloat16 cache"),
        (a.pages.shape[2] % 8 == 0, "latent and rope widths that are together a multiple of 8"),
        (a.w_uv.shape[1] % 8 == 0 and a.w_uv.shape[2] % 8 == 0, "latent and value widths that are multiples of 8"),
    ),
)
def cpp(q_full: Tensor, pages: Tensor, span: Span, w_uv: Tensor, scale: float) -> Tensor:
    tables, query_start, context = span.contiguous()
    (T, H, width), (_, R, v), (N, block_size, _), (B, M) = q_full.shape, w_uv.shape, pages.shape, tables.shape
    w_uv = w_uv.contiguous()
    out = torch.empty(T, H, v)
    failed = _on_cpu(pages.dtype)(
        q_full.data_ptr(),
        pages.data_ptr(),
        tables.data_ptr(),
        query_start.data_ptr(),
        context.data_ptr(),
        w_uv.data_ptr(),
        out.data_ptr(),
        T,
        B,
        M,
        H,
        R,
        width - R,
        v,
        N,
        block_size,
        threads.count(),
        scale,
    )
    assert not failed, (
        f"a block is outside the cache: {tables=} {N=}"
        if failed == 1
        else f"queries and contexts disagree: {T=} {query_start=} {context=} {tables.shape=} {block_size=}"
    )
    return out


@op.impl(
    "rows",
    when=lambda a, device: (
        "for CUDA" if device.type != "cuda" else a.q_full.shape[0] <= MOST_ROWS or f"for at most {MOST_ROWS} tokens"
    ),
)
def rows(q_full: Tensor, pages: Tensor, span: Span, w_uv: Tensor, scale: float) -> Tensor:
    """Each query row gathers all blocks of its table: no shape depends on contexts, as a CUDA graph requires."""
    (T, H, _), R, (_, size, width) = q_full.shape, w_uv.shape[1], pages.shape
    tables, query_start, context = span.tables, span.query_start, span.context
    if not T or not len(context):
        return q_full.new_zeros(T, H, w_uv.shape[2])
    row = torch.arange(T, dtype=torch.int32, device=q_full.device)
    owner = torch.searchsorted(query_start[1:], row, right=True)
    ours = owner < len(context)
    owner = owner.clamp_max_(len(context) - 1)
    seen = torch.where(ours, context[owner] - (query_start[owner + 1] - 1 - row), 0).unsqueeze(1)
    positions = torch.arange(tables.shape[1] * size, device=q_full.device)
    at_once = max(1, GATHER_BYTES // (len(positions) * width * 4))
    parts = []
    for some in row.long().split(at_once):
        read = torch.minimum(positions, (seen[some] - 1).clamp_min(0))
        latent = latent_cache.unpack(pages.view(-1, width)[paged_inputs.slots(tables[owner[some]], read, size)], R)
        latent = latent.masked_fill_((seen[some] <= 0).unsqueeze(2), 0.0)
        scores = q_full[some].float() @ latent.mT * scale
        scores = scores.masked_fill_((positions >= seen[some].clamp_min(1)).unsqueeze(1), float("-inf"))
        parts.append((torch.softmax(scores, -1) @ latent[..., :R]).to(q_full.dtype))
    return per_head_matmul(torch.cat(parts), w_uv).masked_fill_((seen <= 0).unsqueeze(2), 0.0)


@op.impl("composed")
def composed(q_full: Tensor, pages: Tensor, span: Span, w_uv: Tensor, scale: float) -> Tensor:
    (T, H, _), R = q_full.shape, w_uv.shape[1]
    counts, real = span.query_start.diff(), span.context > 0
    kept = torch.repeat_interleave(real, counts.long()).nonzero().squeeze(1)
    q = q_full
    if len(kept) < T:
        starts = torch.nn.functional.pad(counts[real].cumsum(0, dtype=torch.int32), (1, 0))
        q, span = q_full[kept], Span(span.tables[real], starts, span.context[real])
    o_latent = mla_absorbed(q[..., :R], q[..., R:], pages, span, scale)
    o = per_head_matmul(o_latent, w_uv)
    if len(kept) == T:
        return o
    return torch.zeros(T, H, w_uv.shape[2], dtype=o.dtype, device=o.device).index_copy_(0, kept, o)


def check(q_full: Tensor, pages: Tensor, span: Span, w_uv: Tensor) -> None:
    (_, H, width), (heads, R, _) = q_full.shape, w_uv.shape
    assert H == heads and width > R and q_full.is_contiguous(), f"{q_full.shape=} {q_full.stride()=} {w_uv.shape=}"
    assert q_full.dtype == w_uv.dtype, f"{q_full.dtype=} {w_uv.dtype=}"
    paged_inputs.check(pages, span, R, width - R)


def mla_decode(q_full: Tensor, pages: Tensor, span: Span, w_uv: Tensor, scale: float) -> Tensor:
    check(q_full, pages, span, w_uv)
    return op(q_full, pages, span, w_uv, scale)
