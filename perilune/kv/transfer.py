"""Moves KV blocks in the background: pages to host memory and back, host memory to files and back.

Each direction has its own thread, and on a GPU its own stream, so that storing, restoring and steps overlap. A row's
checksum is computed when the row is filled, and compared whenever it is read, on several threads: one checks about 10
GB/s, and PCIe 5 transfers 45. Blocks are stored in windows: a window is queued before the thread waits for the one
before. Blocks from files go through staging rows: while COPIED_ROWS of these are copied to the pages, the others are
filled from files.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from perilune.core.errors import EngineError
from perilune.kv.copier import Copier, block_bytes, copier
from perilune.kv.disk import DamagedFile, Directory
from perilune.kv.host_memory import ALIGNED_BYTES, Bytes, HostMemory
from perilune.kv.mover import Copied, Done, Name, Piece, Restored, Stored, Written
from perilune.ops.rows import host_rows

STAGED_ROWS = 64  # staging rows for blocks from files
# Staging rows being copied to the pages; the others are being filled from files or wait for a reading thread. Blocks
# are copied in order: a row filled early waits, and its thread needs another, so there are more than READING_THREADS.
COPIED_ROWS = 8
WINDOW_BLOCKS = 32  # Larger: fewer waits for the device, but the pages of stored blocks are free later.
CHECKING_THREADS = 8  # threads that compute checksums, at most; never more than half of the processors
READING_THREADS = 32  # Fewer: fewer reads in flight, so a slower disk.
MIN_SHARE_BLOCKS = 16  # Blocks per task of a checksum thread, at least. Fewer: it mostly waits for the GIL.
MEASURED_BLOCKS = 64  # blocks copied in each direction at the start, to measure the link
MEASUREMENTS = 3  # measurements of which the fastest counts
# Share of the link's measured speed that copies use while steps run. Larger: the steps' own copies wait longer.
STORE_SHARE, RESTORE_SHARE = 0.5, 0.9

_T = TypeVar("_T")

_COPY_FAILED = (EngineError, RuntimeError, OSError, ValueError)


def row_bytes(caches: Sequence[Tensor]) -> int:
    """Bytes of host memory for one block of all caches."""
    return -(-block_bytes(caches) // ALIGNED_BYTES) * ALIGNED_BYTES


class Transfer:
    """The Mover of one rank: its caches, its rows and its directory.

    caches     the target's pages, then the draft model's: each [layers, blocks, block_size, width], or without layers
    rows       max rows of host memory for stored blocks
    directory  None: there is no disk
    """

    def __init__(self, caches: Sequence[Tensor], rows: int, directory: Directory | None) -> None:
        self._directory, self._limit = directory, rows
        self._staged = STAGED_ROWS if directory is not None else 0
        used, device = block_bytes(caches), caches[0].device
        self._memory = HostMemory(rows + self._staged, row_bytes(caches), used, device, at_once=self._staged + 1)
        self._sums = np.zeros(rows + self._staged, np.uint64)
        self._outward, self._inward = copier(caches), copier(caches)
        workers = max(1, min(CHECKING_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._out, self._in, self._disk, self._check = (
            ThreadPoolExecutor(count, f"perilune-kv-{name}")
            for count, name in ((1, "out"), (1, "in"), (1, "disk"), (workers, "check"))
        )
        self._reading = (
            ThreadPoolExecutor(READING_THREADS, "perilune-kv-read") if directory is not None else self._check
        )
        self._workers = workers
        self._reader = host_rows.file_reader()
        self.steps_run = False  # set by the engine; while true, copies leave a share of the link to steps
        self._paces = 0.0, 0.0  # seconds per block while steps run: of storing and of restoring
        if device.type == "cuda":
            self._paces = (
                self._block_seconds(self._outward, STORE_SHARE),
                self._block_seconds(self._inward, RESTORE_SHARE),
            )
        self._done: deque[Done] = deque()  # bounded by the numbers of blocks and rows
        self._arrived = threading.Event()
        self._memory.start()  # only now: pinning slows the measurement of the link

    @property
    def rows(self) -> int:
        return max(self._memory.ready - self._staged, 0)  # the first rows are the staging rows

    def store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        self._out.submit(self._store, stores)

    def restore(self, ticket: int, pieces: Sequence[Piece]) -> None:
        self._in.submit(self._restore, ticket, pieces)

    def write(self, name: Name, row: int) -> None:
        self._disk.submit(self._write, name, row)

    def delete(self, name: Name) -> None:
        assert self._directory is not None
        self._disk.submit(self._directory.delete, name)

    def poll(self) -> list[Done]:
        self._arrived.clear()
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, seconds: float) -> None:
        """Waits until `poll` has something to return, at most `seconds`."""
        self._arrived.wait(seconds)

    def wake(self) -> None:
        """Ends a `wait` in another thread."""
        self._arrived.set()

    def close(self) -> None:
        """Waits for copies that have begun, drops queued ones, and frees the memory."""
        for pool in (self._out, self._in, self._disk, self._check, self._reading):
            pool.shutdown(cancel_futures=True)
        self._memory.close()
        del self._outward, self._inward
        if self._directory is not None:
            self._directory.close()

    def _block_seconds(self, queue: Copier, share: float) -> float:
        """Seconds per block at `share` of the link's speed. Measures it by copying block 0 to row 0, or, for the inward
        direction, back from row 0 to block 0."""
        pairs = [(0, self._memory.row(0))]
        queue.out(pairs)
        queue.wait()
        move, least = queue.out if queue is self._outward else queue.into, float("inf")
        for _ in range(MEASUREMENTS):
            begin = time.perf_counter()
            move(pairs * MEASURED_BLOCKS)
            queue.wait()
            least = min(least, time.perf_counter() - begin)
        return least / MEASURED_BLOCKS / share

    def _row(self, row: int) -> Bytes:
        return self._memory.row(self._staged + row)

    def _answer(self, done: Iterable[Done]) -> None:
        self._done.extend(done)
        self._arrived.set()

    # ---- pages to host memory

    def _store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        windows = [stores[first : first + WINDOW_BLOCKS] for first in range(0, len(stores), WINDOW_BLOCKS)]
        queued: deque[tuple[Sequence[tuple[Name, int, int]], object]] = deque()
        try:
            while windows or queued:
                if windows:
                    self._outward.block_seconds = self._paces[0] if self.steps_run else 0.0
                    self._outward.out([(block, self._row(row)) for _, block, row in windows[0]])
                    queued.append((windows.pop(0), self._outward.mark()))
                if len(queued) == 2 or not windows:
                    window, mark = queued[0]
                    self._outward.wait(mark)
                    queued.popleft()
                    self._answer([Copied(block) for _, block, _ in window])
                    for part in self._shares(window):
                        self._check.submit(self._seal, part)
        except _COPY_FAILED as e:
            self._drain(self._outward)
            lost = [one for window in (*(w for w, _ in queued), *windows) for one in window]
            self._answer([Copied(block) for _, block, _ in lost])
            self._answer([Stored(row, _line(e)) for _, _, row in lost])

    def _seal(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        """Computes the checksums of filled rows, then reports the rows as Stored."""
        rows = [row for _, _, row in stores]
        self._sums[rows] = host_rows.checksums([self._row(row) for row in rows], [n.digest for n, _, _ in stores])
        self._answer([Stored(row) for row in rows])

    @staticmethod
    def _drain(queue: Copier) -> None:
        """After a failure: waits for earlier copies, which must not write to blocks or rows that are reused."""
        with contextlib.suppress(*_COPY_FAILED):
            queue.wait()

    # ---- back to the pages

    def _restore(self, ticket: int, pieces: Sequence[Piece]) -> None:
        begin = time.perf_counter()
        bad: dict[bytes, str] = {}
        try:
            held = [p for p in pieces if p.row is not None]
            checks = [self._check.submit(self._damaged, part) for part in self._shares(held)]
            marks: deque[object] = deque()
            for first in range(0, len(held), WINDOW_BLOCKS):
                if len(marks) == 2:  # at most two windows queued, so that a change of pace takes effect soon
                    self._inward.wait(marks.popleft())
                self._inward.block_seconds = self._paces[1] if self.steps_run else 0.0
                window = held[first : first + WINDOW_BLOCKS]
                self._inward.into([(p.block, self._row(p.row)) for p in window if p.row is not None])
                marks.append(self._inward.mark())
            for check in checks:
                bad |= check.result()
            self._inward.wait()
            if not bad:
                bad = self._restore_files([p for p in pieces if p.row is None])
            error = next(iter(bad.values()), None)
        except _COPY_FAILED as e:
            error = _line(e)
            self._drain(self._inward)
        self._answer([Restored(ticket, time.perf_counter() - begin, tuple(bad), error)])

    def _damaged(self, pieces: Sequence[Piece]) -> dict[bytes, str]:
        """Blocks in host memory that no longer have the checksum they were stored with: digest -> reason."""
        rows = [p.row for p in pieces if p.row is not None]
        sums = host_rows.checksums([self._row(row) for row in rows], [p.name.digest for p in pieces])
        return {
            piece.name.digest: "a block in host memory has another checksum than when it was stored"
            for piece, same in zip(pieces, sums == self._sums[rows])
            if not same
        }

    def _restore_files(self, pieces: Sequence[Piece]) -> dict[bytes, str]:
        """As `_damaged`, for blocks restored from files."""
        if not pieces:
            return {}
        reads, staged = self._staged - COPIED_ROWS, self._staged  # `reads`: files being read at a time
        reading: deque[_Read] = deque()
        marks: list[object] = []  # one after each piece's copy
        for at in range(len(pieces) + reads):
            if at < len(pieces):
                if at >= staged:
                    self._inward.wait(marks[at - staged])  # until the row's previous block is in the pages
                reading.append(self._begin(pieces[at], self._memory.row(at % staged)))
            if at < reads or not reading:
                continue
            read = reading.popleft()
            if (problem := read.problem.result()) is not None:
                bad = {read.piece.name.digest: problem}
                for other in reading:  # wait for reads in flight before their staging rows are reused
                    if (problem := other.problem.result()) is not None:
                        bad[other.piece.name.digest] = problem
                self._drain(self._inward)
                return bad
            self._inward.into([(read.piece.block, read.row)])
            marks.append(self._inward.mark())
        self._inward.wait()
        return {}

    def _begin(self, piece: Piece, row: Bytes) -> "_Read":
        return _Read(piece, row, self._reading.submit(self._read, piece.name, row))

    def _read(self, name: Name, row: Bytes) -> str | None:
        """Reads a block's file into a row. Returns what is wrong with the file; None: nothing."""
        assert self._directory is not None
        try:
            stored = self._directory.read(name, row.data, self._reader)
        except (DamagedFile, OSError) as e:
            return _line(e)
        (found,) = host_rows.checksums([row], [name.digest])
        return None if found == stored else f"{name.digest.hex()}.kv is damaged"

    # ---- host memory to files

    def _write(self, name: Name, row: int) -> None:
        directory = self._directory
        assert directory is not None
        error, gone, taken = None, False, False
        try:
            directory.write(name, self._row(row).data, int(self._sums[row]))
        except OSError as e:
            error, gone = _line(e), not directory.exists
            taken = not gone and isinstance(e, IsADirectoryError | NotADirectoryError)
        self._answer([Written(name, error, gone, taken)])

    def _shares(self, items: Sequence[_T]) -> list[Sequence[_T]]:
        size = max(-(-len(items) // self._workers), MIN_SHARE_BLOCKS)
        return [items[first : first + size] for first in range(0, len(items), size)]


@dataclass(frozen=True, slots=True)
class _Read:
    piece: Piece
    row: Bytes
    problem: "Future[str | None]"


def _line(e: BaseException) -> str:
    if isinstance(e, OSError) and e.strerror:
        return f"{e.strerror}{f': {e.filename}' if e.filename else ''}"
    return (str(e) or type(e).__name__).split("\n")[0]
