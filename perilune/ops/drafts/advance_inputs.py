"""Completes the inputs of a chained step, planned before the host has read the step before: B requests, m columns each.

ids [B, m] int64 and tensors of `columns` and `requests` are changed in place. Request b has the columns front[b] ..
m - 1; those before are padding. If chained[b] is not 0, the host has filled them as if the step before had produced one
token for b. It produced s = shifts[r] tokens more, with r = rows[b]; the last one is last_tokens[r], and drafts[r] are
the K >= m - 1 drafts that follow it. Then

  context[b] += s; positions[b, j] += s; ids[b, j] = last_tokens[r] for j <= front[b], else drafts[r, j - front[b] - 1];
  slots[b, j] = tables[b, p // block_size] block_size + p % block_size with p = positions[b, j], where it was not -1;
  u[b, j] = random number `draws[b] + s + j - front[b]` of seeds[b], of own columns: engine/sampler's `uniform`.

Requests with chained 0 or with r outside the buffers do not change. Positions beyond the table get slot -1.
"cuda" is one launch.
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

_SEED, _DRAW, _MIX = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ALL = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Of every column: position and slot [B, m] int64 of its token, random number u [B, m] float64 for its sample."""

    positions: Tensor
    slots: Tensor
    u: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Of every request: context [B] int32, tokens in the cache after the step; front [B] int32, its first own column;
    chained [B] int32, not 0 if the host has not read its last step; tables [B, M] int32, its blocks; rows [B] int64,
    its slot; seeds and draws [B] int64: seed of its random numbers, and the number of tokens that it has sampled."""

    context: Tensor
    front: Tensor
    chained: Tensor
    tables: Tensor
    rows: Tensor
    seeds: Tensor
    draws: Tensor


@dataclass(frozen=True)
class Case(Sized):
    B: int
    m: int
    M: int = 32
    block_size: int = 64


CASES = [
    *(Case(b, m) for b in (1, 16, 256) for m in (1, 4, 9)),
    Case(0, 3),
    Case(3, 9, 5, 1),
    Case(40, 2, 1, 16),
]
TOL = {name: exact() for name in ("ids", "columns.positions", "columns.slots", "columns.u", "requests.context")}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    B, m = c.B, c.m
    front = (g.rand(B) * m).int()
    own = torch.arange(m, device=g.device) >= front[:, None]
    start = (g.rand(B) * max(c.M * c.block_size - m - 8, 1)).long()
    return {
        "ids": torch.where(own, -1, 5),
        "columns": Columns(
            start[:, None] + torch.arange(m, device=g.device),
            torch.where(own, 0, -1),
            g.rand(B, m, dtype=torch.float64),
        ),
        "requests": Requests(
            (start + m).int(),
            front,
            g.integers(0, 3, B, dtype=torch.int32),
            g.integers(0, 1000, B, c.M, dtype=torch.int32),
            g.permutation(B + 3)[:B] - 1,
            g.integers(-(2**63), 2**63 - 1, B),
            g.integers(0, 1 << 20, B),
        ),
        "state": Continuation(g.integers(0, 1 << 17, B + 1), g.integers(0, 9, B + 1), g.integers(0, 1 << 17, B + 1, 8)),
        "block_size": c.block_size,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.resume(c.B, c.m)


def _uniform(seed: int, draw: int) -> float:
    z = (seed * _SEED + (draw + 1) * _DRAW) & _ALL
    for _ in range(2):
        z = ((z ^ (z >> 30)) * _MIX[0]) & _ALL
        z = ((z ^ (z >> 27)) * _MIX[1]) & _ALL
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


def reference(ids: Tensor, columns: Columns, requests: Requests, state: Continuation, block_size: int) -> None:
    (B, m), q = ids.shape, requests
    positions, slots, u = columns.positions, columns.slots, columns.u
    for b in range(B):
        r, first = int(q.rows[b]), int(q.front[b])
        if not q.chained[b] or not 0 <= r < len(state.shifts):
            continue
        s = int(state.shifts[r])
        q.context[b] += s
        for j in range(m):
            positions[b, j] += s
            block, rest = divmod(int(positions[b, j]), block_size)
            if slots[b, j] >= 0:
                slots[b, j] = int(q.tables[b, block]) * block_size + rest if block < q.tables.shape[1] else -1
            ids[b, j] = state.last_tokens[r] if j <= first else state.drafts[r, j - first - 1]
            if j >= first:
                u[b, j] = _uniform(int(q.seeds[b]), int(q.draws[b]) + s + j - first)


op = Op("advance_inputs", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


_kernel = build.launcher("advance_inputs.cu", "advance_inputs", "ppppppppppppppllllllp")


@op.impl("cuda", when=lambda a, device: build.on_hopper("advance_inputs.cu", device, (a.ids.shape[0] > 0, "a request")))
def cuda(ids: Tensor, columns: Columns, requests: Requests, state: Continuation, block_size: int) -> None:
    failed = _kernel()(
        *addresses(ids, columns.positions, columns.slots, columns.u),
        *addresses(requests.context, requests.front, requests.chained, requests.tables),
        *addresses(requests.rows, requests.seeds, requests.draws),
        *addresses(state.last_tokens, state.shifts, state.drafts),
        *ids.shape,
        requests.tables.shape[1],
        *state.drafts.shape,
        block_size,
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {ids.shape=} {requests.tables.shape=}"


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift right: zeros are shifted in, not sign bits."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@op.impl("torch")
def by_grid(ids: Tensor, columns: Columns, requests: Requests, state: Continuation, block_size: int) -> None:
    (B, m), q = ids.shape, requests
    if not B:
        return
    positions, slots, u, tables, N = columns.positions, columns.slots, columns.u, q.tables, len(state.shifts)
    known = (q.chained != 0) & (q.rows >= 0) & (q.rows < N)
    r = q.rows.clamp(0, N - 1)
    s = torch.where(known, state.shifts[r], 0)
    own = torch.arange(m, device=ids.device) - q.front[:, None]  # index of an own column; below 0: not own
    q.context.add_(s.int())
    positions.add_(s[:, None])
    blocks = positions // block_size
    places = tables.gather(1, blocks.clamp(0, tables.shape[1] - 1)).long() * block_size + positions % block_size
    places.masked_fill_(blocks >= tables.shape[1], -1)
    slots.copy_(torch.where(known[:, None] & (slots >= 0), places, slots))
    tokens = torch.cat([state.last_tokens[r][:, None], state.drafts[r]], 1).gather(1, own.clamp_min(0))
    ids.copy_(torch.where(known[:, None], tokens, ids))
    z = q.seeds[:, None] * _signed(_SEED) + (q.draws[:, None] + s[:, None] + own + 1) * _signed(_DRAW)
    for _ in range(2):
        z = (z ^ _shifted(z, 30)) * _signed(_MIX[0])
        z = (z ^ _shifted(z, 27)) * _signed(_MIX[1])
        z = z ^ _shifted(z, 31)
    u.copy_(torch.where(known[:, None] & (own >= 0), _shifted(z, 11).double() / (1 << 53), u))


def advance_inputs(ids: Tensor, columns: Columns, requests: Requests, state: Continuation, block_size: int) -> None:
    (B, m), q, drafts = ids.shape, requests, state.drafts
    grid, by_request = (ids, columns.positions, columns.slots, columns.u), (q.context, q.front, q.chained)
    by_slot = (q.rows, q.seeds, q.draws)
    assert all(x.shape == (B, m) for x in grid), [x.shape for x in grid]
    assert all(x.shape == (B,) for x in (*by_request, *by_slot)) and len(q.tables) == B, f"{ids.shape=}"
    assert drafts.shape[1] >= m - 1 and block_size > 0, f"{drafts.shape=} {m=} {block_size=}"
    assert columns.u.dtype == torch.float64, f"{columns.u.dtype=}"
    assert all(x.dtype == torch.int32 for x in (*by_request, q.tables)), [x.dtype for x in by_request]
    assert all(x.dtype == torch.int64 for x in (*grid[:3], *by_slot)), [x.dtype for x in (*grid[:3], *by_slot)]
    assert all(x.is_contiguous() for x in (*grid, *by_request, q.tables, *by_slot)), "views must be contiguous"
    state.check()
    op(ids, columns, requests, state, block_size)
