"""Small ASGI wrappers: API keys, limits of clients and bodies, headers of every answer, logs and metrics of every
request."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.call import Call, current, entered, request_id
from perilune.server.keys import Account, Keyring
from perilune.server.limits import BodyBudget, BodyShare, Limit, Limiter
from perilune.server.service import Service
from perilune.server.sse import CLIENT_GONE_STATUS

HEALTH = ("/health", "/health/ready", "/health/live")
OPEN = ("/", "/openapi.json", *HEALTH)
PROBES = (*HEALTH, "/metrics")
# Headers that restrict what browsers do with an answer. An answer may have its own instead, as the page at / has.
SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
access = logging.getLogger("perilune.access")


class Observe:
    """Gives each request its id and its headers, and reports its outcome to the log, the metrics and the service's
    observers, without headers, query strings or contents."""

    def __init__(self, app: ASGIApp, service: Service, paths: Mapping[Any, str]) -> None:
        """`paths` names the route of each endpoint."""
        self.app = app
        self.service = service
        self.paths = paths
        self._probed = dict.fromkeys(PROBES, 200)  # the last status of each route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"].endswith("/"):  # drop it: a redirect would name the client's Host and http://
            scope["path"] = scope["path"][:-1] or "/"
        headers = Headers(scope=scope)
        call = Call(self.service.keys.open, id=request_id(headers.get("x-request-id")), method=scope["method"][:16])
        call.client = scope["client"][0] if scope.get("client") else None
        call.keeps_text = self.service.config.audit_text
        call.status = CLIENT_GONE_STATUS  # stays when the client left before an answer
        call.trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        answered = False

        async def watch(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered, call.status = True, message["status"]
                message = {**message, "headers": [*message["headers"], *_added(scope, message["headers"], call)]}
            await send(message)

        with entered(call):
            try:
                await self.app(scope, receive, watch)
            except Exception as error:
                if not answered:  # here and not further out, so that this answer gets an id and headers too
                    await errors.response(error)(scope, receive, watch)
                call.status, call.error = 500, error
                raise  # connection.py logs it with its traceback
            finally:
                # Unknown paths share one label: clients must not be able to grow the metrics without bound.
                # A request refused before routing has no endpoint: its label is the path if a route has it.
                path = scope["path"] if scope["path"] in self.paths.values() else "other"
                call.route, call.ended = self.paths.get(scope.get("endpoint"), path), time.perf_counter()
                # Probes of one status every second would fill the log: a probe is logged if its status has changed.
                changed = call.status != self._probed.get(call.route)
                if call.route in self._probed:
                    self._probed[call.route] = call.status
                _report(self.service, call, logging.INFO if changed else logging.DEBUG)


def refuse(service: Service, error: RequestError, scope: Scope) -> Response:
    """The answer to bytes that are no valid request, with the headers, log line and metrics of every answer.

    `scope` has only client, scheme and an empty path.
    """
    call = Call(service.keys.open, client=scope["client"][0], method="-", route="other")
    with entered(call):
        response = errors.response(error)
    call.status, call.ended = response.status_code, time.perf_counter()
    response.raw_headers.extend(_added(scope, response.raw_headers, call))
    _report(service, call, logging.INFO)
    return response


def _report(service: Service, call: Call, level: int) -> None:
    metrics = service.metrics
    metrics.requests.labels(call.route, str(call.status)).inc()
    code = ""
    if call.error is not None:
        error = errors.describe(call.error)[1]["error"]
        metrics.errors.labels(error["type"], error["code"] or "").inc()
        code = error["code"] or error["type"]
    seconds, key = call.ended - call.started, call.account.name or "-"
    fields = {
        "method": call.method,
        "route": call.route,
        "status": call.status,
        "seconds": round(seconds, 6),
        "prompt_tokens": call.total("prompt_tokens"),
        "output_tokens": call.total("output_tokens"),
    }
    line = "%s %s %d %.3f s id=%s key=%s"
    given: list[Any] = [call.method, call.route, call.status, seconds, call.id, key]
    if code and call.status < 400:  # a stream: its status was sent before it failed
        fields["error"], line = code, f"{line} error=%s"
        given.append(code)
    access.log(level, line, *given, extra={"fields": fields})
    for observer in service.observers:
        observer(call)


def _added(scope: Scope, given: Iterable[tuple[bytes, bytes]], call: Call) -> Iterator[tuple[bytes, bytes]]:
    """Headers of every answer that does not have its own."""
    names = {name.lower() for name, _ in given}
    yield from (pair for pair in SECURITY if pair[0] not in names)
    if scope.get("scheme") == "https":
        yield b"strict-transport-security", b"max-age=31536000"
    yield b"x-request-id", call.id.encode()
    if scope["path"].startswith("/v1/messages"):
        yield b"request-id", call.id.encode()  # Anthropic's name
    yield from call.account.headers()


class ApiKey:
    """Asks for `Authorization: Bearer <key>`, or the key as `x-api-key` as Anthropic's clients send it, and counts POST
    requests, except those that cancel, against the key's limits.

    Paths in OPEN need no key: probes must work without secrets, and the page asks for the key itself.
    """

    def __init__(self, app: ASGIApp, keys: Keyring) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (self.keys.locked and scope["path"] in OPEN):
            try:
                self._enter(Headers(scope=scope), scope["method"] == "POST" and not scope["path"].endswith("/cancel"))
            except RequestError as error:
                await errors.response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _enter(self, headers: Headers, counted: bool) -> None:
        account: Account | None = self.keys.open
        if self.keys.locked:
            authorization = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            scheme, _, given = authorization.partition(" ")
            account = self.keys.find(given.strip()) if scheme.lower() == "bearer" else None
        if account is None:
            raise RequestError(
                "wrong or missing API key: send it as 'Authorization: Bearer <key>'", code="invalid_api_key", status=401
            )
        current().account = account
        if counted:
            account.admit()


class ClientLimit:
    """Bounds the requests of each client address, see limits.Proxies. Paths in OPEN are not counted."""

    def __init__(self, app: ASGIApp, limit: Limit) -> None:
        self.app = app
        self.limiter = Limiter(limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        try:
            end = self.limiter.take((scope.get("client") or ("",))[0])
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

    `scope["body_share"]` is the body's share of the budget, which Service.receive releases when the bytes are no longer
    needed.
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
        except RequestError as e:  # only of `hold`: the application answers its own errors
            await errors.response(e)(scope, receive, send)
        finally:
            share.release()
