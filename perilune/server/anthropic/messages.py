"""The Anthropic Messages API: POST /v1/messages, whole or streamed, and POST /v1/messages/count_tokens.

A request is translated to a chat completion; what differs is the form of an answer (blocks and their events) and the
shape of errors.
"""

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.anthropic.protocol import FIELDS, CountBody, MessagesBody
from perilune.server.conversation import spelled
from perilune.server.errors import GenerationError
from perilune.server.openai.protocol import ChatBody, json_response
from perilune.server.service import Service
from perilune.server.sse import EventStream, named_event, race
from perilune.server.turn import Turn, begin, prompt_tokens
from perilune.text.chat import ChatTemplate
from perilune.text.stream import Content, Event, Reasoning, ToolStart

PING = {"type": "ping"}
VERSION = "anthropic-version"  # the header that every client of this API sends
# The SDK's tool runner adds the field `thread` by itself; on this error code it sends the whole conversation instead.
NO_THREADS = {"error_code": "thread_unsupported_request"}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Blocks:
    """The content blocks of a message while it is generated, and the stream's events for them."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last block is still being generated
        self._text: list[str] = []  # pieces of the last block's text or input
        self._calls: dict[int, dict[str, Any]] = {}  # tool_use blocks by the call's index in the turn
        self._inputs: dict[int, str] = {}  # by index in `blocks`: the JSON text that the model wrote as a call's input

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, ToolStart):
            yield from self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            self._calls[event.index] = self.blocks[-1]
        elif isinstance(event, Reasoning):
            if not self._growing("thinking"):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._grow({"type": "thinking_delta", "thinking": event.text}, event.text)
        elif isinstance(event, Content):
            if not self._growing("text"):
                yield from self._begin({"type": "text", "text": ""})
            yield self._grow({"type": "text_delta", "text": event.text}, event.text)
        else:
            yield self._grow({"type": "input_json_delta", "partial_json": event.text}, event.text)

    def finish(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        at, block, text = len(self.blocks) - 1, self.blocks[-1], "".join(self._text)
        self._open, self._text = False, []
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if block["type"] == "tool_use":
            self._inputs[at] = text
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": at}

    def content(self, turn: Turn) -> list[dict[str, Any]]:
        """The blocks of a message that is sent whole, without calls that the model or the token limit left
        incomplete."""
        unfinished = [self._calls[i] for i in turn.stream.incomplete]
        content = []
        for at, block in enumerate(self.blocks):
            if any(block is u for u in unfinished):
                continue
            if block["type"] == "tool_use":
                arguments = _object(self._inputs[at])
                if arguments is None:
                    if turn.finish_reason == "length" and at == len(self.blocks) - 1:
                        continue
                    raise GenerationError(f"the arguments the model gave {block['name']!r} are not a JSON object")
                block = {**block, "input": arguments}
            content.append(block)
        return content

    def _growing(self, kind: str) -> bool:
        return self._open and self.blocks[-1]["type"] == kind

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.finish()
        self.blocks.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block}

    def _grow(self, delta: Mapping[str, Any], text: str) -> dict[str, Any]:
        self._text.append(text)
        return self._delta(delta)

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _object(text: str) -> msgspec.Raw | None:
    """A call's input as the model wrote it: decoded and encoded again, 1e400 would be null."""
    try:
        value = json.loads(text := text or "{}", parse_constant=int)  # which takes no NaN
    except (ValueError, RecursionError):
        return None
    return msgspec.Raw(text.encode()) if isinstance(value, dict) else None


class Answer:
    """The answer to one request: turns the events of its Turn into the Messages API's form."""

    def __init__(self, model: str, turn: Turn) -> None:
        self.turn = turn
        self.blocks = Blocks()
        self.head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        # The cached part of the prompt is known only with the first token: the last event has the final usage.
        start = {"input_tokens": len(self.turn.generation.prompt), "output_tokens": 0}
        unknown = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self.head, "content": [], **end, "usage": start | unknown}}
        yield PING
        async with contextlib.aclosing(self._block_events()) as events:
            async for event in events:
                yield event
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(self._block_events()) as events:
            async for _ in events:
                pass
        return {**self.head, "content": self.blocks.content(self.turn), **self._end(), "usage": self._usage()}

    async def _block_events(self) -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(self.turn.events()) as stream:
            async for events, _ in stream:
                for e in events:
                    for event in self.blocks.take(e):
                        yield event
        for event in self.blocks.finish():
            yield event

    def _end(self) -> dict[str, Any]:
        reason, matched = self.turn.finish_reason, self.turn.stream.matched
        if matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        spelled = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")
        return {"stop_reason": spelled, "stop_sequence": None, **self.turn.generation.marks}

    def _usage(self) -> dict[str, Any]:
        usage = self.turn.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }


async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    body, size = await service.receive(request, MessagesBody)
    chat = await service.offload(size, lambda: _chat(body, service.text.template))
    with contextlib.ExitStack() as held:
        with spelled(FIELDS):
            chat.check_supported()
            if chat.tool_choice == "required" and not chat.tools:  # chat's error would say 'required'
                raise RequestError("tool_choice 'any' needs tools", param="tool_choice")
            turns = await begin(service, request, size, chat)
        held.callback(turns.release)
        answer = Answer(service.model, turns.turns[0])
        if body.stream:
            release = held.pop_all().close
            events = answer.events()
            return EventStream(events, service.stopping, release, failure=describe, encode=named_event, ping=PING)
        return json_response(await race(answer.whole(), request.receive, service.stopping))


async def count_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    body, size = await service.receive(request, CountBody)
    chat = await service.offload(size, lambda: _chat(body, service.text.template))
    with spelled(FIELDS):
        return json_response({"input_tokens": await prompt_tokens(service, request, size, chat)})


def _chat(body: CountBody, template: ChatTemplate) -> ChatBody:
    return body.chat(thinks_unasked=_thinks_unasked(template), tool_form=template.member.tools)


def _thinks_unasked(template: ChatTemplate) -> bool:
    """Whether the model always thinks: then `thinking: disabled` is refused, and a chat body must leave it out."""
    try:
        return template.thinks(False)
    except RequestError:
        return True


def model(described: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of the list of models in the form of this API."""
    created = datetime.fromtimestamp(described["created"], UTC)
    return {
        "id": described["id"],
        "type": "model",
        "display_name": described["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": described["max_model_len"],
        "max_tokens": described["max_model_len"],
    }


def model_page(found: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The list of models, all on one page; `after_id` or `before_id` in the query gives an empty page."""
    shown = [] if query.get("after_id") or query.get("before_id") else found
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


def describe(error: Exception) -> dict[str, Any]:
    """An exception as Anthropic's error object."""
    status, body = errors.describe(error)
    return error_object(status, body["error"])


def error_object(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's error object for OpenAI's `error`."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {"details": NO_THREADS} if error["param"] == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": error["message"], **details}}


class ErrorShape:
    """ASGI middleware: rewrites errors to Anthropic's shape, for /v1/messages and, if the client sent the header
    anthropic-version, for /v1/models. Errors of the middleware inside it are rewritten too, e.g. a missing API key."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_ours(scope):
            await self.app(scope, receive, send)
            return
        begun = False
        start: Message | None = None  # http.response.start of an error, held until its body comes

        async def reshape(message: Message) -> None:
            nonlocal begun, start
            begun = True
            if message["type"] == "http.response.start" and _is_error(message):
                start = message
            elif start is None:
                await send(message)
            elif message["type"] == "http.response.body":
                found = msgspec.json.decode(message["body"])["error"]  # errors.response sends one whole body
                body = msgspec.json.encode(error_object(start["status"], found))
                headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
                headers.append((b"content-length", b"%d" % len(body)))
                await send({**start, "headers": headers})
                await send({**message, "body": body})
                start = None

        try:
            await self.app(scope, receive, reshape)
        except Exception as error:
            if not begun:
                await errors.response(error)(scope, receive, reshape)
            raise  # connection.py logs it with its traceback


def _is_ours(scope: Scope) -> bool:
    path = f"{scope['path']}/"
    if path.startswith("/v1/models/"):
        return any(name == VERSION.encode() for name, _ in scope["headers"])
    return path.startswith("/v1/messages/")


def _is_error(start: Message) -> bool:
    return start["status"] >= 400 and (b"content-type", b"application/json") in start["headers"]
