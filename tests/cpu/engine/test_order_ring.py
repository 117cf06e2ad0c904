"""Orders that one process writes to shared memory and several read."""

import random
import socket
import threading
import time
from collections.abc import Callable

import pytest

from perilune.core.errors import EngineError
from perilune.engine import order_ring
from perilune.engine.order_ring import HEAD_BYTES, OrderReader, OrderWriter


def ring(
    readers: int, check: Callable[[], None] = lambda: None, spin: float = 0.0
) -> tuple[OrderWriter, list[OrderReader]]:
    writer = OrderWriter(check)
    pairs = [socket.socketpair() for _ in range(readers)]
    return writer, [OrderReader(writer.fd, writer.add(a), b, spin) for a, b in pairs]


@pytest.mark.parametrize("spin", [0.0, 0.02], ids=["sleeping", "polling"])
def test_every_reader_gets_every_frame_whatever_its_size(monkeypatch: pytest.MonkeyPatch, spin: float) -> None:
    monkeypatch.setattr(order_ring, "RING_BYTES", 1 << 16)  # so that it is full again and again
    monkeypatch.setattr(order_ring, "MAX_PIECE_BYTES", 1 << 13)
    rng = random.Random(0)
    frames = [rng.randbytes(rng.choice((0, 1, 46, 1371, 8192, 8193, 200_000))) for _ in range(200)]
    writer, readers = ring(3, spin=spin)
    found: list[list[bytes]] = [[] for _ in readers]

    def read(i: int) -> None:
        for _ in frames:
            found[i].append(readers[i].next())
            if i == 2 and len(found[i]) % 50 == 0:
                time.sleep(0.01)  # one is late

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for frame in frames:
        writer.send(frame)
    for thread in threads:
        thread.join(100)
    assert found == [frames] * 3


def test_a_sleeping_reader_is_woken() -> None:
    writer, (reader,) = ring(1)
    threading.Timer(0.2, writer.send, (b"late",)).start()
    begin = time.thread_time()
    assert reader.next() == b"late"
    assert time.thread_time() - begin < 0.1, "it polled"


def test_a_full_ring_ends_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise EngineError("rank 1 is lost")

    monkeypatch.setattr(order_ring, "RING_BYTES", 1 << 12)
    writer, _ = ring(1, lost)
    with pytest.raises(EngineError, match="rank 1 is lost"):
        for _ in range(9):
            writer.send(bytes(1000))


def test_an_early_look_is_repeated_and_a_damaged_piece_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_ring, "TORN_SECONDS", 60.0)
    writer, (reader,) = ring(1)
    writer.send(b"whole")
    kept = writer._data[12]
    writer._data[12] = 0  # a store that this reader does not see yet
    threading.Timer(0.1, writer._data.__setitem__, (12, kept)).start()
    assert reader.next() == b"whole"
    monkeypatch.setattr(order_ring, "TORN_SECONDS", 0.1)
    writer.send(b"again")
    writer._data[writer._tail - 1] ^= 1
    with pytest.raises(EngineError, match="damaged"):
        reader.next()


def test_a_reader_ends_when_the_writer_is_gone() -> None:
    writer = OrderWriter(lambda: None)
    ours, theirs = socket.socketpair()
    reader = OrderReader(writer.fd, writer.add(ours), theirs, 0.0)
    ours.close()
    with pytest.raises(EOFError):
        reader.next()
    writer.close()
    assert HEAD_BYTES // 8 > order_ring.LINE_WORDS * 9, "eight ranks have a line each"
