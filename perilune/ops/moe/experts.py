"""y[t] = sum_j weights[t, j] * down_e(silu(gate_e(x[t])) * up_e(x[t])) with e = ids[t, j].

x [T, D]; ids and weights [T, k] in `Chosen`; gate_up [E, 2 I, D], the gate's rows first, and down [E, D, I], a `Matrix`
each, here in x's type; y [T, D] as x.

"cpp" (experts.cpp) computes in fp32, adds the experts in ascending order and rounds once: a token's result does not
depend on the batch. "gathered" copies the experts of each token, for few tokens of a small model on a GPU; a CUDA graph
can contain it, because the host need not know the ids. "torch" loops over the experts that are used. Both round to x's
type between their calls.

`define` makes the op for one format of weights: experts_fp8.py, experts_int4.py, experts_int4_compact.py and
experts_nvfp4.py have the others. There "cpp" reads the weights as they are, once per call for all tokens of an expert,
and gives the bits of this op's "cpp" on dequantised float32 weights; "gathered" and "torch" dequantise the experts of a
token, or each expert that is hit, to x's type.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, sums
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Matrix
from perilune.ops.moe.chosen import Chosen

GATHERED_BYTES = 256 << 20  # max bytes of weights that "gathered" copies; beyond, "torch" is faster


@dataclass(frozen=True)
class Case(Sized):
    T: int
    k: int
    E: int
    D: int
    I: int  # noqa: E741
    to_one: bool = False  # all tokens to expert 0 (k = 1)

    @property
    def hit(self) -> float:
        return min(1, self.T) if self.to_one else costs.expected_experts(self.T, self.k, self.E)


CASES = [  # a slice of K2's experts: 48 of 384, each with an eighth of its width
    *(Case(t, K2.top_k, 48, K2.hidden, K2.width // 8, big=True) for t in (1, 4, 16, 64, 512)),
    *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width) for t in (1, 4, 16, 64, 512)),
    Case(0, 2, 4, 32, 32),
    Case(1, 1, 1, 32, 32),
    Case(9, 3, 5, 64, 32),
    Case(7, 2, 4, 96, 160),
    Case(33, 1, 6, 64, 64, to_one=True),
]
TOL = {
    "y": {
        FLOAT32: sums()[FLOAT32],
        BFLOAT16: Tol(4e-2, 3e-2, 8e-3, "bf16 rounding of gate and up, of their product, of each expert's result"),
    }
}


def quantized_cases(*small: Case) -> list[Case]:
    """Test cases with 16 of K2's experts, with the bundled model's experts, and `small` ones."""
    return [
        *(Case(t, K2.top_k, 16, K2.hidden, K2.width, big=True) for t in (1, 4, 16, 64, 512)),
        *(Case(t, NANO.top_k, NANO.experts, NANO.hidden, NANO.width) for t in (1, 4, 16, 64, 512)),
        Case(0, 2, 4, 32, 32),
        Case(33, 1, 6, 64, 64, to_one=True),
        *small,
    ]


def chosen(c: Case, g: Make) -> Chosen:
    scores = g.rand(c.T, c.E)
    if c.to_one:
        scores[:, 0] = 2.0
    return Chosen(scores.topk(c.k)[1].to(torch.int32), g.rand(c.T, c.k) + 0.1)


@dataclass(frozen=True)
class Format:
    """How the experts' weights are stored.

    name           of the op
    bits           stored bits per weight, scales included; None: weights have x's type
    matrices       makes gate_up and down of a case
    gate_up, down  dequantise a Matrix with any leading dimensions (all experts, some, none) to [..., o, i] of a dtype
    needs          conditions of "cpp" on a call's arguments, for `build.on_cpu`
    gathers        whether to define "gathered"
    """

    name: str
    bits: float | None
    matrices: Callable[[Case, Make], tuple[Matrix, Matrix]]
    gate_up: Callable[[Matrix, torch.dtype], Tensor]
    down: Callable[[Matrix, torch.dtype], Tensor]
    needs: Callable[[Any], Sequence[tuple[bool, str]]] = lambda a: ()
    gathers: bool = True


def dense_reference(x: Tensor, chosen: Chosen, gate_up: Tensor, down: Tensor) -> Tensor:
    """The op with weights of any float type."""
    y = torch.zeros(x.shape, device=x.device)
    for e in range(gate_up.shape[0]):
        tokens, choice = (chosen.ids == e).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up[e].float().T).chunk(2, -1)
        h = gate * torch.sigmoid(gate) * up
        y[tokens] += chosen.weights[tokens, choice].unsqueeze(-1) * (h @ down[e].float().T)
    return y.to(x.dtype)


def _some(w: Matrix, which: Tensor | int) -> Matrix:
    scale, row_scale = (None if t is None else t[which] for t in (w.scale, w.row_scale))
    return Matrix(w.weight[which], scale, row_scale)


@functools.cache
def _kernel(name: str, pointers: int) -> Any:
    return build.function("experts", name, "p" * pointers + "l" * 6)


def _few_on_gpu(x: Tensor, gate_up: Matrix, device: torch.device) -> bool | str:
    """Whether copies of 8 experts' weights for each token stay within GATHERED_BYTES."""
    if device.type != "cuda":
        return "for CUDA"
    expert = 1.5 * gate_up.weight.shape[1] * x.shape[1] * FLOAT32.itemsize
    return 8 * x.shape[0] * expert <= GATHERED_BYTES or "for few tokens of a small model"


def define(form: Format, cases: list[Any], tol: dict[str, Any]) -> "Op[[Tensor, Chosen, Matrix, Matrix], Tensor]":
    def inputs(c: Case, g: Make) -> dict[str, Any]:
        gate_up, down = form.matrices(c, g)
        return {"x": g.randn(c.T, c.D), "chosen": chosen(c, g), "gate_up": gate_up, "down": down}

    def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
        bits = 8 * dtype.itemsize if form.bits is None else form.bits
        return costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, bits)

    def reference(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
        return dense_reference(x, chosen, form.gate_up(gate_up, FLOAT32), form.down(down, FLOAT32))

    op = Op(form.name, cases, tol, inputs, cost, reference, decides=("x", "gate_up"))

    @op.impl("cpp", when=lambda a, device: build.on_cpu("experts", device, *form.needs(a)))
    def cpp(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
        (T, D), k, (E, both, _) = x.shape, chosen.ids.shape[1], gate_up.weight.shape
        parts = [t for w in (gate_up, down) for t in (w.weight, w.scale, w.row_scale) if t is not None]
        read = [t.contiguous() for t in (x.float(), chosen.ids, chosen.weights, *parts)]
        h, y = torch.empty(T * k, both // 2), torch.empty(T, D)
        name = form.name
        if form.bits is None:
            name += "_f32" if gate_up.weight.dtype == FLOAT32 else "_bf16"
        pointers = [t.data_ptr() for t in (*read, h, y)]
        failed = _kernel(name, len(pointers))(*pointers, T, k, E, D, both // 2, threads.count())
        assert not failed, f"an id is no expert: {chosen.ids.min()=} {chosen.ids.max()=} {E=}"
        return y if x.dtype == FLOAT32 else y.to(x.dtype)

    if form.gathers:

        @op.impl("gathered", when=lambda a, device: _few_on_gpu(a.x, a.gate_up, device))
        def gathered(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
            own_gate_up = form.gate_up(_some(gate_up, chosen.ids), x.dtype)  # [T, k, 2 I, D]
            own_down = form.down(_some(down, chosen.ids), x.dtype)
            gate, up = (own_gate_up @ x[:, None, :, None]).chunk(2, 2)
            parts = (own_down @ (torch.nn.functional.silu(gate) * up)).squeeze(3)
            return (parts.float() * chosen.weights.unsqueeze(2)).sum(1).to(x.dtype)

    @op.impl("torch")
    def per_expert(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
        y = torch.zeros(x.shape, device=x.device)
        for e in torch.unique(chosen.ids).tolist():
            tokens, choice = (chosen.ids == e).nonzero(as_tuple=True)
            both = torch.nn.functional.linear(x[tokens], form.gate_up(_some(gate_up, e), x.dtype))
            gate, up = both.chunk(2, -1)
            h = torch.nn.functional.silu(gate) * up
            part = torch.nn.functional.linear(h, form.down(_some(down, e), x.dtype))
            # A token has an expert at most once, so no two rows of one addition have the same index; the order of
            # experts is fixed, so the sum is deterministic.
            y.index_add_(0, tokens, part.float() * chosen.weights[tokens, choice].unsqueeze(-1))
        return y.to(x.dtype)

    return op


def _matrices(c: Case, g: Make) -> tuple[Matrix, Matrix]:
    gate_up = g.randn(c.E, 2 * c.I, c.D, scale=c.D**-0.5)
    return Matrix(gate_up), Matrix(g.randn(c.E, c.D, c.I, scale=c.I**-0.5))


def _dense(w: Matrix, dtype: torch.dtype) -> Tensor:
    return w.weight.to(dtype)


def in_eights(a: Any) -> Sequence[tuple[bool, str]]:
    return ((a.x.shape[1] % 8 == 0 and a.gate_up.weight.shape[1] % 16 == 0, "widths that are multiples of 8"),)


op = define(Format("experts", None, _matrices, _dense, _dense, in_eights), CASES, TOL)


def experts(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix) -> Tensor:
    (T, D), (E, both, inputs) = x.shape, gate_up.weight.shape
    assert inputs == D and down.weight.shape == (E, D, both // 2), f"{x.shape=} {gate_up.kind=} {down.kind=}"
    chosen.check(T)
    assert x.dtype == gate_up.weight.dtype == down.weight.dtype, f"{x.dtype=} {gate_up.kind=} {down.kind=}"
    return op(x, chosen, gate_up, down)
