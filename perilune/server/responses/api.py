"""The OpenAI Responses API: POST /v1/responses (whole, streamed or in the background), requests about a response by its
id (GET, DELETE, cancel, input_items), and input_tokens, which only counts the tokens of a prompt.

A request is translated to a chat completion; what differs is the form of an answer (items and their events) and that
finished responses are kept, so that the next request may continue one by its id.
"""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.call import current, entered
from perilune.server.conversation import Conversation, spelled
from perilune.server.openai.protocol import ChatBody, json_response
from perilune.server.responses import custom, items
from perilune.server.responses.background import Job, Jobs
from perilune.server.responses.custom import Unwrapped
from perilune.server.responses.protocol import FIELDS, InputBody, InputTokensBody, ResponsesBody
from perilune.server.responses.store import ResponseStore, decoded, encoded, found, ids_of
from perilune.server.service import Service
from perilune.server.sse import EventStream, named_event, race
from perilune.server.turn import Turn, begin, prompt_tokens
from perilune.text.stream import Content, Event, Reasoning, ToolStart
from perilune.text.tools import Form

_REASONING, _MESSAGE = "reasoning", "message"
_PARTS = {_REASONING: "reasoning_text", _MESSAGE: "output_text"}
_CUSTOM = "custom_tool_call"
_PREFIXES = {_REASONING: "rs", _MESSAGE: "msg", "function_call": "fc", _CUSTOM: "ctc"}


class Output:
    """The output items of a response as they grow, and the events that report it.

    Events lack their sequence number. An item is complete when the next one begins or the answer ends.
    """

    def __init__(self, custom_tools: Mapping[str, bool] | None = None) -> None:
        """`custom_tools`: by name, whether a call's arguments are the input itself, not JSON (custom.py)."""
        self.items: list[dict[str, Any]] = []
        self._custom_tools = custom_tools or {}
        self._unwrapped: Unwrapped | None = None  # of the open call of a custom tool with free text
        self._open = False  # whether the last item is still being generated
        self._text: list[str] = []  # its text or arguments
        self._calls: dict[int, dict[str, Any]] = {}  # items of calls, by the call's index in the turn

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, ToolStart) and (raw := self._custom_tools.get(event.name)) is not None:
            yield from self._begin(_CUSTOM, call_id=event.id, name=event.name, input="")
            self._calls[event.index], self._unwrapped = self.items[-1], None if raw else Unwrapped()
        elif isinstance(event, ToolStart):
            yield from self._begin("function_call", call_id=event.id, name=event.name, arguments="")
            self._calls[event.index] = self.items[-1]
        elif isinstance(event, Reasoning | Content):
            kind = _REASONING if isinstance(event, Reasoning) else _MESSAGE
            if not self._open or self.items[-1]["type"] != kind:
                yield from self._begin_text(kind)
            yield self._grow(f"response.{_PARTS[kind]}", event.text)
        elif self.items[-1]["type"] == _CUSTOM:
            text = event.text if self._unwrapped is None else self._unwrapped.feed(event.text)
            if text:
                yield self._grow("response.custom_tool_call_input", text)
        else:
            yield self._grow("response.function_call_arguments", event.text)

    def finish(self, turn: Turn) -> Iterator[dict[str, Any]]:
        """Ends the last item, which is incomplete if the token limit cut it off. Calls left incomplete are dropped."""
        cut = turn.finish_reason == "length"
        if not cut and not any(item["type"] != _REASONING for item in self.items):
            yield from self._begin_text(_MESSAGE)  # an answer has at least one message, if only an empty one
        yield from self._end("incomplete" if cut else "completed")
        unfinished = [self._calls[i] for i in turn.stream.incomplete]
        self.items = [item for item in self.items if not any(item is u for u in unfinished)]

    def cut(self) -> None:
        """Ends the last item of an answer that was cancelled or failed."""
        for _ in self._end("incomplete"):
            pass

    def complete(self) -> list[dict[str, Any]]:
        """The items that have ended."""
        return [item for item in self.items if item["status"] != "in_progress"]

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
        elif kind == _CUSTOM:
            item["input"] = text
            yield {"type": "response.custom_tool_call_input.done", **where, "input": text}
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


@dataclass(frozen=True, slots=True)
class Read:
    """What a request says, read once. `sent`: the messages it adds to the conversation it continues, of which `last` is
    the last. `items`: its input as the store keeps it, with the `ids` of the items. `forms`: grammars of custom tools
    by name."""

    chat: ChatBody
    sent: Sequence[msgspec.Raw]
    last: Mapping[str, Any]
    items: Sequence[msgspec.Raw]
    ids: Sequence[str]
    forms: Mapping[str, Form]


class Answer:
    """One response from its request to the store."""

    def __init__(
        self,
        model: str,
        store: ResponseStore,
        body: ResponsesBody,
        turn: Turn,
        *,
        read: Read,
    ) -> None:
        self.store = store
        self.owner = current().account.name
        self.body = body
        self.turn = turn
        self.read = read
        self.begun = False
        named = {tool["name"] for tool in body.tools or () if tool.get("type") == "custom"}
        self.custom_tools = {name: name in read.forms for name in named}
        self.output = Output(self.custom_tools)
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
        """The event that ends a stream after an error."""
        about = {"code": "server_error", "message": errors.describe(error)[1]["error"]["message"]}
        self.output.cut()
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
            conversation = Conversation([self.read.last])
            if self.read.last["role"] == "assistant":  # the beginning of this answer
                conversation.resume()
            for item in self.output.items:
                if item["type"] == "function_call":
                    conversation.call(item["call_id"], item["name"], item["arguments"])
                elif item["type"] == _CUSTOM:
                    text = custom.arguments(item["input"], raw=self.custom_tools[item["name"]])
                    conversation.call(item["call_id"], item["name"], text)
                else:
                    say = conversation.think if item["type"] == _REASONING else conversation.answer
                    say(item["content"][0]["text"])
            self._keep(response, [*self.read.sent[:-1], *conversation.messages])
        return response

    def state(self) -> dict[str, Any]:
        """The response so far, for clients that poll it."""
        status = "in_progress" if self.begun else "queued"
        return self.response(status, output=self.output.complete())

    def end(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Ends a cancelled or failed response; it is stored with the items that it has."""
        self.output.cut()
        about = None if error is None else {"code": "server_error", "message": error}
        response = self.response(status, error=about, usage=self._usage())
        self._keep(response, None)
        return response

    def _keep(self, response: dict[str, Any], added: Sequence[Mapping[str, Any] | msgspec.Raw] | None) -> None:
        body, read = self.body, self.read
        self.store.put(self.owner, self.head["id"], response, added, body.previous_response_id, read.items, read.ids)

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        body, params = self.body, self.turn.generation.params
        return {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "background": bool(body.background),
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
                self.begun = True
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
    jobs: Jobs = request.app.state.jobs
    body, size = await service.receive(request, ResponsesBody)
    stored = _before(body.previous_response_id, store, jobs)
    size += sum(len(turn) for turn in stored)
    size += await _resolve(service, store, body, size)

    def translate() -> Read:
        chat, added = body.chat(decoded(stored))
        kept = items.as_items(body.input) if body.store is not False else ()
        return Read(chat, encoded(added), added[-1], kept, ids_of(kept), body.forms())

    read = await service.offload(size, translate)
    call = current().apart("/v1/responses") if body.background else current()
    with contextlib.ExitStack() as held:
        with spelled(FIELDS), entered(call):
            read.chat.check_supported()
            turns = await begin(service, request, size, read.chat, read.forms)
        held.callback(turns.release)
        answer = Answer(service.model, store, body, turns.turns[0], read=read)
        if body.background:
            job = jobs.start(answer, call, held.pop_all().close, keeps_events=bool(body.stream))
            return _followed(service, job, -1) if body.stream else json_response(answer.state())
        if body.stream:
            release = held.pop_all().close
            events = answer.events()
            return EventStream(events, service.stopping, release, failure=answer.failed, encode=named_event)
        return json_response(await race(answer.whole(), request.receive, service.stopping))


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how many tokens the prompt of such a request has."""
    service: Service = request.app.state.service
    body, size = await service.receive(request, InputTokensBody)
    store: ResponseStore = request.app.state.responses
    stored = _before(body.previous_response_id, store, request.app.state.jobs)
    size += sum(len(turn) for turn in stored)
    size += await _resolve(service, store, body, size)
    chat = await service.offload(size, lambda: body.chat(decoded(stored))[0])
    with spelled(FIELDS):
        chat.check_supported()
        tokens = await prompt_tokens(service, request, size, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})


def _before(previous: str | None, store: ResponseStore, jobs: Jobs) -> list[bytes]:
    """The stored conversation that a request continues. RequestError if there is none, or it is still being made."""
    if previous is None:
        return []
    owner = current().account.name
    if jobs.running(owner, previous) is not None:
        raise RequestError(
            f"response {previous!r} is still being made: wait until it is completed",
            param="previous_response_id",
            code="response_not_complete",
        )
    return store.conversation(owner, previous)


async def _resolve(service: Service, store: ResponseStore, body: InputBody, size: int) -> int:
    """Replaces references to stored items in the input by these items. Returns the bytes of what was decoded."""
    places = await service.offload(size, body.references)
    if not places:
        return 0
    holders = store.holding(current().account.name, places)
    more = sum(entry.size for entry in holders)
    await service.offload(size + more, lambda: body.resolve(found(holders, places)))
    return more


def _followed(service: Service, job: Job, after: int) -> Response:
    """A stream of a job's events; the job goes on when the client leaves."""

    def failure(error: Exception) -> bytes:
        return named_event({"type": "error", **errors.describe(error)[1]["error"], "sequence_number": after + 1})

    return EventStream(job.follow(after), service.stopping, lambda: None, failure=failure, encode=bytes)


async def response_by_id(request: Request) -> Response:
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    jobs: Jobs = request.app.state.jobs
    id, owner = request.path_params["id"], current().account.name
    if request.method == "DELETE":
        if (job := jobs.running(owner, id)) is not None:
            await jobs.cancel(job)
        store.delete(owner, id)
        jobs.forget(owner, id)
        return json_response({"id": id, "object": "response", "deleted": True})
    after = items.whole_number(request.query_params, "starting_after", -1, -1, 2**53)
    if items.flag(request.query_params, "stream"):
        job = jobs.find(owner, id)
        if job is None:
            store.get(owner, id)  # 404 if there is none
        if job is None or not job.keeps_events:
            raise RequestError(
                "the events of this response are not kept: send background and stream true when it is made, or get it "
                "whole",
                param="stream",
                code="events_gone",
            )
        job.check(after)
        return _followed(service, job, after)
    if (job := jobs.running(owner, id)) is not None:
        return json_response(job.answer.state())
    return Response(store.get(owner, id), media_type="application/json")


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: ends a response that is made in the background."""
    store: ResponseStore = request.app.state.responses
    jobs: Jobs = request.app.state.jobs
    id, owner = request.path_params["id"], current().account.name
    if (job := jobs.running(owner, id)) is not None:
        await jobs.cancel(job)
    response = store.get(owner, id)
    if not msgspec.json.decode(response)["background"]:
        raise RequestError(
            "only a response made with background: true can be cancelled: close the connection of another",
            param="response_id",
            code="not_in_background",
        )
    return Response(response, media_type="application/json")


async def input_items(request: Request) -> Response:
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    jobs: Jobs = request.app.state.jobs
    id, owner = request.path_params["id"], current().account.name
    if (job := jobs.running(owner, id)) is not None:
        found = msgspec.json.encode(job.answer.read.items)
    else:
        found = store.items(owner, id)
    return json_response(await service.offload(len(found), lambda: items.page(found, request.query_params)))
