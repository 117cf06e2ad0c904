"""Rows between ranks on one GPU, by turns with sums that use the same mailboxes (see test_exchange.py)."""

import pytest
import torch

from perilune.ops.exchange import exchange_add_rmsnorm as exchange
from perilune.ops.exchange import exchange_rows as rows
from perilune.ops.exchange.peers import loopback
from perilune.ops.harness import build, check
from perilune.ops.harness.case import BFLOAT16, EXACT, K2
from tests.gpu.dist.test_exchange import CUDA, EPS, Group, inputs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or build.on_hopper(exchange.SOURCE, CUDA) is not True,
    reason="needs a Hopper GPU and nvcc",
)


def random(S: int, nbytes: int, seed: int) -> torch.Tensor:
    g = torch.Generator(CUDA).manual_seed(seed)
    return torch.randint(0, 256, (S, nbytes), generator=g, device=CUDA, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("ranks", "nbytes"), [(2, 16), (2, 1792), (2, 36864), (2, 200_000), (4, 18432), (4, 4112 * 3), (8, 9216)]
)
def test_every_rank_gets_the_rows_of_all_between_sums(ranks: int, nbytes: int) -> None:
    group = Group(ranks)
    for turn in range(8):
        shared = turn % 2
        sent = [random(1 if shared else ranks, nbytes, 100 * turn + r) for r in range(ranks)]
        found = group.run(lambda r, sent=sent: rows.cuda(sent[r], group.peers[r]))
        for r in range(ranks):
            assert not int(group.boxes[r].failed), (turn, r)
            assert torch.equal(found[r], torch.stack([x[0 if shared else r] for x in sent])), (turn, r)
        residual, x, w = inputs(ranks, 1 + turn, K2.hidden, 0, turn)
        group.partial, want = [exchange._partial(residual, own) for own in x], residual.clone()
        exchange.reference(want, x[0], w, EPS, group.peers[0])
        held = [residual.clone() for _ in range(ranks)]
        group.exchange(held, x, w, turn % 3 == 2)
        assert all(check.difference(h, want, EXACT) is None for h in held), turn


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [1024, 3_000_000, rows.MAX_ROW_BYTES])
def test_a_loopback_gives_back_what_goes_to_each_rank(ranks: int, nbytes: int) -> None:
    """More rows than there are places: CTAs take several turns."""
    peers = loopback(ranks, CUDA)
    for turn in range(3):
        x = random(ranks, nbytes, turn)
        assert torch.equal(rows.exchange_rows(x, peers), x)
    assert peers.mailboxes is not None and not int(peers.mailboxes.failed)


def test_replayed_graphs_continue_to_count() -> None:
    group = Group(2)
    sent, graphs = [random(2, 5008, r) for r in range(2)], []
    y = [torch.empty_like(x) for x in sent]
    for r in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[r], stream=group.streams[r]):
            for _ in range(3):
                y[r].copy_(rows.cuda(sent[r], group.peers[r]))
    for turn in range(20):
        for r in range(2):
            sent[r].copy_(random(2, 5008, 1000 + 2 * turn + r))
        group.run(lambda r: graphs[r].replay() or y[r])  # type: ignore[func-returns-value]  # replay gives None
        assert all(torch.equal(y[r], torch.stack([x[r] for x in sent])) for r in range(2)), turn


def test_a_rank_that_does_not_come_gives_nan_and_is_reported() -> None:
    group = Group(2, wait_seconds=0.3)
    found = rows.cuda(random(2, 4096, 1), group.peers[0])
    torch.cuda.synchronize()
    assert bool(found.view(BFLOAT16).isnan().all()) and int(group.boxes[0].failed) == 2
