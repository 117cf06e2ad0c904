"""Inputs for drafting chains of S requests: block tables, positions and slots of their next k tokens.

tables [S, M] int32: the requests' blocks; last [S] int64: each request's last position, in a block of its table; pages
[blocks, block_size, ...]: from block `scratch` on they are for chains, `ahead` adjacent blocks for each request. For
request b, with p = last[b] + 1 and f = p // block_size:

  tables' [b, c] = tables[b, c] for c < f, else scratch + ahead b + min(c - f, ahead - 1)     [S, M + ahead] int32
  positions[i, b] = p + i; contexts[i, b] = p + i + 1                                         [k, S] int64, int32
  slots[i, b] = (scratch + ahead b) block_size + p % block_size + i                           [k, S] int64

and in place: pages[scratch + ahead b] = pages[tables[b, f]], if f < M. All blocks exist in `pages`. "cuda" is one
launch in place of about 25. It does not let the next kernel start early (see argmax_probability.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses

Branches = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case(Sized):
    S: int
    M: int
    block_size: int = 64
    ahead: int = 2
    k: int = 7
    width: int = NANO.latent + NANO.rope


CASES = [
    *(Case(s, 32) for s in (1, 4, 16)),
    Case(1, 2048, big=True),
    Case(0, 4),
    Case(3, 5, 4, 3, 1, 8),
    Case(40, 3, 1, 8, 8, 12),
]
TOL = {name: exact() for name in ("tables_ahead", "positions", "slots", "contexts", "pages")}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    blocks = c.S * c.M + 1
    return {
        "tables": g.permutation(blocks)[: c.S * c.M].view(c.S, c.M).int(),
        "last": g.integers(0, c.M * c.block_size, c.S),
        "pages": g.randn(blocks + c.S * c.ahead, c.block_size, c.width),
        "scratch": blocks,
        "ahead": c.ahead,
        "k": c.k,
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.branch(c.S, c.M, c.block_size * c.width * dtype.itemsize, c.k)


def reference(tables: Tensor, last: Tensor, pages: Tensor, scratch: int, ahead: int, k: int) -> Branches:
    (S, M), size = tables.shape, pages.shape[1]
    found = torch.zeros(S, M + ahead, dtype=torch.int32)
    positions, slots = torch.zeros(k, S, dtype=torch.int64), torch.zeros(k, S, dtype=torch.int64)
    for b in range(S):
        p, own = int(last[b]) + 1, scratch + ahead * b
        f = p // size
        for c in range(M + ahead):
            found[b, c] = tables[b, c] if c < f else own + min(c - f, ahead - 1)
        if f < M:
            pages[own] = pages[int(tables[b, f])]
        for i in range(k):
            positions[i, b], slots[i, b] = p + i, own * size + p % size + i
    found, positions, slots = (t.to(tables.device) for t in (found, positions, slots))
    return found, positions, slots, (positions + 1).int()


op = Op("draft_tables", CASES, TOL, inputs, cost, reference, decides=("tables", "pages"))


_kernel = build.launcher("draft_tables.cu", "draft_tables", "ppppppplllllllp")


def _block_bytes(pages: Tensor) -> int:
    return pages[0].numel() * pages.element_size()


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "draft_tables.cu",
        device,
        (a.tables.shape[0] > 0, "a request"),
        (_block_bytes(a.pages) % 16 == 0, "blocks of 16 bytes"),
    ),
)
def cuda(tables: Tensor, last: Tensor, pages: Tensor, scratch: int, ahead: int, k: int) -> Branches:
    (S, M), device = tables.shape, tables.device
    found = torch.empty(S, M + ahead, dtype=torch.int32, device=device)
    positions, slots = torch.empty(2, k, S, dtype=torch.int64, device=device)
    contexts = torch.empty(k, S, dtype=torch.int32, device=device)
    failed = _kernel()(
        *addresses(tables, last, pages, found, positions, slots, contexts),
        S,
        M,
        scratch,
        ahead,
        k,
        pages.shape[1],
        _block_bytes(pages),
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {tables.shape=} {pages.shape=}"
    return found, positions, slots, contexts


@op.impl("torch")
def by_columns(tables: Tensor, last: Tensor, pages: Tensor, scratch: int, ahead: int, k: int) -> Branches:
    (S, M), size, device = tables.shape, pages.shape[1], tables.device
    begin = last + 1
    own, first = scratch + ahead * torch.arange(S, device=device), begin // size
    # If the table ends before that block, copy the scratch block to itself.
    block = tables.gather(1, first.clamp_max(M - 1)[:, None]).squeeze(1).long()
    pages[own] = pages[torch.where(first < M, block, own)]
    padded = torch.nn.functional.pad(tables, (0, ahead))
    beyond = torch.arange(M + ahead, device=device) - first[:, None]
    found = torch.where(beyond < 0, padded, beyond.clamp(0, ahead - 1) + own[:, None]).int()
    positions = begin + torch.arange(k, device=device)[:, None]
    return found, positions, own * size + positions - first * size, (positions + 1).int()


def draft_tables(tables: Tensor, last: Tensor, pages: Tensor, scratch: int, ahead: int, k: int) -> Branches:
    S = len(tables)
    assert tables.dtype == torch.int32 and last.dtype == torch.int64 and last.shape == (S,), f"{last.shape=}"
    assert tables.is_contiguous() and last.is_contiguous() and pages.is_contiguous() and tables.shape[1] > 0
    assert ahead > 0 and k > 0 and len(pages) >= scratch + ahead * S, f"{pages.shape=} {scratch=} {ahead=} {S=}"
    found: Branches = op(tables, last, pages, scratch, ahead, k)
    return found
