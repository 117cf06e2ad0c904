"""Products of some tens of rows (skinny_gemm.cu) beyond what the ops that use it check: gates, places, independence."""

import pytest
import torch
from torch import Tensor

from perilune.ops.harness.case import BFLOAT16, FLOAT32
from perilune.ops.linear import skinny_gemm
from perilune.ops.linear.linear_fp8 import quantize_rows

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for Hopper GPUs"
)
KINDS = ("bfloat16", "e4m3")


def values(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def weights(o: int, i: int, seed: int, kind: str) -> tuple[Tensor, Tensor | None]:
    w = values(o, i, seed) * i**-0.5
    return quantize_rows(w) if kind == "e4m3" else (w.to(BFLOAT16), None)


def exact(x: Tensor, w: Tensor, scale: Tensor | None) -> Tensor:
    return x.double() @ (w.double() if scale is None else w.double() * scale.double().unsqueeze(1)).T


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("o", "i"), ((384, 7168), (2112, 7168), (4096, 896), (18000, 256), (8, 128), (40000, 384)))
@pytest.mark.parametrize("T", (1, 16, 17, 64, 77, 128))
def test_products_of_any_shape(kind: str, o: int, i: int, T: int) -> None:
    x, (w, scale) = values(T, i + 8, 1).to(BFLOAT16)[:, :i], weights(o, i, 2, kind)
    whole = torch.full((T, 3, o), float("nan"), device="cuda")
    skinny_gemm.run(x, w, scale=scale, y=whole[:, 1])
    want = exact(x, w, scale)
    assert (whole[:, 1] - want).norm() <= 2e-6 * want.norm()
    assert whole[:, ::2].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("o", "i"), ((4096, 7168), (4096, 384), (256, 1024), (16, 256)))
def test_a_gate_weighs_the_other_half(kind: str, o: int, i: int) -> None:
    x, (w, scale) = values(50, i, 3).to(BFLOAT16), weights(o, i, 4, kind)
    gate, up = exact(x, w, scale).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    got = skinny_gemm.run(x, w, scale=scale, gated=True)
    assert got.dtype == BFLOAT16 and (got - want).norm() <= 3e-3 * want.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("o", "i"), ((2112, 7168), (7168, 1024)))
def test_a_row_does_not_depend_on_the_others(kind: str, o: int, i: int) -> None:
    x, (w, scale) = values(128, i, 5).to(BFLOAT16), weights(o, i, 6, kind)
    x[9] = float("inf")
    x = x if kind == "bfloat16" else x[:32]
    together = skinny_gemm.run(x, w, scale=scale, wide=True)
    assert together.dtype == FLOAT32
    for begin, end in ((0, 9), (10, 27), (10, 74), (17, 20), (64, 128)):
        if end > len(x):
            continue
        assert torch.equal(skinny_gemm.run(x[begin:end], w, scale=scale, wide=True), together[begin:end]), (begin, end)


@pytest.mark.parametrize("size", (1e-30, 1e-6, 1e30))
def test_e4m3_weights_meet_rows_of_any_size(size: float) -> None:
    x, (w, scale) = values(20, 2048, 7), weights(512, 2048, 8, "e4m3")
    x[:, 7] *= 300
    x[3] = 0
    x = (x * size).to(BFLOAT16)
    want, got = exact(x, w, scale), skinny_gemm.run(x, w, scale=scale, wide=True)
    assert not got[3].any()
    assert (got - want).norm() <= 2e-6 * want.norm()
