"""The MoE block on INT4 experts: y.sum(1) = experts_int4(x, chosen, gate_up, down) + shared expert(x).

x [T, D]; chosen: a `Chosen` with k experts per token; gate_up and down as in experts_int4.py, or with compact scales as
in experts_int4_compact.py; shared: the shared expert, of x's type or FP8 (linear_fp8.py), or None.
y [T, P, D] float32: P partial sums per token, which the following norm adds in order. P = 1 unless `partial`; then the
implementation chooses P.

"cuda" (bf16 on Hopper, at most 128 tokens, 256 with compact scales) streams the weights of the chosen experts in two
steps. gate_up writes h = silu(gate) * up, rounded to bf16, for routed and shared experts. down writes an fp32 row
of y for every pair (token, expert), times its routing weight, and one for the shared expert: P = k + 1, or k without a
shared expert. Dequantised weights, x and h are exact, sums are fp32. moe_int4_t1.cu is for one token: for routed
experts it rounds x and h to 2^-14 of the greatest magnitude of 32 values (int4_fixed.cuh), and an infinite or undefined
value makes these 32 undefined. moe_int4_mma_tma.cu is for more: it reads an expert once for every 4 of its tokens. From
2 tokens on, the rows of routed experts do not depend on the batch. The shared expert's row depends only on whether the
batch has up to 16 tokens (it is part of the two steps) or more (separate launches). An id outside 0 .. E - 1 is
skipped; its row stays unwritten. The steps are two launches, or one with the same bits for one token (T1_JOINED) or few
(MAX_JOINED) of a rank's share of the width: it loads weights of down while the last of h is computed. Its CTAs wait for
each other, so the engine must be `alone` (workspace.py).

Overlap with the router: gate_up may read x while the kernel that writes ids still runs. So from 2 tokens on, x must be
written before that kernel lets gate_up start (router.py's kernel waits until x is ready). One token's gate_up starts
before the router has ended if `chosen` carries a publication that is still valid (`chosen.Mailbox.take`); otherwise it
waits for the router's end. If x is the norm of a residual that is still being written (mla_decode_router.py), gate_up
computes x itself, with the same bits. Each stream has its own mailbox and counters.

"cuda_tall" (moe_int4_tall.py) is for 128 to 383 tokens (512 if experts have width 1,024 or less), "cuda_cluster"
(moe_int4_cluster.py) for up to 5,000 and for compact scales from 128, "cuda_prefill" (moe_int4_grouped.py) for more:
grouped products on wgmma, P = 1, with the same bits for the routed experts.
"cpp" (experts.cpp) is one call for few tokens of float32, routed experts first: P = 1.
"composed" is experts_int4 or experts_int4_compact, linear or linear_fp8, and swiglu: P = 1.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, dequantized
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import FEW_ROWS_ON_CPU, addresses
from perilune.ops.layouts.int4 import GROUP
from perilune.ops.layouts.operands import Matrix, Mlp, Pairs
from perilune.ops.linear import linear_w8a8, skinny_gemm
from perilune.ops.linear.linear import linear
from perilune.ops.linear.linear_fp8 import matmul, quantize_rows
from perilune.ops.moe import (
    combine_add_rmsnorm,
    experts_int4,
    experts_int4_compact,
    moe_int4_cluster,
    moe_int4_grouped,
    moe_int4_tall,
)
from perilune.ops.moe.chosen import Chosen, mailbox
from perilune.ops.moe.experts import Case as Routed
from perilune.ops.moe.experts import chosen
from perilune.ops.pointwise.swiglu import swiglu

T1, MMA_TMA = "moe_int4_t1.cu", "moe_int4_mma_tma.cu"
MAX_TOKENS = 128  # max tokens of "cuda"; with more, dequantising an expert once for all its tokens is faster
MAX_COMPACT = 256  # the same with compact scales
MAX_PAIRS = 2048  # pairs (token, expert)
MAX_JOINED = 2048  # max T * I for gate_up and down in one launch; above, two launches with more registers are faster
T1_JOINED = (256, 512, 1024)  # widths I for which one launch is faster for one token
MAX_CHOICES = 32  # experts per token
MAX_SHARED = 16  # max tokens for which the routed experts' launches compute the shared expert too
UNITS = 4 + 2 * (MAX_PAIRS + 4)  # words of counters, `Units` in moe_int4_mma_tma.cu
PIECE = 128  # INT4 values of a weight row that the kernels load at once


@dataclass(frozen=True)
class Case(Routed):
    S: int = 0  # width of the shared expert
    shared_fp8: bool = False
    compact: bool = False  # scales of 8 bits


CASES = [
    *(Case(t, K2.top_k, 48, K2.hidden, K2.width, S=K2.width, big=True) for t in (1, 2, 4, 8, 9, 16, 17, 64, 256)),
    Case(1, K2.top_k, 48, K2.hidden, K2.width // 4, S=K2.width // 4, big=True),
    *(
        Case(t, K2.top_k, 48, K2.hidden, K2.width // n, S=K2.width // n, shared_fp8=fp8, compact=t > 4, big=True)
        for t in (1, 4, 16, 64)
        for n, fp8 in ((2, True), (4, True), (8, t > 1))
    ),
    *(
        Case(1, K2.top_k, 48, K2.hidden, K2.width // n, compact=True, S=K2.width // n, shared_fp8=True, big=True)
        for n in (4, 8)
    ),
    Case(3, K2.top_k, 48, K2.hidden, K2.width // 4, S=K2.width // 4, big=True),
    Case(16, K2.top_k, 48, K2.hidden, K2.width // 8, big=True),
    Case(200, 1, 8, K2.hidden, K2.width // 8, to_one=True, S=K2.width // 8, big=True),
    *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width, S=NANO.width) for t in (1, 3, 4, 16, 64, 256, 300)),
    *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width) for t in (1, 7, 100)),
    Case(0, 2, 4, 32, 32, S=32),
    Case(9, 3, 5, 64, 32, S=64),
    Case(1, 1, 1, 128, 128),
    Case(33, 1, 6, 256, 128, to_one=True),
    Case(16, 1, 6, 128, 256, to_one=True, S=96),
    Case(7, 2, 4, 384, 640, S=160),
    *(Case(t, K2.top_k, 16, K2.hidden, K2.width, S=K2.width, shared_fp8=True, big=True) for t in (1, 4, 16, 64)),
    *(Case(t, K2.top_k, 16, K2.hidden, K2.width, S=K2.width, compact=True, big=True) for t in (1, 4, 16, 64)),
    Case(2, K2.top_k, 16, K2.hidden, K2.width, S=K2.width, shared_fp8=True, compact=True, big=True),
    Case(12, NANO.top_k, NANO.experts, NANO.hidden, NANO.width, S=NANO.width, shared_fp8=True),
    *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width, S=NANO.width, compact=True) for t in (1, 20, 300)),
    Case(3, 2, 5, 384, 640, S=64, shared_fp8=True, compact=True),
    *(Case(t, K2.top_k, 16, K2.hidden, K2.width, S=K2.width, big=True) for t in (257, 500, 1000)),
    Case(700, K2.top_k, 16, K2.hidden, K2.width, S=K2.width, compact=True, big=True),
    Case(300, K2.top_k, 48, K2.hidden, K2.width, S=K2.width, shared_fp8=True, compact=True, big=True),
    Case(600, 2, 9, 1024, 384, to_one=True, big=True),
    Case(400, 1, 3, 128, 128, to_one=True, compact=True, big=True),
    *(Case(t, K2.top_k, 48, K2.hidden, K2.width // 4, S=K2.width // 4, big=True) for t in (130, 1024)),
    Case(600, 1, 3, 768, 256, to_one=True, big=True),
    Case(333, 3, 7, 1024, 512, S=64, compact=True, big=True),
    *(
        Case(t, K2.top_k, 48, K2.hidden, K2.width // n, S=K2.width // n, shared_fp8=True, compact=compact, big=True)
        for t, n, compact in ((4, 4, True), (4, 8, True), (8, 4, False), (8, 4, True))
    ),
]
TOL = {"y": dequantized()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x, routed, matrix = g.randn(c.T, c.D), chosen(c, g), g.int4_compact if c.compact else g.int4
    gate_up, down = Matrix(*matrix(c.E, 2 * c.I, c.D)), Matrix(*matrix(c.E, c.D, c.I))
    shared = None
    if c.S:
        both, one = g.randn(2 * c.S, c.D, scale=c.D**-0.5), g.randn(c.D, c.S, scale=c.S**-0.5)
        shared = Mlp(*(Matrix(*quantize_rows(w)) if c.shared_fp8 else Matrix(w) for w in (both, one)))
    return {"x": x, "chosen": routed, "gate_up": gate_up, "down": down, "shared": shared, "partial": False}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    routed = costs.experts(
        c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, experts_int4_compact.BITS if c.compact else costs.INT4_BITS
    )
    bits = 8 if c.shared_fp8 else 8 * dtype.itemsize
    return routed + costs.experts(c.T, 1, min(1, c.T), c.D, c.S, dtype.itemsize, bits) if c.S else routed


def _widened(w: Matrix) -> Tensor:
    return w.weight.float() if w.scale is None else w.weight.float() * w.scale.unsqueeze(-1)


def reference(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool) -> Tensor:
    f = x.float()
    routed = experts_int4.op if gate_up.row_scale is None else experts_int4_compact.op
    y = routed.reference(f, chosen, gate_up, down)
    if shared is not None:
        gate, up = (f @ _widened(shared.gate_up).T).chunk(2, -1)
        y += (gate * torch.sigmoid(gate) * up) @ _widened(shared.down).T
    return y.unsqueeze(1)


op = Op("moe_int4", CASES, TOL, inputs, cost, reference, decides=("x", "chosen", "gate_up"))


def _shared(x: Tensor, w: Mlp) -> Tensor:
    if linear_w8a8.applies(w.gate_up, x):
        return linear_w8a8.mlp(x, w)
    return matmul(swiglu(matmul(x, w.gate_up)), w.down)


def _add_shared(y: Tensor, x: Tensor, w: Mlp) -> None:
    """Writes the shared expert's result to y [T, D] float32."""
    gate_up, down = w.gate_up, w.down
    if not all(met for m in (gate_up, down) for met, _ in skinny_gemm.needs(x, m.weight)):
        y.copy_(_shared(x, w))
    elif gate_up.scale is None:
        skinny_gemm.run(swiglu(linear(x, gate_up.weight)), down.weight, y=y)
    else:
        h = skinny_gemm.run(x, gate_up.weight, scale=gate_up.scale, gated=True)
        skinny_gemm.run(h, down.weight, scale=down.scale, y=y)


_gate_up = build.launcher(T1, "moe_int4_t1_gate_up", "p" * 11 + "lppf" + "l" * 6 + "p")
_down = build.launcher(T1, "moe_int4_t1_down", "p" * 12 + "l" * 8 + "p")
_one_launch = build.launcher(T1, "moe_int4_t1", "p" * 16 + "lppf" + "l" * 7 + "p")
_both = build.launcher(MMA_TMA, "moe_int4_mma_tma", "p" * 17 + "l" * 9 + "p")


def _fits(a: Any, device: torch.device) -> bool | str:
    (T, D), (E, both, _) = a.x.shape, a.gate_up.scale.shape
    most = MAX_TOKENS if a.gate_up.row_scale is None else MAX_COMPACT
    first = build.on_hopper(
        MMA_TMA,
        device,
        (a.x.dtype == BFLOAT16 and a.gate_up.scale.dtype in (BFLOAT16, torch.uint8), "bfloat16"),
        (1 <= T <= most and T * a.chosen.ids.shape[1] <= MAX_PAIRS, f"1 to {most} tokens, {MAX_PAIRS} choices"),
        (_streams(D, 1792, 7168) and _streams(both // 2, 2048, 4096), f"widths that are multiples of {4 * PIECE}"),
        (E <= 1024, "at most 1024 experts"),
    )
    return build.on_hopper(T1, device) if first is True else first


def _streams(width: int, short: int, most: int) -> bool:
    """Whether the kernels take rows of `width` values: a multiple of PIECE up to `short`, of 4 PIECE up to `most`."""
    return width % PIECE == 0 and width <= most and (width % (4 * PIECE) == 0 or width <= short)


@op.impl(
    "cuda_tall",
    when=lambda a, device: build.on_hopper(moe_int4_tall.SOURCE, device, *moe_int4_tall.needs(a.x, a.gate_up)),
)
def cuda_tall(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool) -> Tensor:
    return moe_int4_tall.run(x, chosen, gate_up, down, None if shared is None else _shared(x, shared))


@op.impl(
    "cuda_cluster",
    when=lambda a, device: build.on_hopper(
        moe_int4_cluster.source_for(a.gate_up), device, *moe_int4_cluster.needs(a.x, a.gate_up)
    ),
)
def cuda_cluster(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool) -> Tensor:
    y = torch.empty(len(x), 1, x.shape[1], dtype=FLOAT32, device=x.device)
    moe_int4_cluster.run(x, chosen, gate_up, down, None if shared is None else _shared(x, shared), y)
    return y


@op.impl("cuda", when=_fits, waits=(T1, MMA_TMA))
def cuda(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool) -> Tensor:
    (T, D), k, (E, both, _) = x.shape, chosen.ids.shape[1], gate_up.weight.shape
    I, memory, processors = both // 2, workspace.current(x.device), build.sm_count(x.device)  # noqa: E741
    one = T == 1 and k <= MAX_CHOICES
    published = mailbox(memory).take(chosen.publication, x) if one else None
    x, ids, weights = x.contiguous(), chosen.ids.contiguous(), chosen.weights.contiguous()
    fused = shared if shared is not None and T <= MAX_SHARED and shared.down.weight.shape[1] <= I else None
    S = 0 if fused is None else fused.down.weight.shape[1]
    P = k if shared is None else k + 1
    h = torch.empty(T * (k * I + S), dtype=BFLOAT16, device=x.device)
    y = torch.empty(T, P, D, dtype=FLOAT32, device=x.device)

    def places(w: Matrix, of_shared: Matrix | None) -> list[int | None]:
        tensors = [w.weight, w.scale, w.row_scale]
        tensors += (None, None) if of_shared is None else (of_shared.weight, of_shared.scale)
        return addresses(*tensors)

    upper, lower = places(gate_up, fused.gate_up if fused else None), places(down, fused.down if fused else None)
    hidden = (h.data_ptr(), h.data_ptr() + 2 * T * k * I)  # routed, shared
    if one:
        words, number = mailbox(memory).words.data_ptr(), published.number if published else 0
        found = published.source if published else None
        begin = (found.residual.data_ptr(), found.norm.data_ptr(), found.eps) if found else (None, None, 0.0)
        sizes = (k, E, D, I, S)
        row = 0 if fused is None else S * fused.down.weight.element_size()
        if memory.alone and I in T1_JOINED and D % 1792 == 0 and row % 128 == 0:
            joint = memory.zeros(("moe_int4.joint", processors, k, I), 4 + (k + 1) * I).data_ptr()
            failed = _one_launch()(
                x.data_ptr(), ids.data_ptr(), weights.data_ptr(), *upper, *lower, y.data_ptr(), joint, words, number,
                *begin, *sizes, P, processors, memory.stream,
            )  # fmt: skip
        else:
            # Work counters, [0] of gate_up and [1] of down: units that CTAs have taken. Each kernel clears the other's.
            taken = memory.zeros("moe_int4.taken", 2).data_ptr(), words, number
            failed = _gate_up()(
                x.data_ptr(), ids.data_ptr(), *upper, *hidden, *taken, *begin, *sizes, processors, memory.stream
            ) or _down()(
                *hidden, ids.data_ptr(), weights.data_ptr(), *lower, y.data_ptr(), *taken, *sizes, P, processors,
                memory.stream,
            )  # fmt: skip
    else:
        units = memory.zeros(("moe_int4.units", processors), UNITS).data_ptr()
        apart = not memory.alone or I not in (256, 512) or T * I > MAX_JOINED
        failed = _both()(
            x.data_ptr(), ids.data_ptr(), weights.data_ptr(), *upper, *lower, *hidden, y.data_ptr(), units,
            T, k, E, D, I, S, P, apart, processors, memory.stream,
        )  # fmt: skip
    assert not failed, f"moe_int4: {failed=} {x.shape=} {ids.shape=} {gate_up.kind=} {S=}"
    if shared is not None and fused is None:
        _add_shared(y[:, k], x, shared)
    return y if partial else y.sum(1, keepdim=True)


@op.impl(
    "cuda_prefill",
    when=lambda a, device: build.on_hopper(
        moe_int4_grouped.source_for(a.gate_up),
        device,
        (a.x.shape[0] > MAX_TOKENS, f"more than {MAX_TOKENS} tokens"),
        *moe_int4_grouped.needs(a.x, a.gate_up),
    ),
)
def cuda_prefill(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool) -> Tensor:
    rest = None if shared is None else functools.partial(_shared, w=shared)
    return moe_int4_grouped.prefill(x, chosen, gate_up, down, rest)


_on_cpu = build.launcher("experts", "moe_int4", "p" * 11 + "l" * 7)


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "experts",
        device,
        (a.x.dtype == FLOAT32 and a.x.shape[0] <= FEW_ROWS_ON_CPU, f"at most {FEW_ROWS_ON_CPU} tokens of float32"),
        (a.gate_up.scale.dtype == BFLOAT16, "bfloat16 scales"),
    ),
)
def cpp(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool) -> Tensor:
    (T, D), k, (E, both, _) = x.shape, chosen.ids.shape[1], gate_up.weight.shape
    I = both // 2  # noqa: E741
    fused = shared if shared is not None and shared.down.scale is None else None
    S = 0 if fused is None else fused.down.weight.shape[1]
    of_shared = (None, None) if fused is None else (fused.gate_up.weight, fused.down.weight)
    given = (x, chosen.ids, chosen.weights, gate_up.weight, gate_up.scale, down.weight, down.scale, *of_shared)
    read = [t if t is None else t.contiguous() for t in given]
    h, y = torch.empty(T * (k * I + S)), torch.empty(T, 1, D)
    failed = _on_cpu()(*addresses(*read, h, y), T, k, E, D, I, S, threads.count())
    assert not failed, f"an id is no expert: {chosen.ids.min()=} {chosen.ids.max()=} {E=}"
    if shared is not None and fused is None:
        y[:, 0] += _shared(x, shared)
    return y


@op.impl("composed")
def composed(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool) -> Tensor:
    experts = experts_int4.experts_int4 if gate_up.row_scale is None else experts_int4_compact.experts_int4_compact
    y = experts(x, chosen, gate_up, down).float()
    if shared is not None:
        y += _shared(x, shared)
    return y.unsqueeze(1)


def _check_shared(x: Tensor, w: Mlp) -> None:
    (D, S), gate_up, down = w.down.weight.shape, w.gate_up, w.down
    kinds = f"{x.shape=} {x.dtype=} {gate_up.kind=} {down.kind=}"
    assert D == x.shape[1] and gate_up.weight.shape == (2 * S, D) and S % GROUP == 0, kinds
    if gate_up.scale is None or down.scale is None:
        assert gate_up.scale is None and down.scale is None, "half a shared expert in FP8"
        assert x.dtype == gate_up.weight.dtype == down.weight.dtype, kinds
    else:
        assert gate_up.weight.dtype == down.weight.dtype == torch.float8_e4m3fn and S % 64 == D % 64 == 0, kinds
        assert gate_up.scale.shape == (2 * S,) and down.scale.shape == (D,), kinds
        assert gate_up.scale.dtype == down.scale.dtype == FLOAT32, kinds


def moe_int4(
    x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None, partial: bool = True
) -> Tensor:
    _check(x, chosen, gate_up, down, shared)
    return op(x, chosen, gate_up, down, shared, partial)


def moe_int4_pairs(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None) -> Pairs | None:
    """The unsummed results of `moe_int4`, for combine_add_rmsnorm.py. None for fewer than its MIN_TOKENS, or if the
    implementation for these arguments returns sums only."""
    _check(x, chosen, gate_up, down, shared)
    if len(x) < combine_add_rmsnorm.MIN_TOKENS:
        return None
    run = op.choice(x, chosen, gate_up, down, shared, False)
    if run is cuda_cluster:
        return moe_int4_cluster.run(x, chosen, gate_up, down, None if shared is None else _shared(x, shared), None)
    if run is cuda_prefill and len(x) <= moe_int4_grouped.CHUNK:
        rest = None if shared is None else functools.partial(_shared, w=shared)
        return moe_int4_grouped.unsummed(x, chosen, gate_up, down, rest)
    return None


def _check(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None) -> None:
    (experts_int4 if gate_up.row_scale is None else experts_int4_compact).check(x, chosen, gate_up, down)
    assert (gate_up.row_scale is None) == (down.row_scale is None), f"{gate_up.kind=} {down.kind=}"
    if gate_up.row_scale is None:
        assert gate_up.scale is not None and gate_up.scale.dtype != torch.uint8, f"{gate_up.kind=}"
    if shared is not None:
        _check_shared(x, shared)
