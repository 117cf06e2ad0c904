"""Opens the KV tiers of an engine: how large they may be on this machine, and which files it may read."""

import dataclasses
import shutil
import struct
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.memory import available_bytes
from perilune.engine.resolve import GB, Choices
from perilune.kv.disk import FINGERPRINT_BYTES, Directory
from perilune.kv.pages import Pages
from perilune.kv.tiers import Tiers
from perilune.kv.transfer import Transfer, row_bytes
from perilune.model.weights import Weights
from perilune.speculation.drafter import Drafter

FORMAT = "1"  # of rows and files: to be raised when what they hold changes
STAGING_BYTES = 10**9  # of host memory where only a disk was asked for
HOST_SHARE = 0.9  # of the memory that is available, at most
DISK_SHARE = 0.5  # of the free space, if no size is given


def open_tiers(
    config: EngineConfig, choices: Choices, weights: Weights, pages: Pages, drafter: Drafter | None
) -> tuple[Tiers, Transfer]:
    """Raises ConfigError. The draft model's cache is stored with the target's: it could only be computed again from the
    target's hidden states, and a hit without it would be drafted for from other text's entries."""
    if (config.tp, config.ep) != (1, 1):
        # Blocks restored on one rank and not on the others would be read as if they were whole.
        raise ConfigError("kv_host_gb and kv_disk are for one rank so far: leave them out, or run tp=1 and ep=1")
    caches = [pages.data, *([] if drafter is None else [drafter.cache()])]
    size = row_bytes(caches)
    rows = _host_rows(config, size, pages.data, choices)
    directory: Directory | None = None
    files, file_limit = None, 0
    if config.kv_disk is not None:
        fingerprint = _fingerprint(config, weights, caches)
        directory = Directory(Path(config.kv_disk).expanduser(), fingerprint, size)
        files = [(found.name, found.age_seconds) for found in directory.found()]
        file_limit = _file_limit(config, directory, len(files), choices)
        choices.note("kv_disk", directory.root, f"{len(files)} blocks of this model in it")
    ttl = config.kv_ttl_hours * 3600
    try:
        transfer = Transfer(caches, rows, directory)
    except (RuntimeError, MemoryError, OSError) as e:
        if directory is not None:
            directory.close()
        raise ConfigError(f"host memory for KV cannot be taken: {e}; lower kv_host_gb, or raise `ulimit -l`") from e
    return Tiers(transfer, rows=rows, files=files, file_limit=file_limit, ttl_seconds=ttl), transfer


def _host_rows(config: EngineConfig, size: int, pages: Tensor, choices: Choices) -> int:
    # A CPU's pages are allocated, but the system has not counted what was never written.
    free = (available_bytes() - (pages.nbytes if pages.device.type == "cpu" else 0)) * HOST_SHARE
    wanted = config.kv_host_gb * GB if config.kv_host_gb is not None else min(STAGING_BYTES, free / 4)
    if wanted > free:
        raise ConfigError(
            f"kv_host_gb={config.kv_host_gb} is more than the {max(free, 0) / GB:.1f} GB that are available: lower it"
        )
    rows = int(wanted // size)
    if rows < 1:
        raise ConfigError(f"kv_host_gb={config.kv_host_gb} holds no block of {size / GB:.4f} GB: raise it")
    assert config.block_size
    choices.note("kv_host_gb", f"{rows * size / GB:.2f}", f"{rows * config.block_size} tokens of KV")
    return rows


def _file_limit(config: EngineConfig, directory: Directory, own: int, choices: Choices) -> int:
    """Files of this engine's blocks, of which there are `own`; `kv_disk_gb` is for all models in the directory."""
    size = directory.file_bytes
    free = shutil.disk_usage(directory.root).free + own * size
    limit = config.kv_disk_gb * GB if config.kv_disk_gb is not None else free * DISK_SHARE
    others = directory.shrink_others(int(limit / 2))
    files = int((limit - others) // size)
    if files < 1:
        directory.close()
        raise ConfigError(f"kv_disk_gb={limit / GB:.4f} holds no block of {size / GB:.4f} GB: raise it")
    assert config.block_size
    choices.note("kv_disk_gb", f"{limit / GB:.2f}", f"{files * config.block_size} tokens of KV")
    return files


def _fingerprint(config: EngineConfig, weights: Weights, caches: list[Tensor]) -> bytes:
    """What KV depends on besides tokens and cache keys: the weights as they were loaded, number formats, layout. The
    draft model's weights are left out: no answer depends on its cache."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=b"kv files")
    made = (FORMAT, sys.byteorder, caches[0].device.type, config.dtype, config.kv_dtype, config.qk_norm_eps)
    layout = [(c.dim(), c.shape[0] if c.dim() == 4 else 1, *c.shape[-2:], str(c.dtype)) for c in caches]
    ranks = (0, config.tp, config.ep)
    digest.update(repr((made, layout, ranks)).encode())
    for name, tensor in _tensors("", weights):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(struct.pack("<q", _sum(tensor)))
    return digest.digest()


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor below a value of dataclasses, sequences and mappings, with the names of fields that lead there."""
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(f"{name}.{index}", inner)


def _sum(tensor: Tensor) -> int:
    """Of its bytes as 64-bit words, modulo 2**64; reads a GPU's weights at the speed of its memory."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = int(data[:whole].view(torch.int64).sum()) if whole else 0
    rest = int(data[whole:].sum()) if whole < data.numel() else 0
    return (words + rest + 2**63) % 2**64 - 2**63
