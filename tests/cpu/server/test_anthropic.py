"""The Messages API in process: translation, blocks, events and errors, around an engine that says what it is told."""

import asyncio
import json
from typing import Any

import anthropic
import httpx2  # of the SDK
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from perilune.core.errors import RequestError
from perilune.server import sse
from perilune.server.anthropic.messages import describe
from perilune.server.anthropic.protocol import MessagesBody
from perilune.server.body import parse
from perilune.text.chat import ChatTemplate
from tests.serving import CALL, WEATHER, Reply, Served, serve, served

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = {"max_tokens": 300, "messages": [{"role": "user", "content": "Hi"}]}
ON = {"thinking": {"type": "enabled", "budget_tokens": 200}}
FUNCTION = WEATHER["function"]
TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def told(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream without pings, each checked against the official SDK's type."""
    events = [event for event in reply.events if event != {"type": "ping"}]
    for event in events:
        if event["type"] != "error":
            EVENT.validate_python(event)
    return events


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells of."""
    first, end, stop = events[0], events[-2], events[-1]
    assert (first["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    inputs: dict[int, str] = {}
    growing: int | None = None
    signed = False
    for e in events[1:-2]:
        if e["type"] == "content_block_start":
            assert growing is None and e["index"] == len(message["content"])
            growing, signed = e["index"], False
            message["content"].append(e["content_block"])
            continue
        assert e["index"] == growing
        block = message["content"][growing]
        if e["type"] == "content_block_stop":
            assert block["type"] != "thinking" or signed, "a thinking block ends with its signature"
            growing = None
            continue
        delta = e["delta"]
        assert not signed, "nothing follows a signature"
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                signed = True
                block["signature"] += delta["signature"]
            case "input_json_delta":
                inputs[growing] = inputs.get(growing, "") + delta["partial_json"]
    assert growing is None
    for at, text in inputs.items():
        assert message["content"][at]["input"] == {}
        message["content"][at]["input"] = json.loads(text)
    return {**message, **end["delta"], "usage": message["usage"] | end["usage"]}


async def both(s: Served, body: dict[str, Any]) -> dict[str, Any]:
    """The message, which must be the same whole and streamed but for its id."""
    reply = await s.client.post(PATH, body)
    assert reply.status == 200, reply.text
    whole = reply.json
    Message.model_validate(whole)
    streamed = rebuilt(told(await s.client.post(PATH, {**body, "stream": True})))
    assert whole["id"].startswith("msg_") and {**streamed, "id": whole["id"]} == whole
    return dict(whole)


def error(reply: Reply) -> tuple[int, str, str]:
    body = reply.json
    assert set(body) == {"type", "error"} and body["type"] == "error" and set(body["error"]) == {"type", "message"}
    assert int(reply.headers["content-length"]) == len(reply.text.encode()) and "\n" not in body["error"]["message"]
    return reply.status, body["error"]["type"], body["error"]["message"]


REDACTED = {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}
THINKING = {"type": "thinking", "thinking": "Hm", "signature": ""}
CALLS = [
    {"type": "tool_use", "id": f"functions.get_weather:{i}", "name": "get_weather", "input": {"city": "Oslo"}}
    for i in (0, 1)
]


@pytest.mark.parametrize("width", [1, 3, 50])
@pytest.mark.parametrize(
    ("answer", "content", "reason"),
    [
        ("Hm</think>Grüße", [THINKING, {"type": "text", "text": "Grüße"}], "end_turn"),
        ("</think>Hello", [{"type": "text", "text": "Hello"}], "end_turn"),
        ("Hm</think>", [THINKING], "end_turn"),
        (
            "Hm</think>Wait." + CALL.format(0),
            [THINKING, {"type": "text", "text": "Wait."}, CALLS[0]],
            "tool_use",
        ),
        ("Hm</think>" + CALL.format(0) + CALL.format(1), [THINKING, *CALLS], "tool_use"),
        (CALL.format(0).replace('"Oslo"', "1e400"), [{**CALLS[0], "input": {"city": float("inf")}}], "tool_use"),
    ],
)
def test_an_answer_is_told_as_blocks(answer: str, content: Any, reason: str, width: int) -> None:
    async def test(s: Served) -> None:
        message = await both(s, {**HELLO, **ON, "tools": [TOOL]})
        assert message["content"] == content
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
        assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")
        usage = message["usage"]
        assert usage["cache_read_input_tokens"] == 3 and usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] == len(s.engine.seen[-1][0]) - 3
        assert usage["output_tokens_details"]["thinking_tokens"] in range(answer.index("<"), answer.index("<") + 2)

    serve(test, answer=answer, width=width)


@served(answer="Hello")
async def test_without_being_asked_it_does_not_think(s: Served) -> None:
    for more in ({}, {"thinking": {"type": "disabled"}}):
        message = await both(s, {**HELLO, **more})
        assert message["content"] == [{"type": "text", "text": "Hello"}] and s.prompt().endswith("<think></think>")
    assert s.params.temperature == 0.6
    await s.client.post(PATH, {**HELLO, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}})
    assert s.prompt().endswith("<think>") and s.params.temperature == 1.0


def test_a_model_that_cannot_help_thinking_thinks_unasked() -> None:
    class Thinker(ChatTemplate):
        def thinks(self, requested: bool | None) -> bool:
            if requested is False:
                raise RequestError("thinking cannot be disabled", param="thinking")
            return True

    async def test(s: Served) -> None:
        message = await both(s, HELLO)
        assert message["content"] == [THINKING, {"type": "text", "text": "Hello"}]

    serve(test, answer="Hm</think>Hello", template=Thinker())


@pytest.mark.parametrize("stops", [["lo"], ["zz", "lo"]])
@served(answer="Hello there")
async def test_a_stop_sequence_is_named(s: Served, stops: list[str]) -> None:
    message = await both(s, {**HELLO, "stop_sequences": stops})
    assert message["content"] == [{"type": "text", "text": "Hel"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "lo")


@served(answer="Hello")
async def test_the_token_limit_is_the_reason(s: Served) -> None:
    message = await both(s, {**HELLO, "max_tokens": 4})
    assert message["content"] == [{"type": "text", "text": "Hell"}] and message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 4


@served(answer="Wait" + CALL.format(0))
async def test_a_call_cut_off_by_the_limit_is_left_out_of_a_whole_message(s: Served) -> None:
    body = {**HELLO, "tools": [TOOL], "max_tokens": len("Wait") + 3 + len('functions.get_weather:0{"ci')}
    whole = (await s.client.post(PATH, body)).json
    assert whole["content"] == [{"type": "text", "text": "Wait"}] and whole["stop_reason"] == "max_tokens"
    events = told(await s.client.post(PATH, {**body, "stream": True}))
    assert "".join(e["delta"].get("partial_json", "") for e in events if "partial_json" in str(e)) == '{"ci'
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


@served(answer=CALL.format(0).replace('{"city": "Oslo"}', "[1]"))
async def test_arguments_that_are_no_object_are_an_error_not_a_guess(s: Served) -> None:
    status, kind, message = error(await s.client.post(PATH, {**HELLO, "tools": [TOOL]}))
    assert (status, kind) == (500, "api_error") and "get_weather" in message


@served(answer="Hm</think>Rain")
async def test_blocks_become_the_conversation(s: Served) -> None:
    thought = {"type": "thinking", "thinking": "Look it up", "signature": ""}
    secret = {"type": "redacted_thinking", "data": "x"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {
            "role": "assistant",
            "content": [secret, thought, {"type": "text", "text": "Wait"}, USE, {**USE, "id": "toolu_2"}],
        },
        {"role": "user", "content": [result, failed, {"type": "text", "text": "Well?"}]},
    ]
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be ", **cached}, {"type": "text", "text": "brief"}]
    reply = await s.client.post(PATH, {**HELLO, **ON, "messages": messages, "tools": [TOOL], "system": system})
    assert reply.status == 200, reply.text
    call = '<|tool_call_begin|>functions.get_weather:{}<|tool_call_argument_begin|>{{"city": "Oslo"}}<|tool_call_end|>'
    assert s.prompt().endswith(
        "<|im_system|>system<|im_middle|>Be brief<|im_end|>"
        "<|im_user|>user<|im_middle|>Weather?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>Look it up</think>Wait<|tool_calls_section_begin|>"
        f"{call.format(0)}{call.format(1)}<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\nrain<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:1\nError: no such city<|im_end|>"
        "<|im_user|>user<|im_middle|>Well?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )
    assert "namespace functions" in s.prompt()


@served(answer="Hm</think>Wait" + CALL.format(0))
async def test_an_answer_sent_back_is_what_the_model_said(s: Served) -> None:
    message = await both(s, {**HELLO, **ON, "tools": [TOOL]})
    use = message["content"][-1]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    first = s.prompt()
    again = await both(s, {**HELLO, **ON, "messages": history, "tools": [TOOL]})
    said = f"{s.engine.answer}<|im_end|>"
    assert s.prompt().startswith(first + said), "the prefix cache must find the whole earlier turn"
    assert again["content"][-1]["id"] == "functions.get_weather:1"


@served()
async def test_the_settings_reach_the_engine(s: Served) -> None:
    more = {"temperature": 0.3, "top_p": 0.8, "top_k": 7, "stop_sequences": ["zz"], "metadata": {"user_id": "u"}}
    await both(s, {**HELLO, **more, "tools": [TOOL], "tool_choice": {"type": "none"}})
    p = s.params
    assert (p.temperature, p.top_p, p.top_k, p.stop, p.max_tokens) == (0.3, 0.8, 7, ("zz",), 300)
    assert "namespace functions" not in s.prompt()


@served()
async def test_counting_tokens_is_what_the_prompt_takes(s: Served) -> None:
    for more in ({}, {"tools": [TOOL], "system": "Be brief", "thinking": {"type": "enabled", "budget_tokens": 9}}):
        body = {"messages": HELLO["messages"], **more}
        counted = await s.client.post(COUNT, body)
        assert counted.status == 200, counted.text
        MessageTokensCount.model_validate(counted.json)
        await s.client.post(PATH, {**body, "max_tokens": 30})
        assert counted.json == {"input_tokens": len(s.engine.seen[-1][0])}
    assert error(await s.client.post(COUNT, {"messages": []}))[0] == 400


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "get_weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}},
            {"thinking": {"type": "enabled"}, "reasoning_effort": "medium"},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        ),
        (
            {"tools": [{**TOOL, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}]},
            {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
        ),
    ],
)
def test_what_chat_is_asked(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    body = parse(MessagesBody, json.dumps({**HELLO, **sent}).encode())
    body.check_supported()
    chat = body.chat(thinks_unasked=False).model_dump(exclude_none=True, exclude={"messages", "max_tokens"})
    assert chat == {"thinking": {"type": "disabled"}, **expected}
    assert "thinking" not in body.model_copy(update={"thinking": None}).chat(thinks_unasked=True).model_fields_set


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, {"role": "user", "content": "Go on"}]}


def prefill(content: Any) -> dict[str, Any]:
    return {"messages": [*HELLO["messages"], {"role": "assistant", "content": content}]}


@pytest.mark.parametrize(
    "content", ["347 + 589 = 9", [{"type": "text", "text": "347 + 589"}, {"type": "text", "text": " = 9"}]]
)
@served(answer=" 36")
async def test_a_last_message_of_the_assistant_is_continued(s: Served, content: Any) -> None:
    message = await both(s, {**HELLO, **prefill(content)})
    assert [(b["type"], b["text"]) for b in message["content"]] == [("text", " 36")]
    assert s.prompt().endswith("<|im_assistant|>assistant<|im_middle|><think></think>347 + 589 = 9")
    counted = await s.client.post(COUNT, prefill(content))
    assert counted.json == {"input_tokens": len(s.engine.seen[-1][0])}
    message = await both(s, {**HELLO, **prefill("")})
    assert s.prompt().endswith("<|im_middle|><think></think>")


@served(answer=CALL.format(0))
async def test_a_last_message_continues_a_form_a_call_or_a_thought(s: Served) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert (await s.client.post(PATH, {**HELLO, **prefill("{"), "output_config": config})).status == 200
    made = s.engine.constraints[-1]
    assert made is not None and made.begun == "{" and made.answer is not None
    status, _, words = error(await s.client.post(PATH, {**HELLO, **prefill("Sure: {"), "output_config": config}))
    assert status == 400 and "keeps to output_config.format" in words
    message = await both(s, {**HELLO, **prefill("Let me see."), "tools": [TOOL]})
    assert [b["type"] for b in message["content"]] == ["tool_use"] and message["stop_reason"] == "tool_use"
    thought = prefill([{"type": "thinking", "thinking": "R", "signature": ""}])
    await both(s, {**HELLO, **thought, **ON})
    assert s.prompt().endswith("<think>R")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens must be"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages must hold"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be user, assistant or system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be"),
        (said({"type": "image", "source": {}}), "messages[0].content[0].source must be of type base64"),
        (said({"type": "document", "source": {}}), "but blocks of the user may be text, image, video and tool_result"),
        (said(USE), "blocks of the user may be text, image, video and tool_result"),
        (said("a"), "messages[0].content[0]"),
        (said({"type": "text"}), "messages[0].content[0].text must be a string"),
        (REDACTED, "messages must hold more than redacted_thinking"),
        ({**REDACTED, "system": "Be brief"}, "messages must hold more than redacted_thinking"),
        (said({"type": "thinking"}, role="assistant"), "messages[0].content[0].thinking must be a string"),
        (said({**USE, "input": "{}"}, role="assistant"), "messages[0].content[0].input must be an object"),
        (said({**USE, "name": ""}, role="assistant"), "messages[0].content[0].name must be a string that is not"),
        (said({"type": "tool_result", "tool_use_id": "x"}), "tool_use_id 'x' is not the id of an earlier tool call"),
        (prefill("The "), "the last message must not end in white space"),
        (prefill([{"type": "text", "text": "The"}, {"type": "text", "text": "\n"}]), "must not end in white space"),
        ({**prefill("The"), **ON}, "does not go with thinking"),
        ({**prefill("The"), "thinking": {"type": "adaptive"}}, "does not go with thinking"),
        (prefill([{"type": "text", "text": "The"}, USE]), "tool_use of the last message must be followed by"),
        (prefill([{"type": "thinking", "thinking": "R"}]), "thinking is switched off"),
        ({"system": [{"type": "image"}]}, "system[0] is of type 'image'"),
        ({"system": 5}, "system must be"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not served"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type must be"),
        ({"tool_choice": {"type": "any"}}, "tool_choice 'any' needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name must name the tool"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens must be at least 1"),
        ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "thinking.budget_tokens must be below max_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 30}}, "does not go with"),
        ({"thinking": {"type": "often"}}, "thinking.type must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be"),
        ({"temperature": -1}, "temperature must be between"),
        ({"top_k": 1.5}, "top_k must be"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"stop_sequences": "a"}, "stop_sequences must be"),
        ({"container": {"id": "x"}}, "container is not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "512"),
    ],
)
@served()
async def test_bad_requests_are_one_clear_error(s: Served, change: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        status, kind, message = error(await s.client.post(PATH, {**HELLO, "stream": stream, **change}))
        assert (status, kind) == (400, "invalid_request_error") and words in message, message
    assert not s.engine.seen


@served(max_body_mb=1)
async def test_errors_have_anthropics_shape_wherever_they_arise(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    seen: list[bytes] = []
    assert error(await s.client.post(PATH, b"{nope"))[:2] == (400, "invalid_request_error")
    assert error(await s.client.post(PATH, {**HELLO, "model": "x"}))[:2] == (404, "not_found_error")
    assert error(await s.client.get(PATH))[:2] == (405, "invalid_request_error")
    assert error(await s.client.get(f"{PATH}/nowhere"))[:2] == (404, "not_found_error")
    assert error(await s.client.post(PATH, b" " * 2_000_000))[:2] == (413, "request_too_large")
    assert "message" in (await s.client.post("/v1/chat/completions", b"{nope")).error
    s.engine.alive = False
    assert error(await s.client.post(PATH, HELLO))[:2] == (503, "overloaded_error")
    s.engine.alive = True
    monkeypatch.setattr(s.engine, "generate", broken)
    with pytest.raises(ZeroDivisionError):  # raised again after the answer, for the server's log
        await s.client.post(PATH, HELLO, got=seen.append)
    (body,) = map(json.loads, seen)
    assert body["error"]["type"] == "api_error" and "secret" not in body["error"]["message"]


def test_a_missed_deadline_has_anthropics_type() -> None:
    assert describe(RequestError("late", status=504))["error"] == {"type": "timeout_error", "message": "late"}


@served(cors_origins=("https://a.example",), api_key="k")
async def test_answers_that_are_not_ours_pass_as_they_are(s: Served) -> None:
    s.client.headers = {"origin": "https://b.example", "access-control-request-method": "POST"}
    refused = await s.client.request("OPTIONS", PATH, [b""])
    assert refused.status == 400 and refused.text.startswith("Disallowed CORS")


@pytest.mark.parametrize(
    "headers",
    [{"x-api-key": "k3y"}, {"authorization": "Bearer k3y"}, {"x-api-key": "no", "authorization": "Bearer k3y"}],
)
@served(api_key="k3y")
async def test_the_key_may_come_as_x_api_key(s: Served, headers: dict[str, str]) -> None:
    for wrong in ({}, {"x-api-key": ""}, {"x-api-key": "k3"}, {"authorization": "Bearer k3"}):
        s.client.headers = wrong
        reply = await s.client.post(PATH, HELLO)
        assert error(reply)[:2] == (401, "authentication_error")
    s.client.headers = headers
    assert (await s.client.post(PATH, HELLO)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@served(hold=1)
async def test_a_client_that_leaves_frees_the_engine_at_once(s: Served, stream: bool) -> None:
    leave = asyncio.Event()
    call = asyncio.create_task(s.client.post(PATH, {**HELLO, "stream": stream}, leave=leave))
    await s.hangs()
    leave.set()
    await call
    assert s.engine.cancelled == [0] and s.engine.live == 0


@served(fail_at=3)
async def test_a_failure_ends_the_stream_with_an_error_event(s: Served) -> None:
    last = told(await s.client.post(PATH, {**HELLO, "stream": True}))[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "logits" in last["error"]["message"]
    assert error(await s.client.post(PATH, HELLO))[:2] == (500, "api_error")


@served(hold=1)
async def test_stopping_the_server_ends_a_stream_with_the_reason(s: Served) -> None:
    call = asyncio.create_task(s.client.post(PATH, {**HELLO, "stream": True}))
    await s.hangs()
    s.service.stop()
    last = told(await call)[-1]
    assert last["error"]["type"] == "overloaded_error" and "shutting down" in last["error"]["message"]


@served(hold=2)
async def test_pings_keep_a_quiet_stream_alive(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    pings = 0
    several = asyncio.Event()

    def got(piece: bytes) -> None:
        nonlocal pings
        assert piece.count(b"\n\n") == 1, "each event is a message of its own"
        pings += piece.startswith(b"event: ping")
        if pings >= 4:
            several.set()

    body = json.dumps({**HELLO, "stream": True}).encode()
    call = asyncio.create_task(s.client.request("POST", PATH, [body], got=got))
    await several.wait()
    s.engine.release.set()
    assert rebuilt(told(await call))["content"] == [{"type": "text", "text": "Hello"}]


# ---- the models


def sdk(s: Served, key: str = "none") -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(s.client.app))
    return anthropic.AsyncAnthropic(base_url="http://test", api_key=key, max_retries=0, http_client=http)


@served()
async def test_the_official_sdk_lists_the_models(s: Served) -> None:
    client = sdk(s)
    found = [m async for m in client.models.list()]
    assert [(m.id, m.type, m.display_name) for m in found] == [("m", "model", "m")]
    one = await client.models.retrieve("m")
    assert one == found[0] and abs(one.created_at.timestamp() - s.service.started) < 1
    assert one.max_input_tokens == s.engine.info.max_model_len
    assert [m async for m in client.models.list(after_id="m")] == []
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.models.retrieve("other")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    plain = (await s.client.get("/v1/models")).json
    assert plain["object"] == "list" and plain["data"][0]["object"] == "model"
    openai = (await s.client.get("/v1/models/other")).error
    assert openai["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@served(answer="Hello")
async def test_the_sdks_tool_runner_goes_on_without_a_thread(s: Served, stream: bool) -> None:
    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        return city

    runner = sdk(s).beta.messages.tool_runner(model="m", stream=stream, tools=[get_weather], **HELLO)
    answers = [await m.get_final_message() if stream else m async for m in runner]
    assert [m.content[0].text for m in answers] == ["Hello"]
    refused = await s.client.post(PATH, {**HELLO, "thread": {"type": "create"}})
    assert refused.status == 400 and refused.json["error"]["details"] == {"error_code": "thread_unsupported_request"}


@served(api_key="sesame")
async def test_a_wrong_key_is_refused_in_the_clients_form(s: Served) -> None:
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await sdk(s).models.list()
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert [m.id async for m in sdk(s, "sesame").models.list()] == ["m"]


@pytest.mark.parametrize(("system", "prompt"), [("", False), ([], False), (None, False), ("Be kind", True)])
@served()
async def test_an_empty_system_is_none(s: Served, system: Any, prompt: bool) -> None:
    reply = await s.client.post("/v1/messages", {**HELLO, "system": system})
    assert reply.status == 200 and ("<|im_system|>system" in s.prompt()) == prompt


@pytest.mark.parametrize("system", [{}, False, 0, 0.0])
@served()
async def test_a_system_that_is_no_text_is_refused(s: Served, system: Any) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {"messages": HELLO["messages"], "system": system}
        reply = await s.client.post(path, body if path == COUNT else {**body, "max_tokens": 9})
        assert reply.status == 400 and "system must be a string or a list of parts" in reply.text
