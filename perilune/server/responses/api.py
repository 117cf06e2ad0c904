"""The OpenAI Responses API: POST /v1/responses, whole or streamed, and GET and DELETE /v1/responses/{id}.

A request is translated to a chat completion; what differs is the form of an answer (items and their events) and that
finished responses are kept, so that the next request may continue one by its id.
"""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.call import current
from perilune.server.conversation import Conversation, spelled
from perilune.server.openai.protocol import ChatBody, json_response
from perilune.server.responses.protocol import FIELDS, ResponsesBody
from perilune.server.responses.store import ResponseStore, decoded, encoded
from perilune.server.service import Service
from perilune.server.sse import CLIENT_GONE, ClientGone, EventStream, named_event, race
from perilune.server.turn import Turn, begin
from perilune.text.stream import Content, Event, Reasoning, ToolStart

_REASONING, _MESSAGE = "reasoning", "message"
_PARTS = {_REASONING: "reasoning_text", _MESSAGE: "output_text"}
_PREFIXES = {_REASONING: "rs", _MESSAGE: "msg", "function_call": "fc"}


class Output:
    """The output items of a response as they grow, and the events that tell of it.

    Events lack their sequence number. An item is complete when the next one begins or the answer ends.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows
        self._text: list[str] = []  # its text or arguments
        self._calls: dict[int, dict[str, Any]] = {}

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, ToolStart):
            yield from self._begin("function_call", call_id=event.id, name=event.name, arguments="")
            self._calls[event.index] = self.items[-1]
        elif isinstance(event, Reasoning | Content):
            kind = _REASONING if isinstance(event, Reasoning) else _MESSAGE
            if not self._open or self.items[-1]["type"] != kind:
                yield from self._begin_text(kind)
            yield self._grow(f"response.{_PARTS[kind]}", event.text)
        else:
            yield self._grow("response.function_call_arguments", event.text)

    def finish(self, turn: Turn) -> Iterator[dict[str, Any]]:
        """Ends the last item, which is incomplete if the token limit cut it off. Calls left incomplete are dropped."""
        cut = turn.finish_reason == "length"
        if not cut and not any(item["type"] != _REASONING for item in self.items):
            yield from self._begin_text(_MESSAGE)  # the model had nothing to say, which is an answer too
        yield from self._end("incomplete" if cut else "completed")
        unfinished = [self._calls[i] for i in turn.stream.incomplete]
        self.items = [item for item in self.items if not any(item is u for u in unfinished)]

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        yield from self._end("completed")
        item = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}

    def _begin_text(self, kind: str) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {"summary": []} if kind == _REASONING else {"role": "assistant"}
        yield from self._begin(kind, **more, content=[])
        yield {"type": "response.content_part.added", **self._where(), "content_index": 0, "part": _part(kind, "")}

    def _grow(self, name: str, text: str) -> dict[str, Any]:
        self._text.append(text)
        event = {"type": f"{name}.delta", **self._where(), "delta": text}
        if (kind := self.items[-1]["type"]) in _PARTS:
            event["content_index"] = 0
        return event | {"logprobs": []} if kind == _MESSAGE else event

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        item, text, self._text, self._open = self.items[-1], "".join(self._text), [], False
        where, kind = self._where(), item["type"]
        if kind == "function_call":
            item["arguments"] = text
            yield {"type": "response.function_call_arguments.done", **where, "name": item["name"], "arguments": text}
        else:
            where["content_index"] = 0
            part = _part(kind, text)
            more: dict[str, Any] = {"logprobs": []} if kind == _MESSAGE else {}
            yield {"type": f"response.{_PARTS[kind]}.done", **where, "text": text, **more}
            yield {"type": "response.content_part.done", **where, "part": part}
            item["content"] = [part]
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == _MESSAGE else part


class Answer:
    """One response from its request to the store."""

    def __init__(
        self,
        model: str,
        store: ResponseStore,
        body: ResponsesBody,
        turn: Turn,
        *,
        sent: Sequence[msgspec.Raw],
        last: Mapping[str, Any],
    ) -> None:
        """`sent`: the messages that the request adds to the conversation it continues, of which `last` is the last."""
        self.store = store
        self.owner = current().account.name
        self.body = body
        self.turn = turn
        self.sent = sent
        self.last = last
        self.output = Output()
        self.head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._sequence = 0

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        yield self._numbered({"type": "response.created", "response": self.response("in_progress")})
        yield self._numbered({"type": "response.in_progress", "response": self.response("in_progress")})
        async with contextlib.aclosing(self._output_events()) as events:
            async for event in events:
                yield self._numbered(event)
        response = self.finished()
        yield self._numbered({"type": f"response.{response['status']}", "response": response})

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(self._output_events()) as events:
            async for _ in events:
                pass
        return self.finished()

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event that ends a stream which cannot go on."""
        about = {"code": "server_error", "message": errors.describe(error)[1]["error"]["message"]}
        return self._numbered({"type": "response.failed", "response": self.response("failed", error=about)})

    def finished(self) -> dict[str, Any]:
        """The final response; it is stored unless the request said otherwise."""
        cut = self.turn.finish_reason == "length"
        response = self.response(
            "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens", **self.turn.generation.marks} if cut else None,
            completed_at=None if cut else int(time.time()),
            usage=self._usage(),
        )
        if self.body.store is not False:
            conversation = Conversation([self.last])
            if self.last["role"] == "assistant":  # the beginning of this answer
                conversation.resume()
            for item in self.output.items:
                if item["type"] == "function_call":
                    conversation.call(item["call_id"], item["name"], item["arguments"])
                else:
                    say = conversation.think if item["type"] == _REASONING else conversation.answer
                    say(item["content"][0]["text"])
            added: list[Mapping[str, Any] | msgspec.Raw] = [*self.sent[:-1], *conversation.messages]
            self.store.put(self.owner, self.head["id"], response, added, self.body.previous_response_id)
        return response

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        body, params = self.body, self.turn.generation.params
        return {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "output": self.output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **more,
        }

    async def _output_events(self) -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(self.turn.events()) as stream:
            async for events, _ in stream:
                for e in events:
                    for event in self.output.take(e):
                        yield event
        for event in self.output.finish(self.turn):
            yield event

    def _usage(self) -> dict[str, Any]:
        usage = self.turn.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                **usage["prompt_tokens_details"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return event


async def create_response(request: Request) -> Response:
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    body, size = await service.receive(request, ResponsesBody)
    body.check_supported()
    owner = current().account.name
    stored = [] if body.previous_response_id is None else store.conversation(owner, body.previous_response_id)
    size += sum(len(turn) for turn in stored)

    def translate() -> tuple[ChatBody, list[msgspec.Raw], Mapping[str, Any]]:
        chat, added = body.chat(decoded(stored))
        return chat, encoded(added), added[-1]

    chat, sent, last = await service.offload(size, translate)
    with contextlib.ExitStack() as held:
        with spelled(FIELDS):
            chat.check_supported()
            turns = await begin(service, request, size, chat)
        held.callback(turns.release)
        answer = Answer(service.model, store, body, turns.turns[0], sent=sent, last=last)
        if body.stream:
            release = held.pop_all().close
            events = answer.events()
            return EventStream(events, service.stopping, release, failure=answer.failed, encode=named_event)
        try:
            return json_response(await race(answer.whole(), request.receive, service.stopping))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)


async def response_by_id(request: Request) -> Response:
    """GET and DELETE."""
    store: ResponseStore = request.app.state.responses
    id, owner = request.path_params["id"], current().account.name
    if request.method == "DELETE":
        store.delete(owner, id)
        return json_response({"id": id, "object": "response", "deleted": True})
    if request.query_params.get("stream", "false").lower() == "true":
        raise RequestError("a stored response cannot be streamed again: get it whole", param="stream")
    return Response(store.get(owner, id), media_type="application/json")
