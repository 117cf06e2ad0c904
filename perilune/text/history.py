"""Checks a client's messages and normalises them to the turns that every chat template writes.

Adjacent text parts are joined, the null content of an assistant message that has calls or reasoning becomes empty, and
tool calls get ids of the form that the models were trained on.
"""

import itertools
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perilune.core import messages as decoded
from perilune.core.errors import RequestError
from perilune.text.tools import check_depth, show

ROLES = ("system", "developer", "user", "assistant", "tool")
_NATIVE_ID = re.compile(r"functions\.[\w.-]+:[0-9]+")
_COUNTER = re.compile(r":([0-9]{1,9})\Z")
_LEADING_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>(.*)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Image:
    """A part of a message: a decoded picture, with its number of `tokens`. Only the server makes one; clients' JSON
    cannot."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Video:
    """A part of a message: a decoded video. `chunks`: (time HH:MM:SS.mmm of the first frame, number of tokens)."""

    chunks: tuple[tuple[str, int], ...]


def shown(medium: decoded.Picture | decoded.Video) -> Image | Video:
    """A decoded picture or video as a part of a message."""
    if isinstance(medium, decoded.Video):
        return Video(tuple((time, chunk.tokens) for time, chunk in zip(medium.times, medium.chunks, strict=True)))
    return Image(medium.tokens)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant turn. `id` is native, functions.NAME:COUNTER; `arguments` is JSON text."""

    id: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A message. `role`: "system" also for the client's "developer". `name`: the client's, or else the role."""

    role: str
    name: str
    parts: tuple[str | Image | Video, ...]
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str = ""  # a tool message: id of the call it answers

    @property
    def content(self) -> str:
        """The text of the parts."""
        return "".join(p for p in self.parts if isinstance(p, str))

    def with_thought_apart(self) -> "Turn":
        """A thought that a client left at the head of the content becomes reasoning, unless there is some already."""
        first, *rest = self.parts or ("",)
        thought = _LEADING_THOUGHT.match(first) if isinstance(first, str) else None
        if thought is None:
            return self
        return replace(self, parts=(thought[2] or "", *rest), reasoning=self.reasoning or thought[1])


def read_turns(messages: Any) -> list[Turn]:
    """The turns of OpenAI chat messages; RequestError naming the message and the field that cannot be used."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    ids = _Ids(messages)
    return [_turn(message, f"messages[{i}]", ids) for i, message in enumerate(messages)]


def next_counter(turns: Sequence[Turn]) -> int:
    """The counter of the next call's id: the number of calls so far, or past the highest counter among their ids."""
    ids = [call.id for turn in turns for call in turn.calls]
    counters = [int(found[1]) for id in ids if (found := _COUNTER.search(id))]
    return max(len(ids), *(c + 1 for c in counters), 0)


class _Ids:
    """Gives every tool call of a conversation an id of the form the model was trained on.

    Native ids stay. Others become functions.NAME:K, K counting the conversation's calls, and so do the tool messages
    that answer them. A client may reuse an id in a later turn, or within one: answers are then matched in order.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        self._count = 0
        self._next: dict[str, int] = {}  # by name: the first number to try, as those below are taken
        self._taken = {id for id in _sent_ids(messages) if _NATIVE_ID.fullmatch(id)}
        self._renamed: dict[str, deque[str]] = {}

    def new_turn(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._renamed.pop(id, None)

    def call(self, id: str, name: str) -> str:
        number, self._count = self._count, self._count + 1
        if _NATIVE_ID.fullmatch(id):
            return id
        number = max(number, self._next.get(name, 0))
        while (native := f"functions.{name}:{number}") in self._taken:
            number += 1
        self._next[name] = number + 1
        self._taken.add(native)
        self._renamed.setdefault(id, deque()).append(native)
        return native

    def answer(self, id: str) -> str | None:
        """The id of the call that a tool message answers; None if there was no such call."""
        if _NATIVE_ID.fullmatch(id):
            return id
        waiting = self._renamed.get(id)
        if not waiting:
            return None
        return waiting.popleft() if len(waiting) > 1 else waiting[0]


def _sent_ids(messages: Sequence[Any]) -> list[str]:
    calls = [m.get("tool_calls") for m in messages if isinstance(m, Mapping)]
    ids = [c.get("id") for group in calls if isinstance(group, list) for c in group if isinstance(c, Mapping)]
    return [id for id in ids if isinstance(id, str)]


def _turn(message: Any, where: str, ids: _Ids) -> Turn:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {show(role)}")
    name = message.get("name")
    if not isinstance(name, str | None):
        raise _wrong(f"{where}.name", "must be a string")
    if role == "developer":
        role = "system"
    if message.get("content") is None and role != "assistant":
        raise _wrong(f"{where}.content", "is null, not text" if "content" in message else "is missing")
    field = "content"
    if role == "assistant" and message.get("content") is None and message.get("refusal") is not None:
        field = "refusal"  # in answers of OpenAI's models
    turn = Turn(role, name or role, _parts(message.get(field), f"{where}.{field}"))
    if role == "assistant":
        return _assistant(turn, message, where, ids)
    if role == "tool":
        id = message.get("tool_call_id")
        if not isinstance(id, str) or not id:
            raise _wrong(f"{where}.tool_call_id", "must be the id of the tool call that this message answers")
        answers = ids.answer(id)
        if answers is None:
            raise _wrong(f"{where}.tool_call_id", f"{show(id)} is not the id of a tool call in an earlier message")
        return replace(turn, answers=answers)
    return turn


def _assistant(turn: Turn, message: Mapping[str, Any], where: str, ids: _Ids) -> Turn:
    # Two spellings are in use; templates that know both prefer the shorter.
    field = "reasoning" if message.get("reasoning") is not None else "reasoning_content"
    reasoning = message.get(field)
    if not isinstance(reasoning, str | None):
        raise _wrong(f"{where}.{field}", "must be a string")
    sent = message.get("tool_calls")
    if not isinstance(sent, list | None):
        raise _wrong(f"{where}.tool_calls", "must be a list")
    ids.new_turn(_sent_ids([message]))
    if message.get("content") is None and message.get("refusal") is None and not sent and reasoning is None:
        raise _wrong(f"{where}.content", "is null, and there are neither tool_calls nor reasoning_content instead")
    calls = tuple(_call(call, f"{where}.tool_calls[{i}]", ids) for i, call in enumerate(sent or ()))
    return replace(turn, reasoning=reasoning or "", calls=calls)


def _call(call: Any, where: str, ids: _Ids) -> Call:
    if not isinstance(call, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    if call.get("type", "function") != "function":
        raise _wrong(f"{where}.type", "must be 'function'")
    id, function = call.get("id"), call.get("function")
    if not isinstance(id, str) or not id:
        raise _wrong(f"{where}.id", "must be a string that is not empty")
    if not isinstance(function, Mapping):
        raise _wrong(f"{where}.function", "must be an object")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.function.name", "must be a string that is not empty")
    if isinstance(arguments, Mapping):
        check_depth(arguments, f"{where}.function.arguments")
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except TypeError as e:
            raise _wrong(f"{where}.function.arguments", f"must be JSON data: {e}") from e
    elif arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        raise _wrong(f"{where}.function.arguments", "must be a string of JSON or an object")
    return Call(ids.call(id, name), arguments)


def _parts(content: Any, where: str) -> tuple[str | Image | Video, ...]:
    """The parts of a message's content; consecutive texts are joined."""
    if content is None:  # only allowed for an assistant message
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise _wrong(where, "must be a string or a list of parts")
    parts = list[str | Image | Video]()
    for i, part in enumerate(content):
        if isinstance(part, Image | Video):
            parts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise _wrong(f"{where}[{i}]", "must be an object, such as {'type': 'text', 'text': ...}")
        if (kind := part.get("type")) not in ("text", "refusal"):  # refusal: in answers of OpenAI's models
            raise _wrong(f"{where}[{i}].type", f"must be 'text', not {show(kind)}")
        if not isinstance(part.get(kind), str):
            raise _wrong(f"{where}[{i}].{kind}", "must be a string")
        parts.append(part[kind])
    made = list[str | Image | Video]()
    for is_text, group in itertools.groupby(parts, key=lambda part: isinstance(part, str)):
        neighbours = list(group)
        made += ["".join(part for part in neighbours if isinstance(part, str))] if is_text else neighbours
    return tuple(made)


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param=where)
