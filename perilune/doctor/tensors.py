"""Checks a checkpoint's tensors against its configuration, and a sample of their values."""

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.core.errors import CheckpointError, shown
from perilune.core.files import open_regular
from perilune.doctor import published
from perilune.doctor.finding import Finding
from perilune.doctor.headers import Shards
from perilune.formats.checkpoint import few
from perilune.formats.safetensors_file import TensorInfo
from perilune.formats.stored import Part, finite
from perilune.loading.moonvit import compare_moonvit
from perilune.loading.survey import Survey, compare, spell
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.moonvit_config import MoonVitConfig

SAMPLED_BYTES = 1 << 26  # read of all values; a checkpoint with fewer to check is checked whole
PIECE_BYTES = 1 << 15
EXPERT_PIECES = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    tensors: int  # number of tensors read
    of: int  # number of tensors with values that can be wrong
    nbytes: int


def examine(shards: Shards, config: KimiConfig) -> tuple[Survey, list[Finding]]:
    """Names, shapes and types of all tensors against the configuration."""
    found, faults = compare(shards.tensors, config, shards.unread)
    remedy = "config.json and the shards must be of one model and one revision: download both again"
    findings = [Finding("wrong", fault, remedy) for fault in faults]
    return found, findings


def tower(shards: Shards, raw: Mapping[str, Any]) -> tuple[str, list[Finding]]:
    """A description of the vision tower, and faults that prevent loading it; text needs no tower.

    raw  config.json
    """
    stored = {name: info for name, info in shards.tensors.items() if name.startswith(names.VISION)}
    held = f"{len(stored):,} tensors ({sum(t.nbytes for t in stored.values()) / 1e9:.2f} GB)"
    if not isinstance(raw.get("vision_config"), dict):
        return (f"{held} known, and no vision_config that describes them" if stored else "none"), []
    if shards.unread:  # tensors of the tower may be in those
        return f"{held} known, not checked: shards are missing" if stored else "none", []
    if not stored:
        text = "config.json describes a vision tower, and no tensor of one is there"
        return "none", [Finding("warning", text, "text is served without it")]
    try:
        _, faults = compare_moonvit(stored, MoonVitConfig.from_dict(raw))
    except CheckpointError as e:
        faults = [f"cannot be read: {e}"]
    if not faults:
        return f"{held} read by name, shape and type: pictures are served", []
    more = f" (and {len(faults) - 1:,} more faults)" if len(faults) > 1 else ""
    found = Finding(
        "warning", f"the vision tower {faults[0]}{more}", "text is served without it, with --set vision=off"
    )
    return f"{held} known, cannot be loaded", [found]


def sample(found: Survey) -> tuple[Sample, list[Finding]]:
    """Looks for scales and other values that cannot be right. Reads at most SAMPLED_BYTES or so, always the same."""
    candidates = list(_candidates(found))
    chosen = candidates
    whole = sum(info.nbytes for info, _ in candidates) <= SAMPLED_BYTES
    if not whole:
        experts = [c for c in candidates if names.ROUTED in c[0].name]
        step = max(len(experts) // EXPERT_PIECES, 1)
        chosen = [c for c in candidates if names.ROUTED not in c[0].name] + experts[::step]
    generator = random.Random(0)
    faults: dict[str, list[str]] = {}
    nbytes = 0
    files: dict[Path, list[tuple[TensorInfo, Part]]] = {}
    for candidate in chosen:
        files.setdefault(candidate[0].file, []).append(candidate)
    for file, held in files.items():
        try:
            with open_regular(file) as opened:
                for info, part in held:
                    values = _piece(opened.fileno(), info, generator, whole)
                    nbytes += values.nbytes
                    if fault := part.fault(values) if part.fault is not None else _values(values):
                        faults.setdefault(fault, []).append(info.name)
        except OSError as e:
            faults.setdefault(f"cannot be read: {e.strerror}", []).append(file.name)
    remedy = "the file is damaged or the conversion went wrong: download it again, or convert again"
    findings = []
    for fault, faulty in faults.items():
        more = f" (and {len(faulty) - 1:,} more of those looked at)" if len(faulty) > 1 else ""
        findings.append(Finding("wrong", f"tensor {shown(faulty[0])} {fault}{more}", remedy))
    return Sample(len(chosen), len(candidates), nbytes), findings


def _candidates(found: Survey) -> Iterator[tuple[TensorInfo, Part]]:
    """Tensors with values that can be wrong, of a type that is expected; packed ones have none."""
    for name, info in found.tensors.items():
        if name.rpartition(".")[0] in found.formats:
            continue
        if info.dtype.is_floating_point and info.nbytes:
            yield info, Part(info.shape, (info.dtype,))
    for linear in found.formats:
        for suffix, part in found.parts(linear).items():
            stored = found.tensors.get(linear + suffix)
            if stored is None or stored.dtype not in part.dtypes or not stored.nbytes:
                continue
            if part.fault is not None or stored.dtype.is_floating_point:
                yield stored, part


def _piece(handle: int, info: TensorInfo, generator: random.Random, whole: bool) -> torch.Tensor:
    count = info.nbytes // info.dtype.itemsize
    picked = count if whole else min(count, PIECE_BYTES // info.dtype.itemsize)
    first = generator.randrange(count - picked + 1)
    size = info.dtype.itemsize
    raw = bytearray(os.pread(handle, picked * size, info.offset + first * size))
    if len(raw) < picked * size:
        raise OSError(None, "it shrank while it was read")
    return torch.frombuffer(raw, dtype=torch.uint8).view(info.dtype)


def _values(values: torch.Tensor) -> str | None:
    return "holds values that are not finite" if finite(values) else None


def answers(shards: Shards, config: KimiConfig) -> dict[str, str]:
    """What the family's documentation leaves open and the tensors of a checkpoint show, by topic."""
    tensors = shards.tensors
    topics = {
        "router bias": _types(tensors, names.ROUTER_BIAS),
        "weight_shape": _types(tensors, ".weight_shape"),
        "expert scales": _types(tensors, ".weight_scale", ".weight_scale_inv"),
    }
    times = [name for name in tensors if name.endswith(names.TIME_WEIGHT)]
    seeing = any(name.startswith(names.VISION) for name in tensors)
    topics["pos_emb.time_weight"] = few(times, "tensor") if times else "absent" if seeing else "no vision tensors here"
    angles = [name for name in tensors if name.endswith(names.INV_FREQ)]
    topics["inv_freq"] = few(angles, "tensor", limit=2) + ", computed instead" if angles else "none"
    scales = [name for name in tensors if name.endswith(names.KV_SCALES)]
    topics["KV cache scales"] = few(scales, "tensor", limit=2) + ", not read" if scales else "none"
    if not published.is_full_size(config):
        topics["config.json"] = "not of a published size, not compared"
    elif odd := published.differences(config):
        topics["config.json"] = f"differs from the published ones: {'; '.join(odd)}"
    else:
        topics["config.json"] = "every value is a published one"
    topics["config varies"] = published.varying(config)
    topics["q/kv norm eps"] = (
        f"no file says; rms_norm_eps {config.rms_norm_eps:g} is used (--set qk_norm_eps=1e-6 for transformers' choice)"
    )
    return topics


def _types(tensors: Mapping[str, TensorInfo], *suffixes: str) -> str:
    return " and ".join(sorted({spell(t.dtype) for name, t in tensors.items() if name.endswith(suffixes)})) or "none"
