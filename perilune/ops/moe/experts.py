"""y[t] = sum_j weights[t, j] * down_e(silu(gate_e(x[t])) * up_e(x[t])) with e = ids[t, j].

x [T, D]; ids [T, k] int32, distinct within a row; weights [T, k] float32; gate_up [E, 2 I, D], the gate's rows
first; down [E, D, I]; y [T, D] as x. "cpp" computes in fp32, adds the experts in ascending order and rounds once: a
token's result does not depend on the batch. "torch" rounds to x's type between its calls.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, sums
from perilune.ops.harness.registry import Op


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


CASES = [  # of K2's 384 experts a slice: an eighth of each in width, 48 of them
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


def routing(c: Case, g: Make) -> dict[str, Tensor]:
    scores = g.rand(c.T, c.E)
    if c.to_one:
        scores[:, 0] = 2.0
    return {"ids": scores.topk(c.k)[1].to(torch.int32), "weights": g.rand(c.T, c.k) + 0.1}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    return {
        "x": g.randn(c.T, c.D),
        **routing(c, g),
        "gate_up": g.randn(c.E, 2 * c.I, c.D, scale=c.D**-0.5),
        "down": g.randn(c.E, c.D, c.I, scale=c.I**-0.5),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.experts(c.T, c.k, c.hit, c.D, c.I, dtype.itemsize, 8 * dtype.itemsize)


def reference(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y = torch.zeros(x.shape, device=x.device)
    for e in range(gate_up.shape[0]):
        tokens, choice = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up[e].float().T).chunk(2, -1)
        h = gate * torch.sigmoid(gate) * up
        y[tokens] += weights[tokens, choice].unsqueeze(-1) * (h @ down[e].float().T)
    return y.to(x.dtype)


op = Op("experts", CASES, TOL, inputs, cost, reference, decides=("x", "gate_up"))


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    return build.function("experts", "experts_f32" if dtype == FLOAT32 else "experts_bf16", "p" * 7 + "l" * 6)


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "experts",
        device,
        (a.x.shape[1] % 8 == 0 and a.gate_up.shape[1] % 16 == 0, "widths that are multiples of 8"),
    ),
)
def cpp(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    f, gate_up, down = x.float().contiguous(), gate_up.contiguous(), down.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    (T, D), k, (E, _, I) = x.shape, ids.shape[1], down.shape  # noqa: E741
    h, y = torch.empty(T * k, I), torch.empty(T, D)
    failed = _kernel(gate_up.dtype)(
        f.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        gate_up.data_ptr(),
        down.data_ptr(),
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


GATHERED_BYTES = 256 << 20  # of weights copied at once by "gathered"


def few_on_gpu(x: Tensor, gate_up: Tensor, device: torch.device) -> bool | str:
    """Whether the weights of each token's experts (8 at most, as a rule) are little enough to be copied for it."""
    if device.type != "cuda":
        return "for CUDA"
    expert = 1.5 * gate_up.shape[1] * x.shape[1] * FLOAT32.itemsize
    return 8 * x.shape[0] * expert <= GATHERED_BYTES or "for few tokens of a small model"


def gathered_sum(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The op with weights gate_up [T, k, 2 I, D], down [T, k, D, I] of x's type copied for each token."""
    gate, up = (gate_up @ x[:, None, :, None]).chunk(2, 2)
    parts = (down @ (torch.nn.functional.silu(gate) * up)).squeeze(3)
    return (parts.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)


@op.impl("gathered", when=lambda a, device: few_on_gpu(a.x, a.gate_up, device))
def gathered(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Which experts are hit does not matter to the host, as a CUDA graph needs it."""
    return gathered_sum(x, weights, gate_up[ids], down[ids])


@op.impl("torch")
def per_expert(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return each(x, ids, weights, lambda e: (gate_up[e], down[e]))


def each(x: Tensor, ids: Tensor, weights: Tensor, expert: Any) -> Tensor:
    """The sum over the experts that were hit; expert(e) -> (gate_up [2 I, D], down [D, I]) of x's type."""
    y = torch.zeros(x.shape, device=x.device)
    for e in ids.unique().tolist():
        tokens, choice = (ids == e).nonzero(as_tuple=True)
        gate_up, down = expert(e)
        gate, up = torch.nn.functional.linear(x[tokens], gate_up).chunk(2, -1)
        part = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
        # A token meets an expert once, so no two rows of an addition collide, and the order of experts is fixed.
        y.index_add_(0, tokens, part.float() * weights[tokens, choice].unsqueeze(-1))
    return y.to(x.dtype)


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    (T, D), (E, both, _) = x.shape, gate_up.shape
    assert gate_up.shape[2] == D and down.shape == (E, D, both // 2), f"{x.shape=} {gate_up.shape=} {down.shape=}"
    assert ids.shape == weights.shape and ids.shape[0] == T, f"{x.shape=} {ids.shape=} {weights.shape=}"
    assert ids.dtype == torch.int32 and weights.dtype == FLOAT32, f"{ids.dtype=} {weights.dtype=}"
    assert x.dtype == gate_up.dtype == down.dtype, f"{x.dtype=} {gate_up.dtype=} {down.dtype=}"
    return op(x, ids, weights, gate_up, down)
