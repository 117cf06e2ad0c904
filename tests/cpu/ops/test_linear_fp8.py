"""Products with FP8 weights: those of many rows, weights widened before and scaled behind."""

import pytest
import torch
from torch.nn.functional import linear

from perilune.ops.harness.case import BFLOAT16, FLOAT32, Make
from perilune.ops.linear.linear_fp8 import dequantised, quantize_rows
from tests.cpu.ops.test_ops import CPU


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_widened_and_scaled_products_keep_their_bits(dtype: torch.dtype, wide: bool) -> None:
    g = Make(dtype, CPU, 3)
    x, (w, scale) = g.randn(40, 96), quantize_rows(g.randn(56, 96))
    product = linear(x, w.to(dtype))
    want = (product.float() if wide else product).mul_(scale)
    got = dequantised(x, None, w, scale, 0.0, wide)
    assert got.dtype == want.dtype and torch.equal(got, want)
