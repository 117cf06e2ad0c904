"""Landing memory without GPUs: memory of this process, copies that run when they are queued, threads for ranks."""

import ctypes
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.dist import pieces
from perilune.dist.pieces import SLOTS, Landed, add_in_pieces
from perilune.ops.exchange.peers import Peers
from perilune.ops.exchange.sum_add_rmsnorm import reference, sum_add_rmsnorm
from tests.cpu.dist.rank_threads import on_ranks

ROWS, WIDTH, EPS = 4, 16, 1e-5
LENGTHS = (ROWS + 1, 7 * ROWS, 3 * ROWS - 1, 2 * ROWS)  # rows of each call: fewer pieces than slots, and more


class Stream:
    cuda_stream = 0

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> None: ...


class Words:
    """Exchanges of one word per rank, as threads. A rank may wait until the others cannot go on without it."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.changed = ranks, threading.Condition()
        self.turns = [0] * ranks  # exchanges that each rank has begun
        self.ended: set[int] = set()
        self.words: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)

    def gather(self, rank: int, own: Tensor) -> Tensor:
        with self.changed:
            turn = self.turns[rank]
            self.turns[rank] += 1
            self.words[turn][rank] = own
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.words[turn]) == self.ranks, 100)
            return torch.stack([self.words[turn][r] for r in range(self.ranks)])

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def wait_until_others_wait(self, rank: int) -> None:
        """Until no other rank can go on without this one."""
        with self.changed:
            ahead = self.turns[rank] + 1
            others = [r for r in range(self.ranks) if r != rank]
            assert self.changed.wait_for(lambda: all(self.turns[r] == ahead or r in self.ended for r in others), 100)


@pytest.mark.parametrize("ranks, late", [(2, 0), (2, 1), (4, 2), (2, None)])
def test_a_late_rank_reads_what_was_sent_to_it(monkeypatch: pytest.MonkeyPatch, ranks: int, late: int | None) -> None:
    """The other ranks run as far as they can without rank `late` before it reads each piece."""

    def copy(to: int, start: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(to, start, nbytes)
        return 0

    monkeypatch.setattr(pieces, "_copy", lambda: copy)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    words = Words(ranks)

    def added(residual: Tensor, own: Tensor, others: Tensor, rank: int, *rest: Any) -> None:
        if rank == late:
            words.wait_until_others_wait(rank)
        sum_add_rmsnorm(residual, own, others, rank, *rest)

    monkeypatch.setattr(pieces, "sum_add_rmsnorm", added)
    memory = [torch.zeros(SLOTS * (ranks - 1) * ROWS * WIDTH * 4, dtype=torch.uint8) for _ in range(ranks)]
    addresses = [m.data_ptr() for m in memory]
    g = torch.Generator().manual_seed(1)
    given = [torch.randn(ranks, T, WIDTH, generator=g) for T in LENGTHS]
    norm = torch.rand(WIDTH, generator=g)

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        def gather(own: Tensor) -> Tensor:
            return words.gather(rank, own)

        landing: Any = SimpleNamespace(own=memory[rank], addresses=addresses)
        link, found = Landed(Peers(rank, ranks, gather), landing, ROWS, WIDTH, torch.float32), []
        try:
            for parts in given:
                h = torch.ones(parts.shape[1], WIDTH)
                found.append((h, add_in_pieces(h, parts[rank].clone().__getitem__, norm, EPS, link)))
        finally:
            words.end(rank)
        return found

    for found in on_ranks(ranks, run):
        if isinstance(found, BaseException):
            raise found
        for parts, (h, y) in zip(given, found, strict=True):
            want, normed = torch.ones_like(h), torch.empty_like(h)
            reference(want, parts[0], parts[1:], 0, norm, normed, EPS)
            assert torch.equal(h, want) and torch.allclose(y, normed, atol=1e-5)
