"""Every error leaves the server as an OpenAI error object: {"error": {"message", "type", "param", "code"}}."""

import codecs
import http
import json
import logging
import re
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.errors import CheckpointError, EngineError, EngineUnavailable, PeriluneError, RequestError, shown
from perilune.server.call import current
from perilune.text.tools import check_text

log = logging.getLogger("perilune.server")

# Byte order marks. That of UTF-32 LE begins with that of UTF-16 LE.
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
MAX_LEVELS = 200  # nested objects and arrays in a body: pydantic's bound
MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    501: "invalid_request_error",  # HTTP that this server does not implement: an error of the client
    503: "service_unavailable_error",
    505: "invalid_request_error",
}


class GenerationError(PeriluneError):
    """The engine gave up on this one request, for instance because its logits were not finite. Status 500."""


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """(HTTP status, error object) of any exception. Exceptions without a text for users become "internal error"."""
    param: str | None = None
    code: str | None = None
    message = str(error)
    if isinstance(error, RequestError):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, EngineError):
        status, code = 503, "engine_unavailable"
    elif isinstance(error, GenerationError):
        status, code = 500, "generation_failed"
    elif isinstance(error, CheckpointError):
        status, code = 400, "unsupported_by_model"  # for instance a chat with a checkpoint that has no template
    elif isinstance(error, PeriluneError):
        status = 500
    else:
        status, message = 500, "internal error; the server's log has the details"
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    # Clients choose the names and values that messages repeat.
    message, param = shown(message, MAX_MESSAGE_CHARS), param and param[:MAX_PARAM_CHARS]
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response(error: Exception) -> Response:
    """The answer to the current request, which counts as failed by this error."""
    current().error = error
    status, body = describe(error)
    headers = {"retry-after": str(getattr(error, "retry_seconds", None) or 1)} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def phrase(status: int) -> bytes:
    """The reason phrase of a status; empty for a status without one."""
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for PeriluneError, HTTPException (unknown route, wrong method) and the rest."""
    if isinstance(error, HTTPException):
        phrase = http.HTTPStatus(error.status_code).phrase.lower()
        path = request.url.path[:200]
        error = HTTPException(error.status_code, f"{phrase}: {request.method[:16]} {path}", error.headers)
    elif isinstance(error, PeriluneError):
        log_failure(request.url.path[:200], error)
    return response(error)


def log_failure(what: str, error: Exception) -> None:
    """Logs one line for an expected failure and a traceback for a bug. RequestError and EngineUnavailable (refused or
    lost while the engine is down) are not logged here: the access log has them."""
    if isinstance(error, RequestError | EngineUnavailable):
        return
    if isinstance(error, PeriluneError):
        log.warning("%s failed: %s", what, error)
    else:
        log.error("%s failed: %s", what, error, exc_info=error)


def from_validation(error: ValidationError, body: bytes) -> RequestError:
    """pydantic's first error about a body as a RequestError that names the field."""
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    if first["type"] == "json_invalid":
        return not_json(str(first.get("ctx", {}).get("error", first["msg"])), body)
    # Names of union members ("str", "list[int]") are part of pydantic's location; a client knows only its own fields.
    path = [str(p) for p in first["loc"] if isinstance(p, int) or p.isidentifier()]
    if first["type"] == "model_type" and not path:
        return RequestError("the body must be a JSON object", code="invalid_json")
    name = re.sub(r"\.(\d+)", r"[\1]", ".".join(path))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.replace("a valid dictionary", "an object")  # pydantic's words for a value already decoded
    verb = "is required" if first["type"] == "missing" else f"must be {message}"
    if first["type"] == "value_error":
        verb = message
    return RequestError(f"{name} {verb}", param=path[0] if path else None, code="invalid_value")


def not_json(reason: str, text: bytes, at: str = "") -> RequestError:
    """The error for a body, or its part at the path `at`, that the JSON parser refused; `reason`: its message."""
    if text.startswith(_MARKS):
        return RequestError("the body begins with a byte order mark: send UTF-8 without one", code="invalid_json")
    if reason.lower().startswith(("recursion limit", "maximum recursion")):
        place = f"in {at}" if at else f"at {where}" if (where := reason.partition(" at ")[2]) else ""
        return RequestError(
            f"the JSON of the body is nested deeper than {MAX_LEVELS} levels {place}".rstrip(), code="invalid_json"
        )
    try:
        check_text(json.loads(text), at)  # json.loads accepts half surrogate pairs; check_text names them
    except RequestError as error:
        return error
    except (ValueError, RecursionError):
        pass
    return RequestError(f"the body is not valid JSON: {reason}{f' of {at}' if at else ''}", code="invalid_json")
