"""A directory of KV blocks: one file per block, named by its digest, with a header that identifies model and block.

    DIR/perilune-kv.lock                     held by the one engine that uses the directory
    DIR/FINGERPRINT/ab/DIGEST-FIRST.kv       blocks of one model, format, layout and block size
    DIR/FINGERPRINT/PID-NUMBER.part          a file being written: renamed when it is whole, deleted at the next start

A file is a header of 4,096 bytes and the bytes of one row of host memory. KV can reveal the users' text: only the owner
may read the directory and its files.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from perilune.core.errors import ConfigError
from perilune.core.files import open_regular
from perilune.kv.mover import Name

log = logging.getLogger("perilune.kv")

LOCK = "perilune-kv.lock"
FINGERPRINT_BYTES = DIGEST_BYTES = 16
HEADER_BYTES = 4096
_MAGIC = b"PRLNKV01"
_HEADER = struct.Struct(f"<8s{FINGERPRINT_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sQQ")
_CRC = struct.Struct("<I")
_local = threading.local()
_skipped: list[Path] = []
ENDED = -1  # returned instead of a file's size: the file was truncated while it was read
Reader = Callable[[Path, memoryview, memoryview], int]


class DamagedFile(Exception):
    """A file that must not be used, with the reason."""


@dataclass(frozen=True, slots=True)
class Found:
    name: Name
    age_seconds: float


class Directory:
    """The blocks of one fingerprint in `root`, each of `payload_bytes`. ConfigError if the directory cannot be used:
    another engine has it, it holds other files, it is another user's, or it cannot be written.

    lock  False: do not lock the directory, because another process of this engine has done so
    """

    def __init__(self, root: Path, fingerprint: bytes, payload_bytes: int, *, lock: bool = True) -> None:
        assert len(fingerprint) == FINGERPRINT_BYTES
        self.root, self.fingerprint, self.payload_bytes = root, fingerprint, payload_bytes
        self._own = root / fingerprint.hex()
        self._numbers = itertools.count()
        self._lock = _locked(root, create=True) if lock else None
        try:
            self._own.mkdir(mode=0o700, exist_ok=True)
            for stale, _ in _files(self._own, "*.part"):
                stale.unlink(missing_ok=True)
        except OSError as e:
            self.close()
            raise ConfigError(f"kv_disk={str(root)!r} cannot be used: {e.strerror}") from e

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    def found(self) -> list[Found]:
        """The blocks of this fingerprint, the least recently used first. Reads file names and times, not contents."""
        now = time.time()
        names = [(stat.st_mtime, name) for path, stat in _files(self._own) if (name := _name_of(path)) is not None]
        return [Found(name, max(now - used, 0.0)) for used, name in sorted(names, key=lambda one: one[0])]

    def shrink_others(self, limit_bytes: int, own: Sequence[bytes]) -> int:
        """Deletes blocks of other fingerprints than `own`, the least recently used first, until they take at most
        `limit_bytes`; returns the bytes that they take then."""
        kept = {fingerprint.hex() for fingerprint in own}
        others = sorted(
            (
                (stat.st_mtime, stat.st_size, path)
                for path, stat in _files(self.root)
                if path.relative_to(self.root).parts[0] not in kept
            ),
            key=lambda one: one[0],
            reverse=True,
        )
        total = 0
        for _, size, path in others:
            if total + size > limit_bytes:
                path.unlink(missing_ok=True)
            else:
                total += size
        return total

    def write(self, name: Name, payload: memoryview, checksum: int) -> None:
        """Writes the block's file, whole or not at all. Raises OSError; FileNotFoundError: the directory was
        deleted."""
        header = _HEADER.pack(_MAGIC, self.fingerprint, name.digest, name.first, self.payload_bytes, checksum)
        header += _CRC.pack(zlib.crc32(header))
        path = self._path(name)
        part = self._own / f"{os.getpid()}-{next(self._numbers)}.part"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                for data in (memoryview(header.ljust(HEADER_BYTES, b"\0")), payload):
                    while data:
                        data = data[os.write(handle, data) :]
            finally:
                os.close(handle)
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
            part.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def read(self, name: Name, payload: memoryview, reader: "Reader | None" = None) -> int:
        """Fills `payload` with the block's bytes; returns the header's checksum, which the caller compares with that of
        the bytes. DamagedFile if the header is not of this block and model; OSError. `reader`: instead of read_file."""
        path, header = self._path(name), _header_of_thread()
        size = (reader or read_file)(path, header, payload)
        if size == ENDED:
            raise DamagedFile(f"{path.name} ended while it was read")
        if size != self.file_bytes:
            raise DamagedFile(f"{path.name} has {size:,} bytes instead of {self.file_bytes:,}")
        (crc,) = _CRC.unpack_from(header, _HEADER.size)
        magic, fingerprint, digest, first, length, checksum = _HEADER.unpack_from(header)
        if magic != _MAGIC or crc != zlib.crc32(header[: _HEADER.size]):
            raise DamagedFile(f"{path.name} has a damaged header")
        if (fingerprint, digest, first, length) != (self.fingerprint, name.digest, name.first, self.payload_bytes):
            raise DamagedFile(f"{path.name} holds another block, or is of another model")
        return int(checksum)

    def delete(self, name: Name) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    @property
    def exists(self) -> bool:
        return self._own.is_dir()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _path(self, name: Name) -> Path:
        digest = name.digest.hex()
        return self._own / digest[:2] / f"{digest}-{name.first.hex()}.kv"


def require_usable(root: Path) -> None:
    """Makes the directory if there is none. ConfigError if Directory would refuse it."""
    _locked(root, create=True).close()


def clear(root: Path) -> tuple[int, int]:
    """Deletes every block in a directory of KV blocks: (files, bytes). ConfigError if `root` is none, or in use."""
    if not (root / LOCK).is_file():
        raise ConfigError(f"{root} is no directory of KV blocks: it has no {LOCK}")
    files = total = 0
    with _locked(root, create=False):
        for path, stat in _files(root):
            path.unlink(missing_ok=True)
            files, total = files + 1, total + stat.st_size
        for folder in sorted((p for p in root.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
            with contextlib.suppress(OSError):  # not empty: it has files that are not KV blocks
                folder.rmdir()
    return files, total


def _locked(root: Path, *, create: bool) -> BinaryIO:
    """The open, locked lock file of the directory. `create`: make the directory if there is none."""
    try:
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (root / LOCK).exists() and any(root.iterdir()):
                raise ConfigError(f"kv_disk={str(root)!r} holds other files: give an empty or a new directory")
        status = root.stat()
        if status.st_uid != os.geteuid():
            raise ConfigError(f"kv_disk={str(root)!r} belongs to another user: give a directory of your own")
        if status.st_mode & 0o077:
            root.chmod(0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.fdopen(os.open(root / LOCK, flags, 0o600), "r+b")
    except (FileExistsError, NotADirectoryError) as e:  # a file, or a link that leads nowhere, is in the way
        raise ConfigError(
            f"kv_disk={str(root)!r} cannot be used: it is no directory; give an empty or a new one"
        ) from e
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise ConfigError(f"kv_disk={str(root)!r} cannot be used: {getattr(e, 'strerror', e)}") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        lock.close()
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            remedy = "stop it, or give a directory of its own" if create else "stop it first"
            raise ConfigError(f"{root} is in use by another engine: {remedy}") from e
        raise ConfigError(f"{root} cannot be locked: {e.strerror}; give a directory on a local disk") from e
    return lock


def read_file(path: Path, header: memoryview, payload: memoryview) -> int:
    """The size of a regular file; ENDED if it was truncated meanwhile. If it has the size of `header` and `payload`
    together, it is read into both, and its time is set to now: after a restart its age counts from then. OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size == len(header) + len(payload):
            if not _fill(file.fileno(), header, payload):
                return ENDED
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
    return size


def _fill(file: int, header: memoryview, payload: memoryview) -> bool:
    """Reads a file's header and payload; False if the file is shorter. Uses O_DIRECT, because the kernel's read-ahead
    of 128 KB is slower (docs/kv.md), even for files in the page cache: testing for these, by RWF_NOWAIT, would itself
    start read-ahead."""
    total = len(header) + len(payload)
    for direct in (True, False):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
            done = 0
            while done < total:
                rest = (header[done:], payload) if done < len(header) else (payload[done - len(header) :],)
                count = os.preadv(file, rest, done)
                if not count:
                    return False
                done += count
            return True
        except OSError as e:
            if not direct or e.errno != errno.EINVAL:  # EINVAL: no O_DIRECT on this file system, or for these addresses
                raise
    raise AssertionError("the second way returns or raises")


def _header_of_thread() -> memoryview:
    """Page-aligned memory for a header, for O_DIRECT. One per thread: a mapping per file would stop all threads
    briefly."""
    if not hasattr(_local, "header"):
        _local.header = memoryview(mmap.mmap(-1, HEADER_BYTES))
    header: memoryview = _local.header
    return header


def _files(folder: Path, *patterns: str) -> Iterator[tuple[Path, os.stat_result]]:
    """All regular files of blocks below a folder, also those being written; not those deleted meanwhile."""
    for pattern in patterns or ("**/*.kv", "**/*.part"):
        for path in folder.glob(pattern):
            try:
                status = path.lstat()
            except OSError:
                continue
            if S_ISREG(status.st_mode):
                yield path, status
            elif not _skipped:
                _skipped.append(path)
                log.warning("%s is no regular file and is left alone, as are others (said once)", path)


def _name_of(path: Path) -> Name | None:
    digest, _, first = path.stem.partition("-")
    try:
        name = Name(bytes.fromhex(digest), bytes.fromhex(first))
    except ValueError:
        return None
    return name if len(name.digest) == len(name.first) == DIGEST_BYTES and path.suffix == ".kv" else None
