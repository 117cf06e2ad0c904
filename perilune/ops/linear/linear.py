"""y = x w^T.  x [T, i], rows may be strided; w [o, i]; y [T, o] as x, or float32 if `wide`. Sums in fp32, rounded once.

"cpp" is faster than torch on CPU below about 16 rows (one row, 384 inputs, 4,096 outputs, two cores: 68 us instead of
147). For bfloat16 it is faster at any size if the CPU has no bfloat16 instructions. Its sums do not depend on the
number of rows. "cuda" (linear.cu) streams the weights of a decode step, for up to 16 rows. For 5 to 8 rows, or very
wide ones, two CTAs split the width. "cuda_many" (skinny_gemm.cu) is for up to 64 rows and large weights. In both, a
row's result does not depend on the other rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, sums
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import FEW_ROWS_ON_CPU, aligned
from perilune.ops.linear import skinny_gemm

FEW_ROWS = 16
SHARED_BYTES = 144 << 10  # bytes of x that "cuda" may keep in the shared memory of an SM
# Two CTAs split the width if x has more than SOME_ROWS rows and SOME_BYTES bytes, up to SPLIT_ROWS rows (with more,
# "cuda_many" is faster) and SPLIT_OUTPUTS outputs (with more, whole rows are faster).
SOME_ROWS, SOME_BYTES = 4, 80 << 10
SPLIT_ROWS, SPLIT_OUTPUTS = 8, 32768
HALVES = 1024  # widths that are split are multiples of this


@dataclass(frozen=True)
class Case(Sized):
    T: int
    i: int
    o: int
    strided: bool = False
    wide: bool = False


CASES = [
    *(
        Case(t, i, o, big=True)
        for i, o in ((K2.hidden, K2.q_rank + K2.latent + K2.rope), (K2.heads * K2.value, K2.hidden), (K2.hidden, 4096))
        for t in (1, 8, 17, 33, 64, 512)
    ),
    *(Case(t, NANO.hidden, NANO.q_rank + NANO.latent + NANO.rope) for t in (1, 4, 16, 512)),
    Case(1, NANO.hidden, NANO.vocab),
    Case(16, NANO.hidden, NANO.vocab, wide=True),
    *(Case(t, i, o, big=True) for i, o in ((K2.q_rank, 12288), (512, 384), (256, 384)) for t in (2, 16)),
    Case(3, K2.hidden, 4096, wide=True, big=True),
    *(
        Case(t, i, o, strided=t == 9, big=True)
        for t in (6, 9, 16)
        for i, o in ((K2.hidden, 2112), (8192, 7168), (5120, 24))
    ),
    Case(4, 18432, 72, big=True),
    *(Case(t, K2.hidden, 67584 + 8, wide=True, big=True) for t in (1, 4, 5)),
    Case(0, 64, 8),
    Case(3, 40, 17),
    Case(5, 24, 1, strided=True),
    Case(4, 7, 5),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x = g.randn(c.T, c.i + 8)[:, : c.i] if c.strided else g.randn(c.T, c.i)
    return {"x": x, "w": g.randn(c.o, c.i, scale=c.i**-0.5), "wide": c.wide}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.linear(c.T, c.i, c.o, dtype.itemsize)


def reference(x: Tensor, w: Tensor, wide: bool) -> Tensor:
    y = x.float() @ w.float().T
    return y if wide else y.to(x.dtype)


op = Op("linear", CASES, TOL, inputs, cost, reference, decides=("x", "w"))


_kernel = build.launcher_by_type("linear", "linear", "plppllll")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "linear",
        device,
        (a.x.dtype != FLOAT32 or a.x.shape[0] <= FEW_ROWS_ON_CPU, f"at most {FEW_ROWS_ON_CPU} rows of float32"),
        (a.x.shape[1] % 8 == 0, "an input width that is a multiple of 8"),
    ),
)
def cpp(x: Tensor, w: Tensor, wide: bool) -> Tensor:
    f, w = x.float(), w.contiguous()
    if f.stride(1) != 1:
        f = f.contiguous()
    (T, i), o = x.shape, w.shape[0]
    y = torch.empty(T, o)
    _kernel(w.dtype)(f.data_ptr(), f.stride(0), w.data_ptr(), y.data_ptr(), T, i, o, threads.count())
    return y if wide or x.dtype == FLOAT32 else y.to(x.dtype)


def fit(T: int, i: int) -> bool:
    """Whether T rows of width i fit the shared memory of an SM, beside the weights in flight."""
    return T * (i + 32) * 2 <= SHARED_BYTES


def halved(x: Tensor, w: Tensor) -> bool:
    """Whether two CTAs of linear.cu split the width of x; not with a norm, which needs whole rows."""
    (T, i), o = x.shape, w.shape[0]
    wide = not fit(T, i) or (T > SOME_ROWS and T * i * 2 > SOME_BYTES)
    few = T <= SPLIT_ROWS and o <= SPLIT_OUTPUTS and fit(T, i // 2)
    return wide and few and w.dtype == BFLOAT16 and i % HALVES == 0


def streamable(x: Tensor, w: Tensor, *, normed: bool = True) -> tuple[tuple[bool, str], ...]:
    """Conditions of linear.cu. Without a norm, two CTAs may split the width."""
    (T, i), o, chunk = x.shape, w.shape[0], 64 // w.itemsize
    return (
        (x.dtype == BFLOAT16, "bfloat16"),
        (
            0 < T <= FEW_ROWS and (fit(T, i) or (not normed and halved(x, w))),
            f"up to {FEW_ROWS} rows that fit shared memory",
        ),
        (i % chunk == 0 and o % 8 == 0, f"input widths in {chunk}s and output widths in 8s"),
    )


_stream = build.launcher("linear.cu", "linear", "plpppfplllllllp")


def k_split(chunks: int, tiles: int, processors: int) -> int:
    """Warps of linear.cu that split k for a tile of 8 outputs: the largest of 8, 4, 2 that leaves each warp at least 12
    chunks (64 bytes of a row) and, unless there are fewer than 4 tiles per SM, whole stages of 4 chunks; else 1."""
    few = tiles < 4 * processors
    return next((s for s in (8, 4, 2) if chunks % s == 0 and chunks // s >= 12 and (few or chunks // s % 4 == 0)), 1)


def run_streamed(
    x: Tensor,
    w: Tensor,
    wide: bool,
    *,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    y: Tensor | None = None,
) -> Tensor:
    """Launches linear.cu. With `scale` [o] float32, w is e4m3; with `norm` [i], x is normalised first. `y`: the output
    tensor, if given."""
    x = aligned(x)
    (T, i), o = x.shape, w.shape[0]
    processors = build.sm_count(x.device)
    shared = norm is None and halved(x, w)
    if y is None:
        y = torch.empty(T, o, dtype=FLOAT32 if wide else BFLOAT16, device=x.device)
    failed = _stream()(
        x.data_ptr(),
        x.stride(0),
        w.data_ptr(),
        None if scale is None else scale.data_ptr(),
        None if norm is None else norm.data_ptr(),
        eps,
        y.data_ptr(),
        T,
        i,
        o,
        wide,
        8 if shared else k_split(i * w.itemsize // 64, o // 8, processors),
        2 if shared else 1,
        processors,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {w.shape=}"
    return y


@op.impl("cuda", when=lambda a, device: build.on_hopper("linear.cu", device, *streamable(a.x, a.w, normed=False)))
def cuda(x: Tensor, w: Tensor, wide: bool) -> Tensor:
    return run_streamed(x, w, wide)


@op.impl(
    "cuda_many",
    when=lambda a, device: build.on_hopper(
        skinny_gemm.SOURCE, device, *skinny_gemm.needs(a.x, a.w), *skinny_gemm.wins(a.x, a.w)
    ),
)
def cuda_many(x: Tensor, w: Tensor, wide: bool) -> Tensor:
    return skinny_gemm.run(x, w, wide=wide)


@op.impl("torch")
def library(x: Tensor, w: Tensor, wide: bool) -> Tensor:
    y = torch.nn.functional.linear(x, w)
    return y.float() if wide else y


def linear(x: Tensor, w: Tensor, wide: bool = False) -> Tensor:
    assert x.shape[1] == w.shape[1] and x.dtype == w.dtype, f"{x.shape=} {x.dtype=} {w.shape=} {w.dtype=}"
    return op(x, w, wide)
