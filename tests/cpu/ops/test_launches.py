"""What each CUDA implementation hands to its kernels, pinned: no GPU needed.

The Python of every implementation runs on CPU tensors, on cases that its `when` accepts for a Hopper GPU, with a
launcher that records the arguments instead of the compiled one. launches.txt has one case for each pattern of
arguments; after a wanted change: `python -m tests.cpu.ops.test_launches`.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.harness import registry
from perilune.ops.harness.case import BFLOAT16, Make
from tests.cpu.ops.launches import Pinned, as_on_hopper, read, write

PINNED = Path(__file__).with_name("launches.txt")
CUDA = torch.device("cuda", 0)
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
            recorder.launches, recorder.known = [], {}
            with recorder.watching(args):
                impl.run(*args.values())
            yield _given(case), recorder.launches


def _given(case: Any) -> str:
    """The case's fields that are not the default."""
    return ", ".join(f"{f.name}={v}" for f in fields(case) if (v := getattr(case, f.name)) != f.default)


def _pattern(lines: list[str]) -> str:
    """Launches without their numbers and sizes."""
    return re.sub(r" -?[0-9][^ ]*|\[[0-9,]*\]|(?<=u8)\+[0-9]+|'+", "", "\n".join(lines))


def _pinned() -> Pinned:
    found: Pinned = {}
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
    pinned = read(PINNED)[f"{name}/{impl}"]
    assert any(pinned.values())
    assert dict(launches(name, impl, pinned)) == pinned


if __name__ == "__main__":
    write(PINNED, _pinned())
