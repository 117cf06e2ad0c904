"""MLA attention over the latent cache in the plain form: every head's keys and values are computed from the latents.

k[h] = (w_uk[h] c, k_pe), v[h] = w_uv[h] c, o[t, h] = softmax(scale * q[t, h] . k[h]) v[h], over the positions up to the
token's own.
q [T, H, n + r]; pages [N, block_size, R + r] contiguous, of any float type or packed (latent_cache.py); w_uk [H, n, R];
w_uv [H, R, v]; span as in mla_absorbed.py, query_start and context best in host memory, because the host reads them; o
[T, H, v] as q. Keys, values, scores and softmax in fp32, rounded once.
Fewer FLOPs per query and key than the absorbed form, but keys and values must be computed first: for long chunks.

"cuda" (mla_prefill.cu) computes keys and values in bfloat16 with cuBLAS, for as many requests at a time as fit
`KEY_VALUE_BYTES`, or for as many heads of one request. It rounds probabilities to bfloat16; scores, softmax and sums
are fp32. A request's result does not depend on the values of the others, but cuBLAS may choose another order of sums
for another number of keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import paged_inputs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Span

PIECE_BYTES = 16 << 20  # in "torch", max bytes of scores at a time, and of keys and values
KEY_VALUE_BYTES = 1 << 30  # in "cuda", max bytes of keys and values at a time
MAX_REQUESTS = 64  # per launch
TILE = 128  # keys that "cuda" multiplies at once


@dataclass(frozen=True)
class Case(Sized):
    counts: tuple[int, ...]  # queries of each request
    contexts: tuple[int, ...]
    H: int = NANO.heads
    n: int = NANO.nope
    r: int = NANO.rope
    v: int = NANO.value
    R: int = NANO.latent
    block_size: int = 16
    narrow: bool = False  # the cache is bfloat16
    packed: bool = False


CASES = [
    *(
        Case((q,), (c,), K2.heads, K2.nope, K2.rope, K2.value, K2.latent, 64, big=True)
        for q, c in ((512, 512), (2048, 8192))
    ),
    Case((300, 1, 129), (300, 4100, 1000), K2.heads, K2.nope, K2.rope, K2.value, K2.latent, 64, big=True),
    Case((200, 128), (5000, 128), 16, K2.nope, K2.rope, K2.value, K2.latent, 16, big=True),
    Case((40, 0, 129), (41, 5, 130), 16, K2.nope, K2.rope, K2.value, K2.latent, 16, big=True),
    Case((3,), (12000,), 5, K2.nope, K2.rope, K2.value, K2.latent, 64, big=True),  # heads in groups of 3 and 2
    Case((129,) * 70, (129,) * 30 + (300,) * 40, 8, K2.nope, K2.rope, K2.value, K2.latent, 64, big=True),
    Case((512,), (512,)),
    Case((64,), (700,)),
    Case((), (), 2, 8, 4, 8, 16),
    Case((1,), (1,), 2, 8, 4, 8, 16),
    Case((17, 0, 33), (17, 5, 64), 3, 8, 4, 16, 24, 4),
    Case((5, 40), (32, 49), 2, 12, 6, 10, 14, 8, narrow=True),
    Case((5, 40), (32, 49), 2, 12, 6, 10, 14, 8, packed=True),
    Case((200, 128), (5000, 128), 16, K2.nope, K2.rope, K2.value, K2.latent, 64, packed=True, big=True),
]
TOL = {
    "o": {
        FLOAT32: Tol(2e-5, 2e-4, 1e-5, "fp32 sums in another order, then exponentials of scores of some tens"),
        BFLOAT16: sums()[BFLOAT16],
    }
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    pages, span = paged_inputs.inputs(g, c, c.counts)
    size = c.R**-0.5 / (16 if c.packed else 1)
    return {
        "q": g.randn(sum(c.counts), c.H, c.n + c.r),
        "pages": pages,
        "w_uk": g.randn(c.H, c.n, c.R, scale=size),
        "w_uv": g.randn(c.H, c.R, c.v, scale=size),
        "span": span,
        "scale": (c.n + c.r) ** -0.5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.mla_prefill(list(c.counts), list(c.contexts), c.H, c.R, c.r, c.n, c.v, dtype.itemsize)


def reference(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float) -> Tensor:
    (T, H, _), R = q.shape, w_uk.shape[2]
    out = torch.empty(T, H, w_uv.shape[2], dtype=q.dtype, device=q.device)
    starts, lengths = span.query_start.tolist(), span.context.tolist()
    for b, length in enumerate(lengths):
        rows, count = slice(starts[b], starts[b + 1]), starts[b + 1] - starts[b]
        positions = torch.arange(length, device=q.device)
        latent = paged_inputs.latents(pages, span, b, R)
        own = positions[length - count :]
        for h in range(H):
            k = torch.cat([latent[:, :R] @ w_uk[h].float().T, latent[:, R:]], -1)
            scores = scale * (q[rows, h].float() @ k.T)
            scores = scores.masked_fill(positions > own.unsqueeze(1), float("-inf"))
            out[rows, h] = (torch.softmax(scores, -1) @ (latent[:, :R] @ w_uv[h].float())).to(q.dtype)
    return out


op = Op("mla_prefill", CASES, TOL, inputs, cost, reference, decides=("q", "w_uk", "w_uv"))


_gather = build.launcher("mla_prefill.cu", "mla_prefill_gather", "pplllplplp")
_attend = build.launcher("mla_prefill.cu", "mla_prefill", "ppppppllllllllfp")


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values of `heads` for requests that share launches.

    requests  [count, 5] int32 in host memory, from `together`; longest: max queries of a request
    k         [total, heads 128]; v [heads, total, 128]; rope [total, r], rows may be strided
    """

    requests: Tensor
    longest: int
    heads: slice
    k: Tensor
    v: Tensor
    rope: Tensor


def keys_and_values(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span) -> Iterator[Keys]:
    """Yields keys and values of all requests with queries and all heads, at most `KEY_VALUE_BYTES` at a time."""
    (H, n, R), v = w_uk.shape, w_uv.shape[2]
    tables, (_, block_size, width) = span.tables.contiguous(), pages.shape
    most = KEY_VALUE_BYTES // ((n + v) * q.itemsize)  # rows of keys and values of one head
    for some in together(span.query_start.tolist(), span.context.tolist(), most // H):
        requests = torch.tensor(some, dtype=torch.int32)
        total = some[-1][4] + -(-some[-1][3] // TILE) * TILE
        rows = torch.empty(total, width, dtype=pages.dtype, device=q.device)
        failed = _gather()(
            pages.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            block_size,
            width * pages.itemsize,
            requests.data_ptr(),
            len(some),
            rows.data_ptr(),
            total,
            build.stream(q.device),
        )
        assert not failed, f"CUDA error {failed}: {some=} {pages.shape=}"
        latent = latent_cache.unpack(rows, R, q.dtype)
        c, heads = latent[:, :R], max(1, min(H, most // total))
        for h in range(0, H, heads):
            part = slice(h, min(h + heads, H))
            k = torch.nn.functional.linear(c, w_uk[part].flatten(0, 1))
            values = torch.bmm(c.expand(part.stop - h, *c.shape), w_uv[part])
            yield Keys(requests, max(request[2] for request in some), part, k, values, latent[:, R:])
            del k, values  # free them before the next ones are allocated; the caller must delete its `Keys` too


def rows_apart(q: Tensor) -> Tensor:
    """q with adjacent heads and rows at multiples of 16 bytes, as TMA requires: q itself, or a copy."""
    return q.contiguous() if q.stride()[1:] != (q.shape[2], 1) or q.stride(0) % 8 or q.data_ptr() % 16 else q


def needs(q: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[tuple[bool, str], ...]:
    """Conditions of the kernels, for `build.on_hopper`."""
    n, v = w_uk.shape[1], w_uv.shape[2]
    return (
        (q.dtype == BFLOAT16, "bfloat16"),
        ((n, q.shape[2] - n, v) == (K2.nope, K2.rope, K2.value), f"head sizes {K2.nope} + {K2.rope} and {K2.value}"),
        (w_uk.shape[2] % 16 == 0, "a latent width that is a multiple of 16"),
    )


def together(starts: list[int], lengths: list[int], most: int) -> list[list[tuple[int, int, int, int, int]]]:
    """Groups of requests with queries that share launches; a group of several has at most `most` rows of keys. Per
    request: (index, first query, queries, keys, row of the first key, a multiple of `TILE`)."""
    found: list[list[tuple[int, int, int, int, int]]] = []
    total = 0
    for b, length in enumerate(lengths):
        first, count = starts[b], starts[b + 1] - starts[b]
        padded = -(-length // TILE) * TILE
        if count == 0:
            continue
        if not found or len(found[-1]) == MAX_REQUESTS or total + padded > most:
            found.append([])
            total = 0
        found[-1].append((b, first, count, length, total))
        total += padded
    return found


@op.impl("cuda", when=lambda a, device: build.on_hopper("mla_prefill.cu", device, *needs(a.q, a.w_uk, a.w_uv)))
def cuda(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float) -> Tensor:
    q = rows_apart(q)
    T, H, _ = q.shape
    out = torch.empty(T, H, w_uv.shape[2], dtype=q.dtype, device=q.device)
    for of in keys_and_values(q, pages, w_uk, w_uv, span):
        h, heads = of.heads.start, of.heads.stop - of.heads.start
        failed = _attend()(
            q[0, h].data_ptr(),
            of.k.data_ptr(),
            of.rope.data_ptr(),
            of.v.data_ptr(),
            out[0, h].data_ptr(),
            of.requests.data_ptr(),
            len(of.requests),
            of.longest,
            T,
            len(of.k),
            heads,
            q.stride(0),
            of.rope.stride(0),
            out.stride(0),
            scale,
            build.stream(q.device),
        )
        assert not failed, f"CUDA error {failed}: {q.shape=} {of.requests=} {pages.shape=}"
        del of
    return out


@op.impl("torch")
def in_pieces(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float) -> Tensor:
    """Loops over groups of heads with at most PIECE_BYTES of keys and values, and over blocks of queries with at most
    PIECE_BYTES of scores. A block is multiplied only by the keys that its last query may see."""
    device, (T, H, size), (n, R), v = q.device, q.shape, w_uk.shape[1:], w_uv.shape[2]
    out = torch.empty(T, H, v, device=device)
    starts, lengths = span.query_start.tolist(), span.context.tolist()
    for b, length in enumerate(lengths):
        first, count = starts[b], starts[b + 1] - starts[b]
        if count == 0:
            continue
        positions = torch.arange(length, device=device)
        latent = paged_inputs.latents(pages, span, b, R)
        c, k_pe = latent[:, :R], latent[:, R:]
        heads = max(1, min(H, PIECE_BYTES // (4 * length * (size + v))))
        for h in range(0, H, heads):
            some = slice(h, min(h + heads, H))
            k = torch.empty(some.stop - h, length, size, device=device)
            k[..., :n] = c @ w_uk[some].float().mT
            k[..., n:] = k_pe
            values = c @ w_uv[some].float()
            queries = max(1, PIECE_BYTES // (4 * length * (some.stop - h)))
            for i in range(0, count, queries):
                last = min(i + queries, count)
                seen = length - count + last  # keys the last query of the block sees
                rows = slice(first + i, first + last)
                scores = (q[rows, some].float() * scale).transpose(0, 1) @ k[:, :seen].mT
                hidden = positions[:seen] > positions[seen - (last - i) : seen].unsqueeze(1)
                scores.masked_fill_(hidden, float("-inf"))
                out[rows, some] = (torch.softmax(scores, -1) @ values[:, :seen]).transpose(0, 1)
    return out.to(q.dtype)


def check(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span) -> None:
    (_, H, size), (_, n, R) = q.shape, w_uk.shape
    assert w_uk.shape[0] == H and w_uv.shape[:2] == (H, R), f"{q.shape=} {w_uk.shape=} {w_uv.shape=}"
    assert q.dtype == w_uk.dtype == w_uv.dtype, f"{q.dtype=} {w_uk.dtype=} {w_uv.dtype=}"
    paged_inputs.check(pages, span, R, size - n)


def mla_prefill(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float) -> Tensor:
    check(q, pages, w_uk, w_uv, span)
    return op(q, pages, w_uk, w_uv, span, scale)
