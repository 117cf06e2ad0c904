"""The formats that are read, and how one linear layer's format is told from its tensors.

A new format is a file with `parts`, an entry in SERVED, and its records and readers in model/weights.py and
model/load.py.
"""

from collections.abc import Callable, Mapping

import torch

from perilune.core.errors import CheckpointError
from perilune.formats import dense, int4, scheme
from perilune.formats.parts import Part
from perilune.formats.safetensors_file import TensorInfo

SERVED: Mapping[str, Callable[[tuple[int, ...]], Mapping[str, Part]]] = {
    scheme.DENSE: dense.parts,
    scheme.INT4: int4.parts,
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
        return scheme.FP8_BLOCK
    return scheme.NVFP4 if weight.dtype == torch.uint8 else scheme.DENSE


def require_served(name: str, where: str) -> None:
    """CheckpointError if the format `name` is not read."""
    if name not in SERVED:
        raise CheckpointError(
            f"{where}: quantisation {name!r} is not served; served: plain bfloat16, and INT4 pack-quantized in groups "
            f"of {scheme.INT4_GROUP}"
        )
