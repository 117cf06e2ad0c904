"""Experts' results summed inside the norm that follows give the states of a model that sums them before it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.core.sampling import SamplingParams
from perilune.core.step import StepPlan, Work
from perilune.draft.capture import Capture
from perilune.engine.batch import build
from perilune.kv.pages import Pages
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.synthetic import random_weights
from perilune.model import kimi_k2
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2
from perilune.ops.harness import registry
from perilune.ops.harness.case import Make
from perilune.ops.layouts.operands import Matrix, Mlp, Pairs
from perilune.ops.linear import linear_w8a8
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.moe_int4 import moe_int4
from tests.cpu.model.test_eagle3 import LAYERS, TARGET, V

FEW = 6  # fewer tokens are added up first, as below 513 on a GPU
MIXED = [0, 4, 1, 5, 2, 6, 3, 7]


def pairs_of(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Mlp | None) -> Pairs | None:
    """As moe_int4_pairs: rows of pairs in another order, between rows of nan, columns in the cluster's order."""
    (T, D), k = x.shape, chosen.ids.shape[1]
    if T < FEW:
        return None
    one = Chosen(chosen.ids.reshape(-1, 1), torch.ones(T * k, 1))
    results = moe_int4(x.repeat_interleave(k, 0), one, gate_up, down, None).sum(1)
    position = torch.randperm(T * k + 9, generator=torch.Generator().manual_seed(T))[: T * k]
    part = torch.full((T * k + 9, D), float("nan"))
    part[position] = results.unflatten(1, (-1, 8))[:, :, MIXED].flatten(1)
    rest = None if shared is None else kimi_k2.mlp(shared, x)
    return Pairs(part, position.view(T, k).to(torch.int32), chosen.weights.contiguous(), rest, True)


def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of the experts that returned `Pairs`, which `combine_add_rmsnorm` then sums."""
    calls: list[int] = []

    def counted(x: Tensor, *rest: Any) -> Pairs | None:
        pairs = pairs_of(x, *rest)
        if pairs is not None:
            calls.append(len(x))
        return pairs

    monkeypatch.setattr(kimi_k2, "moe_int4_pairs", counted)
    return calls


def model_of(seed: int, *, fp8: bool = False, **config_of: int) -> KimiK2:
    pick = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(2, 6, (), generator=pick))
    more = {"n_routed_experts": experts, "num_experts_per_tok": int(torch.randint(1, experts + 1, (), generator=pick))}
    more |= {"n_shared_experts": seed % 2, "hidden_size": 64} if not fp8 else {"hidden_size": 128}
    config = KimiConfig.from_dict(TARGET | more | config_of)
    weights = random_weights(config, dtype=torch.float32, device="cpu", seed=seed)
    if fp8:
        to_fp8(weights, lambda error: error, activations=True)
    return KimiK2(config, weights, max_positions=256)


def states(model: KimiK2, prompts: list[int], pictures: bool) -> list[Tensor]:
    """Of a step of these prompts, then of one token of each, with the stream that drafts read."""
    config = model.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    pages = Pages.allocate(LAYERS, 99, 16, width, torch.float32, torch.device("cpu"))
    generator, found = torch.Generator().manual_seed(1), []
    texts = [tuple(torch.randint(V, (n + 1,), generator=generator).tolist()) for n in prompts]
    for start, end in ((0, -1), (-1, None)):
        work = tuple(
            Work(n, n, len(text) - 1 if start else 0, text[start:end], tuple(range(n * 14, n * 14 + 14)), True, 0,
                 SamplingParams(temperature=0.0), 0)
            for n, text in enumerate(texts)
        )  # fmt: skip
        step = build(StepPlan(0, work), torch.zeros(len(texts), dtype=torch.int64), 16, 2).step
        if pictures and not start:
            step = replace(step, replaced=(torch.arange(2), torch.randn(2, config.hidden_size, generator=generator)))
        found += model.hidden_with_aux(step, pages.data, (0, 2, LAYERS))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prompts", [[FEW - 1], [FEW], [150, 1, 40], [3] * 7])
def test_states_are_those_of_sums(seed: int, prompts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(seed)
    want = states(model, prompts, pictures=seed > 1)
    calls = made(monkeypatch)
    got = states(model, prompts, pictures=seed > 1)
    assert set(calls) == ({sum(prompts)} if sum(prompts) >= FEW else set())
    for one, other in zip(got, want):
        assert torch.allclose(one, other, atol=2e-4, rtol=1e-4)


def test_the_norm_that_rounds_for_a_product_adds_them_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, op = model_of(3, fp8=True, moe_intermediate_size=64), registry.all_ops()["combine_add_rmsnorm_quantize"]
    prompts = [linear_w8a8.MIN_TOKENS, 3]
    want = states(model, prompts, pictures=False)
    calls = made(monkeypatch)
    op.forget()
    got = states(model, prompts, pictures=False)
    assert calls and op._decisions
    for one, other in zip(got, want):
        assert (one - other).norm() < 2e-2 * other.norm()  # a value may be rounded to the next step


def test_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(1)
    texts = [tuple(torch.randint(V, (n,)).tolist()) for n in (30, 31, 4)]
    want = Capture(model, (0, 3, LAYERS), tokens=1024, block_size=16)(texts)
    calls = made(monkeypatch)
    got = Capture(model, (0, 3, LAYERS), tokens=1024, block_size=16)(texts)
    assert calls
    assert torch.allclose(got.hidden, want.hidden, atol=2e-4, rtol=1e-4)
    assert torch.allclose(got.aux, want.aux, atol=2e-4, rtol=1e-4)


def test_queries_of_a_step_that_attends_in_the_absorbed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may have the output of attention in INT4 and its queries not."""
    model, make = model_of(1, num_attention_heads=4), Make(torch.float32, torch.device("cpu"), 1)
    for layer in model.weights.layers:
        packed, scale = make.int4(1, *layer.attention.o.weight.shape)
        layer.attention.o = Matrix(packed[0], scale[0])
    want = states(model, [2] * 7, pictures=False)
    calls = made(monkeypatch)
    for one, other in zip(states(model, [2] * 7, pictures=False), want):
        assert torch.allclose(one, other, atol=2e-4, rtol=1e-4)
    assert calls
