"""`perilune bench vision`, on a tower small enough for a CPU."""

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from perilune.bench import vision
from perilune.cli.bench.vision import command
from perilune.core.errors import ConfigError
from perilune.engine.vision.cells import Cells, Sizes

SMALL = dataclasses.replace(
    vision.K25, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, text_hidden_size=40
)


def test_a_row_counts_real_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "PASSES", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines: list[str] = []
    first, second = vision.measure([4, 8], lines.append, config=SMALL)
    assert (first["patches"], second["patches"]) == (16, 64) and len(lines) == 2
    flops = Cells(Sizes(2, 588, 48, 56, 40), 64).flops(0, 5 + 1)
    layer = 64 * 2 * (4 * 48 * 48 + 2 * 48 * 56) + 4 * 64 * 64 * 48
    by_hand = 64 * 2 * 588 * 48 + 2 * layer + 16 * 2 * (192 * 192 + 192 * 40)
    assert flops == by_hand
    assert second["tflops"] == pytest.approx(by_hand / second["ms"] / 1e9, abs=0.06)
    assert second["fraction"] == pytest.approx(by_hand / second["ms"] / 1e9 / 729, abs=1e-4)
    assert {"ceiling_tflops", "slices_ms", "attention_ms", "commit", "gpu"} <= set(second)
    assert json.dumps(first)


def test_sides_that_cannot_be_are_one_line() -> None:
    result = CliRunner().invoke(command, ["--patches", "128,7"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "--patches must be even, from 2 to 512 on a side, not 7"
