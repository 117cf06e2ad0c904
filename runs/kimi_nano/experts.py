"""Routed experts of a layer in training: each token's chosen experts as products over groups of rows.

A row is a token for one of its experts; rows are sorted by expert, and `torch._grouped_mm` multiplies each expert's
rows by its matrices. This takes a quarter of the arithmetic of the dense form (`model.moe_block`), but needs sorted
copies of the activations.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNED = 8  # groups begin at multiples of 8 rows: bfloat16 grouped products need 16-byte alignment


def inner(gate_up: Tensor, weights: Tensor) -> Tensor:
    """gate_up [M, 2 I], weights [M] float32 -> weighted SwiGLU [M, I]."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate.float()) * up.float() * weights[:, None]).to(gate_up.dtype)


def inner_backward(gate_up: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `inner` with respect to gate_up [M, 2 I] and weights [M]."""
    gate, up = gate_up.float().chunk(2, -1)
    share, back = torch.sigmoid(gate), upstream.float()
    silu, scaled = gate * share, back * weights[:, None]
    d_gate = scaled * up * (share + silu * (1 - share))
    return torch.cat((d_gate, scaled * silu), -1).to(gate_up.dtype), (back * silu * up).sum(-1)


def gathered(rows: Tensor, places: Tensor) -> Tensor:
    """rows [M, D] and the places [N, k] of each token's rows -> their sums [N, D]."""
    return rows[places].float().sum(1).to(rows.dtype)


@functools.cache
def compiled() -> tuple[Callable[..., Any], ...]:
    """`inner`, `inner_backward` and `gathered`, each as one kernel."""
    return tuple(torch.compile(f, dynamic=False, fullgraph=True) for f in (inner, inner_backward, gathered))


def grouped(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [N, k] -> the row of every (token, expert) pair [N, k]; the token of every row [M], 0 for padding rows
    between groups; the end of every expert's group [E] int32."""
    pairs, device = ids.flatten(), ids.device
    order = pairs.argsort(stable=True)
    counts = (pairs[:, None] == torch.arange(experts, device=device)).sum(0)
    ends = (-(-counts // ALIGNED) * ALIGNED).cumsum(0)
    moved = torch.cat((ends.new_zeros(1), ends[:-1])) - (counts.cumsum(0) - counts)  # padding rows before each group
    at = torch.arange(len(pairs), device=device) + moved[pairs[order]]
    places = torch.empty_like(order).scatter_(0, order, at)
    token = order.new_zeros(len(pairs) + experts * ALIGNED).scatter_(0, at, order // ids.shape[1])
    return places.view_as(ids), token, ends.int()


class Experts(torch.autograd.Function):
    """h [N, D], routing weights [N, E] float32, zero where not chosen, gate and up [E, I, D], down [E, D, I] -> the
    experts' weighted sum [N, D]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
        act_of, _, sums_of = compiled()
        chosen, ids = weights.topk(top, sorted=False)
        places, token, ends = grouped(ids, gate.shape[0])
        mine = chosen.new_zeros(len(token)).scatter_(0, places.flatten(), chosen.flatten())
        x, both = h[token], torch.cat((gate, up), 1)
        gate_up = torch._grouped_mm(x, both.transpose(1, 2), ends)
        act = act_of(gate_up, mine)
        y: Tensor = sums_of(torch._grouped_mm(act, down.transpose(1, 2), ends), places)
        ctx.save_for_backward(x, gate_up, mine, act, both, down, ends, token, ids, places)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        _, back_of, sums_of = compiled()
        x, gate_up, mine, act, both, down, ends, token, ids, places = ctx.saved_tensors
        rows = upstream[0][token]
        d_down = torch._grouped_mm(rows.t(), act, ends)
        d_both, d_mine = back_of(gate_up, mine, torch._grouped_mm(rows, down, ends))
        d_gate, d_up = torch._grouped_mm(d_both.t(), x, ends).chunk(2, 1)
        dh = sums_of(torch._grouped_mm(d_both, both, ends), places)
        d_weights = mine.new_zeros((len(dh), len(ends))).scatter_(1, ids, d_mine[places])
        return dh, d_weights, d_gate, d_up, d_down, None
