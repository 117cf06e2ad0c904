"""Random weights of a shape, the engine on them, everything but the experts in FP8, and prompts found in the cache."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.bench.microscope import described
from perilune.bench.shapes import SHAPES, shape
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.engine.graphs.decode import MIN_TABLE_BLOCKS, rounded_up, table_width
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.fp8_latents import to_fp8_latents
from perilune.loading.synthetic import random_draft, random_weights
from perilune.model.config import KimiConfig
from perilune.model.draft_config import config_for
from perilune.model.eagle3 import Eagle3
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.model.weights import Int4Experts, Matrix, Moe, Weights
from perilune.ops.linear.linear_fp8 import quantize_exactly

TINY = KimiConfig.from_dict(
    {
        **SHAPES["kimi-k2.5"],
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 2,
    }
)


def tiny_weights() -> Weights:
    return random_weights(TINY, dtype=torch.float32, device="cpu", seed=3)


def tiny_source(path: Path, **_: Any) -> tuple[KimiConfig, Weights]:
    return TINY, tiny_weights()


def engine(**config: Any) -> Engine:
    return Engine(Path("tiny"), EngineConfig(device="cpu", max_model_len=64, seed=1, **config), source=tiny_source)


def run(e: Engine, prompt: tuple[int, ...], tokens: int = 6) -> tuple[list[int], int]:
    """(greedy tokens, prompt tokens found in the cache)"""
    e.submit(Submit(7, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)))
    deltas = [d for _ in range(tokens + 8) if e.busy for d in e.step()]
    return [t for d in deltas for t in d.tokens], max(d.cached_tokens for d in deltas)


def test_the_shape_of_k2_has_the_published_number_of_parameters() -> None:
    counted = shape("kimi-k2.5", 61).parameters()
    assert round(counted.routed / 1e9, 3) == 1014.686
    assert round(counted.other / 1e9, 3) == 11.722
    assert shape("kimi-k2.5", 9).num_hidden_layers == 9


@pytest.mark.parametrize(("name", "layers"), [("kimi-k9", 4), ("kimi-k2.5", 0), ("kimi-k2.5", 62)])
def test_shapes_that_do_not_exist(name: str, layers: int) -> None:
    with pytest.raises(ConfigError):
        shape(name, layers)


def test_levels_are_zero_mean_and_never_the_lowest() -> None:
    experts = tiny_weights().layers[1].ffn
    assert isinstance(experts, Moe) and isinstance(experts.experts, Int4Experts)
    packed = experts.experts.gate_up_packed
    levels = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)]) - 8
    assert levels.min() == -7 and levels.max() == 7
    assert abs(levels.float().mean()) < 0.05


def test_the_engine_runs_on_any_source_of_weights() -> None:
    e = engine()
    try:
        tokens, cached = run(e, tuple(range(3, 40)))
        assert len(tokens) == 6 and cached == 0 and e.info.model == "tiny"
    finally:
        e.close()


def test_adopted_blocks_are_found_by_prompts_that_begin_with_them() -> None:
    e = engine(block_size=4)
    try:
        prompt = tuple(range(100, 130))
        cold, none = run(e, prompt)
        e.close()
        e = engine(block_size=4)
        held = e.scheduler.adopt(prompt[:-1])
        assert len(held) == 7 and none == 0
        e.scheduler.check_integrity()
        assert e.scheduler.adopt(prompt[:-1]) == held  # nothing is adopted twice
        e.runner.pages.data.zero_()  # adopted KV is whatever its owner put there
        warm, found = run(e, prompt)
        assert found == 28 and len(warm) == len(cold)
        e.scheduler.check_integrity()
    finally:
        e.close()


def logits(weights: Weights, tokens: list[int]) -> torch.Tensor:
    model = KimiK2(TINY, weights, max_positions=64)
    cache = torch.zeros(TINY.num_hidden_layers, 4, 16, TINY.kv_lora_rank + TINY.qk_rope_head_dim)
    count = len(tokens)
    table = torch.arange(4, dtype=torch.int32).view(1, 4)
    starts, context = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    where = torch.arange(count)
    step = Step(torch.tensor(tokens), where, where, Span(table, starts, context, slice(0, count)), None)
    with torch.inference_mode():
        return model.logits(model.hidden_with_aux(step, cache, ())[0])


def test_fp8_is_what_its_dequantised_weights_compute() -> None:
    narrow = tiny_weights()
    loss = to_fp8(narrow)
    assert loss.matrices == 3 * 6 + 1 and 25 < loss.worst_db <= loss.sqnr_db < 40 and loss.saved_bytes > 0
    widened = tiny_weights()
    for layer, small in zip(widened.layers, narrow.layers):
        pairs = [(layer.attention, small.attention, f) for f in ("qkv_a", "q_b", "o")]
        mlp, little = (f.shared if isinstance(f, Moe) else f for f in (layer.ffn, small.ffn))
        for to, made, field in (*pairs, (mlp, little, "gate_up"), (mlp, little, "down")):
            fp8 = getattr(made, field)
            assert fp8.format == "fp8"
            setattr(to, field, Matrix(fp8.weight.float() * fp8.scale.unsqueeze(-1)))
        a, attention = small.attention, layer.attention
        assert a.uv_fp8 is not None
        assert torch.equal(a.w_uv, a.uv_fp8.weight.float() * a.uv_fp8.scale[:, None])
        assert 0 < (attention.w_uv - a.w_uv).norm() < 0.04 * attention.w_uv.norm()
        attention.w_uv = a.w_uv
    assert narrow.lm_head.format == "fp8"
    widened.lm_head = Matrix(narrow.lm_head.weight.float() * narrow.lm_head.scale.unsqueeze(-1))
    tokens = list(range(5, 25))
    got, want = logits(narrow, tokens), logits(widened, tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (got - logits(tiny_weights(), tokens)).norm() > 1e-3 * want.norm()  # it did change something


def test_values_are_rounded_once_and_anew_for_narrow_latents() -> None:
    weights = tiny_weights()
    to_fp8(weights)
    a = weights.layers[1].attention
    before, copy = a.w_uv.clone(), a.uv_fp8
    assert to_fp8(weights).matrices == 0 and a.uv_fp8 is copy and torch.equal(a.w_uv, before)
    to_fp8_latents(weights)
    assert a.uv_fp8 is None and not torch.equal(a.w_uv, before)
    assert to_fp8(weights).matrices == len(weights.layers)
    assert a.uv_fp8 is not None and torch.equal(a.w_uv, a.uv_fp8.weight.float() * a.uv_fp8.scale[:, None])
    to_fp8_latents(weights)
    assert a.uv_fp8 is not None


@pytest.mark.parametrize("dim", [1, 2])
def test_bfloat16_holds_e4m3_times_powers_of_two(dim: int) -> None:
    random = torch.Generator().manual_seed(dim)
    w = torch.randn(3, 40, 40, generator=random)
    w *= torch.exp2(torch.randint(-30, 30, (3, 1, 40) if dim == 1 else (3, 40, 1), generator=random))
    w[0, 0] = w[0, :, 0] = 0
    q, scale = quantize_exactly(w, dim)
    rounded = q.float() * scale
    assert torch.equal(rounded, rounded.bfloat16().float()) and (scale.log2() % 1 == 0).all()
    largest = q.float().abs().amax(dim)
    assert ((largest >= 224) | (largest == 0)).all() and largest.max() <= 448
    normal = q.float().abs() >= 2.0**-6
    assert ((rounded - w).abs() <= w.abs() / 16)[normal].all()
    again, own = quantize_exactly(rounded, dim)
    assert torch.equal(again.float() * own, rounded)


def test_the_engine_says_what_fp8_cost() -> None:
    e = engine(rest_dtype="fp8")
    try:
        ((_, value, why),) = [c for c in e.info.choices if c[0] == "rest_dtype"]
        assert value == "fp8" and "SQNR" in why
        assert len(run(e, (5, 6, 7))[0]) == 6
    finally:
        e.close()


def test_an_exact_matrix_loses_nothing() -> None:
    weights = dataclasses.replace(tiny_weights(), layers=[], lm_head=Matrix(torch.eye(64)))
    loss = to_fp8(weights)
    assert loss.matrices == 1 and loss.sqnr_db == float("inf")


def test_graph_sizes() -> None:
    assert [rounded_up(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 25, 65, 100, 200)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 32, 96, 128, 256,
    ]  # fmt: skip
    assert all(n <= rounded_up(n) < 1.5 * n + 1 for n in range(1, 257))
    assert [table_width(n, 10_000) for n in (1, MIN_TABLE_BLOCKS, MIN_TABLE_BLOCKS + 1, 500)] == [24, 24, 96, 1536]
    assert table_width(5, 20) == 20 and table_width(600, 700) == 700


def test_a_kernel_is_described_with_its_rate() -> None:
    assert described(30.0, "void linear_kernel<x>()", "o", 117.4e6).split() == [
        "30.00", "us", "3.91", "TB/s", "o", "void", "linear_kernel<x>()",
    ]  # fmt: skip
    assert "TB/s" not in described(2.0, "k", "norm", 0.0)


def test_a_random_draft_drafts_and_its_cache_can_be_written_alone() -> None:
    """Shapes fit the configuration, values stay of the size real ones have; `store` writes what `hidden` would."""
    config = Eagle3Config.from_dict(config_for(TINY, aux_ids=(1, 2)))
    target = random_weights(TINY, dtype=torch.float32, device="cpu")
    draft = Eagle3(config, random_draft(config, target.embed), max_positions=64)
    tables, starts = torch.arange(2, dtype=torch.int32).view(1, 2), torch.tensor([0, 5], dtype=torch.int32)
    span = Span(tables, starts, torch.tensor([5], dtype=torch.int32), slice(0, 5))
    step = Step(torch.arange(5), torch.arange(5), torch.arange(5), span, None)
    aux = torch.randn(5, 2 * TINY.hidden_size)
    whole, alone = (torch.zeros(2, 8, config.kv_width) for _ in range(2))
    states, _ = draft.hidden(step, draft.features(aux), whole)
    logits = draft.logits(states)
    assert logits.shape == (5, TINY.vocab_size) and 0.3 < logits.std() < 3
    draft.store(step, draft.features(aux), alone)
    torch.testing.assert_close(alone, whole)
    assert (alone.view(16, -1)[:5] != 0).all() and (alone.view(16, -1)[5:] == 0).all()
