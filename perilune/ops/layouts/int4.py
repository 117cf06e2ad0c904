"""INT4 weights as checkpoints hold them (docs/formats.md section 3.3), in plain torch."""

import torch
from torch import Tensor

GROUP = 32  # values that share a scale


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed [..., o, i / 8] int32, scale [..., o, i / 32] -> [..., o, i]; exact in float32, rounded once in bfloat16.

    Element k of a row is in bits 4 (k mod 8) .. + 3 of word k div 8, stored with an offset of 8.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    q = ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2) - 8
    grouped: Tensor = q.unflatten(-1, (-1, GROUP)).float() * scale.float().unsqueeze(-1)
    return grouped.flatten(-2).to(dtype)
