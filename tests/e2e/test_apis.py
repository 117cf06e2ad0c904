"""The Responses and Messages APIs through their official SDKs: a server process and the bundled model."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from perilune.tasks.families import check, problems
from perilune.tasks.problem import Answer, Problem
from tests.e2e.server import WEATHER, Server, needs_nano

pytestmark = needs_nano
MODEL = "kimi-nano"
SUM = "What is 347 + 589?"


def functions(problem: Problem) -> list[dict[str, Any]]:
    return [tool["function"] for tool in problem.tools]


@pytest.fixture(scope="module")
def called() -> Iterator[Problem]:
    """A problem that the model solves with one tool call."""
    yield next(p for p in problems("tool_call", "heldout", 20, thinking=True) if len(p.reply.tool_calls) == 1)


@pytest.fixture
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


# --- Responses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", [None, "none"])
def test_responses_streamed_or_whole_are_the_same(server: Server, effort: Any) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": SUM, "temperature": 0, "max_output_tokens": 200}
    if effort:
        ask["reasoning"] = {"effort": effort}
    whole = server.openai.responses.create(**ask)
    assert whole.status == "completed" and "936" in whole.output_text
    assert [item.type for item in whole.output] == (["message"] if effort else ["reasoning", "message"])
    text, reasoning = "", ""
    with server.openai.responses.stream(**ask) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.reasoning_text.delta":
                reasoning += event.delta
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    if not effort:
        (thought,) = [item for item in final.output if item.type == "reasoning"]
        assert thought.content and thought.content[0].text == reasoning != ""
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    assert bool(whole.usage.output_tokens_details.reasoning_tokens) == (effort is None)


def test_responses_tool_loop_by_items_and_by_id(server: Server, called: Problem) -> None:
    tools: Any = [{"type": "function", "strict": False, **f} for f in functions(called)]
    question: Any = {"role": "user", "content": called.messages[-1]["content"]}
    ask: dict[str, Any] = {"model": MODEL, "tools": tools, "temperature": 0, "max_output_tokens": 300}
    first = server.openai.responses.create(input=[question], **ask)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.call_id == f"functions.{call.name}:0"
    assert check(called, Answer(first.output_text, ((call.name, call.arguments),)))
    with server.openai.responses.stream(input=[question], **ask) as stream:
        for _ in stream:
            pass
        streamed = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert [(c.call_id, c.arguments) for c in streamed] == [(call.call_id, call.arguments)]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    by_id = server.openai.responses.create(input=[result], previous_response_id=first.id, **ask)
    history: Any = [question, *(item.model_dump(exclude_none=True) for item in first.output), result]
    by_items = server.openai.responses.create(input=history, **ask)
    assert by_id.output_text == by_items.output_text and by_id.usage is not None and by_items.usage is not None
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_reference = server.openai.responses.create(input=[question, *references, result], **ask)
    assert by_reference.output_text == by_items.output_text and by_reference.usage is not None
    assert by_reference.usage.input_tokens == by_items.usage.input_tokens
    assert by_items.usage.input_tokens_details.cached_tokens > 0, "the turn before is in the prefix cache"
    assert server.openai.responses.retrieve(by_id.id).output_text == by_id.output_text
    server.openai.responses.delete(by_id.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        server.openai.responses.retrieve(by_id.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        server.openai.responses.create(input="Go on", previous_response_id=by_id.id, **ask)


def test_requests_of_different_salts_share_no_cache(server: Server) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Salted. " + "one two three four five six seven " * 20}],
        "max_tokens": 1,
        "temperature": 0,
    }

    def cached(salt: str | None) -> int:
        answer = server.openai.chat.completions.create(**ask, extra_body={"cache_salt": salt})
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(salt) > 0 for salt in ("a", "b", None, "b", "a", None)] == [False] * 3 + [True] * 3


def test_responses_enforce_calls_and_formats(server: Server) -> None:
    function = WEATHER["function"]
    forced = server.openai.responses.create(
        model=MODEL,
        input="What is the weather in Oslo?",
        tools=[{"type": "function", "strict": True, **function}],
        tool_choice={"type": "function", "name": "get_weather"},
        reasoning={"effort": "none"},
        max_output_tokens=200,
    )
    (call,) = forced.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city"}
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    answer = server.openai.responses.create(model=MODEL, input=SUM, text=form, max_output_tokens=400)
    assert isinstance(json.loads(answer.output_text)["sum"], int)


def test_responses_end_at_the_token_limit(server: Server) -> None:
    answer = server.openai.responses.create(model=MODEL, input=SUM, max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_bad_responses_requests_are_bad_request_errors(server: Server) -> None:
    create = server.openai.responses.create
    with pytest.raises(openai.BadRequestError, match="web_search"):
        create(model=MODEL, input="Hi", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="does not see pictures"):
        image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "low"}]}
        create(model=MODEL, input=[image])
    with pytest.raises(openai.BadRequestError, match="context"):
        create(model=MODEL, input="long " * 20_000)


def test_responses_go_on_from_an_incomplete_message(server: Server) -> None:
    text: Any = [{"type": "output_text", "text": "347 + 589 = 9", "annotations": []}]
    last: Any = {"type": "message", "role": "assistant", "id": "msg_1", "status": "incomplete", "content": text}
    ask: dict[str, Any] = {"model": MODEL, "input": [{"role": "user", "content": SUM}, last], "temperature": 0}
    assert server.openai.responses.create(**ask).output_text == "36"
    with server.openai.responses.stream(**ask) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == "36"
    ask["input"][-1] = {**last, "status": "completed"}
    with pytest.raises(openai.BadRequestError, match="is complete"):
        server.openai.responses.create(**ask)


# --- Messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [True, False])
def test_messages_streamed_or_whole_are_the_same(claude: anthropic.Anthropic, thinking: bool) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 300,
        "messages": [{"role": "user", "content": SUM}],
        "extra_body": {"temperature": 0},
    }
    if thinking:
        ask["thinking"] = {"type": "enabled", "budget_tokens": 250}
    whole = claude.messages.create(**ask)
    assert [b.type for b in whole.content] == (["thinking", "text"] if thinking else ["text"])
    last = whole.content[-1]
    assert last.type == "text" and "936" in last.text and whole.stop_reason == "end_turn"
    with claude.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == last.text
    assert [b.to_dict() for b in final.content] == [b.to_dict() for b in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    assert whole.usage.output_tokens_details is not None
    assert bool(whole.usage.output_tokens_details.thinking_tokens) == thinking
    del ask["extra_body"], ask["max_tokens"]
    counted = claude.messages.count_tokens(**ask).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_messages_go_on_from_a_last_message_of_the_assistant(claude: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": SUM}, {"role": "assistant", "content": "347 + 589 = 9"}]
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": messages, "extra_body": {"temperature": 0}}
    (block,) = claude.messages.create(**ask).content
    assert block.type == "text" and block.text == "36"
    with claude.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == "36"
    with pytest.raises(anthropic.BadRequestError, match="white space"):
        claude.messages.create(**{**ask, "messages": [messages[0], {"role": "assistant", "content": "347 "}]})


@pytest.mark.parametrize("streamed", [False, True])
def test_messages_tool_loop_with_thoughts(claude: anthropic.Anthropic, called: Problem, streamed: bool) -> None:
    tools: Any = [
        {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
        for f in functions(called)
    ]
    ask: dict[str, Any] = {
        "model": MODEL,
        "tools": [{k: v for k, v in tool.items() if v} for tool in tools],
        "max_tokens": 400,
        "thinking": {"type": "enabled", "budget_tokens": 300},
        "extra_body": {"temperature": 0},
    }
    messages: Any = [{"role": "user", "content": called.messages[-1]["content"]}]
    for turn in range(2):
        if streamed:
            with claude.messages.stream(messages=messages, **ask) as stream:
                answer: anthropic.types.Message = stream.get_final_message()
        else:
            answer = claude.messages.create(messages=messages, **ask)
        if turn == 0:
            assert answer.stop_reason == "tool_use" and answer.content[0].type == "thinking"
        uses = [b for b in answer.content if b.type == "tool_use"]
        if turn == 0:
            (use,) = uses
            assert use.id == f"functions.{use.name}:0"
            (expected,) = called.reply.tool_calls
            assert (use.name, use.input) == (expected.name, expected.arguments)
        if not uses:
            break
        results = [{"type": "tool_result", "tool_use_id": u.id, "content": "42"} for u in uses]
        content = [b.to_dict() for b in answer.content]
        messages = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert answer.stop_reason in ("end_turn", "tool_use", "max_tokens")
    assert answer.usage.cache_read_input_tokens, "the turn before is in the prefix cache"


def test_messages_enforce_calls_and_formats(claude: anthropic.Anthropic) -> None:
    function = WEATHER["function"]
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 300}
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced = claude.messages.create(
            messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
            tools=[tool],
            tool_choice={**choice, "disable_parallel_tool_use": True},  # type: ignore[arg-type, misc]
            **ask,
        )
        (use,) = forced.content
        assert use.type == "tool_use" and set(use.input) == {"city"} and forced.stop_reason == "tool_use"
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    answer = claude.messages.create(
        messages=[{"role": "user", "content": SUM}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        **ask,
    )
    (block,) = answer.content
    assert block.type == "text" and isinstance(json.loads(block.text)["sum"], int)


def test_messages_stop_reasons(claude: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": SUM}]}
    greedy = {"temperature": 0}
    short = claude.messages.create(max_tokens=1, **ask)
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 1
    stopped = claude.messages.create(max_tokens=50, stop_sequences=["#", "36"], extra_body=greedy, **ask)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "36")


def test_bad_messages_requests_are_typed_errors(server: Server, claude: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 9}
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="does not see pictures") as bad:
        claude.messages.create(messages=[{"role": "user", "content": [image]}], **ask)
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        claude.messages.create(messages=[{"role": "user", "content": "Hi"}], max_tokens=9, model="other")
    body = {**ask, "messages": [{"role": "user", "content": "long " * 20_000}]}
    refused = server.post("/v1/messages", json=body, headers={"x-api-key": "none"})
    assert refused.status_code == 400 and refused.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_leaves_frees_the_engine(server: Server, path: str) -> None:
    question = "Tell me everything. " * 20
    body: dict[str, Any] = {"stream": True, "temperature": 5.0}
    if path == "/v1/responses":
        body |= {"input": question, "max_output_tokens": 1500}
    else:
        body |= {"messages": [{"role": "user", "content": question}], "max_tokens": 1500}
        body["thinking"] = {"type": "adaptive"}

    def leave() -> None:
        with httpx.stream("POST", server.url + path, json=body, timeout=60) as response:
            assert response.status_code == 200
            for i, _ in enumerate(response.iter_lines()):
                if i == 12:
                    break

    assert server.cancelled_after(leave) == 1, "the engine worked on for a client that left"
