"""All-reduce of the ranks' partial MoE outputs, fused with the sum over a token's experts, the residual and its norm.

As exchange_add_rmsnorm.py, but this rank's partial output is the sum over experts of `pairs`, as in
combine_add_rmsnorm.py, rounded once to the residual's type before it is sent. residual [T, D] is updated in place;
w [D]; y [T, D]. "cuda" (cuda/two_shots.cuh) keeps the sums in registers, and reads experts' results while other rows
are in transit between ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.ops.exchange import exchange_add_rmsnorm as of_sums
from perilune.ops.exchange.peers import Peers, beside
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make, Tol, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Pairs
from perilune.ops.moe import combine_add_rmsnorm as of_one_rank

SOURCE = "exchange_pairs_add_rmsnorm.cu"


@dataclass(frozen=True)
class Case(of_one_rank.Case):
    ranks: int = 1


CASES = [
    *(Case(t, K2.hidden, K2.top_k, mixed=t < 5000, big=True) for t in (513, 1000, 10_000)),
    Case(600, K2.hidden, K2.top_k, shared=False, big=True),
    Case(515, 2056, 32, big=True),
    Case(530, 256, 4, mixed=True),
    Case(3, 520, 2),
    Case(7, 256, 3, mixed=True, ranks=2),
    Case(0, 256, 2, ranks=4),
]
_WHOLE = of_one_rank.TOL["y"][BFLOAT16].norm
TOL = {
    "y": {
        FLOAT32: rounded()[FLOAT32],
        BFLOAT16: Tol(0.1, 2**-6, _WHOLE, "an ulp of a partial sum of up to 8, and y's"),
    },
    "residual": {
        FLOAT32: rounded()[FLOAT32],
        BFLOAT16: Tol(2**-4, 2**-7, _WHOLE, "an ulp of a partial sum of up to 16"),
    },
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    """Inputs of rank 0. A case runs on one rank: the partial outputs of the others are tensors."""
    made = of_one_rank.inputs(c, g)
    return {**made, "peers": beside(g.randn(c.ranks - 1, c.T, c.D))}


cost = of_one_rank.cost


def reference(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    return of_sums.reference(residual, of_one_rank.summed(pairs).to(residual.dtype), w, eps, peers)


op = Op("exchange_pairs_add_rmsnorm", CASES, TOL, inputs, cost, reference, decides=("residual", "pairs", "peers"))


def fits(source: str, a: Any, device: torch.device) -> bool | str:
    """`when` of an implementation in `source` with these arguments."""
    first = of_sums.fits(source, a.residual, a.peers, device)
    if first is not True:
        return first
    k, most = a.pairs.weights.shape[1], of_one_rank.MAX_CHOICES
    return build.on_hopper(source, device, (a.pairs.part.dtype == BFLOAT16, "bfloat16"), (k <= most, f"{most} choices"))


def places(residual: Tensor, pairs: Pairs, w: Tensor, peers: Peers) -> tuple[int | None, ...]:
    """The first arguments of the kernels that add pairs over ranks."""
    assert peers.mailboxes is not None
    return peers.mailboxes.table, *of_one_rank.places(residual, pairs, w)


_kernel = build.launcher(SOURCE, "exchange_pairs_add_rmsnorm", "ppppppllppllfp")


@op.impl("cuda", when=lambda a, device: fits(SOURCE, a, device), alone=True, waits=(SOURCE,))
def cuda(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    y, stream = torch.empty_like(residual), build.stream(residual.device)
    failed = _kernel()(*places(residual, pairs, w, peers), y.data_ptr(), *residual.shape, eps, stream)
    assert not failed, f"CUDA error {failed}: {residual.shape=} {pairs.kind=} {peers.ranks=}"
    return y


@op.impl("composed")
def composed(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    sums = of_one_rank.summed(pairs).to(residual.dtype)
    return of_sums.exchange_add_rmsnorm(residual, sums, w, eps, peers)


def exchange_pairs_add_rmsnorm(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    of_one_rank.check(residual, pairs, w)
    return op(residual, pairs, w, eps, peers)
