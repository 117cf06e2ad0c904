"""Accepts drafts on the device: the rule of speculation/acceptance.py for a grid of B requests with m columns.

drawn, ids [B m] int64: the token sampled at each column (negative: its logits were not finite), and the column's input
token; front, stop [B] int32; stores [B] int64: the slot of each request. Columns of request b before front[b] are
padding. Columns after it, up to stop[b] <= m - 1, hold drafts that may be accepted: the draft after column j is
ids[j + 1] if j < stop[b]. Let a >= front[b] be the first column with no draft after it, or with one that differs from
the token sampled at a. Written in place:
  last[b] = b m + a; following[b m + j] = max(drawn[b m + j], 0); last_tokens[stores[b]] = max(drawn[b m + a], 0);
  shifts[stores[b]] = a - front[b], the number of accepted drafts;
  out[b, :m + 2] = drawn[b m .. b m + m - 1], the number of valid tokens (a - front[b], and one more unless drawn[a] is
  negative), and 1.0 if drawn[a] is negative, else 0.0.
Stores are distinct, except the padding slot.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.drafts.continuation import Continuation
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, Make, Sized, exact
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Results of a step: out [B, W] float64 for the host, W >= m + 2; following [B m] and last [B] int64 for a draft
    model. float64 holds ids exactly."""

    out: Tensor
    following: Tensor
    last: Tensor


@dataclass(frozen=True)
class Case(Sized):
    B: int
    m: int
    spare: int = 0  # further columns of `out`, which are for the draft model's chains and must stay as they are


CASES = [
    *(Case(b, m, 16) for b in (1, 16, 256) for m in (1, 4)),
    Case(0, 1),
    Case(3, 9),
    Case(40, 9, 1),
    Case(300, 2),
]
TOL = {name: exact() for name in ("state.last_tokens", "state.shifts", "report.out", "report.following", "report.last")}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    B, m = c.B, c.m
    ids = g.integers(0, 3, B, m)  # of 3 tokens, so that many drafts are accepted
    drawn = g.integers(-1, 3, B, m)
    drawn[:, :-1] = torch.where(g.rand(B, m - 1) < 0.5, ids[:, 1:], drawn[:, :-1])
    front = (g.rand(B) * m).int()
    return {
        "drawn": drawn.flatten(),
        "ids": ids.flatten(),
        "front": front,
        "stop": front + (g.rand(B) * (m - front)).int(),
        "stores": g.permutation(B + 1)[:B],
        "state": Continuation(
            torch.full((B + 1,), 7, device=g.device),
            torch.full((B + 1,), -7, device=g.device),
            torch.full((B + 1, 1), -8, device=g.device),
        ),
        "report": Report(
            torch.full((B, m + 2 + c.spare), float("nan"), dtype=torch.float64, device=g.device),
            torch.full((B * m,), -9, device=g.device),
            torch.full((B,), -9, device=g.device),
        ),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.acceptance(c.B, c.m)


def reference(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, state: Continuation, report: Report
) -> None:
    B = len(front)
    m = len(drawn) // max(B, 1)
    for b in range(B):
        own, tokens = drawn[b * m : (b + 1) * m].tolist(), ids[b * m : (b + 1) * m].tolist()
        at = int(front[b])
        while at < int(stop[b]) and own[at] == tokens[at + 1]:
            at += 1
        report.last[b] = b * m + at
        state.last_tokens[stores[b]] = max(own[at], 0)
        state.shifts[stores[b]] = at - int(front[b])
        failed = own[at] < 0
        report.out[b, : m + 2] = report.out.new_tensor([*own, at - int(front[b]) + (not failed), failed])
    report.following.copy_(drawn.clamp_min(0))


op = Op("accept_drafts", CASES, TOL, inputs, cost, reference, decides=("drawn", "front"), dtypes=(FLOAT32,))


_kernel = build.launcher("accept_drafts.cu", "accept_drafts", "ppppppppppllllp")


@op.impl(
    "cuda", when=lambda a, device: build.on_hopper("accept_drafts.cu", device, (a.front.shape[0] > 0, "a request"))
)
def cuda(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, state: Continuation, report: Report
) -> None:
    B, W = report.out.shape
    failed = _kernel()(
        *addresses(*(t.contiguous() for t in (drawn, ids, front, stop, stores))),
        *addresses(state.last_tokens, state.shifts, report.out, report.following, report.last),
        B,
        len(drawn) // B,
        W,
        len(state.last_tokens),
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {drawn.shape=} {report.out.shape=}"


@op.impl("torch")
def by_columns(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, state: Continuation, report: Report
) -> None:
    B = len(front)
    m = len(drawn) // max(B, 1)
    grid, columns = drawn.view(B, m), torch.arange(m, device=drawn.device)
    right = (columns < stop[:, None]) & (grid == ids.view(B, m).roll(-1, 1))
    at = ((columns < front[:, None]) | right).cumprod(1).sum(1)
    ending = grid.gather(1, at[:, None]).squeeze(1)
    torch.add(at, torch.arange(B, device=drawn.device) * m, out=report.last)
    torch.clamp(drawn, min=0, out=report.following)
    state.last_tokens[stores] = ending.clamp_min(0)
    state.shifts[stores] = at - front
    report.out[:, :m] = grid
    report.out[:, m] = at - front + (ending >= 0)
    report.out[:, m + 1] = ending < 0


def accept_drafts(
    drawn: Tensor, ids: Tensor, front: Tensor, stop: Tensor, stores: Tensor, state: Continuation, report: Report
) -> None:
    T, B = len(drawn), len(front)
    out, following, last = report.out, report.following, report.last
    assert B * (T // max(B, 1)) == T and ids.shape == following.shape == (T,), f"{drawn.shape=} {ids.shape=} {B=}"
    assert stop.shape == stores.shape == last.shape == (B,) and out.shape[0] == B, f"{stop.shape=} {out.shape=} {B=}"
    assert out.shape[1] >= T // max(B, 1) + 2 and out.dtype == torch.float64, f"{out.shape=} {out.dtype=} {T=}"
    assert drawn.dtype == ids.dtype == stores.dtype == torch.int64, f"{drawn.dtype=} {ids.dtype=} {stores.dtype=}"
    assert front.dtype == stop.dtype == torch.int32, f"{front.dtype=} {stop.dtype=}"
    assert following.dtype == last.dtype == torch.int64, f"{following.dtype=} {last.dtype=}"
    assert all(x.is_contiguous() for x in (out, following, last)), f"{out.stride()=}"
    state.check()
    op(drawn, ids, front, stop, stores, state, report)
