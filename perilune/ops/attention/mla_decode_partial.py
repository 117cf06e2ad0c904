"""MLA attention of all heads over one rank's part of a KV cache that is sharded along the sequence.

Each row t attends to the first context[t] >= 0 rows of its block table (dist/kv_shards.py):

    s = scale * q_full[t, h] . (c, k_pe);  o[t, h] = softmax(s) c;  lse[t, h] = log2(sum(exp(s)))

q_full [T, H, R + r] contiguous; pages [N, block_size, R + r] contiguous, of any float type or packed
(latent_cache.py); span: tables [T, M], query_start 0 .. T and context [T] int32; latent = R.
Each of `groups` groups of adjacent heads is sent to another rank: o [groups, T, H / groups, R] as q_full, lse [groups,
T, H / groups] float32. If context[t] is 0, o is 0 and lse is -inf. Softmax and sums in fp32, o rounded once. Positions
outside a row's context are never used: they may hold anything, nan included.

A verify step is passed as T rows of one token each, not as requests of several tokens: on a shard, contexts of adjacent
tokens need not differ by one, and with all 64 heads one row fills a tile of the kernel, so the cost is the same.

"cuda" computes ranges of each context with mla_decode.cu's kernel, then merges them in one launch; it also rounds
probabilities and the outputs of ranges. Grids depend only on T, the table's width and the GPU. As in `mla_decode`, the
cache rows must be written before the kernel that precedes this op begins; that kernel is the exchange of queries.
"torch" reads whole tables: no shape depends on contexts, as a CUDA graph requires.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import mla_decode, paged_inputs
from perilune.ops.attention.mla_absorbed import GATHER_BYTES
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Span

LOG2_E = 1.4426950408889634
MAX_GROUPS = 8  # one group of heads per rank
# A probability p is rounded by at most 2^-9 p, which changes o by at most 2^-9 sum(p |c|), however small o is. Packed
# latents have a standard deviation of 16 and no W_UV divides them again: sum(p |c|) is at most 4 deviations, 64.
PACKED_TOL = Tol(2**-9 * 64, 1.6e-2, 4e-3, "bf16 rounding of probabilities that weigh latents of about 16")


@dataclass(frozen=True)
class Case(Sized):
    contexts: tuple[int, ...]
    groups: int = 2
    H: int = NANO.heads
    R: int = K2.latent
    r: int = K2.rope
    block_size: int = 16
    narrow: bool = False  # the cache is bfloat16
    scale: float = 1.0  # factor of the scores
    packed: bool = False

    def tol(self, output: str, dtype: torch.dtype) -> Tol | None:
        return PACKED_TOL if self.packed and output == "o" and dtype == BFLOAT16 else None


LENGTHS = (1, 5, 16, 17, 63, 64, 65, 127, 500, 1024, 0, 4096, 10240, 30000, 777, 128)
CASES = [
    *(
        Case((c,) * t, groups, K2.heads, block_size=64, big=True)
        for t, c, groups in ((1, 1, 2), (1, 512, 2), (1, 5120, 4), (1, 51200, 2), (4, 2560, 2), (4, 51200, 4))
    ),
    *(Case((c,) * t, 8, K2.heads, block_size=64, big=True) for t, c in ((16, 512), (64, 512), (200, 150), (1, 131072))),
    *(Case(LENGTHS, 4, K2.heads, block_size=size, big=True) for size in (16, 32, 64)),
    *(Case(LENGTHS * 3, 2, K2.heads, block_size=64, packed=packed, big=True) for packed in (False, True)),
    *(Case((c, c + 1, 0), 2, h, packed=c == 700, big=True) for h in (4, 20, 48) for c in (3, 100, 700)),
    Case((0,), 2, K2.heads, block_size=64, big=True),
    Case((40000, 50), 2, K2.heads, scale=200.0, big=True),
    Case((256,)),
    Case((300, 0, 64, 65), 4),
    Case((1, 16, 17), 1, 3),
    Case((0, 0), 2, 2, 16, 8),
    Case((), 2, 2, 16, 8),
    Case((200, 300), 2, scale=200.0),
    Case((20, 30), 2, 4, 64, 16, narrow=True),
    Case((20, 0, 30), 2, 4, 64, 16, packed=True),
]
TOL = {
    "o": {
        FLOAT32: Tol(1e-4, 2e-4, 1e-5, "fp32 sums in another order, then exponentials of scores of some tens"),
        BFLOAT16: sums()[BFLOAT16],
    },
    "lse": {
        FLOAT32: Tol(1e-4, 2e-5, 1e-5, "fp32 sums in another order"),
        BFLOAT16: Tol(1e-2, 1e-4, 1e-3, "approximate exponentials and logarithm, fp32 sums in another order"),
    },
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    pages, span = paged_inputs.inputs(g, c, [1] * len(c.contexts))
    q_full = g.randn(len(c.contexts), c.H, c.R + c.r)
    if c.packed:
        q_full[..., : c.R] /= 16
    return {
        "q_full": q_full,
        "pages": pages,
        "span": span,
        "latent": c.R,
        "groups": c.groups,
        "scale": c.scale * (c.R + c.r) ** -0.5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    real = [length for length in c.contexts if length]
    return costs.mla_absorbed([1] * len(real), real, c.H, c.R, c.r, dtype.itemsize)


def reference(
    q_full: Tensor, pages: Tensor, span: Span, latent: int, groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    T, H, _ = q_full.shape
    o = torch.zeros(T, H, latent, dtype=q_full.dtype, device=q_full.device)
    lse = torch.full((T, H), float("-inf"), device=q_full.device)
    for t, length in enumerate(span.context.tolist()):
        if length:
            rows = paged_inputs.latents(pages, span, t, latent)
            scores = scale * (q_full[t].float() @ rows.T)
            o[t] = (torch.softmax(scores, -1) @ rows[:, :latent]).to(o.dtype)
            lse[t] = scores.logsumexp(-1) * LOG2_E
    return _grouped(o, groups), _grouped(lse, groups)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[T, H, ...] -> [groups, T, H / groups, ...]."""
    T, H, *rest = x.shape
    return x.view(T, groups, H // groups, *rest).transpose(0, 1).contiguous()


op = Op("mla_decode_partial", CASES, TOL, inputs, cost, reference, decides=("q_full", "pages", "groups"))


_weigh = build.launcher("mla_decode_partial.cu", "mla_decode_partial", "ppppplpllllllp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "mla_decode_partial.cu",
        device,
        *mla_decode.needs(a.q_full, a.pages),
        (a.groups <= MAX_GROUPS, f"at most {MAX_GROUPS} groups of heads"),
    ),
)
def cuda(q_full: Tensor, pages: Tensor, span: Span, latent: int, groups: int, scale: float) -> tuple[Tensor, Tensor]:
    (T, H, _), device = q_full.shape, q_full.device
    shape = groups, T, H // groups
    values = T * H // groups * latent
    # One buffer: each group's outputs, then its log-sum-exps, so that `joined` copies nothing. Rows are multiples of 16
    # bytes, for 16-byte stores.
    row_bytes = -(-(2 * values + 4 * T * H // groups) // 16) * 16
    sent = torch.empty(groups, row_bytes, dtype=torch.uint8, device=device)
    o = sent[:, : 2 * values].view(BFLOAT16).view(*shape, latent)
    lse = sent[:, 2 * values : 2 * values + 4 * T * H // groups].view(FLOAT32).view(shape)
    if not T:
        return o, lse
    _, query_start, context = span.contiguous()
    partials, weights = mla_decode.attend(q_full, pages, span, scale, None, None)
    failed = _weigh()(
        *addresses(partials, weights, query_start, context, o),
        o.stride(0),
        lse.data_ptr(),
        lse.stride(0),
        len(partials),
        T,
        H,
        groups,
        mla_decode.LEAST,
        build.stream(device),
    )
    assert not failed, f"mla_decode_partial does not start: CUDA error {failed}"
    return o, lse


@op.impl("torch")
def whole_tables(
    q_full: Tensor, pages: Tensor, span: Span, latent: int, groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    (T, H, _), (_, size, width), device = q_full.shape, pages.shape, q_full.device
    positions = torch.arange(span.tables.shape[1] * size, device=device)
    at_once = max(1, GATHER_BYTES // (len(positions) * width * 4))
    o = torch.empty(T, H, latent, dtype=q_full.dtype, device=device)
    lse = torch.empty(T, H, device=device)
    for first in range(0, T, at_once):
        some = slice(first, first + at_once)
        seen = span.context[some].long().unsqueeze(1)
        read = torch.minimum(positions, (seen - 1).clamp_min(0))
        rows = latent_cache.unpack(pages.view(-1, width)[paged_inputs.slots(span.tables[some], read, size)], latent)
        rows = rows.masked_fill_((seen <= 0).unsqueeze(2), 0.0)
        scores = (q_full[some].float() @ rows.mT * scale).masked_fill_((positions >= seen).unsqueeze(1), float("-inf"))
        lse[some] = scores.logsumexp(-1) * LOG2_E
        odds = (scores - scores.amax(-1, keepdim=True).clamp_min(torch.finfo(FLOAT32).min)).exp_()
        values = odds @ rows[..., :latent] / odds.sum(-1, keepdim=True)
        o[some] = values.masked_fill_((seen <= 0).unsqueeze(2), 0.0).to(o.dtype)
    return _grouped(o, groups), _grouped(lse, groups)


def joined(o: Tensor, lse: Tensor) -> Tensor:
    """[groups, bytes] uint8: per group o, then lse, padded to a multiple of 16 bytes. `parted` is the inverse."""
    groups, ours, more = o.shape[0], o[0].numel() * o.itemsize, lse[0].numel() * lse.itemsize
    row_bytes = -(-(ours + more) // 16) * 16
    adjacent = lse.data_ptr() == o.data_ptr() + ours and o.stride(0) * o.itemsize == row_bytes
    if adjacent and lse.stride(0) * lse.itemsize == row_bytes:
        return o.as_strided((groups, row_bytes // o.itemsize), (row_bytes // o.itemsize, 1)).view(torch.uint8)
    rest = torch.zeros(groups, row_bytes - ours - more, dtype=torch.uint8, device=o.device)
    return torch.cat([o.reshape(groups, -1).view(torch.uint8), lse.reshape(groups, -1).view(torch.uint8), rest], 1)


def parted(rows: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse as views of rows [groups, bytes] uint8 from `joined`. Arguments o and lse give shapes and types."""
    ours, more = o[0].numel() * o.itemsize, lse[0].numel() * lse.itemsize
    return rows[:, :ours].view(o.dtype).view(o.shape), rows[:, ours : ours + more].view(lse.dtype).view(lse.shape)


def mla_decode_partial(
    q_full: Tensor, pages: Tensor, span: Span, latent: int, groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    T, H, width = q_full.shape
    assert width > latent and H % groups == 0 and q_full.is_contiguous(), f"{q_full.shape=} {latent=} {groups=}"
    assert span.tables.shape[0] == T, f"{span.tables.shape=} {q_full.shape=}"
    paged_inputs.check(pages, span, latent, width - latent)
    return op(q_full, pages, span, latent, groups, scale)
