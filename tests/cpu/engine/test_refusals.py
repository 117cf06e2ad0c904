"""Settings that an engine refuses, before it reads weights, and the memory that it says it will use."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune import LLM
from perilune.cli.shared.synthetic import directory
from perilune.core.config import EngineConfig, build
from perilune.core.errors import CheckpointError, ConfigError
from perilune.engine import fit
from perilune.engine.engine import Engine
from perilune.engine.resolve import Choices
from perilune.formats.hub import resolve_model
from perilune.kv.pages import Pages
from tests.cpu.cli.test_exit_codes import shorten

SMALL: dict[str, Any] = dict(device="cpu", max_model_len=64, max_num_seqs=2, threads=1, draft="off", kv_blocks=16)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (dict(kv_disk=""), "kv_disk is empty"),
        (dict(kv_disk=" "), "kv_disk is empty"),
        (dict(kv_disk="x", kv_ttl_hours=float("inf")), "above 0 and finite"),
        (dict(gpus="all"), "auto, or numbers"),
        (dict(max_num_seqs=1048577), "max_num_seqs must be at most 1048576"),
        (dict(vision_cache_gb=1e300), r"vision_cache_gb must be at most 1e\+09, not 1e\+300"),
        (dict(kv_disk="x", kv_disk_gb=1e300), r"kv_disk_gb must be at most 1e\+09"),
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build(EngineConfig, values)
    build(EngineConfig, dict(max_num_seqs=1 << 20, decode_stretch=0))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (dict(kv_disk="~no-such-user-here/kv"), "no such user"),
        (dict(kv_disk="a\0b"), "cannot be used"),
        (dict(kv_disk="OTHER"), "holds other files"),
        (dict(kv_host_gb=1e9), r"kv_host_gb=1e\+09 is more than"),
        (dict(max_model_len=10**6), "beyond the model's 4096 positions: lower it"),
    ],
)
def test_what_cannot_be_had_is_refused_before_weights_are_read(
    tmp_path: Path, values: dict[str, Any], why: str
) -> None:
    shutil.copy(resolve_model("kimi-nano") / "config.json", tmp_path)  # and no weights
    if values.get("kv_disk") == "OTHER":
        values = dict(kv_disk=str(tmp_path))
    with pytest.raises(ConfigError, match=why) as error:
        LLM(tmp_path, **SMALL | values)
    assert "\n" not in str(error.value)


def test_a_cache_that_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cannot allocate .*; lower kv_blocks or memory_fraction$"):
        Pages.allocate(1, 1 << 40, 16, 64, torch.float32, torch.device("cpu"))


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    shutil.copy(resolve_model("kimi-nano") / "config.json", tmp_path)
    shorten(tmp_path)
    with pytest.raises(CheckpointError, match=r"the tokenizer has 4095 tokens, config\.json's vocab_size is 4096"):
        LLM(tmp_path, **SMALL)


def test_gpus_auto_means_as_many_as_hold_the_model() -> None:
    auto = build(EngineConfig, dict(gpus="auto"))
    assert (auto.gpus, auto.tp) == (None, "auto")
    four, experts = build(EngineConfig, dict(gpus="auto", tp=4)), build(EngineConfig, dict(gpus="auto", ep=2))
    assert (four.gpus, four.tp, experts.ranks) == (None, 4, 2)


def test_a_server_logs_its_table_of_memory_without_a_terminal(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Engine(tiny, build(EngineConfig, SMALL), owns_process=True).close()
    found = capfd.readouterr().err
    assert "memory on the one device" in found and "left for KV" in found and "tokens" in found


@pytest.mark.parametrize(
    ("layers", "free_gb", "seqs", "says"),
    [
        (4, 24.0, 64, "take a machine with more memory, or a smaller model"),  # ranks would share it: no tp helps
        (4, 44.0, 64, "what would fit: draft=off, or rest_dtype=fp8"),
        (4, 150.0, 1_000_000, "what would fit: draft=off, or max_num_seqs=64"),
    ],
)
def test_remedies_on_a_cpu_are_those_of_one_memory(
    layers: int, free_gb: float, seqs: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "free_bytes", lambda device: free_gb * 1e9)
    with directory("kimi-k2.5", layers) as path, pytest.raises(ConfigError) as error:
        fit.fitted(path, EngineConfig(max_model_len=256, max_num_seqs=seqs), torch.device("cpu"), Choices([]))
    assert str(error.value).endswith(says)
