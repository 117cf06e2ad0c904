"""Shapes of large models, whole and as one rank holds them."""

import pytest

from perilune.bench.shapes import shape
from perilune.core.errors import ConfigError


def test_a_slice_has_its_part_of_heads_widths_and_vocabulary_and_all_else() -> None:
    whole, part = shape("kimi-k2.5", 9), shape("kimi-k2.5", 9, 4)
    for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "vocab_size"):
        assert getattr(part, name) * 4 == getattr(whole, name), name
    for name in ("hidden_size", "n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank"):
        assert getattr(part, name) == getattr(whole, name), name
    assert part.softmax_scale == whole.softmax_scale


def test_what_cannot_be_sliced_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be split evenly over 3 ranks"):
        shape("kimi-k2.5", 9, 3)
