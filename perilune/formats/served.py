"""The formats that are read, and how the format of a linear layer is found from its tensors.

A new format is a file with `parts` and `decode`, an entry in SERVED and, if experts stay in this format in memory, a
record in model/weights.py with an entry in loading/weights_plan.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from perilune.core.errors import CheckpointError, quoted
from perilune.formats import dense, fp8_block, fp8_scaled, int4, int4_compact, nvfp4, nvfp4_packed, scheme
from perilune.formats.safetensors_file import TensorInfo
from perilune.formats.stored import Part


@dataclass(frozen=True, slots=True)
class Format:
    """How a linear layer [o, i] is stored.

    parts   (o, i) -> its tensors by the suffixes of their names; CheckpointError if the format does not allow the shape
    decode  (these tensors, or the parts of them for consecutive rows of the layer; dtype) -> [rows, i] in `dtype`
    """

    parts: Callable[[tuple[int, ...]], Mapping[str, Part]]
    decode: Callable[[Mapping[str, torch.Tensor], torch.dtype], torch.Tensor]


SERVED: Mapping[str, Format] = {
    scheme.DENSE: Format(dense.parts, dense.decode),
    scheme.INT4: Format(int4.parts, int4.decode),
    scheme.INT4_COMPACT: Format(int4_compact.parts, int4_compact.decode),
    scheme.FP8_BLOCK: Format(fp8_block.parts, fp8_block.decode),
    scheme.FP8_ROWS: Format(fp8_scaled.row_parts, fp8_scaled.decode_rows),
    scheme.FP8_SCALED: Format(fp8_scaled.block_parts, fp8_scaled.decode_blocks),
    scheme.NVFP4: Format(nvfp4.parts, nvfp4.decode),
    scheme.NVFP4_PACKED: Format(nvfp4_packed.parts, nvfp4_packed.decode),
}


def format_of(tensors: Mapping[str, TensorInfo], linear: str) -> str | None:
    """The name of the format in which the linear layer `linear` is stored; None if it is absent."""
    packed, weight = tensors.get(f"{linear}.weight_packed"), tensors.get(f"{linear}.weight")
    if packed is not None:
        if packed.dtype == torch.uint8:
            return scheme.NVFP4_PACKED
        scale = tensors.get(f"{linear}.weight_scale")
        return scheme.INT4_COMPACT if scale is not None and scale.dtype == torch.uint8 else scheme.INT4
    if weight is None:
        return None
    if weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        scale = tensors.get(f"{linear}.weight_scale")
        if scale is None:
            return scheme.FP8_BLOCK
        return scheme.FP8_ROWS if scale.shape == (weight.shape[0], 1) else scheme.FP8_SCALED
    return scheme.NVFP4 if weight.dtype == torch.uint8 else scheme.DENSE


def require_served(name: str, where: str) -> None:
    """CheckpointError if a checkpoint declares a quantisation that is not read."""
    if name not in SERVED:
        raise CheckpointError(
            f"{where}: quantisation {quoted(name)} is not served; served: plain bfloat16, FP8 in 128 x 128 blocks or "
            f"rows, INT4 pack-quantized in groups of {scheme.INT4_GROUP} and its compact form, NVFP4 in groups of "
            f"{scheme.NVFP4_GROUP} (ModelOpt's layout and nvfp4-pack-quantized)"
        )
