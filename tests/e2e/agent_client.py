"""One question to the three APIs that agents use, streamed or whole, and their answers in one form."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)


@dataclass
class Answer:
    """`calls`: (id, name, arguments as JSON text). `raw`: the whole response."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    raw: str = ""


def body(api: str, task: str, tools: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
    """A request that lets the model think; `tools` in the chat API's form."""
    functions = [tool["function"] for tool in tools]
    if api == MESSAGES:
        declared = [
            {**{k: v for k, v in f.items() if k != "parameters"}, "input_schema": f.get("parameters", {})}
            for f in functions
        ]
        question = {"messages": [{"role": "user", "content": task}], "max_tokens": 20_000}
        return {**question, "thinking": {"type": "adaptive"}, **({"tools": declared} if tools else {}), **more}
    if api == RESPONSES:
        declared = [{"type": "function", **f} for f in functions]
        return {"input": [{"role": "user", "content": task}], **({"tools": declared} if tools else {}), **more}
    return {"messages": [{"role": "user", "content": task}], **({"tools": [*tools]} if tools else {}), **more}


def ask(client: httpx.Client, api: str, asked: Mapping[str, Any], *, stream: bool) -> Answer:
    """The answer; AssertionError for any status but 200 and for an error in a stream."""
    options = {"stream_options": {"include_usage": True}} if stream and api == CHAT else {}
    reply = client.post(api, json={**asked, "stream": stream, **options}, timeout=120)
    assert reply.status_code == 200, f"{reply.status_code}: {reply.text[:2000]}"
    read = {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages}[api]
    answer = read(_merged(api, [*_events(reply.text)]) if stream else reply.json())
    answer.raw = reply.text
    return answer


def _events(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event and event.get("type") != "error", event
            yield event


def _merged(api: str, events: list[Any]) -> Any:
    """What a client puts together from the pieces of a stream: the form of an answer sent whole."""
    if api == RESPONSES:
        final = events[-1]["response"]
        pieces: dict[str, str] = {}
        for e in events:
            if e["type"] == "response.function_call_arguments.delta":
                pieces[e["item_id"]] = pieces.get(e["item_id"], "") + e["delta"]
        assert {i["id"]: i["arguments"] for i in final["output"] if i["type"] == "function_call"} == pieces
        return final
    if api == MESSAGES:
        blocks: list[dict[str, Any]] = []
        for e in events:
            if e["type"] == "content_block_start":
                blocks.append({**e["content_block"], "partial_json": ""})
            elif e["type"] == "content_block_delta":
                for name, piece in e["delta"].items():
                    if name != "type":
                        blocks[e["index"]][name] += piece
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["partial_json"])
        return {"content": blocks, "usage": events[-2]["usage"]}
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for e in events[:-1]:
        delta = e["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls[piece["index"]] = piece
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    message["tool_calls"] = [calls[i] for i in sorted(calls)]
    return {"choices": [{"message": message}], "usage": events[-1]["usage"]}


def _chat(answer: Any) -> Answer:
    message, usage = answer["choices"][0]["message"], answer["usage"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(
        message.get("reasoning_content") or "", message["content"] or "", calls, usage["prompt_tokens"], cached
    )


def _responses(answer: Any) -> Answer:
    found, usage = Answer(), answer["usage"]
    for item in answer["output"]:
        if item["type"] == "reasoning":
            found.reasoning += "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            found.text += "".join(part["text"] for part in item["content"])
        else:
            found.calls.append((item["call_id"], item["name"], item["arguments"]))
    found.prompt_tokens, found.cached_tokens = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return found


def _messages(answer: Any) -> Answer:
    found, usage = Answer(), answer["usage"]
    for block in answer["content"]:
        if block["type"] == "tool_use":
            found.calls.append((block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False)))
        else:
            found.reasoning += block.get("thinking", "")
            found.text += block.get("text", "")
    found.cached_tokens = usage["cache_read_input_tokens"]
    found.prompt_tokens = usage["input_tokens"] + found.cached_tokens
    return found
