"""Finds the parts of chat messages that are pictures or videos, and replaces them by the decoded ones."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perilune.core.errors import RequestError
from perilune.core.messages import Picture, Video
from perilune.text.history import shown
from perilune.text.tools import show

DETAILS = ("auto", "low", "high", "original")
_PLACE = re.compile(r"[\w.\[\]]{1,200}")  # every `where` of `chat_part` matches; a chat client may send any text


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of message `message`, a picture or a video at `url`. `where`: its place in the request, as its
    client names it."""

    message: int
    index: int
    url: str
    where: str
    is_video: bool = False


def chat_part(kind: Literal["image_url", "video_url"], url: str, where: str) -> dict[str, Any]:
    """The chat part for a picture or video in another API's request."""
    return {"type": kind, kind: {"url": url}, "where": where}


def earlier(messages: Sequence[Mapping[str, Any]], where: str) -> list[Mapping[str, Any]]:
    """Messages of an earlier request; in errors, `where` comes before the names of their pictures and videos."""
    made = list(messages)
    for i, message in enumerate(made):
        if isinstance(content := message.get("content"), list):
            parts = [{**part, "where": f"{where}.{part['where']}"} if "where" in part else part for part in content]
            made[i] = {**message, "content": parts}
    return made


def found(messages: Sequence[Any]) -> list[Part]:
    """The pictures and videos of chat messages, in order. RequestError names the part that cannot be one.

    Other errors in the messages are found when these are read (text/history.py).
    """
    parts = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("text", "refusal", None):
                continue
            place = part.get("where")
            named = isinstance(place, str) and _PLACE.fullmatch(place)
            where = place if named else f"messages[{i}].content[{j}]"
            if kind == "video":
                raise unsupported(
                    where, "a video is sent here as {'type': 'video_url', 'video_url': {'url': 'data:video/mp4;...'}}"
                )
            if kind in ("video_url", "input_video"):
                parts.append(Part(i, j, _url(part, "video_url", None, where), where, True))
            elif kind == "image":
                raise unsupported(
                    where, "a picture is sent here as {'type': 'image_url', 'image_url': {'url': 'data:...'}}"
                )
            elif kind in ("image_url", "input_image"):
                parts.append(Part(i, j, _url(part, "image_url", part.get("detail"), where), where))
            else:
                raise RequestError(
                    f"{where}.type must be 'text', 'image_url' or 'video_url', not {show(kind)}", param=f"{where}.type"
                )
    return parts


def replaced(
    messages: Sequence[dict[str, Any]], parts: Sequence[Part], media: Sequence[Picture | Video]
) -> list[dict[str, Any]]:
    """The messages with their pictures and videos as the chat template takes them. Messages without
    any are not copied."""
    made = list(messages)
    for part, medium in zip(parts, media, strict=True):
        message = made[part.message]
        content = list(message["content"])
        content[part.index] = shown(medium)
        made[part.message] = {**message, "content": content}
    return made


def _url(part: Mapping[str, Any], field: str, detail: Any, where: str) -> str:
    url = part.get(field)
    if isinstance(url, Mapping):
        detail, url = url.get("detail", detail), url.get("url")
    check_detail(detail, where)
    if not isinstance(url, str):
        raise RequestError(f"{where}.{field} must be {{'url': 'data:...'}}", param=where, code="invalid_value")
    return url


def is_address(url: str) -> bool:
    """Whether it is an http(s) URL; fetch.py decides whether this server fetches it."""
    return url[:8].lower().startswith(("https://", "http://"))


def check_detail(detail: Any, where: str) -> None:
    """RequestError unless `detail` is None or in DETAILS. It has no effect: one rule scales all pictures."""
    if detail is not None and detail not in DETAILS:
        raise RequestError(
            f"{where}: detail must be one of {', '.join(DETAILS)}, not {show(detail)}",
            param=where,
            code="invalid_value",
        )


def unsupported(where: str, what: str) -> RequestError:
    return RequestError(f"{where}: {what}", param=where, code="unsupported_media")
