"""Reduce-scatter of the ranks' partial MoE outputs, fused with the sum over a token's experts, the residual and norm.

As exchange_pairs_add_rmsnorm.py, for the rows that this rank owns: `owned(T, peers)`, block number `rank` of
ceil(T / ranks) rows. Only these rows of residual [T, D] are updated. Other rows keep old values until "cuda" of
exchange_add_rmsnorm.py (many rows) or of exchange_pairs_add_rmsnorm.py sums all rows: these kernels read only the
owner's copy of a row. y [n, D]: the norms of the n owned rows. Of N ranks, each sends (N - 1) / N of the rows, half as
many as in an all-reduce, and the work after the norm is done once per row instead of on every rank.

A rank does not wait until owners have read its rows, so exchange_rows.py must synchronise ranks before the next
exchange.
"""

import torch
from torch import Tensor

from perilune.ops.exchange.peers import Peers
from perilune.ops.harness import build
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import address
from perilune.ops.layouts.operands import Pairs
from perilune.ops.moe import combine_add_rmsnorm as of_one_rank
from perilune.ops.moe import exchange_pairs_add_rmsnorm as whole

SOURCE = "scatter_pairs_add_rmsnorm.cu"
CASES, TOL, inputs, cost = whole.CASES, whole.TOL, whole.inputs, whole.cost


def owned(T: int, peers: Peers) -> slice:
    """This rank's rows of T."""
    block = -(-T // peers.ranks)
    return slice(min(T, peers.rank * block), min(T, (peers.rank + 1) * block))


def reference(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    own, complete = owned(len(residual), peers), residual.clone()
    y = whole.reference(complete, pairs, w, eps, peers)[own]
    residual[own] = complete[own]
    return y


op = Op("scatter_pairs_add_rmsnorm", CASES, TOL, inputs, cost, reference, decides=("residual", "pairs", "peers"))


_kernel = build.launcher(SOURCE, "scatter_pairs_add_rmsnorm", "ppppppllppplllfp")


def run(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers, y: Tensor, scales: Tensor | None) -> None:
    """Writes y [n, D] in bfloat16, or in e4m3 with `scales` as quantize_tokens.py has them."""
    failed = _kernel()(
        *whole.places(residual, pairs, w, peers),
        y.data_ptr(),
        address(scales),
        0 if scales is None else scales.shape[1],
        *residual.shape,
        eps,
        build.stream(residual.device),
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {pairs.kind=} {peers.ranks=}"


@op.impl("cuda", when=lambda a, device: whole.fits(SOURCE, a, device), alone=True, waits=(SOURCE,))
def cuda(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    y = torch.empty_like(residual[owned(len(residual), peers)])
    run(residual, pairs, w, eps, peers, y, None)
    return y


@op.impl("composed")
def composed(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    own, complete = owned(len(residual), peers), residual.clone()
    y = whole.exchange_pairs_add_rmsnorm(complete, pairs, w, eps, peers)[own]
    residual[own] = complete[own]
    return y


def scatter_pairs_add_rmsnorm(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> Tensor:
    of_one_rank.check(residual, pairs, w)
    return op(residual, pairs, w, eps, peers)
