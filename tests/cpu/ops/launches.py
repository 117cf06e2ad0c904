"""What implementations hand to C launchers, as text, without a GPU: `Recorder` stands in for `build.function`."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import perilune.ops
from perilune.ops.harness import build, workspace


def leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an argument, those of a record under "argument.field"."""
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(f"{name}.{field.name}", getattr(value, field.name))


class Recorder:
    """Lists launches of GPU kernels: "file:function(argument, ...)". A pointer is the name of the argument's tensor, or
    the type and shape of one that was made meanwhile, numbered in the order in which launches got them, with an offset
    in bytes; other arguments are their values."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: list[tuple[str, int, int]] = []  # name, begin, end
        self._numbers: dict[int, int] = {}  # by where a tensor that was made begins
        self._alive: list[Tensor] = []  # so that no address is used twice

    def know(self, name: str, value: Any) -> None:
        for leaf, t in leaves(name, value):
            self._alive.append(t)
            self._known.insert(0, (leaf, t.data_ptr(), t.data_ptr() + max(1, t.nbytes)))

    def made(self, t: Tensor) -> Tensor:
        kind = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}".replace(" ", "")
        self._known.append((kind, t.data_ptr(), t.data_ptr() + max(1, t.nbytes)))
        self._alive.append(t)
        return t

    def function(self, source: str, name: str, kinds: str) -> Callable[..., int]:
        def launch(*args: Any) -> int:
            assert len(args) == len(kinds), f"{name}: {len(args)} arguments for {kinds}"
            if name == "widest_row":
                return 16
            if source.endswith(".cu"):
                shown = (self._pointer(a) if kind == "p" else self._number(a, kind) for a, kind in zip(args, kinds))
                self.lines.append(f"{source}:{name}({', '.join(shown)})")
            return 0

        return launch

    def _number(self, a: Any, kind: str) -> str:
        assert isinstance(a, int) or (kind == "f" and isinstance(a, float)), f"{a!r} as {kind}"
        return repr(float(a) if kind == "f" else int(a))

    def _pointer(self, a: int | None) -> str:
        if not a:
            return "None"
        inside = [known for known in self._known if known[1] <= a < known[2]]
        behind = [known for known in self._known if a == known[2]]  # of what has no values
        if not inside and not behind:
            inside = [("other", a, a + 1)]
            self._known += inside
        name, begin, _ = (inside or behind)[0]
        if "[" in name or name == "other":
            name = f"#{self._numbers.setdefault(begin, len(self._numbers))}:{name}"
        return name if a == begin else f"{name}+{a - begin}"


def _forget_kernels() -> None:
    for module in pkgutil.walk_packages(perilune.ops.__path__, "perilune.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """As on a GPU of 132 processors, on its stream 0."""
    found = Recorder()
    monkeypatch.setattr(build, "function", found.function)
    for name in ("empty", "zeros", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _real=real, **k: found.made(_real(*a, **k)))
    monkeypatch.setattr(build, "stream", lambda device=None: 0)
    monkeypatch.setattr(build, "sm_count", lambda device: 132)
    _forget_kernels()
    with workspace.owned():
        yield found
    _forget_kernels()
