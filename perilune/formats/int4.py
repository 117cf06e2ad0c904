"""INT4 in the compressed-tensors layout `pack-quantized`: symmetric, one scale per group of 32 inputs
(docs/formats.md section 3.3).

weight_packed [..., i/8] int32: element k of a row is q + 8 in bits 4(k%8) .. 4(k%8)+3 of word k//8, q in -8..7, so that
                         byte b of a row holds element 2b in its low nibble and 2b + 1 in its high one
weight_scale  [..., i/32] bfloat16 (float16 and float32 are read too)
weight_shape  [2] int64 (any integer type is read): (o, i)
W[o, k] = q[o, k] * scale[o, k // 32]. We write levels -7..7 with scale = max|w| / 7; -8 is read.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from perilune.core.errors import CheckpointError
from perilune.formats.scheme import INT4_GROUP
from perilune.formats.stored import Part, finite
from perilune.model.names import UNROUTED_EXPRESSIONS

MAX_LEVEL = 7
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def pack(q: torch.Tensor) -> torch.Tensor:
    """[..., i] integers in -8..7, i a multiple of 8 -> [..., i/8] int32."""
    assert q.shape[-1] % 8 == 0, q.shape
    nibbles = (q.to(torch.int8) + 8).view(torch.uint8)
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(torch.int32)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., i/8] int32 -> [..., i] int8 in -8..7."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).view(torch.int8) - 8


def quantize(w: torch.Tensor, group: int = INT4_GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., i] floats -> packed [..., i/8] int32, scale [..., i/group] bfloat16 = max|w| / 7 of each group.

    Levels are nearest for the scale as stored, -7..7. A group of zeros gets scale 0. ValueError if w is not finite.
    """
    assert w.shape[-1] % group == 0 and group % 8 == 0, (w.shape, group)
    groups = w.float().reshape(*w.shape[:-1], -1, group)
    scale = (groups.abs().amax(-1) / MAX_LEVEL).to(torch.bfloat16)
    if not scale.isfinite().all():
        raise ValueError("weights are not finite")
    step = scale.float().unsqueeze(-1)
    # A scale of 0: all weights are 0, or so small that the scale underflows. Both become zeros.
    q = (groups / torch.where(step == 0, 1.0, step)).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
    return pack(q.flatten(-2)), scale


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed [..., i/8] int32, scale [..., i/group] -> [..., i] in `dtype`: q * scale, rounded once to `dtype`."""
    groups = unpack(packed).reshape(*scale.shape, -1)
    w: torch.Tensor = groups.float() * scale.float().unsqueeze(-1)
    return w.flatten(-2).to(dtype)


def parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    """What is stored for a linear layer [o, i]. CheckpointError if i is not a multiple of 32."""
    out, inputs = shape
    if inputs % INT4_GROUP:
        raise CheckpointError(f"INT4 needs input widths that are multiples of {INT4_GROUP}, not {inputs}")
    return {
        ".weight_packed": Part((out, inputs // 8), (torch.int32,), spans=8),
        ".weight_scale": Part((out, inputs // INT4_GROUP), SCALE_DTYPES, spans=INT4_GROUP, fault=finite),
        ".weight_shape": Part((2,), (torch.int64, torch.int32, torch.int16), covers=0, fault=_says(shape)),
    }


def _says(shape: tuple[int, ...]) -> Callable[[torch.Tensor], str | None]:
    def fault(stored: torch.Tensor) -> str | None:
        said = stored.tolist()
        return None if said == list(shape) else f"says {said}, the packed weight beside it is {list(shape)}"

    return fault


def decode(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return dequantize(stored[".weight_packed"], stored[".weight_scale"], dtype)


def require_matrix(name: str, weight: torch.Tensor) -> None:
    """CheckpointError if `name`.weight does not divide into groups."""
    if weight.ndim != 2 or weight.shape[1] % INT4_GROUP:
        raise CheckpointError(f"{name}: INT4 needs [o, i] with i a multiple of {INT4_GROUP}, not {list(weight.shape)}")


def encode(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that replace `name`.weight [o, i] in a checkpoint."""
    require_matrix(name, weight)
    try:
        packed, scale = quantize(weight)
    except ValueError as e:
        raise CheckpointError(f"{name}: {e}") from e
    yield f"{name}.weight_packed", packed
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_shape", torch.tensor(weight.shape)


def quantization_config() -> dict[str, Any]:
    """The block that config.json carries: only the routed experts are quantised."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": INT4_GROUP,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(UNROUTED_EXPRESSIONS),
    }
