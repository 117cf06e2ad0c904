"""As scatter_pairs_add_rmsnorm.py, with the norm quantised to e4m3, the input of linear_w8a8.py.

values and scale of the n owned rows are as in linear/add_rmsnorm_quantize.py. "cuda" gives the same bits as the two ops
in sequence.
"""

from torch import Tensor

from perilune.ops.exchange.peers import Peers
from perilune.ops.harness.case import BFLOAT16, FLOAT32, Tol
from perilune.ops.harness.registry import Op
from perilune.ops.layouts.operands import Pairs
from perilune.ops.linear import quantize_tokens as to_e4m3
from perilune.ops.moe import combine_add_rmsnorm as of_one_rank
from perilune.ops.moe import combine_add_rmsnorm_quantize as quantized
from perilune.ops.moe import exchange_pairs_add_rmsnorm as whole
from perilune.ops.moe import scatter_pairs_add_rmsnorm as plain

CASES, inputs, cost = plain.CASES, plain.inputs, quantized.cost
_STEP = to_e4m3.TOL["values"][BFLOAT16]
# Where a sum is rounded the other way, the residual is off by an ulp of a partial sum, y by up to 0.1, and values by
# 448 / 4 times as much: 4 is the smallest of the groups' largest magnitudes.
_VALUES = Tol(12.0, _STEP.rel, _STEP.norm, "an ulp of a partial sum, scaled")
_SCALE = Tol(1e-3, 2**-6, 1e-3, "the largest value of a group is off likewise")
TOL = {
    "values": {FLOAT32: _VALUES, BFLOAT16: _VALUES},
    "scale": {FLOAT32: _SCALE, BFLOAT16: _SCALE},
    "residual": plain.TOL["residual"],
}


def reference(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> tuple[Tensor, Tensor]:
    return to_e4m3.reference(plain.reference(residual, pairs, w, eps, peers), None, 0.0, False)


op = Op(
    "scatter_pairs_add_rmsnorm_quantize", CASES, TOL, inputs, cost, reference, decides=("residual", "pairs", "peers")
)


@op.impl("cuda", when=lambda a, device: whole.fits(plain.SOURCE, a, device), alone=True, waits=(plain.SOURCE,))
def cuda(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> tuple[Tensor, Tensor]:
    own = plain.owned(len(residual), peers)
    values, scale = to_e4m3.empty(own.stop - own.start, residual.shape[1], residual.device)
    plain.run(residual, pairs, w, eps, peers, values, scale)
    return values, scale


@op.impl("composed")
def composed(residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers) -> tuple[Tensor, Tensor]:
    return to_e4m3.quantize_tokens(plain.scatter_pairs_add_rmsnorm(residual, pairs, w, eps, peers))


def scatter_pairs_add_rmsnorm_quantize(
    residual: Tensor, pairs: Pairs, w: Tensor, eps: float, peers: Peers
) -> tuple[Tensor, Tensor]:
    of_one_rank.check(residual, pairs, w)
    return op(residual, pairs, w, eps, peers)
