"""Opens the vision tower of an engine: whether the checkpoint has one, the memory it takes, its weights and policy."""

import math
from pathlib import Path

import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import CheckpointError, ConfigError
from perilune.dist.group import Group
from perilune.engine.resolve import GB, Choices
from perilune.engine.vision.encoder import Encoder
from perilune.engine.vision.tower import Tower, sizes_of
from perilune.formats import synthetic
from perilune.formats.checkpoint import Checkpoint
from perilune.loading.moonvit import load_moonvit
from perilune.media.limits import Limits
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.moonvit import MoonVit
from perilune.model.moonvit_config import MoonVitConfig

# A picture is padded up to whole tokens on both sides, so that it may have a few patches more than the limit.
PADDED_RATIO = 1.1
CACHE_GB = {"cuda": 1.0, "cpu": 0.25}  # embeddings of 17 and 2 pictures of Kimi K2.5's largest size


def sees(model_dir: Path, config: EngineConfig, choices: Choices) -> bool:
    """Whether the checkpoint has a vision tower that should be loaded. Reads only headers of its files."""
    if synthetic.read(model_dir) is not None or not KimiConfig.from_directory(model_dir).has_vision:
        return False
    if config.vision == "off":
        choices.note("vision", "off", "as set: pictures are refused")
        return False
    with Checkpoint.open(model_dir) as checkpoint:
        stored = any(name.startswith(names.VISION) for name in checkpoint.tensors)
    if not stored:
        choices.note("vision", "off", "config.json describes a vision tower, and the checkpoint has no tensor of one")
    return stored


def open_tower(model_dir: Path, dtype: torch.dtype, device: torch.device, group: Group) -> Tower:
    """Loads the tower, whole on every rank. CheckpointError if its tensors are wrong, ConfigError if the device is
    full."""
    try:
        moonvit, weights = load_moonvit(model_dir, dtype=dtype, device=device)
    except CheckpointError as e:
        raise CheckpointError(f"{e}; vision=off serves text without it") from e
    limits, vocabulary = Limits.from_directory(model_dir), KimiConfig.from_directory(model_dir).vocab_size
    require_alike(model_dir, moonvit, limits, vocabulary)
    tower = Tower(MoonVit(moonvit, weights), limits, group)
    if device.type == "cuda":
        with torch.inference_mode():
            tower.warm(int(PADDED_RATIO * limits.max_patches))
    return tower


def require_alike(model_dir: Path, moonvit: MoonVitConfig, limits: Limits, vocabulary: int) -> None:
    """CheckpointError if the tower does not go with the preprocessor's file or with a vocabulary of so many tokens."""
    if moonvit.placeholder >= vocabulary:
        raise CheckpointError(f"{model_dir}: the placeholder of pictures, {moonvit.placeholder}, is outside of the "
                              f"vocabulary of {vocabulary}")  # fmt: skip
    if limits.patch_size != moonvit.patch_size:
        raise CheckpointError(f"{model_dir}: patches of {limits.patch_size} pixels in preprocessor_config.json, and of "
                              f"{moonvit.patch_size} in config.json")  # fmt: skip


def open_encoder(tower: Tower, config: EngineConfig, choices: Choices) -> Encoder:
    """The Encoder (policy), for rank 0. ConfigError if the cache cannot hold one picture of the largest size."""
    sizes, weight = sizes_of(tower.model), tower.model.weights.linear1
    room = _cache_bytes(config, weight.device)
    row = len(weight) * weight.element_size()
    tokens = PADDED_RATIO * tower.limits.in_patch_limit / 4
    if tokens * row > room:
        raise ConfigError(
            f"vision_cache_gb={room / GB:g} is too small for one picture of up to {tokens:.0f} tokens: "
            f"set at least {math.ceil(tokens * row / 1e6) / 1e3:g}, or vision=off"
        )
    choices.note("vision", "on", f"{room / GB:g} GB for the embeddings of pictures")
    pad = tower.model.config.placeholder
    return Encoder(
        sizes,
        pad=pad,
        row_bytes=row,
        cache_bytes=int(room),
        ranks=tower.group.ranks,
        max_frames=tower.model.config.pos_emb_time,
    )


def bytes_beside(model_dir: Path, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Bytes that pictures need on each device besides the tower's weights: the cache of embeddings, and what encoding
    the largest picture allocates."""
    c, limits = MoonVitConfig.from_directory(model_dir), Limits.from_directory(model_dir)
    values = 10 * c.hidden_size + 2 * c.intermediate_size
    scratch = PADDED_RATIO * limits.max_patches * (values * dtype.itemsize + 3 * c.hidden_size * 4)
    return _cache_bytes(config, device) + scratch


def _cache_bytes(config: EngineConfig, device: torch.device) -> float:
    return (config.vision_cache_gb or CACHE_GB[device.type]) * GB


def weight_bytes(model_dir: Path, width: int) -> int:
    """Bytes of the tower's weights, of `width` bytes each."""
    tensors = names.vision_tensors(MoonVitConfig.from_directory(model_dir))
    return width * sum(math.prod(tensor.shape) for tensor in tensors)
