"""The list of a directory's finished shards: a JSON line each, appended when the shard has its final name."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.files import exists, make_writable

SHARDS = "shards.jsonl"

T = TypeVar("T")


@contextlib.contextmanager
def alone(directory: Path, option: str = "--out") -> Iterator[None]:
    """Makes the directory that the user named with `option`, locks it, and at the end removes it if it is empty.
    ConfigError if it cannot be written, or another process writes to it: both would list their shards, under the same
    names, and replace each other's files. On a file system without locks, nothing is checked."""
    made = [path for path in (directory, *directory.parents) if not exists(path)]
    make_writable(directory, option)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno == errno.EWOULDBLOCK:
            os.close(handle)
            raise ConfigError(f"{directory} is being written by another process: wait for it, or stop it") from e
    try:
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):  # of one that has files
            for path in made:
                path.rmdir()


def listed(directory: Path, make: Callable[[Any], T], again: str) -> list[T]:
    """`make` of each line: a dataclass with the `file` of a shard. `again`: the verb that writes such directories,
    for the error's remedy."""
    path = directory / SHARDS
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]  # a kill may have left half a line
    if whole != data:
        os.truncate(path, len(whole))  # not written again: a kill, or a full disk, would lose the other lines
    try:
        found = [make(json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError, RecursionError):
        found = None
    if found is None or not all(map(_sound, found)):
        raise CheckpointError(f"{path} is damaged: remove {directory} and {again} again")
    return found


def _sound(shard: Any) -> bool:
    """Whether each field has its type, and the file is one of the directory: the remedy of `check` removes it."""
    typed = all(type(getattr(shard, f.name)) is f.type for f in dataclasses.fields(shard))
    return typed and Path(shard.file).name == shard.file


def append(directory: Path, shard: Any) -> None:
    with (directory / SHARDS).open("a") as file:
        file.write(json.dumps(shard) + "\n")
        file.flush()
        os.fsync(file.fileno())


def check(path: Path, checksum: str, again: str) -> None:
    if not path.is_file() or sha256(path) != checksum:
        raise CheckpointError(f"{path} is missing or damaged: remove {path.parent} and {again} again")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
