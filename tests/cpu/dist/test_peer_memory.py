"""How ranks agree on memory that kernels exchange through, without a GPU."""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # a re-export

from perilune.core.errors import ConfigError, EngineError
from perilune.dist import peer_memory
from perilune.dist.peer_memory import ExchangeError
from perilune.ops.exchange.exchange_add_rmsnorm import exchange_add_rmsnorm
from perilune.ops.exchange.peers import Mailboxes, Peers
from perilune.ops.harness import build
from tests.cpu.dist import rank_threads

CPU = torch.device("cpu")


def on_ranks(ranks: int, run: Callable[[int, peer_memory.Swap], Any]) -> list[Any]:
    """What run(rank, swap) gives or raises, each in a thread."""
    store = HashStore()
    return rank_threads.on_ranks(ranks, lambda r: run(r, peer_memory.over_store(store, r, ranks)))


def test_a_swap_gives_every_rank_all_bytes_in_order_and_keeps_few_of_them() -> None:
    store = HashStore()

    def rank(r: int) -> list[list[bytes]]:
        swap = peer_memory.over_store(store, r, 3)
        return [swap(bytes([turn, r, 0, 255]) if turn else b"") for turn in range(20)]

    found = rank_threads.on_ranks(3, rank)
    want = [[bytes([turn, r, 0, 255]) if turn else b"" for r in range(3)] for turn in range(20)]
    assert found == [want] * 3
    assert store.num_keys() <= 9  # two turns of three ranks, and a count of its own


def test_without_peer_memory_all_ranks_say_the_same_reason() -> None:
    found = on_ranks(3, lambda r, swap: peer_memory.connect(r, 3, CPU, swap))
    assert found == ["rank 0: for CUDA; rank 1: for CUDA; rank 2: for CUDA"] * 3


def test_one_rank_without_peer_memory_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others must not wait for it, nor exchange without it."""
    freed = []
    made = {"a": (b"!GPU a", 1, ""), "b": (b"\0GPU b", 2, ""), "c": (b"", 0, "needs a Hopper GPU")}
    monkeypatch.setattr(peer_memory, "_create", lambda ranks, device: made[device])
    monkeypatch.setattr(peer_memory, "_free", lambda address, device: freed.append(address))
    found = on_ranks(3, lambda r, swap: peer_memory.connect(r, 3, "abc"[r], swap))  # type: ignore[arg-type]  # a name
    assert found == ["rank 2: needs a Hopper GPU"] * 3 and sorted(freed) == [0, 1, 2]


class Driver:
    """The functions of the .cu file, on numbers instead of memory. Rank r's memory has address 1000 + r."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unreachable: int | None = None) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.freed: list[int] = []
        self.unreachable = unreachable
        monkeypatch.setattr(build, "function", lambda source, name, kinds: getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def create(self, rank: int) -> tuple[bytes, int, str]:
        return bytes([rank]) * (peer_memory.DEVICE_BYTES + peer_memory.HANDLE_BYTES), 1000 + rank, ""

    def exchange_open(self, handle: Any, pointer: Any) -> int:
        owner = handle.raw[0]
        if owner == self.unreachable:
            return 217
        pointer._obj.value = 2000 + owner
        self.opened.append(2000 + owner)
        return 0

    def exchange_close(self, address: int) -> int:
        self.closed.append(address)
        return 0

    def exchange_free(self, address: int) -> int:
        assert sorted(self.closed) == sorted(self.opened), "freed while another rank has it open"
        self.freed.append(address)
        return 0


def connected(driver: Driver, monkeypatch: pytest.MonkeyPatch, close: bool) -> list[Any]:
    own = threading.local()
    monkeypatch.setattr(peer_memory, "_create", lambda ranks, device: driver.create(own.rank))

    def rank(r: int, swap: peer_memory.Swap) -> Any:
        own.rank = r
        found = peer_memory.connect(r, 2, CPU, swap)
        if close and isinstance(found, peer_memory.PeerMemory):
            found.close(swap)
        return found

    return on_ranks(2, rank)


def test_ranks_open_each_others_memory_and_free_it_when_all_have_closed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    first, second = connected(driver, monkeypatch, close=True)
    assert first.addresses == [1000, 2001] and second.addresses == [2000, 1001]
    assert sorted(driver.opened) == [2000, 2001] and sorted(driver.freed) == [1000, 1001]


def test_gpus_without_peer_access_are_the_reason_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, unreachable=1)
    want = "rank 0: no peer access to rank 1's GPU (CUDA error 217)"
    assert connected(driver, monkeypatch, close=False) == [want, want]
    assert driver.opened == [2000] and sorted(driver.freed) == [1000, 1001]


def test_two_ranks_on_one_gpu_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    name, freed = b"\1" * peer_memory.DEVICE_BYTES, []
    monkeypatch.setattr(peer_memory, "_create", lambda ranks, device: (name + b"handle", 5, ""))
    monkeypatch.setattr(peer_memory, "_free", lambda address, device: freed.append(address))
    for error in on_ranks(2, lambda r, swap: peer_memory.connect(r, 2, CPU, swap)):
        assert isinstance(error, ConfigError) and "ranks 0 and 1 run on one GPU" in str(error)
    assert freed == [5, 5]


def test_a_rank_that_refuses_is_enough_and_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_calls: list[object] = []
    monkeypatch.setattr(peer_memory, "_create", lambda ranks, device: driver_calls.append(device))
    found = on_ranks(2, lambda r, swap: peer_memory.connect(r, 2, CPU, swap, refusal=f"not here, {r}"))
    assert found == ["rank 0: not here, 0; rank 1: not here, 1"] * 2 and not driver_calls


def test_an_ended_exchange_is_an_error_of_its_own() -> None:
    memory = peer_memory.PeerMemory(1, [64, 128], CPU, 1.0)
    memory.check()
    memory.end()
    with pytest.raises(ExchangeError, match="exchanges of rank 1 were ended, because another rank is lost"):
        memory.check()


def test_ranks_without_peer_memory_get_the_same_bits(caplog: pytest.LogCaptureFixture) -> None:
    """What `peers` gives where there is none; `swap` carries the tensors."""
    caplog.set_level(logging.INFO, logger="perilune.dist")
    g = torch.Generator().manual_seed(1)
    h, w, x = torch.randn(3, 64, generator=g), torch.rand(64, generator=g), torch.randn(2, 3, 5, 64, generator=g)

    def rank(r: int, swap: peer_memory.Swap) -> tuple[Tensor, Tensor]:
        def gather(own: Tensor) -> Tensor:
            every = swap(own.numpy().tobytes())
            return torch.stack([torch.frombuffer(bytearray(b), dtype=own.dtype).view(own.shape) for b in every])

        peers, memory = peer_memory.peers(r, 2, CPU, swap, gather)
        assert memory is None
        held = h.clone()
        return exchange_add_rmsnorm(held, x[r], w, 1e-5, peers), held

    (y, held), (other_y, other) = on_ranks(2, rank)
    assert torch.equal(y, other_y) and torch.equal(held, other)
    assert torch.allclose(held, h + x.sum((0, 2)), atol=1e-5)
    assert torch.allclose(y, torch.nn.functional.rms_norm(held, (64,), w, 1e-5), atol=1e-5)
    assert "no peer memory: rank 0: for CUDA" in caplog.text


def test_a_rank_that_did_not_answer_is_an_error_of_one_line() -> None:
    memory = peer_memory.PeerMemory(1, [64, 128], CPU, 1.0)
    memory.check()
    memory.mailboxes.failed.fill_(1)
    with pytest.raises(EngineError, match=r"^rank 0 did not answer rank 1 .*restart all ranks$"):
        memory.check()


def test_mailboxes_are_counted() -> None:
    with pytest.raises(AssertionError):
        Mailboxes(0, [0] * 9, CPU, 1.0)
    assert Peers(0, 2, torch.clone).kind == (2, False)
