"""Unquantised linear layers: `X.weight` [o, i] in a floating-point type."""

from collections.abc import Mapping

import torch

from perilune.formats.stored import Part

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    return {".weight": Part(shape, FLOATS)}


def decode(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return stored[".weight"].to(dtype)
