"""Blocks of pictures on the device: new ones as the data processes finish them, and earlier ones again meanwhile."""

import queue
import threading
from collections.abc import Callable, Iterator
from random import Random

from torch import Tensor

Block = dict[str, Tensor]

KEPT = 512  # blocks kept for use again, of about 17 MB each
LEAST = 64  # blocks that must be kept before one is used again
AHEAD = 8


class Feeder:
    """Blocks after `prepare`, which moves them to the device. With `again`, a step does not wait for data processes
    once LEAST blocks are kept: a kept block is then used again, chosen at random."""

    def __init__(self, blocks: Iterator[Block], prepare: Callable[[Block], Block], seed: int, again: bool) -> None:
        self.blocks, self.prepare, self.again = blocks, prepare, again
        self.fresh = self.repeated = 0
        self._rng = Random(f"{seed}:again")
        self._kept: list[Block] = []
        self._queue: queue.Queue[Block | BaseException] = queue.Queue(AHEAD)
        self._end = threading.Event()
        if again:
            self._thread = threading.Thread(target=self._fetch, name="blocks", daemon=True)
            self._thread.start()

    def _fetch(self) -> None:
        found: Block | BaseException | None = None
        while not self._end.is_set() and not isinstance(found, BaseException):
            try:
                found = next(self.blocks)
            except BaseException as e:  # passed on, and raised where blocks are taken
                found = e
            while not self._end.is_set():
                try:
                    self._queue.put(found, timeout=0.5)
                    break
                except queue.Full:
                    pass

    def close(self) -> None:
        self._end.set()
        if self.again:
            self._thread.join(10)

    def __next__(self) -> Block:
        if not self.again:
            self.fresh += 1
            return self.prepare(next(self.blocks))
        try:
            found = self._queue.get(block=len(self._kept) < LEAST)
        except queue.Empty:
            self.repeated += 1
            return self._rng.choice(self._kept)
        if isinstance(found, BaseException):
            raise found
        self.fresh += 1
        if len(self._kept) == KEPT:
            self._kept.pop(0)
        self._kept.append(self.prepare(found))
        return self._kept[-1]
