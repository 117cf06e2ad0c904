"""INT4 with compact scales, a format of Perilune: 1 byte per 32 weights instead of 2 (docs/formats.md section 3.6).

weight_packed    [..., o, i/8] int32, as int4.py's
weight_scale     [..., o, i/32] uint8 in 1..255
weight_scale_row [..., o] bfloat16, the largest scale of the row
weight_shape     [2] int64: (o, i)
W[o, k] = q[o, k] * s with s = weight_scale[o, k // 32] * (weight_scale_row[o] / 255), in float32.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from perilune.core.errors import CheckpointError
from perilune.formats import int4
from perilune.formats.scheme import INT4_COMPACT, INT4_GROUP
from perilune.formats.stored import Part, finite

STEPS = 255
_ZEROS = -0x77777778  # int32 0x88888888: eight nibbles of 8, which mean level 0


class Error(NamedTuple):
    """Sum of squared weights, sum of their squared changes, and the largest relative change of a weight."""

    signal: float
    error: float
    largest: float


def compact(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int4.py's scales [..., o, g] bfloat16 -> weight_scale [..., o, g] uint8, weight_scale_row [..., o] bfloat16.

    A scale that would round to 0 becomes 1. So does a scale of 0; its group must have levels 0 only, as from
    `int4.quantize`. ValueError if a scale is negative or not finite.
    """
    if not scale.isfinite().all() or (scale < 0).any():
        raise ValueError("scales are negative or not finite")
    row = scale.amax(-1).to(torch.bfloat16)
    unit = row.float().unsqueeze(-1) / STEPS
    steps = (scale.float() / torch.where(unit == 0, 1.0, unit)).round_()
    return steps.clamp_(1, STEPS).to(torch.uint8), row


def compacted(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Error]:
    """int4.py's packed and scale -> packed, weight_scale, weight_scale_row, and the error of the weights.

    Levels do not change, except to 0 in groups with scale 0. ValueError if scales are negative or not finite.
    """
    steps, row = compact(scale)
    none = scale == 0
    if none.any():  # a compact scale is at least 1, so the levels must be 0
        words = torch.unflatten(packed, -1, (-1, INT4_GROUP // 8))
        packed = torch.where(none.unsqueeze(-1), _ZEROS, words).flatten(-2)
    levels = torch.unflatten(int4.unpack(packed), -1, (-1, INT4_GROUP)).short()
    squares = (levels * levels).sum(-1, dtype=torch.int32).double()
    exact = scale.double()
    change = expand(steps, row).double() - exact
    some = squares > 0
    largest = (change.abs() / exact)[some].amax().item() if some.any() else 0.0
    signal, error = (squares * exact.square()).sum().item(), (squares * change.square()).sum().item()
    return packed, steps, row, Error(signal, error, largest)


def expand(scale: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """weight_scale, weight_scale_row -> the scales [..., o, g] in float32."""
    return scale.float() * (row.float() / STEPS).unsqueeze(-1)


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., o, i] floats -> packed [..., o, i/8] int32, weight_scale, weight_scale_row.

    The scales are those of int4.py, made compact; then the levels -7..7 are chosen as the nearest for these scales.
    ValueError if w is not finite.
    """
    scale, row = compact(int4.quantize(w)[1])
    step = expand(scale, row).unsqueeze(-1)
    groups = torch.unflatten(w.float(), -1, (-1, INT4_GROUP))
    q = (groups / torch.where(step == 0, 1.0, step)).round_().clamp_(-int4.MAX_LEVEL, int4.MAX_LEVEL)
    return int4.pack(q.flatten(-2)), scale, row


def dequantize(packed: torch.Tensor, scale: torch.Tensor, row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed [..., o, i/8], scale [..., o, i/32], row [..., o] -> [..., o, i] in `dtype`: q * s, rounded to `dtype`."""
    return int4.dequantize(packed, expand(scale, row), dtype)


def _steps(scale: torch.Tensor) -> str | None:
    return None if scale.all() else f"holds scales of 0, not 1 to {STEPS}"


def parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    """What is stored for a linear layer [o, i]. CheckpointError if i is not a multiple of 32."""
    out, inputs = shape
    return {
        **int4.parts(shape),
        ".weight_scale": Part((out, inputs // INT4_GROUP), (torch.uint8,), spans=INT4_GROUP, fault=_steps),
        ".weight_scale_row": Part((out,), (torch.bfloat16,), fault=finite),
    }


def decode(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return dequantize(stored[".weight_packed"], stored[".weight_scale"], stored[".weight_scale_row"], dtype)


def encode(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    int4.require_matrix(name, weight)
    try:
        packed, scale, row = quantize(weight)
    except ValueError as e:
        raise CheckpointError(f"{name}: {e}") from e
    yield f"{name}.weight_packed", packed
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_scale_row", row
    yield f"{name}.weight_shape", torch.tensor(weight.shape)


def quantization_config() -> dict[str, Any]:
    """The block that config.json carries: only the routed experts are quantised."""
    return {"quant_method": "perilune", "format": INT4_COMPACT, "group_size": INT4_GROUP}
