"""The made-up checkpoints that whole conversions are measured on."""

from pathlib import Path

import pytest

from perilune.bench import conversion_stream as bench
from perilune.bench.shapes import SHAPES
from perilune.convert.stream import Conversion
from perilune.convert.target import Target

TINY = SHAPES["kimi-k2.5"] | {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "n_routed_experts": 8,
}  # fmt: skip


def test_a_made_up_source_converts_and_holes_weigh_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHARD_BYTES", 50_000)
    size = bench.make(tmp_path / "source", TINY)
    assert bench.make(tmp_path / "holes", TINY, holes=True) == size
    with Conversion(tmp_path / "source", Target(to="nvfp4")) as conversion:
        assert conversion.checkpoint.nbytes == size and len(conversion.shards) == 1
        loss = conversion.run(tmp_path / "result", threads=1)
    assert loss.layers == 8 * 3 and 21 < loss.sqnr_db < 24
    with Conversion(tmp_path / "holes", Target(to="nvfp4")) as conversion:
        assert conversion.checkpoint.nbytes == size
    first = bench.digests(tmp_path / "result")
    assert bench.digests(tmp_path / "result") == first and "config.json" in first


def test_a_source_has_about_the_size_asked_for() -> None:
    assert bench._bytes(bench._sized(12.0)) == pytest.approx(12e9, rel=0.01)
