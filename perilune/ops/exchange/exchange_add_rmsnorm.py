"""All-reduce of the ranks' partial outputs, fused with residual and norm: residual += sum, then y = rmsnorm(residual).

residual [T, D] has the same values on all ranks and is updated in place; x is this rank's partial output, either [T, D]
of the residual's type, or P parts that sum to it, float32 [T, P, D]; w [D]; y [T, D]. Each rank's partial output is
rounded to the residual's type once, before it is sent. The rounded outputs are added in fp32 in the order of ranks,
then the residual is added, and the sum is rounded. All ranks get the same bits. Every rank must make the same calls
with the same T in the same order.

"cuda" writes into the peers' memory (sm90/exchange_add_rmsnorm.cu; many rows: cuda/two_shots.cuh). Its CTAs wait for
those of the peers, so each rank needs a GPU of its own. "gathered" all-gathers the outputs and works on any devices.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.exchange.peers import Peers, beside, needs
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Norm
from perilune.ops.pointwise import add_rmsnorm as of_one_rank
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm

SOURCE = "exchange_add_rmsnorm.cu"


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    parts: int = 0  # 0: x has no parts
    ranks: int = 1


CASES = [
    *(Case(t, K2.hidden, big=t > 8) for t in (1, 4, 16, 64, 300)),
    *(Case(t, K2.hidden, 9, big=True) for t in (1, 16, 64)),
    Case(1, NANO.hidden),
    Case(3, NANO.hidden, 5),
    Case(300, NANO.hidden, 1, big=True),
    Case(2, 520, 2),
    Case(1, NANO.hidden, 5, ranks=2),
    Case(5, NANO.hidden, ranks=4),
    Case(0, NANO.hidden, ranks=2),
]
TOL = {"y": rounded(), "residual": rounded()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    """Inputs of rank 0. The partial outputs of the other ranks are given as tensors: a case runs on one rank."""
    x = g.randn(c.T, c.parts, c.D, dtype=FLOAT32) if c.parts else g.randn(c.T, c.D)
    peers = beside(g.randn(c.ranks - 1, c.T, c.D))
    return {"residual": g.randn(c.T, c.D), "x": x, "w": g.randn(c.D), "eps": 1e-5, "peers": peers}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.add_rmsnorm(c.T, c.D, dtype.itemsize)


def reference(residual: Tensor, x: Tensor, w: Tensor, eps: float, peers: Peers) -> Tensor:
    gathered = peers.gather(_partial(residual, x))
    whole = torch.zeros_like(residual, dtype=FLOAT32)
    for part in gathered:
        whole += part.float()
    return of_one_rank.reference(residual, whole.unsqueeze(1), w, eps)


def _partial(residual: Tensor, x: Tensor) -> Tensor:
    """The partial output x as [T, D] of the residual's type."""
    if x.dim() == 2:
        return x
    whole = x[:, 0]
    for p in range(1, x.shape[1]):
        whole = whole + x[:, p]
    return whole.to(residual.dtype)


NAME, KERNEL = "exchange_add_rmsnorm", "cuda"  # names of the op and of its implementation over peer memory
op = Op(NAME, CASES, TOL, inputs, cost, reference, decides=("residual", "x", "peers"))

MAX_WIDTH = 7168  # 8 CTAs of 16 lines of 56 values
# From this many rows on, the two-shot all-reduce: one rank sums a row and sends the sum to the others. With 2 ranks it
# sends as many bytes as the one-shot all-reduce, in which every rank sends its row to all others, but in two steps.
TWO_SHOT_ROWS, TWO_SHOT_ROWS_OF_2 = 24, 512


@functools.cache
def _kernel(two_shots: bool) -> Any:
    return build.function(SOURCE, "exchange_two_shots" if two_shots else "exchange_add_rmsnorm", "pppllppllfp")


def fits(source: str, residual: Tensor, peers: Peers, device: torch.device) -> bool | str:
    """The `when` condition of an implementation in `source` that exchanges rows of this residual."""
    T, D = residual.shape
    return build.on_hopper(
        source,
        device,
        *needs(peers),
        (residual.dtype == BFLOAT16, "bfloat16"),
        (T > 0, "rows"),
        (D % 8 == 0 and D <= MAX_WIDTH, f"a width in 8s up to {MAX_WIDTH:,}"),
    )


@op.impl(KERNEL, when=lambda a, device: fits(SOURCE, a.residual, a.peers, device), alone=True, waits=(SOURCE,))
def cuda(residual: Tensor, x: Tensor, w: Tensor, eps: float, peers: Peers) -> Tensor:
    return launch(residual, x, w, eps, peers, _two_shots(residual, peers))


def _two_shots(residual: Tensor, peers: Peers) -> bool:
    return len(residual) >= (TWO_SHOT_ROWS if peers.ranks > 2 else TWO_SHOT_ROWS_OF_2) and not peers.loopback


def reads_owned_rows(residual: Tensor, w: Tensor, eps: float, peers: Peers) -> bool:
    """Whether `exchange_add_rmsnorm` reads only this rank's rows of the residual (two-shot all-reduce)."""
    return _two_shots(residual, peers) and op.choice(residual, residual, w, eps, peers) is cuda


def launch(residual: Tensor, x: Tensor, w: Tensor, eps: float, peers: Peers, two_shots: bool) -> Tensor:
    (T, D), x, wide = residual.shape, x.contiguous(), x.dim() == 3
    assert peers.mailboxes is not None
    y = torch.empty_like(residual)
    failed = _kernel(two_shots)(
        peers.mailboxes.table,
        residual.data_ptr(),
        x.data_ptr(),
        x.shape[1] if wide else 1,
        wide,
        w.data_ptr(),
        y.data_ptr(),
        T,
        D,
        eps,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {residual.shape=} {x.shape=} {peers.ranks=}"
    return y


@op.impl("gathered")
def gathered(residual: Tensor, x: Tensor, w: Tensor, eps: float, peers: Peers) -> Tensor:
    parts = peers.gather(_partial(residual, x)).transpose(0, 1).float()
    return add_rmsnorm(residual, parts.contiguous(), w, eps)


def exchange_add_rmsnorm(residual: Tensor, x: Tensor, w: Tensor, eps: float, peers: Peers) -> Tensor:
    of_one_rank.check(residual, x, w)
    return op(residual, x, w, eps, peers)


def add_norm(residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """residual += x, or the sum of all ranks' x if there are `norm.peers`. Returns y [T, D] = rmsnorm(residual)."""
    if norm.peers is None:
        return add_rmsnorm(residual, x, norm.weight, norm.eps)
    return exchange_add_rmsnorm(residual, x, norm.weight, norm.eps, norm.peers)


def add_norm_reference(residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
    if norm.peers is None:
        return of_one_rank.reference(residual, x, norm.weight, norm.eps)
    return reference(residual, x, norm.weight, norm.eps, norm.peers)
