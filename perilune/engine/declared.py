"""Declared acceptance, to measure speed with random weights: --declared-acceptance X sets the mean tokens per step,
because almost none of their drafts would be accepted.

A step verifies its drafts as usual; then the tokens sampled for its first n drafts are replaced by those drafts, which
accepts them. n depends only on the position p at which the step begins: the step ends at the smallest floor(j X) above
p, j a whole number. With X = 2.5 steps end at 2, 5, 7, 10, ... So steps bring X tokens on average, and n is the same on
every rank, with and without CUDA graphs and chained steps, and after a preemption.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from perilune.core.step import Work
from perilune.engine.sampler import on_device


class Declared:
    """`mean`: tokens that steps bring on average; fewer where steps have too few drafts.

    `positions`: tokens of the longest request.
    """

    def __init__(self, mean: float, positions: int, device: torch.device) -> None:
        exact = Fraction(mean).limit_denominator(1000)
        # The step that begins at position p ends at the first floor(j X) above p.
        ends = [math.floor(math.ceil((p + 1) / exact) * exact) for p in range(positions)]
        self._drafts = [end - p - 1 for p, end in enumerate(ends)]
        self._table = torch.tensor(self._drafts, device=device)

    def grid(
        self, sampled: Tensor, ids: Tensor, positions: Tensor, front: Tensor, stop: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For a step inside a CUDA graph, on the device: (sampled, stop) of ops/drafts/accept_drafts.py, changed to
        accept the declared number of drafts. `positions` [B m]: of all columns."""
        B = len(front)
        own, tokens, at = sampled.view(B, -1), ids.view(B, -1), positions.view(B, -1)
        first = at.gather(1, front.long().unsqueeze(1)).squeeze(1).clamp(0, len(self._table) - 1)
        stop = torch.minimum(stop, front + self._table[first].to(front.dtype))
        column = torch.arange(own.shape[1], device=own.device)
        right = (column >= front.unsqueeze(1)) & (column < stop.unsqueeze(1)) & (own >= 0)
        return torch.where(right, tokens.roll(-1, 1), own).flatten(), stop

    def rows(self, tokens: Tensor, work: tuple[Work, ...], cut: Mapping[int, int]) -> tuple[Tensor, dict[int, int]]:
        """The same for a step without a graph. tokens [R]: the sampled ones of all works, concatenated; `cut`: drafts
        that the grammar allows, by work. Returns (tokens, drafts that may be accepted, by work)."""
        rows: list[int] = []
        ids: list[int] = []
        allowed, first = dict(cut), 0
        for i, w in enumerate(work):
            if w.drafts:
                start = min(w.start + w.count - w.drafts - 1, len(self._drafts) - 1)
                allowed[i] = n = min(self._drafts[start], cut.get(i, w.drafts))
                rows += range(first, first + n)
                ids += w.tokens[len(w.tokens) - w.drafts :][:n]
            first += w.drafts + 1
        if rows:
            at, drafts = on_device(torch.tensor([rows, ids]).numpy(), tokens.device)
            tokens = tokens.index_copy(0, at, drafts)
        return tokens, allowed
