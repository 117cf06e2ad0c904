"""The index of the files that hold KV blocks on disk: which to delete if they are too many or too old. Policy only;
kv/disk.py reads and writes the files."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from perilune.kv.mover import Name


@dataclass(slots=True, eq=False)
class File:
    """A block's file. `users`: restores that read it; a dropped file is deleted when the last of these has ended."""

    name: Name
    used: float
    users: int = 0
    dropped: bool = False


class FileIndex:
    """The files, by the digest of their block, the least recently used first.

    files   (name, time of last use), the least recently used first
    limit   files, at most; 0: there is no disk, or its directory was deleted
    delete  called with the name of each file that is dropped, when no restore reads it
    """

    def __init__(self, files: Iterable[tuple[Name, float]], limit: int, delete: Callable[[Name], None]) -> None:
        self._files = OrderedDict((name.digest, File(name, used)) for name, used in files)
        self._dropped: set[bytes] = set()  # digests of dropped files that a restore still reads
        self.limit, self._delete = limit, delete
        while len(self._files) > limit:
            self.drop(next(iter(self._files)))

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._files

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def may_write(self, digest: bytes) -> bool:
        """Whether the block has no file, nor a dropped one that is yet to be deleted: that would delete a new one."""
        return digest not in self._files and digest not in self._dropped

    def add(self, name: Name, used: float) -> None:
        """Registers a file that was written."""
        self._files[name.digest] = File(name, used)

    def touch(self, digest: bytes, now: float) -> None:
        """Marks a file, if there is one, as the most recently used."""
        if (file := self._files.get(digest)) is not None:
            file.used = now
            self._files.move_to_end(digest)

    def acquire(self, digest: bytes) -> File:
        """The file of a known block, for a restore that begins."""
        file = self._files[digest]
        file.users += 1
        return file

    def release(self, file: File) -> None:
        file.users -= 1
        if file.dropped and not file.users:
            self._dropped.remove(file.name.digest)
            self._delete(file.name)

    def make_room(self, writing: int) -> bool:
        """Whether there is room for one more file besides `writing` that are being written. To make room, drops the
        least recently used files that no restore reads."""
        while len(self._files) + writing >= self.limit:
            idle = next((digest for digest, file in self._files.items() if not file.users), None)
            if idle is None:
                return False
            self.drop(idle)
        return True

    def drop(self, digest: bytes) -> None:
        """Drops a file, if there is one; it is deleted when no restore reads it."""
        if (file := self._files.pop(digest, None)) is None:
            return
        file.dropped = True
        if file.users:
            self._dropped.add(digest)
        else:
            self._delete(file.name)

    def forget(self, first: bytes) -> None:
        """Drops the files of all chains that begin with this digest."""
        for digest in [d for d, file in self._files.items() if file.name.first == first]:
            self.drop(digest)

    def expire(self, before: float) -> None:
        """Drops the files that were last used before this time and that no restore reads."""
        for digest in [d for d, file in self._files.items() if file.used < before and not file.users]:
            self.drop(digest)

    def close(self) -> None:
        """The directory was deleted: from now on no file is added or deleted."""
        self.limit = 0
        self._files.clear()
