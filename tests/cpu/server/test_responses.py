"""The Responses API in process: translation, items, events and store, around an engine that says what it is told."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from perilune.server import sse
from perilune.server.body import parse
from perilune.server.responses.protocol import ResponsesBody
from tests.serving import BYTES, CALL, WEATHER, Reply, Served, serve, served

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PREFIX = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


def told(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the official SDK's type."""
    events = reply.events
    for event in events:
        EVENT.validate_python(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the deltas alone tell of, without the done events."""
    items: list[dict[str, Any]] = []
    for e in events:
        match e["type"].removeprefix("response."):
            case "output_item.added":
                assert e["output_index"] == len(items) and e["item"]["status"] == "in_progress"
                items.append(e["item"])
            case "content_part.added":
                assert items[-1]["content"] == [] and e["part"]["text"] == ""
                items[-1]["content"].append(e["part"])
            case "output_text.delta" | "reasoning_text.delta":
                assert (e["item_id"], e["output_index"]) == (items[-1]["id"], len(items) - 1)
                items[-1]["content"][e["content_index"]]["text"] += e["delta"]
            case "function_call_arguments.delta":
                assert e["item_id"] == items[-1]["id"]
                items[-1]["arguments"] += e["delta"]
    return items


def outline(response: dict[str, Any]) -> list[tuple[str, ...]]:
    """(type, text) or (type, call_id, arguments) of each item, with its ids and its shape checked."""
    Response.model_validate(response)
    found: list[tuple[str, ...]] = []
    for item in response["output"]:
        assert item["id"].startswith(PREFIX[item["type"]])
        if item["type"] == "function_call":
            found.append((item["type"], item["call_id"], item["arguments"]))
        else:
            (part,) = item["content"]
            assert part["type"] == {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
            found.append((item["type"], part["text"]))
    return found


@pytest.mark.parametrize("width", [1, 3, 50])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Let me see</think>Grüße", [("reasoning", "Let me see"), ("message", "Grüße")]),
        ("</think>Hello", [("message", "Hello")]),
        ("Hm</think>", [("reasoning", "Hm"), ("message", "")]),
        (
            "Look it up</think>One moment." + CALL.format(0),
            [
                ("reasoning", "Look it up"),
                ("message", "One moment."),
                ("function_call", "functions.get_weather:0", '{"city": "Oslo"}'),
            ],
        ),
        (
            "</think>" + CALL.format(0) + CALL.format(1),
            [("function_call", f"functions.get_weather:{i}", '{"city": "Oslo"}') for i in (0, 1)],
        ),
    ],
)
def test_an_answer_is_told_as_items(answer: str, expected: list[Any], width: int) -> None:
    async def test(s: Served) -> None:
        body = {"model": "m", "input": "Hi", "tools": [TOOL]}
        whole = (await s.client.post(PATH, body)).json
        assert outline(whole) == expected and whole["status"] == "completed"
        events = told(await s.client.post(PATH, {**body, "stream": True}))
        names = [e["type"].removeprefix("response.") for e in events]
        assert names[:2] == ["created", "in_progress"] and names[-1] == "completed"
        final = events[-1]["response"]
        assert outline(final) == expected == outline({**final, "output": rebuilt(events)})
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == final["output"] and {item["status"] for item in done} == {"completed"}
        assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
        usage = whole["usage"]
        reasoning = len(expected[0][1]) if expected[0][0] == "reasoning" else 0
        assert usage["output_tokens_details"]["reasoning_tokens"] in (reasoning, reasoning + 1)  # + the end marker
        assert usage["input_tokens_details"]["cached_tokens"] == 3
        assert usage["input_tokens"] == len(s.engine.seen[-1][0])
        assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
        assert usage == final["usage"]

    serve(test, answer=answer, width=width)


@served(answer="Hm</think>Yes" + CALL.format(0), width=500)
async def test_the_events_come_in_the_documented_order(s: Served) -> None:
    events = told(await s.client.post(PATH, {"input": "Hi", "tools": [TOOL], "stream": True}))
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip


@served(answer="Hm</think>Hello there")
async def test_the_token_limit_makes_a_response_incomplete(s: Served) -> None:
    body = {"input": "Hi", "max_output_tokens": 8}
    whole = (await s.client.post(PATH, body)).json
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert outline(whole) == [("reasoning", "Hm"), ("message", "Hello")]
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    last = told(await s.client.post(PATH, {**body, "stream": True}))[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert whole["usage"]["output_tokens"] == 8 and whole["max_output_tokens"] == 8


@served(answer="Hm</think>Rain.")
async def test_items_become_the_conversation(s: Served) -> None:
    call = {"type": "function_call", "call_id": "call_x", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look it up"}]}
    items = [
        {"role": "developer", "content": "Be kind", "type": None},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        thought,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A moment"}]},
        call,
        {"type": "function_call_output", "call_id": "call_x", "output": "rain"},
    ]
    reply = await s.client.post(PATH, {"input": items, "instructions": "Be brief", "tools": [TOOL]})
    assert reply.status == 200, reply.text
    prompt = s.prompt()
    assert "namespace functions" in prompt
    expected = (
        "<|im_system|>system<|im_middle|>Be brief<|im_end|>"
        "<|im_system|>system<|im_middle|>Be kind<|im_end|>"
        "<|im_user|>user<|im_middle|>Weather?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>Look it up</think>A moment"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\nrain<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )
    assert prompt.endswith(expected)
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short"}]}
    items[2] = summary
    await s.client.post(PATH, {"input": items, "tools": [TOOL]})
    assert "<think>In short</think>A moment" in s.prompt()


@served(answer="</think>Hello")
async def test_the_settings_reach_the_engine_and_come_back(s: Served) -> None:
    body = {
        "input": "Hi",
        "temperature": 0.5,
        "top_p": 0.7,
        "max_output_tokens": 20,
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "user": "u",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "service_tier": "auto",
        "stream_options": {"include_obfuscation": False},
    }
    answer = (await s.client.post(PATH, body)).json
    assert (s.params.temperature, s.params.top_p, s.params.max_tokens) == (0.5, 0.7, 20)
    assert "namespace functions" not in s.prompt(), "with tool_choice none the model sees no tools"
    for name in ("temperature", "top_p", "max_output_tokens", "tools", "tool_choice", "user"):
        assert answer[name] == body[name]
    defaults = (await s.client.post(PATH, {"input": "Hi"})).json
    assert (defaults["temperature"], defaults["top_p"]) == (1.0, 0.95), "what was used, not what was sent"
    assert defaults["tool_choice"] == "auto" and defaults["tools"] == [] and defaults["parallel_tool_calls"] is True


@served(answer="Hello")
async def test_effort_none_turns_thinking_off(s: Served) -> None:
    answer = (await s.client.post(PATH, {"input": "Hi", "reasoning": {"effort": "none"}})).json
    assert outline(answer) == [("message", "Hello")] and s.prompt().endswith("<think></think>")
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        answer = (await s.client.post(PATH, {"input": "Hi", "reasoning": {"effort": effort}})).json
        assert answer["reasoning"]["effort"] == effort and s.prompt().endswith("<think>")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": False},
            {
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        ),
        ({"reasoning": {"effort": "max"}}, {"reasoning_effort": "max"}),
        (
            {"tools": [{**TOOL, "strict": True, "description": "Weather"}]},
            {"tools": [{"type": "function", "function": {**WEATHER["function"], "strict": True,
                                                         "description": "Weather"}}]},
        ),
    ],
)  # fmt: skip
def test_what_chat_is_asked(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    body = parse(ResponsesBody, json.dumps({"input": "Hi", **sent}).encode())
    body.check_supported()
    chat, added = body.chat([])
    assert chat.messages == added == [{"role": "user", "content": "Hi"}]
    assert chat.model_dump(exclude_none=True, exclude={"messages"}) == expected


CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ASKED = {"role": "user", "content": "What is 347 + 589?"}
BEGUN = {"role": "assistant", "content": "347 + 589 = 9"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]}


@pytest.mark.parametrize("status", [None, "in_progress", "incomplete"])
@served(answer="36")
async def test_a_last_message_of_the_assistant_is_continued(s: Served, status: Any) -> None:
    message = {"type": "message", **BEGUN, "content": [{"type": "output_text", "text": "347 + 589 = 9"}]}
    last = message if status is None else {**message, "id": "msg_1", "status": status}
    for stream in (False, True):
        reply = await s.client.post(PATH, {"input": [ASKED, last], "stream": stream})
        response = told(reply)[-1]["response"] if stream else reply.json
        assert outline(response) == [("message", "36")]
        assert s.prompt().endswith("<|im_assistant|>assistant<|im_middle|><think></think>347 + 589 = 9")
    await s.client.post(PATH, {"input": "Sure?", "previous_response_id": response["id"]})
    assert "<think></think>347 + 589 = 936<|im_end|>" in s.prompt(), "what is stored is one message"
    await s.client.post(PATH, {"input": [ASKED, THOUGHT, last]})
    assert s.prompt().endswith("<think>R</think>347 + 589 = 9")


@pytest.mark.parametrize("status", [None, "incomplete"])
@served(answer="est</think>Wait" + CALL.format(0))
async def test_a_last_thought_is_continued(s: Served, status: Any) -> None:
    last = THOUGHT if status is None else {**THOUGHT, "status": status}
    response = (await s.client.post(PATH, {"input": [ASKED, last], "tools": [TOOL]})).json
    assert outline(response)[:2] == [("reasoning", "est"), ("message", "Wait")]
    assert s.prompt().endswith("<|im_middle|><think>R")
    (call,) = [i for i in response["output"] if i["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    await s.client.post(PATH, {"input": [result], "tools": [TOOL], "previous_response_id": response["id"]})
    assert "<think>Rest</think>Wait<|tool_calls_section_begin|>" in s.prompt()


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": []}, "input", "not empty"),
        ({"input": 5}, "input", "input must be a text or a list"),
        ({"input": ["Hi"]}, "input[0]", "must be an object"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "must be a string"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "'robot'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "string or a list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "the model 'm' does not see pictures",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "string"),
        ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content[0]", "type"),
        ({"input": [{**CALLED, "call_id": ""}]}, "input[0].call_id", "not empty"),
        ({"input": [{**CALLED, "arguments": {}}]}, "input[0].arguments", "string"),
        (
            {"input": [CALLED, {"type": "function_call_output", "call_id": "d", "output": "x"}]},
            "input[1].call_id",
            "'d' is not the id of an earlier tool call",
        ),
        ({"input": [ASKED, {**BEGUN, "status": "completed"}]}, "input[1]", "status 'incomplete'"),
        ({"input": [ASKED, {**THOUGHT, "status": "completed"}]}, "input[1]", "status 'incomplete'"),
        ({"input": [ASKED, CALLED]}, "input[1]", "function_call_output"),
        ({"input": [ASKED, {**BEGUN, "status": "so so"}]}, "input[1].status", "in_progress, incomplete or completed"),
        ({"input": [ASKED, THOUGHT], "reasoning": {"effort": "none"}}, "input", "thinking is switched off"),
        (
            {"input": [ASKED, BEGUN], "text": {"format": {"type": "json_object"}}},
            "text.format",
            "keeps to text.format: '347 + 589",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not served"),
        ({"tools": [{"type": "function", "name": "bad name"}]}, "tools[0].name", "tools[0].name must"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters", "schema"),
        ({"tool_choice": "maybe"}, "tool_choice", "'maybe'"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "string"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning", "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "between"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"background": True, "store": False}, "store", "leave store out"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"metadata": {"a": 1}}, "metadata", "metadata.a"),
        ({"input": "a" * 600}, "input", "512"),
    ],
)
@served()
async def test_bad_requests_are_named(s: Served, change: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        reply = await s.client.post(PATH, {"input": "Hi", "stream": stream, **change})
        assert reply.status == 400, reply.text
        assert reply.error["param"] == param and words in reply.error["message"], reply.error
    assert not s.engine.seen


@served()
async def test_unknown_models_and_methods(s: Served) -> None:
    assert (await s.client.post(PATH, {"input": "Hi", "model": "x"})).error["code"] == "model_not_found"
    assert (await s.client.get(PATH)).status == 405
    assert (await s.client.get(f"{PATH}/resp_x")).status == 404


@pytest.mark.parametrize("stream", [False, True])
@served(hold=1)
async def test_a_client_that_leaves_frees_the_engine_at_once(s: Served, stream: bool) -> None:
    leave = asyncio.Event()
    call = asyncio.create_task(s.client.post(PATH, {"input": "Hi", "stream": stream}, leave=leave))
    await s.hangs()
    leave.set()
    await call
    assert s.engine.cancelled == [0] and s.engine.live == 0
    assert len(s.client.app.state.responses) == 0


@served(fail_at=3, answer="</think>Hello")
async def test_a_failure_ends_the_stream_with_an_event(s: Served) -> None:
    events = told(await s.client.post(PATH, {"input": "Hi", "stream": True}))
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and "logits" in failed["error"]["message"]
    (item,) = failed["output"]
    said = "".join(e["delta"] for e in events if e["type"].endswith(".delta"))
    assert said and (item["status"], item["content"][0]["text"]) == ("incomplete", said)
    assert (await s.client.get(f"{PATH}/{failed['id']}")).status == 404
    whole = await s.client.post(PATH, {"input": "Hi"})
    assert whole.status == 500 and "logits" in whole.error["message"]


@served(hold=1)
async def test_stopping_the_server_ends_a_stream_with_the_reason(s: Served) -> None:
    call = asyncio.create_task(s.client.post(PATH, {"input": "Hi", "stream": True}))
    await s.hangs()
    s.service.stop()
    events = told(await call)
    assert events[-1]["type"] == "response.failed"
    assert "shutting down" in events[-1]["response"]["error"]["message"]


@served(hold=2)
async def test_each_event_is_sent_when_it_exists(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    seen = asyncio.Event()

    def got(piece: bytes) -> None:
        assert piece.count(b"\n\n") == 1
        if b"output_text.delta" in piece:
            seen.set()

    body = json.dumps({"input": "Hi", "stream": True, "reasoning": {"effort": "none"}}).encode()
    call = asyncio.create_task(s.client.request("POST", PATH, [body], got=got))
    await seen.wait()
    assert not call.done()
    await asyncio.sleep(0.05)
    s.engine.release.set()
    assert b"ping" not in b"".join((await call).pieces), "this API has no pings"


@served()
async def test_prompts_are_made_of_text_not_markers(s: Served) -> None:
    await s.client.post(PATH, {"input": "<|im_end|>", "instructions": "<think>"})
    ids = s.engine.seen[-1][0]
    assert ids.count(BYTES.special("<|im_end|>")) == 2 and ids.count(BYTES.special("<think>")) == 1
