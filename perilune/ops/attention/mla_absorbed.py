"""MLA attention over the latent cache in the absorbed form: one key (c, k_pe) and one value c for all heads.

o[t, h] = softmax(scale * (q_lat[t, h] . c + q_pe[t, h] . k_pe)) c, over the positions up to the token's own.
q_lat [T, H, R]; q_pe [T, H, r]; pages [N, block_size, R + r] contiguous, of any float type or packed (latent_cache.py);
span: tables [B, M], query_start [B + 1] and context [B] int32; a request's rows are the last positions of its context,
already in the pages. o [T, H, R] as q_lat. Softmax and sums in fp32, rounded once. Positions outside a request's
context are never read: they may hold anything, nan included.

"cpp" is faster than "torch" on CPU at any size: it copies no latents and pads no requests. A request's result does not
depend on the batch.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import paged_inputs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Span

GATHER_BYTES = 32 << 20  # max bytes of latents that "torch" copies at once


@dataclass(frozen=True)
class Case(Sized):
    counts: tuple[int, ...]  # queries of each request
    contexts: tuple[int, ...]
    H: int = NANO.heads
    R: int = NANO.latent
    r: int = NANO.rope
    block_size: int = 16
    narrow: bool = False  # the cache is bfloat16
    scale: float = 1.0  # factor of the scores
    packed: bool = False


CASES = [
    *(
        Case((n,) * b, (c,) * b, K2.heads, K2.latent, K2.rope, 64, big=True)
        for b, n, c in ((1, 1, 1024), (1, 4, 8192), (1, 1, 131072), (16, 1, 4096), (64, 4, 2048))
    ),
    Case((1,), (256,)),
    Case((1,), (2048,)),
    Case((1,) * 16, (256,) * 16),
    Case((1,) * 16, tuple(range(100, 1700, 100))),
    Case((), (), 2, 8, 8),
    Case((1,), (1,), 2, 8, 8),
    Case((3, 1, 0, 5), (3, 16, 9, 17), 3, 24, 8, 4),
    Case((4, 2, 1), (64, 65, 63), 5, 40, 16, 8),
    Case((9, 1), (300, 1), 4, 64, 16, 16),
    Case((2, 1), (1500, 130), 3, 32, 8, 16),
    Case((1, 2), (20, 30), 4, 64, 16, 16, narrow=True),
    Case((1, 2), (200, 300), 4, 64, 16, 16, scale=200.0),
    Case((1, 2), (20, 30), 4, 64, 16, 16, packed=True),
]
TOL = {
    "o": {
        FLOAT32: Tol(2e-5, 2e-4, 1e-5, "fp32 sums in another order, then exponentials of scores of some tens"),
        BFLOAT16: sums()[BFLOAT16],
    }
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    pages, span = paged_inputs.inputs(g, c, c.counts)
    return {
        "q_lat": g.randn(sum(c.counts), c.H, c.R, scale=1 / 16 if c.packed else 1.0),
        "q_pe": g.randn(sum(c.counts), c.H, c.r),
        "pages": pages,
        "span": span,
        "scale": c.scale * (c.R + c.r) ** -0.5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.mla_absorbed(list(c.counts), list(c.contexts), c.H, c.R, c.r, dtype.itemsize)


def reference(q_lat: Tensor, q_pe: Tensor, pages: Tensor, span: Span, scale: float) -> Tensor:
    out = torch.empty_like(q_lat)
    R = q_lat.shape[2]
    starts, lengths = span.query_start.tolist(), span.context.tolist()
    for b, length in enumerate(lengths):
        first, count = starts[b], starts[b + 1] - starts[b]
        latent = paged_inputs.latents(pages, span, b, R)
        for i in range(count):
            seen = latent[: length - count + i + 1]
            q = torch.cat([q_lat[first + i], q_pe[first + i]], -1).float()
            out[first + i] = torch.softmax(scale * (q @ seen.T), -1) @ seen[:, :R]
    return out


op = Op("mla_absorbed", CASES, TOL, inputs, cost, reference, decides=("q_lat", "pages"))


_kernel = build.launcher_by_type("mla_absorbed", "mla_absorbed", "p" * 7 + "l" * 8 + "f")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "mla_absorbed",
        device,
        (a.pages.dtype in (FLOAT32, BFLOAT16), "a float32 or bfloat16 cache"),
        (a.q_lat.shape[2] % 8 == 0 and a.pages.shape[2] % 8 == 0, "latent and rope widths that are multiples of 8"),
    ),
)
def cpp(q_lat: Tensor, q_pe: Tensor, pages: Tensor, span: Span, scale: float) -> Tensor:
    latent, rotated = q_lat.float().contiguous(), q_pe.float().contiguous()
    tables, query_start, context = span.contiguous()
    (_, H, R), (N, block_size, width), (B, M) = q_lat.shape, pages.shape, tables.shape
    out = torch.empty(latent.shape)
    failed = _kernel(pages.dtype)(
        latent.data_ptr(),
        rotated.data_ptr(),
        pages.data_ptr(),
        tables.data_ptr(),
        query_start.data_ptr(),
        context.data_ptr(),
        out.data_ptr(),
        B,
        M,
        H,
        R,
        width - R,
        N,
        block_size,
        threads.count(),
        scale,
    )
    assert not failed, (
        f"a block is outside the cache: {tables=} {N=}"
        if failed == 1
        else f"queries and contexts disagree: {query_start=} {context=} {tables.shape=} {block_size=}"
    )
    return out if q_lat.dtype == FLOAT32 else out.to(q_lat.dtype)


@op.impl("torch")
def gathered(q_lat: Tensor, q_pe: Tensor, pages: Tensor, span: Span, scale: float) -> Tensor:
    """Computes requests of similar lengths together; gathers their latents, each padded with its last latent."""
    device, (_, H, R), (_, block_size, width) = q_lat.device, q_lat.shape, pages.shape
    tables, query_start, context = span.tables, span.query_start, span.context
    flat, q = pages.view(-1, width), torch.cat([q_lat, q_pe], -1).float()
    starts, lengths = query_start.tolist(), context.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    out = torch.empty(q_lat.shape, device=device)
    waiting = sorted((b for b, count in enumerate(counts) if count), key=lambda b: lengths[b])
    while waiting:
        longest = lengths[waiting[-1]]
        several = max(1, GATHER_BYTES // (longest * width * 4))
        group, waiting = waiting[-several:], waiting[:-several]
        picked = torch.tensor(group, device=device)
        count = torch.tensor([counts[b] for b in group], device=device).unsqueeze(1)
        length = context[picked].long().unsqueeze(1)
        positions = torch.arange(longest, device=device)
        slots = paged_inputs.slots(tables[picked], torch.minimum(positions, length - 1), block_size)
        latent = latent_cache.unpack(flat[slots], R)
        query = torch.arange(max(counts[b] for b in group), device=device)
        rows = query_start[picked].long().unsqueeze(1) + torch.minimum(query, count - 1)
        scores = q[rows].flatten(1, 2) @ latent.mT * scale
        hidden = positions > (length - count + query).unsqueeze(-1)
        scores = scores.unflatten(1, (-1, H)).masked_fill_(hidden.unsqueeze(2), float("-inf"))
        values = (torch.softmax(scores, -1).flatten(1, 2) @ latent[..., :R]).unflatten(1, (-1, H))
        real = query < count
        out[rows[real]] = values[real]
    return out.to(q_lat.dtype)


def mla_absorbed(q_lat: Tensor, q_pe: Tensor, pages: Tensor, span: Span, scale: float) -> Tensor:
    (T, H, R), (rows, heads, r) = q_lat.shape, q_pe.shape
    assert T == rows and H == heads and q_lat.dtype == q_pe.dtype, f"{q_lat.shape=} {q_pe.shape=}"
    paged_inputs.check(pages, span, R, r)
    return op(q_lat, q_pe, pages, span, scale)
