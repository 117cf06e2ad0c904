"""The time per layer, as far as no GPU is needed."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from perilune.bench import microscope
from perilune.bench.shapes import shape
from perilune.core.errors import ConfigError, EngineError
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


def test_a_slice_has_its_part_of_heads_widths_and_vocabulary_and_all_else() -> None:
    whole = shape("kimi-k2.5", 9)
    part = microscope.slice_of(whole, 4)
    for name in microscope.SHARED_OUT:
        assert getattr(part, name) * 4 == getattr(whole, name), name
    for name in ("hidden_size", "n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank"):
        assert getattr(part, name) == getattr(whole, name), name
    assert part.softmax_scale == whole.softmax_scale and microscope.slice_of(whole, 1) == whole
    with pytest.raises(ConfigError, match="cannot be split evenly over 3 ranks"):
        microscope.slice_of(whole, 3)
