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
from perilune.ops.exchange.exchange_add_rmsnorm import _partial, exchange_add_rmsnorm, launch, reference
from perilune.ops.exchange.exchange_rows import exchange_rows
from perilune.ops.exchange.peers import Peers
from perilune.ops.harness import check
from perilune.ops.harness.case import BFLOAT16, EXACT, K2, Make
from perilune.ops.moe import exchange_pairs_add_rmsnorm as pairs_op
from perilune.ops.moe import scatter_pairs_add_rmsnorm as scatter_op
from perilune.ops.moe import scatter_pairs_add_rmsnorm_quantize as quantized_op
from perilune.ops.moe.combine_add_rmsnorm import summed

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
EPS = 1e-5
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


def of_experts(rank: int, peers: Peers, swap: peer_memory.Swap, seconds: float) -> None:
    """Random prompts: all rows of what tokens get from experts, or each rank's own rows and their norms to all; then
    another sum of all rows. Every result is compared with the reference, and the ranks' bits with each other."""
    rng, late, device = random.Random(11), random.Random(rank), torch.device("cuda", rank)
    sums, end = 0, time.monotonic() + seconds
    while any(int(more) for more in swap(b"1" if rank == 0 and time.monotonic() < end else b"0")):
        case = pairs_op.Case(rng.randint(513, 1500), K2.hidden, K2.top_k, shared=rng.random() < 0.8)
        seed, op = rng.randrange(1 << 30), rng.choice((pairs_op, scatter_op, scatter_op, quantized_op))
        made = [pairs_op.inputs(case, Make(BFLOAT16, device, seed + r)) for r in range(RANKS)]
        before, w = made[0]["residual"], made[0]["w"]
        every = [summed(one["pairs"]).to(BFLOAT16) for one in made]
        later = [inputs(r, case.T, 0, seed)[1] for r in range(RANKS)]
        held, want = before.clone(), before.clone()
        y = reference(want, every[rank], w, EPS, given(every))
        final = want.clone()
        last = reference(final, later[rank], w, EPS, given(later))
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(2_000_000))  # cycles, up to 1 ms
        found = op.cuda(held, made[rank]["pairs"], w, EPS, peers)
        own = slice(None) if op is pairs_op else scatter_op.owned(case.T, peers)
        middle = held[own].clone()
        if op is quantized_op:
            found = found[0].float() * found[1][:, : len(found[0])].T.repeat_interleave(128, 1)
        sent = torch.zeros(1, -(-case.T // RANKS) * K2.hidden, dtype=BFLOAT16, device=device)
        if op is not pairs_op:
            sent[0, : found.numel()] = found.to(BFLOAT16).flatten()
        rows = exchange_rows(sent, peers).view(-1, K2.hidden)[: case.T]
        z = launch(held, later[rank], w, EPS, peers, True)
        got = found if op is pairs_op else rows
        # Sums that fall on the other side of a rounding are an ulp off, and what follows by more: few values are.
        for name, a, b, share in (
            ("residual", middle, want[own], 1e-3), ("y", got, y, 0.03 if op is quantized_op else 2e-3),
            ("residual after", held, final, 1e-3), ("y after", z, last, 2e-3),
        ):  # fmt: skip
            apart = float((a.float() - b.float()).norm() / b.float().norm())
            assert apart <= share, f"{case} {op.__name__} {name}: {apart:.2e} apart"
        bits = hashlib.sha256(torch.cat([held, z, got]).view(torch.int16).cpu().numpy().tobytes()).digest()
        assert len(set(swap(bits))) == 1, case
        sums += 1
    print(f"ok {sums} sums over experts")


def killed(rank: int, peers: Peers, memory: peer_memory.PeerMemory, swap: peer_memory.Swap) -> None:
    """Rank 1 ends between two exchanges, without a word; rank 0 goes on."""
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
    else:
        {"experts": of_experts, "stress": stress}[mode](rank, peers, swap, seconds)
        memory.check()
        memory.close(swap)


if __name__ == "__main__":
    main()
