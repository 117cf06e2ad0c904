"""Builds chat messages from the items of other APIs; shared by the Responses and the Messages API."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from perilune.core.errors import RequestError
from perilune.text.tools import show

Content = str | list[Mapping[str, Any]]
ReadMedium = Callable[[Mapping[str, Any], str], dict[str, Any]]


class Conversation:
    """Grows a list of chat messages, ready for the chat template.

    Consecutive thoughts, texts and tool calls of the assistant become one message, in that order, until `close` or a
    message of another role.
    """

    def __init__(self, before: Sequence[Mapping[str, Any]] = ()) -> None:
        self._messages: list[Mapping[str, Any]] = list(before)
        self._calls = {call["id"] for m in before for call in m.get("tool_calls", ())}
        self._turn: dict[str, Any] | None = None
        self._texts: dict[str, list[str]] = {}  # by field of `_turn`: texts to add to it, joined in one step

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        self._join()
        return self._messages

    @property
    def spoken(self) -> bool:
        """Whether the open assistant message has text or calls: a thought then begins a new message."""
        if self._turn is None:
            return False
        return bool(self._turn["content"] or self._texts.get("content") or "tool_calls" in self._turn)

    def close(self) -> None:
        self._join()
        self._turn = None

    def resume(self) -> None:
        """Reopens the last message, which is the assistant's."""
        self._turn = self._messages[-1] = dict(self._messages[-1])

    def say(self, role: str, content: Content) -> None:
        """Adds a message of the system, the developer or the user."""
        self.close()
        self._messages.append({"role": role, "content": content})

    def think(self, text: str) -> None:
        self._add("reasoning_content", text)

    def answer(self, text: str) -> None:
        self._add("content", text)

    def call(self, id: str, name: str, arguments: str) -> None:
        """A tool call; `arguments` is JSON text."""
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
        self._calls.add(id)

    def result(self, id: str, content: Content, where: str) -> None:
        """Adds the result of a tool call; RequestError names `where` if no earlier call has this id."""
        if id not in self._calls:
            raise wrong(where, f"{show(id)} is not the id of an earlier tool call in this conversation")
        self.close()
        self._messages.append({"role": "tool", "tool_call_id": id, "content": content})

    def _add(self, field: str, text: str) -> None:
        self._assistant().setdefault(field, "")
        if text:
            self._texts.setdefault(field, []).append(text)

    def _join(self) -> None:
        for field, texts in self._texts.items():
            assert self._turn is not None
            self._turn[field] += "".join(texts)
        self._texts = {}

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self._messages.append(self._turn)
        return self._turn


def text_of(content: Any, where: str, parts: Mapping[str, str]) -> str:
    """The text of a string or a list of parts; `parts` maps the types that are text to the field that holds it."""
    text = content_of(content, where, parts, {})
    assert isinstance(text, str)
    return text


def content_of(content: Any, where: str, texts: Mapping[str, str], media: Mapping[str, ReadMedium]) -> Content:
    """As `text_of`, but parts may also be pictures and videos. `media` maps a part's type to a function that makes a
    chat part from the part and its path in the request.

    Returns the list of chat parts if one is a picture or video, else the text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of parts")
    made = []
    for i, part in enumerate(content):
        spot = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise wrong(spot, "must be an object with a type")
        if kind in texts:
            made.append(text_part(string(part, texts[kind], spot)))
        elif kind in media:
            made.append(media[kind](part, spot))
        else:
            served = f"text, {' and '.join(media)} are" if media else "text is"
            raise wrong(spot, f"is of type {show(kind)}, but only {served} served here", code="unsupported_parameter")
    return joined(made)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def joined(parts: Sequence[Mapping[str, Any]]) -> Content:
    """One text if all chat parts are text, else the list of parts."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def string(item: Mapping[str, Any], name: str, where: str, *, empty: bool = True) -> str:
    """The string in a field of an item. RequestError if it is no string, or "" where `empty` is false."""
    value = item.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise wrong(f"{where}.{name}", f"must be a string{'' if empty else ' that is not empty'}, not {show(value)}")
    return value


def wrong(where: str, what: str, *, code: str = "invalid_value") -> RequestError:
    return RequestError(f"{where} {what}", param=where, code=code)


@contextlib.contextmanager
def spelled(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """In a RequestError raised inside the context, replaces chat's field names by those of the client's API.

    `names`: pairs (chat's name, the client's), applied in order to the error's `param`. Chat's name is replaced only at
    the beginning of `param` and as whole words; one that begins with "]" is replaced where it first occurs.
    """
    try:
        yield
    except RequestError as e:
        if e.param is None:
            raise
        param = e.param
        for chat, client in names:
            param = re.sub(("" if chat[0] == "]" else "^") + re.escape(chat) + r"\b", client, param, count=1)
        raise RequestError(
            str(e).replace(e.param, param), param=param, code=e.code, status=e.status, retry_seconds=e.retry_seconds
        ) from e
