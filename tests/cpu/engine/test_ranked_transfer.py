"""Rank 0's view of what all ranks move: a record is complete when the last rank has said so, failed if one failed."""

from typing import Any

import pytest

from perilune.core.errors import EngineError
from perilune.engine.kv_tiers.ranked import Follower, Moved, RankedTransfer, _encode, _moved
from perilune.kv.tiers import Copied, Name, Piece, Restored, Stored, Written

NAME = Name(b"d" * 16, b"f" * 16)


class Own:
    """A Transfer that does nothing by itself."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.done: list[Any] = []
        self.rows, self.steps_run = 9, False

    def poll(self) -> list[Any]:
        done, self.done = self.done, []
        return done

    def wait(self, seconds: float) -> None: ...
    def wake(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


class Ranks:
    numbers = (1, 2)

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.on_moved: Any = None

    def move(self, body: bytes) -> None:
        self.sent.append(body)


@pytest.fixture
def rig() -> tuple[RankedTransfer, Own, Ranks]:
    own, ranks = Own(), Ranks()
    return RankedTransfer(own, ranks), own, ranks  # type: ignore[arg-type]


def test_every_rank_gets_the_same_records(rig: tuple[RankedTransfer, Own, Ranks]) -> None:
    mover, own, ranks = rig
    mover.store([(NAME, 3, 4), (NAME, 5, 6)])
    mover.restore(7, [Piece(NAME, 4, 8), Piece(NAME, None, 9)])
    mover.write(NAME, 4)
    mover.delete(NAME)
    other = Own()
    follower = object.__new__(Follower)
    follower.own = other  # type: ignore[assignment]
    for body in ranks.sent:
        follower.run(body)
    assert other.calls == own.calls and len(own.calls) == 4
    with pytest.raises(EngineError, match="malformed order"):
        follower.run(b"\xc1")


def test_a_record_is_complete_when_all_ranks_have_said_so(rig: tuple[RankedTransfer, Own, Ranks]) -> None:
    mover, own, ranks = rig
    assert mover.rows == 0, "no other rank has memory yet"
    first = [Copied(1), Stored(2), Restored(3, 0.5), Written(NAME)]
    own.done = list(first)
    ranks.on_moved(1, _encode(_moved(4, first[::-1])))
    assert mover.poll() == [] and mover.rows == 0
    ranks.on_moved(2, _encode(_moved(6, [Copied(1), Stored(2), Restored(3, 0.9)])))
    assert mover.poll() == [Copied(1), Stored(2), Restored(3, 0.9)] and mover.rows == 4
    ranks.on_moved(2, _encode(Moved(6, written=[((NAME.digest, NAME.first), None, False, False)])))
    assert mover.poll() == [Written(NAME)] and not own.calls
    own.done = [Copied(1)]
    assert mover.poll() == [], "the next one of the same block begins anew"
    ranks.on_moved(1, b"\x01")
    with pytest.raises(EngineError, match="malformed report"):
        mover.poll()


def test_one_ranks_failure_is_everybodys(rig: tuple[RankedTransfer, Own, Ranks]) -> None:
    mover, own, ranks = rig
    own.done = [Stored(2), Restored(3, 0.5, (b"a",), "bad"), Written(NAME)]
    ranks.on_moved(1, _encode(_moved(4, [Stored(2, "no"), Restored(3, 0.1, (b"b", b"a"), None), Written(NAME)])))
    ranks.on_moved(2, _encode(_moved(4, [Stored(2), Restored(3, 0.2), Written(NAME, "full", taken=True)])))
    assert mover.poll() == [Stored(2, "no"), Restored(3, 0.5, (b"a", b"b"), "bad"), Written(NAME, "full", taken=True)]
    assert own.calls == [("delete", NAME)] and len(ranks.sent) == 1, "the files that two ranks did write"
