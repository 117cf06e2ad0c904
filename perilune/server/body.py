"""Bodies of requests: from JSON to validated objects.

Parsing on another thread is not enough to keep the event loop free: one call of a C or Rust parser holds the GIL until
it returns, 340 ms for 31 MB. A large body is therefore parsed in many short calls.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from perilune.core.errors import RequestError, prompt_too_long
from perilune.server import fields
from perilune.server.errors import from_validation, not_json
from perilune.server.fields import Fields

MIN_VALUES = 500_000  # JSON values that a body may have with a model of any context (about 60 MB of memory)
# Tokenization stops at this multiple of the model's context: a token takes 0.7 us of CPU and 36 bytes of memory.
COUNTED_CONTEXTS = 2
WHOLE_BYTES = 1 << 20  # Parsed in one call, up to 10 ms. More: longer pauses of all streams.
_LEVELS = 4  # nesting levels decoded object by object: messages, message, parts, part. Each reads the bytes again.
_OBJECT = re.compile(rb"\s*\{")
_OBJECTS = re.compile(rb"\s*\[\s*\{")  # a list of objects; lists of numbers would cost 60 bytes per element
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_MARKS = (b",", b"[", b"{")  # One precedes each value in an array or object: they are at least as many.
_WINDOW_BYTES = 64 << 10  # bytes scanned per call: up to 3 ms, if all are quotation marks
_LONGEST_ESCAPE_BYTES = 6  # the longest JSON of one byte of UTF-8: \u0041
_Raw = bytes | bytearray | msgspec.Raw


@dataclass(frozen=True, slots=True)
class Context:
    """The bound of a prompt: the model's context of `tokens` tokens, and the bytes of the longest token."""

    tokens: int
    token_bytes: int

    @property
    def text_bytes(self) -> int:
        """Bytes of text that may fit the context; a longer text never does."""
        return self.tokens * self.token_bytes

    def check(self, size: int, param: str, tokens: int = 0) -> None:
        """RequestError for a prompt that cannot fit: it has at least `size` bytes, or at least `tokens` tokens. A
        prompt that is only a little too long passes and is tokenized to its end, so that its error can name its
        length."""
        least = max(-(-size // self.token_bytes), tokens)
        if size > self.text_bytes or tokens > COUNTED_CONTEXTS * self.tokens:
            raise prompt_too_long(least, self.tokens, param, exact=False)


class Body(BaseModel):
    """A JSON object of a request. `FIELDS`: the table for fields that are not declared (fields.py). `PROMPT`: names of
    the fields with text that must fit the context. `MAX_MEMBERS`: bounds of fields that are flat objects of numbers."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), validate_assignment=True)
    FIELDS: ClassVar[Fields] = {}
    PROMPT: ClassVar[tuple[str, ...]] = ()
    MAX_MEMBERS: ClassVar[Mapping[str, int]] = {}

    def check_nested(self, *, lenient: bool) -> None:
        """RequestError for an unknown field of an object that is no Body."""


class RequestBody(Body):
    """The whole body of a request to a served model."""

    model: str | None = None

    def check_supported(self) -> None:
        """RequestError for what would otherwise be silently ignored."""


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes | bytearray, *, lenient: bool = False, context: Context | None = None) -> B:
    """The validated body; RequestError names the field that is wrong. `lenient`: unknown fields are ignored.

    A large body that cannot be a request to a model of this `context` is refused before it is decoded.
    To be called on a thread if `raw` is large (Service.offload).
    """
    try:
        parsed = kind.model_validate_json(raw) if len(raw) <= WHOLE_BYTES else _in_parts(kind, raw, context)
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
        raise from_validation(e, bytes(raw)) from e
    _check_fields(parsed, "", lenient)
    return parsed


def _in_parts(kind: type[B], raw: bytes | bytearray, context: Context | None) -> B:
    """As `parse`, in short calls: large lists of objects are decoded and set after the rest was validated."""
    _check_values(raw, max(MIN_VALUES, 4 * context.tokens if context else 0))
    given = _taken_apart(raw)
    if context is not None and "truncate_prompt_tokens" not in given:
        for name in kind.PROMPT:
            if name in given and _size(given[name]) > WHOLE_BYTES:
                context.check(_least_bytes(given[name], together=name != "prompt"), name)
    for name, most in kind.MAX_MEMBERS.items():  # counted by commas: decoding 400,000 in one call takes 0.3 s
        if name in given and bytes(given[name]).count(b",") >= most:
            raise RequestError(f"{name} has more than {most} members", param=name, code="too_many_values")
    large = {name: value for name, value in given.items() if _size(value) > WHOLE_BYTES and _OBJECTS.match(value)}
    body = kind.model_validate_json(msgspec.json.encode({**given, **{name: [] for name in large}}))
    for name, value in large.items():
        setattr(body, name, _decoded(value, _LEVELS, name))  # validated, see model_config
    return body


def _check_values(raw: bytes | bytearray, max_values: int) -> None:
    """RequestError for a body of more JSON values than `max_values`: a decoded value takes up to 30 times its bytes.

    Time is linear in the length of the body. A body that is not JSON may pass: decoding refuses it.
    """
    windows = range(0, len(raw), WHOLE_BYTES)
    marks = accumulate(raw.count(mark, at, at + WHOLE_BYTES) for at in windows for mark in _MARKS)
    if not any(count > max_values for count in marks):
        return
    values = at = 0  # an upper bound, as some marks may be inside strings
    in_string = False  # whether the window begins inside a string
    while at < len(raw):
        window = raw[at : at + _WINDOW_BYTES]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:  # the last backslash escapes the byte after the window
            window = raw[at : at + _WINDOW_BYTES + 1]
        at += len(window)
        texts = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # inside and outside of strings in turn
        outside = b"".join(texts[in_string::2])
        in_string ^= len(texts) % 2 == 0
        values += sum(outside.count(mark) for mark in _MARKS)
        if values > max_values:
            raise RequestError(f"the body has more than {max_values} values: split the request", code="too_many_values")


def _least_bytes(value: _Raw, *, together: bool) -> int:
    """A lower bound, in bytes of UTF-8, of the texts of a prompt or of a list of messages.

    `together`: a list counts as the sum of its parts (messages), else as its longest part (a list of prompts).
    """
    try:
        match bytes(memoryview(value)[:64]).lstrip()[:1]:
            case b'"':
                return (_size(value) - 2) // _LONGEST_ESCAPE_BYTES
            case b"[":
                parts = [_least_bytes(v, together=True) for v in msgspec.json.decode(value, type=list[msgspec.Raw])]
                return sum(parts) if together else max(parts, default=0)
            case b"{":
                members = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
                return sum(_least_bytes(members[n], together=True) for n in ("content", "text") if n in members)
    except (msgspec.DecodeError, RecursionError):  # malformed: decoding raises the error for the client
        pass
    return 0


def _taken_apart(raw: bytes | bytearray) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as e:
        raise RequestError("the body must be a JSON object", code="invalid_json") from e
    except RecursionError as e:
        raise not_json(str(e), b"") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        if (half := _half(raw)) is not None:  # msgspec's message need not name the surrogate
            spelled = raw[half : half + 6].decode().lower()
            raise RequestError(f"lone surrogate {spelled} at byte {half}: not Unicode text", code="invalid_json") from e
        raise not_json(str(e), bytes(raw[:4])) from e


def _decoded(value: _Raw, levels: int, at: str) -> Any:
    """Decoded JSON. Objects nested up to `levels` deep are decoded one by one, so that a call has at most WHOLE_BYTES
    if no single object has more. `at`: path in the body, for errors.
    """
    try:
        if levels and _size(value) > WHOLE_BYTES:
            if _OBJECTS.match(value):
                parts = msgspec.json.decode(value, type=list[msgspec.Raw])
                return [_decoded(v, levels - 1, f"{at}[{i}]") for i, v in enumerate(parts)]
            if _OBJECT.match(value):
                members = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
                return {name: _decoded(v, levels - 1, f"{at}.{name[:200]}") for name, v in members.items()}
        return from_json(bytes(value))
    except (ValueError, RecursionError) as e:
        raise not_json(str(e), bytes(value), at) from e


def _half(raw: bytes | bytearray) -> int | None:
    """Index of the first JSON escape that is half a surrogate pair; None: there is none."""
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
