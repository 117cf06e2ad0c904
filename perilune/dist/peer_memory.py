"""GPU memory that the other ranks' GPUs write to, for kernels that exchange values without a collective.

Every rank allocates a mailbox on its GPU and sends its CUDA IPC handle (64 bytes) to the others through a `Swap`, any
all-gather of bytes. NVLink multicast is not used. The kernels wait for the peers' kernels, so each rank needs a GPU of
its own: two processes on one GPU are time-sliced, and each would spend its slice waiting for the other.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from perilune.core.errors import ConfigError, EngineError
from perilune.ops.exchange.exchange_add_rmsnorm import SOURCE
from perilune.ops.exchange.peers import ENDED, Mailboxes, Peers
from perilune.ops.harness import build

log = logging.getLogger("perilune.dist")

Swap = Callable[[bytes], list[bytes]]  # this rank's bytes to those of all ranks, in order; every rank calls it
Gather = Callable[[Tensor], Tensor]

# Limit of a wait for a peer. It must exceed the longest pause of a healthy rank, such as compiling kernels.
WAIT_SECONDS = 60.0
HANDLE_BYTES, DEVICE_BYTES = 64, 16
RANKS = (2, 4, 8)  # numbers of ranks that the kernels are compiled for


class ExchangeError(EngineError):
    """An exchange ended without a peer's part: the sums since then are NaN."""


class Store(Protocol):
    """The methods of a torch.distributed store that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> Any: ...


def over_store(store: Store, rank: int, ranks: int, name: str = "swap") -> Swap:
    """A Swap through a store of torch.distributed; nothing is pickled."""
    turn = 0

    def swap(own: bytes) -> list[bytes]:
        nonlocal turn
        turn += 1
        store.set(f"{name}/{turn}/{rank}", "+" + own.hex())  # a store cannot hold the empty value
        found = [bytes.fromhex(store.get(f"{name}/{turn}/{r}")[1:].decode()) for r in range(ranks)]
        if turn > 2:  # every rank has written its value of turn - 1, so all have read the values of turn - 2
            store.delete_key(f"{name}/{turn - 2}/{rank}")
        return found

    return swap


class PeerMemory:
    """The mailboxes of all ranks: rank r's begins at addresses[r]. Made by `connect`."""

    def __init__(self, rank: int, addresses: list[int], device: torch.device, wait_seconds: float) -> None:
        self._rank, self.addresses, self._device = rank, addresses, device
        self.mailboxes = Mailboxes(rank, addresses, device, wait_seconds)

    def check(self) -> None:
        """ExchangeError if a peer did not answer in time, or after `end`. Reads a word of host memory; does not wait
        for the GPU."""
        peer = int(self.mailboxes.failed)
        if peer == ENDED:
            raise ExchangeError(f"exchanges of rank {self._rank} were ended, because another rank is lost")
        if peer:
            raise ExchangeError(
                f"rank {peer - 1} did not answer rank {self._rank} within the exchange's time limit: it has ended or "
                "hangs; restart all ranks"
            )

    def end(self) -> None:
        """Ends all waits for peers; their sums are NaN. Any thread may call it."""
        self.mailboxes.end()

    def close(self, swap: Swap) -> None:
        """Frees the memory, after all ranks have called it, or where the processes of all others have ended."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
        _release(self._rank, self.addresses, self._device, swap)


def connect(
    rank: int, ranks: int, device: torch.device, swap: Swap, wait_seconds: float = WAIT_SECONDS, *, refusal: str = ""
) -> PeerMemory | str:
    """Called by every rank: the memory, or the reason (one line, the same on all ranks) why there is none. ConfigError
    on all ranks if two of them use one GPU. `refusal`: why this rank cannot use it; "" if it can."""
    own, address, why = (b"", 0, refusal) if refusal else _create(ranks, device)
    given = swap(b"\1" + own if own else b"\0" + why.encode())
    refused = [f"rank {r}: {text[1:].decode()}" for r, text in enumerate(given) if text[0] == 0]
    names, handles = [text[1 : 1 + DEVICE_BYTES] for text in given], [text[1 + DEVICE_BYTES :] for text in given]
    if refused:
        _free(address, device)
        return "; ".join(refused)
    for r, name in enumerate(names):
        if (first := names.index(name)) < r:
            _free(address, device)
            raise ConfigError(
                f"ranks {first} and {r} run on one GPU: their exchanges would wait for each other's turn on it; "
                "give every rank a GPU of its own (--gpus)"
            )
    addresses = [address if r == rank else 0 for r in range(ranks)]
    with torch.cuda.device(device):
        for r, text in enumerate(handles):
            if r == rank or why:
                continue
            pointer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(text, HANDLE_BYTES)
            failed = build.function(SOURCE, "exchange_open", "pp")(handle, ctypes.byref(pointer))
            why = f"no peer access to rank {r}'s GPU (CUDA error {failed})" if failed else ""
            addresses[r] = pointer.value or 0
    given = swap(why.encode())
    refused = [f"rank {r}: {text.decode()}" for r, text in enumerate(given) if text]
    if refused:
        _release(rank, addresses, device, swap)
        return "; ".join(refused)
    return PeerMemory(rank, addresses, device, wait_seconds)


def peers(rank: int, ranks: int, device: torch.device, swap: Swap, gather: Gather) -> tuple[Peers, PeerMemory | None]:
    """The ranks as ops take them: over peer memory if every rank has it, else through `gather` (NCCL, gloo), with the
    reason in the log. The PeerMemory is to be checked after steps and closed at the end."""
    found = connect(rank, ranks, device, swap)
    if isinstance(found, str):
        log.info("partial sums of %d ranks go through torch.distributed; no peer memory: %s", ranks, found)
        return Peers(rank, ranks, gather), None
    return Peers(rank, ranks, gather, found.mailboxes), found


def _create(ranks: int, device: torch.device) -> tuple[bytes, int, str]:
    """(name of the GPU and handle, address, ""), or (b"", 0, why there is no memory)."""
    usable = build.on_hopper(SOURCE, device, (ranks in RANKS, "2, 4 or 8 ranks"))
    if usable is not True:
        return b"", 0, str(usable)
    address, nbytes = ctypes.c_void_p(), _sizes(ranks)[0]
    handle, name = (ctypes.create_string_buffer(n) for n in (HANDLE_BYTES, DEVICE_BYTES))
    with torch.cuda.device(device):
        create = build.function(SOURCE, "exchange_create", "lppp")
        if failed := create(nbytes, ctypes.byref(address), handle, name):
            _free(address.value or 0, device)
            return b"", 0, f"no {nbytes / 1e6:.0f} MB to share (CUDA error {failed})"
    assert address.value is not None
    return name.raw + handle.raw, address.value, ""


def _sizes(ranks: int) -> list[int]:
    """Bytes of a mailbox, of Mailboxes.control, of the table that a launch copies."""
    sizes = (ctypes.c_int64 * 3)()
    build.function(SOURCE, "exchange_sizes", "lp")(ranks, sizes)
    return list(sizes)


def _release(rank: int, addresses: list[int], device: torch.device, swap: Swap) -> None:
    """Unmaps the other ranks' memory; once all ranks have done that, frees this rank's."""
    with torch.cuda.device(device):
        for r, address in enumerate(addresses):
            if r != rank and address:
                build.function(SOURCE, "exchange_close", "p")(address)
    swap(b"")
    _free(addresses[rank], device)


def _free(address: int, device: torch.device) -> None:
    if address:
        with torch.cuda.device(device):
            build.function(SOURCE, "exchange_free", "p")(address)
