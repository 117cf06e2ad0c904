"""Choosing among logits that lie in parts on ranks: threads instead of ranks, compared with ops on whole logits."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.core.step import PENDING
from perilune.dist.experts import own
from perilune.dist.slicing import Slicing
from perilune.dist.vocabulary import MIN_SHARE_ROWS, Vocabulary
from perilune.ops.drafts.argmax_probability import argmax_probability
from perilune.ops.harness.case import Make
from perilune.ops.moe.chosen import Chosen
from perilune.ops.pointwise.embed_part import embed_part
from perilune.ops.sampling import argmax, sample

V = 480


class Thread:
    """A rank's group within one process."""

    name, peers = "threads", None

    def __init__(self, slicing: Slicing, board: list[Any], barrier: threading.Barrier) -> None:
        self.slicing, self.ranks, self._board, self._barrier = slicing, slicing.ranks, board, barrier
        self.sent: list[int] = []  # bytes of this rank, by exchange

    def all_to_all(self, x: Tensor) -> Tensor:
        rows = self.gather(x)[:, self.slicing.rank].contiguous()
        self.sent[-1] = x[0].nbytes * (self.ranks - 1)
        return rows

    def gather(self, x: Tensor) -> Tensor:
        self.sent.append(x.nbytes * (self.ranks - 1))
        self._board[self.slicing.rank] = x.clone()
        self._barrier.wait(100)
        found = torch.stack(self._board)
        self._barrier.wait(100)
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
@pytest.mark.parametrize("rows", [64, 13])
def test_ranks_sample_the_token_that_one_would(ranks: int, kind: str, rows: int) -> None:
    logits, g = logits_of(kind, rows), Make(torch.float32, torch.device("cpu"), 5)
    temperature = g.integers(0, 5, rows).float() * 0.75
    top_k = g.integers(1, 65, rows, dtype=torch.int32) * g.integers(0, 3, rows, dtype=torch.int32)
    if kind == "close":
        temperature[:], top_k[:] = 0.75, 64
    top_p = torch.where(g.rand(rows) < 0.5, 1.0, g.rand(rows) * 0.98 + 0.01)
    min_p = torch.where(g.rand(rows) < 0.5, 0.0, g.rand(rows) * 0.2)
    u = g.rand(rows, dtype=torch.float64)
    how = temperature, top_k, top_p, min_p
    expected = sample.sample(logits, *how, u)
    for found in on_ranks(ranks, lambda v, part: v.sample(logits[:, part].contiguous(), how, u)):
        assert found.tolist() == expected.tolist()
    if kind in ("plain", "ties"):
        assert (expected >= 0).all() and len(set(expected.tolist())) > 2


class Launches(TorchDispatchMode):
    """Counts what would be kernels on a GPU: calls of torch that make neither a view nor an empty tensor, and of
    ops."""

    FREE = ("view", "empty", "select", "slice", "transpose", "unbind", "squeeze", "expand", "alias", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if not any(free in name for free in self.FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 4, 2 * MIN_SHARE_ROWS, 64])
def test_a_choice_is_few_launches_and_one_or_two_exchanges(rows: int) -> None:
    logits = logits_of("plain", rows)
    how = (
        torch.ones(rows),
        torch.full((rows,), 50, dtype=torch.int32),
        torch.ones(rows),
        torch.zeros(rows),
        torch.rand(rows, dtype=torch.float64),
    )

    def counted(v: Vocabulary, work: Callable[[], Any]) -> tuple[list[str], list[int]]:
        group: Any = v._group
        group.sent.clear()
        with Launches() as launches:
            work()
        return [n for n in launches.names if n not in ("clone", "stack")], list(group.sent)

    def work(v: Vocabulary, part: slice) -> Any:
        own = logits[:, part].contiguous()
        return (
            counted(v, lambda: v.sample(own, how[:4], how[4])),
            counted(v, lambda: v.argmax(own)),
            counted(v, lambda: v.argmax_probability(own)),
        )

    logits_bytes = 4 * rows * V // 2
    sent = [logits_bytes] if rows < 2 * MIN_SHARE_ROWS else [logits_bytes // 2, 8 * rows // 2]
    for sampled, greedy, drafted in on_ranks(2, work):
        assert sampled == ([], sent) and greedy == ([], sent)  # the copy into rows, and one op
        assert len(drafted[0]) <= 12 and drafted[1] == sent[:1] + [2 * n for n in sent[1:]]


@pytest.mark.parametrize("rows", [32, 3])
@pytest.mark.parametrize("kind", ["plain", "ties", "broken", "few"])
def test_ranks_agree_with_one_on_the_largest(kind: str, rows: int) -> None:
    logits = logits_of(kind, rows)
    ids, probability = argmax_probability(logits)

    def work(v: Vocabulary, part: slice) -> tuple[Tensor, ...]:
        mine = logits[:, part].contiguous()
        return v.argmax(mine), *v.argmax_probability(mine), v.whole(mine)

    for greedy, drafted, confidence, whole in on_ranks(4, work):
        assert greedy.tolist() == argmax.argmax(logits).tolist()
        assert drafted.tolist() == ids.tolist() and torch.equal(confidence, probability)
        assert torch.equal(whole.nan_to_num(), logits.nan_to_num())


def test_ranks_embed_their_tokens_and_nothing_for_those_of_others() -> None:
    table, tokens, slots = torch.randn(V, 8), torch.tensor([0, 5, V - 1, 240, PENDING, 77]), torch.tensor([3, 239])
    rows, positions, angles = torch.tensor([0, 0, 0, 0, 1, 0]), torch.arange(6), torch.randn(9, 2)

    def work(v: Vocabulary, part: slice) -> tuple[Tensor, ...]:
        h, own, cos, _ = embed_part(tokens, rows, slots, positions, table[part], v.first, angles, angles)
        return h, own.count_nonzero(1), v._group.sum(own), cos

    found = on_ranks(4, work)
    for h, _, summed, cos in found:
        assert not h.any() and torch.equal(cos, angles[:6])
        assert torch.equal(summed, table[torch.where(tokens == PENDING, 239, tokens)])
    assert torch.stack([count for _, count, *_ in found]).T.sort(1)[0].tolist() == [[0, 0, 0, 8]] * 6


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_choice_is_of_one_ranks_experts(ranks: int) -> None:
    experts, k, tokens = 16, 4, 50
    ids = torch.rand(tokens, experts).topk(k)[1].int()
    chosen = Chosen(ids, torch.rand(tokens, k) + 0.1)
    total = torch.zeros(tokens, experts)
    for rank in range(ranks):
        slicing = Slicing(rank, ranks, whole_experts=True)
        mine = own(chosen, slicing, experts)
        held = min(k, experts // ranks)
        assert mine.ids.shape == (tokens, held) and mine.ids.min() >= 0 and mine.ids.max() < experts // ranks
        assert all(len(set(row)) == held for row in mine.ids.tolist())
        total.scatter_add_(1, mine.ids.long() + rank * experts // ranks, mine.weights)
    assert torch.equal(total, torch.zeros(tokens, experts).scatter(1, ids.long(), chosen.weights))
