"""How large the KV cache is where the configuration does not say."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import perilune
from perilune.core.config import EngineConfig
from perilune.engine import resolve
from perilune.kv.pages import Pages
from perilune.model.config import KimiConfig

NANO = Path(perilune.__file__).parent / "bundled" / "kimi-nano"


@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="the bundled model is not there")
def test_the_kv_cache_on_a_cpu_is_bounded_and_holds_a_few_long_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound the bundled model of 36 million parameters took 4.2 GB."""
    monkeypatch.setattr(resolve, "free_bytes", lambda device: 1 << 40)
    model = dataclasses.replace(KimiConfig.from_directory(NANO), max_position_embeddings=4096)
    width = model.kv_lora_rank + model.qk_rope_head_dim
    block_bytes = Pages.block_bytes(model.num_hidden_layers, 16, width, torch.float32)

    def sized(**options: Any) -> tuple[int, list[tuple[str, str, str]]]:
        choices = resolve.Choices([])
        config = EngineConfig(dtype="float32", max_num_seqs=64, **options)
        config = resolve.resolve_sizes(config, model, torch.device("cpu"), torch.float32, choices)
        assert config.kv_blocks is not None
        return config.kv_blocks * block_bytes, choices.made

    held, made = sized()
    assert 500 << 20 < held < 520 << 20 and any("--set kv_blocks" in why for _, _, why in made)
    assert sized(kv_blocks=16_385)[0] > 3 << 30  # as asked for
    model = dataclasses.replace(model, max_position_embeddings=262_144)
    assert sized()[0] > 4 * 262_144 // 16 * block_bytes  # four of the longest requests, whatever they take


def test_what_a_gpu_has_free_counts_memory_that_weights_left_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """61 layers on four GPUs leave 4 GB for KV. Weights made in bfloat16 and converted to FP8 left 3 GB unused in the
    allocator, which the driver counts as taken."""
    kept = [3 << 30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((7 << 30) - sum(kept), 140 << 30))
    assert resolve.free_bytes(torch.device("cuda", 0)) == 7 << 30
