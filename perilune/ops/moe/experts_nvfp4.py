"""experts.py's sum with the experts in NVFP4: e2m1 values, an e4m3 scale for every 16, an fp32 scale for each matrix.

x [T, D]; ids [T, k] int32, distinct within a row; weights [T, k] float32; gate_up_packed [E, 2 I, D / 2] uint8, the
gate's rows first, element 2b of a row in the low nibble of byte b; gate_up_scale [E, 2 I, D / 16] float8_e4m3fn;
gate_up_global [E, 2] float32, the gate's first; down_packed [E, D, I / 2], down_scale [E, D, I / 16], down_global [E];
y [T, D] as x. D and I are multiples of 16, scales are not nan. W = e2m1 * s with s = scale * global, in fp32, each
operation rounded. Activations stay as they are (W4A16).

"cpp" (experts.cpp) reads the weights as they are, once per call for all tokens of an expert; fp32 throughout, experts
added in ascending order: the same bits as experts.py's "cpp" on dequantised float32 weights. "torch" dequantises each
expert that was hit to x's type.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads, workspace
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, dequantized
from perilune.ops.harness.registry import Op
from perilune.ops.moe.experts import Case, each, few_on_gpu, gathered_sum, routing
from perilune.ops.moe.experts import reference as dense_reference

GROUP = 16
BITS = 4 + 8 / GROUP
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 of a code is the sign

CASES = [
    *(Case(t, K2.top_k, 16, K2.hidden, K2.width, big=True) for t in (1, 4, 16, 64, 512)),
    *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width) for t in (1, 4, 16, 64, 512)),
    Case(0, 2, 4, 32, 32),
    Case(1, 1, 1, 16, 16),
    Case(9, 3, 5, 48, 16),
    Case(7, 2, 4, 80, 176),
    Case(33, 1, 6, 64, 64, to_one=True),
]
TOL = {"y": dequantized()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    gate_up_packed, gate_up_scale = g.nvfp4(c.E, 2 * c.I, c.D)
    down_packed, down_scale = g.nvfp4(c.E, c.D, c.I)
    return {
        "x": g.randn(c.T, c.D),
        **routing(c, g),
        "gate_up_packed": gate_up_packed,
        "gate_up_scale": gate_up_scale,
        "gate_up_global": (g.rand(c.E, 2) + 0.5) * (c.D**-0.5 / 360),
        "down_packed": down_packed,
        "down_scale": down_scale,
        "down_global": (g.rand(c.E) + 0.5) * (c.I**-0.5 / 360),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, BITS)


_VALUES = torch.tensor((*E2M1, *(-v for v in E2M1)))


def _values(device: torch.device) -> Tensor:
    """[16] float32 of the codes. On a GPU kept: making it is a copy from the host, which a CUDA graph must not hold."""
    if device.type == "cpu":
        return _VALUES
    return workspace.current(device).kept("experts_nvfp4.values", lambda: _VALUES.to(device))


def dequantize(packed: Tensor, scale: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """packed [..., o, i / 2] uint8, scale [..., o, i / 16], factor [...] float32, a scale of each matrix
    -> [..., o, i]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    step = scale.float() * factor[..., None, None]
    grouped = _values(packed.device)[codes.int()].unflatten(-1, (-1, GROUP)) * step.unsqueeze(-1)
    return grouped.flatten(-2).to(dtype)


def _gate_up(packed: Tensor, scale: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gate_up [..., 2 I, D] of the dtype: gate and up apart, for each has a factor of its own."""
    halves = [t.unflatten(-2, (2, -1)) for t in (packed, scale)]
    return dequantize(halves[0], halves[1], factor, dtype).flatten(-3, -2)


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
) -> Tensor:
    gate_up = _gate_up(gate_up_packed, gate_up_scale, gate_up_global, FLOAT32)
    return dense_reference(x, ids, weights, gate_up, dequantize(down_packed, down_scale, down_global, FLOAT32))


op = Op("experts_nvfp4", CASES, TOL, inputs, cost, reference, decides=("x", "gate_up_packed"))


@functools.cache
def _kernel() -> Any:
    return build.function("experts", "experts_nvfp4", "p" * 11 + "l" * 6)


@op.impl("cpp", when=lambda a, device: build.on_cpu("experts", device))
def cpp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
) -> Tensor:
    f, ids, weights = x.float().contiguous(), ids.contiguous(), weights.contiguous()
    gate_up = [t.contiguous() for t in (gate_up_packed, gate_up_scale, gate_up_global)]
    down = [t.contiguous() for t in (down_packed, down_scale, down_global)]
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 2  # noqa: E741
    h, y = torch.empty(T * k, I), torch.empty(T, D)
    pointers = [t.data_ptr() for t in (f, ids, weights, *gate_up, *down, h, y)]
    failed = _kernel()(*pointers, T, k, E, D, I, threads.count())
    assert not failed, f"an id is no expert: {ids.min()=} {ids.max()=} {E=}"
    return y if x.dtype == FLOAT32 else y.to(x.dtype)


@op.impl("gathered", when=lambda a, device: few_on_gpu(a.x, a.gate_up_packed, device))
def gathered(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
) -> Tensor:
    """Which experts are hit does not matter to the host, as a CUDA graph needs it."""
    gate_up = _gate_up(gate_up_packed[ids], gate_up_scale[ids], gate_up_global[ids], x.dtype)
    return gathered_sum(
        x, weights, gate_up, dequantize(down_packed[ids], down_scale[ids], down_global[ids], x.dtype)
    )  # fmt: skip


@op.impl("torch")
def per_expert(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
) -> Tensor:
    def expert(e: int) -> tuple[Tensor, Tensor]:
        return (
            _gate_up(gate_up_packed[e], gate_up_scale[e], gate_up_global[e], x.dtype),
            dequantize(down_packed[e], down_scale[e], down_global[e], x.dtype),
        )

    return each(x, ids, weights, expert)


def experts_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
) -> Tensor:
    (T, D), (E, both, half) = x.shape, gate_up_packed.shape
    assert D == 2 * half and D % GROUP == 0 and both % (2 * GROUP) == 0, f"{x.shape=} {gate_up_packed.shape=}"
    assert gate_up_scale.shape == (E, both, D // GROUP), f"{gate_up_packed.shape=} {gate_up_scale.shape=}"
    assert down_packed.shape == (E, D, both // 4), f"{gate_up_packed.shape=} {down_packed.shape=}"
    assert down_scale.shape == (E, D, both // (2 * GROUP)), f"{down_packed.shape=} {down_scale.shape=}"
    assert gate_up_global.shape == (E, 2) and down_global.shape == (E,), f"{gate_up_global.shape=} {down_global.shape=}"
    assert gate_up_packed.dtype == down_packed.dtype == torch.uint8, f"{gate_up_packed.dtype=} {down_packed.dtype=}"
    assert gate_up_scale.dtype == down_scale.dtype == torch.float8_e4m3fn, f"{gate_up_scale.dtype=} {down_scale.dtype=}"
    assert gate_up_global.dtype == down_global.dtype == FLOAT32, f"{gate_up_global.dtype=} {down_global.dtype=}"
    assert ids.shape == weights.shape and ids.shape[0] == T, f"{x.shape=} {ids.shape=} {weights.shape=}"
    assert ids.dtype == torch.int32 and weights.dtype == FLOAT32, f"{ids.dtype=} {weights.dtype=}"
    return op(
        x, ids, weights, gate_up_packed, gate_up_scale, gate_up_global, down_packed, down_scale, down_global
    )  # fmt: skip
