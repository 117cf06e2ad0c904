"""The records between the index of the KV tiers (kv/tiers.py) and the `Mover` that copies the bytes (kv/transfer.py).

With several ranks, rank 0 keeps the index, every rank gets the same records and has a mover of its own, with its own
rows, its own pages and its own directory; a record is complete when every rank has reported it, and failed if one of
them failed. So rows and files of different ranks stay parallel, and a rank stores the shard of a block that it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Name:
    """A block's digest (kv/prefix.py) and that of the first block of its chain: `forget` drops a whole chain."""

    digest: bytes
    first: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a restore: from host memory's `row`, None: from its file, to the pages of `block`."""

    name: Name
    row: int | None
    block: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The pages of this block have been copied and may be overwritten."""

    block: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The row holds its block, checksum included; with `error` it does not."""

    row: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore ended: complete if there is no `error`; else `bad` names the blocks that were damaged or missing."""

    ticket: int
    seconds: float
    bad: tuple[bytes, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A row was written to its file, or not: `gone` with the directory, or for want of space or another `error`."""

    name: Name
    error: str | None = None
    gone: bool = False


Done = Copied | Stored | Restored | Written


class Mover(Protocol):
    """Copies bytes in the background. `poll` returns the answers, in any order."""

    @property
    def rows(self) -> int:
        """Rows of host memory that are usable; it grows while memory is being pinned."""
        ...

    def store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        """(name, block, row) each: Copied, then Stored."""
        ...

    def restore(self, ticket: int, pieces: Sequence[Piece]) -> None:
        """All of the pieces, or the restore has failed: Restored."""
        ...

    def write(self, name: Name, row: int) -> None:
        """The row to the block's file: Written."""
        ...

    def delete(self, name: Name) -> None:
        """The block's file, without an answer; a later `write` of it comes after."""
        ...

    def poll(self) -> list[Done]:
        """What has ended since the last call."""
        ...
