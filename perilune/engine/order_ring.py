"""Sends orders from rank 0 to the other ranks: a ring in shared memory that rank 0 writes once and every rank reads.

With a socket for each rank, rank 0 would make a system call that wakes a process for each: 20 to 60 us on a virtual
machine. Here a rank with a GPU polls the ring, so sending is one copy:

1. Rank 0 copies a piece into the ring, then stores the new count of written bytes.
2. A reader that sees the count grow reads the piece, checks its checksum and stores its own count of read bytes. On
   processors that reorder stores (ARM) the new count may be visible before the bytes: then the checksum is wrong.
3. Rank 0 overwrites bytes only when every reader's count is past them; until then it waits.
4. A reader that found no order for SPIN_SECONDS, or that computes on its CPU cores, sets its sleep word and blocks on a
   socket. After step 1 rank 0 sends one byte to each reader with a sleep word set.
"""

import contextlib
import mmap
import os
import select
import socket
import struct
import tempfile
import time
import zlib
from collections.abc import Callable

from perilune.core.errors import EngineError

RING_BYTES = 4 << 20  # Smaller: rank 0 waits for readers when several prompts with penalties start in one step.
MAX_PIECE_BYTES = 256 << 10  # longer frames are sent in pieces
HEAD_BYTES = 4096
LINE_WORDS = 8  # 64 bytes from one reader's counter to the next: a cache line each, so that there is no false sharing
PIECE = struct.Struct("<III")  # bytes of this piece, its CRC-32, bytes of the frame after it
SPIN_SECONDS = 0.05  # Longer: an idle rank keeps a core busy. Shorter than a step: every step pays for a wake-up.
# The longest sleep. A wake-up is lost if rank 0 and a reader read each other's word before the stores are visible.
RECHECK_SECONDS = 0.05
FULL_SECONDS = 0.0002  # Interval at which rank 0 checks whether a full ring has room.
TORN_SECONDS = 1.0  # A checksum that is still wrong after this means damage: stores are visible long before.


class _Ring:
    """The mapped memory: counters of 64 bits, then data. Word 0: bytes written so far. Line 1 + i of LINE_WORDS words:
    bytes that reader i has read, then its sleep word, 1 while it blocks on its socket."""

    def __init__(self, fd: int) -> None:
        # Map all pages now: a page fault later would take longer than sending an order.
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(fd, HEAD_BYTES + RING_BYTES, mmap.MAP_SHARED | populate)
        view = memoryview(self._map)
        self._words, self._data = view[:HEAD_BYTES].cast("Q"), view[HEAD_BYTES:]
        self._views = view, self._words, self._data

    def close(self) -> None:
        for view in reversed(self._views):
            view.release()
        self._map.close()


class OrderWriter(_Ring):
    """Rank 0's end, used by one thread at a time. `fd` is inherited by the readers.

    check  called while the ring is full; raises if a reader has ended, which would never make room
    """

    def __init__(self, check: Callable[[], None]) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("perilune-orders")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, HEAD_BYTES + RING_BYTES)
        super().__init__(self.fd)
        self._check = check
        self._wakes: list[socket.socket] = []
        self._tail = self._slowest = 0

    def add(self, wake: socket.socket) -> int:
        """Adds a reader, which blocks on the other end of `wake`; returns its index. Only before the first frame."""
        if LINE_WORDS * (len(self._wakes) + 2) > len(self._words):
            raise EngineError(f"orders can reach {len(self._wakes)} other ranks, not more")
        self._wakes.append(wake)
        return len(self._wakes) - 1

    def send(self, body: bytes) -> None:
        """Sends one frame to all readers. Waits only while the ring is full. OSError if a sleeping reader has ended."""
        for begin in range(0, max(len(body), 1), MAX_PIECE_BYTES):
            piece = body[begin : begin + MAX_PIECE_BYTES]
            rest = len(body) - begin - len(piece)
            self._put(PIECE.pack(len(piece), zlib.crc32(piece), rest) + piece)

    def close(self) -> None:
        super().close()
        os.close(self.fd)

    def _put(self, data: bytes) -> None:
        """Steps 1, 3 and 4 of the module's docstring, for one piece."""
        end = self._tail + len(data)
        while end - self._slowest > RING_BYTES:
            self._slowest = min(self._words[LINE_WORDS * (i + 1)] for i in range(len(self._wakes)))
            if end - self._slowest > RING_BYTES:
                self._check()
                time.sleep(FULL_SECONDS)
        at = self._tail % RING_BYTES
        first = min(len(data), RING_BYTES - at)
        self._data[at : at + first] = data[:first]
        self._data[: len(data) - first] = data[first:]
        self._words[0] = self._tail = end
        for i, wake in enumerate(self._wakes):
            if self._words[LINE_WORDS * (i + 1) + 1]:
                with contextlib.suppress(BlockingIOError):  # the socket's buffer is full of wake-ups already
                    wake.send(b"\0", socket.MSG_DONTWAIT)


class OrderReader(_Ring):
    """Reader `number`'s end. `spin_seconds`: how long it polls before it sleeps."""

    def __init__(self, fd: int, number: int, wake: socket.socket, spin_seconds: float) -> None:
        super().__init__(fd)
        self._own, self._wake, self._spin_seconds = LINE_WORDS * (number + 1), wake, spin_seconds
        self._head = 0

    def next(self) -> bytes:
        """The next frame; waits for it. EOFError when rank 0 has ended, EngineError if the ring is damaged."""
        body, rest = self._piece()
        if not rest:
            return body
        parts = [body]
        while rest:
            body, rest = self._piece()
            parts.append(body)
        return b"".join(parts)

    def _piece(self) -> tuple[bytes, int]:
        """(the next piece, how many bytes of its frame follow); waits for it."""
        self._wait()
        end = 0.0  # after it a wrong checksum means damage; 0: none was wrong yet
        while True:
            size, crc, rest = PIECE.unpack(self._at(self._head, PIECE.size))
            if size <= MAX_PIECE_BYTES:
                body = self._at(self._head + PIECE.size, size)
                if zlib.crc32(body) == crc:
                    break
            now = time.monotonic()
            end = end or now + TORN_SECONDS
            if now > end:
                raise EngineError("an order in shared memory is damaged")
        self._head += PIECE.size + size
        self._words[self._own] = self._head
        return body, rest

    def _wait(self) -> None:
        words, head = self._words, self._head
        if words[0] != head:
            return
        end = time.perf_counter() + self._spin_seconds
        while words[0] == head:
            if time.perf_counter() < end:
                time.sleep(0)  # releases the GIL to other threads of this process
                continue
            words[self._own + 1] = 1
            woken = words[0] == head and select.select([self._wake], [], [], RECHECK_SECONDS)[0]
            if woken and not self._wake.recv(4096):
                raise EOFError
            words[self._own + 1] = 0

    def _at(self, position: int, size: int) -> bytes:
        at = position % RING_BYTES
        first = min(size, RING_BYTES - at)
        data = bytes(self._data[at : at + first])
        return data if first == size else data + bytes(self._data[: size - first])
