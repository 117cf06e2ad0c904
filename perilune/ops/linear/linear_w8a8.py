"""y = (x x_scale) (w w_scale)^T with both in e4m3 (W8A8): for prompts, if weights are FP8 and activations may be.

x [T, i] float8_e4m3fn and x_scale [ceil(i / 128), rows] float32 as quantize_tokens.py makes them; w of format "fp8",
[o, i] with a scale for each of its rows; y [T, o] bfloat16, or float32 if `wide`. "cuda" (linear_w8a8.cu) sums the
products of 128 columns on the tensor cores, then adds these sums, times the token's scale, in fp32. The result times
w's scale is rounded once. A row's result does not depend on the others.

`linear` and `mlp` quantise activations first, in the kernel that normalises or gates them if there is one. For normally
distributed activations, results then differ by 2.6 % (rms) from linear_fp8's, which quantises no activations.

Times in us on an H200 for 10,000 tokens of K2.5, bf16 cuBLAS in brackets: qkv_a 292 (395), q_b 354 (499),
o 935 (1,445), gate and up 558 (823), down 303 (439). Quantising all their inputs takes 266.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Matrix, Mlp
from perilune.ops.linear import linear_fp8
from perilune.ops.linear.quantize_tokens import GROUP, ROWS, quantize_tokens, rows

MIN_TOKENS = 129  # steps of fewer tokens are bound by reading weights, so FP8 activations would gain nothing
SHORT = ROWS // 2  # tokens of the smaller tiles
PAIR = 256  # outputs of a pair of CTAs


@dataclass(frozen=True)
class Case(Sized):
    T: int
    i: int
    o: int


CASES = [
    *(
        Case(t, i, o, big=True)
        for t in (129, 512, 1000, 3000)
        for i, o in ((K2.hidden, 2112), (K2.q_rank, 12288), (8192, K2.hidden), (K2.width, K2.hidden), (1024, 264))
    ),
    Case(200, NANO.q_rank, 768),
    Case(3, NANO.hidden, NANO.q_rank + NANO.latent + NANO.rope),
    Case(1, 16, 8),
    Case(0, 128, 8),
    Case(300, 400, 72, big=True),
]
TOL = {"y": sums()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    x_scale = g.rand(-(-c.i // GROUP), rows(c.T)) + 0.5
    w, scale = linear_fp8.quantize_rows(g.randn(c.o, c.i, scale=c.i**-0.5, dtype=FLOAT32))
    return {"x": g.e4m3(c.T, c.i, scale=1.0), "x_scale": x_scale, "w": Matrix(w, scale), "wide": g.dtype == FLOAT32}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(2 * c.T * c.i * c.o, c.i * c.o + c.T * (c.i * (1 + 4 / GROUP) + dtype.itemsize * c.o))


def reference(x: Tensor, x_scale: Tensor, w: Matrix, wide: bool) -> Tensor:
    assert w.scale is not None
    y = _whole(x, x_scale) @ w.weight.float().T * w.scale
    return y if wide else y.to(BFLOAT16)


def _whole(x: Tensor, x_scale: Tensor) -> Tensor:
    """x times its scales, in float32."""
    T, i = x.shape
    return x.float() * x_scale[:, :T].T.repeat_interleave(GROUP, 1)[:, :i]


op = Op("linear_w8a8", CASES, TOL, inputs, cost, reference, decides=("x", "w", "wide"))


_kernel = build.launcher("linear_w8a8.cu", "linear_w8a8", "ppppp" + "l" * 6 + "p")


def tall(T: int, o: int, processors: int) -> bool:
    """Whether to use tiles of 256 tokens: tiles of 128 read a third more bytes per product, and are faster only if they
    leave much fewer SMs idle in the last wave."""

    def turns(tokens: int) -> int:
        return -(-(-(-T // tokens) * -(-o // PAIR)) // (processors // 2)) * tokens

    return turns(ROWS) <= 1.1 * turns(SHORT)


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "linear_w8a8.cu",
        device,
        (not a.wide, "bfloat16 results"),
        (a.x.shape[0] > 0, "rows"),
        (a.x.shape[1] % 16 == 0 and a.w.weight.shape[0] % 8 == 0, "input widths in 16s and output widths in 8s"),
    ),
)
def cuda(x: Tensor, x_scale: Tensor, w: Matrix, wide: bool) -> Tensor:
    assert w.scale is not None
    (T, i), o = x.shape, w.weight.shape[0]
    y = torch.empty(T, o, dtype=BFLOAT16, device=x.device)
    processors = build.sm_count(x.device)
    failed = _kernel()(
        x.data_ptr(),
        x_scale.data_ptr(),
        w.weight.data_ptr(),
        w.scale.data_ptr(),
        y.data_ptr(),
        T,
        i,
        o,
        x_scale.shape[1],
        tall(T, o, processors),
        processors,
        build.stream(x.device),
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {w.kind=}"
    return y


@op.impl("torch")
def widened(x: Tensor, x_scale: Tensor, w: Matrix, wide: bool) -> Tensor:
    assert w.scale is not None
    y = torch.nn.functional.linear(_whole(x, x_scale), w.weight.float()).mul_(w.scale)
    return y if wide else y.to(BFLOAT16)


def linear_w8a8(x: Tensor, x_scale: Tensor, w: Matrix, wide: bool = False) -> Tensor:
    assert w.format == "fp8" and x.dtype == w.weight.dtype and x.shape[1] == w.weight.shape[1], f"{x.shape=} {w.kind=}"
    assert x.is_contiguous() and w.weight.is_contiguous() and x_scale.is_contiguous(), f"{x.shape=} {w.kind=}"
    assert x_scale.shape == (-(-x.shape[1] // GROUP), rows(x.shape[0])), f"{x.shape=} {x_scale.shape=}"
    return op(x, x_scale, w, wide)


def applies(w: Matrix, x: Tensor) -> bool:
    """Whether this op should multiply x [T, i] by w."""
    return w.fp8_activations and x.shape[0] >= MIN_TOKENS


def linear(x: Tensor, w: Matrix, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x [T, i] -> [T, o] as x; x is normalised first if `norm` is given."""
    return linear_w8a8(*quantize_tokens(x, norm, eps), w, x.dtype == FLOAT32)


def mlp(x: Tensor, w: Mlp) -> Tensor:
    """The MLP w with quantised activations: x [T, D] -> [T, D]."""
    both = linear(x, w.gate_up)
    return linear_w8a8(*quantize_tokens(both, gated=True), w.down, x.dtype == FLOAT32)
