"""The server's socket: accepts connections, ends those that time out, drains."""

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from email.utils import formatdate
from typing import Any

from starlette.responses import Response

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.connection import READ_BYTES, Connection, Message, Timeouts
from perilune.server.limits import BACKLOG_CONNECTIONS, Proxies

App = Callable[
    [dict[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

Refuse = Callable[[RequestError, dict[str, Any]], Response]
MAX_CONNECTIONS = 8192
SPARE_FILES = 64  # file descriptors kept free for everything that is not a connection
CHECK_SECONDS = 1.0  # interval at which the timeouts of all connections are checked


class Listener:
    """Serves an ASGI application on a bound socket. Belongs to one event loop.

    refuse    makes the response to a head that is no valid request, from the error and a scope with client, scheme and
              an empty path
    draining  whether connections end with their current request
    buffer    READ_BYTES bytes into which every connection reads; valid only inside buffer_updated
    """

    def __init__(
        self,
        app: App,
        *,
        timeouts: Timeouts | None = None,
        proxies: Proxies | None = None,
        refuse: Refuse = lambda error, scope: errors.response(error),
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.app = app
        self.timeouts = timeouts or Timeouts()
        self.proxies = proxies or Proxies(())
        self.refuse = refuse
        self.max_connections = min(max_connections, _files() - SPARE_FILES)
        self.connections: set[Connection] = set()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.draining = False
        self.scheme = "http"
        self.address: tuple[str, int | None] = ("", None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._date = (0, b"")
        self._server: asyncio.Server
        self._checking: asyncio.Task[None]

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Takes connections from now on; `sock` is bound, and closed by `close`."""
        loop = asyncio.get_running_loop()
        self.scheme = "http" if tls is None else "https"
        # `check` sees a connection only after its handshake.
        handshake = None if tls is None else self.timeouts.head_seconds
        unix, name = sock.family == socket.AF_UNIX, sock.getsockname()
        self.address = (name, None) if unix else name[:2]
        create: Callable[..., Awaitable[asyncio.Server]] = loop.create_unix_server if unix else loop.create_server
        self._server = await create(lambda: Connection(self), sock=sock, ssl=tls, ssl_handshake_timeout=handshake)
        sock.listen(BACKLOG_CONNECTIONS)  # asyncio's `backlog` would also accept so many at once
        self._checking = asyncio.create_task(self._check())

    def admit(self, connection: Connection) -> bool:
        """Registers a connection. False: there are too many; its timeouts are checked anyway, until the error is
        sent."""
        self.connections.add(connection)
        return len(self.connections) <= self.max_connections

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def busy(self) -> int:
        """Number of requests in progress."""
        return len(self._tasks)

    def date(self) -> bytes:
        """The value of the Date header, formatted once a second."""
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, formatdate(now, usegmt=True).encode())
        return self._date[1]

    def drain(self) -> None:
        self.draining = True
        for connection in list(self.connections):
            connection.drain()

    async def close(self, seconds: float) -> None:
        """Stops accepting, waits up to `seconds` for open connections to end, then aborts them."""
        self._server.close()
        self.drain()
        end = time.monotonic() + seconds
        while (self.connections or self._tasks) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._checking.cancel()
        for connection in list(self.connections):
            connection.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._checking, *self._tasks, return_exceptions=True)

    async def _check(self) -> None:
        limits = self.timeouts
        shortest = min(limits.head_seconds, limits.body_seconds, limits.idle_seconds, limits.write_seconds)
        while True:
            await asyncio.sleep(min(CHECK_SECONDS, shortest / 4))
            now = time.monotonic()
            for connection in list(self.connections):
                connection.check(now)


def _files() -> int:
    """The limit of open files of this process, after raising it to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 2 * SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
