"""y[t] = table[ids[t]].  ids [T] int64 or int32, table [V, D], y [T, D]. An id outside the table is an error."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness.case import K2, NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    T: int
    V: int
    D: int


CASES = [
    *(Case(t, K2.vocab, K2.hidden, big=True) for t in (1, 64, 8192)),
    Case(1, NANO.vocab, NANO.hidden),
    Case(512, NANO.vocab, NANO.hidden),
    Case(0, 16, 8),
    Case(5, 1, 7),
]
TOL = {"y": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    return {"ids": g.integers(0, c.V, c.T), "table": g.randn(c.V, c.D)}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.embed(c.T, c.D, dtype.itemsize)


def reference(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids.long()]


op = Op("embed", CASES, TOL, inputs, cost, reference, decides=("ids", "table"))


@op.impl("torch")
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, table)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    assert ids.dim() == 1 and table.dim() == 2, f"{ids.shape=} {table.shape=}"
    return op(ids, table)
