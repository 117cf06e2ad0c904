"""Bodies in chunks, taken apart: the same whatever arrives together, as h11 reads them, and bounded."""

import random

import h11
import pytest

from perilune.server.chunks import FREE_CHUNKS, LINE_BYTES, MIN_CHUNK_BYTES, TRAILER_BYTES, Chunks

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def fed(chunks: Chunks, data: bytes, cuts: list[int]) -> bytes:
    """The body; its rest is what came with the last piece, and what was not fed any more."""
    body, ends = bytearray(), [*sorted(cuts), len(data)]
    for begin, end in zip([0, *ends], ends, strict=False):
        body += chunks.feed(memoryview(data)[begin:end])
        if chunks.complete:
            chunks.rest += data[end:]
            break
    return bytes(body)


def by_h11(data: bytes) -> tuple[bytes, bytes]:
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(HEAD + data)
    body = bytearray()
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            body += event.data
    return bytes(body), parser.trailing_data[0]


def test_every_cut_gives_the_body_that_h11_reads() -> None:
    rng = random.Random(7)
    for _ in range(300):
        parts = [rng.randbytes(rng.choice((1, 2, 3, 17, 300))) for _ in range(rng.randrange(6))]
        data = b""
        for part in parts:
            size = rng.choice((b"%x", b"%X", b"00%x")) % len(part)
            data += size + rng.choice((b"", b" ", b";a=b", b';a="\xff\t;"')) + b"\r\n" + part + b"\r\n"
        data += rng.choice((b"0", b"000", b"0;last")) + b"\r\n" + rng.choice((b"", b"a: b\r\n", b"a:\r\nB-c: \xff\r\n"))
        data += b"\r\n" + rng.choice((b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"))
        chunks = Chunks()
        body = fed(chunks, data, [rng.randrange(len(data)) for _ in range(rng.randrange(8))])
        assert (body, chunks.rest, chunks.complete) == (*by_h11(data), True) and body == b"".join(parts)
        byte_by_byte = Chunks()
        assert fed(byte_by_byte, data, list(range(len(data)))) == body and byte_by_byte.rest == chunks.rest


@pytest.mark.parametrize(
    "data",
    [
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b" 1\r\n",
        b"\r\n",
        b";a\r\n",
        b"1" * 17 + b"\r\n",
        b"5\nhello\n",
        b"5\rhello",
        b"5;a\nb\r\nhello",
        b"5;\0\r\n",
        b"5\r\nhelloX",
        b"5\r\nhello\n",
        b"5\r\nhello\rX",
        b"0\r\na\r\n",
        b"0\r\n a: b\r\n",
        b"0\r\na : b\r\n",
        b"0\r\na: b\n\r\n",
        b"0\r\na: b\rc\r\n\r\n",
        b"1;" + b"a" * (LINE_BYTES + 1),
        b"0\r\na: " + b"b" * TRAILER_BYTES,
        b"0\r\n" + b"a: b\r\n" * TRAILER_BYTES,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_malformed_is_refused_however_it_arrives(data: bytes) -> None:
    for cuts in ([], list(range(min(len(data), 30)))):
        with pytest.raises(ValueError, match="chunk"):
            fed(Chunks(), data + b"\r\n" * 4, cuts)


def test_bodies_of_tiny_chunks_are_refused() -> None:
    few = Chunks()
    assert few.feed(b"1\r\n \r\n" * FREE_CHUNKS) == b" " * FREE_CHUNKS and not few.complete
    enough = b"%x\r\n%b\r\n" % (MIN_CHUNK_BYTES, b" " * MIN_CHUNK_BYTES)
    assert len(Chunks().feed(enough * 5 * FREE_CHUNKS)) == 5 * FREE_CHUNKS * MIN_CHUNK_BYTES
    with pytest.raises(ValueError, match="fewer than 16 bytes on average"):
        few.feed(b"1\r\n \r\n" * FREE_CHUNKS)
