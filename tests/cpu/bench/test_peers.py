"""`bench peers` without a GPU and with a peer of ours: what it hands over, what it refuses, what a row says."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from perilune.bench import peers
from perilune.cli.bench.peers import command
from perilune.core.errors import ConfigError
from perilune.ops.harness import registry
from perilune.ops.layouts import int4

BLOCK = 16  # pairs


class Layer:
    """What humming.layer.HummingLayer does with the arguments that `bench peers` gives it, in float32."""

    wrong = False  # another function

    def __init__(self, rows: int, width: int, form: dict[str, Any], *, num_experts: int, torch_dtype: torch.dtype):
        assert (
            form["num_bits"] == 4 and form["group_size"] == 32 and form["symmetric"] and torch_dtype == torch.bfloat16
        )
        self.shape = (num_experts, rows, width)
        self.humming_config = object()

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.weight = int4.dequantize(tensors["weight_packed"], tensors["weight_scale"], torch.float32)
        assert self.weight.shape == self.shape

    def transform(self) -> None:
        pass

    def forward(
        self,
        x: Tensor,
        *,
        sorted_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_padded: Tensor,
        top_k: int,
        **settings: Any,
    ) -> Tensor:
        assert settings["compute_config"] == {"gemm_type": "indexed"} and int(num_tokens_padded) == len(sorted_ids)
        pairs = len(x) * top_k
        y = torch.full((pairs, self.shape[1]), float("nan"), dtype=x.dtype)
        for n, pair in enumerate(sorted_ids.tolist()):
            if pair < pairs:
                y[pair] = (self.weight[expert_ids[n // BLOCK]] @ x[pair // top_k].float()).to(x.dtype)
        return y * 2 if self.wrong else y


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> type[Layer]:
    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    class Own(Layer):
        pass

    module("humming")
    module("humming.layer", HummingLayer=Own)
    module("humming.tune", get_heuristics_config=lambda config, **size: {"block_shape": [BLOCK, 128, 64]})

    def graph(run: Callable[[], Tensor]) -> Any:
        return SimpleNamespace(replay=run)

    small = SimpleNamespace(hidden_size=128, moe_intermediate_size=64, num_experts_per_tok=2, n_routed_experts=5)
    monkeypatch.setattr(peers, "require", lambda beside=True: None)
    monkeypatch.setattr(peers, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(peers, "shape", lambda name, layers: small)
    monkeypatch.setattr("perilune.cli.bench.peers.shape", lambda name, layers: small)
    monkeypatch.setattr(peers, "_graph", graph)
    monkeypatch.setattr(peers, "_by_turns", lambda graphs, rounds: [100.0, 125.0, 150.0][: len(graphs)])
    monkeypatch.setattr(peers, "_clock", lambda: 1800)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "0.1.19")
    return Own


def test_a_row_says_who_was_timed_on_what(peer: type[Layer], tmp_path: Path) -> None:
    args = ["--tokens", "1,7", "--width", "32", "--ledger", str(tmp_path)]
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows == [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [1, 7]
    row = rows[0]
    assert row["bench"] == "experts" and row["width"] == 32 and row["slice"] == 2 and row["gpus"] == 1
    assert (row["us"], row["peer_us"], row["ratio"], row["sm_mhz"]) == (100.0, 125.0, 1.25, 1800)
    assert row["impl"] == "composed" and row["impls_us"] == {}
    assert (row["peer"], row["peer_version"], row["expert_format"]) == ("humming-kernels", "0.1.19", "int4-g32")
    assert "1.25" in result.stderr


def test_named_implementations_are_timed_by_the_same_turns(peer: type[Layer]) -> None:
    """Those that cannot run on a CPU are left out; compact scales are timed without a peer."""
    args = ["--tokens", "7", "--width", "32", "--impl", "reference", "--impl", "cuda_cluster"]
    for other, ratio in (([], 1.5), (["--compact"], None), (["--no-peer"], None)):
        result = CliRunner().invoke(command, args + other, catch_exceptions=False)
        row = json.loads(result.stdout)
        assert row["impls_us"] == {"reference": 125.0} and row["ratio"] == ratio
        assert row["expert_format"] == ("int4-compact" if "--compact" in other else "int4-g32")
        assert bool(row["peer"]) == bool(row["peer_version"]) == bool(row["peer_us"]) == (not other)
    result = CliRunner().invoke(command, [*args, "--impl", "cuda_clusters"])
    assert isinstance(result.exception, ConfigError) and "no implementation 'cuda_clusters'" in str(result.exception)


def test_times_of_another_function_are_refused(peer: type[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    peer.wrong = True
    with pytest.raises(ConfigError, match="humming-kernels computes something else at 7 tokens"):
        peers.measure([7], peers.Sizes(64, 5), rounds=1, report=lambda line: None)
    wrong = registry.Impl("wrong", lambda a, device: True, lambda *a: torch.zeros(7, 1, 128))
    monkeypatch.setitem(peers.moe_int4.impls, "wrong", wrong)
    with pytest.raises(ConfigError, match="wrong computes something else at 7 tokens"):
        peers.measure([7], peers.Sizes(64, 5, compact=True), rounds=1, impls=["wrong"], report=lambda line: None)


def test_blocks_hold_every_pair_once_with_its_expert() -> None:
    ids = torch.randint(6, (90,), generator=torch.Generator().manual_seed(2)).int()
    order, owners = peers.blocks(ids, 8)
    assert len(order) == 8 * len(owners) and order.dtype == owners.dtype == torch.int32
    real = order < len(ids)
    assert order[real].sort().values.tolist() == list(range(90))
    assert torch.equal(ids[order[real].long()], owners.repeat_interleave(8)[real])


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(command, ["--width", "100"])
    assert isinstance(result.exception, ConfigError) and "no even slice" in str(result.exception)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ConfigError) and "pip install humming-kernels" in str(result.exception)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ConfigError) and "need a GPU" in str(result.exception)


def test_the_clock_is_that_of_the_timed_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvidia-smi lists all GPUs, also those that CUDA_VISIBLE_DEVICES hides."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$*" in *GPU-6*) echo 1980;; *) echo 345;; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device + 5))
    assert peers._clock() == 1980
