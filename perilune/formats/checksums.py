"""SHA-256 sums of a checkpoint's files, in its conversion.json, which `perilune convert` writes."""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from perilune.core.errors import CheckpointError, quoted
from perilune.core.files import exists, open_regular
from perilune.core.jsonfile import read_object
from perilune.formats.checkpoint import few

RECORD = "conversion.json"
MAX_FILES = 10_000  # of a record; Kimi K2 converted has about 150
MAX_THREADS = 8  # a thread hashes about 1.5 GB/s; 8 keep up with fast disks
_PIECE = 1 << 22
_SHA256 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")
Advance = Callable[[int], None]


def _ignore(_: int) -> None: ...


def kept(path: Path) -> dict[str, str]:
    """{file relative to `path`: SHA-256} from the RECORD of the directory `path`; empty without a RECORD.

    CheckpointError if the record cannot be read, or names a path outside the directory.
    """
    if not exists(path / RECORD):
        return {}
    sums = read_object(path / RECORD).get("sha256")
    if not isinstance(sums, dict) or len(sums) > MAX_FILES:
        raise CheckpointError(f"{path / RECORD}: sha256 must be an object of at most {MAX_FILES:,} files")
    for name, digest in sums.items():
        parts = name.split("/")
        plain = name.isprintable() and all(p not in ("", ".", "..") and len(os.fsencode(p)) <= 255 for p in parts)
        if len(parts) > 2 or not plain or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise CheckpointError(f"{path / RECORD}: sha256[{quoted(name)}] is no file's SHA-256")
    return sums


def nbytes(path: Path, sums: Mapping[str, str]) -> int:
    """Bytes of those files of `sums` that exist."""
    return sum((path / name).stat().st_size for name in sums if (path / name).is_file())


def damage(path: Path, sums: Mapping[str, str], advance: Advance = _ignore) -> dict[str, str]:
    """{file: what is wrong with it}, for files that differ from `sums`. Reads all bytes of all files.

    advance  called with the numbers of bytes that were read, by one thread at a time
    """

    def fault(name: str, read: Advance) -> str | None:
        try:
            same = sha256(path / name, read) == sums[name]
        except FileNotFoundError:
            return "is missing"
        except OSError as e:
            return f"cannot be read: {e.strerror}"
        return None if same else "does not have the SHA-256 that it was written with"

    return {name: found for name, found in zip(sums, in_threads(fault, sums, advance)) if found}


def in_threads(look: Callable[[str, Advance], T], names: Iterable[str], advance: Advance = _ignore) -> list[T]:
    """`look` of every name, a few at a time. Its second argument takes the numbers of bytes that it reads to `advance`,
    by one thread at a time."""
    stop, lock = threading.Event(), threading.Lock()

    def read(nbytes: int) -> None:
        if stop.is_set():
            raise InterruptedError
        with lock:
            advance(nbytes)

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "sha256") as pool:
        try:
            return [*pool.map(lambda name: look(name, read), names)]
        except BaseException:  # Ctrl-C: each thread ends after the piece that it is reading
            stop.set()
            raise


def described(faults: Mapping[str, str]) -> str:
    """'file x is missing' for messages, with the number of the others."""
    name, fault = next(iter(faults.items()))
    others = list(faults)[1:]
    verb = "are" if len(others) > 1 else "is"
    return f"{quoted(name)} {fault}" + (f"; damaged too {verb} {few(others, 'other file')}" if others else "")


def sha256(path: Path, advance: Advance = _ignore) -> str:
    """The SHA-256 of a file, in hex. OSError if `path` is no regular file that can be read."""
    digest, piece = hashlib.sha256(), bytearray(_PIECE)
    with open_regular(path) as file:
        for n in iter(partial(file.readinto, piece), 0):
            digest.update(memoryview(piece)[:n])
            advance(n)
    return digest.hexdigest()
