"""FP8 in the compressed-tensors layout `float-quantized`: e4m3 with a scale per output row or 128 x 128 block.

weight       [o, i] float8_e4m3fn
weight_scale [o, 1] float32 per row, or [ceil(o/128), ceil(i/128)] float32 per block
W[o, k] = weight[o, k] * weight_scale[o, 0], or * weight_scale[o // 128, k // 128]. We write scale = max|w| / 448.
With a scale per block, only the scale's name differs from fp8_block.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from perilune.core.errors import CheckpointError
from perilune.formats import fp8_block
from perilune.formats.stored import Part, finite, has_nan
from perilune.model.names import UNROUTED_TARGETS


def quantize_rows(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[o, i] floats -> weight [o, i] float8_e4m3fn, scale [o, 1] float32. ValueError if w is not finite."""
    w = w.float()
    scale = w.abs().amax(-1, keepdim=True) / fp8_block.MAX
    if not scale.isfinite().all():
        raise ValueError("weights are not finite")
    step = torch.where(scale == 0, 1.0, scale)
    return (w / step).clamp(-fp8_block.MAX, fp8_block.MAX).to(torch.float8_e4m3fn), scale


def _no_nan(weight: torch.Tensor) -> str | None:
    return "holds nan" if has_nan(weight) else None


def row_parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    scale = Part((shape[0], 1), (torch.float32, torch.bfloat16), spans=0, fault=finite)
    return {".weight": Part(shape, (torch.float8_e4m3fn,), fault=_no_nan), ".weight_scale": scale}


def block_parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    stored = fp8_block.parts(shape)
    return {".weight": stored[".weight"], ".weight_scale": stored[".weight_scale_inv"]}


def decode_rows(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return (stored[".weight"].float() * stored[".weight_scale"].float()).to(dtype)


def decode_blocks(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return fp8_block.dequantize(stored[".weight"], stored[".weight_scale"], dtype)


def encode(name: str, weight: torch.Tensor, *, rows: bool) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        w, scale = quantize_rows(weight) if rows else fp8_block.quantize(weight)
    except ValueError as e:
        raise CheckpointError(f"{name}: {e}") from e
    yield f"{name}.weight", w
    yield f"{name}.weight_scale", scale


def group(*, rows: bool) -> dict[str, Any]:
    """config_groups' entry for linear layers other than routed experts. Engines may quantise activations, too."""
    number: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    if rows:
        weights = number | {"strategy": "channel", "dynamic": False}
        activations = number | {"strategy": "token", "dynamic": True}
    else:
        weights = number | {"strategy": "block", "block_structure": [fp8_block.BLOCK] * 2, "dynamic": False}
        activations = number | {"strategy": "group", "group_size": fp8_block.BLOCK, "dynamic": True}
    return {
        "format": "float-quantized",
        "targets": list(UNROUTED_TARGETS),
        "weights": weights,
        "input_activations": activations,
    }
