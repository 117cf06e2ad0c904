"""experts.py's sum with the experts in the checkpoint's INT4 (int4.py).

x [T, D]; ids [T, k] int32, distinct within a row; weights [T, k] float32; gate_up_packed [E, 2 I, D / 8] int32 and
gate_up_scale [E, 2 I, D / 32], the gate's rows first; down_packed [E, D, I / 8], down_scale [E, D, I / 32];
y [T, D] as x. D and I are multiples of 32.

"cpp" (experts.cpp) reads the packed weights as they are, once per call for all tokens of an expert. Dequantised values
are exact, everything is fp32 and the experts are added in ascending order: the same bits as experts.py's "cpp" on
dequantised float32 weights, whatever the batch. "gathered" dequantises the experts of each token, "torch" each expert
that was hit; in bfloat16 both round it.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.int4 import GROUP, dequantize
from perilune.ops.moe.experts import TOL, Case, each, few_on_gpu, gathered_sum, routing
from perilune.ops.moe.experts import reference as dense_reference

CASES = [
    *(Case(t, K2.top_k, 16, K2.hidden, K2.width, big=True) for t in (1, 4, 16, 64, 512)),
    *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width) for t in (1, 4, 16, 64, 512)),
    Case(0, 2, 4, 32, 32),
    Case(1, 1, 1, 32, 32),
    Case(9, 3, 5, 64, 32),
    Case(7, 2, 4, 96, 160),
    Case(33, 1, 6, 64, 64, to_one=True),
]


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
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, costs.INT4_BITS)


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
) -> Tensor:
    gate_up = dequantize(gate_up_packed, gate_up_scale, FLOAT32)
    return dense_reference(x, ids, weights, gate_up, dequantize(down_packed, down_scale, FLOAT32))


op = Op("experts_int4", CASES, TOL, inputs, cost, reference, decides=("x", "gate_up_scale"))


@functools.cache
def _kernel() -> Any:
    return build.function("experts", "experts_int4", "p" * 9 + "l" * 6)


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu("experts", device, (a.gate_up_scale.dtype == BFLOAT16, "bfloat16 scales")),
)
def cpp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
) -> Tensor:
    f, ids, weights = x.float().contiguous(), ids.contiguous(), weights.contiguous()
    gate_up_packed, gate_up_scale = gate_up_packed.contiguous(), gate_up_scale.contiguous()
    down_packed, down_scale = down_packed.contiguous(), down_scale.contiguous()
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 8  # noqa: E741
    h, y = torch.empty(T * k, I), torch.empty(T, D)
    failed = _kernel()(
        f.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        gate_up_packed.data_ptr(),
        gate_up_scale.data_ptr(),
        down_packed.data_ptr(),
        down_scale.data_ptr(),
        h.data_ptr(),
        y.data_ptr(),
        T,
        k,
        E,
        D,
        I,
        threads.count(),
    )
    assert not failed, f"an id is no expert: {ids.min()=} {ids.max()=} {E=}"
    return y if x.dtype == FLOAT32 else y.to(x.dtype)


@op.impl("gathered", when=lambda a, device: few_on_gpu(a.x, a.gate_up_scale, device))
def gathered(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """Which experts are hit does not matter to the host, as a CUDA graph needs it."""
    gate_up = dequantize(gate_up_packed[ids], gate_up_scale[ids], x.dtype)
    return gathered_sum(x, weights, gate_up, dequantize(down_packed[ids], down_scale[ids], x.dtype))


@op.impl("torch")
def per_expert(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
) -> Tensor:
    def expert(e: int) -> tuple[Tensor, Tensor]:
        return (
            dequantize(gate_up_packed[e], gate_up_scale[e], x.dtype),
            dequantize(down_packed[e], down_scale[e], x.dtype),
        )

    return each(x, ids, weights, expert)


def experts_int4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
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
    return op(x, ids, weights, gate_up_packed, gate_up_scale, down_packed, down_scale)
