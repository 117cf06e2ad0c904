"""Where decoding goes on whose last step the host has not read yet: a grid of B requests, m columns each, in place.

ids, positions, slots [B, m] int64; u [B, m] float64; context, front, chained [B] int32; tables [B, M] int32; rows,
seeds, draws [B] int64; last_tokens, shifts [N] and drafts [N, K] int64, K >= m - 1. Request b's own columns are
front[b] .. m - 1. Where chained[b] is not 0 they were filled in as if the step before had brought one token. With
r = rows[b] it brought s = shifts[r] more, the last of all was last_tokens[r], and what may follow that is drafts[r].
Then

  context[b] += s; positions[b, j] += s; ids[b, j] = last_tokens[r] for j <= front[b], else drafts[r, j - front[b] - 1];
  slots[b, j] = tables[b, p // block_size] block_size + p % block_size with p = positions[b, j], where it was not -1;
  u[b, j] = random number `draws[b] + s + j - front[b]` of seeds[b], of own columns: engine/sampler's `uniform`.

Other requests stay as they are. Rows outside the buffers leave a request as it is; positions beyond its table get -1.
"cuda" is one launch.
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

_SEED, _DRAW, _MIX = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ALL = (1 << 64) - 1


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
TOL = {name: exact() for name in ("ids", "positions", "slots", "u", "context")}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    B, m = c.B, c.m
    front = (g.rand(B) * m).int()
    own = torch.arange(m, device=g.device) >= front[:, None]
    start = (g.rand(B) * max(c.M * c.block_size - m - 8, 1)).long()
    return {
        "ids": torch.where(own, -1, 5),
        "positions": start[:, None] + torch.arange(m, device=g.device),
        "slots": torch.where(own, 0, -1),
        "u": g.rand(B, m, dtype=torch.float64),
        "context": (start + m).int(),
        "front": front,
        "chained": g.integers(0, 3, B, dtype=torch.int32),
        "tables": g.integers(0, 1000, B, c.M, dtype=torch.int32),
        "rows": g.permutation(B + 3)[:B] - 1,
        "seeds": g.integers(-(2**63), 2**63 - 1, B),
        "draws": g.integers(0, 1 << 20, B),
        "last_tokens": g.integers(0, 1 << 17, B + 1),
        "shifts": g.integers(0, 9, B + 1),
        "drafts": g.integers(0, 1 << 17, B + 1, 8),
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


def reference(
    ids: Tensor, positions: Tensor, slots: Tensor, u: Tensor, context: Tensor, front: Tensor, chained: Tensor,
    tables: Tensor, rows: Tensor, seeds: Tensor, draws: Tensor, last_tokens: Tensor, shifts: Tensor, drafts: Tensor,
    block_size: int,
) -> None:  # fmt: skip
    B, m = ids.shape
    for b in range(B):
        r, first = int(rows[b]), int(front[b])
        if not chained[b] or not 0 <= r < len(shifts):
            continue
        s = int(shifts[r])
        context[b] += s
        for j in range(m):
            positions[b, j] += s
            block, rest = divmod(int(positions[b, j]), block_size)
            if slots[b, j] >= 0:
                slots[b, j] = int(tables[b, block]) * block_size + rest if block < tables.shape[1] else -1
            ids[b, j] = last_tokens[r] if j <= first else drafts[r, j - first - 1]
            if j >= first:
                u[b, j] = _uniform(int(seeds[b]), int(draws[b]) + s + j - first)


op = Op("advance_inputs", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


@functools.cache
def _kernel() -> Any:
    return build.function("advance_inputs.cu", "advance_inputs", "ppppppppppppppllllllp")


@op.impl("cuda", when=lambda a, device: build.on_hopper("advance_inputs.cu", device, (a.ids.shape[0] > 0, "a request")))
def cuda(
    ids: Tensor, positions: Tensor, slots: Tensor, u: Tensor, context: Tensor, front: Tensor, chained: Tensor,
    tables: Tensor, rows: Tensor, seeds: Tensor, draws: Tensor, last_tokens: Tensor, shifts: Tensor, drafts: Tensor,
    block_size: int,
) -> None:  # fmt: skip
    failed = _kernel()(
        ids.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        u.data_ptr(),
        context.data_ptr(),
        front.data_ptr(),
        chained.data_ptr(),
        tables.data_ptr(),
        rows.data_ptr(),
        seeds.data_ptr(),
        draws.data_ptr(),
        last_tokens.data_ptr(),
        shifts.data_ptr(),
        drafts.data_ptr(),
        *ids.shape,
        tables.shape[1],
        *drafts.shape,
        block_size,
        torch.cuda.current_stream().cuda_stream,
    )
    assert not failed, f"CUDA error {failed}: {ids.shape=} {tables.shape=}"


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Without the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@op.impl("torch")
def by_grid(
    ids: Tensor, positions: Tensor, slots: Tensor, u: Tensor, context: Tensor, front: Tensor, chained: Tensor,
    tables: Tensor, rows: Tensor, seeds: Tensor, draws: Tensor, last_tokens: Tensor, shifts: Tensor, drafts: Tensor,
    block_size: int,
) -> None:  # fmt: skip
    B, m = ids.shape
    if not B:
        return
    known = (chained != 0) & (rows >= 0) & (rows < len(shifts))
    r = rows.clamp(0, len(shifts) - 1)
    s = torch.where(known, shifts[r], 0)
    own = torch.arange(m, device=ids.device) - front[:, None]  # from 0 on
    context += s.int()
    positions += s[:, None]
    blocks = positions // block_size
    places = tables.gather(1, blocks.clamp(0, tables.shape[1] - 1)).long() * block_size + positions % block_size
    places.masked_fill_(blocks >= tables.shape[1], -1)
    slots.copy_(torch.where(known[:, None] & (slots >= 0), places, slots))
    tokens = torch.cat([last_tokens[r][:, None], drafts[r]], 1).gather(1, own.clamp_min(0))
    ids.copy_(torch.where(known[:, None], tokens, ids))
    z = seeds[:, None] * _signed(_SEED) + (draws[:, None] + s[:, None] + own + 1) * _signed(_DRAW)
    for _ in range(2):
        z = (z ^ _shifted(z, 30)) * _signed(_MIX[0])
        z = (z ^ _shifted(z, 27)) * _signed(_MIX[1])
        z = z ^ _shifted(z, 31)
    u.copy_(torch.where(known[:, None] & (own >= 0), _shifted(z, 11).double() / (1 << 53), u))


def advance_inputs(
    ids: Tensor, positions: Tensor, slots: Tensor, u: Tensor, context: Tensor, front: Tensor, chained: Tensor,
    tables: Tensor, rows: Tensor, seeds: Tensor, draws: Tensor, last_tokens: Tensor, shifts: Tensor, drafts: Tensor,
    block_size: int,
) -> None:  # fmt: skip
    B, m = ids.shape
    grid, each, by_row = (ids, positions, slots, u), (context, front, chained), (rows, seeds, draws)
    assert all(x.shape == (B, m) for x in grid) and all(x.shape == (B,) for x in (*each, *by_row)), f"{ids.shape=}"
    assert len(tables) == B and last_tokens.shape == shifts.shape == drafts.shape[:1], (
        f"{tables.shape=} {drafts.shape=}"
    )
    assert drafts.shape[1] >= m - 1 and block_size > 0, f"{drafts.shape=} {m=} {block_size=}"
    assert u.dtype == torch.float64 and all(x.dtype == torch.int32 for x in (*each, tables)), f"{u.dtype=}"
    ints = (ids, positions, slots, *by_row, last_tokens, shifts, drafts)
    assert all(x.dtype == torch.int64 for x in ints), [x.dtype for x in ints]
    assert all(x.is_contiguous() for x in (*grid, *each, tables, *ints)), "views must be contiguous"
    op(
        ids, positions, slots, u, context, front, chained, tables, rows, seeds, draws, last_tokens, shifts, drafts,
        block_size,
    )  # fmt: skip
