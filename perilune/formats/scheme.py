"""Which quantisation a checkpoint's configuration declares. Imports no torch: planning needs only the name.

The declaration only serves to refuse a checkpoint before its tensors are read; which linear layers are quantised is
decided tensor by tensor (served.py), because `ignore` lists are not reliable.
"""

from collections.abc import Mapping
from typing import Any

from perilune.core.errors import CheckpointError, quoted, shown

DENSE = "dense"
INT4 = "int4"
FP8_BLOCK = "fp8-block"
FP8_ROWS = "float-quantized by rows"
FP8_SCALED = "float-quantized in blocks"
NVFP4 = "nvfp4"
NVFP4_PACKED = "nvfp4-pack-quantized"
INT4_COMPACT = "perilune-int4-compact"

INT4_GROUP = 32
NVFP4_GROUP = 16
FP8_BLOCK_SIZE = [128, 128]
MIXED = "mixed-precision"
# Values of a pack-quantized block that is the INT4 of Kimi K2. Absent keys take compressed-tensors' own defaults.
_INT4_ARGS = {
    "num_bits": (8, (4,)),
    "type": ("int", ("int",)),
    "symmetric": (True, (True,)),
    "strategy": ("group", ("group",)),
    "group_size": (None, (INT4_GROUP,)),
    "actorder": (None, (None, False)),
    "dynamic": (False, (False,)),
}
_NVFP4_ARGS = {
    "num_bits": (8, (4,)),
    "type": ("int", ("float",)),
    "symmetric": (True, (True,)),
    "strategy": (None, (None, "tensor_group", "group")),
    "group_size": (None, (NVFP4_GROUP,)),
    "actorder": (None, (None, False)),
}
_FP8_ARGS = {
    "num_bits": (8, (8,)),
    "type": ("int", ("float",)),
    "symmetric": (True, (True,)),
    "strategy": (None, ("channel", "block")),
    "block_structure": (None, (None, FP8_BLOCK_SIZE)),
    "dynamic": (False, (False,)),
}
_MODELOPT_ARGS = {"num_bits": (4, (4,)), "type": ("float", ("float",)), "group_size": (NVFP4_GROUP, (NVFP4_GROUP,))}

# A key of the weights' description -> (default, accepted values).
_Args = Mapping[str, tuple[Any, tuple[Any, ...]]]


def declared(
    config: Mapping[str, Any], text: Mapping[str, Any], hf_quant: Mapping[str, Any] | None, *, where: str
) -> str:
    """The scheme's name: one of the constants above, or a description of the unsupported one.

    config    config.json; its quantization_config overrides the one inside `text` (text_config)
    hf_quant  hf_quant_config.json if there is one; it overrides both, which may be stale then
    """
    if hf_quant is not None:
        file = f"{where}: hf_quant_config.json"
        quantization = _table(hf_quant, "quantization", file)
        if quantization.get("quant_algo") is not None:
            return _modelopt(quantization, file)
    for level in (config, text):
        if level.get("quantization_config") is not None:
            return _block(_table(level, "quantization_config", where), where)
    return DENSE


def _block(block: Mapping[str, Any], where: str) -> str:
    method, form = block.get("quant_method"), block.get("format")
    if method == "fp8":
        return _fp8(block)
    if method == "modelopt":
        return _modelopt(block, where)
    if form == INT4_COMPACT:
        return INT4_COMPACT
    if method != "compressed-tensors":
        return shown(method)
    if form == NVFP4_PACKED:
        fault = _groups(block, _NVFP4_ARGS, where) if "config_groups" in block else None
        return f"{NVFP4_PACKED} with {fault}" if fault else NVFP4_PACKED
    if form == MIXED and "config_groups" in block:
        return _mixed(block, where)
    if form != "pack-quantized":
        return f"compressed-tensors {shown(form)}"
    fault = _groups(block, _INT4_ARGS, where, activations=False)
    return f"pack-quantized with {fault}" if fault else INT4


def _mixed(block: Mapping[str, Any], where: str) -> str:
    """The scheme of a checkpoint with FP8 layers and maybe INT4 experts: named after the FP8 layers."""
    strategies = set()
    for name, group in _table(block, "config_groups", where).items():
        alone = {"config_groups": {name: group}}
        form = group.get("format") if isinstance(group, Mapping) else None
        if form == "pack-quantized":
            fault = _groups(alone, _INT4_ARGS, where, activations=False)
        elif form == "float-quantized":
            if (fault := _groups(alone, _FP8_ARGS, where)) is None:
                strategies.add(group["weights"].get("strategy"))
        else:
            fault = f"{shown(name)} in {shown(form)}"
        if fault:
            return f"{MIXED} with {fault}"
    if len(strategies) != 1:
        return f"{MIXED} with {len(strategies)} kinds of FP8"
    return FP8_ROWS if strategies == {"channel"} else FP8_SCALED


def _fp8(block: Mapping[str, Any]) -> str:
    size = block.get("weight_block_size")
    if not size:
        return "fp8 without blocks"
    if size != FP8_BLOCK_SIZE:
        return f"fp8 with weight_block_size={shown(size)}"
    form = block.get("fmt", "e4m3")
    return FP8_BLOCK if form == "e4m3" else f"fp8 with fmt={shown(form)}"


def _modelopt(block: Mapping[str, Any], where: str) -> str:
    algo = block.get("quant_algo")
    if algo != "NVFP4":
        return f"modelopt {shown(algo)}"
    size = block.get("group_size", NVFP4_GROUP)
    fault = f"group_size={shown(size)}" if size != NVFP4_GROUP else None
    if fault is None and "config_groups" in block:
        fault = _groups(block, _MODELOPT_ARGS, where)
    return f"modelopt NVFP4 with {fault}" if fault else NVFP4


def _groups(block: Mapping[str, Any], args: _Args, where: str, *, activations: bool = True) -> str | None:
    """The first entry of config_groups that `args` does not accept, as "key=value"; None if there is none.
    `activations`: whether quantised activations are accepted."""
    for name, group in _table(block, "config_groups", where).items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise CheckpointError(f"{where}: quantization_config.config_groups.{shown(name)}.weights must be an object")
        if not activations and group.get("input_activations") is not None:
            return "quantised activations"
        for key, (default, accepted) in args.items():
            if (value := group["weights"].get(key, default)) not in accepted:
                return f"{key}={quoted(value)}"
    return None


def _table(level: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = level.get(key)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {key} must be an object, not {quoted(value)}")
    return value
