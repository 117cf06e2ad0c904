"""One safetensors file: its header checked against its size, its tensors' bytes read on demand.

Layout: u64 little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data, which
the tensors cover without holes or overlaps. Reads are positioned (pread), so any number of threads may share a file
and no memory map keeps it alive.
"""

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.core.errors import CheckpointError, quoted, shown
from perilune.core.files import open_regular
from perilune.core.jsonfile import MAX_HEADER

LFS_POINTER = b"version https://git-lfs"
_TOO_MANY = 1 << 128
MAX_DIMENSIONS = 64  # the most that torch computes with

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor: `nbytes` bytes from byte `offset` of `file`, row-major, little-endian."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open file. CheckpointError, naming the file, if it is absent, truncated or inconsistent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
        except FileNotFoundError as e:
            text = f"{path} does not exist: the download is incomplete"
            raise CheckpointError(text, remedy="repeat it, and it goes on where it stopped") from e
        except OSError as e:
            raise CheckpointError(f"cannot read {path}: {e.strerror}") from e
        try:
            self.tensors: dict[str, TensorInfo] = self._parse()
        except BaseException:
            self._file.close()
            raise

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `offset` of the file on. Any thread may call it."""
        done = 0
        while done < len(buffer):
            try:
                n = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            except OSError as e:
                raise CheckpointError(f"cannot read {self.path} at byte {offset + done}: {e.strerror}") from e
            if n == 0:
                raise self._broken(f" is truncated: {len(buffer)} bytes expected at byte {offset}, {done} found")
            done += n

    def read_columns(self, offset: int, width: int, columns: slice, out: NDArray[np.uint8]) -> None:
        """Fills `out` [rows, columns] with the bytes `columns` of rows of `width` bytes each, the first at `offset`.

        Any thread may call it. A checkpoint has millions of rows of a few hundred bytes. The file is mapped during the
        copy: one system call per row takes 15 times as long, and reading whole rows up to 3 times as long. If the file
        shrinks during the copy, SIGBUS ends the process, and the parent process says why (core.errors.signal_note); if
        only the last page shrinks, CheckpointError.
        """
        nbytes, file = len(out) * width, self._file.fileno()
        self._check_end(offset + nbytes)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        if hasattr(os, "posix_fadvise"):  # not on macOS. Makes the kernel read ahead in large pieces
            os.posix_fadvise(file, start, offset + nbytes - start, os.POSIX_FADV_WILLNEED)
        try:
            mapped = mmap.mmap(file, offset + nbytes - start, prot=mmap.PROT_READ, offset=start)
        except OSError as e:
            raise CheckpointError(f"cannot map {self.path}: {e.strerror}") from e
        with mapped:
            rows = np.frombuffer(mapped, np.uint8, nbytes, offset - start).reshape(len(out), width)
            np.copyto(out, rows[:, columns])
            del rows  # a map with views cannot be closed
        self._check_end(offset + nbytes)  # a last page that became shorter reads as zeros

    def _check_end(self, end: int) -> None:
        if (size := os.fstat(self._file.fileno()).st_size) < end:
            raise self._broken(f" is truncated: {end} bytes expected, {size} found")

    def close(self) -> None:
        self._file.close()

    def _parse(self) -> dict[str, TensorInfo]:
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise self._broken(f" is truncated: {size} bytes, shorter than any safetensors header")
        start = bytearray(min(size, len(LFS_POINTER)))
        self.read_into(0, memoryview(start))
        if start == LFS_POINTER:
            raise CheckpointError(f"{self.path} is a Git LFS pointer, not the file itself", remedy="run `git lfs pull`")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER:
            raise self._broken(f": header of {length} bytes exceeds {MAX_HEADER}: not a safetensors file, or damaged")
        if 8 + length > size:
            raise self._broken(f" is truncated: header needs {8 + length} bytes, {size} found")
        raw = bytearray(length)
        self.read_into(8, memoryview(raw))
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError) as e:
            raise self._broken(f": damaged header, not valid JSON: {e}") from e
        if not isinstance(header, dict):
            raise self._broken(": damaged header, not a JSON object")
        header.pop("__metadata__", None)
        data = 8 + length
        tensors = {name: self._entry(name, entry, data) for name, entry in header.items()}

        end, previous = data, None
        for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            if info.offset != end:
                what = "overlap" if info.offset < end else "leave a hole"
                raise self._broken(f": damaged header: {quoted(previous)} and {quoted(info.name)} {what}")
            end, previous = info.offset + info.nbytes, info.name
        if end > size:
            raise self._broken(f" is truncated: {end} bytes expected, {size} found")
        if end < size:
            raise self._broken(f" is damaged: {end} bytes expected, {size} found")
        return tensors

    def _entry(self, name: str, entry: Any, data: int) -> TensorInfo:
        if not isinstance(entry, dict):
            raise self._damaged(name, "has no description")
        code, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(code, str) or code not in DTYPES:
            raise self._damaged(name, f"has unknown dtype {quoted(code)}")
        if not isinstance(shape, list) or not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
            raise self._damaged(name, f"has shape {shown(shape)}")
        if not isinstance(span, list) or not _naturals(span) or len(span) != 2 or span[0] > span[1]:
            raise self._damaged(name, f"has data_offsets {shown(span)}")
        dtype, nbytes = DTYPES[code], span[1] - span[0]
        if nbytes != (need := math.prod(shape) * dtype.itemsize):
            text = f"of {code} {shown(shape)} needs {shown(need)} bytes, its data_offsets give {nbytes}"
            raise self._damaged(name, text)
        return TensorInfo(name, dtype, tuple(shape), self.path, data + span[0], nbytes)

    def _broken(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.path}{fault}", remedy="remove it and download it again, or convert again")

    def _damaged(self, name: str, fault: str) -> CheckpointError:
        return self._broken(f": damaged header: tensor {quoted(name)} {fault}")


def _naturals(values: list[Any]) -> bool:
    """Whether all values are sizes so small that the product of MAX_DIMENSIONS of them can be computed and printed."""
    return all(type(v) is int and 0 <= v < _TOO_MANY for v in values)
