"""Which blocks host memory drops: least recently used, corrected by how often blocks of the same kind came back.

A block comes back when a request asks for it again. Blocks are written to files before they are dropped, but only if
dropped blocks of their kind come back: when all blocks of 48 agents among 1,500 single questions were written, 87 % of
the files were never read.

A block's kind is the turn of the conversation that computed it, as far as the cache can see: 0 for a prompt of which
nothing was cached, 1 for what follows cached text of kind 0, and so on. In a tool loop, a session that has come back a
few times comes back again, while most first prompts never do; LRU would keep both equally long. So a block's idle time
is divided by its kind's learned chance to come back, and the block with the largest quotient is dropped. If all kinds
have the same chance, this is LRU.
"""

from collections import OrderedDict

KINDS = 4  # The last kind is for that turn and all later ones.
REMEMBERED = 1 << 16  # Digests of dropped blocks that are kept, to see which blocks come back after a drop.
MAX_COUNT = 1 << 14  # Counts of a kind are halved above this: old events matter less.
MIN_CHANCE = 1 / 16  # Min chance of a kind. Lower: kinds that hardly ever came back are dropped sooner still.
# Min share of a kind's dropped blocks that came back for files to be written. Higher: fewer files, fewer disk hits.
MIN_LATE_CHANCE = 1 / 16
TRUSTED_DROPS = 1 << 12  # Until a kind has more drops, all its blocks are written: dropped blocks may still come back.


class Retention:
    """Counts by kind how many blocks came back and how many were dropped and did not."""

    def __init__(self) -> None:
        self._back = [1.0] * KINDS
        self._gone = [1.0] * KINDS
        self._dropped: OrderedDict[bytes, int] = OrderedDict()
        self._drops, self._late = [0.0] * KINDS, [0.0] * KINDS  # dropped blocks; those of them that came back

    def chance(self, kind: int) -> float:
        """Learned probability that a block of this kind comes back."""
        return max(self._back[kind] / (self._back[kind] + self._gone[kind]), MIN_CHANCE)

    def worth_writing(self, kind: int) -> bool:
        """Whether blocks of this kind come back after host memory has dropped them, as far as is known."""
        return self._drops[kind] < TRUSTED_DROPS or self._late[kind] >= MIN_LATE_CHANCE * self._drops[kind]

    def returned(self, kind: int) -> None:
        """A request found a block in host memory."""
        self._back[kind] += 1
        self._fade(kind)

    def dropped(self, digest: bytes, kind: int) -> None:
        self._gone[kind] += 1
        self._drops[kind] += 1
        if self._drops[kind] > MAX_COUNT:
            self._drops[kind], self._late[kind] = self._drops[kind] / 2, self._late[kind] / 2
        self._dropped[digest] = kind
        self._dropped.move_to_end(digest)
        if len(self._dropped) > REMEMBERED:
            self._dropped.popitem(last=False)
        self._fade(kind)

    def stored(self, digest: bytes) -> None:
        """A block enters host memory: if it was dropped before, it has come back."""
        kind = self._dropped.pop(digest, None)
        if kind is not None:
            self._back[kind] += 1
            self._gone[kind] = max(self._gone[kind] - 1, 1.0)
            self._late[kind] += 1

    def _fade(self, kind: int) -> None:
        if self._back[kind] + self._gone[kind] > MAX_COUNT:
            self._back[kind], self._gone[kind] = self._back[kind] / 2 + 0.5, self._gone[kind] / 2 + 0.5
