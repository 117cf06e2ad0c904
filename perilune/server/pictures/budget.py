"""The memory of all pictures: those of running requests, and a cache for the next request of a conversation."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from perilune.core.errors import RequestError
from perilune.core.messages import Picture, Video, pictures_of

CACHE_SHARE = 1 / 4  # The cache may take this share of the limit; it shrinks when requests need the memory.


class Budget:
    """The bytes of pictures of all requests: as text until they are decoded, then as patches until their answers have
    ended. The rest is a cache of decoded pictures, because a conversation sends its pictures again with each turn.

    held    bytes that requests hold
    cached  bytes of cached pictures
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held = self.cached = 0
        self._kept: OrderedDict[bytes, Picture | Video] = OrderedDict()  # the least recently used first

    @contextlib.contextmanager
    def share(self) -> Iterator["Share"]:
        """The share of one request, released at the end of the context."""
        share = Share(self)
        try:
            yield share
        finally:
            share.release()

    def get(self, key: bytes) -> Picture | Video | None:
        if (picture := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return picture

    def keep(self, key: bytes, picture: Picture | Video) -> None:
        """Caches a picture if there is room, after dropping least recently used ones."""
        if key in self._kept:
            return
        self._kept[key] = picture
        self.cached += nbytes(picture)
        self.make_room(0)

    def make_room(self, size: int) -> None:
        """Drops cached pictures until `size` more bytes fit and the cache has at most its share, or none is left."""
        while self._kept and (
            self.held + self.cached + size > self.limit_bytes or self.cached > self.limit_bytes * CACHE_SHARE
        ):
            _, dropped = self._kept.popitem(last=False)
            self.cached -= nbytes(dropped)


def nbytes(medium: Picture | Video) -> int:
    """Bytes of its patches."""
    return sum(memoryview(picture.patches).nbytes for picture in pictures_of([medium]))


class Share:
    """The part of the budget that one request holds."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        """Takes `size` more bytes. RequestError: 503 if they do not fit now, 400 if they exceed the whole budget."""
        budget = self._budget
        if self._size + size > budget.limit_bytes:
            raise RequestError(
                f"the pictures of this request need more than {budget.limit_bytes >> 20} MB of memory: send fewer, or "
                "smaller ones",
                code="too_many_pictures",
            )
        if budget.held + size > budget.limit_bytes:
            raise RequestError(
                "the pictures of other requests fill the memory for them: try again in 2 s",
                code="server_busy",
                status=503,
                retry_seconds=2,
            )
        budget.make_room(size)
        budget.held += size
        self._size += size

    def give(self, size: int) -> None:
        self._budget.held -= size
        self._size -= size

    def release(self) -> None:
        self.give(self._size)
