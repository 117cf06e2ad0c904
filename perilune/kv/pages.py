"""The paged MLA cache: per layer and token one latent (after its norm) and one rope key, shared by all heads."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """`data` [layers, blocks, block_size / shards, width], its rows as ops/layouts/latent_cache.py has them: of each
    block the tokens of this one of `shards` ranks (dist/kv_shards.py).

    Which block belongs to whom is kv.blocks' business.
    """

    data: Tensor
    shards: int = 1

    @classmethod
    def allocate(
        cls,
        layers: int,
        blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        shards: int = 1,
    ) -> "Pages":
        # Left as it comes: ops never read a position that no token of the request was written to.
        return cls(torch.empty(layers, blocks, block_size // shards, width, dtype=dtype, device=device), shards)

    @staticmethod
    def block_bytes(layers: int, block_size: int, width: int, dtype: torch.dtype, shards: int = 1) -> int:
        return layers * (block_size // shards) * width * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        return self.data.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens of a block, on all ranks together."""
        return self.data.shape[2] * self.shards
