"""As combine_add_rmsnorm.py, with the norm quantised to e4m3, the input of linear_w8a8.py.

values and scale are as in linear/add_rmsnorm_quantize.py. "cuda" gives the same bits as the two ops in sequence.
"""

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Pairs
from perilune.ops.linear import quantize_tokens as to_e4m3
from perilune.ops.linear.quantize_tokens import GROUP
from perilune.ops.moe import combine_add_rmsnorm as plain

CASES, inputs = plain.CASES, plain.inputs
TOL = {"values": to_e4m3.TOL["values"], "scale": to_e4m3.TOL["scale"], "residual": plain.TOL["residual"]}


def cost(c: plain.Case, dtype: torch.dtype) -> costs.Cost:
    whole = plain.cost(c, dtype)
    return costs.Cost(whole.flops + 4 * c.T * c.D, whole.bytes - c.T * c.D * (dtype.itemsize - 1 - 4 / GROUP))


def reference(residual: Tensor, pairs: Pairs, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return to_e4m3.reference(plain.reference(residual, pairs, w, eps), None, 0.0, False)


op = Op("combine_add_rmsnorm_quantize", CASES, TOL, inputs, cost, reference, decides=("residual", "pairs"))


@op.impl("cuda", when=lambda a, device: build.on_hopper(plain.SOURCE, device, *plain.needs(a.residual, a.pairs)))
def cuda(residual: Tensor, pairs: Pairs, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values, scale = to_e4m3.empty(len(residual), residual.shape[1], residual.device)
    plain.run(residual, pairs, w, eps, values, scale)
    return values, scale


def combine_add_rmsnorm_quantize(residual: Tensor, pairs: Pairs, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    plain.check(residual, pairs, w)
    return op(residual, pairs, w, eps)
