"""What each CUDA implementation hands to its kernels, pinned: no GPU needed.

The Python of every implementation runs on CPU tensors, on cases that its `when` accepts for a Hopper GPU, with a
launcher that records the arguments instead of the compiled one. launches.json has one case for each pattern of
arguments; after a wanted change: `python -m tests.cpu.ops.test_launches`.
"""

import contextlib
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from perilune.ops.harness import build, registry, workspace
from perilune.ops.harness.case import BFLOAT16, Make, tensors
from perilune.ops.linear import linear_fp8

PINNED = Path(__file__).with_suffix("").with_name("launches.json")
CUDA, STREAM, PROCESSORS = torch.device("cuda", 0), 77, 132
ROOMS = ("attention", "exchange", "linear", "pointwise", "quantize")
IMPLEMENTATIONS = [
    (op.name, impl.name)
    for op in registry.all_ops().values()
    for impl in op.impls.values()
    if impl.name.startswith("cuda")
    and (op.reference.__module__.split(".")[2] in ROOMS or op.name == "mla_decode_router")
]


class Blank(Make):
    """Makes tensors of the right shapes without filling them: cases of Kimi K2's sizes take no time."""

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype)

    def nan(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype)


def _quantized(w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty(w.shape[:-1])


def _exactly(w: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return torch.empty(w.shape, dtype=torch.float8_e4m3fn), w.new_empty(w.shape).float().amax(dim, keepdim=True)


def _declared(source: str, name: str) -> str:
    """The parameters of an exported C function, one letter each as for build.function."""
    text = "".join(path.read_text() for path in build._with_headers(build._paths()[source]))
    (parameters,) = re.findall(rf"^API int {name}\(([^)]*)\)", text, re.M)
    kinds = (("*", "p"), ("int64_t ", "l"), ("float ", "f"))
    return "".join(next(letter for text, letter in kinds if text in p) for p in parameters.split(","))


class Recorder:
    """Stands in for the compiled launchers; `launches` has a line for each launch.

    A pointer is written as the name of the argument that it points to, as "empty[1,64]float32" if the implementation
    made that tensor, as "copy" otherwise.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.known: dict[str, Tensor] = {}
        self.zeros: dict[str, Tensor] = {}  # kept from call to call

    def function(self, source: str, name: str, kinds: str) -> Callable[..., int]:
        def launch(*args: Any) -> int:
            assert kinds == _declared(source, name), f"{name}: {kinds} is not what {source} declares"
            assert len(args) == len(kinds), f"{name}: {len(args)} arguments for {kinds}"
            assert args[-1] in (STREAM, 0), args  # 0 is the stream of a workspace on the CPU
            words = [*(self._word(kind, arg) for kind, arg in zip(kinds, args[:-1])), "stream"]
            self.launches.append(" ".join([f"{source}:{name}", *words]))
            return 0

        return launch

    def _word(self, kind: str, arg: Any) -> str:
        if kind == "f":
            assert isinstance(arg, float) and math.isfinite(arg), arg
            return f"{arg:.6g}"
        if kind == "l":
            assert isinstance(arg, int) and abs(arg) < 1 << 40, arg  # an address would be larger
            return str(int(arg))
        assert arg is None or type(arg) is int, arg
        if arg is None:
            return "none"
        for name, t in (self.known | self.zeros).items():
            if t.numel() and 0 <= (offset := arg - t.untyped_storage().data_ptr()) < t.untyped_storage().nbytes():
                offset -= t.storage_offset() * t.itemsize
                return name if not offset else f"{name}{offset:+}"
        return "copy"

    def _making(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **settings: Any) -> Tensor:
            t = make(*args, **settings)
            shape, dtype = ",".join(map(str, t.shape)), str(t.dtype).removeprefix("torch.")
            name = f"{make.__name__}[{shape}]{dtype}"
            while name in self.known or name in self.zeros:
                name += "'"
            (self.zeros if make.__name__ == "zeros" else self.known)[name] = t
            return t

        return made

    @contextlib.contextmanager
    def watching(self, args: Mapping[str, Any]) -> Iterator[None]:
        self.known = tensors(args)
        with contextlib.ExitStack() as stack:
            for make in ("empty", "zeros", "empty_like"):
                stack.enter_context(mock.patch.object(torch, make, self._making(getattr(torch, make))))
            yield


@contextlib.contextmanager
def as_on_hopper() -> Iterator[Recorder]:
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (build, "function", recorder.function),
            (build, "is_hopper", lambda device: True),
            (build, "library", lambda source: object()),
            (build, "sm_count", lambda device: PROCESSORS),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (build, "stream", lambda device=None: STREAM),
            (workspace, "_stream", lambda device: STREAM),
            (linear_fp8, "quantize_rows", _quantized),
            (linear_fp8, "quantize_exactly", _exactly),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(workspace.owned())
        _forget()
        yield recorder
        _forget()


def _forget() -> None:
    """Launchers and counts of processors are cached by decorators."""
    for name, module in list(sys.modules.items()):
        if name.startswith("perilune.ops."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def launches(name: str, impl_name: str, only: Collection[str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """(a case, its launches) of every case that the implementation takes, or of those in `only`."""
    op = registry.all_ops()[name]
    impl = op.impls[impl_name]
    with as_on_hopper() as recorder:
        for case in op.cases:
            if only is not None and _given(case) not in only:
                continue
            if name.startswith("mla_prefill") and sum(case.contexts) > 600:  # products of some GFLOP on the CPU
                continue
            args = op.inputs(case, Blank(BFLOAT16, torch.device("cpu"), 1))
            if impl.when(SimpleNamespace(**args), CUDA) is not True:
                continue
            recorder.launches = []
            with recorder.watching(args):
                impl.run(*args.values())
            yield _given(case), recorder.launches


def _given(case: Any) -> str:
    """The case's fields that are not the default."""
    return ", ".join(f"{f.name}={v}" for f in fields(case) if (v := getattr(case, f.name)) != f.default)


def _pattern(lines: list[str]) -> str:
    """Launches without their numbers and sizes."""
    return re.sub(r" -?[0-9][^ ]*|\[[0-9,]*\]|(?<=uint8)\+[0-9]+|'+", "", "\n".join(lines))


def _pinned() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for name, impl in IMPLEMENTATIONS:
        kinds: dict[str, str] = {}
        for case, lines in launches(name, impl):
            kinds.setdefault(_pattern(lines), case)
        # Anew: what a launch takes from the workspace depends on the launches before it.
        if kinds:
            found[f"{name}/{impl}"] = dict(launches(name, impl, kinds.values()))
    return found


@pytest.mark.parametrize(("name", "impl"), IMPLEMENTATIONS)
def test_kernels_get_the_arguments_they_take(name: str, impl: str) -> None:
    pinned = json.loads(PINNED.read_text())[f"{name}/{impl}"]
    assert any(pinned.values())
    assert dict(launches(name, impl, pinned)) == pinned


if __name__ == "__main__":
    PINNED.write_text(json.dumps(_pinned(), indent=1) + "\n")
