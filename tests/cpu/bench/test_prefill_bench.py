"""The prefill benchmark: what a layer costs at least, and weights with compact scales. Widths of tiles of experts."""

import itertools
from pathlib import Path

import pytest
import torch

from perilune.bench import prefill
from perilune.bench.ranks import over_ranks
from perilune.bench.shapes import shape
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError
from perilune.engine.engine import Engine
from perilune.loading.synthetic import random_weights
from perilune.model.weights import Int4CompactExperts, Int4Experts, Moe
from perilune.ops.moe.moe_int4_grouped import NARROWEST, WIDEST, WIDTHS, classes
from tests.cpu.loading.test_synthetic import TINY


def test_flops_of_a_prompt_equal_those_of_its_parts() -> None:
    c = shape("kimi-k2.5", 9)
    alone = prefill.layer_flops(c, 10_000)
    products = 7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168 + 384 * 7168
    products += 9 * 3 * 7168 * 2048
    attention = 10_000 * 10_001 // 2 * 64 * (192 + 128)
    assert alone == 2 * (10_000 * products + attention)
    # In two steps: the same, but the first part's keys and values are made again.
    again = 2 * 4_000 * 512 * 64 * 256
    assert prefill.layer_flops(c, 4_000) + prefill.layer_flops(c, 6_000, 4_000) == alone + again


def test_kernels_of_ranks_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--kernels shows what runs on a GPU"):
        over_ranks.prefill("tiny", 4, {"tp": 2, "device": "cpu"}, [64], print, kernels=True)


def test_compact_scales_replace_the_others_only() -> None:
    old = random_weights(TINY, dtype=torch.float32, device="cpu", seed=3)
    new = prefill.compacted(old)
    assert new.layers[0] is old.layers[0] and new.embed is old.embed
    for before, after in zip(old.layers[1:], new.layers[1:]):
        assert isinstance(before.ffn, Moe) and isinstance(after.ffn, Moe)
        had, has = before.ffn.experts, after.ffn.experts
        assert isinstance(had, Int4Experts) and isinstance(has, Int4CompactExperts)
        assert has.gate_up_packed is had.gate_up_packed and has.down_packed is had.down_packed
        for wide, scale, row in (
            (had.gate_up_scale, has.gate_up_scale, has.gate_up_row),
            (had.down_scale, has.down_scale, has.down_row),
        ):
            assert scale.shape == wide.shape and row.shape == wide.shape[:-1]
            ratio = (scale.float() * row.float().unsqueeze(-1) / 255).mean() / wide.float().mean()
            assert 0.8 < ratio < 1.25  # of the size of the scales they replace


@pytest.mark.parametrize("T", [1, 257, 1_000, 4_000, 10_000, 12_300, 16_384])
def test_tiles_are_little_wider_than_what_experts_get(T: int) -> None:
    mask = classes(T, 8, 384)
    widths = [NARROWEST + 8 * n for n in range(WIDTHS) if mask >> n & 1]
    assert widths[0] == NARROWEST and widths[-1] == WIDEST and mask < 1 << WIDTHS
    assert all(b - a <= 32 for a, b in itertools.pairwise(widths))
    even = T * 8 / 384
    for count in (round(even * share) for share in (0.8, 1.0, 1.25)):
        tiles = max(1, -(-count // WIDEST))
        size = -(-count // tiles)
        width = next(w for w in widths if w >= size)
        assert width - size < 8 or size <= NARROWEST, f"{count=} {size=} {width=}"


@pytest.mark.parametrize("cached", [0, 128])
def test_prompts_on_end_are_timed_one_by_one(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    weights = random_weights(TINY, dtype=torch.float32, device="cpu")
    settings = {"max_num_seqs": 1, "max_model_len": cached + 256, "max_step_tokens": 64, "prefix_cache": cached > 0}
    settings |= {"device": "cpu", "seed": 1, "draft": "off", "block_size": 64, "kv_blocks": cached // 64 + 6}
    engine = Engine(Path("tiny"), build(EngineConfig, settings), source=lambda path, **_: (TINY, weights))
    try:
        prefix = prefill.random_prompt(engine, cached, 0)
        engine.runner.call(engine.runner.pages.data.zero_)  # memory that was never written may be NaN
        engine.scheduler.adopt(prefix)
        prompts = [prefix + prefill.random_prompt(engine, 64, n) for n in range(1, 6)]
        seconds = prefill._seconds(engine, prompts)
        assert len(seconds) == 5 and min(seconds) > 0
    finally:
        engine.close()
