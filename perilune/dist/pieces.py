"""Exchanges partial outputs in pieces of rows, each of which is sent while this rank computes the next one.

A step of a long prompt sums the parts of all ranks twice a layer: with 10,000 tokens of K2.5 143 MB each time, 0.36 ms
at 400 GB/s. Between GPUs copy engines move the parts (`Landed`), so products keep all SMs; sum_add_rmsnorm, which reads
only this GPU's memory, adds the parts that have arrived.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from perilune.dist.peer_memory import Landing
from perilune.ops.exchange.exchange_add_rmsnorm import SOURCE
from perilune.ops.exchange.exchange_rows import WORD_BYTES, exchange_rows
from perilune.ops.exchange.peers import Peers
from perilune.ops.exchange.sum_add_rmsnorm import sum_add_rmsnorm
from perilune.ops.harness import build
from perilune.ops.harness.tensors import Rows

# Pieces that may be sent and not yet received. Larger: more memory. Smaller: less than the time of two products for a
# copy to end before it is waited for.
IN_FLIGHT = 3
SLOTS = IN_FLIGHT + 1  # of landing memory: see Landed


class Pieces(Protocol):
    """Every rank makes the same calls with the same shapes; at most IN_FLIGHT pieces are sent and not received.

    rows  most rows of a piece
    rank  this rank
    """

    rows: int
    rank: int

    def send(self, part: Tensor) -> None:
        """part [n, D], contiguous, which nothing writes until it is received."""
        ...

    def receive(self) -> tuple[Tensor, Tensor]:
        """(this rank's part, those of the other ranks [N - 1, n, D] in order) of the oldest piece in flight. Kernels
        queued on the current stream before the next `send` may read them."""
        ...


def add_in_pieces(h: Tensor, rows: Rows, norm: Tensor, eps: float, pieces: Pieces) -> Tensor:
    """h [T, D] += the sum of all ranks' parts; gives the norm of that, [T, D]. `rows` gives this rank's part, in h's
    type; it is called for the first rows first."""
    y, sent = torch.empty_like(h), deque[slice]()

    def finish() -> None:
        some = sent.popleft()
        sum_add_rmsnorm(h[some], *pieces.receive(), pieces.rank, norm, y[some], eps)

    for first in range(0, len(h), pieces.rows):
        if len(sent) == IN_FLIGHT:
            finish()
        sent.append(slice(first, min(first + pieces.rows, len(h))))
        pieces.send(rows(sent[-1]))
    while sent:
        finish()
    return y


class Gathered:
    """Pieces through a collective that `send` begins and `receive` waits for."""

    def __init__(self, rank: int, rows: int, begin: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """`begin(x)` gives a function that waits for [ranks, *x.shape], every rank's x."""
        self.rank, self.rows, self._begin = rank, rows, begin
        self._sent: deque[Callable[[], Tensor]] = deque()

    def send(self, part: Tensor) -> None:
        self._sent.append(self._begin(part))

    def receive(self) -> tuple[Tensor, Tensor]:
        parts = self._sent.popleft()()
        return parts[self.rank], torch.cat([parts[: self.rank], parts[self.rank + 1 :]])


@functools.cache
def _copy() -> Any:
    return build.function(SOURCE, "exchange_copy", "pplp")


class Landed:
    """Pieces that copy engines write to the other GPUs' landing memory, [SLOTS, N - 1, rows, D] on each.

    1. `send`: a stream of copies waits for the kernels queued on the step's stream, and for no other rank; it then
       copies piece i into slot i % SLOTS of every other rank.
    2. `receive`: the step's stream waits for this rank's copy of piece i, then exchanges one word with all ranks
       (exchange_rows). So when the exchange ends, all ranks' copies of piece i are in this GPU's memory.
    3. The step's stream adds the piece.

    Why a slot may be overwritten: when piece i is sent, the exchange of piece i - IN_FLIGHT is queued before it on the
    step's stream. The peer sends its word of that exchange after it has added piece i - IN_FLIGHT - 1 = i - SLOTS, the
    slot's last use.

    If a rank is lost, the exchange ends like every other: from then on old contents of the slots are added, and
    `Group.check` fails before any result of the step is used.
    """

    def __init__(self, peers: Peers, landing: Landing, rows: int, width: int, dtype: torch.dtype) -> None:
        self.rank, self.rows = peers.rank, rows
        self._peers, self._landing = peers, landing
        self._slots = landing.own.view(dtype).view(SLOTS, peers.ranks - 1, rows, width)
        self._copies = torch.cuda.Stream(landing.own.device)
        self._word = torch.zeros(1, WORD_BYTES, dtype=torch.uint8, device=landing.own.device)
        self._turn = 0
        # Holds each part until the step's stream waits for its copy: until then its memory must not be reused.
        self._sent: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def send(self, part: Tensor) -> None:
        assert len(self._sent) < IN_FLIGHT and len(part) <= self.rows and part.is_contiguous(), f"{part.shape=}"
        slot = self._turn % SLOTS
        self._turn += 1
        self._copies.wait_stream(torch.cuda.current_stream(part.device))
        for peer in (r % self._peers.ranks for r in range(self.rank + 1, self.rank + self._peers.ranks)):
            place = self._slots[slot, self.rank - (self.rank > peer)]  # this rank among the senders to `peer`
            offset = place.data_ptr() - self._landing.own.data_ptr()
            there = self._landing.addresses[peer] + offset
            failed = _copy()(there, part.data_ptr(), part.nbytes, self._copies.cuda_stream)
            assert not failed, f"CUDA error {failed}: {part.shape=} to rank {peer}"
        self._sent.append((slot, part, self._copies.record_event()))

    def receive(self) -> tuple[Tensor, Tensor]:
        slot, part, copied = self._sent.popleft()
        torch.cuda.current_stream(part.device).wait_event(copied)
        exchange_rows(self._word, self._peers)
        return part, self._slots[slot, :, : len(part)]
