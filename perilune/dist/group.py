"""Collectives of the ranks of one engine: what a step exchanges between GPUs, or between processes of a CPU.

Every call is made by all ranks in the same order with the same shapes, on the stream of the step, and may be captured
in a CUDA graph. Sums have the same bits on every rank, so what is computed from them is the same everywhere.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from perilune.dist.slicing import WHOLE, Slicing

# Longer: a rank that waits for a dead one is found out by engine/ranks.py, which ends the group within 10 s; this only
# bounds what that cannot see. A step of a long prompt, or a build of kernels on one rank, must fit.
TIMEOUT = timedelta(minutes=30)


class Group(Protocol):
    """Rank `slicing.rank` of `slicing.ranks`. RuntimeError from any call if another rank is gone. `name`: how it
    exchanges, as rows of the ledger say."""

    slicing: Slicing
    name: str

    @property
    def ranks(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; x is contiguous."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: every rank's x, in order."""
        ...

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        """That rank's x, in place."""
        ...

    def abort(self) -> None:
        """Ends calls in flight, with any result. From any thread."""
        ...

    def close(self) -> None: ...


def total(group: Group, x: Tensor) -> Tensor:
    """The layer's output [T, D] from every rank's part x of it: [T, D], or float32 [T, P, D], P addends; then
    [T, 1, D]."""
    if group.ranks == 1:
        return x
    return group.sum(x.sum(1, keepdim=True) if x.dim() == 3 else x.contiguous())


def least(group: Group, number: int) -> int:
    """The smallest of all ranks' numbers."""
    if group.ranks == 1:
        return number
    device = "cuda" if isinstance(group, Nccl) else "cpu"
    return int(group.gather(torch.tensor([number], dtype=torch.int64, device=device)).min())


def largest(group: Group, number: int) -> int:
    """The largest of all ranks' numbers."""
    return -least(group, -number)


class Alone:
    """One rank, which holds everything."""

    slicing, name = WHOLE, "none"
    ranks = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        return x

    def abort(self) -> None: ...

    def close(self) -> None: ...


ALONE = Alone()


class _Process:
    """Over a process group of torch's."""

    name: str

    def __init__(self, slicing: Slicing, processes: Any) -> None:
        """`processes`: a torch_dist.ProcessGroupGloo or ProcessGroupNCCL, which have no common type in its stubs."""
        self.slicing, self._processes = slicing, processes
        self.ranks = slicing.ranks

    def sum(self, x: Tensor) -> Tensor:
        options = torch_dist.AllreduceOptions()
        options.asyncOp = False  # NCCL: on the current stream, not on one of its own
        self._wait(self._processes.allreduce([x], options))
        return x

    def gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.ranks, *x.shape)
        # Flat: gloo wants rows of ranks below each other, NCCL takes any shape.
        self._wait(self._processes._allgather_base(out.view(-1), x.contiguous().view(-1)))
        return out

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        options = torch_dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = rank, 0, False
        self._wait(self._processes.broadcast([x], options))
        return x

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
        """Calls in flight end by themselves, because the other processes do."""


class Nccl(_Process):
    """Between GPUs of one host."""

    name = "nccl"

    def close(self) -> None:
        self._processes.shutdown()
        super().close()


class GlooOnGpu(Gloo):
    """Between processes that share a GPU, where NCCL refuses to run: through host memory, for tests."""

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(super().sum(x.cpu()))

    def gather(self, x: Tensor) -> Tensor:
        return super().gather(x.cpu()).to(x.device)

    def broadcast(self, x: Tensor, rank: int = 0) -> Tensor:
        return x.copy_(super().broadcast(x.cpu(), rank))


def join(slicing: Slicing, meeting: Path, device: torch.device, *, shared: bool = False) -> Group:
    """The group of this rank; waits for the others. `meeting` is a file, not there yet, in a directory that only this
    user may enter: ranks find each other there, then by sockets of 127.0.0.1. `shared`: they have one GPU."""
    if slicing.ranks == 1:
        return ALONE
    store = torch_dist.FileStore(str(meeting), slicing.ranks)  # type: ignore[attr-defined]  # torch's stubs lack it
    if device.type == "cuda" and not shared:
        # NCCL sets up its connections over these sockets. Multicast over NVLink needs rights that containers lack.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        wanted = torch_dist.ProcessGroupNCCL.Options()
        wanted._timeout = TIMEOUT
        return Nccl(slicing, torch_dist.ProcessGroupNCCL(store, slicing.rank, slicing.ranks, wanted))
    options = torch_dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # nor this
    options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    kind = GlooOnGpu if shared else Gloo
    return kind(slicing, torch_dist.ProcessGroupGloo(store, slicing.rank, slicing.ranks, options))
