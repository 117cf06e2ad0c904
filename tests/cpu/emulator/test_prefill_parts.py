"""runs/prefill_parts.py on the emulator: a row for each case, and different bits are an exit code."""

import json

import pytest
import torch
from torch import Tensor

from perilune.ops.harness import timing
from perilune.ops.linear import scale_columns
from runs import prefill_parts
from tests.cuda_emulator import library
from tests.cuda_emulator.session import emulated

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="the emulator needs a compiler")


def test_rows_say_whether_bits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefill_parts, "MATRICES", [(24, 16)])
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "ROUND_SECONDS", 0.0)
    begin = ["--tokens", "9,17", "--device", "cpu", "--parts"]
    with emulated(2, "early", 1):
        assert prefill_parts.main([*begin, "scale,widen,fp8"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]

        def other(y: Tensor, scale: Tensor) -> None:
            y.mul_(scale).add_(torch.ones_like(y))

        monkeypatch.setitem(prefill_parts.NEW, "scale_columns", "other")
        scale_columns.op.impl("other", unmeasured=True)(other)
        try:
            assert prefill_parts.main([*begin, "scale"]) == 1
        finally:
            del scale_columns.op.impls["other"]
    assert [(r["part"], r["tokens"]) for r in rows] == [
        ("scale", 9), ("scale", 17), ("widen", 9), ("fp8", 9), ("fp8", 17)
    ]  # fmt: skip
    assert all(r["equal"] and r["old_us"] > 0 and r["new_us"] > 0 for r in rows)
