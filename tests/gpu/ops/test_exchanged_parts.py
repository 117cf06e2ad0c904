"""Kernels that add the peers' parts themselves, with peers that do not run: what they would have sent is in the mailbox
already, or never comes. tests/multi_gpu has real ones."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.attention import mla_decode_output, mla_pre_attention
from perilune.ops.exchange.peers import HALF_BYTES, Mailboxes, Peers
from perilune.ops.harness import build, check
from perilune.ops.harness.case import BFLOAT16, K2, Make, Tol, clone
from perilune.ops.moe import mla_decode_router

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not mla_pre_attention.PROCESSORS <= build.sm_count(CUDA) <= mla_decode_output.MOST_PROCESSORS,
    reason="for Hopper GPUs of 132 processors",
)
QUADS = K2.hidden // 4  # words of a token: four values each
BEFORE, AFTER = 128 * 8 * 128, 128 * 8 * 128 + 4 * QUADS  # where they begin, as cuda/peers.cuh has it


class Silent:
    """Rank `rank` of `ranks`, the only one that runs. `sent` [ranks, T, D] is what all ranks send."""

    def __init__(self, rank: int, ranks: int, sent: Tensor) -> None:
        self.own, self.others = (torch.zeros(2 * ranks * HALF_BYTES // 4, dtype=torch.int32, device=CUDA) for _ in "ab")
        addresses = [(self.own if r == rank else self.others).data_ptr() for r in range(ranks)]
        self.rank, self.sent, self.box = rank, sent, Mailboxes(rank, addresses, CUDA, 0.3)
        self.peers = Peers(rank, ranks, lambda own: sent, self.box)

    def send(self, first: int, epoch: int) -> None:
        """All but this rank's, to words from `first` on."""
        words = self.own.view(2, self.peers.ranks, HALF_BYTES // 16, 4)
        pairs = self.sent.view(torch.int32).view(self.peers.ranks, -1, 2)
        for r in range(self.peers.ranks):
            if r != self.rank:
                place = words[epoch % 2, r, first : first + pairs.shape[1]]
                place[:, 0], place[:, 2] = pairs[r, :, 0], pairs[r, :, 1]
                place[:, 1::2] = epoch


def _before(tokens: int, fp8: bool, peers: Peers | None, seed: int) -> tuple[Any, dict[str, Any]]:
    case = mla_pre_attention.Case(tokens, K2.heads // 4, K2.hidden, K2.q_rank, parts=9, fp8=fp8)
    args = mla_pre_attention.inputs(case, Make(BFLOAT16, CUDA, seed))
    return mla_pre_attention, args | {"norm": replace(args["norm"], peers=peers)}


def _after(fp8: bool, peers: Peers | None, seed: int) -> tuple[Any, dict[str, Any]]:
    case = mla_decode_router.Case(counts=(1,), contexts=(700,), H=K2.heads // 4, D=K2.hidden, block_size=64, fp8=fp8)
    args = mla_decode_router.inputs(case, Make(BFLOAT16, CUDA, seed))
    return mla_decode_router, args | {"norm": replace(args["norm"], peers=peers)}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (2, 4), (7, 8)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 4])  # 0: the kernels after attention
def test_parts_of_peers_are_added(tokens: int, fp8: bool, rank: int, ranks: int) -> None:
    g = Make(BFLOAT16, CUDA, 3)
    group = Silent(rank, ranks, g.randn(ranks, max(tokens, 1), K2.hidden))
    for epoch in range(1, 5):
        module, args = _before(tokens, fp8, None, epoch) if tokens else _after(fp8, None, epoch)
        old = args["residual"].clone()
        run = module.op.impls["cuda" if tokens or not fp8 else "cuda_mma"].run
        alone = clone(args)
        alone["residual"] = torch.zeros_like(old)
        run(*alone.values())  # what this rank adds, rounded
        group.sent.copy_(g.randn(ranks, max(tokens, 1), K2.hidden))
        group.sent[rank] = alone["residual"]
        want = old.float() + group.sent.float().sum(0)
        group.send(BEFORE if tokens else AFTER, epoch)
        own = clone(args) | {"norm": replace(args["norm"], peers=group.peers)}
        found = run(*own.values())
        torch.cuda.synchronize()
        assert not int(group.box.failed)
        assert check.difference(own["residual"], want.to(BFLOAT16), Tol(4e-2, 2**-7, 3e-4, "sums")) is None
        assert (found if tokens else found[0]).isfinite().all()


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_peer_that_sends_nothing_is_reported_and_never_waited_for_again(tokens: int) -> None:
    group = Silent(0, 4, torch.zeros(4, max(tokens, 1), K2.hidden, dtype=BFLOAT16, device=CUDA))
    module, args = _before(tokens, True, group.peers, 1) if tokens else _after(True, group.peers, 1)
    residual, run = args["residual"].clone(), module.op.impls["cuda" if tokens else "cuda_mma"].run
    run(*(args | {"residual": residual}).values())
    torch.cuda.synchronize()
    assert int(group.box.failed) in (2, 3, 4) and bool(residual.isnan().all())
    begin = time.perf_counter()
    for _ in range(20):
        run(*(args | {"residual": args["residual"].clone()}).values())
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 0.25
