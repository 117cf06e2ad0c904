"""Connections: slow, stalled, ambiguous and half-sent requests, over real sockets. Their time is the test's own
(`Served.passes`): a pause of the machine ends no connection."""

import asyncio
import contextlib
import errno
import functools
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perilune.core.errors import RequestError
from perilune.server import connection, errors, listener
from perilune.server.connection import READ_BYTES, Timeouts
from perilune.server.limits import Proxies
from perilune.server.listener import Listener
from tests.serving import HANG_SECONDS, served

QUICK = Timeouts(head_seconds=0.3, body_seconds=0.3, body_bytes_per_second=100_000, idle_seconds=0.6, write_seconds=0.4)
GET = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"


class Wire:
    """A client's end: what it sends is exactly what the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in lines)}
        status = int(first.split()[1])
        if status == 100:
            return status, headers, b""
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return status, headers, body

    async def ended(self) -> bool:
        """Whether the server has ended the connection, with nothing further sent."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True


class Served:
    def __init__(self, listener: Listener, port: int) -> None:
        self.listener, self.port = listener, port
        self.left: list[str] = []
        self.paths: list[str] = []
        self.now = 1000.0

    def passes(self, seconds: float) -> None:
        """So long passes for connections, and each looks at the time."""
        self.now += seconds
        for one in list(self.listener.connections):
            one.check(self.now)

    async def until(self, state: Callable[[], object]) -> None:
        while not state():
            await asyncio.sleep(0.001)

    async def reached(self, head: bytes) -> None:
        """Until the only connection waits for the rest of a head that begins so."""
        await self.until(lambda: [(bytes(c._head), c.exchange) for c in self.listener.connections] == [(head, None)])

    async def received(self, count: int) -> None:
        """Until so many bytes of the body of the only connection's request have come."""
        await self.until(lambda: [c.exchange and c.exchange._received for c in self.listener.connections] == [count])

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Wire]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Wire(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def serve(test: Callable[[Served], Coroutine[Any, Any, None]], timeouts: Timeouts | None = QUICK, **more: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """/echo: the body; /chunks: in pieces; /large: more than sockets hold; /ignore: 200 without reading; /hang."""

        async def respond(status: int, body: bytes) -> None:
            length = (b"content-length", str(len(body)).encode())
            await send({"type": "http.response.start", "status": status, "headers": [length]})
            await send({"type": "http.response.body", "body": body})

        path = scope["path"]
        served.paths.append(path)
        if path == "/ignore":
            return await respond(200, b"ignored")
        body, more_body = b"", True
        try:
            while more_body:
                message = await receive()
                if message["type"] == "http.disconnect":
                    served.left.append(path)
                    return None
                body, more_body = body + message["body"], message["more_body"]
        except RequestError as e:
            return await respond(e.status, json.dumps(errors.describe(e)[1]).encode())
        if path == "/hang":
            assert (await receive())["type"] == "http.disconnect"
            served.left.append(path)
            return None
        if path == "/client":
            return await respond(200, scope["client"][0].encode())
        if path == "/broken":
            raise ZeroDivisionError
        if path in ("/chunks", "/large"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(3 if path == "/chunks" else 200):
                piece = b"piece" if path == "/chunks" else b"x" * 100_000
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            return await send({"type": "http.response.body", "body": b""})
        return await respond(200, body)

    async def main() -> None:
        nonlocal served
        with socket.create_server(("127.0.0.1", 0)) as sock:
            made = Listener(app, timeouts=timeouts, **more)
            served = Served(made, sock.getsockname()[1])
            with pytest.MonkeyPatch.context() as patch:
                for module in (connection, listener):
                    patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: served.now, time=time.time))
                await made.start(sock)
                await asyncio.wait_for(test(served), HANG_SECONDS)
            await made.close(10.0)
            assert not made.connections and not made.busy

    served: Any = None
    asyncio.run(main())


connected = functools.partial(served, by=serve)


@connected()
async def test_requests_follow_each_other_on_one_connection_even_ahead_of_answers(s: Served) -> None:
    async with s.connect() as wire:
        wire.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
        assert (await wire.response())[2] == b"hello"
        chunks = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
        chunked = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        wire.send(chunked + GET.replace(b"echo", b"chunks") + GET)
        assert (await wire.response())[2] == b"abcde"
        status, headers, body = await wire.response()
        assert (status, headers["transfer-encoding"], body) == (200, "chunked", b"piece" * 3)
        assert (await wire.response())[0] == 200
        wire.send(b"HEAD /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in head and b"date: " in head and await wire.ended()


@connected(timeouts=None)
async def test_a_body_larger_than_one_read_ends_where_the_next_request_begins(s: Served) -> None:
    async with s.connect() as first, s.connect() as second:  # both read into the listener's one buffer
        for i, wire in enumerate((first, second)):
            body = bytes([65 + i]) * (2 * READ_BYTES + 7)
            wire.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body + GET)
        for i, wire in enumerate((first, second)):
            assert (await wire.response())[2] == bytes([65 + i]) * (2 * READ_BYTES + 7)
            assert (await wire.response())[0::2] == (200, b"")


@connected()
async def test_http_1_0_ends_with_the_connection(s: Served) -> None:
    async with s.connect() as wire:
        wire.send(b"GET /chunks HTTP/1.0\r\n\r\n")
        assert (await wire.response())[2] == b"piece" * 3


@pytest.mark.parametrize(
    "sent",
    [
        b"",  # connects and says nothing
        b"GET /echo HT",
        b"GET /echo HTTP/1.1\r\nHost: x\r\n",
        GET + b"GET /echo HTTP/1.1\r\nHost: x\r\n",  # the second request of a connection
        GET + b"\r\n\r\n",  # idle
    ],
)
@connected()
async def test_half_sent_heads_and_idle_connections_end(s: Served, sent: bytes) -> None:
    async with s.connect() as wire:
        wire.send(sent)
        if sent.startswith(GET):
            assert (await wire.response())[0] == 200
        idle = sent.endswith(b"\r\n\r\n")
        await s.reached(b"" if idle else sent.removeprefix(GET))
        s.passes((QUICK.idle_seconds if idle else QUICK.head_seconds) - 0.01)
        assert not any(c.transport.is_closing() or c._lingering for c in s.listener.connections)
        s.now += 0.02  # and the listener looks by itself
        if sent and not idle:
            status, headers, body = await wire.response()
            assert status == 408 and headers["connection"] == "close"
            assert json.loads(body)["error"]["code"] == "request_timeout"
        assert await wire.ended()


@connected()
async def test_a_head_that_drips_ends_all_the_same(s: Served) -> None:
    async with s.connect() as wire:
        head = b"GET /echo HTTP/1.1\r\nX: yyyyyy"
        for end in range(1, 16):
            wire.send(head[end - 1 : end])
            await s.reached(head[:end])
            s.passes(0.02)
        s.passes(0.02)
        assert (await wire.response())[0] == 408


@pytest.mark.parametrize(("size", "why"), [(0, "no byte"), (100, "less than")], ids=["stalled", "slow"])
@connected()
async def test_a_slow_body_is_answered_408(s: Served, size: int, why: str) -> None:
    async with s.connect() as wire:
        wire.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx")
        for turn in range(16):
            await s.received(1 + turn * size)
            s.passes(0.02)
            wire.send(b"x" * size)
        status, headers, body = await wire.response()
        assert status == 408 and headers["connection"] == "close"
        assert b"body" in body and why in body.decode() and await wire.ended()


@connected()
async def test_a_fast_body_may_take_longer_than_the_bound(s: Served) -> None:
    async with s.connect() as wire:
        wire.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n")
        for turn in range(20):
            await s.received(turn * 10_000)
            s.passes(0.03)
            wire.send(b"x" * 10_000)
        assert (await wire.response())[0] == 200


@connected()
async def test_a_client_that_does_not_read_is_cut(s: Served) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", s.port, limit=1024)
    writer.write(GET.replace(b"echo", b"large"))
    await s.until(lambda: s.paths)
    while s.listener.connections or s.listener.busy:
        s.passes(0.1)
        await asyncio.sleep(0.001)
    writer.close()


@connected()
async def test_a_client_that_leaves_is_noticed(s: Served) -> None:
    for sent in (
        b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /hang HTTP/1.1\r\nContent-Length: 9\r\nHost: x\r\n\r\n1",
    ):
        async with s.connect() as wire:
            wire.send(sent)
            await s.until(lambda: len(s.paths) > len(s.left))
        await s.until(lambda: len(s.paths) == len(s.left))
    assert s.left == ["/hang", "/hang"]


AMBIGUOUS = {
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "listed lengths": b"Content-Length: 5, 6\r\n\r\nhello!",
    "signed length": b"Content-Length: +5\r\n\r\nhello",
    "hexadecimal length": b"Content-Length: 0x5\r\n\r\nhello",
    "negative length": b"Content-Length: -1\r\n\r\n",
    "other coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "coding after a tab": b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "space before the colon": b"Content-Length : 5\r\n\r\nhello",
    "folded line": b"X: a\r\n Content-Length: 5\r\n\r\nhello",
    "bare line feed": b"X: a\nContent-Length: 5\r\n\r\nhello",
    "bare carriage return": b"X: a\rContent-Length: 5\r\n\r\nhello",
    "zero byte": b"X: a\0b\r\n\r\n",
    "two hosts": b"Host: y\r\n\r\n",
    "a name with a space": b"X y: a\r\n\r\n",
}


@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS)
@connected()
async def test_what_can_be_read_in_two_ways_is_refused_and_ends_the_connection(s: Served, rest: bytes) -> None:
    async with s.connect() as wire:
        wire.send(b"POST /echo HTTP/1.1\r\nHost: x\r\n" + rest + b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, body = await wire.response()
        assert status in (400, 501) and headers["connection"] == "close"
        error = json.loads(body)["error"]
        assert error["code"] == "invalid_http" and "bytearray" not in error["message"] and await wire.ended()


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"GET /echo HTTP/1.1\nHost: x\n\n", 400, "CR LF"),
        (b"GET /echo HTTP/1.1\rHost: x\r\r", 400, "CR LF"),
        (b"\nGET /echo HTTP/1.1\r\n", 400, "no method"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not HTTPS"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/1.1"),
        (b"GET /echo HTTP/3.0\r\nHost: x\r\n\r\n", 505, "HTTP/1.1"),
    ],
)
@pytest.mark.parametrize("piece", [1, 1000])
@connected(Timeouts())
async def test_what_is_no_http_1_1_is_refused_at_once(
    s: Served, sent: bytes, status: int, words: str, piece: int
) -> None:
    """No time passes: the end that its head lacks will not come."""
    async with s.connect() as wire:
        for at in range(0, len(sent), piece):
            wire.send(sent[at : at + piece])
            await asyncio.sleep(0)
        found, _, body = await wire.response()
        assert found == status and words in json.loads(body)["error"]["message"] and await wire.ended()


@pytest.mark.parametrize(
    ("target", "path"), [("http://x/client", "/client"), ("HTTPS://a:8/echo?b", "/echo"), ("http://x", "/")]
)
@connected()
async def test_a_target_may_name_its_origin(s: Served, target: str, path: str) -> None:
    """As clients write it to proxies, and a server has to take it (RFC 9112, 3.2.2)."""
    async with s.connect() as wire:
        wire.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await wire.response())[0] == 200
        assert s.paths == [path]


@pytest.mark.parametrize(
    "chunks",
    [
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"-1\r\n",
        b"g\r\n",
        b"5\nhello\n0\n\n",  # at once: no end of the first line would come
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"1\r\n \r\n" * 20_000,  # bodies of tiny chunks cost more than they hold
        b"0\r\n" + b"a: b\r\n" * 20_000,
    ],
    ids=lambda chunks: repr(chunks[:30]),
)
@connected()
async def test_malformed_chunks_are_refused_and_end_the_connection(s: Served, chunks: bytes) -> None:
    async with s.connect() as wire:
        wire.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        status, headers, _ = await wire.response()
        assert status == 400 and headers["connection"] == "close" and await wire.ended()


@connected()
async def test_heads_are_bounded(s: Served) -> None:
    for head in (b"X: " + b"y" * 70_000 + b"\r\n\r\n", b"X: y\r\n" * 200 + b"\r\n", b"X: " + b"y" * 300_000):
        async with s.connect() as wire:
            wire.send(b"GET /echo HTTP/1.1\r\nHost: x\r\n" + head)
            assert (await wire.response())[0] == 431 and await wire.ended()


@connected()
async def test_a_client_that_asks_first_is_answered_before_it_sends(s: Served) -> None:
    ask = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    async with s.connect() as wire:
        wire.send(ask % b"/echo")
        assert (await wire.response())[0] == 100
        wire.send(b"hello")
        assert (await wire.response())[2] == b"hello"
    async with s.connect() as wire:  # the answer does not need the body: it is not asked for
        wire.send(ask % b"/ignore")
        status, headers, body = await wire.response()
        assert (status, headers["connection"], body) == (200, "close", b"ignored") and await wire.ended()
    async with s.connect() as wire:  # it did not wait
        wire.send(ask % b"/echo" + b"hello")
        status, _, body = await wire.response()
        assert (status, body) in ((100, b""), (200, b"hello"))


@connected(None)
async def test_a_refused_body_is_thrown_away_so_that_the_answer_arrives(s: Served) -> None:
    async with s.connect() as wire:
        wire.send(b"POST /ignore HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n")
        for _ in range(200):
            wire.send(b"x" * 100_000)
            await wire.writer.drain()
        assert (await wire.response())[2] == b"ignored"


@pytest.mark.parametrize("sent", [b"GET\n\n", b"POST /ignore HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"])
def test_a_client_that_has_left_before_its_refusal_is_no_failure(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by fuzzing: between a reset's arrival and the loop's look at it the socket cannot be shut down."""

    def reset(transport: Any) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", reset)

    async def test(s: Served) -> None:
        async with s.connect() as wire:
            wire.send(sent)
            await wire.reader.read()
            assert not s.listener.connections

    serve(test, Timeouts())
    assert not [r for r in caplog.records if r.levelname == "ERROR"], caplog.text


def test_a_handler_that_fails_early_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        async with s.connect() as wire:
            wire.send(GET.replace(b"echo", b"broken"))
            assert await wire.ended()

    serve(test)
    assert "ZeroDivisionError" in caplog.text


@connected(max_connections=2)
async def test_more_connections_than_allowed_are_refused(s: Served) -> None:
    async with s.connect() as one, s.connect() as two:
        for wire in (one, two):
            wire.send(GET)
            await wire.response()
        async with s.connect() as three:
            status, headers, _ = await three.response()
            assert status == 503 and headers["retry-after"] == "1" and await three.ended()
    await s.until(lambda: not s.listener.connections)
    async with s.connect() as wire:
        wire.send(GET)
        assert (await wire.response())[0] == 200


@connected()
async def test_connections_wait_to_be_accepted(s: Served) -> None:
    for _ in range(120):  # meanwhile the loop accepts none
        socket.create_connection(("127.0.0.1", s.port), 5.0).close()


@connected()
async def test_draining_ends_idle_connections_and_lets_answers_end(s: Served) -> None:
    async with s.connect() as idle, s.connect() as busy:
        idle.send(GET)
        await idle.response()
        busy.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe")
        await s.until(lambda: any(c.exchange and c.exchange._received == 2 for c in s.listener.connections))
        s.listener.drain()
        assert await idle.ended()
        busy.send(b"llo")
        status, headers, body = await busy.response()
        assert (status, headers["connection"], body) == (200, "close", b"hello") and await busy.ended()


@connected(proxies=Proxies(["127.0.0.0/8"]))
async def test_a_trusted_proxy_names_the_client(s: Served) -> None:
    async with s.connect() as wire:
        wire.send(b"GET /client HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 198.51.100.7, 203.0.113.9\r\n\r\n")
        assert (await wire.response())[2] == b"203.0.113.9"


def test_a_unix_socket_serves(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["client"][0].encode()})

    async def main() -> None:
        path = str(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            listener = Listener(app)
            await listener.start(sock)
            wire = Wire(*await asyncio.open_unix_connection(path))
            wire.send(GET)
            assert (await wire.response())[2] == b"unix"
            wire.writer.close()
            await listener.close(1.0)

    asyncio.run(main())
