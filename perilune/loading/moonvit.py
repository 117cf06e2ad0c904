"""Reads the vision tower and projector of a checkpoint: 335 tensors and 0.94 GB in Kimi K2.5, plain floats in every
published form of it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError, shown
from perilune.formats.checkpoint import Checkpoint, few
from perilune.formats.dense import FLOATS
from perilune.formats.safetensors_file import TensorInfo
from perilune.loading.survey import spell
from perilune.model import names
from perilune.model.moonvit import Block, MoonVitWeights
from perilune.model.moonvit_config import MoonVitConfig


def load_moonvit(path: Path, *, dtype: torch.dtype, device: torch.device | str) -> tuple[MoonVitConfig, MoonVitWeights]:
    """The tower of the checkpoint in `path`, every weight in `dtype` on `device`.

    CheckpointError names the key or the first tensors that are wrong; ConfigError if the device has no room.
    """
    config = MoonVitConfig.from_directory(path)
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        stored, faults = compare_moonvit(checkpoint.tensors, config)
        if faults:
            raise CheckpointError(f"{path}: the vision tower {faults[0]}")

        def record(entries: tuple[names.Entry, ...], place: str = "") -> dict[str, Tensor]:
            return {e.field: checkpoint.read(stored[place + e.suffix].name).to(device, dtype) for e in entries}

        try:
            blocks = [
                Block(**record(names.VISION_BLOCK, names.vision_block(i))) for i in range(config.num_hidden_layers)
            ]
            return config, MoonVitWeights(blocks=blocks, **record(names.VISION_ENDS))
        except RuntimeError as e:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on the CPU
            raise ConfigError(f"{path}: cannot allocate the vision tower on {device}: {str(e).splitlines()[0]}") from e


def compare_moonvit(stored: Mapping[str, TensorInfo], config: MoonVitConfig) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tower's tensors by the names of model/names.py, and one line for each kind of fault, worst first."""
    tensors: dict[str, TensorInfo] = {}
    faults: list[str] = []
    for name, info in stored.items():
        if name.startswith(names.VISION) and not name.endswith(names.TIME_WEIGHT):
            usual = names.vision_name(name)
            if usual in tensors:
                faults.append(f"holds {shown(tensors[usual].name)} and {shown(name)}, two names of the same tensor")
            tensors[usual] = info
    wanted = {tensor.name: tensor.shape for tensor in names.vision_tensors(config)}
    if missing := [name for name in wanted if name not in tensors]:
        faults.append(f"lacks {few(missing, 'tensor')}")
    if surplus := [info.name for name, info in tensors.items() if name not in wanted]:
        faults.append(f"holds {few(surplus, 'tensor')} that are no part of the tower in config.json")
    for name, shape in wanted.items():
        if (own := tensors.get(name)) is None:
            continue
        if own.shape != shape:
            faults.append(f"has {shown(own.name)} of shape {shown(list(own.shape))}, not {list(shape)}")
        elif own.dtype not in FLOATS:
            faults.append(f"has {shown(own.name)} as {spell(own.dtype)}, not {' or '.join(map(spell, FLOATS))}")
    return tensors, faults
