"""Rows of the latent cache: R latent values and r rope values side by side, of a float type, or packed into bytes.

A packed row (of a uint8 cache) is R e4m3 and then r bfloat16, R + 2 r bytes. Latents beyond e4m3's 448 become 448;
loading/fp8_latents.py scales weights so that latents stay below that, and far above e4m3's smallest number.
"""

import torch
from torch import Tensor

from perilune.ops.harness.case import BFLOAT16, FLOAT32

PACKED = torch.uint8
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # e4m3's largest number


def width(R: int, r: int, dtype: torch.dtype) -> int:
    """Elements of a row of a cache of `dtype`."""
    return R + 2 * r if dtype == PACKED else R + r


def pack(c: Tensor, k_pe: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] of `dtype` from c [..., R] and k_pe [..., r]."""
    if dtype != PACKED:
        return torch.cat([c, k_pe], -1).to(dtype)
    latent = c.float().clamp(-LARGEST, LARGEST).to(E4M3).view(PACKED)
    return torch.cat([latent, k_pe.to(BFLOAT16).contiguous().view(PACKED)], -1)


def unpack(rows: Tensor, R: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    """[..., R + r] of `dtype`: the values of rows [..., width]."""
    if rows.dtype != PACKED:
        return rows.to(dtype)
    latent, rope = rows.split([R, rows.shape[-1] - R], -1)
    return torch.cat([latent.view(E4M3).to(dtype), rope.contiguous().view(BFLOAT16).to(dtype)], -1)
