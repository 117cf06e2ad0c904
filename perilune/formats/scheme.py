"""Which quantisation a checkpoint's configuration declares. No torch: planning and checks need the name alone.

The declaration decides what is refused before anything is read; which linear layers are quantised is decided tensor by
tensor (registry.py), because `ignore` lists are not reliable.
"""

from collections.abc import Mapping
from typing import Any

from perilune.core.errors import CheckpointError

DENSE = "dense"
INT4 = "int4"
FP8_BLOCK = "fp8-block"
NVFP4 = "nvfp4"
NVFP4_PACKED = "nvfp4-pack-quantized"
INT4_COMPACT = "perilune-int4-compact"

INT4_GROUP = 32
# What pack-quantized must say to be the INT4 of this family. Absent keys take compressed-tensors' own defaults.
_INT4_ARGS = {
    "num_bits": (8, (4,)),
    "type": ("int", ("int",)),
    "symmetric": (True, (True,)),
    "strategy": ("group", ("group",)),
    "group_size": (None, (INT4_GROUP,)),
    "actorder": (None, (None, False)),
    "dynamic": (False, (False,)),
}


def declared(
    config: Mapping[str, Any], text: Mapping[str, Any], hf_quant: Mapping[str, Any] | None, *, where: str
) -> str:
    """The scheme's name: one of the constants above, or a spelling of what was found instead.

    config    config.json; its quantization_config goes before the one inside `text` (text_config)
    hf_quant  hf_quant_config.json if there is one; it goes before both, which may be stale beside it
    """
    if hf_quant is not None:
        algo = _table(hf_quant, "quantization", f"{where}: hf_quant_config.json").get("quant_algo")
        if algo is not None:
            return NVFP4 if algo == "NVFP4" else f"modelopt {algo}"
    for level in (config, text):
        if level.get("quantization_config") is not None:
            return _block(_table(level, "quantization_config", where), where)
    return DENSE


def _block(block: Mapping[str, Any], where: str) -> str:
    method, form = block.get("quant_method"), block.get("format")
    if method == "fp8":
        return FP8_BLOCK if block.get("weight_block_size") else "fp8 without blocks"
    if method == "modelopt":
        algo = block.get("quant_algo")
        return NVFP4 if algo == "NVFP4" else f"modelopt {algo}"
    if form == INT4_COMPACT:
        return INT4_COMPACT
    if method != "compressed-tensors":
        return str(method)
    if form == NVFP4_PACKED:
        return NVFP4_PACKED
    if form != "pack-quantized":
        return f"compressed-tensors {form}"
    for name, group in _table(block, "config_groups", where).items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise CheckpointError(f"{where}: quantization_config.config_groups.{name}.weights must be an object")
        if group.get("input_activations") is not None:
            return "pack-quantized with quantised activations"
        for key, (default, accepted) in _INT4_ARGS.items():
            if (value := group["weights"].get(key, default)) not in accepted:
                return f"pack-quantized with {key}={value}"
    return INT4


def _table(level: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = level.get(key)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {key} must be an object, not {value!r}")
    return value
