"""POST /v1/chat/completions: an assistant turn, whole or streamed, with reasoning and tool calls set apart."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.plan import TokenLogprob
from perilune.server.protocol import ChatBody, chat_logprob, json_response, parse, usage
from perilune.server.service import Generation, Service
from perilune.server.sse import CLIENT_GONE, ClientGone, EventStream, event, race
from perilune.text.chat import next_tool_index
from perilune.text.stream import ChatStream, Content, Event, Reasoning, ToolStart
from perilune.text.tools import Tool, parse_tools


class Turn:
    """An assistant turn as it is generated: tokens in, events of the turn out, with what its answer reports."""

    def __init__(self, generation: Generation, stream: ChatStream, *, reasoning: bool, ends: frozenset[int]) -> None:
        """`reasoning`: it begins inside a thought, which the first of the ids `ends` closes."""
        self.generation = generation
        self.stream = stream
        self.reasoning_tokens = 0
        self._reasoning = reasoning
        self._ends = ends

    async def events(self) -> AsyncGenerator[tuple[list[Event], list[TokenLogprob]], None]:
        """Per delta of the engine: what it adds to the turn, and the log-probabilities of the tokens it came from."""
        async with contextlib.aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                events = self.stream.feed(delta.tokens)
                kept = self.stream.kept
                if self._reasoning:
                    self._count_reasoning([delta.tokens[i] for i in kept])
                if self.stream.stopped:
                    self.generation.finish_reason = "stop"
                logprobs = [delta.logprobs[i] for i in kept] if delta.logprobs else []
                if events or logprobs:
                    yield events, logprobs
                if self.stream.stopped:
                    break
        if events := self.stream.finish():
            yield events, []

    @property
    def finish_reason(self) -> str:
        reason = self.generation.finish_reason
        assert reason is not None, "asked before the turn ended"
        return "tool_calls" if self.stream.tool_calls and reason == "stop" else reason

    def usage(self) -> dict[str, Any]:
        g = self.generation
        return usage(len(g.prompt), g.completion_tokens, g.cached_tokens, self.reasoning_tokens)

    def _count_reasoning(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._ends:
                self._reasoning = False
                return
            self.reasoning_tokens += 1


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    raw = await request.body()
    body = parse(ChatBody, raw)
    body.check_supported()
    service.check_model(body.model)
    with contextlib.ExitStack() as held:
        held.callback(service.admit(1))
        thinking, tools = body.think(), parse_tools(body.declared_tools)
        prompt = await render(service, len(raw), body.messages, tools, thinking, body.preserve_thinking())
        wanted = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
        params = body.sampling(
            service.defaults(thinking=thinking),
            max_tokens=service.fit(prompt, wanted, "messages"),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        stream = ChatStream(
            service.tokenizer,
            thinking=thinking,
            tools=tools,
            stop=params.stop,
            first_tool_index=next_tool_index(body.messages),
            end_ids=params.stop_token_ids,
        )
        m = service.tokenizer.markers
        ends = {m.think_end, *((m.section_begin, m.call_begin) if tools else ())} - {None}
        turn = Turn(Generation(service, prompt, params), stream, reasoning=thinking, ends=frozenset(ends))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model}
        if body.stream:
            chunks = _chunks(service, turn, head, bool(body.logprobs), body.include_usage)
            return EventStream(chunks, service.stopping, held.pop_all().close)
        try:
            answer = await race(_whole(service, turn, bool(body.logprobs)), request.receive, service.stopping)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        return json_response({**head, "object": "chat.completion", **answer})


async def render(
    service: Service,
    size: int,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    thinking: bool,
    preserve_thinking: bool,
) -> list[int]:
    """Token ids of a conversation; `size` is the body's length in bytes, which decides where the work is done."""
    return await service.offload(
        size,
        lambda: service.template.render_ids(
            service.tokenizer, messages, tools=tools, thinking=thinking, preserve_thinking=preserve_thinking
        ),
    )


async def _whole(service: Service, turn: Turn, logprobs: bool) -> dict[str, Any]:
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    entries: list[TokenLogprob] = []
    async with contextlib.aclosing(turn.events()) as stream:
        async for events, new in stream:
            entries += new
            for e in events:
                if isinstance(e, Reasoning):
                    reasoning.append(e.text)
                elif isinstance(e, Content):
                    content.append(e.text)
                elif isinstance(e, ToolStart):
                    calls[e.index] = _call(e)
                else:
                    calls[e.index]["function"]["arguments"] += e.text
    for index in turn.stream.incomplete:
        del calls[index]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content) or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": [chat_logprob(service.tokenizer, e) for e in entries]} if logprobs else None,
        "finish_reason": turn.finish_reason,
    }
    return {"choices": [choice], "usage": turn.usage()}


async def _chunks(
    service: Service, turn: Turn, head: Mapping[str, Any], logprobs: bool, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    # Everything but the choice is the same in every chunk of a stream: spelled once, ahead of the loop.
    start = msgspec.json.encode({**head, "object": "chat.completion.chunk"})[:-1] + b',"choices":['
    end = b'],"usage":null}' if include_usage else b"]}"
    encoder = msgspec.json.Encoder()

    def chunk(delta: Mapping[str, Any], entries: Sequence[TokenLogprob], finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if entries:
            choice["logprobs"] = {"content": [chat_logprob(service.tokenizer, e) for e in entries]}
        return event(start + encoder.encode(choice) + end)

    yield chunk({"role": "assistant", "content": ""}, (), None)
    async with contextlib.aclosing(turn.events()) as stream:
        async for events, entries in stream:
            shown: Sequence[TokenLogprob] = entries if logprobs else ()
            for e in events:
                yield chunk(_delta(e), shown, None)
                shown = ()
            if shown:  # tokens whose text is held back (part of a character, a marker or a stop string)
                yield chunk({}, shown, None)
    yield chunk({}, (), turn.finish_reason)
    if include_usage:
        yield event(start + b'],"usage":' + encoder.encode(turn.usage()) + b"}")


def _delta(e: Event) -> dict[str, Any]:
    if isinstance(e, Content):
        return {"content": e.text}
    if isinstance(e, Reasoning):
        return {"reasoning_content": e.text}
    if isinstance(e, ToolStart):
        return {"tool_calls": [{"index": e.index, **_call(e)}]}
    return {"tool_calls": [{"index": e.index, "function": {"arguments": e.text}}]}


def _call(e: ToolStart) -> dict[str, Any]:
    return {"id": e.id, "type": "function", "function": {"name": e.name, "arguments": ""}}
