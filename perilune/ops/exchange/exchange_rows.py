"""All-to-all, or all-gather, of one row per rank: y[s] is the row that rank s sends to this rank.

x [S, W]: with S = ranks, row j goes to rank j (all-to-all); with S = 1, the row goes to all ranks (all-gather).
y [ranks, W] of x's type, in the order of ranks; nothing is rounded. Every rank must make the same calls with the same
shapes in the same order.

"cuda" and "gathered" exchange as in exchange_add_rmsnorm.py, through the same mailboxes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.exchange.exchange_add_rmsnorm import SOURCE
from perilune.ops.exchange.peers import Peers, beside, needs
from perilune.ops.harness import build
from perilune.ops.harness.case import Make, Sized, exact
from perilune.ops.harness.registry import Op

WORD_BYTES = 16
# Longer rows go through NCCL if the caller can choose: NCCL is as fast, and this kernel occupies all SMs while its CTAs
# wait for peers.
MAX_ROW_BYTES = 8 << 20


@dataclass(frozen=True)
class Case(Sized):
    S: int
    W: int
    ranks: int = 1


CASES = [
    *(Case(1, w, big=w > 40000) for w in (8, 448, 900, 36864, 2_400_008)),
    Case(1, 24, ranks=4),
    Case(2, 40, ranks=2),
    Case(4, 1000, ranks=4),
    Case(2, 7, ranks=2),
]
TOL = {"y": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    """Inputs of rank 0. The rows of the other ranks are given as tensors: a case runs on one rank."""
    peers = beside(g.randn(c.ranks - 1, c.S, c.W))
    return {"x": g.randn(c.S, c.W), "peers": peers}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(0, dtype.itemsize * (c.S + c.ranks) * c.W)


def reference(x: Tensor, peers: Peers) -> Tensor:
    rows = peers.gather(x)
    return torch.stack([of_rank[peers.rank if len(x) > 1 else 0] for of_rank in rows])


op = Op("exchange_rows", CASES, TOL, inputs, cost, reference, decides=("x", "peers"))


_kernel = build.launcher(SOURCE, "exchange_rows", "pplplp")


def takes(x: Tensor) -> bool:
    """Whether "cuda" should exchange these rows; others go through a collective of torch.distributed."""
    nbytes = x.shape[1] * x.itemsize
    return 0 < nbytes <= MAX_ROW_BYTES and nbytes % WORD_BYTES == 0


def _fits(a: Any, device: torch.device) -> bool | str:
    return build.on_hopper(
        SOURCE,
        device,
        *needs(a.peers),
        (a.x.numel() > 0 and a.x[0].nbytes % WORD_BYTES == 0, f"rows of {WORD_BYTES}s of bytes"),
    )


@op.impl("cuda", when=_fits, alone=True, waits=(SOURCE,))
def cuda(x: Tensor, peers: Peers) -> Tensor:
    assert peers.mailboxes is not None and x.data_ptr() % WORD_BYTES == 0, f"{x.shape=} {x.storage_offset()=}"
    y = torch.empty(peers.ranks, x.shape[1], dtype=x.dtype, device=x.device)
    words = y.nbytes // peers.ranks // WORD_BYTES
    failed = _kernel()(
        peers.mailboxes.table,
        x.data_ptr(),
        words if x.shape[0] > 1 else 0,
        y.data_ptr(),
        words,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {peers.ranks=}"
    return y


@op.impl("gathered")
def gathered(x: Tensor, peers: Peers) -> Tensor:
    return peers.gather(x)[:, peers.rank if x.shape[0] > 1 else 0].contiguous()


def exchange_rows(x: Tensor, peers: Peers) -> Tensor:
    assert x.dim() == 2 and x.shape[0] in (1, peers.ranks) and x.is_contiguous(), f"{x.shape=} {peers.ranks=}"
    return op(x, peers)
