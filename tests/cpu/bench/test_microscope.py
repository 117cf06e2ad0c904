"""The time per layer, as far as no GPU is needed."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from perilune.bench import microscope
from perilune.core.errors import EngineError
from perilune.core.messages import Delta


def test_a_request_that_fails_ends_the_measurement() -> None:
    """With NaN weights or a broken kernel no token ever comes: not a loop without end."""
    steps = itertools.count()

    def step() -> list[Delta]:
        assert next(steps) < 5, "it goes on without requests"
        return [Delta(1, finish_reason="error", error="the logits are not finite")]

    engine: Any = SimpleNamespace(
        info=SimpleNamespace(vocab_size=10),
        scheduler=SimpleNamespace(adopt=lambda prompt: None),
        submit=lambda request: None,
        step=step,
    )
    with pytest.raises(EngineError, match="the measured requests fail: the logits are not finite"):
        microscope.start(engine, 2, 8, 4)
