"""The index of the tiers against a mover that copies in random order, and sometimes fails: no block, row or file is
lost or used twice, and what a restore brings is what was stored under that digest."""

import random
from collections import deque

import pytest

from perilune.kv.blocks import BlockPool
from perilune.kv.prefix import PrefixTree
from perilune.kv.retention import Retention
from perilune.kv.tiers import DISK, HOST, Copied, Name, Outcome, Restored, Stored, Tiers, Written

MINUTE = 60.0


class FakeMover:
    """Blocks, rows and files hold the digest of what was last put there. Works in steps, in random order; `faults` is
    the share of transfers that fail."""

    def __init__(self, blocks: int, rows: int, rng: random.Random, faults: float = 0.0) -> None:
        self.pages: list[bytes | None] = [None] * blocks
        self.held: list[bytes | None] = [None] * rows
        self.files: dict[bytes, bytes] = {}
        self.rows, self.rng, self.faults = rows, rng, faults
        self.queue: deque = deque()
        self.done: list = []
        self.gone = self.full = False  # `full`: only writes fail
        self.taken: set[bytes] = set()
        self.refused = 0

    def store(self, stores):
        self.queue.extend(("store", *s) for s in stores)

    def restore(self, ticket, pieces):
        self.queue.append(("restore", ticket, list(pieces)))

    def write(self, name, row):
        self.queue.append(("write", name, row))

    def delete(self, name):
        self.queue.append(("delete", name))

    def work(self, count: int) -> None:
        """Ends up to `count` transfers. Writes and deletes keep their order, as they have one thread."""
        for _ in range(min(count, len(self.queue))):
            at = self.rng.randrange(len(self.queue))
            if self.queue[at][0] in ("write", "delete"):
                at = next(i for i, work in enumerate(self.queue) if work[0] in ("write", "delete"))
            work = self.queue[at]
            del self.queue[at]
            getattr(self, f"_{work[0]}")(*work[1:])

    def poll(self):
        done, self.done = self.done, []
        return done

    def _fails(self) -> bool:
        return self.rng.random() < self.faults

    def _store(self, name, block, row):
        assert self.pages[block] == name.digest, "the pages were overwritten before they were copied"
        failed = not self.full and self._fails()
        self.held[row] = None if failed else name.digest
        self.done += [Copied(block), Stored(row, "no" if failed else None)]

    def _restore(self, ticket, pieces):
        bad = []
        for piece in pieces:
            there = self.files.get(piece.name.digest) if piece.row is None else self.held[piece.row]
            assert piece.row is None or there == piece.name.digest, "a row was reused while it was read"
            if there is None or self._fails():
                bad.append(piece.name.digest)
            else:
                self.pages[piece.block] = there
        self.done.append(Restored(ticket, 0.001, tuple(bad), "damaged" if bad else None))

    def _write(self, name, row):
        assert self.held[row] == name.digest, "a row was reused before it was written"
        if name.digest in self.taken:
            self.refused += 1
            self.done.append(Written(name, "a directory", taken=True))
        elif self.gone or self._fails():
            self.done.append(Written(name, "no space", self.gone))
        else:
            self.files[name.digest] = name.digest
            self.done.append(Written(name))

    def _delete(self, name):
        self.files.pop(name.digest, None)


def name(number: int, first: int = 0) -> Name:
    return Name(number.to_bytes(16, "big"), first.to_bytes(16, "big"))


def tiers_of(rows=4, files=None, file_limit=0, **more):
    rng = random.Random(0)
    mover = FakeMover(64, more.pop("ready", rows), rng)
    tiers = Tiers(mover, rows=rows, files=files, file_limit=file_limit, **more)
    tiers.poll()
    return tiers, mover


def put(tiers, mover, *numbers, first=0, turn=0):
    """Evicts these blocks one after the other, each with all that follows from it."""
    for number in numbers:
        mover.pages[number % 64] = name(number).digest
        assert tiers.evict(name(number, first), number % 64, turn)
        tiers.flush()
        for _ in range(2):
            mover.work(100)
            tiers.poll()
        tiers.check()


def found(tiers, *numbers):
    return tiers.match([name(n).digest for n in numbers])


class FirstPromptsUnwritten(Retention):
    def worth_writing(self, kind: int) -> bool:
        return kind > 0


# ---- tiers


def test_a_block_is_free_only_when_it_is_copied() -> None:
    tiers, mover = tiers_of()
    mover.pages[5] = name(5).digest
    assert tiers.evict(name(5), 5) and tiers.leaving == {5}
    assert tiers.poll() == ([], [])
    mover.work(1)
    assert tiers.poll() == ([5], []) and not tiers.leaving
    assert found(tiers, 5, 6) == [HOST]


def test_what_host_memory_has_is_not_copied_again() -> None:
    tiers, mover = tiers_of()
    put(tiers, mover, 1)
    assert not tiers.evict(name(1), 9) and not mover.queue


def test_host_memory_drops_what_was_used_longest_ago() -> None:
    tiers, mover = tiers_of(rows=3)
    put(tiers, mover, 1, 2, 3)
    tiers.evict(name(1), 1)  # used again
    put(tiers, mover, 4)
    assert [bool(found(tiers, n)) for n in (1, 2, 3, 4)] == [True, False, True, True]
    assert tiers.dropped == 1


def test_a_block_that_the_pages_have_too_is_dropped_before_all_others() -> None:
    """Until it is evicted from the pages again; it is not counted as lost, and is not written to a file."""
    tiers, mover = tiers_of(rows=3)
    put(tiers, mover, 1, 2, 3)
    tiers.restore(0, [(name(3).digest, 33)])
    tiers.poll()
    mover.work(1)
    assert tiers.poll()[1][0].complete
    tiers.check()
    assert [tiers.turn(name(n).digest) for n in (1, 3)] == [0, 1]
    put(tiers, mover, 4)
    assert [bool(found(tiers, n)) for n in (1, 2, 3, 4)] == [True, True, False, True] and not tiers.dropped
    put(tiers, mover, 3)  # evicted from the pages: the least recently used of the others goes
    assert [bool(found(tiers, n)) for n in (1, 2, 3, 4)] == [False, True, True, True] and tiers.dropped == 1


def test_with_a_disk_too_it_goes_before_others_and_gets_no_file() -> None:
    tiers, mover = tiers_of(rows=4, files=(), file_limit=100)
    put(tiers, mover, 1)
    tiers.restore(0, [(name(1).digest, 33)])
    mover.files.clear()
    tiers._disk.drop(name(1).digest)  # nor has it one of earlier
    tiers.poll()
    mover.work(2)
    assert tiers.poll()[1][0].complete
    put(tiers, mover, 2, 3, 4)
    assert name(1).digest not in mover.files and len(mover.files) == 3
    put(tiers, mover, 5)
    assert [bool(found(tiers, n)) for n in (1, 2, 3, 4, 5)] == [False, True, True, True, True]
    assert not tiers.dropped


def test_it_says_when_a_row_would_be_lost_that_has_its_file_soon() -> None:
    tiers, mover = tiers_of(rows=2, files=(), file_limit=100)
    assert not tiers.loses()
    for number in (1, 2):
        mover.pages[number] = name(number).digest
        tiers.evict(name(number), number)
    assert tiers.loses(), "both rows are being filled"
    tiers.flush()
    mover.work(2)
    tiers.poll()
    assert tiers.loses(), "a row is being written"
    mover.work(1)
    tiers.poll()
    assert not tiers.loses() and tiers.disk_blocks == 1
    tiers.touch([name(1).digest])
    put(tiers, mover, 3, 4)
    assert not tiers.dropped


def test_nothing_is_gained_by_waiting_for_a_disk_that_is_full() -> None:
    tiers, mover = tiers_of(rows=2, files=(), file_limit=100)
    mover.faults, mover.full = 1.0, True
    put(tiers, mover, 1, 2)
    assert not tiers.loses() and not tiers.disk_blocks


def test_a_restored_block_that_leaves_the_pages_again_is_as_others() -> None:
    now = [0.0]
    tiers, mover = tiers_of(rows=3, clock=lambda: now[0])
    put(tiers, mover, 1, 2, 3)
    now[0] = 100.0
    tiers.restore(0, [(name(3).digest, 33)])
    tiers.poll()
    mover.work(1)
    tiers.poll()
    assert not tiers.evict(name(3), 33)  # its row is still there: nothing is copied
    put(tiers, mover, 4)
    assert [bool(found(tiers, n)) for n in (1, 2, 3, 4)] == [False, True, True, True]


def test_after_a_failed_restore_a_block_is_not_taken_to_be_in_the_pages() -> None:
    now = [0.0]
    tiers, mover = tiers_of(rows=3, clock=lambda: now[0])
    mover._restore = lambda ticket, _: mover.done.append(Restored(ticket, 0.0, (), "the link failed"))
    put(tiers, mover, 1, 2)
    now[0] = 100.0
    tiers.restore(0, [(name(2).digest, 33)])
    tiers.poll()
    mover.work(1)
    assert not tiers.poll()[1][0].complete
    tiers.check()
    put(tiers, mover, 3, 4)
    assert [bool(found(tiers, n)) for n in (1, 2, 3, 4)] == [False, True, True, True]


def test_without_a_row_the_block_is_dropped_at_once() -> None:
    tiers, mover = tiers_of(rows=2, ready=1)
    mover.pages[1] = name(1).digest
    assert tiers.evict(name(1), 1)
    assert not tiers.evict(name(2), 2)  # the only row in pinned memory is being filled
    assert tiers.dropped == 1


def test_rows_are_written_to_files_before_they_run_out() -> None:
    tiers, mover = tiers_of(rows=4, files=(), file_limit=100)
    put(tiers, mover, *range(1, 20))
    assert found(tiers, 9) == [DISK] and found(tiers, 19) == [HOST]
    tiers.restore(0, [(name(9).digest, 33)])
    tiers.poll()
    mover.work(10)
    assert tiers.poll() == ([], [Outcome(0, True, 0.001, 0, 1)])
    assert mover.pages[33] == name(9).digest


@pytest.mark.parametrize("rows, at_once", [(11, 4), (32, 16), (300, 32)])
def test_a_first_pass_goes_to_files_where_the_disk_keeps_up(rows: int, at_once: int) -> None:
    tiers, mover = tiers_of(rows=rows, files=(), file_limit=5000)
    for step in range(3 * rows // at_once):
        tiers.poll()
        for number in range(step * at_once, (step + 1) * at_once):
            mover.pages[number % 64] = name(number).digest
            assert tiers.evict(name(number), number % 64)
        tiers.flush()
        mover.work(200)  # before the next step
    assert tiers.dropped == 0 and tiers.disk_blocks >= rows
    tiers.check()


def test_a_disk_that_does_not_answer_leaves_half_of_the_rows() -> None:
    tiers, mover = tiers_of(rows=6, files=(), file_limit=100)
    mover._write = lambda *_: None  # type: ignore[method-assign]
    put(tiers, mover, *range(1, 20))
    assert tiers.host_blocks == 6 and found(tiers, 19) == [HOST]


def test_what_is_not_worth_a_file_is_dropped_as_if_it_had_one() -> None:
    """Else it would outlive all that has its file."""
    now = [0.0]
    tiers, mover = tiers_of(rows=4, files=(), file_limit=100, retention=FirstPromptsUnwritten(), clock=lambda: now[0])
    put(tiers, mover, 1, 2)
    now[0] = 1.0
    put(tiers, mover, 3, 4, turn=1)
    now[0] = 2.0
    put(tiers, mover, 5, 6)
    assert set(mover.files) == {name(3).digest, name(4).digest}
    assert [found(tiers, n) for n in (1, 2, 3, 4)] == [[], [], [HOST], [HOST]]


def test_the_disk_keeps_to_its_limit() -> None:
    tiers, mover = tiers_of(rows=2, files=(), file_limit=3)
    put(tiers, mover, *range(1, 12))
    assert len(mover.files) <= 3 and tiers.disk_blocks <= 3


def test_files_of_an_earlier_engine_are_found_and_cut_to_the_limit() -> None:
    files = [(name(n), 100.0 - n) for n in (1, 2, 3)]
    tiers, mover = tiers_of(files=files, file_limit=2)
    assert [found(tiers, n) for n in (1, 2, 3)] == [[], [DISK], [DISK]]
    assert [work[1] for work in mover.queue] == [name(1)]


def test_a_damaged_block_fails_the_whole_restore_and_is_forgotten(caplog) -> None:
    tiers, mover = tiers_of(files=[(name(n), 1.0) for n in (1, 2, 3)], file_limit=9)
    mover.files = {name(n).digest: name(n).digest for n in (1, 3)}
    for ticket in (0, 1):
        tiers.restore(ticket, [(name(n).digest, n) for n in (1, 2, 3) if found(tiers, n)])
        tiers.poll()
        mover.work(10)
        ((outcome),) = tiers.poll()[1]
        assert outcome.complete == (ticket == 1)
    assert found(tiers, 1, 2, 3) == [DISK] and tiers.damaged == 1
    assert sum("computed again" in r.message for r in caplog.records) == 1


def test_forgetting_reaches_every_tier_and_restores_under_way() -> None:
    tiers, mover = tiers_of(rows=2, files=[(name(7, 1), 1.0), (name(8, 2), 1.0)], file_limit=9)
    put(tiers, mover, 1, first=1)
    mover.files[name(7).digest] = name(7).digest
    tiers.restore(0, [(name(1).digest, 3), (name(7).digest, 4)])
    tiers.poll()
    tiers.forget(name(1).digest)
    mover.work(10)
    assert not tiers.poll()[1][0].complete
    assert [found(tiers, n) for n in (1, 7, 8)] == [[], [], [DISK]]
    tiers.check()


def test_a_file_that_is_dropped_while_it_is_read_is_deleted_before_it_is_written_again() -> None:
    tiers, mover = tiers_of(rows=2, files=[(name(7, 1), 1.0)], file_limit=9)
    mover.files[name(7).digest] = name(7).digest
    tiers.restore(0, [(name(7).digest, 4)])
    tiers.poll()
    slow = mover.queue.pop()
    tiers.forget(name(1).digest)
    put(tiers, mover, 7, 8, 9)
    mover.queue.append(slow)
    for _ in range(4):
        mover.work(10)
        tiers.poll()
    assert name(7).digest in tiers._disk and all(digest in mover.files for digest in tiers._disk)


def test_a_block_whose_file_cannot_be_made_pauses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    tiers, mover = tiers_of(rows=2, files=(), file_limit=9)
    mover.taken = {name(1).digest}
    put(tiers, mover, 1, 2, 3, 1, 4, 5)
    assert found(tiers, 2, 3) == [DISK, DISK] and not found(tiers, 1)
    assert [r.message for r in caplog.records] == ["a KV block has no file: a directory (said once)"]
    assert mover.refused == 2, "once each time it was stored"


def test_unused_blocks_expire() -> None:
    now = [0.0]
    tiers, mover = tiers_of(files=[(name(9), 30.0)], file_limit=9, ttl_seconds=MINUTE, clock=lambda: now[0])
    put(tiers, mover, 1)
    now[0] = 40.0
    tiers.poll()
    assert found(tiers, 9) == [] and found(tiers, 1) == [HOST]
    now[0] = 101.0
    tiers.poll()
    assert found(tiers, 1) == []
    tiers.check()


def test_files_that_expired_before_the_start_are_not_read() -> None:
    tiers, _ = tiers_of(files=[(name(1), 61.0), (name(2), 59.0)], file_limit=9, ttl_seconds=MINUTE)
    tiers.poll()
    assert found(tiers, 1) == [] and found(tiers, 2) == [DISK]
    tiers.check()


def test_a_directory_that_is_gone_is_not_asked_again(caplog) -> None:
    tiers, mover = tiers_of(rows=2, files=[(name(9), 1.0)], file_limit=9)
    mover.gone = True
    put(tiers, mover, 1, 2, 3)
    assert tiers.file_limit == 0 and found(tiers, 9) == []
    put(tiers, mover, 4, 5, 6)
    assert sum("not used any more" in r.message for r in caplog.records) == 1


def test_after_a_full_disk_writing_pauses(caplog) -> None:
    now = [0.0]
    tiers, mover = tiers_of(rows=2, files=(), file_limit=9, clock=lambda: now[0])
    mover.faults, mover.full = 1.0, True
    put(tiers, mover, 1, 2, 3)
    assert not mover.files and not any(w[0] == "write" for w in mover.queue)
    mover.faults, now[0] = 0.0, 61.0
    put(tiers, mover, 4, 5, 6)
    assert mover.files
    assert sum("not written" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize(
    "seed, count, faults, disk", [(1, 10_000, 0.05, True), (2, 2_000, 0.0, True), (3, 2_000, 0.2, False)]
)
def test_ten_thousand_random_operations(seed: int, count: int, faults: float, disk: bool) -> None:
    """On a pool, its tree and the tiers: after each of them every block is
    free, referenced, cached or leaving, every row has one place, and every page holds what its digest says."""
    rng = random.Random(seed)
    now = [0.0]
    mover = FakeMover(24, 10, rng, faults)
    pool = BlockPool(24)
    tree = PrefixTree(pool)
    tiers = Tiers(
        mover, rows=10, files=() if disk else None, file_limit=15, ttl_seconds=200.0, clock=lambda: now[0]
    )  # fmt: skip
    held: list[tuple[list[bytes], list[int]]] = []
    restoring: dict[int, tuple[list[bytes], list[int], list[int]]] = {}
    seen = {"restored": 0, "failed": 0, "forgotten": 0}

    def chain_of(session: int, length: int) -> list[bytes]:
        return [bytes([session, i]) * 8 for i in range(length)]

    def evict_one() -> None:
        oldest = tree.take_oldest()
        if oldest is not None and not tiers.evict(Name(oldest[0], oldest[1]), oldest[3], oldest[2]):
            tree.release((oldest[3],))

    def poll() -> None:
        freed, ended = tiers.poll()
        for block in freed:
            tree.release((block,))
        for outcome in ended:
            digests, hits, blocks = restoring.pop(outcome.ticket)
            seen["restored" if outcome.complete else "failed"] += 1
            above = hits[-1] if hits else None
            for i, digest in enumerate(digests[len(hits) :] if outcome.complete else ()):
                assert mover.pages[blocks[i]] == digest, "a restore brought another block"
                known = tree.insert(above, digest, blocks[i])
                if known is None:
                    break
                blocks[i] = above = known
            tree.release([*hits, *blocks])

    for ticket in range(count):
        now[0] += 1.0
        match rng.randrange(8):
            case 0 | 1 | 2:  # a request: takes hits, computes or restores the rest
                digests = chain_of(rng.randrange(6), rng.randrange(1, 9))
                hits = tree.match(digests)
                stored = tiers.match(digests[len(hits) :])
                missing = len(stored) if stored else len(digests) - len(hits)
                if tree.available - tree.idle_among(hits) >= missing:
                    tree.acquire(hits)
                    if stored and tree.num_free >= missing:
                        blocks = [tree.allocate() for _ in stored]
                        restoring[ticket] = (digests[: len(hits) + len(stored)], hits, blocks)
                        tiers.restore(ticket, list(zip(digests[len(hits) :], blocks)))
                    elif stored:
                        tree.release(hits)
                        evict_one()
                    else:
                        table = list(hits)
                        for digest in digests[len(hits) :]:
                            block = tree.allocate()
                            assert block not in tiers.leaving
                            mover.pages[block] = digest
                            kept = tree.insert(table[-1] if table else None, digest, block, rng.randrange(5))
                            table.append(block if kept is None else kept)
                            if kept is None:
                                break
                        held.append((digests, table))
            case 3 | 4:
                if held:
                    tree.release(held.pop(rng.randrange(len(held)))[1])
            case 5:
                for _ in range(rng.randrange(4)):
                    evict_one()
            case 6:
                mover.work(rng.randrange(8))
                poll()
            case 7 if rng.random() < 0.05:
                first = chain_of(rng.randrange(6), 1)[0]
                seen["forgotten"] += 1
                tree.forget(first)
                tiers.forget(first)
        tables = [table for _, table in held] + [[*h, *b] for _, h, b in restoring.values()]
        tree.check([*tables, *([b] for b in tiers.leaving)])
        tiers.check()
        for digests, table in held:
            assert all(mover.pages[b] == d for d, b in zip(digests, table)), "a page was overwritten"
    while mover.queue or restoring:
        mover.work(5)
        poll()
    for _, table in held:
        tree.release(table)
    tree.check([])
    tiers.check()
    assert seen["restored"] > 40 and seen["forgotten"] > 2 and (not faults or seen["failed"] > 2)
    if disk:
        assert set(mover.files) >= set(tiers._disk), "an indexed file is missing"
