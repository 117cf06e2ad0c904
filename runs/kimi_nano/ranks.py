"""Training on several GPUs of one host: a process per GPU, each with its own data, and sums over all of them."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist


class Ranks:
    """One of `count` processes that train together. With one process, sums change nothing."""

    def __init__(self, rank: int = 0, count: int = 1, store: str = "") -> None:
        self.rank, self.count, self._store = rank, count, store

    def join(self, device: str) -> None:
        """Joins the group. Call it after data processes are forked, because it uses CUDA."""
        if self.count > 1:
            if device == "cuda":
                torch.cuda.set_device(self.rank)
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=dist.FileStore(self._store, self.count), rank=self.rank, world_size=self.count
            )

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over the processes, the same bits in each: one reduction of one buffer."""
        if self.count > 1:
            flat = torch.cat([t.flatten() for t in tensors])
            dist.all_reduce(flat)
            parts = flat.split([t.numel() for t in tensors])
            torch._foreach_copy_(list(tensors), [p.view_as(t) for p, t in zip(parts, tensors)])

    def agreed(self, *numbers: float) -> list[float]:
        """The first process's numbers, on all: clocks differ, but rates and the last step must not."""
        found = torch.tensor(numbers, dtype=torch.float64)
        if self.count > 1:
            dist.broadcast(found, 0)
        return found.tolist()

    def apart(self, tensors: Sequence[Tensor]) -> float:
        """How far the processes' tensors have come apart: 0 while all do the same."""
        sums = torch.stack(torch._foreach_norm(list(tensors))).double()
        low, high = sums.clone(), sums
        if self.count > 1:
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
        return float((high - low).max())


def _run(rank: int, count: int, store: str, train: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    train(*arguments, Ranks(rank, count, store))
    dist.destroy_process_group()


def start(count: int, train: Callable[..., Any], *arguments: Any) -> None:
    """train(*arguments, Ranks) in `count` new processes; the failure of one ends all."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _run, (count, str(Path(folder) / "store"), train, arguments), nprocs=count, start_method="spawn"
        )
