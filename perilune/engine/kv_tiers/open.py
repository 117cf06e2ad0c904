"""Opens the KV tiers of an engine: how large they may be on this machine, and which files it may read."""

import contextlib
import dataclasses
import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError, sized
from perilune.core.files import expanded
from perilune.core.memory import available_bytes
from perilune.dist.group import Group, everyone, largest, least
from perilune.engine.kv_tiers.ranked import RankedTransfer
from perilune.engine.ranks import Ranks
from perilune.engine.resolve import GB, Choices
from perilune.engine.vision.tower import Tower
from perilune.kv.disk import FINGERPRINT_BYTES, Directory, require_usable
from perilune.kv.mover import Name
from perilune.kv.pages import Pages
from perilune.kv.tiers import Tiers
from perilune.kv.transfer import Transfer, row_bytes
from perilune.model.kimi_k2 import KimiK2
from perilune.speculation.drafter import Drafter

FORMAT = "1"  # version of the bytes in rows and files; raise it when the layout changes, so that old files are ignored
STAGING_BYTES = 10**9  # host memory used as staging buffer if only a disk tier is configured
HOST_SHARE = 0.9  # max share of the available memory
DISK_SHARE = 0.5  # share of the free disk space, if kv_disk_gb is not set


def require_room(config: EngineConfig) -> None:
    """Refuses, before weights are read, a directory that cannot be used and more host memory than there is.
    ConfigError."""
    if config.kv_disk is not None:
        require_usable(_root(config))
    if config.kv_host_gb is not None:
        _require_host(config.kv_host_gb, available_bytes() * HOST_SHARE)


def _root(config: EngineConfig) -> Path:
    assert config.kv_disk is not None
    return expanded(config.kv_disk, "kv_disk")


def _require_host(wanted_gb: float, free_bytes: float) -> None:
    if wanted_gb * GB > free_bytes:
        raise ConfigError(
            f"kv_host_gb={wanted_gb:g} is more than the {sized(max(free_bytes, 0))} that are available: lower it"
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """The KV tiers of a rank.

    transfer  copies this rank's bytes; on rank 0 it also orders the copies of the other ranks
    tiers     the index of stored blocks, on rank 0; None on the other ranks
    """

    transfer: Transfer | RankedTransfer
    tiers: Tiers | None


def open_tiers(
    config: EngineConfig,
    choices: Choices,
    model: KimiK2,
    pages: Pages,
    drafter: Drafter | None,
    ranks: Ranks | None,
    tower: Tower | None = None,
) -> Opened:
    """Opens the tiers; called by all ranks. Raises ConfigError on all ranks. The draft model's KV is stored with the
    target's: computing it again would need the target's hidden states, and without it the draft model would read KV of
    another text after a hit. Each rank stores its own pages; configured sizes are those of all ranks together."""
    group = model.group
    caches = [pages.data, *([] if drafter is None else [drafter.cache()])]
    size = largest(group, row_bytes(caches))
    with _on_all_ranks(group):
        rows = _host_rows(config, size * group.ranks, pages.data, choices)
    rows = least(group, rows)
    directory: Directory | None = None
    files, file_limit = None, 0
    if config.kv_disk is not None:
        fingerprint = _fingerprint(config, model, caches, tower)
        directory = _open_directory(_root(config), group, fingerprint, size)
        names = _common(group, directory)
        file_limit = _file_limit(config, directory, len(names), group, choices)
        files = list(names.items())
        choices.note("kv_disk", directory.root, f"{len(files)} blocks of this model in it")
    ttl = config.kv_ttl_hours * 3600
    transfer: Transfer | None = None
    with _on_all_ranks(group):
        try:
            transfer = Transfer(caches, rows, directory)
        except (RuntimeError, MemoryError, OSError) as e:
            if directory is not None:
                directory.close()
            why = f"host memory for KV cannot be taken: {e}"
            raise ConfigError(f"{why}; lower kv_host_gb, or raise `ulimit -l`") from e
    assert transfer is not None
    if group.ranks > 1 and ranks is None:
        least(group, 0)  # a barrier: no rank reports before rank 0 receives reports
        return Opened(transfer, None)
    mover: Transfer | RankedTransfer = transfer
    if ranks is not None:
        mover = RankedTransfer(transfer, ranks)
        least(group, 0)
    return Opened(mover, Tiers(mover, rows=rows, files=files, file_limit=file_limit, ttl_seconds=ttl))


@contextlib.contextmanager
def _on_all_ranks(group: Group) -> Iterator[None]:
    """Raises a ConfigError of one rank on all ranks, so that none waits for the one that failed."""
    error: ConfigError | None = None
    try:
        yield
    except ConfigError as e:
        if group.ranks == 1:
            raise
        error = e
    said = everyone(group, b"" if error is None else str(error).encode()[:1000])
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text:
            raise ConfigError(f"rank {rank}: {text.decode(errors='replace')}")


def _open_directory(root: Path, group: Group, fingerprint: bytes, size: int) -> Directory:
    """This rank's folder in `kv_disk`; rank 0 holds the lock for all ranks."""
    found = list[Directory]()
    for first in (True, False):
        with _on_all_ranks(group):
            if first == (group.slicing.rank == 0):
                found.append(Directory(root, fingerprint, size, lock=first))
    return found[0]


def _common(group: Group, directory: Directory) -> dict[Name, float]:
    """The blocks of which every rank has a file, with their age in seconds, oldest first. Deletes this rank's other
    files."""
    found = {one.name: one.age_seconds for one in directory.found()}
    if group.ranks == 1:
        return found
    own = b"".join(name.digest + name.first for name in found)
    each = [{data[at : at + 32] for at in range(0, len(data), 32)} for data in everyone(group, own)]
    common = set.intersection(*each)
    for name in list(found):
        if name.digest + name.first not in common:
            directory.delete(name)
            del found[name]
    return found


def _host_rows(config: EngineConfig, size: int, pages: Tensor, choices: Choices) -> int:
    """Host rows (one per block) for each rank; a row has `size` bytes on all ranks together."""
    # Pages on a CPU are allocated, but Linux counts memory as used only once it is written.
    free = (available_bytes() - (pages.nbytes if pages.device.type == "cpu" else 0)) * HOST_SHARE
    wanted = config.kv_host_gb * GB if config.kv_host_gb is not None else min(STAGING_BYTES, free / 4)
    if config.kv_host_gb is not None:
        _require_host(config.kv_host_gb, free)
    rows = int(wanted // size)
    if rows < 1:
        raise ConfigError(f"kv_host_gb={wanted / GB:.3g} holds no block of {size / GB:.3g} GB: raise it")
    assert config.block_size
    choices.note("kv_host_gb", f"{rows * size / GB:.2f}", f"{rows * config.block_size} tokens of KV")
    return rows


def _file_limit(config: EngineConfig, directory: Directory, own: int, group: Group, choices: Choices) -> int:
    """How many files each rank may have, of which `own` exist. `kv_disk_gb` covers all ranks and all models in the
    directory. Rank 0 decides for all."""
    every, decided = everyone(group, directory.fingerprint), -1
    with _on_all_ranks(group):
        if group.slicing.rank == 0:
            size = directory.file_bytes * group.ranks
            free = shutil.disk_usage(directory.root).free + own * size
            limit = config.kv_disk_gb * GB if config.kv_disk_gb is not None else free * DISK_SHARE
            decided = int((limit - directory.shrink_others(int(limit / 2), every)) // size)
            if decided < 1:
                directory.close()
                raise ConfigError(f"kv_disk_gb={limit / GB:.3g} holds no block of {size / GB:.3g} GB: raise it")
            assert config.block_size
            choices.note("kv_disk_gb", f"{limit / GB:.2f}", f"{decided * config.block_size} tokens of KV")
    return largest(group, decided)


def _fingerprint(config: EngineConfig, model: KimiK2, caches: list[Tensor], tower: Tower | None) -> bytes:
    """A digest of what KV depends on besides tokens, pixels and cache keys: loaded weights, constants of the checkpoint
    (an edited rope scale changes every key), number formats, layout. Without the draft model's weights: no answer
    depends on its KV."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=b"kv files")
    made = (FORMAT, sys.byteorder, caches[0].device.type, config.dtype, config.kv_dtype, config.qk_norm_eps)
    constants = (model.config, config.fp8_activations, *(() if tower is None else (tower.model.config, tower.limits)))
    layout = [(c.dim(), c.shape[0] if c.dim() == 4 else 1, *c.shape[-2:], str(c.dtype)) for c in caches]
    ranks = (model.group.slicing.rank, model.group.ranks, config.ep, config.kv_shards)
    digest.update(repr((made, constants, layout, ranks)).encode())
    seeing = () if tower is None else _tensors("tower", tower.model.weights)
    for name, tensor in (*_tensors("", model.weights), *seeing):
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
    """Sum of the tensor's bytes as 64-bit words, modulo 2**64. On a GPU it is bound by memory bandwidth."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = int(data[:whole].view(torch.int64).sum()) if whole else 0
    rest = int(data[whole:].sum()) if whole < data.numel() else 0
    return (words + rest + 2**63) % 2**64 - 2**63
