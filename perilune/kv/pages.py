"""The paged MLA cache: per layer and token one latent (after its norm) and one rope key, shared by all heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pages:
    """`data` [layers, blocks, block_size / shards, width]; ops/layouts/latent_cache.py defines the bytes of a row. With
    KV sharded over `shards` ranks, each holds its part of the tokens of every block (dist/kv_shards.py).

    kv/blocks.py and kv/prefix.py allocate the blocks.
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
        # Not initialised: ops never read a position that was not written for the request.
        shape = layers, blocks, block_size // shards, width
        try:
            return cls(torch.empty(shape, dtype=dtype, device=device), shards)
        except RuntimeError as e:  # a limit of this process, or another program took what was free
            why = f"cannot allocate {blocks} KV blocks on {device}: {str(e).splitlines()[0]}"
            raise ConfigError(f"{why}; lower kv_blocks or memory_fraction") from e

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
