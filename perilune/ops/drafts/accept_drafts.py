"""Which of the tokens drawn in a step stand: speculation/acceptance.py's rule for a grid of B requests with m tokens
each.

drawn, ids [B m] int64: what each position drew (negative: it failed), and the token it holds; front, stop [B] int32;
stores [B] int64. Request b's own columns are front[b] .. m - 1, and behind column j its draft is ids[j + 1] if j <
stop[b] <= m - 1. With a the first own column that has no draft or drew another token than its draft, in place:
  last[b] = b m + a; following[b m + j] = max(drawn[b m + j], 0); last_tokens[stores[b]] = max(drawn[b m + a], 0);
  shifts[stores[b]] = a - front[b], the drafts that stand;
  out[b, :m + 2] = drawn[b m .. b m + m - 1], how many stand (a - front[b] and one more unless drawn[a] failed), and 1.0
  if it failed, else 0.0.
out [B, W] float64, W >= m + 2, which holds ids exactly; last [B], following [B m], last_tokens and shifts [N] int64. No
two stores are equal but those of rows of last_tokens that nobody reads.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, Make, Sized, exact
from perilune.ops.harness.registry import Op


@dataclass(frozen=True)
class Case(Sized):
    B: int
    m: int
    spare: int = 0  # columns of `out` that are somebody else's


CASES = [
    *(Case(b, m, 16) for b in (1, 16, 256) for m in (1, 4)),
    Case(0, 1),
    Case(3, 9),
    Case(40, 9, 1),
    Case(300, 2),
]
TOL = {name: exact() for name in ("last_tokens", "shifts", "out", "following", "last")}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    B, m = c.B, c.m
    ids = g.integers(0, 3, B, m)  # few tokens, so that many are right
    drawn = g.integers(-1, 3, B, m)
    drawn[:, :-1] = torch.where(g.rand(B, m - 1) < 0.5, ids[:, 1:], drawn[:, :-1])
    front = (g.rand(B) * m).int()
    return {
        "drawn": drawn.flatten(),
        "ids": ids.flatten(),
        "front": front,
        "stop": front + (g.rand(B) * (m - front)).int(),
        "stores": g.permutation(B + 1)[:B],
        "last_tokens": torch.full((B + 1,), 7, device=g.device),
        "shifts": torch.full((B + 1,), -7, device=g.device),
        "out": torch.full((B, m + 2 + c.spare), float("nan"), dtype=torch.float64, device=g.device),
        "following": torch.full((B * m,), -9, device=g.device),
        "last": torch.full((B,), -9, device=g.device),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.verdict(c.B, c.m)


def reference(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, last_tokens: Tensor, shifts: Tensor,
    out: Tensor, following: Tensor, last: Tensor,
) -> None:  # fmt: skip
    B = len(front)
    m = len(drawn) // max(B, 1)
    for b in range(B):
        own, tokens = drawn[b * m : (b + 1) * m].tolist(), ids[b * m : (b + 1) * m].tolist()
        at = int(front[b])
        while at < int(stop[b]) and own[at] == tokens[at + 1]:
            at += 1
        last[b] = b * m + at
        last_tokens[stores[b]] = max(own[at], 0)
        shifts[stores[b]] = at - int(front[b])
        failed = own[at] < 0
        out[b, : m + 2] = out.new_tensor([*own, at - int(front[b]) + (not failed), failed])
    following.copy_(drawn.clamp_min(0))


op = Op("accept_drafts", CASES, TOL, inputs, cost, reference, decides=("drawn", "shifts"), dtypes=(FLOAT32,))


@functools.cache
def _kernel() -> Any:
    return build.function("accept_drafts.cu", "accept_drafts", "ppppppppppllllp")


@op.impl("cuda", when=lambda a, device: build.on_hopper("accept_drafts.cu", device, (a.out.shape[0] > 0, "a request")))
def cuda(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, last_tokens: Tensor, shifts: Tensor,
    out: Tensor, following: Tensor, last: Tensor,
) -> None:  # fmt: skip
    B, W = out.shape
    failed = _kernel()(
        drawn.contiguous().data_ptr(),
        ids.contiguous().data_ptr(),
        front.contiguous().data_ptr(),
        stop.contiguous().data_ptr(),
        stores.contiguous().data_ptr(),
        last_tokens.data_ptr(),
        shifts.data_ptr(),
        out.data_ptr(),
        following.data_ptr(),
        last.data_ptr(),
        B,
        len(drawn) // B,
        W,
        len(last_tokens),
        torch.cuda.current_stream().cuda_stream,
    )
    assert not failed, f"CUDA error {failed}: {drawn.shape=} {out.shape=}"


@op.impl("torch")
def by_columns(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, last_tokens: Tensor, shifts: Tensor,
    out: Tensor, following: Tensor, last: Tensor,
) -> None:  # fmt: skip
    B = len(front)
    m = len(drawn) // max(B, 1)
    grid, columns = drawn.view(B, m), torch.arange(m, device=drawn.device)
    right = (columns < stop[:, None]) & (grid == ids.view(B, m).roll(-1, 1))
    at = ((columns < front[:, None]) | right).cumprod(1).sum(1)
    ending = grid.gather(1, at[:, None]).squeeze(1)
    torch.add(at, torch.arange(B, device=drawn.device) * m, out=last)
    torch.clamp(drawn, min=0, out=following)
    last_tokens[stores] = ending.clamp_min(0)
    shifts[stores] = at - front
    out[:, :m] = grid
    out[:, m] = at - front + (ending >= 0)
    out[:, m + 1] = ending < 0


def accept_drafts(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, last_tokens: Tensor, shifts: Tensor,
    out: Tensor, following: Tensor, last: Tensor,
) -> None:  # fmt: skip
    T, B = len(drawn), len(front)
    assert B * (T // max(B, 1)) == T and ids.shape == following.shape == (T,), f"{drawn.shape=} {ids.shape=} {B=}"
    assert stop.shape == stores.shape == last.shape == (B,) and out.shape[0] == B, f"{stop.shape=} {out.shape=} {B=}"
    assert out.shape[1] >= T // max(B, 1) + 2 and out.dtype == torch.float64, f"{out.shape=} {out.dtype=} {T=}"
    assert drawn.dtype == ids.dtype == stores.dtype == last_tokens.dtype == torch.int64, f"{drawn.dtype=} {ids.dtype=}"
    assert front.dtype == stop.dtype == torch.int32, f"{front.dtype=} {stop.dtype=}"
    assert following.dtype == last.dtype == shifts.dtype == torch.int64, f"{following.dtype=} {last.dtype=}"
    assert shifts.shape == last_tokens.shape, f"{shifts.shape=} {last_tokens.shape=}"
    assert all(x.is_contiguous() for x in (last_tokens, shifts, out, following, last)), f"{out.stride()=}"
    op(drawn, ids, front, stop, stores, last_tokens, shifts, out, following, last)
