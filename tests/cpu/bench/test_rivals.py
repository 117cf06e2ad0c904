"""The comparison with transformers: it must be the same model on both sides, or its ratios mean nothing."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from perilune.bench import rivals
from perilune.cli.bench import peers as bench_peers
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.engine.engine import Engine
from tests import oracle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> oracle.Checkpoint:
    return oracle.make(tmp_path_factory.mktemp("checkpoint") / "model", int4=True)


def test_the_export_is_the_same_model_to_the_last_bit(checkpoint: oracle.Checkpoint, tmp_path: Path) -> None:
    rivals.export(checkpoint.path, tmp_path / "plain")
    model = rivals._load(tmp_path / "plain", torch.float32)
    expected = checkpoint.reference.state_dict()
    got = model.state_dict()
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    (prompt,) = oracle.random_prompts(5, [200])
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    # The same weights; only the attention kernel differs from the oracle's.
    torch.testing.assert_close(logits, checkpoint.logits(prompt), rtol=0, atol=1e-4)


def test_both_sides_give_the_tokens_they_were_timed_on(checkpoint: oracle.Checkpoint) -> None:
    prompts = oracle.random_prompts(6, [9, 9, 9])
    config = EngineConfig(device="cpu", dtype="float32", threads=1, max_num_seqs=3, max_model_len=64, qk_norm_eps=1e-6)
    engine = Engine(checkpoint.path, config)
    try:
        speed, tokens = rivals.time_engine(engine, prompts, 12)
    finally:
        engine.close()
    expected = checkpoint.greedy(prompts[0], 12)
    assert tokens == expected and speed > 0
    speed, tokens = rivals.time_transformers(checkpoint.reference, prompts[0], 12)
    assert tokens == expected and speed > 0


def test_a_whole_comparison(checkpoint: oracle.Checkpoint, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    args = [str(checkpoint.path), "--threads", "1", "--prompt-tokens", "8", "--output-tokens", "12", "--batch", "2"]
    try:
        result = CliRunner().invoke(
            bench_peers.command, ["--cpu", *args, "--rounds", "1", "--ledger", str(tmp_path)], catch_exceptions=False
        )
    finally:
        torch.set_num_threads(before)
    row = json.loads(result.stdout.splitlines()[-1])
    assert row == json.loads((tmp_path / "rivals.jsonl").read_text())
    assert row["bench"] == "rivals" and row["same_tokens"] == 12 and row["threads"] == 1 and row["batch"] == 2
    best = max(row["transformers_float32_tokens_per_s"], row["transformers_bfloat16_tokens_per_s"])
    assert row[f"transformers_{row['transformers_dtype']}_tokens_per_s"] == best
    assert row["transformers_ratio"] == pytest.approx(row["tokens_per_s"] / best, rel=0.02, abs=0.01)
    assert row["batch_ratio"] == pytest.approx(row["batch_tokens_per_s"] / row["tokens_per_s"], rel=0.02)
    assert row["fraction"] == pytest.approx(row["tokens_per_s"] / row["ceiling_tokens_per_s"], rel=0.02, abs=1e-3)
    assert "ceiling" in result.stderr and "times transformers (mark: 3)" in result.stderr


def test_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, checkpoint: oracle.Checkpoint, tmp_path: Path
) -> None:
    monkeypatch.setattr(rivals, "MAX_PARAMETERS", 1000)
    with pytest.raises(ConfigError, match="models a CPU can hold"):
        rivals.export(checkpoint.path, tmp_path / "x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(bench_peers.command, ["--cpu"])
    assert isinstance(result.exception, ConfigError) and "pip install 'transformers" in str(result.exception)
