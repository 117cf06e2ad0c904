"""Runs this project's launchers for Hopper on CPU tensors, with the emulator in place of the GPU.

with emulated(sms=4, mode="late", seed=3):
    op.impls["cuda"].run(*args)
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from perilune.ops.harness import build, registry, workspace
from tests.cuda_emulator import library
from tests.cuda_emulator.translate import Untranslated

MODES = ("early", "late", "random")


class Fault(Exception):
    """What the emulator found wrong in a kernel."""


@dataclass
class _Open:
    depth: int = 0  # open contexts of `together`
    stream: int = 0  # the current stream's handle


_open = _Open()
_held: list[torch.Tensor] = []  # tensors that launches have addresses of: kept until the launches have ended


def drain() -> None:
    """Runs all launches to their end. Fault if something is wrong."""
    said = library.runtime().emu_drain().decode()
    _held.clear()
    if said:
        raise Fault(library.resolved(said))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """The launches of all calls in this context are in the stream before the first one runs: kernels overlap where
    programmatic dependent launch lets them (with overlap=True). Operators of torch that an implementation calls between
    launches still run at once, on what has not been written yet: such implementations cannot run in here."""
    _open.depth += 1
    try:
        yield
    finally:
        _open.depth -= 1
        if not _open.depth:
            drain()


@contextlib.contextmanager
def stream(number: int) -> Iterator[None]:
    """Launches in this context are in a stream of this number. Launches of different streams run at the same time, so
    that one process runs several ranks."""
    before, _open.stream = _open.stream, number
    try:
        yield
    finally:
        _open.stream = before


def _source(name: str) -> Path:
    return build._paths()[name]


def _library(name: str) -> "ctypes.CDLL | str":
    try:
        return library.load(_source(name))
    except (library.Unbuilt, Untranslated) as e:
        return f"{name} does not compile for the emulator: {e}"


def function(source: "str | Path", name: str, signature: str) -> Callable[..., int]:
    """As build.function, for a name of a source of the package or a path. The call runs the launches to their end."""
    path = source if isinstance(source, Path) else _source(source)
    launcher = library.load(path)[name]
    launcher.argtypes = [build._KINDS[c] for c in signature]
    launcher.restype = ctypes.c_int

    def call(*args: Any) -> int:
        failed = launcher(*args)
        if not _open.depth:
            drain()
        return int(failed)

    return call


def _on_hopper(source: str, device: torch.device, *needs: tuple[bool, str]) -> bool | str:
    for met, text in needs:
        if not met:
            return f"needs {text}"
    found = build.library(source)
    return found if isinstance(found, str) else True


@contextlib.contextmanager
def emulated(
    sms: int = 4, mode: str = "early", seed: int = 1, overlap: bool = False, eager: int = 2, shuffle: bool = False
) -> Iterator[None]:
    """In this context implementations for Hopper take CPU tensors.

    sms: streaming multiprocessors. mode: when asynchronous copies and products happen: "early" (at once), "late" (as
    late as allowed), "random". overlap: a launch may begin when its predecessor has allowed it, else when that has
    ended. eager: CTAs that are begun while others still run; more are begun when none can go on. shuffle: lanes of a
    warp that go on together run in any order; else by number, as the hardware does with atomics of a warp.
    """
    library.runtime().emu_configure(sms, MODES.index(mode), seed, overlap, eager, shuffle)
    real_library, real_function, real_pointer = build.library, build.function, torch.Tensor.data_ptr

    def pointer(tensor: torch.Tensor) -> int:
        _held.append(tensor)
        return real_pointer(tensor)

    def library_of(name: str) -> "ctypes.CDLL | str":
        return _library(name) if name.endswith(".cu") else real_library(name)

    def function_of(stem: str, name: str, signature: str) -> Callable[..., int]:
        return function(stem, name, signature) if stem.endswith(".cu") else real_function(stem, name, signature)

    patches: list[contextlib.AbstractContextManager[Any]] = [
        mock.patch.object(build, "library", library_of),
        mock.patch.object(build, "function", function_of),
        mock.patch.object(build, "on_hopper", _on_hopper),
        mock.patch.object(build, "is_hopper", lambda device: True),
        mock.patch.object(torch.Tensor, "data_ptr", pointer),
        mock.patch.object(build, "stream", lambda device=None: _open.stream),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
        mock.patch.object(build, "sm_count", lambda device: sms),
        mock.patch.object(workspace, "_stream", lambda device: _open.stream),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        _forget()
        stack.enter_context(workspace.owned())
        try:
            yield
        finally:
            _held.clear()
            _forget()


def _forget() -> None:
    """Drops what ops have cached: implementations chosen, launchers, the number of SMs."""
    registry.forget()
    for name, module in list(sys.modules.items()):
        if name.startswith("perilune.ops.") and ".harness" not in name:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
