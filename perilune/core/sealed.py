"""Bytes that processes share without a copy: files in memory, sealed so that they neither change nor shrink. Their
descriptors are sent over Unix sockets. Systems without memfd_create, such as macOS, use deleted temporary files, which
have no seals."""

import fcntl
import mmap
import os
import sys
import tempfile
from typing import Self

# If a file shrank, reading its mapping would end this process (SIGBUS). 0: not Linux.
SEALS = (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE) if sys.platform == "linux" else 0


class SealedFile:
    """Owns a file's descriptor, and closes it when nothing refers to this object."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def empty(cls) -> Self:
        """A new file, to which `write` adds until `seal` is called."""
        if sys.platform == "linux":
            return cls(os.memfd_create("patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    @classmethod
    def of(cls, data: memoryview) -> Self:
        self = cls.empty()
        self.write(data)
        self.seal()
        return self

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self.descriptor, data) :]

    def seal(self) -> None:
        if sys.platform == "linux":
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def mapped(self, start: int, size: int) -> memoryview:
        """`size` bytes from `start` on, read-only. Fewer if the file is shorter, none if it is not sealed. The mapping
        stays when this object has gone. OSError if the descriptor is of another kind, or memory is short."""
        sealed = sys.platform != "linux" or fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        size = min(size, os.fstat(self.descriptor).st_size - start) if sealed else 0
        if size <= 0:
            return memoryview(b"")
        before = start % mmap.ALLOCATIONGRANULARITY
        # Private, because before 6.7 Linux refuses a shared mapping of a file sealed against writing, even to read.
        pages = mmap.mmap(
            self.descriptor, before + size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=start - before
        )
        return memoryview(pages)[before:]
