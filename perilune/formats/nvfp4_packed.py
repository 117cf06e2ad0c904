"""NVFP4 in the compressed-tensors layout `nvfp4-pack-quantized`; nvfp4.py has the numbers
(docs/formats.md section 3.7).

weight_packed       [o, i/2] uint8, as ModelOpt's weight
weight_scale        [o, i/16] float8_e4m3fn
weight_global_scale [1] float32, the reciprocal of ModelOpt's weight_scale_2
input_global_scale  [1] float32, for activations in FP4: not read
W[o, k] = e2m1 * (weight_scale[o, k // 16] / weight_global_scale)
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from perilune.formats import int4, nvfp4
from perilune.formats.scheme import NVFP4_GROUP, NVFP4_PACKED
from perilune.formats.stored import Part, finite


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """packed [o, i/2], scale [o, i/16], global_scale [1] -> [o, i] in `dtype`, from float32 quotients and products."""
    return nvfp4.scaled(packed, scale.float() / global_scale, dtype)


def _divisor(scale: torch.Tensor) -> str | None:
    return finite(scale) or (None if scale.all() else "is 0, and weights are divided by it")


def parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    """What is stored for a linear layer [o, i]. CheckpointError if i is not a multiple of 16."""
    out, inputs = shape
    nvfp4.require_width(inputs)
    return {
        ".weight_packed": Part((out, inputs // 2), (torch.uint8,), spans=2),
        ".weight_scale": Part((out, inputs // NVFP4_GROUP), (torch.float8_e4m3fn,), spans=NVFP4_GROUP, fault=finite),
        ".weight_global_scale": Part((), (torch.float32,), covers=0, fault=_divisor, reciprocal=True),
        ".input_global_scale": Part((), (torch.float32,), unread=True),
    }


def decode(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    global_scale = stored[".weight_global_scale"].reshape(1)
    return dequantize(stored[".weight_packed"], stored[".weight_scale"], global_scale, dtype)


def encode(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    packed, scale, factor = nvfp4.checked(name, weight)
    yield f"{name}.weight_packed", packed
    yield f"{name}.weight_scale", scale
    # A matrix of zeros has block scales of 0, so its global scale does not matter.
    yield f"{name}.weight_global_scale", torch.where(factor == 0, 1.0, factor).reciprocal().reshape(1)


def quantization_config(*, activations: bool = False) -> dict[str, Any]:
    """The block that config.json carries: only the routed experts are quantised.

    activations  engines with FP4 arithmetic shall quantise activations by input_global_scale, stored then
    """
    block = int4.quantization_config()
    group = block["config_groups"]["group_0"]
    weights = group["weights"] | {"type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP}
    inputs = weights | {"dynamic": "local", "observer": "static_minmax"} if activations else None
    group |= {"weights": weights, "input_activations": inputs}
    return block | {"format": NVFP4_PACKED}
