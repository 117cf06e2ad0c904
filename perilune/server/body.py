"""Bodies of requests: from JSON to checked objects.

A thread alone does not keep the event loop free: one call of a C or Rust parser holds the interpreter's lock from its
beginning to its end, 340 ms for 31 MB. A large body is therefore parsed in many short calls.
"""

import re
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from perilune.core.errors import RequestError
from perilune.server import fields
from perilune.server.errors import from_validation, not_json
from perilune.server.fields import Fields

WHOLE_BYTES = 1 << 20  # parsed in one call, which takes up to 10 ms; more bytes lengthen the pauses of all streams
_LEVELS = 4  # of nesting taken apart: messages, a message, its parts, a part. Each level reads the bytes once more.
_OBJECT = re.compile(rb"\s*\{")
_OBJECTS = re.compile(rb"\s*\[\s*\{")  # no numbers or short strings: every element costs an object of 60 bytes
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_Raw = bytes | msgspec.Raw


class Body(BaseModel):
    """An object of a request. `FIELDS`: what becomes of fields that are not declared."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), validate_assignment=True)
    FIELDS: ClassVar[Fields] = {}

    def check_nested(self, *, lenient: bool) -> None:
        """RequestError for an unknown field of an object that is no Body."""


class RequestBody(Body):
    """The whole body of a request to a served model."""

    model: str | None = None


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes, *, lenient: bool = False) -> B:
    """The validated body; RequestError names the field that is wrong. `lenient`: unknown fields are ignored.

    To be called on a thread if `raw` is large (Service.offload).
    """
    try:
        parsed = kind.model_validate_json(raw) if len(raw) <= WHOLE_BYTES else _in_parts(kind, raw)
    except ValidationError as e:
        if e.errors(include_url=False, include_input=False)[0]["type"] == "missing":  # perhaps it is there, misspelt
            unknown = {name: value for name, value in _taken_apart(raw).items() if name not in kind.model_fields}
            fields.check(
                {n: _decoded(v, _LEVELS, n) for n, v in unknown.items()},
                kind.model_fields,
                kind.FIELDS,
                "",
                lenient=lenient,
            )
        raise from_validation(e, raw) from e
    _check_fields(parsed, "", lenient)
    return parsed


def _in_parts(kind: type[B], raw: bytes) -> B:
    """The same body, parsed in short calls: large lists of objects are put in after the rest has been validated."""
    given = _taken_apart(raw)
    large = {name: value for name, value in given.items() if _size(value) > WHOLE_BYTES and _OBJECTS.match(value)}
    body = kind.model_validate_json(msgspec.json.encode({**given, **{name: [] for name in large}}))
    for name, value in large.items():
        setattr(body, name, _decoded(value, _LEVELS, name))  # validated, see model_config
    return body


def _taken_apart(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as e:
        raise RequestError("the body must be a JSON object", code="invalid_json") from e
    except RecursionError as e:
        raise not_json(str(e), b"") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        if (half := _half(raw)) is not None:  # the error itself may say anything
            spelled = raw[half : half + 6].decode().lower()
            raise RequestError(f"lone surrogate {spelled} at byte {half}: not Unicode text", code="invalid_json") from e
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e


def _decoded(value: _Raw, levels: int, at: str) -> Any:
    """JSON data, decoded in calls of at most WHOLE_BYTES each wherever objects nested `levels` deep allow it.

    `at`: its place in the body.
    """
    try:
        if levels and _size(value) > WHOLE_BYTES:
            if _OBJECTS.match(value):
                parts = msgspec.json.decode(value, type=list[msgspec.Raw])
                return [_decoded(v, levels - 1, f"{at}[{i}]") for i, v in enumerate(parts)]
            if _OBJECT.match(value):
                members = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
                return {name: _decoded(v, levels - 1, f"{at}.{name}") for name, v in members.items()}
        return from_json(bytes(value))
    except (ValueError, RecursionError) as e:
        raise not_json(str(e), bytes(value), at) from e


def _half(raw: bytes) -> int | None:
    """Where the first escape of half a surrogate pair begins."""
    high: int | None = None
    for escape in _ESCAPE.finditer(raw):
        code = int(escape[1] or b"0", 16)
        low = 0xDC00 <= code <= 0xDFFF
        if high is not None:
            if not low or escape.start() != high + 6:
                return high
            high = None
        elif low:
            return escape.start()
        elif 0xD800 <= code <= 0xDBFF:
            high = escape.start()
    return high


def _size(value: _Raw) -> int:
    return len(memoryview(value))


def _check_fields(body: Body, where: str, lenient: bool) -> None:
    fields.check(body.model_extra or {}, type(body).model_fields, type(body).FIELDS, where, lenient=lenient)
    body.check_nested(lenient=lenient)
    for name in type(body).model_fields:
        if isinstance(inner := getattr(body, name), Body):
            _check_fields(inner, f"{where}{name}.", lenient)
