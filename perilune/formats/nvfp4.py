"""NVFP4 in ModelOpt's layout: e2m1 values, an e4m3 scale for every 16 of them, a float32 scale for the matrix
(docs/formats.md section 3.4).

weight         [..., o, i/2] uint8: byte b of a row holds element 2b in its low nibble and 2b + 1 in its high one; bits
               0 to 2 of a nibble choose from E2M1, bit 3 is the sign
weight_scale   [..., o, i/16] float8_e4m3fn, row-major
weight_scale_2 [] float32
input_scale    [] float32, for activations in FP4: not read, activations stay as they are
W[o, k] = e2m1 * (weight_scale[o, k // 16] * weight_scale_2). Each matrix has its own weight_scale_2; gate and up of an
expert need not agree.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from perilune.core.errors import CheckpointError
from perilune.formats.scheme import NVFP4_GROUP
from perilune.formats.stored import Part, finite
from perilune.model.names import UNROUTED_GLOBS

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0  # the largest e2m1 number
SCALE_MAX = 448.0  # the largest e4m3 number

# Midpoints between neighbouring e2m1 numbers. Ties go to the even code: at every second midpoint that is the upper one,
# so the bound is the next smaller float.
_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BOUNDS[1::2] = torch.nextafter(_BOUNDS[1::2], torch.zeros(3))


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Floats -> uint8 codes 0 to 15 of the nearest e2m1 numbers, ties to the even code, saturating. x is not nan."""
    x = x.float().contiguous()
    return torch.bucketize(x.abs(), _BOUNDS.to(x.device)).to(torch.uint8) | x.signbit().to(torch.uint8) << 3


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[..., i] codes 0 to 15, i even -> [..., i/2] uint8."""
    assert codes.shape[-1] % 2 == 0, codes.shape
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., i/2] uint8 -> [..., i] uint8 codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def values(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 -> their e2m1 numbers, float32."""
    table = torch.tensor((*E2M1, *(-v for v in E2M1)), device=codes.device)
    return table[codes.int()]


def quantize(w: torch.Tensor, factor: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., o, i] floats -> packed [..., o, i/2] uint8, scale [..., o, i/16] float8_e4m3fn, factor [...] float32.

    factor  weight_scale_2 of each matrix; default max|w| / (6 * 448), which makes the largest scale 448
    scale   max|w| / 6 / factor of each group, nearest, at most 448
    Values are the nearest for these rounded scales. A group with a scale of 0 becomes zeros. ValueError if w is not
    finite.
    """
    assert w.shape[-1] % NVFP4_GROUP == 0, w.shape
    groups = torch.unflatten(w.float(), -1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1)
    if not largest.isfinite().all():
        raise ValueError("weights are not finite")
    if factor is None:
        factor = largest.amax((-2, -1)) / (MAX * SCALE_MAX)
    each = factor[..., None, None]
    scale = largest / MAX / torch.where(each == 0, 1.0, each)
    scale = scale.clamp(max=SCALE_MAX).to(torch.float8_e4m3fn)
    step = (scale.float() * each).unsqueeze(-1)
    codes = round_e2m1(torch.where(step == 0, 0.0, groups / torch.where(step == 0, 1.0, step)))
    return pack(codes.flatten(-2)), scale, factor


def dequantize(packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed [..., o, i/2], scale [..., o, i/16], factor [...] -> [..., o, i] in `dtype`, from float32 products."""
    return scaled(packed, scale.float() * factor[..., None, None], dtype)


def scaled(packed: torch.Tensor, step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed [..., i/2], step [..., i/16] float32 -> [..., i] in `dtype`: e2m1 * step."""
    groups = torch.unflatten(values(unpack(packed)), -1, (-1, NVFP4_GROUP))
    return (groups * step.unsqueeze(-1)).flatten(-2).to(dtype)


def require_width(inputs: int) -> None:
    """CheckpointError if a layer of that many inputs does not divide into groups."""
    if inputs % NVFP4_GROUP:
        raise CheckpointError(f"NVFP4 needs input widths that are multiples of {NVFP4_GROUP}, not {inputs}")


def parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    """What is stored for a linear layer [o, i]. CheckpointError if i is not a multiple of 16."""
    out, inputs = shape
    require_width(inputs)
    return {
        ".weight": Part((out, inputs // 2), (torch.uint8,), spans=2),
        ".weight_scale": Part((out, inputs // NVFP4_GROUP), (torch.float8_e4m3fn,), spans=NVFP4_GROUP, fault=finite),
        ".weight_scale_2": Part((), (torch.float32,), covers=0, fault=finite),
        ".input_scale": Part((), (torch.float32,), unread=True),
    }


def decode(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    factor = stored[".weight_scale_2"].reshape(())
    return dequantize(stored[".weight"], stored[".weight_scale"], factor, dtype)


def encode(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that replace `name`.weight [o, i] in a checkpoint. Without input_scale, which needs calibration."""
    packed, scale, factor = checked(name, weight)
    yield f"{name}.weight", packed
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_scale_2", factor


def checked(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize` of one matrix; CheckpointError naming it if that fails."""
    if weight.ndim != 2 or weight.shape[1] % NVFP4_GROUP:
        raise CheckpointError(
            f"{name}: NVFP4 needs [o, i] with i a multiple of {NVFP4_GROUP}, not {list(weight.shape)}"
        )
    try:
        return quantize(weight)
    except ValueError as e:
        raise CheckpointError(f"{name}: {e}") from e


def quantization_config(*, activations: bool = False) -> dict[str, Any]:
    """The block that config.json carries: only the routed experts are quantised.

    activations  engines with FP4 arithmetic shall quantise activations by input_scale, which must be stored then
    """
    number = {"num_bits": 4, "type": "float", "group_size": NVFP4_GROUP, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": number}
            | ({"input_activations": number} if activations else {})
        },
        "producer": {"name": "perilune"},
        "ignore": list(UNROUTED_GLOBS),
    }
