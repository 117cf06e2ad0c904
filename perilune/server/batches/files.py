"""Files on disk: what batches read and write. Each belongs to one API key; for other keys it does not exist (404).

A directory holds one folder per key, and a folder ID.json (metadata) and ID.data for each file, renamed from temporary
names, so that none is incomplete. One server uses a directory at a time. All calls but `write` are made in the event
loop.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from perilune.core.errors import ConfigError, RequestError
from perilune.core.files import open_regular
from perilune.text.tools import show

MAX_FILES = 10_000  # files per key
EXPIRY_SECONDS = 30 * 86_400
MIN_EXPIRY_SECONDS = 3600
OWNER_SHARE = 0.5  # share of `limit_bytes` that one API key may fill
FREE_BYTES = 256 << 20  # bytes of the disk that are left free
_ID = re.compile(r"(?:file|batch)[-_][0-9a-f]{32}")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """In place of the OSError of a full disk, raises RequestError 507."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _disk_full() from e


class FileStore:
    """All files have at most `limit_bytes` together, those of one API key OWNER_SHARE of that. A file of which
    `in_use(owner, id)` is true does not expire."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """ConfigError for a directory that cannot be used, or that another server uses."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        self.in_use: Callable[[str, str], bool] = lambda owner, id: False
        self._files: dict[str, dict[str, dict[str, Any]]] = {}  # by owner and id, oldest first
        self._bytes: dict[str, int] = {}  # by owner: bytes of files and of reservations
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(f"files_dir: another server uses {directory}: give each its own") from e
        except OSError as e:
            raise ConfigError(f"files_dir: cannot use {directory}: {e.strerror}") from e
        for folder in sorted(directory.glob("key-*")):
            self._load(folder)

    def close(self) -> None:
        os.close(self._lock)

    @full_disk()
    def folder(self, owner: str) -> Path:
        """The folder with the files of a key; owner "": a server without keys."""
        folder = self.directory / f"key-{owner}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def owners(self) -> list[str]:
        return [folder.name.removeprefix("key-") for folder in sorted(self.directory.glob("key-*"))]

    def reserve(self, owner: str, size: int) -> None:
        """Takes room for `size` bytes, which `free` gives back; RequestError 413 or, with a full disk, 507."""
        own = self.limit_bytes * (OWNER_SHARE if owner else 1) - self._bytes.get(owner, 0)
        left = min(self.limit_bytes - self.size_bytes, own)
        if size > left or len(self._files.get(owner, ())) >= MAX_FILES:
            raise RequestError(
                f"there is no room for {size:,} more bytes of files (serve --files-gb): delete files",
                code="store_full",
                status=413,
            )
        disk = os.statvfs(self.directory)
        if size > disk.f_bavail * disk.f_frsize - FREE_BYTES:
            raise _disk_full()
        self._add(owner, size)

    def free(self, owner: str, size: int) -> None:
        self._add(owner, -size)

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes.values())

    def _add(self, owner: str, size: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + size

    def write(self, owner: str, id: str, data: bytes) -> Path:
        """Writes data to a temporary file, for `keep`. Its bytes must have been reserved. Blocks on the disk."""
        path = self.folder(owner) / f"{id}.new"
        write_synced(path, data)
        return path

    def keep(
        self, owner: str, id: str, source: Path, about: Mapping[str, Any], expiry_seconds: int | None = None
    ) -> dict[str, Any]:
        """Turns the temporary file `source`, with reserved bytes, into a file; `about` has filename and purpose."""
        now = int(time.time())
        made = {
            "id": id,
            "object": "file",
            "bytes": source.stat().st_size,
            "created_at": now,
            "expires_at": now + (expiry_seconds or EXPIRY_SECONDS),
            "status": "processed",
            "status_details": None,
            **about,
        }
        # The server may end between the two writes: a record without data is no file, and `source` still exists.
        write_whole(self.folder(owner) / f"{id}.json", msgspec.json.encode(made))
        os.rename(source, self.path(owner, id))
        self._files.setdefault(owner, {})[id] = made
        return made

    def path(self, owner: str, id: str) -> Path:
        return self.folder(owner) / f"{id}.data"

    def list(self, owner: str) -> list[dict[str, Any]]:
        self.expire()
        return [*self._files.get(owner, {}).values()]

    def get(self, owner: str, id: str, param: str = "file_id") -> dict[str, Any]:
        """RequestError 404 if the owner has no such file."""
        self.expire()
        found = self._files.get(owner, {}).get(id)
        if found is None:
            raise RequestError(f"there is no file {show(id)}", param=param, code="file_not_found", status=404)
        return found

    def delete(self, owner: str, id: str) -> None:
        self.get(owner, id)
        self._forget(owner, id)

    def expire(self) -> None:
        now = time.time()
        for owner, files in self._files.items():
            for id in [id for id, f in files.items() if f["expires_at"] <= now and not self.in_use(owner, id)]:
                self._forget(owner, id)

    def _forget(self, owner: str, id: str) -> None:
        for end in (".json", ".data"):
            (self.folder(owner) / f"{id}{end}").unlink(missing_ok=True)
        self.free(owner, self._files[owner].pop(id)["bytes"])

    def _load(self, folder: Path) -> None:
        owner = folder.name.removeprefix("key-")
        found = {
            about["id"]: about for about in read_records(folder, "file") if self.path(owner, about["id"]).is_file()
        }
        self._files[owner] = dict(sorted(found.items(), key=lambda item: item[1]["created_at"]))
        self._add(owner, sum(about["bytes"] for about in found.values()))
        for path in folder.glob("file-*.data"):  # left by an upload during which the server ended
            if path.stem not in found:
                path.unlink(missing_ok=True)
        for path in folder.glob("*.new"):
            path.unlink(missing_ok=True)


def _disk_full() -> RequestError:
    why = "the server's disk is full: its operator must free some of it (serve --files-dir)"
    return RequestError(why, code="disk_full", status=507)


def new_id(kind: str) -> str:
    return f"{kind}{'-' if kind == 'file' else '_'}{uuid.uuid4().hex}"


@full_disk()
def write_synced(path: Path, data: bytes) -> None:
    """Leaves no file where it fails."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name and renames it, so that no incomplete file is ever found."""
    new = path.with_suffix(path.suffix + ".new")
    write_synced(new, data)
    os.rename(new, path)


def read_records(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The records of a kind in a folder; damaged ones are skipped."""
    for path in folder.glob(f"{kind}*.json"):
        try:
            with open_regular(path) as file:
                record = msgspec.json.decode(file.read())
        except (OSError, msgspec.DecodeError):
            continue
        if isinstance(record, dict) and record.get("id") == path.stem and _ID.fullmatch(path.stem):
            yield record
