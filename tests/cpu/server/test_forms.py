"""What a request says about the form of its answer, and the constraint the engine gets for it."""

import asyncio
import json
import threading
from typing import Any, ClassVar

import pytest

from perilune.core.constraint import Constraint
from perilune.grammar import matcher
from perilune.server.answer_format import EFFORTS
from perilune.text.chat import ChatTemplate
from perilune.text.family import K2_THINKING
from tests.serving import CALL, CHAT, HELLO, TEXT, WEATHER, Served, serve, served

FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}}, "r"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"guided_json": '{"type": "object"}'}, "guided_json"),
    ({"guided_regex": "[a-z]+"}, "guided_regex"),
    ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    ({"guided_grammar": 'start: "yes" | "no"'}, "guided_grammar"),
    ({"structured_outputs": {"json": {"type": "object"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "[a-z]+", "json": None}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "structured_outputs.choice"),
]


@pytest.mark.parametrize(("form", "field"), FORMS, ids=lambda v: json.dumps(v)[:60])
@served()
async def test_a_form_of_the_answer_is_enforced(s: Served, form: dict[str, Any], field: str) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        reply = await s.client.post(path, {**body, **form, "max_tokens": 100})
        assert reply.status == 200, reply.text
        constraint = s.engine.constraints[-1]
        assert constraint is not None and constraint.answer is not None and not constraint.tools
        assert constraint.thinking == (path == CHAT)
        assert (constraint.param or "").startswith(field)
    for nothing in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}):
        assert (await s.client.post(TEXT, {"prompt": "a", **nothing})).status == 200
        assert s.engine.constraints[-1] is None


@served()
async def test_slow_grammars_delay_nothing_else(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    known, end, made = {"messages": HELLO, "tools": [WEATHER]}, threading.Event(), matcher._on_large_stack
    await s.client.post(CHAT, known)
    monkeypatch.setattr(matcher, "_on_large_stack", lambda make: end.wait(99) and made(make))
    monkeypatch.setattr(matcher, "PATIENCE_SECONDS", 0.05)
    slow = [asyncio.create_task(s.client.post(CHAT, known | {"guided_regex": f"{i}"})) for i in range(40)]
    await asyncio.sleep(0.1)
    assert (await s.client.post("/tokenize", {"prompt": "a" * 20_000})).status == 200
    assert (await s.client.post(CHAT, known)).status == 200
    while sum(one.done() for one in slow) < 36:
        await asyncio.sleep(0.01)
    end.set()
    assert sorted([(await one).status for one in slow]) == [200] * 4 + [503] * 36


@served()
async def test_tool_choice_is_enforced(s: Served) -> None:
    other = {"type": "function", "function": {"name": "other", "strict": True, "parameters": {"type": "object"}}}
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "other", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]

    async def ask(**fields: Any) -> Constraint | None:
        body = {"messages": HELLO, "tools": [WEATHER, other], **fields}
        reply = await s.client.post(CHAT, body)
        assert reply.status == 200, reply.text
        return s.engine.constraints[-1]

    auto = await ask()
    assert auto is not None and auto == await ask(tool_choice="auto", parallel_tool_calls=True)
    assert [name for name, _ in auto.tools] == ["get_weather", "other"]
    assert auto.text and auto.parallel and auto.first_index == 0 and auto.thinking and auto.answer is None
    required = await ask(tool_choice="required", parallel_tool_calls=False, thinking={"type": "disabled"})
    assert required is not None and not required.text and not required.parallel and not required.thinking
    assert len(required.tools) == 2
    named = await ask(tool_choice={"type": "function", "function": {"name": "other"}})
    assert named is not None and [name for name, _ in named.tools] == ["other"] and not named.text
    for mode in ("auto", "required"):
        subset = {"mode": mode, "tools": [{"type": "function", "function": {"name": "other"}}]}
        allowed = await ask(tool_choice={"type": "allowed_tools", "allowed_tools": subset})
        assert allowed is not None and [name for name, _ in allowed.tools] == ["other"] and allowed.parallel
        assert allowed.text is (mode == "auto") and "get_weather" in s.prompt()
    later = await ask(messages=history)
    assert later is not None and later.first_index == 1
    formed = await ask(response_format={"type": "json_object"})
    assert formed is not None and formed.answer is not None and len(formed.tools) == 2
    forced = await ask(response_format={"type": "json_object"}, tool_choice="required")
    assert forced is not None and forced.answer is None and len(forced.tools) == 2
    none = await ask(tool_choice="none")
    assert none is None or not none.tools


@served()
async def test_what_cannot_be_enforced_is_refused(s: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for form, param in (
        ({"guided_json": schema}, "guided_json"),
        ({"guided_regex": "(?<=x)y"}, "guided_regex"),
        ({"guided_grammar": "start: ???"}, "guided_grammar"),
        ({"tools": [tool]}, "tools"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
    ):
        reply = await s.client.post(CHAT, {"messages": HELLO, **form})
        assert reply.status == 400 and reply.error["param"].startswith(param), reply.text
    reply = await s.client.post(CHAT, {"messages": HELLO, "guided_choice": ["a" * 50], "max_tokens": 20})
    assert reply.status == 400 and reply.error["param"] == "max_tokens" and "at least" in reply.error["message"]
    assert s.engine.seen == []


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"max_thinking_tokens": 5}, 5),
        ({"max_thinking_tokens": 0}, 0),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}, "max_thinking_tokens": 7}, 7),
        ({"reasoning_effort": "minimal"}, EFFORTS["minimal"]),
        ({"reasoning_effort": "low"}, EFFORTS["low"]),
        ({"reasoning_effort": "medium", "thinking": {"type": "enabled"}}, EFFORTS["medium"]),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "xhigh"}, None),
        ({"reasoning_effort": "max"}, None),
        ({"reasoning_effort": "none"}, "off"),
        ({"reasoning_effort": "none", "max_thinking_tokens": 0}, "off"),
    ],
    ids=str,
)
@served()
async def test_thinking_can_be_bounded(s: Served, fields: dict[str, Any], budget: Any) -> None:
    reply = await s.client.post(CHAT, {"messages": HELLO, **fields})
    assert reply.status == 200, reply.text
    constraint = s.engine.constraints[-1]
    if budget == "off":
        assert s.prompt().endswith("<think></think>") and constraint is None
        return
    assert s.prompt().endswith("<think>")
    assert (constraint and constraint.thinking_budget) == budget


@served(template=ChatTemplate(K2_THINKING), answer="<think>r</think>a")
async def test_a_model_that_opens_its_own_thought_is_told_so(s: Served) -> None:
    for more in ({}, {"tools": [WEATHER]}, {"max_thinking_tokens": 3}, {"guided_regex": "a"}):
        answer = (await s.client.post(CHAT, {"messages": HELLO, **more})).json
        assert s.prompt().endswith("<|im_middle|>"), "its prompts end where the answer begins"
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("r", "a")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
        constraint = s.engine.constraints[-1]
        assert (constraint is not None and constraint.thinking) == bool(more)
    assert constraint is not None
    least = constraint.least
    body = {"messages": HELLO, **more}
    assert (await s.client.post(CHAT, {**body, "max_tokens": least})).error["param"] == "max_tokens"
    assert (await s.client.post(CHAT, {**body, "max_tokens": least + 1})).status == 200
    refused = await s.client.post(CHAT, {"messages": HELLO, "reasoning_effort": "none"})
    assert refused.status == 400 and "always thinks" in refused.error["message"]


# ---- closed by the grammar: in every API an answer that its grammar completed because max_tokens ran out is marked.


FORM: ClassVar = {"response_format": {"type": "json_object"}, "max_tokens": 50}


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})])
def test_chat_and_completions(path: str, body: dict[str, Any]) -> None:
    async def test(s: Served) -> None:
        (whole,) = (await s.client.post(path, {**body, **FORM})).json["choices"]
        *_, last = (await s.client.post(path, {**body, **FORM, "stream": True})).chunks
        for choice in (whole, last["choices"][0]):
            assert choice["finish_reason"] == "length" and choice["closed_by_grammar"] is True
        s.engine.closed = False
        (whole,) = (await s.client.post(path, {**body, **FORM})).json["choices"]
        chunks = (await s.client.post(path, {**body, **FORM, "stream": True})).chunks
        assert whole["finish_reason"] == "stop" and "closed_by_grammar" not in str([whole, chunks])
        text = (await s.client.get("/metrics")).text
        assert "perilune_answers_closed_by_grammar_total 2.0" in text
        assert 'perilune_request_success_total{finished_reason="length"} 2.0' in text

    serve(test, answer="</think>{}" if path == CHAT else "{}", closed=True)


@served(answer="</think>" + CALL.format(0), closed=True)
async def test_a_call_is_not_said_to_be_whole(s: Served) -> None:
    body = {"messages": HELLO, "tools": [WEATHER]}
    (whole,) = (await s.client.post(CHAT, body)).json["choices"]
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert (whole["finish_reason"], whole["closed_by_grammar"]) == ("length", True)


@served(answer="abz", closed=True, width=9)
async def test_a_stop_string_ends_an_answer_before_its_grammar_does(s: Served) -> None:
    body = {"prompt": "a", "guided_regex": "[a-z]+", "stop": ["z"]}
    (whole,) = (await s.client.post(TEXT, body)).json["choices"]
    assert whole["finish_reason"] == "stop" and "closed_by_grammar" not in whole
    assert "perilune_answers_closed_by_grammar_total 0.0" in (await s.client.get("/metrics")).text


@served(answer=CALL.format(0).replace("get_weather", "f"), closed=True)
async def test_messages(s: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 50, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    whole = (await s.client.post("/v1/messages", body)).json
    assert (whole["stop_reason"], whole["closed_by_grammar"]) == ("max_tokens", True)
    assert whole["content"] == [{"type": "tool_use", "id": "functions.f:0", "name": "f", "input": {"city": "Oslo"}}]
    streamed = (await s.client.post("/v1/messages", {**body, "stream": True})).text
    (end,) = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith('data: {"type":"message_d')]
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None, "closed_by_grammar": True}


@served(answer="</think>{}", closed=True)
async def test_responses(s: Served) -> None:
    body = {"input": "Hi", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 50}
    whole = (await s.client.post("/v1/responses", body)).json
    streamed = (await s.client.post("/v1/responses", {**body, "stream": True})).text
    assert "event: response.incomplete" in streamed
    final = json.loads(streamed.split("event: response.incomplete\ndata: ")[1].split("\n")[0])["response"]
    for response in (whole, final):
        assert response["status"] == "incomplete" and response["completed_at"] is None
        assert response["incomplete_details"] == {"reason": "max_output_tokens", "closed_by_grammar": True}
        assert response["output"][-1]["status"] == "incomplete"
