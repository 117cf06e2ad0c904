"""Messages to prompt. Control tokens are pieces of their own; everything a client wrote is plain text between them.

The grammar of a turn is the same in the whole family; `ChatTemplate` is K2.5's form, which is also K2.6's (there the
model knows `preserve_thinking`). Another member overrides the small methods that name what differs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from perilune.core.errors import CheckpointError, RequestError
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import Declared, Tool, check_depth, declaration, parse_tools, show

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_NATIVE_ID = re.compile(r"functions\.[\w.-]+:\d+")
_LEADING_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>(.*)|\Z)", re.DOTALL)
_MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "input_video")


@dataclass(frozen=True, slots=True)
class Special:
    """A control token, by name."""

    name: str


Piece = Special | str


@dataclass(frozen=True, slots=True)
class _Call:
    id: str
    arguments: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """A validated message: no nulls, text joined, thoughts apart from content, tool ids native."""

    role: str
    name: str
    content: str
    reasoning: str = ""
    calls: tuple[_Call, ...] = ()
    answers: str = ""  # the tool call this tool message answers


class PromptOptions(TypedDict, total=False):
    """Keyword arguments of every rendering method, with their defaults."""

    tools: Declared  # None: none
    thinking: bool  # True: the prompt ends in an open <think>; False: in an empty thought (instant mode)
    preserve_thinking: bool  # False: reasoning is kept only in the tool loop in progress; True (K2.6): everywhere
    add_generation_prompt: bool  # True: the prompt ends where the assistant's answer begins


class ChatTemplate:
    """Kimi K2.5 and K2.6. Methods take OpenAI chat messages and PromptOptions.

    They raise RequestError naming the message and the field that cannot be used.
    """

    def thinks(self, requested: bool | None) -> bool:
        """Whether the model will think, and the prompt ends in an open thought; None: the request does not say."""
        return requested is not False

    def sampling_defaults(self, *, thinking: bool) -> tuple[float, float]:
        """(temperature, top_p) that the vendor recommends."""
        return (1.0, 0.95) if thinking else (0.6, 0.95)

    def pieces(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[PromptOptions]) -> list[Piece]:
        """The prompt as control tokens and plain text; no two texts are neighbours."""
        tools, thinking = parse_tools(options.get("tools")), options.get("thinking", True)
        turns = _normalise(messages)
        finished = -1 if options.get("preserve_thinking", False) else _last_final_answer(turns)
        out: list[Piece] = []
        if tools:
            out += _message("system", "tool_declare", [self._declaration(tools)])
        for i, turn in enumerate(turns):
            body: list[Piece] = [turn.content]
            if turn.role == "assistant":
                body = [*self._thought(turn, keep=thinking and i > finished), *body, *_calls(turn)]
            elif turn.role == "tool":
                body = [f"## Return of {turn.answers}\n", *body]
            out += _message(turn.role, turn.name, body)
        if options.get("add_generation_prompt", True):
            out += [Special("<|im_assistant|>"), "assistant", Special("<|im_middle|>"), *self._opening(thinking)]
        return _joined(out)

    def render_text(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[PromptOptions]) -> str:
        """The prompt as one string, for display and tests: it cannot tell a control token from its name in a text."""
        return "".join(p.name if isinstance(p, Special) else p for p in self.pieces(messages, **options))

    def render_ids(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Unpack[PromptOptions]
    ) -> list[int]:
        """The prompt as token ids."""
        ids: list[int] = []
        for p in self.pieces(messages, **options):
            ids += [tokenizer.special(p.name)] if isinstance(p, Special) else tokenizer.encode(p)
        return ids

    def _declaration(self, tools: Sequence[Tool]) -> str:
        return declaration(tools)

    def _thought(self, turn: _Turn, *, keep: bool) -> list[Piece]:
        return [Special("<think>"), turn.reasoning if keep else "", Special("</think>")]

    def _opening(self, thinking: bool) -> list[Piece]:
        return [Special("<think>")] if thinking else [Special("<think>"), Special("</think>")]


class NoChatTemplate(ChatTemplate):
    """For checkpoints that can be served, but not chatted with: says so at the first chat."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def pieces(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[PromptOptions]) -> list[Piece]:
        raise CheckpointError(self._reason)


def template_for(model_dir: Path) -> ChatTemplate:
    """The chat template of a model directory, by `model_type` of its config.json.

    CheckpointError if that file cannot be read. For a type without chat the template itself raises when used.
    """
    path = model_dir / "config.json"
    try:
        kind = json.loads(path.read_bytes())["model_type"]
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}; MODEL must be a complete model directory") from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CheckpointError(f"{path} is not a model's config: no readable 'model_type'") from e
    if kind == "kimi_k25":
        return ChatTemplate()
    return NoChatTemplate(
        f"chat is not supported for model_type {kind!r} of {model_dir} (only kimi_k25): use plain completions"
    )


def next_tool_index(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of tool calls in the history: the counter of the next call's id. Takes messages as sent."""
    return sum(len(turn.calls) for turn in _normalise(messages))


def _last_final_answer(turns: Sequence[_Turn]) -> int:
    """Index of the last assistant turn without tool calls, -1 if none: up to there, reasoning is dropped."""
    return max((i for i, t in enumerate(turns) if t.role == "assistant" and not t.calls), default=-1)


def _message(role: str, name: str, body: Sequence[Piece]) -> list[Piece]:
    token = _ROLE_TOKENS.get(role, "<|im_system|>")
    return [Special(token), name, Special("<|im_middle|>"), *body, Special("<|im_end|>")]


def _calls(turn: _Turn) -> list[Piece]:
    if not turn.calls:
        return []
    out: list[Piece] = [Special("<|tool_calls_section_begin|>")]
    for call in turn.calls:
        out += [Special("<|tool_call_begin|>"), call.id, Special("<|tool_call_argument_begin|>"), call.arguments]
        out += [Special("<|tool_call_end|>")]
    return [*out, Special("<|tool_calls_section_end|>")]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for p in pieces:
        if isinstance(p, str) and out and isinstance(out[-1], str):
            out[-1] += p
        elif p != "":
            out.append(p)
    return out


# --- messages as clients send them -> turns ------------------------------------------------------------------------


class _Ids:
    """Gives every tool call of a conversation an id of the form the model was trained on.

    Native ids stay. Others become functions.NAME:K, K counting the conversation's calls, and so do the tool messages
    that answer them. A client may reuse an id in a later turn, or within one: answers are then matched in order.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        self._count = 0
        self._taken = {id for id in _sent_ids(messages) if _NATIVE_ID.fullmatch(id)}
        self._renamed: dict[str, list[str]] = {}

    def new_turn(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._renamed.pop(id, None)

    def call(self, id: str, name: str) -> str:
        number, self._count = self._count, self._count + 1
        if _NATIVE_ID.fullmatch(id):
            return id
        while (native := f"functions.{name}:{number}") in self._taken:
            number += 1
        self._taken.add(native)
        self._renamed.setdefault(id, []).append(native)
        return native

    def answer(self, id: str) -> str | None:
        """The id of the call that a tool message answers; None if there was no such call."""
        if _NATIVE_ID.fullmatch(id):
            return id
        waiting = self._renamed.get(id)
        if not waiting:
            return None
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]


def _sent_ids(messages: Sequence[Any]) -> list[str]:
    calls = [m.get("tool_calls") for m in messages if isinstance(m, Mapping)]
    ids = [c.get("id") for group in calls if isinstance(group, list) for c in group if isinstance(c, Mapping)]
    return [id for id in ids if isinstance(id, str)]


def _normalise(messages: Any) -> list[_Turn]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    ids = _Ids(messages)
    return [_turn(message, f"messages[{i}]", ids) for i, message in enumerate(messages)]


def _turn(message: Any, where: str, ids: _Ids) -> _Turn:
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
    if role != "assistant" and "content" not in message:
        raise _wrong(f"{where}.content", "is missing")
    turn = _Turn(role, name or role, _content(message.get("content"), f"{where}.content"))
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


def _assistant(turn: _Turn, message: Mapping[str, Any], where: str, ids: _Ids) -> _Turn:
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise _wrong(f"{where}.reasoning_content", "must be a string")
    content = turn.content
    if thought := _LEADING_THOUGHT.match(content):
        # A client that keeps the raw text: the template would write a second thought in front of this one.
        reasoning, content = reasoning or thought[1], thought[2] or ""
    sent = message.get("tool_calls")
    if not isinstance(sent, list | None):
        raise _wrong(f"{where}.tool_calls", "must be a list")
    ids.new_turn(_sent_ids([message]))
    calls = tuple(_call(call, f"{where}.tool_calls[{i}]", ids) for i, call in enumerate(sent or ()))
    return replace(turn, content=content, reasoning=reasoning or "", calls=calls)


def _call(call: Any, where: str, ids: _Ids) -> _Call:
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
    return _Call(ids.call(id, name), arguments)


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "must be a string, a list of parts or null")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _MEDIA_PARTS:
            raise RequestError(
                f"{where}[{i}]: images and video are not supported yet, send text only", param="messages"
            )
        if kind != "text":
            raise _wrong(f"{where}[{i}].type", f"must be 'text', not {show(kind)}")
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{i}].text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param=where)
