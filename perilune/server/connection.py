"""One client's connection: HTTP/1.1 in, ASGI out, with a bound on how long and how large everything may be.

h11 parses one request's head at a time, and only a complete and unambiguous head. A head that a proxy and this server
could read in two ways (bare line feeds, folded lines, a length beside chunks) is refused and the connection is closed,
so that both always agree where a request ends.
"""

import asyncio
import logging
import re
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import h11

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.chunks import Chunks

if TYPE_CHECKING:
    from perilune.server.listener import Listener

log = logging.getLogger("perilune.server")

HEAD_BYTES = 64 << 10  # limit of a request line with its headers, and of pipelined bytes of the next request
HEADER_LINES = 100
READ_BYTES = 256 << 10  # Read from a socket at a time. More: longer pauses of all streams.
READ_AHEAD_BYTES = 256 << 10  # If so much of a body waits for its handler, the socket is not read (backpressure).
LINGER_SECONDS = 5.0  # How long the rest of a refused body is read and discarded, so that its sender sees the answer.
_END = b"\r\n\r\n"
# Bare CR or LF, folded line. If it began with a lookbehind, 64 KiB would take 1.1 ms.
_AMBIGUOUS = re.compile(rb"\r(?!\n)|\n(?:(?<!\r\n)|[ \t])")
_QUOTED = re.compile(r"bytearray\(b(?=['\"])(.*)\)", re.DOTALL)  # a line quoted in an error message of h11
_ORIGIN = re.compile(rb"https?://[^/?]*", re.IGNORECASE)  # the beginning of an absolute target, as sent to proxies
_TLS_RECORD = b"\x16"  # first byte of a TLS handshake
_WITHOUT_BODY_STATUSES = (204, 304)

Message = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of a connection.

    head_seconds           from the first byte of a request (a new connection: from its start) to the end of its headers
    body_seconds           longest time without a byte of the body
    body_bytes_per_second  lowest average rate of the body, once body_seconds have passed
    idle_seconds           longest time between requests. Longer than clients keep idle connections (httpx and the SDKs
                           5 s, browsers a minute), so that clients close them: a request that is sent while the server
                           closes the connection would be lost
    write_seconds          longest time in which the client reads nothing of what was sent
    """

    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_bytes_per_second: float = 16384.0
    idle_seconds: float = 75.0
    write_seconds: float = 60.0


class Connection(asyncio.BufferedProtocol):
    """Belongs to a Listener, which calls `check` about once a second. All connections read into one shared buffer, from
    which received bytes are copied once."""

    def __init__(self, listener: "Listener") -> None:
        self.listener = listener
        self.transport: asyncio.Transport
        self.peer = ""
        self.exchange: Exchange | None = None
        self._head = bytearray()  # received bytes of the next request
        self._served = 0  # requests begun on this connection
        self._since = time.monotonic()  # start of the phase: connection, head, idle after an answer, linger
        self._lingering = False
        self._paused = False
        self._written = self._taken = 0  # bytes given to the transport; of these, bytes that the kernel has taken
        self._progress_at = self._since
        self.writable = asyncio.Event()
        self.writable.set()

    # ---- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else "unix"
        if not self.listener.admit(self):
            why = "too many connections: try again shortly"
            self._write_error(RequestError(why, code="too_many_connections", status=503))
            self.transport.close()  # at once: lingering would use up the last file descriptors

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.connections.discard(self)
        self.writable.set()
        if self.exchange is not None:
            self.exchange.leave()

    def eof_received(self) -> bool | None:
        return None  # closes the transport: a client that has stopped sending has left

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.listener.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._lingering:
            return
        data, exchange = self.listener.buffer[:nbytes], self.exchange
        if exchange is not None and exchange.receiving:
            exchange.feed(data)
            return
        if self._served and not self._head and bytes(data).strip(b"\r\n"):
            self._since = time.monotonic()
        seen = len(self._head)
        self._head += data
        if exchange is None:
            self._begin(seen)
        elif len(self._head) > HEAD_BYTES:
            self.pause_reading()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    # ---- reading

    def pause_reading(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def _begin(self, seen: int = 0) -> None:
        """Starts the next request if its head is complete. The first `seen` bytes were searched before."""
        while self._head.startswith(b"\r\n"):  # allowed between requests
            del self._head[:2]
            seen = 0
        if self._head and self._head != b"\r" and not self._head[:1].isalpha():
            why = (
                "this port speaks HTTP, not HTTPS" if self._head.startswith(_TLS_RECORD) else "it begins with no method"
            )
            self._refuse(_malformed(why))
            return
        end = self._head.find(_END)
        # Refuse a malformed head before it is complete: if lines end with LF only, its end would never be found.
        last = end if end >= 0 else len(self._head) - self._head.endswith(b"\r")
        if _AMBIGUOUS.search(self._head, max(seen - 2, 0), last):
            self._refuse(_malformed("lines end with CR LF and are not folded"))
            return
        if end < 0 and len(self._head) <= HEAD_BYTES:
            return
        head = bytes(self._head[: max(end, 0)])
        if end < 0 or end > HEAD_BYTES or head.count(b"\n") > HEADER_LINES:
            what = (
                f"more than {HEADER_LINES} lines" if 0 <= end <= HEAD_BYTES else f"longer than {HEAD_BYTES >> 10} KiB"
            )
            self._refuse(RequestError(f"the request's headers are {what}", code="headers_too_large", status=431))
            return
        parser = h11.Connection(h11.SERVER, HEAD_BYTES)
        parser.receive_data(bytes(self._head))
        self._head.clear()
        try:
            request = parser.next_event()
            if not isinstance(request, h11.Request):
                raise h11.RemoteProtocolError("no request")
            names = [name for name, _ in request.headers]
            if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
                raise h11.RemoteProtocolError("a length beside chunks, or chunks in HTTP/1.0")
            if not request.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError("this server speaks HTTP/1.1", error_status_hint=505)
        except h11.RemoteProtocolError as e:
            self._refuse(_malformed(str(e), e.error_status_hint))
            return
        self._served += 1
        self.exchange = Exchange(self, parser, request)
        self.exchange.feed(memoryview(parser.trailing_data[0]))  # bytes that came after the head
        self.listener.spawn(self.exchange.run())

    # ---- writing

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self.transport.write(data)

    def answered(self, exchange: "Exchange") -> None:
        """Called when a response is complete: starts the next request, or ends the connection."""
        self.exchange = None
        self._since = time.monotonic()
        if self.transport.is_closing():
            return
        if exchange.receiving:
            self._linger()
        elif exchange.last or self.listener.draining:
            self.transport.close()
        else:
            self._head[:0] = exchange.ahead
            self.resume_reading()
            if self._head:
                self._begin()

    def _refuse(self, error: RequestError) -> None:
        """Answers a malformed head or a failed TLS handshake with an error, and ends the connection."""
        self._write_error(error)
        self._linger()

    def _write_error(self, error: RequestError) -> None:
        scope = {"client": (self.peer, 0), "scheme": self.listener.scheme, "path": ""}
        response = self.listener.refuse(error, scope)
        lines = [b"HTTP/1.1 %d %s" % (response.status_code, errors.phrase(response.status_code)), b"connection: close"]
        lines += [b"%s: %s" % header for header in response.raw_headers]
        lines.append(b"date: %b" % self.listener.date())
        self.write(b"\r\n".join(lines) + _END + bytes(response.body))

    def _linger(self) -> None:
        """Ends the connection once the client has read the answer: closing a socket with unread input would send a
        reset and discard the answer."""
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self._lingering = True
        self._since = time.monotonic()
        self._head.clear()
        try:
            self.transport.write_eof()
        except OSError:  # the client has ended the connection, which the loop has not seen yet
            self.transport.abort()
            return
        self.resume_reading()

    # ---- time

    def check(self, now: float) -> None:
        """Ends the connection if its phase takes longer than allowed."""
        limits = self.listener.timeouts
        taken = self._written - self.transport.get_write_buffer_size()
        if taken == self._written or taken != self._taken:
            self._taken, self._progress_at = taken, now
        elif now - self._progress_at > limits.write_seconds:
            self.transport.abort()
            return
        if self.transport.is_closing():
            return
        waited = now - self._since
        if self._lingering:
            if waited > LINGER_SECONDS:
                self.transport.abort()
        elif self.exchange is not None:
            if self.exchange.receiving:
                self.exchange.check(now, limits)
        elif self._head or not self._served:
            if waited > limits.head_seconds:
                if self._head:
                    why = f"the request's headers were not complete after {limits.head_seconds:g} s"
                    self._refuse(RequestError(why, code="request_timeout", status=408))
                else:
                    self.transport.close()
        elif waited > limits.idle_seconds:
            self.transport.close()

    def drain(self) -> None:
        """Ends the connection as soon as no request is under way."""
        if self.exchange is None and not self.transport.is_closing():
            self.transport.close()


class Exchange:
    """One request and its response.

    receiving  whether bytes of the body are still to come
    last       the connection ends after the response
    """

    def __init__(self, connection: Connection, parser: h11.Connection, request: h11.Request) -> None:
        self.connection = connection
        self.receiving = True
        self._chunks: Chunks | None = None  # reads a body without a length
        self._left = 0  # bytes of a body with a length that are still to come
        self.ahead = b""  # bytes of the next request that came with this one
        self._method = request.method
        self._is_http_1_1 = request.http_version == b"1.1"
        self._expecting = parser.they_are_waiting_for_100_continue
        headers = list(request.headers)
        asked = b",".join(value.lower() for name, value in headers if name == b"connection").split(b",")
        self.last = not self._is_http_1_1 or b"close" in [option.strip() for option in asked]
        self._body = bytearray()
        if any(name == b"transfer-encoding" for name, _ in headers):
            self._chunks = Chunks()
        else:
            self._left = int(next((value for name, value in headers if name == b"content-length"), b"0"))
        self._ended = False  # whether the handler has received the end of the body
        self._failure: RequestError | None = None
        self._gone = False  # whether the client has left
        self._status = 0
        self._chunked = False  # whether the response has chunked transfer coding
        self._complete = False  # whether the whole response was sent
        self._news = asyncio.Event()
        self._begun = self._last_byte = time.monotonic()
        self._received = 0
        target = _ORIGIN.sub(b"", request.target, 1)
        path, _, query = target.partition(b"?")
        listener = connection.listener
        forwarded = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "server": listener.address,
            "client": (listener.proxies.client(connection.peer, forwarded), 0),
            "scheme": listener.scheme,
            "method": request.method.decode(),
            "root_path": "",
            "path": unquote(path.decode("ascii")) or "/",
            "raw_path": path or b"/",
            "query_string": query,
            "headers": headers,
        }

    async def run(self) -> None:
        try:
            await self.connection.listener.app(self.scope, self.receive, self.send)
        except Exception as e:
            log.error("%s %s failed: %s", self.scope["method"][:16], self.scope["path"][:200], e, exc_info=e)
        finally:
            if not self._complete and not self._gone:  # a response that ends early must not look complete
                self.connection.transport.close()

    # ---- the body

    def feed(self, data: memoryview) -> None:
        """Takes bytes of the body. Bytes after its end are kept for the next request."""
        if self._chunks is not None:
            self._advance(self._chunks, data)
        else:
            part = data[: self._left]
            self._left -= len(part)
            self._take(part)
            if not self._left:
                self.receiving, self.ahead = False, bytes(data[len(part) :])
        self._news.set()

    def _advance(self, chunks: Chunks, data: memoryview) -> None:
        if self._failure is not None:
            return
        try:
            self._take(chunks.feed(data))
        except ValueError as e:
            self._failure = _malformed(str(e))
            self.last = True
        if chunks.complete:
            self.receiving, self.ahead = False, chunks.rest

    def _take(self, part: bytes | bytearray | memoryview) -> None:
        if part:
            self._body += part
            self._received += len(part)
            self._last_byte = time.monotonic()
        if len(self._body) > READ_AHEAD_BYTES:
            self.connection.pause_reading()

    def check(self, now: float, limits: Timeouts) -> None:
        """Makes the handler's next `receive` fail if the body comes too slowly."""
        if len(self._body) > READ_AHEAD_BYTES:  # the socket is not read: the handler is slow, not the client
            self._begun, self._last_byte, self._received = now, now, 0
            return
        took, rate = now - self._begun, limits.body_bytes_per_second
        if now - self._last_byte > limits.body_seconds:
            why = f"no byte of the body came for {limits.body_seconds:g} s"
        elif took > limits.body_seconds and self._received < took * rate:
            why = f"the body came with less than {rate / 1024:g} KiB/s"
        else:
            return
        self._failure = RequestError(f"{why}: send it again at once", code="request_timeout", status=408)
        self._news.set()

    def leave(self) -> None:
        self._gone = True
        self._news.set()

    async def receive(self) -> Message:
        """ASGI's: the next part of the body, then http.disconnect. RequestError if the body is malformed or slow."""
        if self._expecting and self.receiving and not self._status:
            self._expecting = False
            self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._gone or self._complete):
            if self._failure is not None and not self._ended:
                raise self._failure
            if self._body or not (self.receiving or self._ended):
                part, self._body = self._body, bytearray()
                self._ended = not self.receiving
                self.connection.resume_reading()
                return {"type": "http.request", "body": part, "more_body": self.receiving}
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    # ---- the response

    async def send(self, message: Message) -> None:
        """ASGI's send. Messages for a client that has left are dropped."""
        await self.connection.writable.wait()
        if self._gone or self._complete:
            return
        if message["type"] == "http.response.start":
            self._start_response(message["status"], [(n.lower(), v) for n, v in message.get("headers", ())])
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._method == b"HEAD" or self._status in _WITHOUT_BODY_STATUSES:
            body = b""
        data = b""
        if self._chunked:
            if body:
                data = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                data += b"0\r\n\r\n"
        else:
            data = body
        if data:
            self.connection.write(data)
        if not more:
            self._complete = True
            self._news.set()
            self.connection.answered(self)

    def _start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self.last = self.last or self.receiving or self.connection.listener.draining
        lengths = [value for name, value in headers if name == b"content-length"]
        if not lengths and status not in _WITHOUT_BODY_STATUSES and self._method != b"HEAD":
            if self._is_http_1_1:
                self._chunked = True
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self.last = True  # without a length, the end of the connection marks the end of the body
        if self.last:
            headers.append((b"connection", b"close"))
        headers.append((b"date", self.connection.listener.date()))
        lines = [b"HTTP/1.1 %d %b" % (status, errors.phrase(status))]
        for name, value in headers:
            if b"\n" in value or b"\r" in value or b"\0" in value:
                raise ValueError(f"a response header {name!r} with a line break")
            lines.append(b"%b: %b" % (name, value))
        self.connection.write(b"\r\n".join(lines) + _END)


def _malformed(why: str, status: int = 400) -> RequestError:
    why = _QUOTED.sub(r"\1", why)
    return RequestError(f"not a valid HTTP request: {why[:200]}", code="invalid_http", status=status)
