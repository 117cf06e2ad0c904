"""residual += the sum of a token's expert results, y = rmsnorm(residual): moe_int4.py's last step and add_rmsnorm.py.

residual [T, D] is updated in place and rounded to its type before the norm; pairs: see `Pairs`; w [D]; y [T, D] as
residual. Sums over experts are fp32 in the order of choices, then the shared expert; squares are summed in fp32, y is
rounded once. "cuda" (rmsnorm.cu) gives the same bits as the two ops in sequence. It keeps the sums in registers: that
saves 8 D of 32 D bytes of memory traffic per token with 8 experts and a shared one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make, Sized, Tol, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import address
from perilune.ops.layouts.operands import Pairs
from perilune.ops.pointwise.add_rmsnorm import FEW_ROWS
from perilune.ops.pointwise.add_rmsnorm import reference as add_norm_reference

SOURCE = "rmsnorm.cu"
MAX_CHOICES = 32  # experts per token
MIN_TOKENS = FEW_ROWS + 1  # with fewer, add_rmsnorm adds squares in another order, so bits would not be the same


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    k: int
    shared: bool = True
    mixed: bool = False


CASES = [
    *(Case(t, K2.hidden, K2.top_k, mixed=t < 5000, big=True) for t in (513, 1000, 4000, 10_000)),
    Case(600, K2.hidden, K2.top_k, shared=False, big=True),
    *(Case(t, d, k, mixed=k > 3, big=True) for t, d, k in ((777, 3072, 5), (600, 1536, 3), (513, 8192, 1))),
    Case(515, 2056, 32, big=True),
    Case(530, 256, 4, mixed=True),
    Case(513, 8, 2),
    Case(600, 136, 7),
    Case(3, 520, 2),
    Case(0, 256, 2),
]
# Kernels use fused multiply-adds, the reference does not: about 40 of a million sums are rounded the other way. There
# the residual is off by an ulp, and y by that and its own rounding: 5e-5 over the whole output. With the sum rounded to
# bfloat16 before it is added it would be 2.7e-3.
_WHOLE = 5e-4
TOL = {
    "y": {FLOAT32: rounded()[FLOAT32], BFLOAT16: Tol(1e-4, 2**-6, _WHOLE, "an ulp of the residual, and one of y")},
    "residual": {FLOAT32: rounded()[FLOAT32], BFLOAT16: Tol(1e-4, 2**-7, _WHOLE, "an ulp, where sums fall apart")},
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    M = -(-(c.T * c.k + 9) // 8) * 8
    position = g.permutation(M)[: c.T * c.k].view(c.T, c.k).to(torch.int32)
    part = g.randn(M, c.D, dtype=BFLOAT16)
    unused = torch.ones(M, dtype=torch.bool, device=g.device)
    unused[position.flatten().long()] = False
    part[unused] = float("nan")
    position[::7, c.k - 1] = -1
    shared = g.randn(c.T, c.D, dtype=BFLOAT16) if c.shared else None
    pairs = Pairs(part, position, g.rand(c.T, c.k) + 0.1, shared, c.mixed)
    return {"residual": g.randn(c.T, c.D), "pairs": pairs, "w": g.randn(c.D), "eps": 1e-5}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    rows = c.k + c.shared
    return costs.Cost(c.T * c.D * (2 * rows + 9), c.T * c.D * (rows * BFLOAT16.itemsize + 3 * dtype.itemsize))


def summed(pairs: Pairs) -> Tensor:
    """The sums of `pairs`, [T, D] float32."""
    part = pairs.part.float()
    if pairs.mixed:
        part = part.unflatten(-1, (-1, 4, 2)).mT.flatten(-3)
    y = torch.zeros(len(pairs.position), part.shape[1], device=part.device)
    for j in range(pairs.position.shape[1]):
        at = pairs.position[:, j]
        rows = part[at.clamp(min=0).long()].masked_fill(at.unsqueeze(1) < 0, 0.0)
        y += pairs.weights[:, j : j + 1] * rows
    return y if pairs.shared is None else y + pairs.shared.float()


def reference(residual: Tensor, pairs: Pairs, w: Tensor, eps: float) -> Tensor:
    return add_norm_reference(residual, summed(pairs).unsqueeze(1), w, eps)


op = Op("combine_add_rmsnorm", CASES, TOL, inputs, cost, reference, decides=("residual", "pairs"))


def needs(residual: Tensor, pairs: Pairs) -> tuple[tuple[bool, str], ...]:
    """Conditions for `build.on_hopper`."""
    (T, D), k = residual.shape, pairs.weights.shape[1]
    return (
        (residual.dtype == pairs.part.dtype == BFLOAT16, "bfloat16"),
        (T >= MIN_TOKENS, f"at least {MIN_TOKENS} rows"),
        (D % 8 == 0 and D <= 8192, "a width in 8s up to 8,192"),
        (k <= MAX_CHOICES, f"at most {MAX_CHOICES} experts of a token"),
    )


_kernel = build.launcher(SOURCE, "combine_add_rmsnorm", "pppppllppplllfp")


def places(residual: Tensor, pairs: Pairs, w: Tensor) -> tuple[int | None, ...]:
    """The first arguments of the kernels that sum the results of pairs."""
    return (
        residual.data_ptr(),
        pairs.part.data_ptr(),
        pairs.position.data_ptr(),
        pairs.weights.data_ptr(),
        address(pairs.shared),
        pairs.weights.shape[1],
        pairs.mixed,
        w.data_ptr(),
    )


def run(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, y: Tensor, scales: Tensor | None) -> None:
    """Writes y [T, D] in bfloat16, or in e4m3 with `scales` as quantize_tokens.py has them."""
    T, D = residual.shape
    failed = _kernel()(
        *places(residual, pairs, w),
        y.data_ptr(),
        address(scales),
        0 if scales is None else scales.shape[1],
        T,
        D,
        eps,
        build.stream(residual.device),
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {pairs.kind=}"


@op.impl("cuda", when=lambda a, device: build.on_hopper(SOURCE, device, *needs(a.residual, a.pairs)))
def cuda(residual: Tensor, pairs: Pairs, w: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(residual)
    run(residual, pairs, w, eps, y, None)
    return y


def check(residual: Tensor, pairs: Pairs, w: Tensor) -> None:
    (T, D), p = residual.shape, pairs
    assert p.part.shape[1] == D and p.position.shape == p.weights.shape == (T, p.weights.shape[1]), f"{p.kind=}"
    assert p.shared is None or p.shared.shape == (T, D), f"{residual.shape=} {p.kind=}"
    assert w.shape[0] == D and residual.dtype == w.dtype, f"{residual.dtype=} {w.shape=} {w.dtype=}"
    held = (residual, p.part, p.position, p.weights, p.shared)
    assert all(t is None or t.is_contiguous() for t in held), f"{p.kind=}: not contiguous"


def combine_add_rmsnorm(residual: Tensor, pairs: Pairs, w: Tensor, eps: float) -> Tensor:
    check(residual, pairs, w)
    return op(residual, pairs, w, eps)
