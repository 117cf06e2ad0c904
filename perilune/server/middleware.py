"""Small ASGI wrappers: who may enter, how large a body may be, and one log line and one count per request."""

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.limits import BodyBudget, BodyShare, Limit, Limiter
from perilune.server.metrics import Metrics
from perilune.server.sse import CLIENT_GONE

OPEN = ("/", "/health", "/health/ready", "/health/live")
access = logging.getLogger("perilune.access")


class Observe:
    """Counts and logs each request: method, route, status, seconds. Never headers, query strings or contents."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Mapping[Any, str]) -> None:
        """`paths` names the route of each endpoint."""
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = CLIENT_GONE  # stays when the client left before an answer

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            status = 500
            raise
        finally:
            # Unknown paths share one label: clients must not be able to grow the metrics without bound.
            name = self.paths.get(scope.get("endpoint"), "other")
            self.metrics.requests.labels(name, str(status)).inc()
            seconds = time.perf_counter() - started
            access.info("%s %s %d %.3f s", scope["method"][:16], name, status, seconds)


class ApiKey:
    """Asks for `Authorization: Bearer <key>`, or the key as `x-api-key` as Anthropic's clients send it.

    /health is open to all, as probes must reach it without secrets, and so is the page, which asks for the key itself.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app = app
        self.digest = _digest(key.encode()) if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.digest is None or scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        authorization = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        scheme, _, given = authorization.partition(" ")
        # Digests have one length, so the comparison takes the same time for every wrong key.
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip().encode()), self.digest):
            await self.app(scope, receive, send)
            return
        error = RequestError(
            "wrong or missing API key: send it as 'Authorization: Bearer <key>'", code="invalid_api_key", status=401
        )
        await errors.response(error)(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ClientLimit:
    """Bounds the requests of each client address, see limits.Proxies. What is open to probes is not counted."""

    def __init__(self, app: ASGIApp, limit: Limit) -> None:
        self.app = app
        self.limit = limit
        self.limiter = Limiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        try:
            end = self.limiter.take((scope.get("client") or ("",))[0], self.limit)
        except RequestError as e:
            await errors.response(e)(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            end()


class BodyLimit:
    """Refuses a body above `limit` bytes with 413, and one that the budget has no room for with 503: by its declared
    length before anything is read, else when that many bytes have come.

    What is left of the body's share in the budget is `scope["body_share"]`, which Service.receive releases when the
    bytes are no longer needed.
    """

    def __init__(self, app: ASGIApp, limit: int, budget: BodyBudget) -> None:
        self.app = app
        self.limit = limit
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        share = scope["body_share"] = BodyShare(self.budget, self.limit)
        declared = Headers(scope=scope).get("content-length", "")
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if not share.released:
                share.grow(seen)
            return message

        try:
            if declared.isdecimal():
                share.hold(int(declared))
            await self.app(scope, counted, send)
        except RequestError as e:  # only from hold: further in, the application answers
            await errors.response(e)(scope, receive, send)
        finally:
            share.release()
