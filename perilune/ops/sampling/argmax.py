"""The largest logit's id per row, ties to the lower id; -1 for an invalid row.

logits [S, V] float32 -> ids [S] int64. A row with nan or +inf, or of -inf alone, gives -1. "cuda" and "cpp" (in
sample.cu and sample.cpp) check and compare in one pass.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    rows: int
    V: int
    coarse: bool = False  # few distinct logits: ties


CASES = [
    *(Case(rows, K2.vocab, big=True) for rows in (1, 16, 256)),
    *(Case(rows, NANO.vocab) for rows in (1, 16)),
    Case(16, K2.vocab, coarse=True, big=True),
    Case(0, 16),
    Case(4, 1),
    Case(64, 37, coarse=True),
    Case(3, 20_001, coarse=True),
]
TOL = {"ids": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    logits = g.integers(-1, 2, c.rows, c.V).float() if c.coarse else g.randn(c.rows, c.V, scale=3.0)
    spoil(logits, g)
    return {"logits": logits}


def spoil(logits: Tensor, g: Make) -> None:
    """Makes rows 2, 10, 18 .. invalid by NaN, +inf or all -inf in turn; sets 90 % of rows 3, 11 .. to -inf."""
    S, V = logits.shape
    spots = g.integers(0, V, S)
    for n, row in enumerate(range(2, S, 8)):
        if n % 3 == 2:
            logits[row] = float("-inf")
        else:
            logits[row, spots[row]] = float("nan") if n % 3 == 0 else float("inf")
    logits[3::8, 1:] = logits[3::8, 1:].masked_fill(g.rand(len(logits[3::8]), V - 1) < 0.9, float("-inf"))


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.sample(c.rows, c.V)


def reference(logits: Tensor) -> Tensor:
    ids = [
        int((row == row.max()).nonzero()[0]) if bool(row.max().isfinite()) else -1
        for row in logits  # max is nan if any is
    ]
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


op = Op("argmax", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


FEW_ROWS = 4  # Max rows with 16 CTAs per row. Larger: clusters of 16 leave too many SMs idle.


@functools.cache
def _widest_row() -> int:
    """Max CTAs (a cluster) per row in sample.cu on this GPU."""
    return int(build.function("sample.cu", "widest_row", "")())


def processors(rows: int) -> int:
    """CTAs that share a row in sample.cu, for this number of rows."""
    return _widest_row() if rows <= FEW_ROWS else 8


MOST_IDS = 8 * 30_720  # max vocabulary of sample.cu, with 8 CTAs sharing a row


_kernel = build.launcher("sample.cu", "argmax", "pplllp")
_on_cpu = build.launcher("sample", "argmax", "ppll")


@op.impl("cpp", when=lambda a, device: build.on_cpu("sample", device))
def cpp(logits: Tensor) -> Tensor:
    logits = logits.contiguous()
    ids = torch.empty(len(logits), dtype=torch.int64)
    _on_cpu()(logits.data_ptr(), ids.data_ptr(), *logits.shape)
    return ids


def fits(a: Any, device: torch.device) -> bool | str:
    """`when` of an implementation in sample.cu."""
    S, V = a.logits.shape
    return build.on_hopper("sample.cu", device, (S > 0, "a row"), (0 < V <= MOST_IDS, f"1 to {MOST_IDS} ids"))


@op.impl("cuda", when=fits)
def cuda(logits: Tensor) -> Tensor:
    (S, V), logits = logits.shape, logits.contiguous()
    ids = torch.empty(S, dtype=torch.int64, device=logits.device)
    failed = _kernel()(logits.data_ptr(), ids.data_ptr(), S, V, processors(S), build.stream())
    assert not failed, f"CUDA error {failed}: {logits.shape=}"
    return ids


@op.impl("torch")
def by_argmax(logits: Tensor) -> Tensor:
    # torch's argmax treats NaN as the largest.
    ids = logits.argmax(-1, keepdim=True)
    return torch.where(logits.gather(-1, ids).isfinite(), ids, -1).squeeze(-1)


def argmax(logits: Tensor) -> Tensor:
    assert logits.dtype == FLOAT32 and logits.dim() == 2 and logits.shape[1] > 0, f"{logits.dtype=} {logits.shape=}"
    return op(logits)
