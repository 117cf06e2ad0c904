"""The sum over experts in the norm behind it, on the emulator: the bits of the ops in turn."""

import dataclasses
import shutil

import pytest
import torch

from perilune.ops.harness.case import BFLOAT16, Make, rounded
from perilune.ops.harness.check import difference
from perilune.ops.harness.registry import using
from perilune.ops.linear.quantize_tokens import quantize_tokens
from perilune.ops.moe import moe_int4
from perilune.ops.moe.combine_add_rmsnorm import MIN_TOKENS, TOL, Case, combine_add_rmsnorm, inputs, summed
from perilune.ops.moe.combine_add_rmsnorm_quantize import combine_add_rmsnorm_quantize
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm
from perilune.ops.pointwise.add_rmsnorm import reference as add_norm_reference
from tests.cuda_emulator.session import emulated

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize(("impl", "shared"), [("cuda_cluster", 64), ("cuda_prefill", 0)])
def test_the_bits_of_both_ops(impl: str, shared: int) -> None:
    make = Make(BFLOAT16, CPU, 3)
    args = list(moe_int4.inputs(moe_int4.Case(MIN_TOKENS, 2, 5, 256, 256, S=shared), make).values())[:-1]
    before, w = make.randn(MIN_TOKENS, 256), make.randn(256)
    args[1].ids[5, 1] = -1  # no expert
    with emulated(sms=4), using({"moe_int4": impl}):
        pairs = moe_int4.moe_int4_pairs(*args)
        assert pairs is not None
        assert pairs.mixed == (impl == "cuda_cluster") and (pairs.shared is None) == (shared == 0)
        want, h, other = before.clone(), before.clone(), before.clone()
        y = add_rmsnorm(want, moe_int4.moe_int4(*args), w, 1e-5)
        values, scale = quantize_tokens(y)
        assert torch.equal(combine_add_rmsnorm(h, pairs, w, 1e-5), y)
        got_values, got_scale = combine_add_rmsnorm_quantize(other, pairs, w, 1e-5)
    assert torch.equal(h, want) and torch.equal(other, want)
    assert torch.equal(got_values.float(), values.float()) and torch.equal(got_scale, scale)


def test_the_tolerance_allows_fused_products_and_no_other_rounding() -> None:
    """Products fused into sums, as a GPU's kernels have them (the emulator's do not), give other bits than the
    reference; a sum that is rounded before it is added is found over the whole output."""
    args = inputs(Case(515, 2056, 32), Make(BFLOAT16, CPU, 1))
    residual, pairs, w, eps = args.values()

    def results(sums: torch.Tensor) -> dict[str, torch.Tensor]:
        x = residual.clone()
        return {"y": add_norm_reference(x, sums.unsqueeze(1), w, eps), "residual": x}

    fused = torch.zeros(residual.shape)
    for j in range(pairs.position.shape[1]):
        at = pairs.position[:, j]
        rows = pairs.part[at.clamp(min=0).long()].double().masked_fill(at.unsqueeze(1) < 0, 0.0)
        fused = (pairs.weights[:, j : j + 1].double() * rows + fused.double()).float()
    fused += pairs.shared.float()
    want, got, bad = (results(s) for s in (summed(pairs), fused, fused.to(BFLOAT16).float()))
    assert difference(got["y"], want["y"], rounded()[BFLOAT16]) is not None
    for name, of in TOL.items():
        whole = dataclasses.replace(of[BFLOAT16], abs=1.0, rel=1.0)
        assert difference(got[name], want[name], of[BFLOAT16]) is None
        assert "relative distance" in str(difference(bad[name], want[name], whole))


def test_few_tokens_and_other_kernels_give_sums() -> None:
    make = Make(BFLOAT16, CPU, 1)
    few = list(moe_int4.inputs(moe_int4.Case(MIN_TOKENS - 1, 1, 2, 256, 256), make).values())[:-1]
    many = list(moe_int4.inputs(moe_int4.Case(MIN_TOKENS, 1, 2, 256, 256), make).values())[:-1]
    assert moe_int4.moe_int4_pairs(*many) is None  # no GPU
    with emulated(sms=4), using({"moe_int4": "cuda_cluster"}):
        assert moe_int4.moe_int4_pairs(*few) is None
