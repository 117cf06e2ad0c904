"""Which tokens of a request each rank's KV cache holds, where it is sharded along the sequence.

A KV block of N L tokens is a stripe over N ranks: rank r holds its tokens r L to (r + 1) L - 1, L rows of the rank's
memory. So all ranks have the same block tables, prefix digests and numbers of free blocks, like one rank with blocks of
N L tokens, and every rank holds an equal share of every request's blocks.
"""

from dataclasses import dataclass

from torch import Tensor

from perilune.ops.attention.shard_rows import shard_rows


@dataclass(frozen=True, slots=True)
class KvShards:
    """Rank `rank` of `ranks`, with `tokens` of each block."""

    rank: int
    ranks: int
    tokens: int

    def rows(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As ops/attention/shard_rows: this rank's cache rows of `slots` [T], and its contexts at `positions` [T]."""
        return shard_rows(slots, positions, self.rank, self.ranks, self.tokens)
