"""Server-sent events; cancels the work on an answer when its client leaves or the server stops."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perilune.core.errors import EngineError
from perilune.server import errors
from perilune.server.call import current

E = TypeVar("E")
T = TypeVar("T")
QUEUED_PIECES = 64
PING_SECONDS = 10.0  # well below the idle limits of common proxies (30 s and more)
CLIENT_GONE_STATUS = 499  # status in logs for a client that left, as in nginx; it is never sent
DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps nginx from buffering the stream
)
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed its connection before it was answered."""


def event(body: bytes) -> bytes:
    """A frame without a name, as OpenAI's chat and completions stream them."""
    return b"data: " + body + b"\n\n"


def named_event(event: Mapping[str, Any]) -> bytes:
    """A frame with the event's `type` as its name, as the Responses and the Messages API stream them."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event))


def error_event(error: Exception) -> bytes:
    return event(_encode(errors.describe(error)[1]))


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection; the request body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def race(work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event) -> T:
    """The result of `work`; ClientGone if the client leaves first, EngineError if the server stops. `work` is then
    cancelled, and has ended."""
    answer = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(receive))
    stop = asyncio.create_task(stopping.wait())
    tasks: tuple[asyncio.Task[Any], ...] = (answer, gone, stop)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if stop.done():
            raise EngineError("the server is shutting down")
        raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all works, in order; the first failure cancels the rest."""
    tasks = [asyncio.create_task(w) for w in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def merged(sources: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    """The frames of all sources as they come; an exception in one, or closing this generator, closes every source."""
    return sources[0] if len(sources) == 1 else _interleaved(sources)


async def _interleaved(sources: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(QUEUED_PIECES)

    async def drain(source: AsyncGenerator[bytes, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for frame in source:
                    await queue.put(frame)
        except Exception as e:
            await queue.put(e)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(drain(s)) for s in sources]
    try:
        open_sources = len(tasks)
        while open_sources:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_sources -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response, Generic[E]):
    """Sends each of `events` the moment it exists, one ASGI message per event, and `ping` when PING_SECONDS were quiet.

    `events` is closed as soon as the client leaves or the server stops, which cancels the request in the engine. The
    status line is already sent when an exception comes, so the stream ends with the event that `failure` makes of it.
    `end` is sent after the last event. `on_close` runs in every case.
    """

    def __init__(
        self,
        events: AsyncGenerator[E, None],
        stopping: asyncio.Event,
        on_close: Callable[[], None],
        *,
        failure: Callable[[Exception], E],
        encode: Callable[[E], bytes],
        end: bytes = b"",
        ping: E | None = None,
    ) -> None:
        """`encode`: an event as a complete SSE frame."""
        self.events = events
        self.stopping = stopping
        self.on_close = on_close
        self.failure = failure
        self.encode = encode
        self.end = end
        self.ping = ping
        self.status_code = 200
        self.background = None
        self._quiet = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await race(self._pump(send), receive, self.stopping)
            except (ClientGone, OSError):
                return
            except Exception as error:
                current().error = error
                errors.log_failure(f"a stream of {scope['path'][:200]}", error)
                await self._send(send, self.failure(error))
            if self.end:
                await send({"type": "http.response.body", "body": self.end, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.on_close()

    async def _pump(self, send: Send) -> None:
        pings = asyncio.create_task(self._keep_alive(send))
        try:
            async with contextlib.aclosing(self.events) as events:
                async for event in events:
                    await self._send(send, event)
        finally:
            pings.cancel()
            # A ping fails only when the client has left, which the race notices by itself.
            await asyncio.gather(pings, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        while self.ping is not None:
            self._quiet = True
            await asyncio.sleep(PING_SECONDS)
            if self._quiet:
                await self._send(send, self.ping)

    async def _send(self, send: Send, event: E) -> None:
        self._quiet = False
        await send({"type": "http.response.body", "body": self.encode(event), "more_body": True})
