"""A model directory's tensors: shards with an index, or one model.safetensors without."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch

from perilune.core.errors import CheckpointError, quoted, shown
from perilune.core.files import exists
from perilune.core.jsonfile import read_object
from perilune.formats.safetensors_file import SafetensorsFile, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_NAME = 255  # bytes of a file's name, on every usual file system
REMEDY = f"download {INDEX} and the shards it names again, all of one revision"


class Checkpoint:
    """Open shards and the map of their tensors. Any number of threads may read at once; close after the last read."""

    def __init__(self, path: Path, files: Mapping[Path, SafetensorsFile], tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self._files = dict(files)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads every header and checks them against the index; no tensor data is read.

        CheckpointError if a shard is missing or damaged, or index and shards disagree about any tensor.
        """
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory")
        placed: dict[str, Path] | None = None
        if exists(path / INDEX):
            placed = weight_map(path)
            names = sorted(set(placed.values()))
            if missing := [p.name for p in names if not exists(p)]:
                text = f"{path} lacks {few(missing, 'shard')}: the download is incomplete"
                raise CheckpointError(text, remedy="repeat it, and it goes on where it stopped")
        elif exists(path / SINGLE):
            names = [path / SINGLE]
        else:
            raise CheckpointError(f"{path} holds neither {INDEX} nor {SINGLE}: only safetensors checkpoints are read")
        files: dict[Path, SafetensorsFile] = {}
        try:
            for name in names:
                files[name] = SafetensorsFile(name)
            if placed is None:
                tensors = files[names[0]].tensors
            else:
                tensors = _agree(path, placed, files)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(path, files, tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {quoted(name)} is missing") from None

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, in memory of its own on the CPU."""
        info = self.info(name)
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(info, tensor)
        return tensor

    def read_into(self, info: TensorInfo, out: torch.Tensor, start: int = 0) -> None:
        """Fills `out` (CPU, contiguous, any dtype) with the tensor's bytes from its byte `start` on."""
        nbytes = out.numel() * out.element_size()
        assert out.is_contiguous() and start + nbytes <= info.nbytes, (out.stride(), start, nbytes, info)
        if nbytes:
            self._files[info.file].read_into(info.offset + start, out.reshape(-1).view(torch.uint8).numpy().data)

    def read_block(self, info: TensorInfo, out: torch.Tensor, region: Sequence[slice]) -> None:
        """Fills `out` (CPU, contiguous, of info's type) with rows, or rows and columns, of a tensor of at most two
        dimensions. If `region` cuts columns, only these are copied."""
        assert out.is_contiguous() and len(region) == len(info.shape) <= 2, (out.stride(), info, region)
        if not out.numel():
            return
        width = info.nbytes // info.shape[0] if info.shape else 0
        if len(region) < 2 or region[1] == slice(0, info.shape[1]):
            self.read_into(info, out, region[0].start * width if region else 0)
            return
        rows, columns = region
        size = info.dtype.itemsize
        self._files[info.file].read_columns(
            info.offset + rows.start * width,
            width,
            slice(columns.start * size, columns.stop * size),
            out.view(torch.uint8).numpy(),
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def weight_map(path: Path) -> dict[str, Path]:
    """The index of a directory: each tensor's name and its file, which need not exist."""
    listed = read_object(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path / INDEX}: weight_map must be a non-empty object")
    files: dict[str, Path] = {}  # one Path per shard: a full-size index has 200,000 entries
    for name, shard in listed.items():
        if isinstance(shard, str) and shard in files:
            continue
        # A shard is a file of this directory: an index must not make us read elsewhere.
        if not isinstance(shard, str) or not _is_name(shard):
            raise CheckpointError(
                f"{path / INDEX}: weight_map[{quoted(name)}] is {quoted(shard)}, not a .safetensors file name of this "
                f"directory (at most {MAX_NAME} bytes): the index is damaged"
            )
        files[shard] = path / shard
    return {name: files[shard] for name, shard in listed.items()}


def _agree(path: Path, placed: Mapping[str, Path], files: Mapping[Path, SafetensorsFile]) -> dict[str, TensorInfo]:
    tensors = {}
    for name, file in placed.items():
        info = files[file].tensors.get(name)
        if info is None:
            elsewhere = [f.path.name for f in files.values() if name in f.tensors]
            found = f"it is in {shown(elsewhere[0])}" if elsewhere else "none of the listed shards has it"
            text = f"{path / INDEX} places tensor {quoted(name)} in {shown(file.name)}, but {found}"
            raise CheckpointError(text, remedy=REMEDY)
        tensors[name] = info
    stray = [n for file in files.values() for n in file.tensors if placed.get(n) != file.path]
    if stray:
        text = f"{path}: the shards hold {few(stray, 'tensor')} that {INDEX} does not place there"
        raise CheckpointError(text, remedy=REMEDY)
    return tensors


def few(names: Sequence[str], noun: str, limit: int = 3) -> str:
    """'2 tensors (a, b)' for messages; long lists and long names are cut."""
    more = f", and {len(names) - limit:,} more" if len(names) > limit else ""
    return f"{len(names):,} {noun}{'s' * (len(names) > 1)} ({', '.join(map(shown, names[:limit]))}{more})"


def _is_name(shard: str) -> bool:
    if Path(shard).name != shard or not shard.endswith(".safetensors") or not shard.isprintable():
        return False
    return len(os.fsencode(shard)) <= MAX_NAME
