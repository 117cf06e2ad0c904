"""Products with FP8 activations (linear_w8a8.cu, quantize_tokens.cu): what their ops' cases do not check."""

import pytest
import torch

from perilune.ops.harness.case import BFLOAT16
from perilune.ops.layouts.operands import Matrix
from perilune.ops.linear import linear_w8a8, quantize_tokens
from perilune.ops.linear.linear_fp8 import quantize_rows

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for Hopper GPUs"
)


def values(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@pytest.mark.parametrize(("o", "i"), ((2112, 7168), (7168, 2048), (264, 400)))
def test_a_row_does_not_depend_on_the_others(o: int, i: int) -> None:
    x, w = values(1500, i, 1).to(BFLOAT16), Matrix(*quantize_rows(values(o, i, 2) * i**-0.5))
    x[9] = float("nan")
    x[700] *= 1e4
    together = linear_w8a8.linear(x, w)
    assert together[9].isnan().all() and together[10:].isfinite().all()
    for begin, end in ((10, 139), (0, 300), (130, 700), (476, 1500)):
        some = linear_w8a8.linear(x[begin:end], w)
        assert torch.equal(some.nan_to_num(7.0), together[begin:end].nan_to_num(7.0)), (begin, end)


def test_repetitions_give_the_same_bits() -> None:
    """One stage that is refilled too early, or read too early, shows up in some launch of many."""
    x, w = values(3000, 1536, 3).to(BFLOAT16), Matrix(*quantize_rows(values(4096, 1536, 4) * 1536**-0.5))
    rounded, scale = quantize_tokens.quantize_tokens(x)
    want = linear_w8a8.linear_w8a8(rounded, scale, w)
    assert all(torch.equal(linear_w8a8.linear_w8a8(rounded, scale, w), want) for _ in range(200))


@pytest.mark.parametrize("size", (0.0, 1e-35, 1.0, 1e30))
def test_rounding_gives_the_reference_s_bits(size: float) -> None:
    x = (values(300, 7168, 5) * size).to(BFLOAT16)
    x[5, :128] = 0
    got, want = (run(x, None, 0.0, False) for run in (quantize_tokens.cuda, quantize_tokens.reference))
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    torch.testing.assert_close(got[1], want[1], rtol=2e-7, atol=0)
