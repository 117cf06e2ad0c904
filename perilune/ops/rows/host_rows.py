"""Rows of host memory that hold KV blocks: checksums of many rows, copies of many blocks by a GPU's copy engines, and
files read into rows, each in one call that releases the GIL. On an H200 that raised the speed of restoring 60,000
tokens from 9.9 to 34.6 GB/s: with a call per block, the threads that copy, check and run steps waited for the GIL.

The C++ file needs a compiler; without one the same is done in Python, block by block.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.ops.harness import build

LANE_BYTES = 4096  # The checksum adds the words of each lane, then multiplies the sum by a factor for its position.
STEM = "host_rows"
MAX_PITCH_BYTES = 2**31 - 1  # the driver's limit for a two-dimensional copy
_FACTOR = 0x9E3779B97F4A7C15
_NOT_REGULAR = -2
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver finds host or device from the address

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t),
            ("Y", ctypes.c_size_t),
            ("MemoryType", ctypes.c_uint),
            ("Host", ctypes.c_void_p),
            ("Device", ctypes.c_uint64),
            ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )
    ] + [("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t)]


Driver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Copy2D), ctypes.c_void_p)  # cuMemcpy2DAsync


@dataclass(frozen=True, slots=True)
class Places:
    """The addresses of a cache's blocks: block b of layer l is at address + l * pitch_bytes + b * block_bytes."""

    address: int
    layers: int
    block_bytes: int  # bytes of a block in one layer
    pitch_bytes: int


def checksums(rows: Sequence[Bytes], digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """[n] uint64, of rows [m * LANE_BYTES] uint8 of one length that hold the blocks of these digests (16 bytes each).

    Sums modulo 2**64: any changed word, and any 4,096 bytes that are missing, twice or at another place, change it.
    """
    named = np.array([_named(digest) for digest in digests], np.uint64)
    if not rows or isinstance(build.library(STEM), str):
        return np.array([_lanes(row) for row in rows], np.uint64) ^ named
    sums = np.empty(len(rows), np.uint64)
    where = _addresses(rows)
    run = build.function(STEM, "checksum_rows", "llppp")
    run(len(rows), len(rows[0]) // LANE_BYTES, where.ctypes.data, named.ctypes.data, sums.ctypes.data)
    return sums


def copy(
    driver: Any,
    stream: int,
    pairs: Sequence[tuple[int, Bytes]],
    caches: Sequence[Places],
    *,
    out: bool,
    block_seconds: float = 0.0,
) -> int:
    """Queues copies of blocks to rows (`out`) or of rows to blocks. Returns the driver's error code, 0: none.

    driver  cuMemcpy2DAsync as a Driver, called once for each cache and block, or for each layer if the cache's pitch is
            above MAX_PITCH_BYTES
    pairs   (block, row); a row holds the block's bytes of all caches and layers, one after the other
    block_seconds   shortest time per block: sleeps between copies
    """
    blocks = np.array([block for block, _ in pairs], np.int64)
    rows = _addresses([row for _, row in pairs])
    if isinstance(build.library(STEM), str):
        return _copy(driver, stream, [(int(b), int(r)) for b, r in zip(blocks, rows)], caches, out, block_seconds)
    places = np.array([(c.address, c.layers, c.block_bytes, c.pitch_bytes) for c in caches], np.int64)
    run = build.function(STEM, "copy_rows", "pplpplplll")
    return run(
        ctypes.cast(driver, ctypes.c_void_p), stream, len(pairs), blocks.ctypes.data, rows.ctypes.data,
        len(caches), places.ctypes.data, MAX_PITCH_BYTES, out, int(block_seconds * 1e9),
    )  # fmt: skip


def file_reader() -> "Callable[[Path, memoryview, memoryview], int] | None":
    """`_read_file`, or None without a compiler: kv/disk.py then reads in Python and takes the GIL a dozen times."""
    return None if isinstance(build.library(STEM), str) else _read_file


def _read_file(path: Path, header: memoryview, payload: memoryview) -> int:
    """As kv/disk.py's read_file."""
    size = ctypes.c_int64()
    run = build.function(STEM, "read_file", "pplplp")
    error = run(
        os.fsencode(path), _address(header), len(header), _address(payload), len(payload), ctypes.byref(size)
    )  # fmt: skip
    if error:
        raise OSError(error, os.strerror(error), str(path))
    if size.value == _NOT_REGULAR:
        raise OSError(errno.EINVAL, "it is not a regular file: put one there", str(path))
    return size.value


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _copy(
    driver: Any,
    stream: int,
    pairs: Sequence[tuple[int, int]],
    caches: Sequence[Places],
    out: bool,
    block_seconds: float,
) -> int:
    """`copy` with the rows' addresses, in Python."""
    copy = Copy2D(srcMemoryType=_UNIFIED, dstMemoryType=_UNIFIED)
    begin = time.perf_counter()
    for count, (block, host) in enumerate(pairs, 1):
        for cache in caches:
            whole = cache.pitch_bytes <= MAX_PITCH_BYTES
            height, pitch = (cache.layers, cache.pitch_bytes) if whole else (1, MAX_PITCH_BYTES)
            for layer in range(0, cache.layers, height):
                there = cache.address + layer * cache.pitch_bytes + block * cache.block_bytes
                here, row_pitch = host + layer * cache.block_bytes, cache.block_bytes
                copy.srcDevice, copy.dstDevice = (there, here) if out else (here, there)
                copy.srcPitch, copy.dstPitch = (pitch, row_pitch) if out else (row_pitch, pitch)
                copy.WidthInBytes, copy.Height = cache.block_bytes, height
                if status := int(driver(ctypes.byref(copy), ctypes.c_void_p(stream))):
                    return status
            host += cache.layers * cache.block_bytes
        time.sleep(max(begin + count * block_seconds - time.perf_counter(), 0.0))
    return 0


def _addresses(rows: Sequence[Bytes]) -> Numbers:
    return np.array([row.ctypes.data for row in rows], np.int64)


def _named(digest: bytes) -> int:
    return (int.from_bytes(digest[:8], "little") + 3 * int.from_bytes(digest[8:], "little")) % 2**64


def _lanes(row: Bytes) -> np.uint64:
    lanes = row.view(np.uint64).reshape(-1, LANE_BYTES // 8).sum(axis=1, dtype=np.uint64)
    factors = np.arange(1, 2 * len(lanes), 2, dtype=np.uint64) * np.uint64(_FACTOR)
    total: np.uint64 = (lanes * factors).sum(dtype=np.uint64)
    return total
