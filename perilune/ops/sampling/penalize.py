"""Penalties (repetition, frequency, presence) on the logits of tokens that came before.

logits [R, V] float32; counts [N, V] int32; rows [R] int64 in 0 .. N-1; presence, frequency, repetition [R] float32 ->
[R, V] float32. counts[rows[r]] is the history of row r: per token, how often it was generated, plus PROMPT if the
prompt contains it. In this order, in fp32:
  a token of prompt or output: logit / repetition if it is positive, else logit * repetition;
  then minus frequency * (times generated);  then minus presence if generated at all.
Each element depends only on its own inputs, so a row's bits are the same in any batch. nan and infinities stay.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, Tol
from perilune.ops.harness.registry import Op

PROMPT = 1 << 30


@dataclass(frozen=True)
class Case(Sized):
    rows: int
    V: int
    held: int  # rows of counts
    infinite: bool = False


CASES = [
    *(Case(rows, K2.vocab, 64, big=True) for rows in (1, 64)),
    *(Case(rows, NANO.vocab, 16) for rows in (1, 16)),
    Case(0, 16, 1),
    Case(3, 1, 3),
    Case(5, 33, 9, infinite=True),
]
TOL = {"penalized": {FLOAT32: Tol(2e-5, 1e-6, 1e-6, "fp32 roundings of penalties of up to a hundred")}}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    logits = g.randn(c.rows, c.V, scale=3.0)
    if c.infinite:
        logits[:, ::5] = float("-inf")
        logits[1, 3] = float("nan")
    counts = g.integers(-20, 40, c.held, c.V, dtype=torch.int32).clamp_min_(0)
    counts += g.integers(0, 2, c.held, c.V, dtype=torch.int32) * PROMPT
    return {
        "logits": logits,
        "counts": counts,
        "rows": g.permutation(c.held)[: c.rows],
        "presence": g.rand(c.rows) * 4 - 2,
        "frequency": g.rand(c.rows) * 4 - 2,
        "repetition": g.rand(c.rows) * 2 + 0.1,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.penalize(c.rows, c.V)


def reference(
    logits: Tensor, counts: Tensor, rows: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    out = logits.clone()
    for r in range(logits.shape[0]):
        before = counts[rows[r]]
        generated = (before % PROMPT).float()
        x = torch.where(logits[r] > 0, logits[r] / repetition[r], logits[r] * repetition[r])
        x = torch.where(before > 0, x, logits[r])
        out[r] = x - frequency[r] * generated - presence[r] * (generated > 0)
    return out


op = Op("penalize", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


@op.impl("torch")
def whole_rows(
    logits: Tensor, counts: Tensor, rows: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    before = counts.index_select(0, rows)
    scale = torch.where(before > 0, repetition.unsqueeze(-1), 1.0)
    out = torch.where(logits > 0, logits / scale, logits * scale)
    generated = before.bitwise_and_(PROMPT - 1)
    out.sub_(generated * frequency.unsqueeze(-1))
    return out.sub_((generated > 0) * presence.unsqueeze(-1))


def penalize(
    logits: Tensor, counts: Tensor, rows: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    R, V = logits.shape
    assert logits.dtype == FLOAT32 and counts.dtype == torch.int32, f"{logits.dtype=} {counts.dtype=}"
    assert counts.shape[1] == V, f"{counts.shape=} {V=}"
    assert all(x.shape == (R,) for x in (rows, presence, frequency, repetition)), f"{logits.shape=} {rows.shape=}"
    return op(logits, counts, rows, presence, frequency, repetition)
