"""Memory is planned before anything is read: what goes where, the fewest GPUs, and what would make it fit."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.bench.shapes import shape
from perilune.cli.shared.synthetic import directory
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.dist.slicing import Slicing
from perilune.engine import fit
from perilune.engine.engine import Engine
from perilune.engine.resolve import Choices
from perilune.loading.synthetic import random_weights
from perilune.model.weights import Int4CompactExperts, Int4Experts, Moe
from perilune.plan import memory

H200 = 147.0e9
GPU = torch.device("cuda")  # named, never used: the shape of the plan depends on it


@pytest.fixture(scope="module")
def k25() -> Iterator[Path]:
    with directory("kimi-k2.5", None) as path:
        yield path


@pytest.fixture(scope="module")
def tiny() -> Iterator[Path]:
    with directory("tiny", 4) as path:
        yield path


def asked(path: Path, **config: Any) -> fit.Wanted:
    return fit.demand(path, EngineConfig(draft="off", **config), GPU)


def nbytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, list):
        return sum(map(nbytes, tree))
    if dataclasses.is_dataclass(tree):
        return sum(nbytes(getattr(tree, f.name)) for f in dataclasses.fields(tree))
    return 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_planned_weights_are_what_ranks_hold(tiny: Path, ranks: int) -> None:
    wanted = fit.demand(tiny, EngineConfig(device="cpu", draft="off", expert_scales="checkpoint"), torch.device("cpu"))
    (footprint,) = wanted.demand.weights
    for rank in (0, ranks - 1):
        held = random_weights(shape("tiny", 4), dtype=torch.float32, device="cpu", slicing=Slicing(rank, ranks))
        # The router's bias, norms and gate are there whole.
        assert footprint.per_gpu(ranks) == pytest.approx(nbytes(held), rel=2e-3)


def test_published_k25_needs_eight_gpus_or_four_with_compact_scales(k25: Path) -> None:
    stored, any_scales = asked(k25, expert_scales="checkpoint").demand, asked(k25).demand
    assert memory.fewest(stored, [H200] * 8) == 8
    assert memory.fewest(stored, [H200] * 4) is None
    eight = memory.plan(any_scales, 8, H200)
    assert eight.footprint.name == "as stored" and eight.tokens > 262_144
    assert 75e9 < eight.takes["weights"] < 77e9 and eight.takes["mailboxes"] > 0
    four = memory.plan(any_scales, 4, H200)
    assert four.footprint.name == fit.COMPACT and 140e9 < four.takes["weights"] < 143e9
    assert sum(four.takes.values()) + four.left == pytest.approx(four.free)


def test_the_fewest_are_those_with_room_for_a_context() -> None:
    asks = memory.Demand(
        weights=(memory.Footprint("wide", 80.0, 0.0), memory.Footprint("narrow", 60.0, 0.0)),
        drafter=memory.Footprint("drafter", 0.0, 0.0), graphs=0, workspace=lambda ranks: 0, mailboxes=1.0, kv_bytes=1,
        enough=30, least=2, fraction=1.0,
    )  # fmt: skip
    assert memory.plan(asks, 1, 95.0).footprint.name == "narrow"
    assert memory.plan(asks, 1, 110.0).footprint.name == "wide"
    assert memory.fewest(asks, [70.0] * 8) == 2  # one would hold 10 tokens
    assert memory.fewest(asks, [70.0]) == 1
    assert memory.fewest(asks, [61.0] * 3, counts=(1, 4)) is None
    assert memory.fewest(asks, [70.0, 20.0, 70.0, 70.0]) == 1  # the second is nearly full
    lines = memory.plan(asks, 2, 70e9).lines()
    assert lines[0] == "memory on each of 2 ranks, 70.00 GB free:" and [line.split()[0] for line in lines[1:]] == [
        "weights", "drafter", "mailboxes", "kept", "graphs", "workspace", "left",
    ]  # fmt: skip


def fitted(path: Path, free: float, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[EngineConfig, Choices]:
    monkeypatch.setattr(fit, "free_bytes", lambda device: free)
    choices = Choices([])
    return fit.fitted(path, EngineConfig(draft="off", **config), GPU, choices), choices


def test_what_does_not_fit_is_refused_with_what_would(k25: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as e:
        fitted(k25, H200, monkeypatch, expert_scales="checkpoint")
    text = str(e.value)
    assert "weights 594" in text and "147.00 GB free" in text and "what would fit: tp=8" in text and "\n" not in text
    with pytest.raises(ConfigError, match=r"fit: tp=4 on GPUs like these"):
        fitted(k25, H200, monkeypatch)
    with pytest.raises(ConfigError, match=r"fit: expert_scales=compact, or tp=2 .*at most [\d,]+ tokens"):
        fitted(k25, 599e9, monkeypatch, expert_scales="checkpoint", max_model_len=262_144, memory_fraction=0.99)
    with pytest.raises(ConfigError, match="take more or larger GPUs"):
        fitted(k25, 10e9, monkeypatch)
    config, choices = fitted(k25, 585e9, monkeypatch)
    assert config.expert_scales == "compact" and ("expert_scales", "compact") in [c[:2] for c in choices.made]
    assert fitted(k25, 700e9, monkeypatch)[0].expert_scales == "checkpoint"


def test_fewest_gpus(k25: Path) -> None:
    assert fit.fewest_gpus(k25, EngineConfig(draft="off"), GPU, [H200] * 8) in (4, 8)
    with pytest.raises(ConfigError, match="each of 2 ranks"):
        fit.fewest_gpus(k25, EngineConfig(draft="off"), GPU, [H200] * 2)


def test_the_engine_makes_compact_scales_and_says_what_they_cost(tiny: Path) -> None:
    answers = []
    for scales, record in (("compact", Int4CompactExperts), ("auto", Int4Experts)):
        e = Engine(tiny, EngineConfig(device="cpu", expert_scales=scales, max_model_len=64, draft="off", seed=1))
        try:
            ffn = e.runner.model.weights.layers[1].ffn
            assert isinstance(ffn, Moe) and isinstance(ffn.experts, record)
            notes = {key: (value, why) for key, value, why in e.info.choices}
            assert "tokens of KV" in notes["memory"][1]
            assert (scales == "compact") == ("SQNR" in notes.get("expert_scales", ("", ""))[1])
            assert e.config.expert_scales == ("compact" if scales == "compact" else "checkpoint")
            e.submit(Submit(0, (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
            answers.append([t for _ in range(20) if e.busy for d in e.step() for t in d.tokens])
        finally:
            e.close()
    assert len(answers[0]) == len(answers[1]) == 8


def test_compact_scales_of_other_formats_are_refused(tmp_path: Path) -> None:
    from perilune.formats.writer import write
    from tests.cpu.loading.test_slices import SIZES, tensors

    write(tmp_path / "model", tensors(SIZES).items(), config=SIZES)
    with pytest.raises(ConfigError, match="those of model are dense"):
        Engine(tmp_path / "model", EngineConfig(device="cpu", expert_scales="compact"))


def chosen(path: Path, free: float, **config: Any) -> tuple[int, str]:
    """(kv_shards that `fitted` chooses for GPUs with `free` bytes, why)."""
    choices = Choices([])
    shards = fit._kv_shards(path, EngineConfig(draft="off", **config), GPU, free, choices)
    (((key, value, why)),) = choices.made or [("kv_shards", "1", "")]
    assert (key, value) == ("kv_shards", str(shards))
    return shards, why


def test_sharded_kv_holds_as_many_times_the_tokens(k25: Path) -> None:
    whole, sharded = (asked(k25, tp=4, kv_shards=n).demand for n in (1, 4))
    alone, split = (memory.plan(demand, 4, H200) for demand in (whole, sharded))
    other = split.takes["workspace"] - alone.takes["workspace"]  # the latents of all ranks
    assert other > 0 and alone.left == split.left + other
    assert split.tokens == pytest.approx(4 * alone.tokens * split.left / alone.left, abs=4)
    wide = memory.plan(dataclasses.replace(sharded, kv_bytes=sharded.kv_bytes + 1000), 4, H200)
    assert wide.tokens < split.tokens  # the draft model's KV is not sharded
    assert fit.fewest_gpus(k25, EngineConfig(draft="off", tp="auto", max_step_tokens=4096), GPU, [H200] * 8) == 4


def test_kv_is_sharded_where_contexts_are_long_or_memory_is_short(k25: Path) -> None:
    few = {"max_num_seqs": 4, "tp": 8}
    shards, why = chosen(k25, H200, max_model_len=16_384, **few)
    assert shards == 1 and "every rank has all KV: it holds 4 requests of 16,384 tokens" in why
    assert chosen(k25, H200, max_model_len=80_000, **few)[0] == 1
    shards, why = chosen(k25, H200, max_model_len=100_000, **few)
    assert shards == 8 and "longer than 83,000 tokens" in why
    shards, why = chosen(k25, H200, **few)
    assert shards == 8 and "the whole KV would have room for" in why  # requests of 262,144 tokens
    assert chosen(k25, H200, max_model_len=16_384, tp=8, max_num_seqs=64)[0] == 8
    assert chosen(k25, H200) == (1, "")


def test_on_cpus_kv_is_whole_unless_it_does_not_fit(tiny: Path) -> None:
    def on_cpu(free: float, **config: Any) -> int:
        given = EngineConfig(device="cpu", draft="off", tp=2, **config)
        return fit._kv_shards(tiny, given, torch.device("cpu"), free, Choices([]))

    assert on_cpu(4e9) == 1
    assert on_cpu(0.36e9, kv_blocks=3000, block_size=16) == 2
