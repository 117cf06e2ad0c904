"""Logits of the tokens a mask allows; the others become -inf.

logits [S, V] float32; mask [S, ceil(V / 32)] int32, in which bit i of word w (bit 0 the lowest) allows token 32 w + i
-> [S, V] float32. Bits beyond V are ignored. An allowed logit keeps its bits, also NaN and infinities.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness.case import EXACT, FLOAT32, K2, NANO, Make, Sized
from perilune.ops.harness.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    rows: int
    V: int
    infinite: bool = False


CASES = [
    *(Case(rows, K2.vocab, big=True) for rows in (1, 64)),
    *(Case(rows, NANO.vocab) for rows in (1, 16)),
    Case(0, 64),
    Case(3, 1),
    Case(5, 33, infinite=True),
]
TOL = {"masked": {FLOAT32: EXACT}}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    logits = g.randn(c.rows, c.V, scale=3.0)
    if c.infinite:
        logits[:, ::5] = float("-inf")
        logits[1, 3] = float("inf")
    words = -(-c.V // 32)
    return {"logits": logits, "mask": g.integers(-(2**31), 2**31, c.rows, words, dtype=torch.int32)}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.mask_logits(c.rows, c.V)


def reference(logits: Tensor, mask: Tensor) -> Tensor:
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = (mask[:, token // 32] >> (token % 32).int()) & 1
    return torch.where(allowed == 1, logits, float("-inf"))


op = Op("mask_logits", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


@op.impl("torch")
def by_words(logits: Tensor, mask: Tensor) -> Tensor:
    bit = torch.arange(32, dtype=torch.int32, device=mask.device)
    refused = (mask.unsqueeze(-1) >> bit).bitwise_and_(1).eq_(0).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(refused, float("-inf"))


def mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    S, V = logits.shape
    assert logits.dtype == FLOAT32 and mask.dtype == torch.int32, f"{logits.dtype=} {mask.dtype=}"
    assert mask.shape == (S, -(-V // 32)), f"{logits.shape=} {mask.shape=}"
    return op(logits, mask)
