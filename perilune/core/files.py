"""Opening the files of a model directory. Anyone may have made the directory: a name in it may be that of a FIFO, where
open() waits for a writer without end, or of a device, where open() may act and reading may never end."""

import errno
import io
import os
import shutil
import stat
import tempfile
from pathlib import Path

from perilune.core.errors import ConfigError

MAX_BYTES = 1 << 28  # of a file that is read whole; the index of Kimi K2.5's NVFP4 checkpoint has 34 MB

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def exists(path: Path) -> bool:
    """Whether `path` exists. Also true if that cannot be known, for example without permission: the error of opening it
    then says why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def open_regular(path: Path) -> io.FileIO:
    """The regular file `path`, or the one that it links to, unbuffered for reading. OSError for anything else."""
    try:
        require_regular(os.stat(path), path)
        # Something else may have taken the name since: O_NONBLOCK keeps the open of a FIFO from waiting.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as e:  # a NUL in the name
        raise OSError(errno.EINVAL, f"its name is no file's ({e})", str(path)) from e
    try:
        require_regular(os.fstat(handle), path)
        return io.FileIO(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file. OSError for anything else, or more than MAX_BYTES."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {MAX_BYTES:,} are read", str(path))
        return file.read()


def free_bytes(directory: Path) -> int:
    """Free bytes of the disk that has `directory`, or its nearest parent that exists."""
    return shutil.disk_usage(_nearest(directory)).free


def _nearest(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def expanded(text: str, option: str) -> Path:
    """The path given with `option`, a leading ~ or ~USER replaced. ConfigError if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"{option}={text!r}: there is no such user; give the whole path") from e


def make_writable(directory: Path, option: str, *, dry: bool = False) -> None:
    """Makes the directory that the user named with `option`, unless `dry`. ConfigError if it cannot be written."""
    try:
        if not dry:
            directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=_nearest(directory)).close()
    except OSError as e:
        raise ConfigError(f"cannot write {directory}: {e.strerror}; choose another directory with {option}") from e


def require_regular(status: os.stat_result, path: Path) -> None:
    """OSError that says what `path` is, unless it is a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file: put one there", str(path))
