"""Time of the exchange between tensor-parallel ranks: sum of the ranks' partial outputs, residual, norm.

One process per GPU. A CUDA graph holds OPS exchanges, each on the output of the one before, as in a decode step; its
replays are timed on the device's clock, and the slowest rank's median counts. Before a size is timed, its result is
compared with the reference, and the ranks' bits with each other. NCCL's all-reduce followed by the same norm, the norm
alone, and the same kernel between two places of one GPU (local-copy) are timed in the same run; then the exchanges of
sharded KV in a layer, over peer memory and over NCCL, which must deliver the bytes as sent.
"""

import contextlib
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]  # a re-export

from perilune.bench import ledger
from perilune.core.errors import ConfigError, EngineError
from perilune.dist import peer_memory
from perilune.ops.exchange import exchange_add_rmsnorm as exchange
from perilune.ops.exchange import exchange_rows
from perilune.ops.exchange.peers import Peers, loopback
from perilune.ops.harness import check
from perilune.ops.harness.case import BFLOAT16, EXACT, K2
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm

WIDTH = 7168  # of Kimi K2
PARTS = 9  # partial sums of one token after the experts of a layer: 8 chosen and the shared one
MAX_PARTS_TOKENS = 16
OPS, REPLAYS = 48, 24  # exchanges in a graph of few tokens; its timed replays
GRAPH_TOKENS = 4096  # most tokens of all exchanges in a graph: with many tokens a graph has fewer than OPS exchanges
TIMEOUT_SECONDS = 300
EPS = 1e-5
EXCHANGES = {"nccl": "nccl", "none": "none", "loopback": "local-copy"}  # by form; all other forms use peer memory

Report = Callable[[str], None]


def measure(ranks: int, tokens: Sequence[int], report: Report) -> list[dict[str, Any]]:
    """Rows of the ledger. ConfigError where there are not as many GPUs, EngineError if a rank fails."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        raise ConfigError(f"bench exchange runs one rank per GPU: {ranks} are asked for, torch sees {found}")
    with tempfile.TemporaryDirectory(prefix="perilune-exchange-") as scratch:
        command = [
            sys.executable,
            "-m",
            "perilune.bench.ranks.exchange",
            scratch,
            str(ranks),
            ",".join(map(str, tokens)),
        ]
        made = _outputs([[*command, str(r)] for r in range(ranks)], Path(scratch))
    rows = [json.loads(line) | ledger.circumstances(ranks) for line in made.splitlines()]
    for row in rows:
        of = f"{row['parts'] or 'no'} parts" if row["norm"] else row["form"]
        report(
            f"{row['tokens']:>6} tokens, {of}, {row['exchange']:>10}"
            f"{', two shots' if row['form'] == 'two-shot' else '':<11}: {row['us']:8.2f} us"
        )
    return rows


def _outputs(commands: Sequence[Sequence[str]], scratch: Path) -> str:
    """Rank 0's output, once all ranks have ended. EngineError as soon as one fails: the others would wait for it."""
    with contextlib.ExitStack() as opened:
        files = [[opened.enter_context((scratch / f"{k}{r}").open("w+")) for k in "oe"] for r in range(len(commands))]
        processes = [subprocess.Popen(c, stdout=out, stderr=err) for c, (out, err) in zip(commands, files)]
        try:
            end = time.monotonic() + TIMEOUT_SECONDS
            while (states := [p.poll() for p in processes]).count(0) < len(processes):
                failed = [r for r, status in enumerate(states) if status]
                if failed:
                    errors = (scratch / f"e{failed[0]}").read_text().splitlines()
                    last = next((line for line in reversed(errors) if "Error: " in line), "no message")
                    raise EngineError(f"rank {failed[0]} failed: {last}")
                if time.monotonic() > end:
                    raise EngineError(f"the ranks did not end within {TIMEOUT_SECONDS} s")
                time.sleep(0.05)
        finally:
            for p in processes:
                p.kill()
                p.wait()
        return (scratch / "o0").read_text()


@dataclass(frozen=True, slots=True)
class Rank:
    rank: int
    ranks: int
    peers: Peers
    own: Peers  # exchanges between two places of this GPU's memory
    swap: peer_memory.Swap

    def rows(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        found = []
        for T in tokens:
            for parts in (0, PARTS) if T <= MAX_PARTS_TOKENS else (0,):
                forms = self._forms(T)
                for form in ("one-shot", "two-shot"):
                    if form in forms:
                        self._check(T, parts, form == "two-shot")
                for form, run in forms.items():
                    us = self._time(T, parts, run)
                    found.append(
                        {
                            "bench": "exchange",
                            "tokens": T,
                            "us": round(us, 3),
                            "norm": True,
                            "exchange": EXCHANGES.get(form, "peer"),
                            "form": form,
                            "parts": parts,
                            "width": WIDTH,
                            "tp": self.ranks,
                            "method": f"median of {REPLAYS} graphs of {_ops(T)} in a row, "
                            "slowest rank; bits as the reference",
                        }
                    )
        return found

    def kv_rows(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """The exchanges of sharded KV in a layer: the queries of all heads, then outputs with their log-sum-exp."""
        heads, found = K2.heads // self.ranks, []
        for T in tokens:
            if T > MAX_PARTS_TOKENS:
                continue
            for form, S, nbytes in (
                ("queries", 1, T * heads * 2 * (K2.latent + K2.rope)),
                ("outputs", self.ranks, T * heads * (2 * K2.latent + 4)),
            ):
                x = self._bytes(S, nbytes, self.rank, T)
                want = torch.stack([self._bytes(S, nbytes, r, T)[self.rank % S] for r in range(self.ranks)])
                for exchange_name, run in (("peer", self._peer_rows), ("nccl", self._nccl)):
                    if not torch.equal(run(x), want):
                        raise EngineError(f"{form} of {T} tokens over {exchange_name}: other bytes than were sent")
                    found.append(
                        {
                            "bench": "exchange",
                            "tokens": T,
                            "us": round(self._replayed(partial(_repeat, run, x, _ops(T)), _ops(T)), 3),
                            "norm": False,
                            "exchange": exchange_name,
                            "form": form,
                            "parts": 0,
                            "width": nbytes,
                            "tp": self.ranks,
                            "method": f"median of {REPLAYS} graphs of {_ops(T)} of `width` "
                            "bytes, slowest rank; bytes as sent",
                        }
                    )
        return found

    def _peer_rows(self, x: Tensor) -> Tensor:
        return exchange_rows.cuda(x, self.peers)

    def _nccl(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.peers.gather(x[0])
        y = torch.empty_like(x)
        distributed.all_to_all_single(y, x)
        return y

    @staticmethod
    def _bytes(S: int, nbytes: int, rank: int, seed: int) -> Tensor:
        g = torch.Generator("cuda").manual_seed(seed * 8 + rank)
        return torch.randint(0, 256, (S, nbytes), generator=g, device="cuda", dtype=torch.uint8)

    def _forms(self, T: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        def nccl(residual: Tensor, x: Tensor, w: Tensor) -> Tensor:
            whole = x if x.dim() == 2 else x.sum(1).to(BFLOAT16)
            distributed.all_reduce(whole)
            return add_rmsnorm(residual, whole, w, EPS)

        forms = {
            "one-shot": lambda residual, x, w: exchange.launch(residual, x, w, EPS, self.peers, False),
            "two-shot": lambda residual, x, w: exchange.launch(residual, x, w, EPS, self.peers, True),
            "loopback": lambda residual, x, w: exchange.launch(residual, x, w, EPS, self.own, False),
            "nccl": nccl,
            "none": lambda residual, x, w: add_rmsnorm(residual, x, w, EPS),
        }
        if T < exchange.TWO_SHOT_ROWS:
            del forms["two-shot"]
        return forms

    def _inputs(self, T: int, parts: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """(x, residual, norm weights); x differs between ranks, the others do not."""
        same, own = (torch.Generator("cuda").manual_seed(s) for s in (T + turn, 1 + T + turn + 7919 * self.rank))
        shape = (T, parts, WIDTH) if parts else (T, WIDTH)
        x = torch.randn(shape, generator=own, device="cuda")
        residual, w = (torch.randn(*s, WIDTH, generator=same, device="cuda") for s in ((T,), ()))
        return residual.to(BFLOAT16), x if parts else x.to(BFLOAT16), w.to(BFLOAT16)

    def _check(self, T: int, parts: int, two_shots: bool) -> None:
        for turn in range(4):
            residual, x, w = self._inputs(T, parts, turn)
            want_h = residual.clone()
            want = exchange.reference(want_h, x, w, EPS, self.peers)
            y = exchange.launch(residual, x, w, EPS, self.peers, two_shots)
            wrong = check.difference(residual, want_h, EXACT)
            wrong = wrong or check.difference(y, want, exchange.TOL["y"][BFLOAT16])
            bits = hashlib.sha256(torch.cat([residual, y]).view(torch.int16).cpu().numpy().tobytes()).digest()
            if wrong or len(set(self.swap(bits))) != 1:
                raise EngineError(f"{T} tokens, {parts} parts: {wrong or 'the ranks differ'}")

    def _time(self, T: int, parts: int, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        """Median us of one exchange on the slowest rank."""
        residual, x, w = self._inputs(T, parts, 0)

        def chain() -> None:
            y = x
            for _ in range(_ops(T)):
                y = run(residual, x if parts else y, w)

        return self._replayed(chain, _ops(T))

    def _replayed(self, chain: Callable[[], None], count: int) -> float:
        """Median us of one of the `count` exchanges of `chain` in a graph, on the slowest rank."""
        graph = torch.cuda.CUDAGraph()
        chain()
        torch.cuda.synchronize()
        self.swap(b"")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            chain()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        graph.replay()
        torch.cuda.synchronize()
        self.swap(b"")
        graph.replay()
        for event in events:
            event.record()
            graph.replay()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        own = statistics.median(times) / count * 1e3
        return max(float(text) for text in self.swap(repr(own).encode()))


def _repeat(run: Callable[[Tensor], Tensor], x: Tensor, count: int) -> None:
    for _ in range(count):
        run(x)


def _ops(tokens: int) -> int:
    return max(4, min(OPS, GRAPH_TOKENS // tokens))


def run(scratch: Path, ranks: int, tokens: Sequence[int], rank: int) -> list[dict[str, Any]]:
    """The rows of one rank, in a process of its own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = FileStore(str(scratch / "store"), ranks)
    distributed.init_process_group(
        "nccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60), device_id=device
    )
    swap = peer_memory.over_store(FileStore(str(scratch / "swap"), ranks), rank, ranks)

    def gather(own: Tensor) -> Tensor:
        every = own.new_empty(ranks, *own.shape)
        distributed.all_gather_into_tensor(every, own)
        return every

    found, memory = peer_memory.peers(rank, ranks, device, swap, gather)
    if memory is None:
        raise EngineError("no peer memory between these GPUs: " + str(peer_memory.connect(rank, ranks, device, swap)))
    of_rank = Rank(rank, ranks, found, loopback(ranks, device), swap)
    rows = of_rank.rows(tokens) + of_rank.kv_rows(tokens)
    memory.check()
    memory.close(swap)
    distributed.destroy_process_group()
    return rows


def main(arguments: Sequence[str]) -> None:
    scratch, ranks, tokens, rank = arguments
    # Multicast over NVLink can hang a GPU that other processes use.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    for row in run(Path(scratch), int(ranks), [int(t) for t in tokens.split(",")], int(rank)):
        print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
