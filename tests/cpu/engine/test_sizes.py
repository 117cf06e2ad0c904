"""How large the KV cache is where the configuration does not say."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import perilune
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
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
    monkeypatch.setattr(resolve, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match="lower max_model_len, max_num_seqs or max_step_tokens, or raise memory"):
        sized()


def test_what_a_gpu_has_free_counts_memory_that_weights_left_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """61 layers on four GPUs leave 4 GB for KV. Weights made in bfloat16 and converted to FP8 left 3 GB unused in the
    allocator, which the driver counts as taken."""
    kept = [3 << 30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((7 << 30) - sum(kept), 140 << 30))
    assert resolve.free_bytes(torch.device("cuda", 0)) == 7 << 30


def test_what_other_gpus_have_free_takes_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's process asked CUDA and held 520 MiB of every other rank's GPU."""

    class Nvml:
        failed = 0

        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
            return self.failed if uuid == b"GPU-one" else 1

        def nvmlDeviceGetMemoryInfo(self, handle: object, sizes: Any) -> int:
            sizes[:] = 150 << 30, 149 << 30, 1 << 30
            return 0

    asked: list[torch.device] = []
    monkeypatch.setattr(resolve.ctypes, "CDLL", lambda name: Nvml())
    monkeypatch.setattr(resolve, "free_bytes", lambda device: asked.append(device) or 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="one"))
    assert resolve.free_on(1) == (149 << 30) - resolve.CONTEXT_BYTES and not asked
    assert resolve.free_on(0) == 7
    Nvml.failed = 6
    assert resolve.free_on(1) == 7 and [device.index for device in asked] == [0, 1]
