"""Choosing among logits that lie in parts on ranks: threads instead of ranks, compared with ops on whole logits."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.dist.experts import own
from perilune.dist.slicing import Slicing
from perilune.dist.vocabulary import MAX_CANDIDATES, Vocabulary
from perilune.ops.drafts.argmax_probability import argmax_probability
from perilune.ops.harness.case import Make
from perilune.ops.moe.chosen import Chosen
from perilune.ops.pointwise.embed import embed
from perilune.ops.sampling import argmax, sample

V = 480


class Thread:
    """A rank's group within one process."""

    name, peers = "threads", None

    def __init__(self, slicing: Slicing, board: list[Any], barrier: threading.Barrier) -> None:
        self.slicing, self.ranks, self._board, self._barrier = slicing, slicing.ranks, board, barrier

    def gather(self, x: Tensor) -> Tensor:
        self._board[self.slicing.rank] = x.clone()
        self._barrier.wait(20)
        found = torch.stack(self._board)
        self._barrier.wait(20)
        return found

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(self.gather(x).sum(0))


def on_ranks(ranks: int, work: Callable[[Vocabulary, slice], Any]) -> list[Any]:
    """What `work(vocabulary, the rank's columns)` gives on every rank."""
    board: list[Any] = [None] * ranks
    barrier, found = threading.Barrier(ranks), [None] * ranks

    def run(rank: int) -> None:
        slicing = Slicing(rank, ranks)
        try:
            found[rank] = work(Vocabulary(Thread(slicing, board, barrier), V), slicing.part(V))  # type: ignore[arg-type]
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(x is not None for x in found)
    return found


def logits_of(kind: str, rows: int) -> Tensor:
    g = Make(torch.float32, torch.device("cpu"), 3)
    logits = g.integers(-1, 2, rows, V).float() if kind == "ties" else g.randn(rows, V, scale=2.0)
    if kind == "close":  # neighbours in float32, of which two have the same z at a temperature of 0.75; of one rank
        order = torch.stack([g.permutation(100) for _ in range(rows)])
        logits = torch.full((rows, V), -9.0)
        logits[:, :100] = -1.9 - order * 2.0**-23
        logits[:, 100] = 0.0
    if kind == "broken":
        argmax.spoil(logits, g)
    if kind == "few":
        logits[:, 7:] = float("-inf")
    return logits.contiguous()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["plain", "ties", "close", "broken", "few"])
@pytest.mark.parametrize("narrow", [True, False])
def test_ranks_sample_the_token_that_one_would(ranks: int, kind: str, narrow: bool) -> None:
    rows = 64
    logits, g = logits_of(kind, rows), Make(torch.float32, torch.device("cpu"), 5)
    temperature = g.integers(0, 5, rows).float() * 0.75
    top_k = g.integers(1, MAX_CANDIDATES + 1, rows, dtype=torch.int32)
    if kind == "close":
        temperature[:], top_k[:] = 0.75, MAX_CANDIDATES
    if not narrow:
        top_k *= g.integers(0, 3, rows, dtype=torch.int32)
    top_p = torch.where(g.rand(rows) < 0.5, 1.0, g.rand(rows) * 0.98 + 0.01)
    min_p = torch.where(g.rand(rows) < 0.5, 0.0, g.rand(rows) * 0.2)
    u = g.rand(rows, dtype=torch.float64)
    how = temperature, top_k, top_p, min_p
    expected = sample.sample(logits, *how, u)
    for found in on_ranks(ranks, lambda v, part: v.sample(logits[:, part].contiguous(), how, u, narrow=narrow)):
        assert found.tolist() == expected.tolist()
    if kind in ("plain", "ties"):
        assert (expected >= 0).all() and len(set(expected.tolist())) > 2


@pytest.mark.parametrize("kind", ["plain", "ties", "broken", "few"])
def test_ranks_agree_with_one_on_the_largest_and_on_rows_of_the_table(kind: str) -> None:
    logits = logits_of(kind, 32)
    ids, probability = argmax_probability(logits)
    table, tokens = torch.randn(V, 8), torch.tensor([0, 5, V - 1, 240, 239, 77])

    def work(v: Vocabulary, part: slice) -> tuple[Tensor, ...]:
        mine = logits[:, part].contiguous()
        return v.argmax(mine), *v.argmax_probability(mine), v.whole(mine), v._group.sum(v.embed(tokens, table[part]))

    for greedy, drafted, confidence, whole, rows in on_ranks(4, work):
        assert greedy.tolist() == argmax.argmax(logits).tolist()
        assert drafted.tolist() == ids.tolist() and torch.allclose(confidence, probability, atol=1e-5)
        assert torch.equal(whole.nan_to_num(), logits.nan_to_num()) and torch.equal(rows, embed(tokens, table))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_choice_is_of_one_ranks_experts(ranks: int) -> None:
    experts, k, tokens = 16, 4, 50
    ids = torch.rand(tokens, experts).topk(k)[1].int()
    chosen = Chosen(ids, torch.rand(tokens, k) + 0.1)
    total = torch.zeros(tokens, experts)
    for rank in range(ranks):
        slicing = Slicing(rank, ranks, whole_experts=True)
        mine = own(chosen, slicing, experts)
        assert mine.ids.shape == ids.shape and mine.ids.min() >= 0 and mine.ids.max() < experts // ranks
        assert all(len(set(row)) == k for row in mine.ids.tolist())
        total.scatter_add_(1, mine.ids.long() + rank * experts // ranks, mine.weights)
    assert torch.equal(total, torch.zeros(tokens, experts).scatter(1, ids.long(), chosen.weights))
