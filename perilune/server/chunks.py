"""Parses the body of a request that is sent in chunks (RFC 9112, 7.1).

h11 reads chunks too, but takes 27 us for each: 43,000 chunks of one byte, which a single read may bring, stopped all
streams of the server for seconds. Here one takes up to 5 us, and bodies of tiny chunks are refused.
"""

import re

FREE_CHUNKS = 10_000  # chunks of any size that a body may have; with more it needs MIN_CHUNK_BYTES per further chunk
MIN_CHUNK_BYTES = 16
LINE_BYTES = 4096  # longest line with a chunk's size and extensions
TRAILER_BYTES = 16 << 10  # longest trailer: the lines after the last chunk, which are checked and dropped
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
_END = b"\r\n"


class Chunks:
    """Belongs to one request. `complete`: the last chunk and its trailers have come; `rest` is what follows them."""

    def __init__(self) -> None:
        self.complete = False
        self.rest = b""
        self._buffer = bytearray()  # not parsed yet: part of a line, or of the end of a chunk
        self._left = 0  # bytes of the current chunk that are still to come
        self._in_chunk = False  # whether data or the end of a chunk are still to come
        self._in_trailers = False
        self._chunks = self._bytes = self._trailer_bytes = 0

    def feed(self, data: bytes | memoryview) -> bytes | bytearray | memoryview:
        """The part of the body that `data` holds; ValueError if it is malformed, after which nothing more is fed."""
        if len(data) <= self._left and not self._buffer:
            self._left -= len(data)
            return data
        buffer, body, at = self._buffer, bytearray(), 0
        buffer += data
        while not self.complete:
            if self._in_chunk:
                end = at + self._left
                body += buffer[at:end]
                self._left, at = max(end - len(buffer), 0), min(end, len(buffer))
                if (after := buffer[at : at + 2]) != _END:
                    if not _END.startswith(after):
                        raise ValueError("a chunk is longer than its size")
                    break
                at += 2
                self._in_chunk = False
            elif self._in_trailers:
                if (end := buffer.find(_END, at)) < 0:
                    break
                self._trailer_bytes += end + 2 - at
                line, at = buffer[at:end], end + 2
                if line and not _TRAILER.fullmatch(line):
                    raise ValueError("a line behind the last chunk is no header")
                self.complete = not line
            elif (size := _SIZE.match(buffer, at)) is not None:
                at, self._left = size.end(), int(size[1], 16)
                self._in_chunk, self._in_trailers = self._left > 0, not self._left
                self._count()
            else:
                if b"\n" in buffer[at:] or len(buffer) - at > LINE_BYTES:
                    raise ValueError("a chunk does not begin with its size")
                break
        del buffer[:at]
        pending = len(buffer) if self._in_trailers and not self.complete else 0
        if self._trailer_bytes + pending > TRAILER_BYTES:
            raise ValueError(f"more than {TRAILER_BYTES >> 10} KiB follow the last chunk")
        if self.complete:
            self.rest = bytes(buffer)
            buffer.clear()
        return body

    def _count(self) -> None:
        self._chunks, self._bytes = self._chunks + 1, self._bytes + self._left
        if self._chunks > FREE_CHUNKS and self._bytes < (self._chunks - FREE_CHUNKS) * MIN_CHUNK_BYTES:
            raise ValueError(f"its chunks have fewer than {MIN_CHUNK_BYTES} bytes on average: send larger ones")
