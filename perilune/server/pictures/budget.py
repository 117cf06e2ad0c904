"""The memory of all pictures: what requests hold, and what is kept for the next request of a conversation."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from perilune.core.errors import RequestError
from perilune.core.messages import Picture, Video, pictures_of

CACHE_SHARE = 1 / 4  # of the limit, at most; requests take it back where they need it


class Budget:
    """The bytes that pictures of all requests take: as text until they are decoded, as patches until the answers that
    see them have ended. What is left keeps decoded pictures: a conversation sends its pictures again with each turn.

    held    bytes that requests hold
    cached  bytes of the pictures that are kept
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held = self.cached = 0
        self._kept: OrderedDict[bytes, Picture | Video] = OrderedDict()  # the one not used for longest first

    @contextlib.contextmanager
    def share(self) -> Iterator["Share"]:
        """What one request takes, given back at the end."""
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
        """Where there is room; the ones not used for longest make room."""
        if key in self._kept:
            return
        self._kept[key] = picture
        self.cached += nbytes(picture)
        self.make_room(0)

    def make_room(self, size: int) -> None:
        """Drops kept pictures until `size` bytes more, or at least those that requests hold, fit."""
        while self._kept and (
            self.held + self.cached + size > self.limit_bytes or self.cached > self.limit_bytes * CACHE_SHARE
        ):
            _, dropped = self._kept.popitem(last=False)
            self.cached -= nbytes(dropped)


def nbytes(medium: Picture | Video) -> int:
    """Of its patches."""
    return sum(memoryview(picture.patches).nbytes for picture in pictures_of([medium]))


class Share:
    """What one request holds of the budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        """RequestError: 503 if there is no room for `size` more bytes, 400 if there never is."""
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
        """Gives all of it back."""
        self.give(self._size)
