"""Which CUDA kernels a step's experts go to, and that each is called with the arguments it takes: no GPU needed."""

from collections.abc import Callable, Iterator

import pytest
import torch

from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import Make
from perilune.ops.moe import moe_int4, moe_int4_tall

T1, MMA_TMA = ("moe_int4_t1_gate_up", "moe_int4_t1_down"), ("moe_int4_mma_tma", "in two")
APART = ("apart",)  # the shared expert's own launches


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []

    def function(source: str, name: str, kinds: str) -> Callable[..., int]:
        def launch(*args: int | None) -> int:
            assert len(args) == len(kinds) and all(isinstance(a, int) for a, kind in zip(args, kinds) if kind == "l")
            names.append(name)
            if name == MMA_TMA[0]:
                names.append("in two" if args[-3] else "in one")
            return 0

        return launch

    monkeypatch.setattr(build, "function", function)
    for kernel in ("_gate_up", "_down", "_both"):
        monkeypatch.setattr(moe_int4, kernel, getattr(moe_int4, kernel).__wrapped__)
    monkeypatch.setattr(build, "sm_count", lambda device: 132)
    monkeypatch.setattr(moe_int4, "_add_shared", lambda *args: names.append("apart"))
    monkeypatch.setattr(build, "stream", lambda device=None: 0)
    with workspace.owned():
        yield names


@pytest.mark.parametrize(
    ("tokens", "compact", "fp8", "expected"),
    [
        (1, False, False, T1),
        (1, True, True, T1),
        (2, False, False, ("moe_int4_mma_tma", "in one")),
        (8, False, True, MMA_TMA),
        (16, False, False, MMA_TMA),
        (16, True, True, MMA_TMA),
        (17, False, False, MMA_TMA + APART),
        (128, False, True, MMA_TMA + APART),
        (129, True, False, MMA_TMA + APART),
        (256, True, True, MMA_TMA + APART),
    ],
)
def test_kernels_by_tokens(tokens: int, compact: bool, fp8: bool, expected: tuple[str, ...], called: list[str]) -> None:
    case = moe_int4.Case(tokens, 2, 4, 512, 512, S=128, shared_fp8=fp8, compact=compact)
    args = moe_int4.inputs(case, Make(torch.bfloat16, torch.device("cpu"), 1))
    moe_int4.cuda(**{**args, "partial": True})
    assert tuple(called) == expected


@pytest.mark.parametrize(
    ("tokens", "width", "alone", "launches"),
    [(4, 512, True, "in one"), (4, 512, False, "in two"), (5, 512, True, "in two"), (8, 256, True, "in one"),
     (9, 256, True, "in two"), (2, 1024, True, "in two"), (2, 128, True, "in two")],
)  # fmt: skip
def test_where_gate_up_and_down_are_one_launch(
    tokens: int, width: int, alone: bool, launches: str, called: list[str]
) -> None:
    args = moe_int4.inputs(moe_int4.Case(tokens, 2, 4, 512, width), Make(torch.bfloat16, torch.device("cpu"), 1))
    with workspace.Workspaces(alone=alone).use():
        moe_int4.cuda(**{**args, "partial": True})
    assert called == ["moe_int4_mma_tma", launches]


@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "compact", "wanted"),
    [
        (127, 512, 256, False, False),
        (128, 512, 256, False, True),
        (512, 512, 256, False, True),
        (513, 512, 256, False, False),
        (200, 384, 256, False, False),
        (200, 512, 384, False, False),
        (200, 512, 512, True, False),
    ],
)
def test_what_tall_tiles_take(tokens: int, hidden: int, width: int, compact: bool, wanted: bool) -> None:
    case = moe_int4.Case(tokens, 1, 2, hidden, width, compact=compact)
    args = moe_int4.inputs(case, Make(torch.bfloat16, torch.device("cpu"), 1))
    assert all(met for met, _ in moe_int4_tall.needs(args["x"], args["gate_up"])) == wanted


@pytest.mark.parametrize(
    ("tokens", "widths"), [(128, {8}), (256, {8, 16}), (400, {16}), (512, {16, 24}), (10_000, set())]
)
def test_widths_of_tall_tiles(tokens: int, widths: set[int]) -> None:
    """Those of the fastest runs measured at 128, 256 and 512 tokens."""
    assert {8 + 8 * n for n in range(12) if moe_int4_tall.classes(tokens, 8, 384) >> n & 1} == widths
