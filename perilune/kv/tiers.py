"""The index of the KV tiers: which blocks host memory and disk hold, and which to copy next. Policy only.

A block leaves the pages when it is evicted from the prefix tree: it is copied to a row of host memory (`evict`), and
its pages are free once the copy is complete. Rows that will be dropped next are written to files ahead of need. If a
request finds blocks of its prefix here, they are copied back (`restore`), all or none. Rows of restored blocks are
dropped before all others until their blocks are evicted again: the pages hold the same bytes.

A `Mover` (kv/mover.py) copies the bytes; this module only sends it records: (digest, block, row).
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from perilune.kv.file_index import File, FileIndex
from perilune.kv.mover import Copied, Mover, Name, Piece, Restored, Stored, Written
from perilune.kv.retention import KINDS, Retention

log = logging.getLogger("perilune.kv")

HOST, DISK = "host", "disk"
# Files being written at a time: 8,192 tokens in blocks of 64. More: more rows are in use and cannot be dropped.
WRITES_AT_ONCE = 128
# Number of rows to be dropped next that are written to files ahead. If two steps evict more, blocks are dropped without
# a file, however fast the disk is, because writes begin only between steps. More: each poll looks at more rows.
WRITE_AHEAD_ROWS = 256
SEARCHED_ROWS = 64  # rows of each queue, besides those being written, in which one is sought that loses no block
PAUSE_SECONDS = 60.0  # No file is written for this long after a write has failed, as on a full disk.
EXPIRE_SECONDS = 10.0  # Interval at which blocks older than their time to live are deleted.


@dataclass(slots=True, eq=False)
class _Row:
    """A block in host memory. `users`: transfers that read or fill the row; it is not reused before they end.
    `turn`: as in kv/retention.py; `in_pages`: the block was restored, so the pages have it too; `fileless`: the block's
    file cannot be made."""

    name: Name
    row: int
    used: float
    turn: int
    in_pages: bool = False
    fileless: bool = False
    complete: bool = False
    users: int = 1
    forgotten: bool = False


@dataclass(slots=True)
class _Restore:
    pieces: list[Piece]
    rows: list[_Row]
    files: list[File]
    sent: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a restore: `host` and `disk` blocks in `seconds`."""

    ticket: int
    complete: bool
    seconds: float
    host: int
    disk: int


class Tiers:
    """Which blocks each tier holds. Used by the thread that plans.

    rows         rows of host memory, at most
    files        (name, age in seconds) of blocks that the disk has, oldest first; None: there is no disk
    file_limit   files, at most
    ttl_seconds  a block that was not used for longer is dropped
    clock        gives the time, seconds
    retention    chooses the row to drop; None: a new one
    """

    def __init__(
        self,
        mover: Mover,
        *,
        rows: int,
        files: Iterable[tuple[Name, float]] | None = None,
        file_limit: int = 0,
        ttl_seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
        retention: Retention | None = None,
    ) -> None:
        self._mover, self._rows, self._ttl, self._clock = mover, rows, ttl_seconds, clock
        now = clock()
        self._host: dict[bytes, _Row] = {}
        # The rows of _host by turn, least recently used first, so that the row to drop is near the front of a queue.
        self._kinds: list[OrderedDict[bytes, _Row]] = [OrderedDict() for _ in range(KINDS)]
        self._in_pages: OrderedDict[bytes, _Row] = OrderedDict()  # rows of blocks that the pages have too
        self._retention = retention or Retention()
        aged = [(name, now - age) for name, age in files or ()]
        self._disk = FileIndex(aged, file_limit if files is not None else 0, mover.delete)
        self._known_rows = 0  # rows that the mover has offered so far
        self._free: list[int] = []
        self._filling: dict[int, _Row] = {}  # by row: stores in flight
        self._limbo: dict[int, _Row] = {}  # by row: forgotten, but a transfer still uses the row
        self._writing: dict[bytes, _Row] = {}
        self.leaving: set[int] = set()  # blocks being copied to host memory: their pages must not be overwritten yet
        self._stores: list[tuple[Name, int, int]] = []  # not sent yet
        self._restores: dict[int, _Restore] = {}
        self._pause_until, self._expired_at = now, now - EXPIRE_SECONDS  # the first poll drops files that are too old
        self._warned: set[str] = set()
        self.dropped = 0  # blocks dropped for lack of a row or of disk space
        self.damaged = 0  # blocks found damaged or missing when they were restored

    @property
    def busy(self) -> bool:
        return bool(self.leaving or self._restores)

    @property
    def host_blocks(self) -> int:
        return len(self._host)

    @property
    def disk_blocks(self) -> int:
        return len(self._disk)

    @property
    def rows_ready(self) -> int:
        """Rows that can be used now: memory is pinned in the background."""
        return min(self._mover.rows, self._rows)

    @property
    def row_limit(self) -> int:
        return self._rows

    @property
    def file_limit(self) -> int:
        return self._disk.limit

    def match(self, digests: Sequence[bytes]) -> list[str]:
        """HOST or DISK for each leading block of this chain, up to the first block that no tier has."""
        found = []
        for digest in digests:
            if digest in self._host:
                found.append(HOST)
            elif digest in self._disk:
                found.append(DISK)
            else:
                break
        return found

    def turn(self, digest: bytes) -> int:
        """The turn of a block in host memory; 0 if it is not there."""
        held = self._host.get(digest)
        return 0 if held is None else held.turn

    def loses(self) -> bool:
        """Whether `evict` would now lose a block that could be kept once transfers in flight have ended."""
        if self._free or not (self._writing or self._filling):
            return False
        return not self._next_row()[1]

    def touch(self, digests: Sequence[bytes]) -> None:
        """Marks the blocks of a matched chain as the most recently used, the first block last: it is dropped last."""
        for digest in reversed(digests):
            if (held := self._host.get(digest)) is not None:
                self._touch(held, in_pages=held.in_pages)
            self._disk.touch(digest, self._clock())

    def evict(self, name: Name, block: int, turn: int = 0) -> bool:
        """Stores a block that the prefix tree has evicted; `turn` as in kv/retention.py. True: its pages must not be
        overwritten until `poll` returns the block; False: they are free."""
        held = self._host.get(name.digest)
        if held is not None:
            self._touch(held)
            return False
        row = self._take_row()
        if row is None:
            self.dropped += name.digest not in self._disk
            return False
        held = _Row(name, row, self._clock(), min(turn, KINDS - 1))
        self._host[name.digest] = self._filling[row] = self._kinds[held.turn][name.digest] = held
        self._retention.stored(name.digest)
        self.leaving.add(block)
        self._stores.append((name, block, row))
        return True

    def restore(self, ticket: int, chain: Sequence[tuple[bytes, int]]) -> None:
        """Begins to copy matched digests to the pages of their blocks; `poll` returns the Outcome."""
        restore = _Restore([], [], [])
        for digest, block in chain:
            if (held := self._host.get(digest)) is not None:
                held.users += 1
                restore.rows.append(held)
                restore.pieces.append(Piece(held.name, held.row, block))
            else:
                file = self._disk.acquire(digest)
                restore.files.append(file)
                restore.pieces.append(Piece(file.name, None, block))
        turn = min(max((held.turn for held in restore.rows), default=0) + 1, KINDS - 1)  # the session came back
        for digest, _ in reversed(chain):  # so that a chain's end is dropped before its beginning
            if (held := self._host.get(digest)) is not None:
                self._retention.returned(held.turn)
                self._touch(held, turn, in_pages=True)
            self._disk.touch(digest, self._clock())
        self._restores[ticket] = restore

    def poll(self) -> tuple[list[int], list[Outcome]]:
        """Handles the mover's answers and begins the copies that can begin. Returns the blocks that are free now, and
        the restores that ended."""
        freed: list[int] = []
        ended: list[Outcome] = []
        for done in self._mover.poll():
            match done:
                case Copied():
                    self.leaving.remove(done.block)
                    freed.append(done.block)
                case Stored():
                    self._stored(done)
                case Restored():
                    ended.append(self._restored(done))
                case Written():
                    self._written(done)
        rows = self.rows_ready
        self._free.extend(range(rows - 1, self._known_rows - 1, -1))
        self._known_rows = max(rows, self._known_rows)
        self._expire()
        self._write_ahead()
        self.flush()
        for ticket, restore in list(self._restores.items()):
            if restore.sent or any(self._filling.get(held.row) is held for held in restore.rows):
                continue
            if all(held.complete for held in restore.rows):
                restore.sent = True
                self._mover.restore(ticket, restore.pieces)
            else:
                ended.append(self._restored(Restored(ticket, 0.0, error="a block did not reach host memory")))
        return freed, ended

    def flush(self) -> None:
        """Sends the mover the blocks evicted since the last call, in one record."""
        if self._stores:
            stores, self._stores = self._stores, []
            self._mover.store(stores)

    def forget(self, first: bytes) -> None:
        """Drops every block of the chains that begin with this digest: no request will find them again."""
        for held in [h for h in self._host.values() if h.name.first == first]:
            self._drop_row(held)
        self._disk.forget(first)

    def check(self) -> None:
        """Asserts that every row is in exactly one place. Slow: for tests."""
        held = [h.row for h in self._host.values()] + list(self._limbo)
        assert sorted(held + self._free) == list(range(self._known_rows)), "lost rows"
        queues = [*self._kinds, self._in_pages]
        assert self._host == {digest: h for queue in queues for digest, h in queue.items()}, "lost kinds"
        assert all(not h.complete and h.users for h in self._filling.values())
        assert all(h.complete or h.row in self._filling for h in self._host.values())
        assert len(self._disk) + len(self._writing) <= self.file_limit or not self.file_limit, "too many files"
        users = [h for r in self._restores.values() for h in r.rows] + list(self._filling.values())
        users += list(self._writing.values())
        for known in (*self._host.values(), *self._limbo.values()):
            assert known.users == sum(h is known for h in users), (known, "lost users")

    # ---- host memory

    def _queue(self, held: _Row) -> OrderedDict[bytes, _Row]:
        return self._in_pages if held.in_pages else self._kinds[held.turn]

    def _touch(self, held: _Row, turn: int = 0, *, in_pages: bool = False) -> None:
        held.used = self._clock()
        del self._queue(held)[held.name.digest]
        held.turn, held.in_pages = max(held.turn, turn), in_pages
        self._queue(held)[held.name.digest] = held

    def _next_row(self) -> tuple[_Row | None, bool]:
        """The row to reuse when none is free, and whether reusing it loses no block that could be kept. Rows of blocks
        that the pages have too come first, then other rows that lose nothing, then the row with the largest quotient of
        idle time and its kind's chance to come back (kv/retention.py). None: all rows are in use."""
        now, best, best_score, best_lossless = self._clock(), None, -1.0, False
        for queue in (self._in_pages, *self._kinds):
            for held in islice(queue.values(), len(self._writing) + SEARCHED_ROWS):
                if held.users or not held.complete:
                    continue
                # Lossless: the pages have the block, it has a file, or it would not be written to one.
                lossless = held.in_pages or held.fileless or held.name.digest in self._disk
                lossless = lossless or not (self._disk.limit and self._retention.worth_writing(held.turn))
                score = inf if held.in_pages else (now - held.used) / self._retention.chance(held.turn)
                if (lossless, score) > (best_lossless, best_score):
                    best, best_score, best_lossless = held, score, lossless
                if lossless:
                    break
        return best, best_lossless

    def _take_row(self) -> int | None:
        """A free row, made free by `_next_row` if necessary; None: all rows are in use."""
        if self._free:
            return self._free.pop()
        best, _ = self._next_row()
        if best is None:
            return None
        if not best.in_pages:
            self.dropped += best.name.digest not in self._disk
            self._retention.dropped(best.name.digest, best.turn)
        self._drop_row(best)
        return self._free.pop()

    def _drop_row(self, held: _Row) -> None:
        del self._host[held.name.digest], self._queue(held)[held.name.digest]
        if held.users:
            held.forgotten = True
            self._limbo[held.row] = held
        else:
            self._free.append(held.row)

    def _end_use(self, held: _Row) -> None:
        held.users -= 1
        if held.forgotten and not held.users:
            del self._limbo[held.row]
            self._free.append(held.row)

    def _stored(self, done: Stored) -> None:
        held = self._filling.pop(done.row)
        held.complete = done.error is None
        if done.error is not None:
            self._warn("store", f"a block could not be copied to host memory: {done.error}")
            if not held.forgotten:
                self._drop_row(held)
        self._end_use(held)

    def _restored(self, done: Restored) -> Outcome:
        restore = self._restores.pop(done.ticket)
        lost = any(held.forgotten for held in restore.rows) or any(file.dropped for file in restore.files)
        complete = done.error is None and not lost
        for held in restore.rows:
            self._end_use(held)
            if held.in_pages and not held.forgotten and not complete:  # the pages do not have the block
                self._touch(held)
        for file in restore.files:
            self._disk.release(file)
        for digest in done.bad:
            self.damaged += 1
            if (held_now := self._host.get(digest)) is not None:
                self._drop_row(held_now)
            self._disk.drop(digest)
        if done.error is not None:
            self._warn("restore", f"stored KV is not used and computed again: {done.error}")
        return Outcome(done.ticket, complete, done.seconds, len(restore.rows), len(restore.files))

    # ---- disk

    def _write_ahead(self) -> None:
        """Begins to write the rows that would be dropped next, if few rows are free."""
        ahead = min(WRITE_AHEAD_ROWS, self._rows)
        if not self._disk.limit or len(self._free) >= ahead or self._clock() < self._pause_until:
            return
        if self._known_rows < self._rows:
            return
        queues = [queue for queue in self._kinds if queue]
        at_once = min(WRITES_AT_ONCE, max(self._rows // 2, 1))  # a row that is being written cannot be dropped
        for held in (held for queue in queues for held in islice(queue.values(), -(-ahead // len(queues)))):
            if len(self._writing) >= at_once:
                return
            new = self._disk.may_write(held.name.digest) and held.name.digest not in self._writing
            wanted = held.complete and new and not held.fileless and self._retention.worth_writing(held.turn)
            if wanted and self._disk.make_room(len(self._writing)):
                held.users += 1
                self._writing[held.name.digest] = held
                self._mover.write(held.name, held.row)

    def _written(self, done: Written) -> None:
        held = self._writing.pop(done.name.digest)
        if done.error is None and held.forgotten:
            self._mover.delete(done.name)
        elif done.error is None and self._disk.limit:
            self._disk.add(done.name, held.used)
        elif done.gone:
            self._warn("write", f"the directory for KV blocks is not used any more: {done.error}")
            self._disk.close()
        elif done.taken:
            held.fileless = True
            self._warn("taken", f"a KV block has no file: {done.error}")
        elif done.error is not None:
            self._pause_until = self._clock() + PAUSE_SECONDS
            self._warn("write", f"KV blocks are not written to disk for {PAUSE_SECONDS:.0f} s: {done.error}")
        self._end_use(held)

    def _expire(self) -> None:
        now = self._clock()
        if now - self._expired_at < EXPIRE_SECONDS:
            return
        self._expired_at = now
        for held in [h for h in self._host.values() if now - h.used > self._ttl and not h.users]:
            self._drop_row(held)
        self._disk.expire(now - self._ttl)

    def _warn(self, kind: str, text: str) -> None:
        """Logs a warning once per kind: a damaged disk could give thousands."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s (said once)", text)
