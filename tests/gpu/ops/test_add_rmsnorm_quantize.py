"""add_rmsnorm_quantize gives the bits of add_rmsnorm followed by quantize_tokens."""

import pytest
import torch

from perilune.ops.harness.case import BFLOAT16, FLOAT32, Make
from perilune.ops.harness.check import same_bits
from perilune.ops.linear.add_rmsnorm_quantize import op
from perilune.ops.linear.quantize_tokens import quantize_tokens
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize(("T", "D", "parts"), [(1000, 7168, 1), (4000, 7168, 0), (513, 1536, 2), (515, 2056, 1)])
def test_norm_and_rounding_in_one_have_the_bits_of_both(T: int, D: int, parts: int) -> None:
    g = Make(BFLOAT16, CUDA, 7)
    h, w = g.randn(T, D), g.randn(D)
    x = g.randn(T, parts, D, dtype=FLOAT32) if parts else g.randn(T, D)
    h[3], x[3] = 0, 0
    h[4, 5], h[5, 6] = float("nan"), float("inf")
    h[6] *= 1e-20
    x[6] *= 1e-20
    h[7, 128:] = 0
    x[7, ..., 128:] = 0
    if (reason := op.refusal("cuda", [h, x, w, 1e-5])) is not None:
        pytest.skip(reason)
    mine, theirs = h.clone(), h.clone()
    values, scale = op.impls["cuda"].run(mine, x, w, 1e-5)
    want, want_scale = quantize_tokens(add_rmsnorm(theirs, x, w, 1e-5))
    assert same_bits(mine, theirs) and same_bits(values, want) and same_bits(scale, want_scale)
