"""Inputs of a step's first layer: h = table[token], x = rmsnorm(h), and the tokens' rows of the rope tables.

ids [T] int64; where an id is PENDING, the token is last[rows[t]], with rows [T] and last [slots] int64 (both None: no
id is pending); positions [T] int64; table [V, D]; norm [D] -> h and x [T, D] as table; cos, sin [P, r] float32 ->
[T, r] each. Squares are summed in fp32, x is rounded once. Callers guarantee that tokens are rows of the table and
positions rows of the rope tables, because new requests are checked. "cuda" is one launch in place of eight, and reads
the nearest row of the table for a token outside it; "cpp" is one call for few tokens of float32; "composed" calls the
ops that "cuda" replaces.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.core.step import PENDING
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, exact, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.pointwise.embed import embed
from perilune.ops.pointwise.rmsnorm import reference as norm_reference
from perilune.ops.pointwise.rmsnorm import rmsnorm

Rows = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case(Sized):
    T: int
    V: int
    D: int
    r: int
    pending: bool = True


CASES = [
    *(Case(t, K2.vocab, K2.hidden, K2.rope // 2, big=True) for t in (1, 16, 64, 1024)),
    Case(1, NANO.vocab, NANO.hidden, NANO.rope // 2),
    Case(64, NANO.vocab, NANO.hidden, NANO.rope // 2),
    Case(33, NANO.vocab, NANO.hidden, NANO.rope // 2, pending=False),
    Case(0, 16, 8, 4),
    Case(5, 3, 7, 1),
]
TOL = {"h": exact(), "x": rounded(), "cos_rows": exact(), "sin_rows": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    slots, P = 70, 50
    ids = g.integers(0, c.V, c.T)
    last = rows = None
    if c.pending:
        rows, last = g.integers(0, slots, c.T), g.integers(0, c.V, slots)
        ids = torch.where(g.rand(c.T) < 0.5, PENDING, ids)
    return {
        "ids": ids,
        "rows": rows,
        "last": last,
        "positions": g.integers(0, P, c.T),
        "table": g.randn(c.V, c.D),
        "norm": g.randn(c.D),
        "cos": g.randn(P, c.r, dtype=FLOAT32),
        "sin": g.randn(P, c.r, dtype=FLOAT32),
        "eps": 1e-5,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.embed(c.T, c.D, dtype.itemsize) + costs.rmsnorm(c.T, c.D, dtype.itemsize)


def reference(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, norm: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> Rows:  # fmt: skip
    h = table[resolved(ids, rows, last)]
    return h, norm_reference(h, norm, eps), cos[positions], sin[positions]


op = Op("embed_norm", CASES, TOL, inputs, cost, reference, decides=("ids", "table"))


def resolved(ids: Tensor, rows: Tensor | None, last: Tensor | None) -> Tensor:
    """ids, with last[rows[t]] in place of PENDING ones."""
    return ids if rows is None or last is None else torch.where(ids == PENDING, last[rows], ids)


def check(ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Asserts shapes and types of tokens, positions and rope tables."""
    T = len(ids)
    assert ids.dtype == torch.int64 and positions.shape == (T,), f"{ids.dtype=} {ids.shape=} {positions.shape=}"
    assert (rows is None) == (last is None) and (rows is None or rows.shape == (T,)), f"{ids.shape=} {rows=}"
    assert cos.dtype == sin.dtype == FLOAT32 and cos.shape == sin.shape, f"{cos.shape=} {sin.shape=}"


MOST_WIDTH = 8192
FEW_TOKENS = 64


_kernel = build.launcher("embed_norm.cu", "embed_norm", "pppppppppppplllllfp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "embed_norm.cu",
        device,
        (a.table.dtype == BFLOAT16, "bfloat16"),
        (a.ids.shape[0] > 0, "a token"),
        (a.table.shape[1] % 8 == 0 and a.table.shape[1] <= MOST_WIDTH, f"a width in 8s up to {MOST_WIDTH}"),
    ),
)
def cuda(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, norm: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> Rows:  # fmt: skip
    T, (V, D), r = len(ids), table.shape, cos.shape[1]
    h, x = table.new_empty(T, D), table.new_empty(T, D)
    cos_rows, sin_rows = cos.new_empty(T, r), cos.new_empty(T, r)
    failed = _kernel()(
        *addresses(ids, rows, last, positions, table, norm, cos, sin, h, x, cos_rows, sin_rows),
        T,
        V,
        D,
        r,
        PENDING,
        eps,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {ids.shape=} {table.shape=}"
    return h, x, cos_rows, sin_rows


_on_cpu = build.launcher("rmsnorm", "embed_norm", "ppplp" + "p" * 8 + "l" * 6 + "f")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "rmsnorm",
        device,
        (a.table.dtype == FLOAT32 and a.ids.shape[0] <= FEW_TOKENS, f"at most {FEW_TOKENS} tokens of float32"),
        (a.table.shape[1] % 8 == 0, "a width that is a multiple of 8"),
    ),
)
def cpp(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, norm: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> Rows:  # fmt: skip
    T, (V, D), (P, r) = len(ids), table.shape, cos.shape
    h, x = torch.empty(T, D), torch.empty(T, D)
    cos_rows, sin_rows = torch.empty(T, r), torch.empty(T, r)
    ids, positions, table, cos, sin = (t.contiguous() for t in (ids, positions, table, cos, sin))
    if rows is not None and last is not None:
        rows, last = rows.contiguous(), last.contiguous()
    failed = _on_cpu()(
        *addresses(ids, rows, last),
        0 if last is None else len(last),
        *addresses(positions, table, norm, cos, sin, h, x, cos_rows, sin_rows),
        T,
        V,
        D,
        P,
        r,
        PENDING,
        eps,
    )
    assert not failed, f"a token, slot or position is outside its table: {ids=} {rows=} {positions=} {V=} {P=}"
    return h, x, cos_rows, sin_rows


@op.impl("composed")
def composed(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, norm: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> Rows:  # fmt: skip
    h = embed(resolved(ids, rows, last), table)
    return h, rmsnorm(h, norm, eps), cos[positions], sin[positions]


def embed_norm(
    ids: Tensor, rows: Tensor | None, last: Tensor | None, positions: Tensor, table: Tensor, norm: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> Rows:  # fmt: skip
    check(ids, rows, last, positions, cos, sin)
    assert norm.shape == table.shape[1:] and norm.dtype == table.dtype, f"{table.shape=} {norm.shape=} {norm.dtype=}"
    return op(ids, rows, last, positions, table, norm, cos, sin, eps)
