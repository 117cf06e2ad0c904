"""The files of a result: all headers are known before any data is made."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perilune.convert.job import Job
from perilune.core.errors import CheckpointError
from perilune.core.jsonfile import MAX_HEADER
from perilune.formats.checkpoint import INDEX, SINGLE
from perilune.formats.safetensors_file import DTYPES

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """`file` is relative to the result's directory."""

    file: str
    jobs: tuple[Job, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data, without the header."""
        return sum(job.nbytes for job in self.jobs)

    def header(self) -> bytes:
        """Length and JSON, padded so that the data are aligned."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for out in (out for job in self.jobs for out in job.outs):
            begin, end = end, end + out.nbytes
            entries[out.name] = {"dtype": _CODES[out.dtype], "shape": list(out.shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise CheckpointError(f"{self.file} would need a header of {len(text)} bytes: choose smaller shards")
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Files:
    """The shards of one checkpoint below the result's directory, "" for the directory itself."""

    folder: str
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def index(self) -> tuple[str, dict[str, object]] | None:
        """The index's file and contents; None for a single file, which needs none."""
        if len(self.shards) == 1:
            return None
        names = {out.name: shard.file for shard in self.shards for job in shard.jobs for out in job.outs}
        placed = {name: file.removeprefix(self.folder) for name, file in names.items()}
        return self.folder + INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": placed}


def arrange(jobs: Iterable[Job], limit: int, folder: str = "") -> Files:
    """Jobs in their order, into files of at most `limit` bytes of data; a larger job gets one of its own."""
    groups: list[list[Job]] = []
    size = 0
    for job in jobs:
        if not groups or size + job.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += job.nbytes
    return Files(folder, tuple(Shard(folder + name, tuple(g)) for name, g in zip(_names(groups), groups)))


def _names(groups: Sequence[object]) -> list[str]:
    count = len(groups)
    return [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
