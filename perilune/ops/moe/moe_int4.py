"""The MoE block on INT4 experts: y.sum(1) = experts_int4(x, ids, weights, ...) + shared expert(x).

x [T, D]; ids [T, k] int32, distinct within a row; weights [T, k] float32; gate_up_packed [E, 2 I, D / 8] int32,
gate_up_scale [E, 2 I, D / 32], down_packed [E, D, I / 8], down_scale [E, D, I / 32] as in experts_int4.py; or scales of
uint8 with gate_up_row [E, 2 I] and down_row [E, D] bfloat16, as in experts_int4_compact.py.
shared_gate_up [2 S, D] and shared_down [D, S], the gate's rows first: as x, or float8_e4m3fn with
shared_gate_up_scale [2 S] and shared_down_scale [D] float32, as in linear_fp8.py; or None both: no shared expert.
y [T, P, D] float32: rows whose sum is the result, to be added in order by the norm that follows. If `partial`, P is the
implementation's choice, else 1.

"cuda" (bf16 on Hopper, at most 256 tokens) streams the weights of the experts that were hit, in two launches: h =
silu(gate) * up, rounded to bf16, for routed and shared experts; then a row of y for every pair, the routing weight
applied to the fp32 result, and one for the shared expert: P = k + 1, or k without one. Dequantised weights, x and h are
exact, sums are fp32. moe_int4_t1.cu is for one token, moe_int4_mma_tma.cu for 2 to 128 and for compact scales,
moe_int4_mma_cpasync.cu for more. A token's rows do not depend on the batch within 2 to 128 and within 129 to 256 tokens
(2 to 256 with compact scales), the shared expert's within 2 to 16, where it rides in the same launches, and not above,
where it is calls of its own. Between these, sums run in another order. moe_int4_mma_tma.cu reads an expert once for
every 4 of its tokens, moe_int4_mma_cpasync.cu for every 8 (gate_up 7, for K2's sizes), which is why it wins above. An
id that is no expert is passed over and its row left unwritten. From 2 tokens on x must be older than ids: gate_up may
read it while the kernel that writes ids still runs (router.py's does not let it start before). For a lone token it
starts before x is there if the router announces these ids (`router.announced`), and waits for its predecessor if not;
where x is the norm of what is still being handed over (mla_decode_router.py), it makes the very same x itself. Launches
of one stream share counters; another stream has its own.
"cuda_prefill" (moe_int4_grouped.py) is for more tokens: grouped products on wgmma, P = 1.
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
from perilune.ops.harness.tensors import FEW_ON_CPU
from perilune.ops.layouts.int4 import GROUP
from perilune.ops.linear import skinny_gemm
from perilune.ops.linear.linear import linear
from perilune.ops.linear.linear_fp8 import linear_fp8, quantize_rows
from perilune.ops.moe import moe_int4_grouped, router
from perilune.ops.moe.experts import Case as Routed
from perilune.ops.moe.experts import routing
from perilune.ops.moe.experts_int4 import experts_int4
from perilune.ops.moe.experts_int4 import reference as routed_reference
from perilune.ops.moe.experts_int4_compact import BITS as COMPACT_BITS
from perilune.ops.moe.experts_int4_compact import experts_int4_compact
from perilune.ops.moe.experts_int4_compact import reference as compact_reference
from perilune.ops.pointwise.swiglu import swiglu

T1, MMA_TMA, MMA_CPASYNC = "moe_int4_t1.cu", "moe_int4_mma_tma.cu", "moe_int4_mma_cpasync.cu"
MAX_TOKENS = 256  # of the CUDA kernels; above, dequantising an expert once for all its tokens wins
MAX_PAIRS = 2048  # (token, expert)
MAX_CHOICES = 32  # of a lone token
MAX_MMA_TMA = 128  # tokens of MMA_TMA; with compact scales it takes all
MAX_SHARED = 16  # tokens whose shared expert rides in the routed experts' launches
PIECE = 128  # values of a row that the kernels take at once


@dataclass(frozen=True)
class Case(Routed):
    S: int = 0  # width of the shared expert
    shared_fp8: bool = False
    compact: bool = False  # scales of 8 bits


CASES = [
    *(Case(t, K2.top_k, 48, K2.hidden, K2.width, S=K2.width, big=True) for t in (1, 2, 4, 8, 9, 16, 17, 64, 256)),
    Case(1, K2.top_k, 48, K2.hidden, K2.width // 4, S=K2.width // 4, big=True),
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
]
TOL = {"y": dequantized()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x, routes = g.randn(c.T, c.D), routing(c, g)
    gate_up_row = down_row = gate_up_scales = down_scales = None
    if c.compact:
        gate_up_packed, gate_up_scale, gate_up_row = g.int4_compact(c.E, 2 * c.I, c.D)
        down_packed, down_scale, down_row = g.int4_compact(c.E, c.D, c.I)
    else:
        gate_up_packed, gate_up_scale = g.int4(c.E, 2 * c.I, c.D)
        down_packed, down_scale = g.int4(c.E, c.D, c.I)
    gate_up = g.randn(2 * c.S, c.D, scale=c.D**-0.5) if c.S else None
    down = g.randn(c.D, c.S, scale=c.S**-0.5) if c.S else None
    if c.shared_fp8 and gate_up is not None and down is not None:
        gate_up, gate_up_scales = quantize_rows(gate_up)
        down, down_scales = quantize_rows(down)
    return {
        "x": x,
        **routes,
        "gate_up_packed": gate_up_packed,
        "gate_up_scale": gate_up_scale,
        "gate_up_row": gate_up_row,
        "down_packed": down_packed,
        "down_scale": down_scale,
        "down_row": down_row,
        "shared_gate_up": gate_up,
        "shared_gate_up_scale": gate_up_scales,
        "shared_down": down,
        "shared_down_scale": down_scales,
        "partial": False,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    routed = costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, COMPACT_BITS if c.compact else costs.INT4_BITS)
    bits = 8 if c.shared_fp8 else 8 * dtype.itemsize
    return routed + costs.experts(c.T, 1, min(1, c.T), c.D, c.S, dtype.itemsize, bits) if c.S else routed


def _widened(w: Tensor, scale: Tensor | None) -> Tensor:
    return w.float() if scale is None else w.float() * scale.unsqueeze(-1)


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor | None,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    partial: bool,
) -> Tensor:
    f = x.float()
    if gate_up_row is None or down_row is None:
        y = routed_reference(f, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale)
    else:
        y = compact_reference(
            f, ids, weights, gate_up_packed, gate_up_scale, gate_up_row, down_packed, down_scale, down_row
        )
    if shared_gate_up is not None and shared_down is not None:
        gate, up = (f @ _widened(shared_gate_up, shared_gate_up_scale).T).chunk(2, -1)
        y += (gate * torch.sigmoid(gate) * up) @ _widened(shared_down, shared_down_scale).T
    return y.unsqueeze(1)


op = Op("moe_int4", CASES, TOL, inputs, cost, reference, decides=("x", "gate_up_scale"))


def _linear(x: Tensor, w: Tensor, scale: Tensor | None) -> Tensor:
    return linear(x, w) if scale is None else linear_fp8(x, None, w, scale)


def _shared(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, down: Tensor, down_scale: Tensor | None
) -> Tensor:
    return _linear(swiglu(_linear(x, gate_up, gate_up_scale)), down, down_scale)


def _add_shared(
    y: Tensor, x: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, down: Tensor, down_scale: Tensor | None
) -> None:
    """The same to y [T, D] float32."""
    if not all(met for w in (gate_up, down) for met, _ in skinny_gemm.needs(x, w)):
        y.copy_(_shared(x, gate_up, gate_up_scale, down, down_scale))
    elif gate_up_scale is None:
        skinny_gemm.run(swiglu(linear(x, gate_up)), down, y=y)
    else:
        h = skinny_gemm.run(x, gate_up, scale=gate_up_scale, gated=True)
        skinny_gemm.run(h, down, scale=down_scale, y=y)


@functools.cache
def _gate_up(source: str) -> Any:
    if source == T1:
        return build.function(T1, "moe_int4_t1_gate_up", "p" * 11 + "lppf" + "l" * 6 + "p")
    if source == MMA_TMA:
        return build.function(MMA_TMA, "moe_int4_mma_tma_gate_up", "p" * 10 + "l" * 7 + "p")
    return build.function(MMA_CPASYNC, "moe_int4_mma_cpasync_gate_up", "p" * 5 + "l" * 6 + "p")


@functools.cache
def _down(source: str) -> Any:
    if source == T1:
        return build.function(T1, "moe_int4_t1_down", "p" * 12 + "l" * 8 + "p")
    if source == MMA_TMA:
        return build.function(MMA_TMA, "moe_int4_mma_tma_down", "p" * 11 + "l" * 8 + "p")
    return build.function(MMA_CPASYNC, "moe_int4_mma_cpasync_down", "p" * 6 + "l" * 7 + "p")


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fits(a: Any, device: torch.device) -> bool | str:
    (T, D), (E, both, _) = a.x.shape, a.gate_up_scale.shape
    first = build.on_hopper(
        MMA_TMA,
        device,
        (a.x.dtype == BFLOAT16 and a.gate_up_scale.dtype in (BFLOAT16, torch.uint8), "bfloat16"),
        (1 <= T <= MAX_TOKENS and T * a.ids.shape[1] <= MAX_PAIRS, f"1 to {MAX_TOKENS} tokens, {MAX_PAIRS} choices"),
        (_streams(D, 1792, 7168) and _streams(both // 2, 2048, 4096), f"widths that are multiples of {4 * PIECE}"),
        (E <= 1024, "at most 1024 experts"),
    )
    others = [build.on_hopper(source, device) for source in (T1, MMA_CPASYNC)] if first is True else [first]
    return next((why for why in others if why is not True), True)


def _streams(width: int, short: int, most: int) -> bool:
    """Whether the kernels take rows of so many values: `short` ones may be any multiple of PIECE."""
    return width % PIECE == 0 and width <= most and (width % (4 * PIECE) == 0 or width <= short)


@op.impl("cuda", when=_fits)
def cuda(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor | None,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    partial: bool,
) -> Tensor:
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 8  # noqa: E741
    processors, memory = _processors(x.device), workspace.current(x.device)
    stream = memory.stream
    told = router.announced(x, ids, stream)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    many = T > MAX_MMA_TMA and gate_up_row is None
    rides = shared_down.shape[1] if shared_down is not None and T <= MAX_SHARED and shared_down.shape[1] <= I else 0
    P = k if shared_down is None else k + 1
    h = torch.empty(T * (k * I + rides), dtype=BFLOAT16, device=x.device)
    y = torch.empty(T, P, D, dtype=FLOAT32, device=x.device)
    h_shared = h.data_ptr() + 2 * T * k * I

    def at(t: Tensor | None, used: int = 1) -> int | None:
        return t.data_ptr() if used and t is not None else None

    upper, lower = at(shared_gate_up, rides), at(shared_down, rides)
    upper_scale, lower_scale = at(shared_gate_up_scale, rides), at(shared_down_scale, rides)
    source = T1 if T == 1 and k <= MAX_CHOICES else MMA_CPASYNC if many else MMA_TMA
    sizes = (k, E, D, I, rides) if source == T1 else (T, k, E, D, I) if many else (T, k, E, D, I, rides)
    shared_rows = () if many else (h_shared,)
    # The pieces of work that the CTAs of gate_up and of down have taken: each launch makes the other's zero again.
    taken: tuple[int, ...] = () if many else (memory.zeros("moe_int4.taken", 2).data_ptr(),)
    begin: tuple[int | float | None, ...] = ()
    if source == T1:
        taken += (router.mailbox(memory).data_ptr(), told.number)
        begin = (None, None, 0.0)
        if told.source is not None:
            begin = (told.source.fresh.data_ptr(), told.source.norm.data_ptr(), told.source.eps)
    extra = () if many else (at(gate_up_row), upper, upper_scale)
    failed = _gate_up(source)(
        x.data_ptr(), ids.data_ptr(), gate_up_packed.data_ptr(), gate_up_scale.data_ptr(), *extra, h.data_ptr(),
        *shared_rows, *taken, *begin, *sizes, processors, stream,
    )  # fmt: skip
    assert not failed, f"moe_int4_gate_up: {failed=} {x.shape=} {ids.shape=} {gate_up_packed.shape=} {rides=}"
    extra = () if many else (at(down_row), lower, lower_scale)
    failed = _down(source)(
        h.data_ptr(), *shared_rows, ids.data_ptr(), weights.data_ptr(), down_packed.data_ptr(), down_scale.data_ptr(),
        *extra, y.data_ptr(), *taken, *sizes, P, processors, stream,
    )  # fmt: skip
    assert not failed, f"moe_int4_down: {failed=} {x.shape=} {ids.shape=} {down_packed.shape=} {rides=}"
    if shared_gate_up is not None and shared_down is not None and not rides:
        _add_shared(y[:, k], x, shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return y if partial else y.sum(1, keepdim=True)


@op.impl(
    "cuda_prefill",
    when=lambda a, device: build.on_hopper(
        moe_int4_grouped.source_for(a.gate_up_scale),
        device,
        (a.x.shape[0] > MAX_TOKENS, f"more than {MAX_TOKENS} tokens"),
        *moe_int4_grouped.needs(a.x, a.gate_up_packed, a.gate_up_scale),
    ),
)
def cuda_prefill(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor | None,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    partial: bool,
) -> Tensor:
    shared = None
    if shared_gate_up is not None and shared_down is not None:
        shared = functools.partial(
            _shared,
            gate_up=shared_gate_up,
            gate_up_scale=shared_gate_up_scale,
            down=shared_down,
            down_scale=shared_down_scale,
        )
    gate_up = moe_int4_grouped.Packed(gate_up_packed, gate_up_scale, gate_up_row)
    down = moe_int4_grouped.Packed(down_packed, down_scale, down_row)
    return moe_int4_grouped.prefill(x, ids, weights, gate_up, down, shared)


@functools.cache
def _on_cpu() -> Any:
    return build.function("experts", "moe_int4", "p" * 11 + "l" * 7)


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "experts",
        device,
        (a.x.dtype == FLOAT32 and a.x.shape[0] <= FEW_ON_CPU, f"at most {FEW_ON_CPU} tokens of float32"),
        (a.gate_up_scale.dtype == BFLOAT16, "bfloat16 scales"),
    ),
)
def cpp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor | None,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    partial: bool,
) -> Tensor:
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 8  # noqa: E741
    read = [t.contiguous() for t in (x, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale)]
    pointers, S = [t.data_ptr() for t in read], 0
    fused = shared_gate_up_scale is None and shared_down_scale is None
    if fused and shared_gate_up is not None and shared_down is not None:
        upper, lower, S = shared_gate_up.contiguous(), shared_down.contiguous(), shared_down.shape[1]
        pointers += upper.data_ptr(), lower.data_ptr()
    else:
        pointers += 0, 0
    h, y = torch.empty(T * (k * I + S)), torch.empty(T, 1, D)
    failed = _on_cpu()(*pointers, h.data_ptr(), y.data_ptr(), T, k, E, D, I, S, threads.count())
    assert not failed, f"an id is no expert: {ids.min()=} {ids.max()=} {E=}"
    if not fused and shared_gate_up is not None and shared_down is not None:
        y[:, 0] += _shared(x, shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return y


@op.impl("composed")
def composed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor | None,
    down_packed: Tensor,
    down_scale: Tensor,
    down_row: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    partial: bool,
) -> Tensor:
    if gate_up_row is None or down_row is None:
        y = experts_int4(x, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale).float()
    else:
        y = experts_int4_compact(
            x, ids, weights, gate_up_packed, gate_up_scale, gate_up_row, down_packed, down_scale, down_row
        ).float()
    if shared_gate_up is not None and shared_down is not None:
        y += _shared(x, shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return y.unsqueeze(1)


def moe_int4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    partial: bool = True,
    *,
    gate_up_row: Tensor | None = None,
    down_row: Tensor | None = None,
) -> Tensor:
    (T, D), (E, both, words) = x.shape, gate_up_packed.shape
    assert D == 8 * words and D % GROUP == 0 and both % (2 * GROUP) == 0, f"{x.shape=} {gate_up_packed.shape=}"
    assert gate_up_scale.shape == (E, both, D // GROUP), f"{gate_up_packed.shape=} {gate_up_scale.shape=}"
    assert down_packed.shape == (E, D, both // 16), f"{gate_up_packed.shape=} {down_packed.shape=}"
    assert down_scale.shape == (E, D, both // (2 * GROUP)), f"{down_packed.shape=} {down_scale.shape=}"
    assert down_packed.dtype == gate_up_packed.dtype == torch.int32 and down_scale.dtype == gate_up_scale.dtype, (
        f"{gate_up_packed.dtype=} {down_packed.dtype=} {gate_up_scale.dtype=} {down_scale.dtype=}"
    )
    if gate_up_row is None or down_row is None:
        assert gate_up_row is None and down_row is None and down_scale.dtype != torch.uint8, f"{down_scale.dtype=}"
    else:
        assert gate_up_row.shape == (E, both) and down_row.shape == (E, D), f"{gate_up_row.shape=} {down_row.shape=}"
        assert down_scale.dtype == torch.uint8 and gate_up_row.dtype == down_row.dtype == BFLOAT16, (
            f"{down_scale.dtype=} {gate_up_row.dtype=} {down_row.dtype=}"
        )
    assert ids.shape == weights.shape and ids.shape[0] == T, f"{x.shape=} {ids.shape=} {weights.shape=}"
    assert ids.dtype == torch.int32 and weights.dtype == FLOAT32, f"{ids.dtype=} {weights.dtype=}"
    assert (shared_gate_up is None) == (shared_down is None), "half a shared expert"
    if shared_gate_up is not None and shared_down is not None:
        S = shared_down.shape[1]
        assert shared_gate_up.shape == (2 * S, D) and shared_down.shape == (D, S) and S % GROUP == 0, (
            f"{x.shape=} {shared_gate_up.shape=} {shared_down.shape=}"
        )
        if shared_gate_up_scale is None or shared_down_scale is None:
            assert shared_gate_up_scale is None and shared_down_scale is None, "half a shared expert in FP8"
            assert x.dtype == shared_gate_up.dtype == shared_down.dtype, f"{x.dtype=} {shared_gate_up.dtype=}"
        else:
            assert shared_gate_up.dtype == shared_down.dtype == torch.float8_e4m3fn and S % 64 == D % 64 == 0, (
                f"{shared_gate_up.dtype=} {shared_down.dtype=} {S=} {D=}"
            )
            assert shared_gate_up_scale.shape == (2 * S,) and shared_down_scale.shape == (D,), (
                f"{shared_gate_up_scale.shape=} {shared_down_scale.shape=}"
            )
            assert shared_gate_up_scale.dtype == shared_down_scale.dtype == FLOAT32, f"{shared_down_scale.dtype=}"
    return op(
        x, ids, weights, gate_up_packed, gate_up_scale, gate_up_row, down_packed, down_scale, down_row, shared_gate_up,
        shared_gate_up_scale, shared_down, shared_down_scale, partial,
    )  # fmt: skip
