"""The target of a conversion, and the result's configuration."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from perilune.core.errors import ConfigError
from perilune.formats import fp8_scaled, int4, int4_compact, nvfp4, nvfp4_packed, scheme
from perilune.formats.writer import with_quantization

To = Literal["nvfp4", "int4", "int4-compact", "bf16", "fp8-dense"]
Layout = Literal["modelopt", "compressed-tensors"]
Recipe = Literal["optimal", "max"]
Scales = Literal["row", "block"]
# Default input_scale: represents inputs up to 672; blocks of 16 inputs below 0.02 lose precision. A power of two, so
# scaling is exact.
INPUT_SCALE = 0.25


@dataclass(frozen=True, slots=True)
class Target:
    """layout, recipe and calibrated matter for NVFP4, scales for fp8-dense, sidecar for bf16.

    calibrated  scales of activations are measured, not INPUT_SCALE
    sidecar     keep the INT4 scales beside the bf16 weights
    """

    to: To
    layout: Layout = "modelopt"
    recipe: Recipe = "optimal"
    scales: Scales = "row"
    sidecar: bool = True
    calibrated: bool = False

    def __post_init__(self) -> None:
        for value, kind in ((self.to, To), (self.layout, Layout), (self.recipe, Recipe), (self.scales, Scales)):
            if value not in get_args(kind):
                raise ConfigError(f"cannot convert with {value!r}: choose from {', '.join(get_args(kind))}")
        if self.calibrated and self.to != "nvfp4":
            raise ConfigError(f"only nvfp4 has scales of activations to calibrate, {self.to} has none")

    @property
    def experts(self) -> str | None:
        """The format of routed experts; None if they stay as they are."""
        if self.to == "nvfp4":
            return scheme.NVFP4 if self.layout == "modelopt" else scheme.NVFP4_PACKED
        return {"int4": scheme.INT4, "int4-compact": scheme.INT4_COMPACT, "bf16": scheme.DENSE}.get(self.to)

    @property
    def others(self) -> str:
        """The format of all other linear layers."""
        if self.to != "fp8-dense":
            return scheme.DENSE
        return scheme.FP8_ROWS if self.scales == "row" else scheme.FP8_SCALED


def configuration(target: Target, config: Mapping[str, Any], experts: str) -> dict[str, Any]:
    """config.json of the result; `experts` is the format of routed experts in the source."""
    layout = nvfp4 if target.layout == "modelopt" else nvfp4_packed
    blocks: dict[str, Callable[[], dict[str, Any] | None]] = {
        "nvfp4": lambda: layout.quantization_config(activations=True),
        "int4": int4.quantization_config,
        "int4-compact": int4_compact.quantization_config,
        "bf16": lambda: None,
        "fp8-dense": lambda: _mixed(target, experts),
    }
    return with_quantization(config, blocks[target.to]())


def hf_quant_config(target: Target) -> dict[str, Any] | None:
    """hf_quant_config.json, which ModelOpt's checkpoints have beside config.json."""
    if target.to != "nvfp4" or target.layout != "modelopt":
        return None
    return {
        "producer": {"name": "perilune"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": scheme.NVFP4_GROUP,
            "exclude_modules": nvfp4.quantization_config()["ignore"],
        },
    }


def _mixed(target: Target, experts: str) -> dict[str, Any]:
    rows = fp8_scaled.group(rows=target.scales == "row")
    block = copy.deepcopy(int4.quantization_config()) | {"format": scheme.MIXED, "ignore": []}
    if experts == scheme.INT4:
        (first,) = block["config_groups"].values()
        first |= {"format": "pack-quantized", "targets": ["re:.*mlp\\.experts\\.\\d+\\..*_proj$"]}
        block["config_groups"]["group_1"] = rows
    else:
        block["config_groups"] = {"group_0": rows}
    return block
