"""The finished shards of a conversion, one line of JSON each, so that a killed conversion can be continued.

A line is appended only when its shard has its final name and is on the disk. The first line identifies source and
target; a directory with the journal of another conversion is refused.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from perilune.core.errors import CheckpointError, shown
from perilune.core.files import require_regular

NAME = ".perilune-convert.jsonl"


@dataclass(frozen=True, slots=True)
class Done:
    """A finished shard. losses: (linear layer, energy of its weights, energy of the error), in the file's order."""

    file: str
    nbytes: int
    sha256: str
    losses: tuple[tuple[str, float, float], ...]


class Journal:
    """The journal of an existing directory, locked while open: two conversions cannot write to one directory."""

    def __init__(self, directory: Path, job: Mapping[str, Any]) -> None:
        self.path = directory / NAME
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            require_regular(os.fstat(self._handle), self.path)
            self._lock()
            self.done = self._read(job)
        except BaseException:
            os.close(self._handle)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise CheckpointError(f"{self.path.parent} is being written by another conversion: wait for it") from e

    def _read(self, job: Mapping[str, Any]) -> dict[str, Done]:
        raw = Path(self.path).read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]  # a kill may have left half a line
        os.ftruncate(self._handle, len(whole))
        os.lseek(self._handle, 0, os.SEEK_END)
        lines = whole.splitlines()
        if not lines:
            self._append(job)
            return {}
        try:
            first, *rest = (json.loads(line) for line in lines)
            done = {r["file"]: _done(r) for r in rest}
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"{self.path} is damaged: remove {self.path.parent} and convert again") from e
        _require_same(self.path, first, job)
        return done

    def add(self, done: Done) -> None:
        self._append({"file": done.file, "nbytes": done.nbytes, "sha256": done.sha256, "losses": done.losses})
        self.done[done.file] = done

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        while line:
            line = line[os.write(self._handle, line) :]
        os.fsync(self._handle)

    def remove(self) -> None:
        """Deletes the journal; call it when the conversion is complete."""
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def require_job(directory: Path, job: Mapping[str, Any]) -> None:
    """CheckpointError if the journal in `directory` differs from `job` in any key of `job`. A damaged journal passes:
    opening it raises."""
    path = directory / NAME
    try:
        first = json.loads(path.read_bytes().partition(b"\n")[0])
    except (OSError, ValueError):
        return
    if isinstance(first, dict):
        first = {key: value for key, value in first.items() if key in job}
    _require_same(path, first, job)


def _require_same(path: Path, first: Any, job: Mapping[str, Any]) -> None:
    if first != job:
        keys = sorted(k for k in {*first, *job} if first.get(k) != job.get(k)) if isinstance(first, dict) else []
        named = shown(", ".join(keys)) or "everything"
        raise CheckpointError(
            f"{path.parent} holds an unfinished conversion that differs in {named}: repeat that one, or remove the "
            "directory"
        )


def _done(record: Mapping[str, Any]) -> Done:
    losses = tuple((name, signal, error) for name, signal, error in record["losses"])
    return Done(record["file"], record["nbytes"], record["sha256"], losses)


def fingerprint(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def sync(directory: Path) -> None:
    """Makes renames in a directory last through a power failure."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
