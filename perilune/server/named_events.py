"""Server-sent events that carry their name on an `event:` line, as the Responses and the Messages API stream them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perilune.server import errors
from perilune.server.sse import HEADERS, ClientGone, race

log = logging.getLogger("perilune.server")

PING_SECONDS = 10.0  # well below the idle limits of common proxies (30 s and more)
_encode = msgspec.json.Encoder().encode


def frame(event: Mapping[str, Any]) -> bytes:
    """An event on the wire; its name is its `type`."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event))


class NamedEventStream(Response):
    """Sends each event the moment it exists, and `ping`, if there is one, whenever nothing was sent for a while.

    `events` is closed as soon as the client leaves or the server stops, which cancels the request in the engine. An
    exception inside ends the stream with the event that `failure` makes of it, since the status line is already out.
    `on_close` runs in every case.
    """

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        stopping: asyncio.Event,
        on_close: Callable[[], None],
        *,
        failure: Callable[[Exception], Mapping[str, Any]],
        ping: Mapping[str, Any] | None = None,
    ) -> None:
        self.events = events
        self.stopping = stopping
        self.on_close = on_close
        self.failure = failure
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
                if errors.describe(error)[0] == 500:
                    log.exception("a stream failed")
                await self._send(send, self.failure(error))
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
            # A ping that fails says that the client left, and the race notices that by itself.
            await asyncio.gather(pings, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        while self.ping is not None:
            self._quiet = True
            await asyncio.sleep(PING_SECONDS)
            if self._quiet:
                await self._send(send, self.ping)

    async def _send(self, send: Send, event: Mapping[str, Any]) -> None:
        self._quiet = False
        await send({"type": "http.response.body", "body": frame(event), "more_body": True})
