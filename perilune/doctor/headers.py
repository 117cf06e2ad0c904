"""Checks every shard of a checkpoint against its index, by headers and sizes alone. A fault does not end the check."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perilune.core.errors import CheckpointError, shown
from perilune.core.files import exists
from perilune.core.jsonfile import read_object
from perilune.doctor.finding import Finding
from perilune.formats.checkpoint import INDEX, REMEDY, SINGLE, few, weight_map
from perilune.formats.safetensors_file import SafetensorsFile, TensorInfo

AGAIN = "download it again"
NAMED = 8  # damaged shards that are named, each with its fault; further ones are counted


@dataclass(frozen=True, slots=True)
class Shards:
    tensors: Mapping[str, TensorInfo]  # of the shards that could be read
    unread: frozenset[str]  # tensors that the index places in other shards
    shards: int  # number that could be read
    nbytes: int  # of all tensors
    findings: tuple[Finding, ...]


def examine(path: Path) -> Shards:
    """Reads the headers of all shards of a directory. Nothing is raised for what is wrong with them."""
    findings: list[Finding] = []
    try:
        placed = weight_map(path) if exists(path / INDEX) else None
    except CheckpointError as e:
        return Shards({}, frozenset(), 0, 0, (Finding("wrong", str(e), AGAIN),))
    wanted = sorted(set(placed.values())) if placed is not None else [path / SINGLE]
    if missing := [file.name for file in wanted if not exists(file)]:
        if placed is None:
            text = f"{path} holds neither {INDEX} nor {SINGLE}: only safetensors checkpoints are read"
            return Shards({}, frozenset(), 0, 0, (Finding("wrong", text, "give the directory that holds them"),))
        text = f"{path} lacks {few(missing, 'shard')}: the download is incomplete"
        findings.append(Finding("wrong", text, "repeat the download, which goes on where it stopped"))
    found: dict[Path, dict[str, TensorInfo]] = {}
    damaged: list[Finding] = []
    lost = set(missing)
    for file in wanted:
        if file.name in lost:
            continue
        try:
            opened = SafetensorsFile(file)
            opened.close()
        except CheckpointError as e:
            damaged.append(Finding("wrong", e.text, e.remedy or f"remove {shown(file.name)} and {AGAIN}"))
            continue
        found[file] = opened.tensors
    findings += damaged[:NAMED]
    if (more := len(damaged) - NAMED) > 0:
        text = f"{path}: {NAMED} damaged shards are named, and {more:,} more are damaged"
        findings.append(Finding("wrong", text, "download the model again"))
    tensors = {name: info for held in found.values() for name, info in held.items()}
    unread: frozenset[str] = frozenset()
    if placed is not None:
        unread = frozenset(name for name, file in placed.items() if file not in found)
        findings += _against_index(path, placed, found)
    if strays := sorted(file.name for file in path.glob("*.safetensors") if file not in wanted):
        text = f"{few(strays, 'file')} of safetensors that {INDEX if placed else SINGLE} does not count in"
        findings.append(Finding("warning", text, "they are not read; remove them if they are left over"))
    nbytes = sum(info.nbytes for info in tensors.values())
    return Shards(tensors, unread, len(found), nbytes, tuple(findings))


def _against_index(
    path: Path, placed: Mapping[str, Path], found: Mapping[Path, Mapping[str, TensorInfo]]
) -> list[Finding]:
    findings = []
    listed: dict[Path, set[str]] = {file: set() for file in placed.values()}
    for name, file in placed.items():
        listed[file].add(name)
    if lost := sorted(name for file, held in found.items() for name in listed[file] - held.keys()):
        text = f"{INDEX} places {few(lost, 'tensor')} in shards that do not have them"
        findings.append(Finding("wrong", text, REMEDY))
    if stray := sorted(name for file, held in found.items() for name in held.keys() - listed[file]):
        text = f"the shards hold {few(stray, 'tensor')} that {INDEX} does not place there"
        findings.append(Finding("wrong", text, REMEDY))
    metadata = read_object(path / INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    nbytes = sum(info.nbytes for held in found.values() for info in held.values())
    if isinstance(total, int) and total != nbytes and len(found) == len(listed) and not findings:
        text = f"{INDEX} counts {total:,} bytes, the shards hold {nbytes:,}"
        findings.append(Finding("warning", text, "the tensors are all there; only the index's own sum is off"))
    return findings
