"""The exchange over peer memory on one GPU: all ranks in this process, a stream each, with few enough CTAs that all of
them are on the GPU at once. tests/multi_gpu has ranks in processes on GPUs of their own."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perilune.core.errors import EngineError
from perilune.dist.peer_memory import ExchangeError, PeerMemory
from perilune.ops.exchange import exchange_add_rmsnorm as exchange
from perilune.ops.exchange.peers import CONTROL, HALF_BYTES, Mailboxes, Peers, _Table, loopback
from perilune.ops.harness import build, check
from perilune.ops.harness.case import BFLOAT16, EXACT, K2, NANO

CUDA = torch.device("cuda", 0)
EPS = 1e-5

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or build.on_hopper(exchange.SOURCE, CUDA) is not True,
    reason="needs a Hopper GPU and nvcc",
)


class Group:
    """`ranks` ranks on one GPU. `run(launch)` calls launch(rank) on the stream of each."""

    def __init__(self, ranks: int, wait_seconds: float = 2.0) -> None:
        sizes = (ctypes.c_int64 * 3)()
        build.function(exchange.SOURCE, "exchange_sizes", "lp")(ranks, sizes)
        self.memory = [torch.zeros(sizes[0] // 4, dtype=torch.int32, device=CUDA) for _ in range(ranks)]
        addresses = [m.data_ptr() for m in self.memory]
        self.boxes = [Mailboxes(r, addresses, CUDA, wait_seconds) for r in range(ranks)]
        self.partial: list[Tensor] = []
        self.peers = [Peers(r, ranks, lambda own: torch.stack(self.partial), box) for r, box in enumerate(self.boxes)]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def exchange(self, held: list[Tensor], x: list[Tensor], w: Tensor, two_shots: bool) -> list[Tensor]:
        return self.run(lambda r: exchange.launch(held[r], x[r], w, EPS, self.peers[r], two_shots))

    def run(self, launch: Callable[[int], Tensor]) -> list[Tensor]:
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(launch(rank))
        torch.cuda.synchronize()
        return found


def inputs(ranks: int, T: int, D: int, parts: int, seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    g = torch.Generator(CUDA).manual_seed(seed)
    shape = (T, parts, D) if parts else (T, D)
    x = [torch.randn(shape, generator=g, device=CUDA) for _ in range(ranks)]
    residual, w = (torch.randn(*s, D, generator=g, device=CUDA).to(BFLOAT16) for s in ((T,), ()))
    return residual, [t if parts else t.to(BFLOAT16) for t in x], w


@pytest.mark.parametrize("parts", [0, 1, 9])
@pytest.mark.parametrize(
    ("ranks", "T", "D"),
    [
        *((2, t, K2.hidden) for t in (1, 2, 3, 16, 32)),
        *((4, t, K2.hidden) for t in (1, 5, 16)),
        *((8, t, K2.hidden) for t in (1, 8)),
        # More tokens than clusters: each takes several. With two shots a token has a CTA, of few tokens an SM.
        *((2, 130, NANO.hidden), (4, 32, NANO.hidden), (8, 16, NANO.hidden)),
        (2, 7, 520),
    ],
)
def test_all_ranks_get_the_reference(ranks: int, T: int, D: int, parts: int) -> None:
    group = Group(ranks)
    for turn, two_shots in enumerate((False, True, True, False, False, True)):  # one mailbox serves both forms
        residual, x, w = inputs(ranks, T, D, parts, turn)
        group.partial = [exchange._partial(residual, own) for own in x]
        want_h = residual.clone()
        want = exchange.reference(want_h, x[0], w, EPS, group.peers[0])
        held = [residual.clone() for _ in range(ranks)]
        y = group.exchange(held, x, w, two_shots)
        for r in range(ranks):
            assert not int(group.boxes[r].failed), (turn, r)
            assert check.difference(held[r], want_h, EXACT) is None, (turn, r)
            assert check.difference(y[r], want, exchange.TOL["y"][BFLOAT16]) is None, (turn, r)
            assert check.same_bits(y[r], y[0]), (turn, r)


def test_replayed_graphs_continue_to_count() -> None:
    group, T = Group(2), 3
    residual, x, w = inputs(2, T, K2.hidden, 0, 1)
    held, y, graphs = [residual.clone() for _ in range(2)], [torch.empty_like(residual) for _ in range(2)], []
    for r in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[r], stream=group.streams[r]):
            for _ in range(5):
                y[r].copy_(exchange.launch(held[r], x[r], w, EPS, group.peers[r], False))
    for turn in range(40):
        residual, fresh, _ = inputs(2, T, K2.hidden, 0, 100 + turn)
        for r in range(2):
            held[r].copy_(residual)
            x[r].copy_(fresh[r])
        group.partial, want_h = fresh, residual.clone()
        for _ in range(5):
            want = exchange.reference(want_h, fresh[0], w, EPS, group.peers[0])
        group.run(lambda r: graphs[r].replay() or y[r])  # type: ignore[func-returns-value]  # replay gives None
        for r in range(2):
            assert check.difference(held[r], want_h, EXACT) is None, (turn, r)
            assert check.difference(y[r], want, exchange.TOL["y"][BFLOAT16]) is None, (turn, r)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_host_knows_the_kernels_sizes(ranks: int) -> None:
    sizes = (ctypes.c_int64 * 3)()
    build.function(exchange.SOURCE, "exchange_sizes", "lp")(ranks, sizes)
    assert list(sizes) == [2 * ranks * HALF_BYTES, 4 * CONTROL, ctypes.sizeof(_Table)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("T", [1, 16, 200])
def test_a_loopback_gives_every_part_the_own_one(ranks: int, T: int) -> None:
    peers = loopback(ranks, CUDA)
    for turn in range(3):
        residual, (x,), w = inputs(1, T, K2.hidden, 9 if T == 1 else 0, turn)
        want_h = residual.clone()
        exchange.reference(want_h, x, w, EPS, peers)
        exchange.exchange_add_rmsnorm(residual, x, w, EPS, peers)
        assert check.difference(residual, want_h, EXACT) is None
        assert peers.mailboxes is not None and not int(peers.mailboxes.failed)


@pytest.mark.parametrize("two_shots", [False, True])
def test_a_rank_that_does_not_come_is_reported_and_never_waited_for_again(two_shots: bool) -> None:
    group = Group(2, wait_seconds=0.3)
    residual, x, w = inputs(2, 4, K2.hidden, 0, 1)
    memory = PeerMemory(0, [m.data_ptr() for m in group.memory], CUDA, 0.3)
    memory.check()
    peers = Peers(0, 2, group.peers[0].gather, memory.mailboxes)
    begin = time.perf_counter()
    y = exchange.launch(residual, x[0], w, EPS, peers, two_shots)
    torch.cuda.synchronize()
    assert 0.25 < time.perf_counter() - begin < 1.5
    assert bool(y.isnan().all()), "a sum without the peer's part must not look like a result"
    with pytest.raises(EngineError, match="rank 1 did not answer rank 0"):
        memory.check()
    begin = time.perf_counter()
    for _ in range(100):
        exchange.launch(residual, x[0], w, EPS, peers, two_shots)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 0.25


def test_the_host_ends_a_wait_that_has_begun() -> None:
    group = Group(2, wait_seconds=30.0)
    residual, x, w = inputs(2, 64, K2.hidden, 0, 1)
    memory = PeerMemory(0, [m.data_ptr() for m in group.memory], CUDA, 30.0)
    peers = Peers(0, 2, group.peers[0].gather, memory.mailboxes)
    threading.Timer(0.5, memory.end).start()
    begin = time.perf_counter()
    for _ in range(20):
        y = exchange.launch(residual, x[0], w, EPS, peers, False)
    torch.cuda.synchronize()
    assert 0.4 < time.perf_counter() - begin < 1.5
    assert bool(y.isnan().all())
    with pytest.raises(ExchangeError):
        memory.check()


def test_two_processes_on_one_gpu_are_refused(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from torch.distributed import FileStore; from perilune.dist import peer_memory as p\n"
        "rank = int(sys.argv[1]); swap = p.over_store(FileStore(sys.argv[2], 2), rank, 2)\n"
        "try: print(p.connect(rank, 2, torch.device('cuda', 0), swap))\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    command = [sys.executable, "-c", script]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    for process in ranks:
        out, _ = process.communicate(timeout=120)
        assert "ConfigError ranks 0 and 1 run on one GPU" in out, out
