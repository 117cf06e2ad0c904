"""mla_prefill with 8-bit products and a quantized output for linear_w8a8: for prompts if activations may be FP8.

Arguments as in mla_prefill.py. o [T, H v] is rounded to q's type, then quantized as by quantize_tokens.py: values
[T, H v] float8_e4m3fn, scale [ceil(H v / 128), T rounded up to whole tiles] float32.

"cuda" (mla_prefill_w8a8.cu) multiplies 8-bit operands. The 128 no-rope values of queries and keys are rounded to int8,
with a scale per query and head, or per 128 keys and head. Values are rounded to e4m3 with a scale per 128 keys and
head, probabilities times 2^8 to e4m3. Rope parts stay in bfloat16. With random scores o has an rms error of 3 %, mostly
from values, as linear_w8a8 has; with e4m3 keys it would be 6 to 10 %. A query's result depends only on keys of its
request. A NaN in keys or values of a tile (128 keys) makes all queries that see a key of the tile NaN. "composed" is
mla_prefill, then quantize_tokens.
"""

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import mla_prefill as exact
from perilune.ops.attention.mla_prefill import TILE, keys_and_values, mla_prefill, needs, rows_apart
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Tol, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Span
from perilune.ops.linear import quantize_tokens as to_e4m3
from perilune.ops.linear.quantize_tokens import GROUP, quantize_tokens, rows

SOURCE = "mla_prefill_w8a8.cu"

CASES, inputs = exact.CASES, exact.inputs
_VALUES = Tol(60.0, 0.126, 7e-2, "steps of e4m3, of 448 for the largest of a row; products of 8 bits")
TOL = {
    "values": {FLOAT32: to_e4m3.TOL["values"][FLOAT32], BFLOAT16: _VALUES},
    "scale": {
        FLOAT32: sums()[FLOAT32],
        BFLOAT16: Tol(1e-4, 0.3, 6e-2, "the largest of 128 values, products of 8 bits"),
    },
}


def cost(c: exact.Case, dtype: torch.dtype) -> costs.Cost:
    whole = exact.cost(c, dtype)
    return costs.Cost(whole.flops, whole.bytes - sum(c.counts) * c.H * c.v * (dtype.itemsize - 1 - 4 / GROUP))


def reference(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float) -> tuple[Tensor, Tensor]:
    return to_e4m3.reference(exact.reference(q, pages, w_uk, w_uv, span, scale).flatten(1), None, 0.0, False)


op = Op("mla_prefill_w8a8", CASES, TOL, inputs, cost, reference, decides=("q", "w_uk", "w_uv"))


_round = build.launcher(SOURCE, "mla_prefill_w8a8_round", "pppppllp")
_attend = build.launcher(SOURCE, "mla_prefill_w8a8", "pppppppp" + "l" * 9 + "fp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        SOURCE, device, *needs(a.q, a.w_uk, a.w_uv), (a.q.shape[0] > 0, "rows"), (K2.value == GROUP, "heads as groups")
    ),
)
def cuda(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float) -> tuple[Tensor, Tensor]:
    q = rows_apart(q)
    (T, H, _), n, v, device = q.shape, w_uk.shape[1], w_uv.shape[2], q.device
    values = torch.empty(T, H * v, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros(H, rows(T), dtype=FLOAT32, device=device)
    stream = build.stream(device)
    for of in keys_and_values(q, pages, w_uk, w_uv, span):
        total, h, heads = len(of.k), of.heads.start, of.heads.stop - of.heads.start
        k8 = torch.empty(heads, total, n, dtype=torch.int8, device=device)
        v8 = torch.empty(heads, total // TILE, v, TILE, dtype=torch.float8_e4m3fn, device=device)
        of_tiles = torch.empty(heads, total // TILE, 2, dtype=FLOAT32, device=device)
        rounded = (k8.data_ptr(), v8.data_ptr(), of_tiles.data_ptr())
        failed = _round()(of.k.data_ptr(), of.v.data_ptr(), *rounded, total, heads, stream)
        assert not failed, f"CUDA error {failed}: {of.k.shape=} {of.v.shape=}"
        failed = _attend()(
            q[0, h].data_ptr(),
            k8.data_ptr(),
            of.rope.data_ptr(),
            v8.data_ptr(),
            of_tiles.data_ptr(),
            values[0, h * v :].data_ptr(),
            scales[h].data_ptr(),
            of.requests.data_ptr(),
            len(of.requests),
            of.longest,
            T,
            total,
            heads,
            q.stride(0),
            of.rope.stride(0),
            values.stride(0),
            scales.shape[1],
            scale,
            stream,
        )
        assert not failed, f"CUDA error {failed}: {q.shape=} {of.requests=} {pages.shape=}"
        del of, k8, v8, of_tiles
    return values, scales


@op.impl("composed")
def composed(q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float) -> tuple[Tensor, Tensor]:
    return quantize_tokens(mla_prefill(q, pages, w_uk, w_uv, span, scale).flatten(1))


def mla_prefill_w8a8(
    q: Tensor, pages: Tensor, w_uk: Tensor, w_uv: Tensor, span: Span, scale: float
) -> tuple[Tensor, Tensor]:
    exact.check(q, pages, w_uk, w_uv, span)
    return op(q, pages, w_uk, w_uv, span, scale)
