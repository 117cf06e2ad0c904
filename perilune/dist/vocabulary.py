"""Sampling from logits that are split by vocabulary: each of N ranks has V / N columns. Every rank gets the same
tokens, those that one rank with all columns would sample.

Ranks exchange whole rows of logits, 4 V / N bytes per row to every other rank, and then sample with the same ops as one
rank. Candidates alone would take fewer bytes, but need a first exchange for the largest logit, and top_p without top_k
needs all logits. If there are few rows, every rank gets and samples all of them. Else each rank gets and samples an
equal share of the rows; a second exchange gives the tokens to all ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from perilune.dist.group import ALONE, Group, exchanged
from perilune.ops.drafts import argmax_probability
from perilune.ops.sampling import argmax, sample

# With fewer rows per rank every rank samples all rows: the first exchange is so short that a second one costs more than
# it saves.
MIN_SHARE_ROWS = 4


class Vocabulary:
    """A vocabulary of `size` tokens, split over the ranks of `group`; with one rank it is whole."""

    def __init__(self, group: Group, size: int) -> None:
        self._group = group
        self.split = group.ranks > 1
        self.first = group.slicing.part(size).start  # the id of this rank's first column

    def whole(self, logits: Tensor) -> Tensor:
        """Gathers the logits of all ranks: [R, V / N] -> [R, V]."""
        return self._joined(exchanged(self._group, logits.reshape(1, -1)), len(logits)) if self.split else logits

    def argmax(self, logits: Tensor) -> Tensor:
        """As ops/sampling/argmax, of [R, V / N]."""
        return self._chosen(argmax.argmax, logits)

    def sample(self, logits: Tensor, how: tuple[Tensor, Tensor, Tensor, Tensor], u: Tensor) -> Tensor:
        """As ops/sampling/sample, of [R, V / N], with `how` = (temperature, top_k, top_p, min_p), [R] each."""
        return self._chosen(sample.sample, logits, *how, u)

    def argmax_probability(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As ops/drafts/argmax_probability, of [S, V / N]."""
        if not self._shared_out(len(logits)):
            return argmax_probability.argmax_probability(self.whole(logits))

        def both(rows: Tensor) -> Tensor:  # ids travel as the bits of float64, which no arithmetic changes
            ids, probability = argmax_probability.argmax_probability(rows)
            return torch.stack([ids.view(torch.float64), probability.double()], 1)

        ids, probability = self._chosen(both, logits).unbind(1)
        return ids.view(torch.int64), probability.float()

    def _chosen(self, choose: Callable[..., Tensor], logits: Tensor, *columns: Tensor) -> Tensor:
        """choose(logits [R, V], *columns) -> [R, ...] of 8-byte values, with columns [R]; `logits` [R, V / N]."""
        if not self._shared_out(len(logits)):
            return choose(self.whole(logits), *columns)
        ranks, each = self._group.ranks, len(logits) // self._group.ranks
        rows = self._joined(exchanged(self._group, logits.reshape(ranks, -1)), each)
        first = self._group.slicing.rank * each
        found = choose(rows, *(column[first : first + each] for column in columns))
        return exchanged(self._group, found.view(1, -1)).view(len(logits), *found.shape[1:])

    def _shared_out(self, rows: int) -> bool:
        """Whether each rank samples for an equal share of the rows. A share must be an even number of rows, because
        tokens (8 bytes each) are exchanged in multiples of 16 bytes."""
        ranks = self._group.ranks
        return self.split and rows >= MIN_SHARE_ROWS * ranks and rows % (2 * ranks) == 0

    @staticmethod
    def _joined(parts: Tensor, rows: int) -> Tensor:
        """Every rank's columns of `rows` rows, [ranks, rows V / N] -> [rows, V]."""
        return parts.view(len(parts), rows, -1).transpose(0, 1).flatten(1)


ONE_RANK = Vocabulary(ALONE, 0)
