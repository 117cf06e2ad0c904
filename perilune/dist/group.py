"""Collectives of the ranks of one engine: what a step exchanges between GPUs, or between processes of a CPU.

Every call is made by all ranks in the same order with the same shapes, on the stream of the step, and may be captured
in a CUDA graph. Sums have the same bits on every rank, so what is computed from them is the same everywhere.
"""

import logging
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from perilune.dist import peer_memory
from perilune.dist.slicing import WHOLE, Slicing
from perilune.ops.exchange.exchange_rows import exchange_rows, takes
from perilune.ops.exchange.peers import Peers

log = logging.getLogger("perilune.dist")

# Limit of a wait for another rank. engine/ranks.py ends the group within 10 s of a rank's death; this bounds the waits
# that it cannot see. It must exceed a step of a long prompt, and a build of kernels on one rank.
TIMEOUT = timedelta(minutes=30)
# A CPU rank counts as computing if its process used at least this much CPU time between two calls of `progress` (1 s
# apart). Smaller: its reporting threads alone suffice. Larger: a rank with a tenth of a core counts as hanging.
BUSY_SECONDS = 0.1
END_SECONDS = 3.0  # `close` waits at most this long for NCCL's connections to end


class Group(Protocol):
    """Rank `slicing.rank` of `slicing.ranks`. RuntimeError from any call if another rank is gone.

    name   how partial outputs are summed ("none", "gloo", "nccl", "peer"), as in the ledger
    peers  for ops that sum partial outputs over peer memory; None: only `sum` does
    begun  number of calls of sum, gather, all_to_all and broadcast; the others wait for the rank with the fewest
    """

    slicing: Slicing
    name: str
    peers: Peers | None
    begun: int

    @property
    def ranks(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; x is contiguous."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: every rank's x, in order."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """[ranks, ...] -> [ranks, ...]: result[s] is rank s's x[r] on rank r."""
        ...

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        """Overwrites x with that of `rank`, and returns it."""
        ...

    def mark(self) -> None:
        """Called before each layer of a long step, so that `progress` sees it advance."""
        ...

    def progress(self) -> int:
        """A number that changes while this rank computes a long step. Called by one thread, every second."""
        ...

    def check(self) -> None:
        """ExchangeError if a sum over peer memory ended without another rank's part. Does not block."""
        ...

    def abort(self) -> None:
        """Ends calls in flight, with undefined results. Any thread may call it."""
        ...

    def close(self) -> None:
        """Call it after the processes of all other ranks have ended."""
        ...


def total(group: Group, x: Tensor) -> Tensor:
    """Sums x over ranks: [T, D] -> [T, D], or float32 [T, P, D] over P too -> [T, 1, D]. With one rank: x itself."""
    if group.ranks == 1:
        return x
    return group.sum(x.sum(1, keepdim=True) if x.dim() == 3 else x.contiguous())


def exchanged(group: Group, rows: Tensor) -> Tensor:
    """All-to-all of rows [ranks, W] (row j goes to rank j), or all-gather of [1, W] -> [ranks, W], ordered by rank.
    Over peer memory if there is some and `takes` allows, else through a collective."""
    if group.peers is not None and group.peers.mailboxes is not None and takes(rows):
        return exchange_rows(rows, group.peers)
    return group.gather(rows[0]) if len(rows) == 1 else group.all_to_all(rows)


def least(group: Group, number: int) -> int:
    """The smallest of all ranks' numbers."""
    if group.ranks == 1:
        return number
    device = "cuda" if isinstance(group, Nccl) else "cpu"
    return int(group.gather(torch.tensor([number], dtype=torch.int64, device=device)).min())


def largest(group: Group, number: int) -> int:
    """The largest of all ranks' numbers."""
    return -least(group, -number)


def everyone(group: Group, data: bytes) -> list[bytes]:
    """Every rank's bytes, in order."""
    if group.ranks == 1:
        return [data]
    device = "cuda" if isinstance(group, Nccl) else "cpu"
    lengths = group.gather(torch.tensor([len(data)], dtype=torch.int64, device=device)).flatten().tolist()
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    rows = group.gather(padded.to(device)).cpu()
    return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths)]


class Alone:
    """One rank, which holds everything."""

    slicing, name = WHOLE, "none"
    ranks = 1
    peers: Peers | None = None
    begun = 0

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        return x

    def mark(self) -> None: ...

    def progress(self) -> int:
        return 0

    def check(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


ALONE = Alone()


class _Process:
    """A Group over a process group of torch."""

    name: str
    peers: Peers | None = None

    def __init__(self, slicing: Slicing, processes: Any) -> None:
        """`processes`: a torch_dist.ProcessGroupGloo or ProcessGroupNCCL, which have no common type in its stubs."""
        self.slicing, self._processes = slicing, processes
        self.ranks = slicing.ranks
        self.begun = 0
        self._busy_calls, self._used_seconds = 0, 0.0

    def sum(self, x: Tensor) -> Tensor:
        self.begun += 1
        options = torch_dist.AllreduceOptions()
        options.asyncOp = False  # NCCL then runs on the current stream, not on its own
        self._wait(self._processes.allreduce([x], options))
        return x

    def gather(self, x: Tensor) -> Tensor:
        self.begun += 1
        x, out = x.contiguous(), x.new_empty(self.ranks, *x.shape)
        # Flat: gloo requires the ranks' rows concatenated, NCCL takes any shape.
        self._wait(self._processes._allgather_base(out.view(-1), x.view(-1)))
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        self.begun += 1
        options = torch_dist.AllToAllOptions()
        options.asyncOp = False
        x = x.contiguous()
        out = torch.empty_like(x)
        self._wait(self._processes.alltoall_base(out, x, [], [], options))
        return out

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        self.begun += 1
        options = torch_dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = rank, 0, False
        self._wait(self._processes.broadcast([x], options))
        return x

    def mark(self) -> None: ...

    def progress(self) -> int:
        """How many calls found that the process had used BUSY_SECONDS of CPU time since the call before: a rank that
        waits for others uses hardly any."""
        used = time.process_time()
        self._busy_calls += used - self._used_seconds >= BUSY_SECONDS
        self._used_seconds = used
        return self._busy_calls

    def check(self) -> None: ...

    def abort(self) -> None:
        self._processes.abort()

    def close(self) -> None:
        del self._processes

    @staticmethod
    def _wait(work: Any) -> None:
        if work is not None:
            work.wait()


class Gloo(_Process):
    """Between processes of a CPU."""

    name = "gloo"

    def abort(self) -> None:
        """Does nothing: calls in flight end when the other processes do."""


class Nccl(_Process):
    """Between GPUs of one host: sums of partial outputs over peer memory where there is some, all else over NCCL."""

    name = "nccl"

    def __init__(self, slicing: Slicing, processes: Any) -> None:
        super().__init__(slicing, processes)
        self._memory: peer_memory.PeerMemory | None = None
        self._ended = False
        # Number of layers of long steps that the GPU has computed: on the GPU, and its copy in pinned host memory.
        self._marks: tuple[Tensor, Tensor] | None = None
        self._device = torch.device("cuda")

    def connect(self, device: torch.device, swap: peer_memory.Swap, refusal: str) -> None:
        """From now on ops sum partial outputs over peer memory; if there is none, one log line says why. Every rank
        calls it. `refusal`: why this rank cannot use peer memory; "" if it can."""
        rank, ranks = self.slicing.rank, self.slicing.ranks
        device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self._device = device
        found = peer_memory.connect(rank, ranks, device, swap, TIMEOUT.total_seconds(), refusal=refusal)
        if isinstance(found, peer_memory.PeerMemory):
            self._memory, self.name = found, "peer"
            self.peers = Peers(rank, ranks, self.gather, found.mailboxes)
        elif rank == 0:
            log.warning("%d ranks add partial outputs through NCCL, not over peer memory: %s", ranks, found)

    def mark(self) -> None:
        if self._marks is None:
            host = torch.zeros(1, dtype=torch.int64, pin_memory=torch.cuda.is_available())
            self._marks = torch.zeros_like(host, device=self._device), host
        marks, host = self._marks
        host.copy_(marks.add_(1), non_blocking=True)

    def progress(self) -> int:
        """Layers that the GPU has computed. Not CPU time, because a host that waits for its GPU uses it, too."""
        return 0 if self._marks is None else int(self._marks[1])

    def check(self) -> None:
        if self._memory is not None:
            self._memory.check()

    def abort(self) -> None:
        if self._memory is not None:
            self._memory.end()  # first: NCCL's kernels are queued behind kernels that wait for peers
        self._ended = True
        super().abort()

    def close(self) -> None:
        """Aborts NCCL's connections: their orderly end is a collective, and may wait for ranks that have ended. A
        thread runs the destructor of torch's object, which waits for torch's own threads; `close` waits at most
        END_SECONDS for this thread."""
        if self._memory is not None:
            self._memory.close(lambda own: [own])
            self._memory = self.peers = None
        held, ended = [self._processes], self._ended  # so that the thread, not this one, runs the destructor
        super().close()

        def end() -> None:
            processes = held.pop()
            if not ended:
                processes.abort()
            del processes

        ending = threading.Thread(target=end, name="perilune-nccl-end", daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        if ending.is_alive():
            log.warning("NCCL's connections did not end within %.0f s", END_SECONDS)


class GlooOnGpu(Gloo):
    """Between processes that share a GPU, where NCCL refuses to run: through host memory, for tests."""

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(super().sum(x.cpu()))

    def gather(self, x: Tensor) -> Tensor:
        return super().gather(x.cpu()).to(x.device)

    def all_to_all(self, x: Tensor) -> Tensor:
        return super().all_to_all(x.cpu()).to(x.device)

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        return x.copy_(super().broadcast(x.cpu(), rank))


def join(slicing: Slicing, meeting: Path, device: torch.device, *, shared: bool = False, no_peers: str = "") -> Group:
    """The group of this rank; waits for the others. `meeting`: a file that does not exist yet, in a directory that only
    this user may enter; ranks find each other there, then connect over 127.0.0.1. `shared`: all ranks use one GPU.
    `no_peers`: why this rank cannot use peer memory."""
    if slicing.ranks == 1:
        return ALONE
    store = torch_dist.FileStore(str(meeting), slicing.ranks)  # type: ignore[attr-defined]  # torch's stubs lack it
    store.set_timeout(TIMEOUT)  # by default 300 s, in which a slower rank may still read its weights
    if device.type == "cuda" and not shared:
        # NCCL sets up its connections over these sockets. Multicast over NVLink needs rights that containers lack.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # Otherwise a thread of torch reads the store every second. Its file is removed once all ranks have joined: the
        # thread would then wait for it up to TIMEOUT, and the end of the group for the thread.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        # engine/ranks.py says which rank is lost. Torch would end the process that holds the engine, a minute later.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        wanted = torch_dist.ProcessGroupNCCL.Options()
        wanted._timeout = TIMEOUT
        group = Nccl(slicing, torch_dist.ProcessGroupNCCL(store, slicing.rank, slicing.ranks, wanted))
        group.connect(device, peer_memory.over_store(store, slicing.rank, slicing.ranks, "peers"), no_peers)
        return group
    options = torch_dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # nor this
    options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    kind = GlooOnGpu if shared else Gloo
    return kind(slicing, torch_dist.ProcessGroupGloo(store, slicing.rank, slicing.ranks, options))
