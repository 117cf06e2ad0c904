"""The MoE block on INT4 experts: y.sum(1) = experts_int4(x, ids, weights, ...) + shared expert(x).

x [T, D]; ids [T, k] int32, distinct within a row; weights [T, k] float32; gate_up_packed [E, 2 I, D / 8] int32,
gate_up_scale [E, 2 I, D / 32], down_packed [E, D, I / 8], down_scale [E, D, I / 32] as in experts_int4.py;
shared_gate_up [2 S, D] and shared_down [D, S] as x, the gate's rows first, or None both: no shared expert.
y [T, P, D] float32: rows whose sum is the result, to be added in order by the norm that follows. If `partial`, P is the
implementation's choice, else 1.

"cuda" (moe_int4.cu, bf16 on Hopper, at most 256 tokens) streams the weights of the experts that were hit, in two
launches: h = silu(gate) * up, rounded to bf16, for routed and shared experts; then a row of y for every pair, the
routing weight applied to the fp32 result, and one for the shared expert: P = k + 1, or k without one. Dequantised
weights, x and h are exact, sums are fp32. Up to 16 tokens a token's rows do not depend on the batch; above, the shared
expert is three library calls. gate_up reads an expert once for every 4 of its tokens (7 above 96 tokens, for K2's
sizes), down once for every 8. An id that is no expert is passed over and its row left unwritten.
"cuda_prefill" (moe_int4_prefill.py) is for more tokens: grouped products on wgmma, P = 1.
"cpp" (experts.cpp) is one call for few tokens of float32, routed experts first: P = 1.
"composed" is experts_int4, linear and swiglu: P = 1.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops import compile, moe_int4_prefill, threads
from perilune.ops.case import BFLOAT16, FLOAT32, K2, NANO, Make, dequantized
from perilune.ops.experts import Case as Routed
from perilune.ops.experts import routing
from perilune.ops.experts_int4 import experts_int4
from perilune.ops.experts_int4 import reference as routed_reference
from perilune.ops.int4 import GROUP
from perilune.ops.linear import FEW_ON_CPU, linear
from perilune.ops.registry import Op
from perilune.ops.swiglu import swiglu

MAX_TOKENS = 256  # of the CUDA kernel; above, dequantising an expert once for all its tokens wins
MAX_SHARED = 16  # tokens whose shared expert rides in the same launches
PIECE = 128  # values of a row that the kernel takes at once


@dataclass(frozen=True)
class Case(Routed):
    S: int = 0  # width of the shared expert


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
]
TOL = {"y": dequantized()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    gate_up_packed, gate_up_scale = g.int4(c.E, 2 * c.I, c.D)
    down_packed, down_scale = g.int4(c.E, c.D, c.I)
    return {
        "x": g.randn(c.T, c.D),
        **routing(c, g),
        "gate_up_packed": gate_up_packed,
        "gate_up_scale": gate_up_scale,
        "down_packed": down_packed,
        "down_scale": down_scale,
        "shared_gate_up": g.randn(2 * c.S, c.D, scale=c.D**-0.5) if c.S else None,
        "shared_down": g.randn(c.D, c.S, scale=c.S**-0.5) if c.S else None,
        "partial": False,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    routed = costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, costs.INT4_BITS)
    return routed + costs.experts(c.T, 1, min(1, c.T), c.D, c.S, dtype.itemsize, 8 * dtype.itemsize) if c.S else routed


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    partial: bool,
) -> Tensor:
    f = x.float()
    y = routed_reference(f, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale)
    if shared_gate_up is not None and shared_down is not None:
        gate, up = (f @ shared_gate_up.float().T).chunk(2, -1)
        y += (gate * torch.sigmoid(gate) * up) @ shared_down.float().T
    return y.unsqueeze(1)


op = Op("moe_int4", CASES, TOL, inputs, cost, reference, decides=(0, 4))


@functools.cache
def _gate_up() -> Any:
    return compile.function("moe_int4.cu", "moe_int4_gate_up", "p" * 7 + "l" * 7 + "p")


@functools.cache
def _down() -> Any:
    return compile.function("moe_int4.cu", "moe_int4_down", "p" * 8 + "l" * 8 + "p")


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fits(a: Any, device: torch.device) -> bool | str:
    (T, D), (E, both, _) = a.x.shape, a.gate_up_scale.shape
    return compile.on_hopper(
        "moe_int4.cu",
        device,
        (a.x.dtype == a.gate_up_scale.dtype == BFLOAT16, "bfloat16"),
        (1 <= T <= MAX_TOKENS, f"1 to {MAX_TOKENS} tokens"),
        (D % PIECE == 0 and both % (2 * PIECE) == 0, f"widths that are multiples of {PIECE}"),
        (D <= 8192 and both <= 8192 and E <= 1024, "D at most 8192, I at most 4096, at most 1024 experts"),
    )


@op.impl("cuda", when=_fits)
def cuda(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    partial: bool,
) -> Tensor:
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 8  # noqa: E741
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    shared = shared_gate_up is not None and shared_down is not None
    rides = shared_down.shape[1] if shared and T <= MAX_SHARED else 0
    P = k + 1 if shared else k
    h = torch.empty(T * (k * I + rides), dtype=BFLOAT16, device=x.device)
    y = torch.empty(T, P, D, dtype=FLOAT32, device=x.device)
    h_shared = h.data_ptr() + 2 * T * k * I
    upper, lower = (shared_gate_up.data_ptr(), shared_down.data_ptr()) if rides else (0, 0)
    processors, stream = _processors(x.device), torch.cuda.current_stream(x.device).cuda_stream
    failed = _gate_up()(
        x.data_ptr(), ids.data_ptr(), gate_up_packed.data_ptr(), gate_up_scale.data_ptr(), upper, h.data_ptr(),
        h_shared, T, k, E, D, I, rides, processors, stream,
    )  # fmt: skip
    assert not failed, f"moe_int4_gate_up: {failed=} {x.shape=} {ids.shape=} {gate_up_packed.shape=} {rides=}"
    failed = _down()(
        h.data_ptr(), h_shared, ids.data_ptr(), weights.data_ptr(), down_packed.data_ptr(), down_scale.data_ptr(),
        lower, y.data_ptr(), T, k, E, D, I, rides, P, processors, stream,
    )  # fmt: skip
    assert not failed, f"moe_int4_down: {failed=} {x.shape=} {ids.shape=} {down_packed.shape=} {rides=}"
    if shared and not rides:
        y[:, k] = linear(swiglu(linear(x, shared_gate_up)), shared_down)
    return y if partial else y.sum(1, keepdim=True)


@op.impl(
    "cuda_prefill",
    when=lambda a, device: compile.on_hopper(
        moe_int4_prefill.SOURCE,
        device,
        (a.x.shape[0] > MAX_TOKENS, f"more than {MAX_TOKENS} tokens"),
        *moe_int4_prefill.needs(a.x, a.gate_up_packed, a.gate_up_scale),
    ),
)
def cuda_prefill(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    partial: bool,
) -> Tensor:
    return moe_int4_prefill.prefill(
        x, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale, shared_gate_up, shared_down
    )


@functools.cache
def _on_cpu() -> Any:
    return compile.function("experts", "moe_int4", "p" * 11 + "l" * 7)


@op.impl(
    "cpp",
    when=lambda a, device: compile.on_cpu(
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
    down_packed: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    partial: bool,
) -> Tensor:
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 8  # noqa: E741
    read = [t.contiguous() for t in (x, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale)]
    pointers, S = [t.data_ptr() for t in read], 0
    if shared_gate_up is not None and shared_down is not None:
        upper, lower, S = shared_gate_up.contiguous(), shared_down.contiguous(), shared_down.shape[1]
        pointers += upper.data_ptr(), lower.data_ptr()
    else:
        pointers += 0, 0
    h, y = torch.empty(T * (k * I + S)), torch.empty(T, 1, D)
    failed = _on_cpu()(*pointers, h.data_ptr(), y.data_ptr(), T, k, E, D, I, S, threads.count())
    assert not failed, f"an id is no expert: {ids.min()=} {ids.max()=} {E=}"
    return y


@op.impl("composed")
def composed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    partial: bool,
) -> Tensor:
    y = experts_int4(x, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale).float()
    if shared_gate_up is not None and shared_down is not None:
        y += linear(swiglu(linear(x, shared_gate_up)), shared_down)
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
    partial: bool = True,
) -> Tensor:
    (T, D), (E, both, words) = x.shape, gate_up_packed.shape
    assert D == 8 * words and D % GROUP == 0 and both % (2 * GROUP) == 0, f"{x.shape=} {gate_up_packed.shape=}"
    assert gate_up_scale.shape == (E, both, D // GROUP), f"{gate_up_packed.shape=} {gate_up_scale.shape=}"
    assert down_packed.shape == (E, D, both // 16), f"{gate_up_packed.shape=} {down_packed.shape=}"
    assert down_scale.shape == (E, D, both // (2 * GROUP)), f"{down_packed.shape=} {down_scale.shape=}"
    assert down_packed.dtype == gate_up_packed.dtype == torch.int32 and down_scale.dtype == gate_up_scale.dtype, (
        f"{gate_up_packed.dtype=} {down_packed.dtype=} {gate_up_scale.dtype=} {down_scale.dtype=}"
    )
    assert ids.shape == weights.shape and ids.shape[0] == T, f"{x.shape=} {ids.shape=} {weights.shape=}"
    assert ids.dtype == torch.int32 and weights.dtype == FLOAT32, f"{ids.dtype=} {weights.dtype=}"
    assert (shared_gate_up is None) == (shared_down is None), "half a shared expert"
    if shared_gate_up is not None and shared_down is not None:
        S = shared_down.shape[1]
        assert shared_gate_up.shape == (2 * S, D) and shared_down.shape == (D, S) and S % GROUP == 0, (
            f"{x.shape=} {shared_gate_up.shape=} {shared_down.shape=}"
        )
        assert x.dtype == shared_gate_up.dtype == shared_down.dtype, f"{x.dtype=} {shared_gate_up.dtype=}"
    return op(
        x, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale, shared_gate_up, shared_down, partial
    )  # fmt: skip
