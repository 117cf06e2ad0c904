"""One rank of test_exchange.py: python -m tests.multi_gpu.exchange_rank DIRECTORY RANK MODE SECONDS."""

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # a re-export

from perilune.core.errors import EngineError
from perilune.dist import peer_memory
from perilune.dist.pieces import SLOTS, Landed, add_in_pieces
from perilune.ops.exchange.exchange_add_rmsnorm import _partial, exchange_add_rmsnorm, launch, reference
from perilune.ops.exchange.peers import Peers
from perilune.ops.harness import check
from perilune.ops.harness.case import BFLOAT16, EXACT, K2

RANKS, EPS = 2, 1e-5
ROUND = 200  # exchanges between two comparisons
MAX_TOKENS = 400


def inputs(rank: int, T: int, parts: int, seed: int) -> tuple[Tensor, Tensor]:
    """(the residual, which is the same on all ranks; x of `rank`), on this process's GPU."""
    g = torch.Generator("cuda").manual_seed(seed)
    residual = torch.randn(T, K2.hidden, generator=g, device="cuda").to(BFLOAT16)
    g.manual_seed(seed * RANKS + rank + 1)
    x = torch.randn((T, parts, K2.hidden) if parts else (T, K2.hidden), generator=g, device="cuda")
    return residual, x if parts else x.to(BFLOAT16)


def given(every: list[Tensor]) -> Peers:
    """Ranks with these partial outputs [T, D]."""
    return Peers(0, RANKS, lambda own: torch.stack(every))


def stress(rank: int, peers: Peers, swap: peer_memory.Swap, seconds: float) -> None:
    """Random batch sizes, launches and replayed graphs mixed; after every round the ranks' bits are compared, and the
    last result with the reference."""
    rng, w = random.Random(5), torch.ones(K2.hidden, dtype=BFLOAT16, device="cuda")
    graphs = {}
    for T in (1, 2, 4, 7, 16, 33, 64):
        residual, x = inputs(rank, T, 0, T)
        graphs[T] = torch.cuda.CUDAGraph(), residual, x
        launch(residual.clone(), x, w, EPS, peers, False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[T][0]):
            for i in range(10):
                launch(residual, x, w, EPS, peers, i % 3 == 2)
    exchanges, rounds, end = 0, 0, time.monotonic() + seconds
    while any(int(more) for more in swap(b"1" if rank == 0 and time.monotonic() < end else b"0")):
        rounds += 1
        for _ in range(ROUND):
            if rng.random() < 0.5:
                graphs[rng.choice(list(graphs))][0].replay()
                exchanges += 10
            else:
                T = rng.choice((rng.randint(1, 8), rng.randint(1, 64), rng.randint(1, MAX_TOKENS)))
                of = T, rng.choice((0, 0, 1, 9)) if T <= 64 else 0, rng.randrange(1 << 30)
                residual, x = inputs(rank, *of)
                held = residual.clone()
                two_shots = rng.random() < 0.3
                y = launch(held, x, w, EPS, peers, two_shots)
                exchanges += 1
            if rng.random() < 0.01:
                time.sleep(rng.random() * 0.01 * (rank + 1))  # one rank is late
        want, every = residual.clone(), [_partial(residual, inputs(r, *of)[1]) for r in range(RANKS)]
        wanted = reference(want, x, w, EPS, given(every))
        torch.cuda.synchronize()
        assert check.difference(held, want, EXACT) is None, (rounds, T)
        assert bool((y - wanted).abs().max() < 0.1), (rounds, T)
        made = torch.cat([held.flatten(), y.flatten(), *(g[1].flatten() for g in graphs.values())])
        bits = hashlib.sha256(made.view(torch.int16).cpu().numpy().tobytes()).digest()
        assert len(set(swap(bits))) == 1, (rounds, T)
    print(f"ok {exchanges} exchanges in {rounds} rounds")


def landed(rank: int, peers: Peers, swap: peer_memory.Swap, rows: int) -> tuple[peer_memory.Landing, Landed]:
    nbytes = SLOTS * (RANKS - 1) * rows * K2.hidden * BFLOAT16.itemsize
    memory = peer_memory.landing(rank, RANKS, torch.device("cuda", rank), swap, nbytes)
    assert isinstance(memory, peer_memory.Landing), memory
    return memory, Landed(peers, memory, rows, K2.hidden, BFLOAT16)


def in_pieces(rank: int, peers: Peers, swap: peer_memory.Swap, seconds: float) -> None:
    """Random numbers of tokens in pieces, whole exchanges between them, a late rank now and then: each sum has the bits
    of the reference."""
    rng, late, w = random.Random(7), random.Random(rank), torch.ones(K2.hidden, dtype=BFLOAT16, device="cuda")
    memory, link = landed(rank, peers, swap, 96)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    exchanges, end = 0, time.monotonic() + seconds
    while any(int(more) for more in swap(b"1" if rank == 0 and time.monotonic() < end else b"0")):
        for _ in range(20):
            T, seed = rng.randint(1, 12 * link.rows), rng.randrange(1 << 30)
            residual, x = inputs(rank, T, 0, seed)
            held, want, made = residual.clone(), residual.clone(), []

            def part(some: slice, x: Tensor = x) -> Tensor:
                if late.random() < 0.1:
                    torch.cuda._sleep(late.randrange(2_000_000))  # cycles, up to 1 ms
                return x[some] + 0

            y = add_in_pieces(held, part, w, EPS, link)
            wanted = reference(want, x, w, EPS, given([inputs(r, T, 0, seed)[1] for r in range(RANKS)]))
            made.append((held, want, y, wanted))
            if rng.random() < 0.3:
                launch(residual, x, w, EPS, peers, False)
                made.append((residual, want, y, wanted))
            for held, want, y, wanted in made:
                wrong += (held != want).sum() + ((y - wanted).abs() > 0.1).sum()
            exchanges += 1
        assert int(wrong) == 0, f"{int(wrong)} values are wrong after {exchanges} exchanges"
    torch.cuda.synchronize()
    memory.close(swap)
    print(f"ok {exchanges} exchanges in pieces")


def killed(rank: int, peers: Peers, memory: peer_memory.PeerMemory, swap: peer_memory.Swap) -> None:
    """Rank 1 ends between two exchanges, without a word; rank 0 goes on, also in pieces."""
    _, link = landed(rank, peers, swap, 96)
    w = torch.ones(K2.hidden, dtype=BFLOAT16, device="cuda")
    residual, x = inputs(rank, 4, 0, 1)
    for _ in range(100):
        exchange_add_rmsnorm(residual, x, w, EPS, peers)
    torch.cuda.synchronize()
    memory.check()
    swap(b"")
    if rank == 1:
        sys.stdout.flush()
        os._exit(9)
    time.sleep(0.5)
    begin = time.perf_counter()
    for _ in range(100):
        y = exchange_add_rmsnorm(residual, x, w, EPS, peers)
    add_in_pieces(residual.repeat(100, 1), lambda some: x.repeat(100, 1)[some].clone(), w, EPS, link)
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    assert bool(y.isnan().all())
    try:
        memory.check()
    except EngineError as e:
        print(f"ok {took:.2f} s: {e}")
    os._exit(0)  # memory that a dead process has open is not freed


def main() -> None:
    scratch, rank, mode, seconds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    swap = peer_memory.over_store(FileStore(str(scratch / "store"), RANKS), rank, RANKS)

    memory = peer_memory.connect(rank, RANKS, device, swap, wait_seconds=1.0 if mode == "killed" else 20.0)
    assert isinstance(memory, peer_memory.PeerMemory), memory
    peers = Peers(rank, RANKS, torch.clone, memory.mailboxes)  # nothing is gathered
    if mode == "killed":
        killed(rank, peers, memory, swap)
    elif mode == "pieces":
        in_pieces(rank, peers, swap, seconds)
        memory.check()
        memory.close(swap)
    else:
        stress(rank, peers, swap, seconds)
        memory.check()
        memory.close(swap)


if __name__ == "__main__":
    main()
