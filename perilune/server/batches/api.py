"""/v1/files and /v1/batches: OpenAI's API for requests without an urgent deadline."""

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from perilune.core.errors import RequestError
from perilune.server.batches import multipart
from perilune.server.batches.batch import Batches, Endpoint
from perilune.server.batches.files import FileStore, new_id
from perilune.server.batches.protocol import BatchBody, check_expiry
from perilune.server.call import current
from perilune.server.openai.protocol import json_response
from perilune.server.responses.items import whole_number
from perilune.server.service import Service
from perilune.text.tools import show

PAGE_FILES, PAGE_BATCHES = 10_000, 20
MAX_PAGE_BATCHES = 100
MAX_NAME_CHARS = 256
FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_RANGE = re.compile(r"\s*(?:(\d{1,18})-(\d{0,18})|-\d{1,18})\s*")


def _batches(request: Request) -> Batches:
    found: Batches | None = request.app.state.batches
    if found is None:
        raise RequestError(
            "files and batches are not served: start the server with --files-dir DIR", code="files_off", status=404
        )
    return found


async def files(request: Request) -> Response:
    return await (_create_file if request.method == "POST" else _list_files)(request)


async def batches(request: Request) -> Response:
    return await (_create_batch if request.method == "POST" else _list_batches)(request)


async def _create_file(request: Request) -> Response:
    served, owner = _batches(request), current().account.name
    store = served.store
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
    with contextlib.ExitStack() as held:
        held.callback(request.scope["body_share"].release)
        given = await asyncio.to_thread(multipart.parsed, request.headers.get("content-type", ""), raw)
        raw.clear()
        file, purpose, seconds = _checked(given)
        store.expire()
        store.reserve(owner, len(file.data))
        reserved = held.enter_context(contextlib.ExitStack())
        reserved.callback(store.free, owner, len(file.data))
        id = new_id("file")
        source = await asyncio.to_thread(store.write, owner, id, file.data)
        reserved.callback(source.unlink)
        about = {"filename": file.filename, "purpose": purpose}
        made = store.keep(owner, id, source, about, seconds)
        reserved.pop_all()
        return json_response(made)


def _checked(given: Any) -> tuple[multipart.Part, str, int | None]:
    if unknown := [name for name in given if name not in FIELDS]:
        raise RequestError(
            f"unknown field {show(unknown[0])}: send file, purpose and expires_after",
            param=unknown[0][:64],
            code="unknown_parameter",
        )
    file, purpose = given.get("file"), given.get("purpose")
    if file is None or not file.filename:
        raise _invalid("file", "file is required, with a filename")
    if len(file.filename) > MAX_NAME_CHARS:
        raise _invalid("file", f"the filename has more than {MAX_NAME_CHARS} characters")
    if purpose is None or purpose.text != "batch":
        said = "left out" if purpose is None else show(purpose.text)
        raise _invalid("purpose", f"purpose must be 'batch', not {said}")
    anchor, seconds = given.get("expires_after[anchor]"), given.get("expires_after[seconds]")
    if anchor is not None and anchor.text != "created_at":
        raise _invalid("expires_after", f"expires_after[anchor] must be 'created_at', not {show(anchor.text)}")
    if seconds is None:
        return file, "batch", None
    if not seconds.text.isascii() or not seconds.text.isdigit() or len(seconds.text) > 12:
        raise _invalid("expires_after", "expires_after[seconds] must be a whole number")
    return file, "batch", check_expiry(int(seconds.text), "expires_after[seconds]")


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")


async def _list_files(request: Request) -> Response:
    served, owner = _batches(request), current().account.name
    purpose = request.query_params.get("purpose")
    found = [f for f in served.store.list(owner) if purpose in (None, f["purpose"])]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _invalid("order", f"order must be 'asc' or 'desc', not {show(order)}")
    return _page(request, found if order == "asc" else found[::-1], PAGE_FILES, PAGE_FILES)


async def file_by_id(request: Request) -> Response:
    served, owner, id = _batches(request), current().account.name, request.path_params["id"]
    if request.method == "GET":
        return json_response(served.store.get(owner, id))
    if served.reads(owner, id):
        raise RequestError("a batch reads this file: cancel the batch first", param="file_id", code="file_in_use")
    served.store.delete(owner, id)
    return json_response({"id": id, "object": "file", "deleted": True})


async def file_content(request: Request) -> Response:
    served, owner, id = _batches(request), current().account.name, request.path_params["id"]
    served.store.get(owner, id)
    if not _ranges(request.headers.get("range", "")):  # ignored: RFC 9110, 14.2; starlette's 400 is plain text
        request.scope["headers"] = [h for h in request.scope["headers"] if h[0] != b"range"]
    return FileResponse(served.store.path(owner, id), media_type="application/octet-stream")


def _ranges(header: str) -> bool:
    """Whether a Range header is valid and asks for bytes."""
    unit, _, listed = header.partition("=")
    found = [_RANGE.fullmatch(one) for one in listed.split(",")]
    return unit.strip().lower() == "bytes" and all(m and int(m[1] or 0) <= int(m[2] or 1e18) for m in found)


async def _create_batch(request: Request) -> Response:
    service: Service = request.app.state.service
    served = _batches(request)
    body, _ = await service.receive(request, BatchBody)
    return json_response(served.create(current().account.name, body).shown())


async def _list_batches(request: Request) -> Response:
    found = _batches(request).list(current().account.name)
    return _page(request, [b.shown() for b in found[::-1]], PAGE_BATCHES, MAX_PAGE_BATCHES)


async def batch_by_id(request: Request) -> Response:
    return json_response(_batches(request).get(current().account.name, request.path_params["id"]).shown())


async def cancel_batch(request: Request) -> Response:
    served = _batches(request)
    batch = served.get(current().account.name, request.path_params["id"])
    await served.cancel(batch)
    return json_response(batch.shown())


def _page(request: Request, found: Sequence[dict[str, Any]], default: int, most: int) -> Response:
    limit = whole_number(request.query_params, "limit", default, 1, most)
    if (after := request.query_params.get("after")) is not None:
        at = next((i for i, one in enumerate(found) if one["id"] == after), None)
        if at is None:
            raise _invalid("after", f"after {show(after)} is not an id of this list")
        found = found[at + 1 :]
    shown = found[:limit]
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    page = {"object": "list", "data": shown, "first_id": ends[0], "last_id": ends[1], "has_more": len(found) > limit}
    return json_response(page)


def open_batches(service: Service, endpoints: Mapping[str, Endpoint], app: Any) -> Batches | None:
    """The batches of a server, None without --files-dir. ConfigError if the directory cannot be used."""
    config = service.config
    if config.files_dir is None:
        return None
    store = FileStore(Path(config.files_dir), int(config.files_gb * 1e9))
    return Batches(service, store, endpoints, app)
