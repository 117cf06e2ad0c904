"""Several processes that train one draft: each has a part of every batch and, by FSDP2, of the parameters."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn as start

PATIENCE = timedelta(minutes=10)  # timeout of collectives: one rank may load the target or compile while others wait


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def spawn(processes: int, task: Callable[..., None], *given: Any) -> None:
    """Runs task(*given) in `processes` new processes of this machine, which form a group; raises the error of one."""
    # They meet through a file, because a port that is free now may be taken once they have imported torch.
    with tempfile.TemporaryDirectory(prefix="perilune-draft-") as folder:
        start(_member, (processes, f"file://{folder}/meeting", task, given), nprocs=processes)


def _member(own: int, processes: int, meeting: str, task: Callable[..., None], given: tuple[Any, ...]) -> None:
    with group(own, processes, meeting):
        task(*given)
    # Skip the interpreter's shutdown, in which a thread of torch that takes the GIL would abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def group(own: int = -1, processes: int = -1, address: str | None = None) -> Iterator[None]:
    """Runs the body as a member of a process group: torchrun's if nothing is given."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(dist.get_node_local_rank() if address is None else own)
    dist.init_process_group(backend, init_method=address, rank=own, world_size=processes, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_torchelastic_launched()


def shard(module: nn.Module, method: str, device: torch.device) -> None:
    """Shards the parameters over ranks; calls of `method` gather them."""
    fully_shard(module, mesh=init_device_mesh(device.type, (count(),)))
    register_fsdp_forward_method(module, method)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On rank 0 the unsharded tensors, on the CPU; on the others nothing. Every rank must call it."""
    found = {}
    for name, tensor in tensors.items():
        t = tensor.detach()
        t = t.full_tensor() if isinstance(t, DTensor) else t
        if rank() == 0:
            found[name] = t.cpu().contiguous()
    return found


def mean(values: Tensor) -> Tensor:
    if count() > 1:
        dist.all_reduce(values)
        values /= count()
    return values


def agreed(value: bool, device: torch.device) -> bool:
    """Rank 0's value, on all ranks."""
    if count() == 1:
        return value
    flag = torch.tensor(float(value), device=device)
    dist.broadcast(flag, 0)
    return bool(flag)
