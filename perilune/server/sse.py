"""Server-sent events, and the race of an answer against the client that may leave and the server that may stop."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perilune.core.errors import EngineError
from perilune.server import errors

log = logging.getLogger("perilune.server")

T = TypeVar("T")
QUEUED_PIECES = 64
CLIENT_GONE = 499  # the usual status in logs for a client that left; nobody receives it
DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects chunks would undo streaming
)


class ClientGone(Exception):
    """The client closed its connection before it was answered."""


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection; the request body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def race(work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event) -> T:
    """The result of `work`, or ClientGone, or EngineError when the server stops; `work` is cancelled and awaited."""
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


async def merged(sources: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    """The frames of all sources as they come; the first failure, or closing this, ends every source."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for frame in only:
                yield frame
        return
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


class EventStream(Response):
    """Sends each piece of `events` (complete SSE frames) the moment it exists, one ASGI message per piece.

    `events` is closed as soon as the client leaves or the server stops, which cancels the request in the engine. An
    exception inside becomes an error event, since the status line is already out. `on_close` runs in every case.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], stopping: asyncio.Event, on_close: Callable[[], None]
    ) -> None:
        self.events = events
        self.stopping = stopping
        self.on_close = on_close
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await race(self._pump(send), receive, self.stopping)
            except (ClientGone, OSError):
                return
            except Exception as error:
                if errors.describe(error)[0] == 500:
                    log.exception("a stream failed")
                await self._frame(send, event(msgspec.json.encode(errors.describe(error)[1])))
            await self._frame(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.on_close()

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self.events) as events:
            async for piece in events:
                await self._frame(send, piece)

    @staticmethod
    async def _frame(send: Send, piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
