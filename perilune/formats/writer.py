"""Writes checkpoints: shards, index and config.json, one tensor in memory at a time.

Shards are written under temporary names and renamed when the last one is complete; the index follows, config.json
comes last. A directory without config.json is therefore an unfinished checkpoint.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import torch

from perilune.core.errors import CheckpointError
from perilune.core.jsonfile import write_object
from perilune.formats import fp8_block, int4, int4_compact, nvfp4, nvfp4_packed
from perilune.formats.checkpoint import INDEX, SINGLE
from perilune.formats.safetensors_file import DTYPES
from perilune.model import names

SHARD_BYTES = 5_000_000_000
UNFINISHED = ".unfinished"  # a file beside shards, until config.json exists

Form = Literal["bf16", "int4", "int4-compact", "fp8-block", "nvfp4", "nvfp4-pack-quantized"]


@dataclass(frozen=True, slots=True)
class _Quantiser:
    """`encode` gives the tensors that replace a weight with a name that matches `which`."""

    which: re.Pattern[str]
    encode: Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]
    config: Callable[[], dict[str, Any]]


_QUANTISERS: Mapping[str, _Quantiser] = {
    "int4": _Quantiser(names.EXPERT, int4.encode, int4.quantization_config),
    "int4-compact": _Quantiser(names.EXPERT, int4_compact.encode, int4_compact.quantization_config),
    "fp8-block": _Quantiser(names.LAYER_LINEAR, fp8_block.encode, fp8_block.quantization_config),
    "nvfp4": _Quantiser(names.EXPERT, nvfp4.encode, nvfp4.quantization_config),
    "nvfp4-pack-quantized": _Quantiser(names.EXPERT, nvfp4_packed.encode, nvfp4_packed.quantization_config),
}

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ROOM = 1 << 20  # bytes kept free for a shard's header, which is known only when its data is written
_PIECE = 1 << 24


def write(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    config: Mapping[str, Any],
    form: Form = "bf16",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes (name, tensor) pairs as a checkpoint with `config` as config.json.

    Floating-point tensors become bfloat16, the router's bias float32. A form other than "bf16" quantises the routed
    experts' [o, i] weights; "fp8-block" those of every linear layer but lm_head, as in published checkpoints. config's
    quantization_config is replaced by the result's.
    """
    quantiser = _QUANTISERS.get(form)
    with Writer(directory, shard_bytes=shard_bytes) as out:
        for name, tensor in tensors:
            if quantiser is not None and quantiser.which.fullmatch(name):
                for part in quantiser.encode(name.removesuffix(".weight"), tensor):
                    out.add(*part)
            elif tensor.is_floating_point():
                out.add(name, tensor.to(torch.float32 if name.endswith(names.ROUTER_BIAS) else torch.bfloat16))
            else:
                out.add(name, tensor)
    block = quantiser.config() if quantiser is not None else None
    try:
        with _disk(directory):
            write_object(directory / "config.json", with_quantization(config, block))
    except BaseException:
        out.remove()  # else a repeated call would be refused because of these shards
        raise
    with contextlib.suppress(OSError):
        (directory / UNFINISHED).unlink()


def held(directory: Path) -> list[str]:
    """Names of shards and index; empty if an earlier write was killed before config.json."""
    killed = (directory / UNFINISHED).exists() and not (directory / "config.json").exists()
    return [] if killed else sorted(p.name for p in directory.glob("*.safetensors*"))


def with_quantization(config: Mapping[str, Any], block: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of config.json's object with `block` as quantization_config of the text model (text_config if nested), or
    without one. ModelOpt's blocks go to the outermost level.
    """
    result = {k: v for k, v in config.items() if k != "quantization_config"}
    text = result
    if isinstance(result.get("text_config"), Mapping):
        text = result["text_config"] = {k: v for k, v in result["text_config"].items() if k != "quantization_config"}
    if block is not None:
        (result if block.get("quant_method") == "modelopt" else text)["quantization_config"] = dict(block)
    return result


class Writer:
    """Use as a context manager: leaving it normally completes the checkpoint, an exception removes what was written.

    A shard ends before it would exceed `shard_bytes` of data; a larger tensor gets a shard of its own. The directory is
    made if need be and must hold no safetensors yet.
    """

    def __init__(self, directory: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes must be positive, not {shard_bytes}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CheckpointError(f"cannot make directory {directory}: {e.strerror}") from e
        if present := held(directory):
            raise CheckpointError(f"{directory} already holds {present[0]}: choose an empty directory")
        with _disk(directory):
            for left in [*directory.glob("*.safetensors*")]:
                left.unlink()
        self.directory = directory
        self.shard_bytes = shard_bytes
        self._shards: list[_Shard] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._names:
            raise CheckpointError(f"tensor {name!r} is written twice")
        if tensor.dtype not in _CODES:
            raise CheckpointError(f"tensor {name!r}: safetensors cannot hold {tensor.dtype}")
        nbytes = tensor.numel() * tensor.element_size()
        with _disk(self.directory):
            if not self._shards or not self._shards[-1].has_room(name, nbytes, self.shard_bytes):
                if self._shards:
                    self._shards[-1].finish()
                self._shards.append(_Shard(self.directory / f".shard-{len(self._shards) + 1:05d}.tmp"))
            self._shards[-1].add(name, tensor)
        self._names.add(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        complete = False
        try:
            if e is None:
                with _disk(self.directory):
                    self._complete()
                complete = True
        finally:
            if not complete:
                self.remove()

    def remove(self) -> None:
        """Removes what was written."""
        for shard in self._shards:
            shard.discard()
        for name in (INDEX, UNFINISHED):
            (self.directory / name).unlink(missing_ok=True)

    def _complete(self) -> None:
        if not self._shards:
            raise CheckpointError(f"{self.directory}: a checkpoint without tensors cannot be written")
        self._shards[-1].finish()
        (self.directory / UNFINISHED).touch()
        count = len(self._shards)
        if count == 1:
            self._shards[0].rename(self.directory / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(self._shards, 1):
            final = f"model-{i:05d}-of-{count:05d}.safetensors"
            shard.rename(self.directory / final)
            weight_map |= dict.fromkeys(shard.header, final)
        total = sum(shard.nbytes for shard in self._shards)
        write_object(self.directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


class _Shard:
    """A file being written: data from byte 8 + _ROOM on; `finish` then writes the header in front of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.nbytes = 0
        self._header_bytes = 64  # braces and metadata
        self._file: BinaryIO = path.open("w+b")
        self._file.seek(8 + _ROOM)

    def has_room(self, name: str, nbytes: int, limit: int) -> bool:
        return self.nbytes + nbytes <= limit and self._header_bytes + _entry_bytes(name) <= _ROOM

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.write(data.data)
        self.header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.nbytes, self.nbytes + data.nbytes],
        }
        self.nbytes += data.nbytes
        self._header_bytes += _entry_bytes(name)

    def finish(self) -> None:
        text = json.dumps({"__metadata__": {"format": "pt"}} | self.header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # keeps the data aligned
        # Fill the gap before the data with spaces, which a header may end with. If the gap is more than 1/256 of the
        # data, move the data up instead.
        if (_ROOM - len(text)) * 256 <= self.nbytes:
            text += b" " * (_ROOM - len(text))
        else:
            for start in range(0, self.nbytes, _PIECE):
                self._file.seek(8 + _ROOM + start)
                piece = self._file.read(_PIECE)
                self._file.seek(8 + len(text) + start)
                self._file.write(piece)
            self._file.truncate(8 + len(text) + self.nbytes)
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.close()

    def rename(self, path: Path) -> None:
        os.replace(self.path, path)
        self.path = path

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a failed flush does not matter: the file is removed next
            self._file.close()
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"cannot write to {directory}: {e.strerror}") from e


def _entry_bytes(name: str) -> int:
    """Header bytes of a tensor, at most: its name, dtype, two offsets and up to eight dimensions."""
    return len(json.dumps(name)) + 256
