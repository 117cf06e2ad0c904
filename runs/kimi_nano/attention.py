"""Causal attention inside each sample of a packed stream. Two ways to the same values:

`flash`   PyTorch's FlashAttention kernel for ragged batches: CUDA, bfloat16 only
`padded`  samples gathered into rows of the longest one's length, then scaled_dot_product_attention: any device, slower
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from runs.kimi_nano.model import Attend


@dataclass(frozen=True)
class Packed:
    """The bounds of the samples in a stream."""

    starts: Tensor  # [B + 1] int32 on the device of the stream; the last is `size`
    longest: int  # tokens of the longest sample, or more
    size: int

    def positions(self) -> Tensor:
        """[size] int64: each token's place in its sample."""
        starts = self.starts.long()
        firsts = starts[:-1].repeat_interleave(starts.diff(), output_size=self.size)
        return torch.arange(self.size, device=starts.device) - firsts


def flash(packed: Packed, scale: float) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The kernel needs values as wide as keys.
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, padded, packed.starts, packed.starts, packed.longest, packed.longest, 0.0, True, False, scale=scale
        )[0]
        return out[..., : v.shape[-1]]

    return attend


def padded(packed: Packed, scale: float) -> Attend:
    starts = packed.starts.long()
    lengths = starts.diff()
    grid = starts[:-1, None] + torch.arange(packed.longest, device=starts.device)
    # Places after a sample's end hold some other token. Causality hides them from the sample, because they come later.
    inside = torch.arange(packed.longest, device=starts.device) < lengths[:, None]
    grid = grid.clamp_max(packed.size - 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [t[grid].transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale).transpose(1, 2)[inside]

    return attend


WAYS = {"flash": flash, "padded": padded}
