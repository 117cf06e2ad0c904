"""KV tiers of several ranks: rank 0 has the index and decides; every rank copies its own part of a block.

Each copy that rank 0 begins goes to the other ranks as an order between plans (engine/plan_wire.py). The order has the
number n of steps that rank 0 has no result of yet: a rank first waits until at most n steps are in flight, because an
earlier step may still read or write the blocks. A copy has ended when it has ended on every rank, and has failed if it
failed on one, so a block is in a tier on all ranks or on none.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from perilune.core.errors import EngineError
from perilune.engine.ranks import Ranks
from perilune.kv.mover import Copied, Done, Name, Piece, Restored, Stored, Written
from perilune.kv.transfer import Transfer

REPORT_SECONDS = 0.5  # While no copy ends, a rank reports this often how much host memory it has pinned, if that grew.


class Store(msgspec.Struct, array_like=True, frozen=True, tag="store"):
    blocks: list[tuple[bytes, bytes, int, int]]  # Name's fields, block, row


class Restore(msgspec.Struct, array_like=True, frozen=True, tag="restore"):
    ticket: int
    pieces: list[tuple[bytes, bytes, int | None, int]]  # Name's fields, row, block


class Write(msgspec.Struct, array_like=True, frozen=True, tag="write"):
    name: tuple[bytes, bytes]
    row: int


class Delete(msgspec.Struct, array_like=True, frozen=True, tag="delete"):
    name: tuple[bytes, bytes]


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """Copies of a rank that have ended since its last report, as fields of the records of kv/mover.py; `rows`: host
    rows that it can use so far."""

    rows: int
    copied: list[int] = []
    stored: list[tuple[int, str | None]] = []
    restored: list[tuple[int, float, tuple[bytes, ...], str | None]] = []
    written: list[tuple[tuple[bytes, bytes], str | None, bool, bool]] = []


Move = Store | Restore | Write | Delete
_encode = msgspec.msgpack.Encoder().encode
_moves, _reports = msgspec.msgpack.Decoder(Move), msgspec.msgpack.Decoder(Moved)


class RankedTransfer:
    """The Mover of rank 0, over all ranks."""

    def __init__(self, own: Transfer, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._rows = dict.fromkeys(ranks.numbers, 0)
        self._reports: deque[tuple[int, bytes]] = deque()  # bounded by the blocks and rows there are
        self._waiting: dict[tuple[type, int | bytes], tuple[int, Done]] = {}  # (ranks that have reported it, record)
        ranks.on_moved = self._heard

    @property
    def rows(self) -> int:
        return min(self._own.rows, *self._rows.values())

    @property
    def steps_run(self) -> bool:
        return self._own.steps_run

    @steps_run.setter
    def steps_run(self, running: bool) -> None:
        self._own.steps_run = running

    def store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        self._order(Store([(name.digest, name.first, block, row) for name, block, row in stores]))
        self._own.store(stores)

    def restore(self, ticket: int, pieces: Sequence[Piece]) -> None:
        self._order(Restore(ticket, [(p.name.digest, p.name.first, p.row, p.block) for p in pieces]))
        self._own.restore(ticket, pieces)

    def write(self, name: Name, row: int) -> None:
        self._order(Write((name.digest, name.first), row))
        self._own.write(name, row)

    def delete(self, name: Name) -> None:
        self._order(Delete((name.digest, name.first)))
        self._own.delete(name)

    def poll(self) -> list[Done]:
        done = self._own.poll()
        while self._reports:
            rank, body = self._reports.popleft()
            moved = report(body)
            self._rows[rank] = moved.rows
            done += records(moved)
        return [whole for one in done if (whole := self._merge(one)) is not None]

    def wait(self, seconds: float) -> None:
        self._own.wait(seconds)

    def close(self) -> None:
        self._own.close()

    def _order(self, move: Move) -> None:
        self._ranks.move(_encode(move))

    def _heard(self, rank: int, body: bytes) -> None:
        """Takes a report; called by the thread that receives messages of the ranks."""
        self._reports.append((rank, body))
        self._own.wake()

    def _merge(self, done: Done) -> Done | None:
        """Adds one rank's record; the merged record if every rank has reported it, else None."""
        key = _key(done)
        count, merged = self._waiting.pop(key, (0, done))
        if count:
            merged = _both(merged, done)
        if count < len(self._rows):
            self._waiting[key] = count + 1, merged
            return None
        if isinstance(merged, Written) and merged.error is not None and not merged.gone:
            self.delete(merged.name)  # the write failed on one rank; others may have written their files
        return merged


class Follower:
    """On a rank other than 0: runs copies on its own Transfer; a thread reports those that have ended."""

    def __init__(self, own: Transfer, send: Callable[[bytes], None]) -> None:
        self.own, self._send = own, send
        threading.Thread(target=self._report, name="perilune-kv-report", daemon=True).start()

    def run(self, body: bytes) -> None:
        """Begins what the order says. EngineError if it is malformed."""
        try:
            move = _moves.decode(body)
        except msgspec.DecodeError as e:
            raise EngineError(f"a malformed order for KV tiers reached this rank: {e}") from e
        match move:
            case Store():
                self.own.store([(Name(digest, first), block, row) for digest, first, block, row in move.blocks])
            case Restore():
                pieces = [Piece(Name(digest, first), row, block) for digest, first, row, block in move.pieces]
                self.own.restore(move.ticket, pieces)
            case Write():
                self.own.write(Name(*move.name), move.row)
            case Delete():
                self.own.delete(Name(*move.name))

    def _report(self) -> None:
        rows = -1
        while True:
            self.own.wait(REPORT_SECONDS)
            done, now = self.own.poll(), self.own.rows
            if done or now != rows:
                rows = now
                self._send(_encode(_moved(rows, done)))


def report(body: bytes) -> Moved:
    """The decoded report of a rank. EngineError if it is malformed."""
    try:
        return _reports.decode(body)
    except msgspec.DecodeError as e:
        raise EngineError(f"a rank sent a malformed report of its KV tiers: {e}") from e


def records(moved: Moved) -> list[Done]:
    return [
        *(Copied(block) for block in moved.copied),
        *(Stored(*one) for one in moved.stored),
        *(Restored(*one) for one in moved.restored),
        *(Written(Name(*name), error, gone, taken) for name, error, gone, taken in moved.written),
    ]


def _moved(rows: int, done: Sequence[Done]) -> Moved:
    moved = Moved(rows, [], [], [], [])
    for one in done:
        match one:
            case Copied():
                moved.copied.append(one.block)
            case Stored():
                moved.stored.append((one.row, one.error))
            case Restored():
                moved.restored.append((one.ticket, one.seconds, one.bad, one.error))
            case Written():
                moved.written.append(((one.name.digest, one.name.first), one.error, one.gone, one.taken))
    return moved


def _key(done: Done) -> tuple[type, int | bytes]:
    match done:
        case Copied():
            return Copied, done.block
        case Stored():
            return Stored, done.row
        case Restored():
            return Restored, done.ticket
        case Written():
            return Written, done.name.digest


def _both(a: Done, b: Done) -> Done:
    """Two ranks' records of one copy as one: failed if either failed, with the longer time."""
    if isinstance(a, Restored) and isinstance(b, Restored):
        bad = tuple(dict.fromkeys((*a.bad, *b.bad)))
        return Restored(a.ticket, max(a.seconds, b.seconds), bad, a.error or b.error)
    if isinstance(a, Written) and isinstance(b, Written):
        return Written(a.name, a.error or b.error, a.gone or b.gone, a.taken or b.taken)
    if isinstance(a, Stored) and isinstance(b, Stored):
        return replace(a, error=a.error or b.error)
    return a
