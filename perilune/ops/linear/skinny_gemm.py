"""The launcher of skinny_gemm.cu: products of up to 128 rows with weights that are read once.

y = x w^T for x [T, i] bfloat16, rows of which may be strided, and w [o, i] bfloat16 or, with `scale` [o] float32,
float8_e4m3fn; `gated`: w has gate's rows, then up's, and y = silu(gate) * up of the products with them. Sums are fp32,
rounded once, the scale is applied to them. A row's result does not depend on the other rows, but with e4m3 its last
bits depend on whether x has more than 32, or more than 64 rows. `linear`, `linear_fp8`, `router` and `moe_int4` use it;
they have the contracts and the checks.

Times in us for 64 (32) tokens, with the small kernel that follows, in the decode graph of K2.5's layers on an H200:
o 36.3 (34.3), cuBLAS 39.3 (37.5); qkv_a 13.0 (13.1), cuBLAS 15.0 (15.6); q_b 19.7 (17.4), cuBLAS 20.9 (19.6). The
shared expert's gate and up are slower than cuBLAS: 21.0 against 17.9 for 64 tokens.
"""

import torch
from torch import Tensor

from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32

SOURCE = "skinny_gemm.cu"
MOST_ROWS = 128
MOST_DENSE = 64  # max rows for which it is faster than cuBLAS, with bfloat16 weights of at least LARGE values
LARGE = 1 << 22
WORTH = 5760  # min (rows of w) x (CTAs that split k) to fill the GPU
ONE_PASS = 15360  # max (rows of w) x (CTAs that split k) in one wave of CTAs
LONGEST = 4096  # max columns (k) per CTA, if k can be split further
# With more than SOME_ROWS rows of x, bfloat16 is faster than cuBLAS only if w has FULL rows, times the splits, or more.
SOME_ROWS, FULL = 32, 8400


def needs(x: Tensor, w: Tensor) -> tuple[tuple[bool, str], ...]:
    """Conditions of the kernel on w and x, except for x's width."""
    T, (o, i), stage = x.shape[0], w.shape, 128 // w.itemsize
    return (
        (x.dtype == BFLOAT16, "bfloat16"),
        (0 < T <= MOST_ROWS, f"1 to {MOST_ROWS} rows"),
        (i % stage == 0 and o % 8 == 0, f"input widths in {stage}s and output widths in 8s"),
    )


def wins(x: Tensor, w: Tensor) -> tuple[tuple[bool, str], ...]:
    """Further conditions for bfloat16 weights, under which cuBLAS is slower."""
    (T, i), o = x.shape, w.shape[0]
    held = o * layout(o, i, i // 64)[1]
    return (
        (T <= MOST_DENSE, f"at most {MOST_DENSE} rows"),
        (o * i >= LARGE and held <= ONE_PASS and (T <= SOME_ROWS or held >= FULL), "weights of some MB"),
    )


def layout(o: int, i: int, stages: int, gated: bool = False) -> tuple[int, int]:
    """(CTAs of a cluster, how many of them split k). k is split if w has few rows, or long ones; the number of splits
    divides the number of stages along k. CTAs with the same k share x."""
    splits = 1
    while splits < 8 and stages % (2 * splits) == 0:
        if o * splits >= WORTH and (i // splits <= LONGEST or o * splits * 2 > ONE_PASS):
            break
        splits *= 2
    return 4 if splits == 2 and not gated else splits, splits


_kernel = build.launcher(SOURCE, "skinny_gemm", "plpppl" + "l" * 7 + "p")


def run(
    x: Tensor,
    w: Tensor,
    *,
    scale: Tensor | None = None,
    wide: bool = False,
    gated: bool = False,
    y: Tensor | None = None,
) -> Tensor:
    """y [T, o] (gated: [T, o / 2]) bfloat16, or float32 if `wide`; or written to `y`, which may have strided rows."""
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    (T, i), o, stage = x.shape, w.shape[0], 128 // w.itemsize
    if y is None:
        y = torch.empty(T, o // 2 if gated else o, dtype=FLOAT32 if wide else BFLOAT16, device=x.device)
    cluster, splits = layout(o, i, i // stage, gated)
    assert w.is_contiguous() and y.stride(1) == 1 and y.stride(0) % 4 == 0, f"{w.stride()=} {y.stride()=}"
    failed = _kernel()(
        x.data_ptr(),
        x.stride(0),
        w.data_ptr(),
        None if scale is None else scale.data_ptr(),
        y.data_ptr(),
        y.stride(0),
        T,
        i,
        o,
        y.dtype == FLOAT32,
        gated,
        splits,
        cluster,
        build.stream(x.device),
    )
    assert not failed, f"skinny_gemm does not start: error {failed}, {x.shape=} {w.shape=}"
    return y
