"""Weights to NVFP4: block scales with the least squared error, and a power of two as the matrix's scale.

From INT4 the search is exact and runs on tables (ops/quantize/nvfp4_from_int4.py). From other weights it tries every
e4m3 scale from the one that maps a block's largest value to 8 to the one that maps it to 4. `by_maximum` is the usual
recipe, which maps the largest value to 6, for comparison.

A power of two adds no error, because e4m3 scales have exponents of their own. Gate and up of an expert share one,
because engines that fuse the two keep one number for both.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.formats import nvfp4
from perilune.formats.scheme import NVFP4_GROUP
from perilune.ops.quantize.nvfp4_from_int4 import HIGHEST, nvfp4_from_int4

EXPONENTS = (-100, 120)  # bounds of the exponent of a matrix's power of two
BELOW, ABOVE = 3, 5  # e4m3 scales tried below and above the one that maps the largest value to 6


@dataclass(frozen=True, slots=True)
class Encoded:
    """values [o, i / 2] uint8 and scale [o, i / 16] float8_e4m3fn as checkpoints hold them; energies of the weights and
    of the error.
    """

    values: Tensor
    scale: Tensor
    signal: float
    error: float


def exponent_for(largest: Iterable[Tensor]) -> int:
    """The power of two for matrices that share one, from their largest INT4 scales (or largest weights / 7)."""
    most = max(float(x) for x in largest)
    return min(max(math.frexp(most)[1] - 1 - HIGHEST, EXPONENTS[0]), EXPONENTS[1]) if most > 0 else 0


def from_int4(packed: Tensor, scale: Tensor, exponent: int, often: Tensor | None = None) -> Encoded:
    """packed [o, i / 8] int32, scale [o, i / 32] bfloat16, finite and not negative; exact.

    often  [i] uint8, 1 to 15: weight of the error at an input within its block; None: all equal
    """
    values, steps, energy = nvfp4_from_int4(packed, scale, exponent, often)
    signal, error = energy.sum(0).tolist()
    return Encoded(values, steps, signal, error)


def from_weights(w: Tensor, exponent: int, often: Tensor | None = None) -> Encoded:
    """[o, i] float32, finite. `often` as in `from_int4`."""
    blocks = torch.unflatten(w * 2.0**-exponent, -1, (-1, NVFP4_GROUP))
    start = (blocks.abs().amax(-1) / nvfp4.MAX).clamp(max=nvfp4.SCALE_MAX).to(torch.float8_e4m3fn)
    first = start.view(torch.uint8).int()
    shares = 1.0 if often is None else often.float().view(-1, NVFP4_GROUP)
    best, least, chosen = first, torch.full(first.shape, math.inf, device=w.device), torch.zeros_like(blocks)
    lost = torch.zeros_like(least)
    for offset in range(-BELOW, ABOVE + 1):
        byte = (first + offset).clamp(1, 126)  # 126 is 448
        step = byte.to(torch.uint8).view(torch.float8_e4m3fn).float().unsqueeze(-1)
        codes = nvfp4.round_e2m1(blocks / step)
        squares = (nvfp4.values(codes) * step - blocks).square()
        cost = (squares * shares).sum(-1)
        better = cost < least
        best, least = torch.where(better, byte, best), torch.where(better, cost, least)
        lost = torch.where(better, squares.sum(-1), lost)
        chosen = torch.where(better.unsqueeze(-1), codes.float(), chosen)
    packed = nvfp4.pack(chosen.to(torch.uint8).flatten(-2))
    square = 4.0**exponent
    return Encoded(
        packed,
        best.to(torch.uint8).view(torch.float8_e4m3fn),
        energy(w),
        lost.sum(dtype=torch.float64).item() * square,
    )


def by_maximum(w: Tensor, factor: Tensor) -> Encoded:
    """[o, i] float32 and the matrix's scale, a number: the recipe that ModelOpt and llm-compressor use by default."""
    values, scale, _ = nvfp4.quantize(w, factor)
    return Encoded(values, scale, energy(w), energy(nvfp4.dequantize(values, scale, factor, torch.float32) - w))


def energy(x: Tensor) -> float:
    return x.float().square().sum(dtype=torch.float64).item()
