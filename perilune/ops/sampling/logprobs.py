"""lp[r] = log softmax(logits[r])[ids[r]], and the n most likely tokens with their log probabilities.

logits [R, V] float32; ids [R] int64 -> lp [R] float32, top_ids [R, n] int64, top_lp [R, n] float32, in descending order
of the logits, ties to the lower id. n may be 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, Tol, exact
from perilune.ops.harness.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    rows: int
    V: int
    n: int
    coarse: bool = False  # few distinct logits: ties


CASES = [
    *(Case(rows, K2.vocab, 20, big=True) for rows in (1, 64)),
    *(Case(rows, NANO.vocab, n) for rows in (1, 16) for n in (0, 5, 20)),
    Case(0, 16, 2),
    Case(3, 1, 1),
    Case(4, 33, 33, coarse=True),
]
_TOL = Tol(2e-6, 1e-6, 1e-6, "fp32 logarithm of a sum in another order")
TOL = {"lp": {FLOAT32: _TOL}, "top_ids": exact(), "top_lp": {FLOAT32: _TOL}}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    logits = g.integers(-2, 3, c.rows, c.V).float() if c.coarse else g.randn(c.rows, c.V, scale=3.0)
    return {"logits": logits, "ids": g.integers(0, c.V, c.rows), "n": c.n}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.logprobs(c.rows, c.V, c.n)


def reference(logits: Tensor, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    lp = torch.log_softmax(logits.double(), -1).float()
    top_ids = logits.sort(dim=-1, descending=True, stable=True)[1][:, :n]
    return lp.gather(-1, ids.unsqueeze(-1)).squeeze(-1), top_ids, lp.gather(-1, top_ids)


op = Op("logprobs", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


@op.impl("torch")
def keyed(logits: Tensor, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    lp = torch.log_softmax(logits, -1)
    chosen = lp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if n == 0:
        empty = (logits.shape[0], 0)
        return chosen, ids.new_empty(empty), lp.new_empty(empty)
    # topk does not define the order of ties, so the keys are distinct: the logit's bits as an ordered integer (adding 0
    # turns -0 into 0), then the id, lower first.
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = (ordered << 32) - torch.arange(logits.shape[1], device=logits.device)
    top_ids = keys.topk(n, sorted=True)[1]
    return chosen, top_ids, lp.gather(-1, top_ids)


def logprobs(logits: Tensor, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    assert logits.dtype == FLOAT32 and ids.dtype == torch.int64, f"{logits.dtype=} {ids.dtype=}"
    assert ids.shape == logits.shape[:1] and 0 <= n <= logits.shape[1], f"{logits.shape=} {ids.shape=} {n=}"
    return op(logits, ids, n)
