"""FP8 in blocks, as Kimi K2's first releases store every linear layer but lm_head
(docs/formats.md section 3.2).

weight           [..., o, i] float8_e4m3fn
weight_scale_inv [..., ceil(o/128), ceil(i/128)] float32, a factor in spite of its name; blocks at the bottom and right
                 edges may be smaller than 128 x 128
W[o, k] = weight[o, k] * weight_scale_inv[o // 128, k // 128]. We write scale = max|w| / 448 of each block.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from perilune.core.errors import CheckpointError
from perilune.formats.stored import Part, finite, has_nan

BLOCK = 128
MAX = 448.0  # the largest e4m3 number


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., o, i] floats -> weight [..., o, i] float8_e4m3fn, scale [..., ceil(o/128), ceil(i/128)] float32.

    Weights are rounded to nearest, ties to even. A block of zeros gets scale 0. ValueError if w is not finite.
    """
    o, i = w.shape[-2:]
    w = w.float()
    whole = torch.nn.functional.pad(w, (0, -i % BLOCK, 0, -o % BLOCK))
    squares = torch.unflatten(torch.unflatten(whole.abs(), -1, (-1, BLOCK)), -3, (-1, BLOCK))
    scale = squares.amax((-3, -1)) / MAX
    if not scale.isfinite().all():
        raise ValueError("weights are not finite")
    step = _spread(torch.where(scale == 0, 1.0, scale), o, i)
    # If the scale was rounded down, max|w| / scale exceeds 448, which torch would make nan.
    return (w / step).clamp(-MAX, MAX).to(torch.float8_e4m3fn), scale


def dequantize(w: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight [..., o, i], scale -> [..., o, i] in `dtype`: the product in float32, rounded once to `dtype`."""
    return (w.float() * _spread(scale, *w.shape[-2:])).to(dtype)


def _spread(scale: torch.Tensor, o: int, i: int) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK, -2)[..., :o, :].repeat_interleave(BLOCK, -1)[..., :i]


def _no_nan(weight: torch.Tensor) -> str | None:
    return "holds nan" if has_nan(weight) else None


def parts(shape: tuple[int, ...]) -> Mapping[str, Part]:
    """What is stored for a linear layer [o, i]."""
    out, inputs = shape
    return {
        ".weight": Part(shape, (torch.float8_e4m3fn,), fault=_no_nan),
        ".weight_scale_inv": Part(
            (blocks(out), blocks(inputs)), (torch.float32,), covers=BLOCK, spans=BLOCK, fault=finite
        ),
    }


def decode(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return dequantize(stored[".weight"], stored[".weight_scale_inv"], dtype)


def encode(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that replace `name`.weight [o, i] in a checkpoint."""
    if weight.ndim != 2:
        raise CheckpointError(f"{name}: FP8 needs [o, i], not {list(weight.shape)}")
    try:
        w, scale = quantize(weight)
    except ValueError as e:
        raise CheckpointError(f"{name}: {e}") from e
    yield f"{name}.weight", w
    yield f"{name}.weight_scale_inv", scale


def quantization_config() -> dict[str, Any]:
    """The block that config.json carries."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
