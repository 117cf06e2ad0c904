"""The messages between the index of the KV tiers (kv/tiers.py) and the `Mover` that copies the bytes (kv/transfer.py).

With several ranks, rank 0 keeps the index, and every rank gets the same records and has its own mover, rows, pages and
directory (engine/kv_tiers/ranked.py). So a block has one row number and file name on all ranks; each stores its shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Name:
    """A block's digest (kv/prefix.py) and that of the first block of its chain: `forget` drops whole chains by it."""

    digest: bytes
    first: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a restore: copied to the pages of `block` from `row` of host memory; `row` None: from its file."""

    name: Name
    row: int | None
    block: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The pages of this block have been copied and may be overwritten."""

    block: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The row holds the whole block, and its checksum is known; or storing the block failed with `error`."""

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
    """The write of a row to its file has ended, or failed with `error`. `gone`: because the directory was deleted;
    `taken`: because a directory has the file's name."""

    name: Name
    error: str | None = None
    gone: bool = False
    taken: bool = False


Done = Copied | Stored | Restored | Written


class Mover(Protocol):
    """Copies bytes in the background. `poll` returns the answers: records, in any order."""

    @property
    def rows(self) -> int:
        """Rows of host memory that are usable; it grows while memory is being pinned."""
        ...

    def store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        """Copies pages to rows, each (name, block, row). Answers: Copied, then Stored."""
        ...

    def restore(self, ticket: int, pieces: Sequence[Piece]) -> None:
        """Copies blocks back to the pages; fails if one piece fails. Answer: Restored."""
        ...

    def write(self, name: Name, row: int) -> None:
        """Writes the row to the block's file. Answer: Written."""
        ...

    def delete(self, name: Name) -> None:
        """Deletes the block's file, before any later `write` of it. No answer."""
        ...

    def poll(self) -> list[Done]:
        """The answers that have come since the last call."""
        ...
