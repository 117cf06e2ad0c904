"""A residual's sum and norm, and the experts of the result: all between attention's output and a MoE layer's experts.

residual [T, D] += y [T, D], or, if the norm has peers, += the sum of all ranks' y, as `exchange_add_rmsnorm` has it;
x [T, D] = the norm of the residual; the experts are those of `router`(x, gate). -> x, `Chosen`. Types and roundings are
those of these ops.

"cuda" (add_norm_router_mma.cu) is one launch for 2 to 8 tokens; x has the bits of `exchange_add_rmsnorm`. The experts'
kernel may start, and read x, before this one ends (moe_int4.py). "composed" runs the ops one after the other.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.exchange import exchange_add_rmsnorm, peers
from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make, Sized, Tol, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Gate, Norm, Routing
from perilune.ops.moe import router
from perilune.ops.moe.chosen import Chosen

LEAST_TOKENS, MOST_TOKENS = 2, 8
PART = 896  # columns of a CTA
MOST_PARTS = 8  # CTAs that share a row
ROWS = 24  # of the gate, of a cluster of CTAs
MOST_EXPERTS = 448
CHOICES = 8
SOURCE = "add_norm_router_mma.cu"


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    E: int
    k: int
    ranks: int = 0  # y is this rank's part of a sum over so many ranks; 0: y is whole
    wide_gate: bool = False  # float32
    normalise: bool = True
    ties: bool = False  # all scores are equal


CASES = [
    *(Case(t, K2.hidden, K2.experts, K2.top_k, ranks=n, big=True) for t in range(2, 9) for n in (0, 2, 4, 8)),
    *(Case(t, K2.hidden, K2.experts, K2.top_k, ranks=n, big=True) for t in (1, 9) for n in (0, 4)),
    Case(4, K2.hidden, MOST_EXPERTS, CHOICES, big=True),
    Case(4, K2.hidden, 512, CHOICES, big=True),
    *(Case(t, 2 * PART, 200, CHOICES, ranks=n) for t in (2, 3, 4, 5, 8) for n in (0, 1, 2)),
    *(Case(3, 3 * PART, 72, CHOICES, ranks=n) for n in (0, 4, 8)),
    Case(2, 2 * PART, 40, CHOICES, normalise=False),
    *(Case(4, 2 * PART, 200, CHOICES, ties=True, ranks=n) for n in (0, 2)),
    Case(3, 2 * PART, 40, CHOICES),
    Case(4, 2 * PART, 100, 4),
    Case(3, 2 * PART, 100, CHOICES, wide_gate=True),
    Case(3, 512, 48, CHOICES, ranks=2),
    Case(0, 64, 16, 4),
]
_WEIGHTS = Tol(2e-2, 2e-2, 2e-2, "sigmoids of products with x, which is rounded to bfloat16")
TOL = {
    "residual": rounded(),
    "x": rounded(),
    "ids": {dtype: Tol(0, 0, 0, "scores are far apart") for dtype in (FLOAT32, BFLOAT16)},
    "weights": {FLOAT32: Tol(1e-3, 1e-3, 1e-3, "sigmoids of products with x"), BFLOAT16: _WEIGHTS},
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    """Rows of the gate are multiples of one vector that the residual is nearly parallel to, so that rounding errors
    cannot change the ids; each token has another sign, and so other experts."""
    along = g.randn(c.D, dtype=FLOAT32)
    multiples = (g.permutation(c.E).float() + 1) / c.E * (0 if c.ties else 1)
    signs = 1 - 2 * (torch.arange(c.T, device=along.device) % 2).float()
    residual = g.randn(c.T, c.D, dtype=FLOAT32) * 0.5 + signs.unsqueeze(1) * along
    rows = 4 * multiples.unsqueeze(1) * along / c.D
    return {
        "residual": residual.to(g.dtype),
        "y": g.randn(c.T, c.D, scale=0.1),
        "norm": Norm(g.randn(c.D, scale=0.1) + 1, 1e-5, peers.loopback(c.ranks, g.device, 1.0) if c.ranks else None),
        "gate": Gate(
            rows.to(FLOAT32 if c.wide_gate else BFLOAT16),
            torch.zeros_like(multiples),
            Routing(c.k, 1, 1, 2.827, c.normalise),
        ),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.add_rmsnorm(c.T, c.D, dtype.itemsize) + costs.router(c.T, c.D, c.E, c.k, dtype.itemsize)


def reference(residual: Tensor, y: Tensor, norm: Norm, gate: Gate) -> tuple[Tensor, Chosen]:
    x = exchange_add_rmsnorm.add_norm_reference(residual, y, norm)
    return x, router.reference(x, gate.weight, gate.bias, gate.routing)


op = Op("add_norm_router", CASES, TOL, inputs, cost, reference, decides=("residual", "norm", "gate"))


@functools.cache
def _kernel() -> Any:
    return build.function(SOURCE, "add_norm_router", "p" * 10 + "l" * 4 + "ffp")


def _fits(a: Any, device: torch.device) -> bool | str:
    (T, D), E, routing = a.residual.shape, len(a.gate.weight), a.gate.routing
    return build.on_hopper(
        SOURCE,
        device,
        (a.residual.dtype == BFLOAT16, "bfloat16"),
        (LEAST_TOKENS <= T <= MOST_TOKENS, f"{LEAST_TOKENS} to {MOST_TOKENS} rows"),
        (
            D % PART == 0 and 1 < D // PART <= MOST_PARTS,
            f"a width in {PART}s from {2 * PART:,} to {MOST_PARTS * PART:,}",
        ),
        (a.gate.weight.dtype == BFLOAT16, "a bfloat16 gate"),
        (routing.n_group == routing.topk_group, "one choice among all experts"),
        (ROWS * (T - 1) < E <= MOST_EXPERTS, f"{ROWS} experts for each row but one, at most {MOST_EXPERTS}"),
        (routing.top_k == CHOICES, f"{CHOICES} choices"),
        *peers.needs(a.norm.peers),
    )


@op.impl("cuda", when=_fits, alone=True, waits=(SOURCE,))
def cuda(residual: Tensor, y: Tensor, norm: Norm, gate: Gate) -> tuple[Tensor, Chosen]:
    (T, D), E, device, routing = residual.shape, len(gate.weight), residual.device, gate.routing
    assert all(t.is_contiguous() for t in (norm.weight, gate.weight, gate.bias)), f"{gate.weight.stride()=}"
    memory, y = workspace.current(device), y.contiguous()
    # Parts of scores, of CTAs that share rows of the gate; the kernel leaves zeros.
    sums = memory.zeros("add_norm_router.sums", MOST_TOKENS * MOST_PARTS * MOST_EXPERTS)
    x = torch.empty_like(residual)
    ids = torch.empty(T, routing.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(T, routing.top_k, device=device)
    failed = _kernel()(
        peers.table(norm.peers), residual.data_ptr(), y.data_ptr(), norm.weight.data_ptr(), gate.weight.data_ptr(),
        gate.bias.data_ptr(), x.data_ptr(), sums.data_ptr(), ids.data_ptr(), weights.data_ptr(), T, D, E,
        routing.normalise, norm.eps, routing.factor, memory.stream,
    )  # fmt: skip
    assert not failed, f"add_norm_router does not start: CUDA error {failed}: {residual.shape=} {gate.weight.shape=}"
    return x, Chosen(ids, weights)


@op.impl("composed")
def composed(residual: Tensor, y: Tensor, norm: Norm, gate: Gate) -> tuple[Tensor, Chosen]:
    x = exchange_add_rmsnorm.add_norm(residual, y, norm)
    return x, router.router(x, gate.weight, gate.bias, gate.routing)


def add_norm_router(residual: Tensor, y: Tensor, norm: Norm, gate: Gate) -> tuple[Tensor, Chosen]:
    assert y.shape == residual.shape and y.dtype == residual.dtype, f"{residual.shape=} {y.shape=} {y.dtype=}"
    assert residual.is_contiguous(), f"{residual.stride()=}"
    assert norm.weight.shape == residual.shape[1:] and norm.weight.dtype == residual.dtype, f"{norm.weight.shape=}"
    router.check(residual, gate.weight, gate.bias, gate.routing)
    return op(residual, y, norm, gate)
