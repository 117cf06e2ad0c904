"""Device memory that kernels keep from one launch to the next: mailboxes, work counters, sums of split kernels.

A mailbox is a tensor through which CTAs of one launch, or of two launches that overlap, exchange results. It is zeroed
once, when it is made; afterwards the kernels keep it usable: a word carries the number of the launch that wrote it, or
the last reader sets it to zero again. So one mailbox serves any number of launches, but never two at the same time.
Launches of one CUDA stream follow each other, so a `Workspace` is the memory of one device and one stream: the stream
that is current when the op is called. For a CUDA graph that is the stream of its capture, not of its replay: graphs
captured on one stream hold the addresses of its mailboxes, and must be replayed one after the other, as an engine does.

`Workspaces` is the owner: the workspaces of one engine (engine/runner.py), of a model outside an engine
(model/varlen.py), of a test or a measurement (`owned`). The caller of ops enters the owner with `use`, and an op finds
its workspace with `current(device)`: neither the model nor ops pass it, and two engines of one process never share
memory, even if PyTorch gives both the same stream of its pool. Close an owner only after the last replay of the graphs
that were captured while it was in use: they hold addresses, not tensors.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from perilune.ops.harness import build

T = TypeVar("T")


class Workspace:
    """The memory of one device and one stream (its CUDA handle; 0 on CPU). alone: see `Workspaces`."""

    def __init__(self, device: torch.device, stream: int, alone: bool) -> None:
        self.device = device
        self.stream = stream
        self.alone = alone
        self._kept: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make` at the first call with this key: a tensor, or a record of tensors."""
        found: T | None = self._kept.get(key)
        return self._kept.setdefault(key, make()) if found is None else found

    def zeros(self, key: Hashable, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A tensor [size], zero when it is made. `key` has the op's name and everything on which the kernel's use of
        the memory depends: a kernel that counts the CTAs of a launch needs a tensor for each number of CTAs."""
        found = self.kept(key, lambda: torch.zeros(size, dtype=dtype, device=self.device))
        assert found.numel() == size, f"{key}: {found.numel()} values were made, {size} are wanted"
        return found

    def close(self) -> None:
        """Frees the memory. No graph that was captured with it may run again."""
        self._kept.clear()


class Workspaces:
    """The workspaces of one owner, made at first use. Thread-safe; but threads that launch kernels with mailboxes need
    a stream each, because launches of one stream share mailboxes."""

    def __init__(self, alone: bool = True) -> None:
        """`alone`: launches may need all of their CTAs resident at once (engine/exclusive_kernels.py)."""
        self.alone = alone
        self._made: dict[tuple[torch.device, int], Workspace] = {}

    def __len__(self) -> int:
        return len(self._made)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside this context, ops called by this thread keep their memory here."""
        token = _owner.set(self)
        try:
            yield
        finally:
            _owner.reset(token)

    def of(self, device: torch.device) -> Workspace:
        """The workspace of the device's current stream."""
        stream = _stream(device)
        found = self._made.get((device, stream))
        return (
            self._made.setdefault((device, stream), Workspace(device, stream, self.alone)) if found is None else found
        )

    def close(self) -> None:
        """Frees everything; see `Workspace.close`."""
        for workspace in self._made.values():
            workspace.close()
        self._made.clear()


def _stream(device: torch.device) -> int:
    return build.stream(device) if device.type == "cuda" else 0


_owner: ContextVar[Workspaces | None] = ContextVar("perilune_workspaces", default=None)


@contextmanager
def owned() -> Iterator[Workspaces]:
    """For tests and measurements: an owner that is in use inside the block and closed after it."""
    owner = Workspaces()
    with owner.use():
        try:
            yield owner
        finally:
            owner.close()


def current(device: torch.device) -> Workspace:
    """The workspace of the owner in use and of the device's current stream."""
    owner = _owner.get()
    assert owner is not None, "an op that keeps device memory was called without an owner: wrap the call in `owned()`"
    return owner.of(device)
