"""Which tokens of a request each rank's KV cache holds, where it is sharded along the sequence.

A KV block of N L tokens is a stripe over N ranks: rank r holds its tokens r L to (r + 1) L - 1, and in the memory of
the rank the block has L rows. So all ranks have the same block tables, prefix digests and numbers of free blocks, which
are those of one rank with blocks of N L tokens; every rank holds its share of every block, whatever the lengths of
requests; and all ranks' rows of a block, in the order of ranks, are the block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvShards:
    """Rank `rank` of `ranks`, with `tokens` of each block."""

    rank: int
    ranks: int
    tokens: int

    def slots(self, slots: Tensor) -> Tensor:
        """The rank's cache rows [T] int64 of `slots` [T], block * (ranks * tokens) + offset; -1 where another rank has
        the token, and where `slots` is below 0."""
        shard = slots // self.tokens
        own = (slots >= 0) & (shard % self.ranks == self.rank)
        return torch.where(own, shard // self.ranks * self.tokens + slots % self.tokens, -1)

    def held(self, lengths: Tensor) -> Tensor:
        """How many of the first `lengths` tokens of a request are on this rank, where they are its first rows."""
        block = self.ranks * self.tokens
        rest = lengths % block - self.rank * self.tokens
        return lengths // block * self.tokens + rest.clamp(0, self.tokens)
