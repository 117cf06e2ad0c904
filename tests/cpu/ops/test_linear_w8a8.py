"""Products with FP8 activations: what rounding them costs an op and a whole model, and where they are used."""

import pytest
import torch
from torch import Tensor

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.engine.llm import LLM
from perilune.loading.fp8_dense import to_fp8
from perilune.model.kimi_k2 import KimiK2, apply, mlp
from perilune.ops.harness import registry
from perilune.ops.harness.case import BFLOAT16
from perilune.ops.layouts.operands import Matrix, Mlp
from perilune.ops.linear import linear_w8a8
from perilune.ops.linear.linear_fp8 import quantize_rows
from perilune.ops.linear.linear_w8a8 import MIN_TOKENS, applies, tall
from perilune.ops.linear.quantize_tokens import GROUP, quantize_tokens
from perilune.ops.pointwise.swiglu import swiglu
from tests.cpu.loading.test_synthetic import tiny_weights


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def matrix(o: int, i: int, seed: int) -> Matrix:
    return Matrix(*quantize_rows(rows(o, i, seed) * i**-0.5), fp8_activations=True)


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("size", (1e-25, 1e-3, 1.0, 1e4))
def test_a_product_errs_by_what_rounding_its_activations_brings(size: float) -> None:
    x, w = rows(40, 1000, 1) * size, matrix(72, 1000, 2)
    assert w.scale is not None
    want = x.double() @ (w.weight.double() * w.scale.double().unsqueeze(1)).T
    assert 0.02 < apart(linear_w8a8.linear(x, w), want) < 0.03


def test_one_large_value_costs_only_its_own_columns() -> None:
    x = rows(8, 512, 3)
    x[:, 5] = 1e4
    values, scale = quantize_tokens(x)
    back = values.float() * scale[:, :8].T.repeat_interleave(GROUP, 1)
    assert (
        (back - x).abs() <= x.abs() / 16 + x.abs().view(8, 4, GROUP).amax(-1).repeat_interleave(GROUP, 1) / 4e5
    ).all()
    assert apart(back[:, GROUP:], x[:, GROUP:].double()) < 0.03
    assert (
        apart(back[:, :GROUP], x[:, :GROUP].double()) < 1e-3 and (back[:, 6:GROUP] - x[:, 6:GROUP]).abs().max() > 0.02
    )


def test_zeros_and_what_is_no_number() -> None:
    x = rows(3, 256, 4)
    x[1] = 0
    x[2, 200] = float("nan")
    y = linear_w8a8.linear(x, matrix(8, 256, 5))
    assert y[0].isfinite().all() and not y[1].any() and y[2].isnan().all()
    values, scale = quantize_tokens(x)
    assert (scale[:, 1] == 1).all() and not scale[:, 3:].any() and values[2, :GROUP].float().isfinite().all()


def test_mlp_is_its_parts() -> None:
    x, w = rows(30, 256, 6).to(BFLOAT16), Mlp(matrix(384, 256, 7), matrix(256, 192, 8))
    gate, up = (x.double() @ (w.gate_up.weight.double() * w.gate_up.scale.double().unsqueeze(1)).T).chunk(2, -1)  # type: ignore[union-attr]
    want = (gate * gate.sigmoid() * up) @ (w.down.weight.double() * w.down.scale.double().unsqueeze(1)).T  # type: ignore[union-attr]
    got = linear_w8a8.mlp(x, w)
    assert got.dtype == BFLOAT16 and 0.02 < apart(got, want) < 0.06


def test_prompts_of_marked_matrices_only() -> None:
    x, w = rows(MIN_TOKENS, 64, 9), matrix(8, 64, 10)
    assert applies(w, x) and not applies(w, x[1:]) and not applies(Matrix(w.weight, w.scale), x)
    weights = tiny_weights()
    to_fp8(weights, activations=True)
    assert not weights.lm_head.fp8_activations and weights.lm_head.format == "fp8"
    assert all(m.fp8_activations for a in (x.attention for x in weights.layers) for m in (a.qkv_a, a.q_b, a.o))


def test_tiles_leave_processors_busy() -> None:
    assert tall(10000, 7168, 132) and tall(1000, 4096, 132)  # one turn of 256 tokens is as long as two of 128
    assert not tall(129, 7168, 132) and not tall(4224, 2112, 132)


def test_activations_need_fp8_weights() -> None:
    with pytest.raises(ConfigError, match="give rest_dtype=fp8"):
        EngineConfig(fp8_activations=True)


def test_kimi_nano_loses_no_more_than_fp8_weights_cost() -> None:
    """One prompt of 300 tokens in one step: 128 and more take the path, and its log-probabilities stay near."""
    ids = [int(t) for t in torch.randint(300, 4000, (300,), generator=torch.Generator().manual_seed(11))]
    found, calls = [], []
    op = registry.all_ops()["linear_w8a8"]
    for config in ({}, {"rest_dtype": "fp8"}, {"rest_dtype": "fp8", "fp8_activations": True}):
        with LLM("kimi-nano", device="cpu", draft="off", **config) as llm:
            found.append(torch.tensor(llm.score(ids)))
            calls.append(len(op._decisions))
    exact, weights, both = found
    assert calls[0] == calls[1] < calls[2]
    assert 0 < (both - weights).abs().median() <= 1.5 * (weights - exact).abs().median()


def test_norms_that_round_too_keep_the_models_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's products with qkv_a get the norm of the stream from one op, with the bits of norm, then rounding."""
    ids = [int(t) for t in torch.randint(300, 4000, (200,), generator=torch.Generator().manual_seed(12))]
    op = registry.all_ops()["add_rmsnorm_quantize"]
    found, ran = [], []

    def apart(model: KimiK2, h: Tensor, x: Tensor, norm: Tensor, w: Matrix, whole: bool) -> Tensor:
        return linear_w8a8.linear(model._add(h, x, norm), w) if applies(w, h) else apply(w, model._add(h, x, norm))

    for instead in (None, apart):
        if instead is not None:
            monkeypatch.setattr(KimiK2, "_add_project", instead)
        op.forget()
        with LLM("kimi-nano", device="cpu", draft="off", rest_dtype="fp8", fp8_activations=True) as llm:
            found.append(llm.score(ids))
        ran.append(len(op._decisions))
    assert found[0] == found[1] and ran[0] > 0 == ran[1]


def test_a_narrow_mlp_keeps_its_second_matrix_as_it_is() -> None:
    """Of a width that is no multiple of 64 `down` has no FP8 weights: its product takes exact activations."""
    narrow = Mlp(matrix(2 * 96, 128, 1), Matrix(rows(128, 96, 2)))
    x = rows(MIN_TOKENS, 128, 3)
    want = apply(narrow.down, swiglu(linear_w8a8.linear(x, narrow.gate_up)))
    assert torch.equal(mlp(narrow, x), want)
