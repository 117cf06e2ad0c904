"""GET /v1/responses/{id}/input_items: the items that a request sent, in pages."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from perilune.core.errors import RequestError
from perilune.text.tools import show

PAGE_ITEMS = 20
MAX_PAGE_ITEMS = 100
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_PREFIXES |= {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco"}


def as_items(given: str | Sequence[Mapping[str, Any]]) -> list[msgspec.Raw]:
    """The `input` of a request, which has been checked, as items: each with an id, texts of messages as parts."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [msgspec.Raw(msgspec.json.encode(_item(item))) for item in items]


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    made = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": part, "text": item["content"]} | ({"annotations": []} if "out" in part else {})]
    if kind == "message":
        made.setdefault("status", "completed")
    return made


def page(items: bytes, query: QueryParams) -> dict[str, Any]:
    """A page of stored items (a JSON list), the last item first unless `order` is "asc".

    RequestError for a `limit`, an `order` or an `after` that cannot be.
    """
    order, limit = query.get("order", "desc"), whole_number(query, "limit", PAGE_ITEMS, 1, MAX_PAGE_ITEMS)
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be 'asc' or 'desc', not {show(order)}", param="order", code="invalid_value")
    found: list[dict[str, Any]] = msgspec.json.decode(items)
    if order == "desc":
        found.reverse()
    if (after := query.get("after")) is not None:
        at = next((i for i, item in enumerate(found) if item["id"] == after), None)
        if at is None:
            raise RequestError(
                f"after {show(after)} is not the id of an item of this request", param="after", code="invalid_value"
            )
        found = found[at + 1 :]
    shown = found[:limit]
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    more = len(found) > limit
    return {"object": "list", "data": shown, "first_id": ends[0], "last_id": ends[1], "has_more": more}


def whole_number(query: QueryParams, name: str, default: int, low: int, high: int) -> int:
    """A number of the query; RequestError if it is none, or not between `low` and `high`."""
    given = query.get(name)
    if given is None:
        return default
    digits = given.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20) or not low <= int(given) <= high:
        raise RequestError(
            f"{name} must be a whole number from {low} to {high}, not {show(given)}", param=name, code="invalid_value"
        )
    return int(given)


def flag(query: QueryParams, name: str) -> bool:
    """A switch of the query; RequestError if it is neither true nor false."""
    given = query.get(name, "false").lower()
    if given not in ("true", "false"):
        raise RequestError(f"{name} must be true or false, not {show(given)}", param=name, code="invalid_value")
    return given == "true"
