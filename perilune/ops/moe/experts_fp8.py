"""experts.py's sum with the experts in FP8, one scale for every block of 128 x 128 weights.

x [T, D]; ids [T, k] int32, distinct within a row; weights [T, k] float32; gate_up [E, 2 I, D] float8_e4m3fn without
nan, the gate's rows first; gate_up_scale [E, 2, ceil(I / 128), ceil(D / 128)] float32, the gate's blocks first, since
blocks at an edge are cut where their matrix ends; down [E, D, I], down_scale [E, ceil(D / 128), ceil(I / 128)];
y [T, D] as x. W = e4m3 * scale in fp32. Activations stay as they are: no FP8 arithmetic.

"cpp" (experts.cpp) reads the weights as they are, once per call for all tokens of an expert; fp32 throughout, experts
added in ascending order: the same bits as experts.py's "cpp" on dequantised float32 weights. "torch" dequantises each
expert that was hit to x's type.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, dequantized
from perilune.ops.harness.registry import Op
from perilune.ops.moe.experts import Case, each, routing
from perilune.ops.moe.experts import reference as dense_reference

BLOCK = 128
BITS = 8 + 32 / BLOCK**2

CASES = [
    *(Case(t, K2.top_k, 16, K2.hidden, K2.width, big=True) for t in (1, 4, 16, 64, 512)),
    *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width) for t in (1, 4, 16, 64, 512)),
    Case(0, 2, 4, 32, 32),
    Case(1, 1, 1, 8, 8),
    Case(9, 3, 5, 136, 72),
    Case(7, 2, 4, 264, 200),
    Case(5, 2, 3, 36, 20),  # no multiple of 8
    Case(33, 1, 6, 64, 64, to_one=True),
]
TOL = {"y": dequantized()}


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def inputs(c: Case, g: Make) -> dict[str, Any]:
    def scale(*shape: int, width: int) -> Tensor:
        return (g.rand(*shape) + 0.5) * (0.009 * width**-0.5)

    return {
        "x": g.randn(c.T, c.D),
        **routing(c, g),
        "gate_up": g.e4m3(c.E, 2 * c.I, c.D, scale=100),
        "gate_up_scale": scale(c.E, 2, blocks(c.I), blocks(c.D), width=c.D),
        "down": g.e4m3(c.E, c.D, c.I, scale=100),
        "down_scale": scale(c.E, blocks(c.D), blocks(c.I), width=c.I),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, BITS)


def dequantize(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """w [..., o, i] float8_e4m3fn, scale [..., ceil(o / 128), ceil(i / 128)] float32 -> [..., o, i]."""
    o, i = w.shape[-2:]
    spread = scale.repeat_interleave(BLOCK, -2)[..., :o, :].repeat_interleave(BLOCK, -1)[..., :i]
    return (w.float() * spread).to(dtype)


def _gate_up(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gate_up [..., 2 I, D] of the dtype: gate and up apart, for each has blocks of its own."""
    return dequantize(w.unflatten(-2, (2, -1)), scale, dtype).flatten(-3, -2)


def reference(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    both = _gate_up(gate_up, gate_up_scale, FLOAT32)
    return dense_reference(x, ids, weights, both, dequantize(down, down_scale, FLOAT32))


op = Op("experts_fp8", CASES, TOL, inputs, cost, reference, decides=("x", "gate_up"))


@functools.cache
def _kernel() -> Any:
    return build.function("experts", "experts_fp8", "p" * 9 + "l" * 6)


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "experts",
        device,
        (a.x.shape[1] % 8 == 0 and a.gate_up.shape[1] % 16 == 0, "widths that are multiples of 8"),
    ),
)
def cpp(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    f, ids, weights = x.float().contiguous(), ids.contiguous(), weights.contiguous()
    packed = [t.contiguous() for t in (gate_up, gate_up_scale, down, down_scale)]
    (T, D), k, (E, _, I) = x.shape, ids.shape[1], down.shape  # noqa: E741
    h, y = torch.empty(T * k, I), torch.empty(T, D)
    pointers = [t.data_ptr() for t in (f, ids, weights, *packed, h, y)]
    failed = _kernel()(*pointers, T, k, E, D, I, threads.count())
    assert not failed, f"an id is no expert: {ids.min()=} {ids.max()=} {E=}"
    return y if x.dtype == FLOAT32 else y.to(x.dtype)


@op.impl("torch")
def per_expert(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    def expert(e: int) -> tuple[Tensor, Tensor]:
        return _gate_up(gate_up[e], gate_up_scale[e], x.dtype), dequantize(down[e], down_scale[e], x.dtype)

    return each(x, ids, weights, expert)


def experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    (T, D), (E, both, _) = x.shape, gate_up.shape
    I = both // 2  # noqa: E741
    assert gate_up.shape == (E, 2 * I, D) and down.shape == (E, D, I), f"{x.shape=} {gate_up.shape=} {down.shape=}"
    assert gate_up_scale.shape == (E, 2, blocks(I), blocks(D)), f"{gate_up.shape=} {gate_up_scale.shape=}"
    assert down_scale.shape == (E, blocks(D), blocks(I)), f"{down.shape=} {down_scale.shape=}"
    assert gate_up.dtype == down.dtype == torch.float8_e4m3fn, f"{gate_up.dtype=} {down.dtype=}"
    assert gate_up_scale.dtype == down_scale.dtype == FLOAT32, f"{gate_up_scale.dtype=} {down_scale.dtype=}"
    assert ids.shape == weights.shape and ids.shape[0] == T, f"{x.shape=} {ids.shape=} {weights.shape=}"
    assert ids.dtype == torch.int32 and weights.dtype == FLOAT32, f"{ids.dtype=} {weights.dtype=}"
    return op(x, ids, weights, gate_up, gate_up_scale, down, down_scale)
