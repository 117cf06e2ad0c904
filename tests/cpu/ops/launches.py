"""What implementations hand to C launchers, as text, without a GPU: `Recorder` replaces `build.function`.

Pinned texts have groups, cases (indented by one space) and their launches (by two).
"""

import contextlib
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import tensors
from perilune.ops.linear import linear_fp8

Pinned = dict[str, dict[str, list[str]]]
STREAM, PROCESSORS = 77, 132


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
    """Replaces the compiled launchers; `launches` has a line for each launch of a kernel.

    A line is the function, after its file if that has another name, and its arguments but the stream. A pointer is
    written as the name of the argument that it points to, as "[1,64]f32" or "zeros[64]i32" if the implementation made
    that tensor, as "copy" otherwise, with an offset in bytes; ticks tell apart what would have one name. "-" is none.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.known: dict[str, Tensor] = {}
        self.zeros: dict[str, Tensor] = {}  # kept from call to call

    def function(self, source: str, name: str, kinds: str) -> Callable[..., int]:
        def launch(*args: Any) -> int:
            assert len(args) == len(kinds), f"{name}: {len(args)} arguments for {kinds}"
            if name == "widest_row":
                return 16
            if source.endswith(".cu"):
                assert kinds == _declared(source, name), f"{name}: {kinds} is not what {source} declares"
                assert args[-1] in (STREAM, 0), args  # 0 is the stream of a workspace on the CPU
                others: list[int] = []
                words = (self._word(kind, arg, others) for kind, arg in zip(kinds, args[:-1]))
                file = source.removesuffix(".cu")
                self.launches.append(" ".join([name if file == name else f"{file}:{name}", *words]))
            return 0

        return launch

    def _word(self, kind: str, arg: Any, others: list[int]) -> str:
        if kind == "f":
            assert isinstance(arg, float) and math.isfinite(arg), arg
            return f"{arg:.9g}"
        if kind == "l":
            assert isinstance(arg, int) and abs(arg) < 1 << 40, arg  # an address would be larger
            return str(int(arg))
        assert arg is None or type(arg) is int, arg
        if arg is None:
            return "-"
        for end in (0, 1):  # what begins where a tensor ends has no values
            for name, t in (self.known | self.zeros).items():
                size, offset = t.untyped_storage().nbytes(), arg - t.untyped_storage().data_ptr()
                if t.numel() and end * size <= offset < size + end:
                    offset -= t.storage_offset() * t.itemsize
                    return name if not offset else f"{name}{offset:+}"
        if arg not in others:
            others.append(arg)
        return "copy" + "'" * others.index(arg)

    def _making(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **settings: Any) -> Tensor:
            t = make(*args, **settings)
            shape, dtype = ",".join(map(str, t.shape)), str(t.dtype).removeprefix("torch.")
            for long, short in (("float8_", ""), ("float", "f"), ("uint", "u"), ("int", "i")):
                dtype = dtype.replace(long, short)
            zeros = make.__name__ == "zeros"
            name = f"{'zeros' if zeros else ''}[{shape}]{dtype}"
            while name in self.known or name in self.zeros:
                name += "'"
            (self.zeros if zeros else self.known)[name] = t
            return t

        return made

    @contextlib.contextmanager
    def watching(self, args: Mapping[str, Any]) -> Iterator[None]:
        """Knows the tensors of arguments by their names, before all that it knew, and those that are made within."""
        self.known = {**(names := tensors(args)), **{k: t for k, t in self.known.items() if k not in names}}
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


def read(path: Path) -> Pinned:
    found: Pinned = {}
    group: dict[str, list[str]] = {}
    case: list[str] = []
    for line in path.read_text().splitlines():
        text = line.strip()
        if line.startswith("  "):
            case.append(text)
        elif line.startswith(" "):
            case = group.setdefault(text, [])
        else:
            group = found.setdefault(text, {})
    return found


def write(path: Path, pinned: Pinned) -> None:
    lines = [
        line
        for group, cases in pinned.items()
        for line in (group, *(w for case, of in cases.items() for w in (f" {case}", *(f"  {w}" for w in of))))
    ]
    path.write_text("\n".join(lines) + "\n")
