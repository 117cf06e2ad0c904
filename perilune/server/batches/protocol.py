"""The body of POST /v1/batches, and the lines of the file that it names."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from perilune.core.errors import RequestError
from perilune.server.batches.files import EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from perilune.server.body import Body, RequestBody
from perilune.text.tools import show

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WINDOW_SECONDS = 86_400
MAX_ID_CHARS = 256


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int


class BatchBody(RequestBody):
    FIELDS: ClassVar = {}
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    def check_supported(self) -> None:
        if self.output_expires_after is not None:
            check_expiry(self.output_expires_after.seconds, "output_expires_after.seconds")


def check_expiry(seconds: int, param: str) -> int:
    if not MIN_EXPIRY_SECONDS <= seconds <= EXPIRY_SECONDS:
        raise RequestError(
            f"{param} must be {MIN_EXPIRY_SECONDS} to {EXPIRY_SECONDS}, not {seconds}",
            param=param,
            code="invalid_value",
        )
    return seconds


class Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, msgspec.Raw]  # a large one would take long to decode, all in one call


def read_line(line: bytes, endpoint: str) -> Line:
    """RequestError for a line that is no request to the endpoint of its batch."""
    try:
        found = msgspec.json.decode(line.decode(), type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RequestError(f"the line is no request: {e}", code="invalid_json_line") from e
    if found.url != endpoint:
        raise RequestError(
            f"url is {show(found.url)}, and the batch's endpoint {endpoint!r}", param="url", code="mismatched_endpoint"
        )
    if not 0 < len(found.custom_id) <= MAX_ID_CHARS:
        raise RequestError(
            f"custom_id must have 1 to {MAX_ID_CHARS} characters", param="custom_id", code="invalid_value"
        )
    for name in ("stream", "background"):
        if bytes(found.body.get(name, b"null")) not in (b"null", b"false"):
            raise RequestError(
                f"{name} does not go with a batch: leave it out", param=f"body.{name}", code="invalid_value"
            )
    return found


def record(id: str, body: BatchBody, now: int) -> dict[str, Any]:
    """A batch that has just been made, as OpenAI's API shows it."""
    times: Mapping[str, None] = dict.fromkeys(
        f"{name}_at"
        for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    )
    expiry = body.output_expires_after
    return {
        "id": id,
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_SECONDS,
        **times,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "own": {"expiry_seconds": None if expiry is None else expiry.seconds},
    }
