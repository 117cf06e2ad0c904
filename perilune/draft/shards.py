"""The list of a directory's finished shards: a JSON line each, appended when the shard has its final name."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from perilune.core.errors import CheckpointError

SHARDS = "shards.jsonl"

T = TypeVar("T")


def listed(directory: Path, make: Callable[[Any], T], again: str) -> list[T]:
    """`make` of each line. `again` is the verb that writes such directories, for the error's remedy."""
    path = directory / SHARDS
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]  # a kill may have left half a line
    if whole != text:
        path.write_text(whole)
    try:
        return [make(json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError) as e:
        raise CheckpointError(f"{path} is damaged: remove {directory} and {again} again") from e


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
