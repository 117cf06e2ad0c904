"""A client that costs little: streamed chat requests over plain sockets, with the time of every piece that arrives.

An HTTP library and a JSON decoder cost 100 us a token and more: on a small machine, the client would be the limit. This
one only searches each received piece for text, the end of the stream and the server's token count.
"""

import asyncio
import contextlib
import json
import re
import ssl
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from perilune.client.endpoint import EndpointError

CONNECT_SECONDS = 10.0
TAIL_BYTES = 4096  # last bytes of a stream, kept to search for the token count and an error
HEAD_BYTES = 1 << 20  # a stream without text fails after this many bytes
_END = b"data: [DONE]"
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|arguments|text)": ?"(?!")')
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
_ERROR = re.compile(rb'data: (\{"(?:error"|object": ?"error")[^\r\n]*)')  # ends a stream of which the status was 200
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(slots=True)
class Timing:
    """One request; times in seconds since it was sent on a connection that was open already.

    first_byte  of the answer's body or headers
    first_text  the piece with the first text, reasoning and calls included
    last        the last piece with an event
    tokens      as counted by the server; else the number of events, each of which may hold several tokens
    gaps        times between pieces, from the first with text on. A piece may hold several tokens
    error       why it failed; "" if it did not
    """

    first_byte: float = 0.0
    first_text: float = 0.0
    last: float = 0.0
    tokens: int = 0
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    error: str = ""

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens after the first; 0 for fewer than two."""
        return (self.last - self.first_text) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Stream(asyncio.Protocol):
    """One connection with one request. `ended` is set when the answer is complete or the connection has closed."""

    def __init__(self) -> None:
        self.timing = Timing()
        self.ended = asyncio.Event()
        self.at = 0.0  # perf_counter() of the last piece
        self._sent = 0.0
        self._tail = b""
        self._events = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._sent = self.at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now, t = time.perf_counter(), self.timing
        before, self.at = self.at, now
        seen = self._tail + data  # what is searched for may be split between two pieces
        if not t.first_byte:
            t.first_byte = now - self._sent
        if not t.first_text:
            if _TEXT.search(seen):
                t.first_text = t.last = now - self._sent
            elif len(seen) > HEAD_BYTES:
                self.end(f"no text in the first {HEAD_BYTES} bytes")
                return
            else:
                self._tail = seen
        elif b"data: " in data:
            t.gaps.append(now - before)
            t.last = now - self._sent
        self._events += data.count(b"data: ")
        if _END in seen:
            counts = _COUNT.findall(seen)
            t.tokens = int(counts[-1]) if counts else max(self._events - 2, 1)
            self.end(_failure(seen) or ("" if t.first_text else "an answer without any text"))
        elif t.first_text:
            self._tail = seen[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.is_set():
            failure = self._refusal() or _failure(self._tail)
            self.end(failure or f"the connection closed before the answer was complete ({error or 'no error'})")

    def eof_received(self) -> None:
        return None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def end(self, error: str) -> None:
        """The request is over, because of an error unless that is empty."""
        self.timing.error = error
        self.ended.set()

    def _refusal(self) -> str:
        """The error that a server answered instead of a stream; "" if none."""
        status = _STATUS.match(self._tail)
        if status is None or status[1] == b"200":
            return ""
        body = self._tail.partition(b"\r\n\r\n")[2]
        return f"{status[1].decode()}: {_said(body)}"


def _failure(stream: bytes) -> str:
    """The error event of a stream; "" if it has none. Servers send [DONE] after it, as after a whole answer."""
    found = _ERROR.search(stream)
    return f"the stream failed: {_said(found[1])}" if found else ""


def _said(error: bytes) -> str:
    """The message of an error in JSON, or else its beginning."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        event = json.loads(error)
        return str(event.get("error", event)["message"])[:300]
    return error[:200].decode(errors="replace")


class Client:
    """Sends streamed chat requests to `base` (as Endpoint.base), each on a connection of its own."""

    def __init__(self, base: str, *, api_key: str | None, timeout: float) -> None:
        self.url = httpx.URL(f"{base}/chat/completions")
        self.timeout = timeout
        secure = self.url.scheme == "https"
        self._port = self.url.port or (443 if secure else 80)
        self._tls = ssl.create_default_context() if secure else None
        host = self.url.netloc.decode()
        key = f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        self._head = (
            f"POST {self.url.raw_path.decode()} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Accept-Encoding: identity\r\nConnection: close\r\n{key}"
        )

    def encode(self, body: Mapping[str, Any]) -> bytes:
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        return f"{self._head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def ask(self, request: bytes) -> Timing:
        """The times of one request, with `error` if it failed; EndpointError only if no connection opens."""
        async with self._open() as stream:
            stream.send(request)
            while not stream.ended.is_set():
                idle = time.perf_counter() - stream.at
                if idle >= self.timeout:
                    stream.end(f"silent for {self.timeout:g} s: raise --timeout")
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stream.ended.wait(), self.timeout - idle)
            return stream.timing

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[Stream]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, stream = await loop.create_connection(Stream, self.url.host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as e:
            raise EndpointError(f"cannot connect to {self.url.host}:{self._port}: {e or 'no answer'}") from e
        try:
            yield stream
        finally:
            stream.close()


@dataclass(slots=True)
class Level:
    """Timings of `streams` users at once. cpu_seconds: of this process, the client."""

    streams: int
    timings: list[Timing]
    seconds: float
    cpu_seconds: float


async def level(
    client: Client, streams: int, rounds: int, body: Callable[[], Mapping[str, Any]], done: Callable[[int], None]
) -> Level:
    """`streams` users, each with `rounds` requests one after the other; `done` gets the number of ended requests."""
    asked = [[client.encode(body()) for _ in range(rounds)] for _ in range(streams)]
    timings: list[Timing] = []

    async def user(requests: list[bytes]) -> None:
        for request in requests:
            timings.append(await client.ask(request))
            done(len(timings))

    cpu, began = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for requests in asked:
            group.create_task(user(requests))
    return Level(streams, timings, time.perf_counter() - began, time.process_time() - cpu)
