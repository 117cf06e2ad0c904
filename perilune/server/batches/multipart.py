"""Parses multipart/form-data, the format of file uploads, from a body in memory."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perilune.core.errors import RequestError

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))')
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\\r\n]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Part:
    """`filename` is None for a field that is no file."""

    filename: str | None
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


def parsed(content_type: str, body: bytearray) -> Mapping[str, Part]:
    """The parts by name. RequestError 415 for another type of body, 400 for one that is not well-formed."""
    kind, _, _ = content_type.partition(";")
    found = _BOUNDARY.search(content_type)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        raise RequestError(
            "a file is sent as multipart/form-data, with the fields file and purpose",
            code="unsupported_media_type",
            status=415,
        )
    parts: dict[str, Part] = {}
    for name, part in _parts(body, b"--" + (found[1] or found[2]).encode("latin-1", "replace")):
        if name in parts:
            raise _malformed(f"the field {name[:64]!r} comes twice")
        parts[name] = part
    return parts


def _parts(body: bytearray, delimiter: bytes) -> Iterator[tuple[str, Part]]:
    if not body.startswith(delimiter):
        raise _malformed("it does not begin with its boundary")
    at = len(delimiter)
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES)
        end = body.find(b"\r\n" + delimiter, max(head_end, at))
        if not body.startswith(b"\r\n", at) or head_end < 0 or end < 0:
            raise _malformed("a part has no end, or no headers")
        head = body[at:head_end].decode(errors="replace")
        line = next((h for h in head.split("\r\n") if h.lower().startswith("content-disposition:")), "")
        given = {key: re.sub(r"\\(.)", r"\1", value) for key, value in _PARAMETER.findall(line)}
        if "name" not in given:
            raise _malformed("a part has no name")
        data = bytes(memoryview(body)[head_end + 4 : end]) if end >= head_end + 4 else b""
        yield given["name"], Part(given.get("filename"), data)
        at = end + 2 + len(delimiter)
    raise _malformed(f"it has more than {MAX_PARTS} parts")


def _malformed(why: str) -> RequestError:
    return RequestError(f"the body is not valid multipart/form-data: {why}", code="invalid_multipart")
