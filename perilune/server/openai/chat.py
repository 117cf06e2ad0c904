"""POST /v1/chat/completions: an assistant turn, whole or streamed, with separate reasoning and tool calls."""

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.step import TokenLogprob
from perilune.server.openai.protocol import ChatBody, chat_logprob, json_response, prompt_logprob_table
from perilune.server.service import Service
from perilune.server.sse import DONE, EventStream, error_event, event, gathered, merged, race
from perilune.server.turn import Turn, Turns, begin
from perilune.text.stream import Content, Event, Reasoning, ToolStart
from perilune.text.tokenizer import Tokenizer


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body, size = await service.receive(request, ChatBody)
    tokenizer = service.text.tokenizer
    with contextlib.ExitStack() as held:
        turns = await begin(service, request, size, body)
        held.callback(turns.release)
        head = {"id": body.response_id("chatcmpl"), "created": int(time.time()), "model": service.model}
        head |= service.fingerprint
        if body.stream:
            chunks, release = _chunks(tokenizer, turns, head, body), held.pop_all().close
            return EventStream(chunks, service.stopping, release, failure=error_event, encode=bytes, end=DONE)
        choices = await race(
            gathered([_whole(tokenizer, i, t, body) for i, t in enumerate(turns.turns)]),
            request.receive,
            service.stopping,
        )
        answer = {**head, "object": "chat.completion", "choices": choices, "usage": turns.usage()}
        if body.return_token_ids:
            answer["prompt_token_ids"] = turns.turns[0].generation.prompt
        if (likeliest := body.prompt_logprobs) is not None:
            entries = turns.turns[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprob_table(tokenizer, entries, likeliest)
        return json_response(answer)


async def _whole(tokenizer: Tokenizer, number: int, turn: Turn, body: ChatBody) -> dict[str, Any]:
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    entries: list[TokenLogprob] = []
    async with contextlib.aclosing(turn.events()) as stream:
        async for events, new in stream:
            entries += new
            for e in events:
                if isinstance(e, Reasoning):
                    if body.include_reasoning is not False:
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
        "index": number,
        "message": message,
        "logprobs": _logprobs(tokenizer, entries, body) if body.logprobs else None,
        "finish_reason": turn.finish_reason,
        **turn.generation.marks,
    }
    return choice | {"token_ids": turn.ids} if body.return_token_ids else choice


def _logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], body: ChatBody) -> dict[str, Any]:
    as_ids = bool(body.return_tokens_as_token_ids)
    return {"content": [chat_logprob(tokenizer, e, as_ids=as_ids) for e in entries]}


async def _chunks(
    tokenizer: Tokenizer, turns: Turns, head: Mapping[str, Any], body: ChatBody
) -> AsyncGenerator[bytes, None]:
    # All fields but the choice are the same in every chunk of a stream: encode them once.
    start = msgspec.json.encode({**head, "object": "chat.completion.chunk"})[:-1]
    end = b'],"usage":null}' if body.include_usage else b"]}"
    encode = msgspec.json.Encoder().encode
    prompt = b""  # prompt_token_ids, in the first chunk only
    if body.return_token_ids:
        prompt = b',"prompt_token_ids":' + encode(turns.turns[0].generation.prompt)

    def ready(index: int, field: str) -> tuple[bytes, bytes]:
        """The bytes of a frame before and after its piece of text."""
        choice = b'{"index":%d,"delta":{"%b":' % (index, field.encode())
        return b"data: " + start + b',"choices":[' + choice, b'},"finish_reason":null}' + end + b"\n\n"

    async def frames(index: int, turn: Turn) -> AsyncGenerator[bytes, None]:
        sent = 0  # number of the turn's ids that were sent
        # Nearly all frames differ only in their text.
        constant = not (body.logprobs or body.return_token_ids or body.continuous_usage)
        around_content, around_reasoning = ready(index, "content"), ready(index, "reasoning_content")

        def chunk(
            delta: Mapping[str, Any], entries: Sequence[TokenLogprob], finish_reason: str | None, **more: Any
        ) -> bytes:
            nonlocal prompt, sent
            choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish_reason, **more}
            if entries:
                choice["logprobs"] = _logprobs(tokenizer, entries, body)
            if body.return_token_ids:
                choice["token_ids"], sent = turn.ids[sent:], len(turn.ids)
            first, prompt = start + prompt + b',"choices":[', b""
            if body.continuous_usage:
                return event(first + encode(choice) + b'],"usage":' + encode(turns.usage()) + b"}")
            return event(first + encode(choice) + end)

        yield chunk({"role": "assistant", "content": ""}, (), None)
        async with contextlib.aclosing(turn.events()) as stream:
            async for events, entries in stream:
                shown: Sequence[TokenLogprob] = entries if body.logprobs else ()
                made = []
                for e in events:
                    if isinstance(e, Reasoning) and body.include_reasoning is False:
                        continue
                    if constant and isinstance(e, Content | Reasoning):
                        before, after = around_content if isinstance(e, Content) else around_reasoning
                        made.append(before + encode(e.text) + after)
                    else:
                        made.append(chunk(_delta(e), shown, None))
                    shown = ()
                if shown:  # ids of tokens with text held back (part of a character, a marker or a stop string)
                    made.append(chunk({}, shown, None))
                if made:
                    yield made[0] if len(made) == 1 else b"".join(made)  # one write
        yield chunk({}, (), turn.finish_reason, **turn.generation.marks)

    async with contextlib.aclosing(merged([frames(i, t) for i, t in enumerate(turns.turns)])) as all_frames:
        async for frame in all_frames:
            yield frame
    if body.include_usage:
        yield event(start + b',"choices":[],"usage":' + encode(turns.usage()) + b"}")


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
