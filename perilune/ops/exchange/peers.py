"""Peers: the other ranks, as an argument of ops that exchange data with them, and their mailboxes."""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_RANKS = 8
RANKS = (1, 2, 4, 8)  # group sizes that kernels are compiled for
HALF_BYTES = 16 * ((128 + 264) * 8 * 128 + 5 * 7168 // 4)  # half a mailbox for one sender: HALF of cuda/peers.cuh
CONTROL = 1 + 128 * 8 + 5 * 160 + 264  # control words, mostly counters: CONTROL of cuda/peers.cuh
ENDED = 1 + MAX_RANKS  # value of `Mailboxes.failed` after `end`


class _Table(ctypes.Structure):
    """`Peers` of cuda/peers.cuh."""

    _fields_ = (
        ("rank", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("control", ctypes.c_void_p),
        ("failed", ctypes.c_void_p),
        ("mailbox", ctypes.c_void_p * MAX_RANKS),
    )


class Mailboxes:
    """The mailboxes of a group's ranks. addresses [ranks]: each rank's mailbox in the address space of this process.
    dist/peer_memory.py owns that memory, or `owner`, which is kept alive here. Only one launch at a time may use the
    mailboxes, so all launches must be on one stream.

    `wait_seconds` limits the wait for a peer in one launch. `failed` is a word in host memory: 0, 1 + the rank that did
    not answer in time, or ENDED. If it is not 0, all sums are NaN and no launch waits again.
    """

    def __init__(
        self, rank: int, addresses: Sequence[int], device: torch.device, wait_seconds: float, *, owner: object = None
    ) -> None:
        assert 0 <= rank < len(addresses) <= MAX_RANKS, f"{rank=} {len(addresses)=}"
        self._owner = owner
        self.control = torch.zeros(CONTROL, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._table = _Table(
            rank, len(addresses), int(wait_seconds * 1e9), self.control.data_ptr(), self.failed.data_ptr()
        )
        self._table.mailbox[: len(addresses)] = list(addresses)

    @property
    def table(self) -> int:
        """Address, in host memory, of the `Peers` struct that kernels get as an argument."""
        return ctypes.addressof(self._table)

    def end(self) -> None:
        """Ends the waits of all launches within about 10 ms; later launches do not wait. Callable from any thread."""
        self.failed.fill_(ENDED)


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """Rank `rank` of `ranks`.

    gather      all-gather of [T, D] to [ranks, T, D] in the order of ranks; every rank calls it
    mailboxes   memory that all ranks' GPUs can write to, or None
    loopback    for measurements without other ranks: this rank receives its own data in place of its peers'
    """

    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]
    mailboxes: Mailboxes | None = None
    loopback: bool = False
    kind: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", (self.ranks, self.mailboxes is not None))


def needs(peers: Peers | None) -> tuple[tuple[bool, str], ...]:
    """Conditions of a kernel that exchanges data with peers, for `build.on_hopper`; () without peers."""
    if peers is None:
        return ()
    return (
        (peers.mailboxes is not None, "memory that all ranks can write to"),
        (peers.ranks in RANKS, "1, 2, 4 or 8 ranks"),
    )


def table(peers: Peers | None) -> int | None:
    """`Mailboxes.table` of the peers, or None."""
    if peers is None:
        return None
    assert peers.mailboxes is not None
    return peers.mailboxes.table


def loopback(ranks: int, device: torch.device, wait_seconds: float = 60.0) -> Peers:
    """Peers for measuring one rank of `ranks` alone. A kernel writes and reads as many bytes as with real peers, but in
    this GPU's memory: the rank receives its own data."""
    mailbox = torch.zeros(2 * ranks * HALF_BYTES, dtype=torch.uint8, device=device)
    # The words that the rank writes to peer s go to the part of its own mailbox where words of peer s arrive.
    addresses = [mailbox.data_ptr() + s * HALF_BYTES for s in range(ranks)]

    def gather(own: Tensor) -> Tensor:
        return own.expand(ranks, *own.shape)

    return Peers(0, ranks, gather, Mailboxes(0, addresses, device, wait_seconds, owner=mailbox), True)


def beside(others: Tensor) -> Peers:
    """The Peers of rank 0 for a test in one process: the other ranks' rows are `others` [ranks - 1, T, D]. There are
    mailboxes only if there are no other ranks."""

    def gather(own: Tensor) -> Tensor:
        return torch.cat([own[None], others.to(own.dtype)])

    return Peers(0, 1 + len(others), gather, None if len(others) else Mailboxes(0, [0], others.device, 1.0))
