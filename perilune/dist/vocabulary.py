"""Embedding, and choosing among logits, where every rank has a part of the vocabulary: V / N rows of the table, V / N
columns of the logits, rank by rank. Every rank gets the same tokens, and they are the ones that one rank would choose.

Greedy choices exchange the largest logit of each rank. Choices with a top_k of up to MAX_CANDIDATES exchange that many
candidates of each rank. All others gather the logits of all ranks.
"""

import torch
from torch import Tensor

from perilune.dist.group import ALONE, Group
from perilune.ops.drafts import argmax_probability
from perilune.ops.pointwise.embed import embed
from perilune.ops.sampling import argmax, sample

MAX_CANDIDATES = 64  # of a rank and row. More: longer exchanges for requests with a small top_k.


class Vocabulary:
    """A vocabulary of `size` tokens, split over the ranks of `group`; with one rank it is whole."""

    def __init__(self, group: Group, size: int) -> None:
        self._group, self.size = group, size
        self.split = group.ranks > 1
        self._own = group.slicing.part(size)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """ids [T] int64 -> this rank's part of [T, D]: zeros for ids of other ranks; table [V / N, D]."""
        inside = (ids >= self._own.start) & (ids < self._own.stop)
        rows = embed((ids - self._own.start).clamp(0, len(table) - 1), table)
        return torch.where(inside.unsqueeze(1), rows, 0)

    def whole(self, logits: Tensor) -> Tensor:
        """Gathers the logits of all ranks: [R, V / N] -> [R, V]."""
        return self._group.gather(logits).transpose(0, 1).flatten(1) if self.split else logits

    def argmax(self, logits: Tensor) -> Tensor:
        """As ops/sampling/argmax, of [R, V / N]."""
        if not self.split:
            return argmax.argmax(logits)
        return self._largest(logits)[0]

    def sample(self, logits: Tensor, how: tuple[Tensor, Tensor, Tensor, Tensor], u: Tensor, *, narrow: bool) -> Tensor:
        """As ops/sampling/sample, of [R, V / N], with `how` = (temperature, top_k, top_p, min_p), [R] each. `narrow`:
        every row is greedy or has a top_k of 1 to MAX_CANDIDATES."""
        if not (self.split and narrow):
            return sample.sample(self.whole(logits), *how, u)
        temperature, top_k, top_p, min_p = how
        _, best = self._largest(logits)
        # As `sample` orders them, after its rounding: by z, equal ones by id.
        z = sample.scaled(logits, torch.where(temperature == 0, 1.0, temperature), best.unsqueeze(1))
        bits = (z + 0.0).view(torch.int32)
        falling = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
        count = logits.shape[1]
        index = (falling - torch.arange(count, device=z.device)).topk(min(MAX_CANDIDATES, count))[1].sort(1)[0]
        own = torch.stack([logits.gather(1, index).double(), (index + self._own.start).double()])
        values, ids = self._group.gather(own).permute(1, 2, 0, 3).flatten(2)  # [R, N candidates], ids ascending
        # A row with one nan or infinity has no answer, even if its candidates do not show it.
        values = torch.where(best.isfinite().unsqueeze(1), values, torch.nan).float()
        chosen = sample.sample(values, temperature, top_k, top_p, min_p, u)
        found = ids.gather(1, chosen.clamp_min(0).unsqueeze(1)).squeeze(1).long()
        return torch.where(chosen < 0, -1, found)

    def argmax_probability(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As ops/drafts/argmax_probability, of [S, V / N]."""
        if not self.split:
            return argmax_probability.argmax_probability(logits)
        own = logits.amax(1)
        sums = (logits - own.nan_to_num(neginf=0.0).unsqueeze(1)).exp().sum(1)  # 0 where all logits are -inf
        # One exchange: every rank's sum is relative to its own largest logit.
        found = self._gathered(logits, own, sums)
        ids, best = self._first(found)
        values, _, parts = found.unbind(1)
        return ids.clamp_min(0), torch.where(ids < 0, 0, 1 / (parts * (values - best).exp()).sum(0)).float()

    def _largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(the id [R] of the largest logit of all ranks, the lowest of equal ones, -1 if it is not finite; that logit
        [R]: nan if any is)."""
        ids, best = self._first(self._gathered(logits, logits.amax(1)))
        return ids, best.float()

    def _gathered(self, logits: Tensor, best: Tensor, *more: Tensor) -> Tensor:
        """[ranks, 2 or more, R] float64: every rank's `best` [R], its id, `more`."""
        ids = argmax.argmax(logits).clamp_min(0) + self._own.start
        return self._group.gather(torch.stack([t.double() for t in (best, ids, *more)]))

    def _first(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """As `_largest`; the logit in float64."""
        best = gathered[:, 0].amax(0)
        first = torch.where(gathered[:, 0] == best, gathered[:, 1], self.size).amin(0).long()
        return torch.where(best.isfinite(), first, -1), best


ONE_RANK = Vocabulary(ALONE, 0)
