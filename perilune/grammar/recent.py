"""A cache bounded by the size of what it holds."""

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """An LRU cache. Keys are (group, text). The sum of the values' sizes is at most `most`. Not thread-safe: the caller
    holds a lock."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._kept: OrderedDict[tuple[str, str], tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: tuple[str, str]) -> V | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: tuple[str, str], value: V, size: int) -> None:
        self.pop(key)
        self._kept[key] = value, size
        self.size += size
        while self.size > self.most:
            self.pop(next(iter(self._kept)))

    def pop(self, key: tuple[str, str]) -> V | None:
        value, size = self._kept.pop(key, (None, 0))
        self.size -= size
        return value
