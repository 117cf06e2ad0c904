"""POST /v1/responses/input_tokens: the tokens of a prompt, counted as the same request to /v1/responses has them."""

from typing import Any

import openai
import pytest

from tests.cpu.server.test_background import sdk
from tests.cpu.server.test_description import check, operation
from tests.serving import CALL, WEATHER, Served, served

PATH = "/v1/responses"
COUNT = f"{PATH}/input_tokens"
TOOL = {"type": "function", **WEATHER["function"]}
CUSTOM = {"type": "custom", "name": "shell", "description": "Runs a command"}


@pytest.mark.parametrize(
    "asked",
    [
        {"input": "Hi"},
        {"input": "Hi", "instructions": "Be brief.", "model": "m"},
        {"input": [{"role": "developer", "content": "D"}, {"role": "user", "content": "Hi"}], "tools": [TOOL]},
        {"input": "Hi", "tools": [TOOL, CUSTOM], "tool_choice": "none"},
        {"input": "Hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
        {"input": "Hi", "tools": [CUSTOM], "parallel_tool_calls": False},
        {"input": "Hi", "reasoning": {"effort": "none"}},
        {"input": "Hi", "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled"},
        {"input": "Hi", "text": {"format": {"type": "json_object"}}},
        {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]},
        {"input": "Hi", "max_output_tokens": 7, "temperature": 0.5, "stream": False, "store": False, "metadata": {}},
    ],
)
@served()
async def test_a_count_is_what_the_same_request_has(s: Served, asked: dict[str, Any]) -> None:
    counted = await s.client.post(COUNT, asked)
    assert counted.status == 200 and not s.engine.seen, counted.text
    check(counted.json, operation("POST", COUNT))
    made = await s.client.post(PATH, asked)
    assert made.status == 200, made.text
    tokens = made.json["usage"]["input_tokens"]
    assert counted.json == {"object": "response.input_tokens", "input_tokens": tokens}
    assert tokens == len(s.engine.seen[0][0])


@served(answer=CALL.format(0))
async def test_a_conversation_so_far_is_counted(s: Served) -> None:
    asked = {"input": "Weather?", "tools": [TOOL]}
    first = (await s.client.post(PATH, asked)).json
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sun"}
    more = {"input": [result], "tools": [TOOL], "previous_response_id": first["id"]}
    counted = (await s.client.post(COUNT, more)).json["input_tokens"]
    second = (await s.client.post(PATH, more)).json
    assert counted == second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    # Without input: the conversation with its last answer, and the beginning of the next one.
    alone = await s.client.post(COUNT, {"tools": [TOOL], "previous_response_id": second["id"]})
    assert alone.json["input_tokens"] > counted
    said = await s.client.post(COUNT, {"tools": [TOOL], "previous_response_id": second["id"], "input": "And now?"})
    assert said.json["input_tokens"] > alone.json["input_tokens"]
    system = (await s.client.post(COUNT, {"instructions": "Be brief."})).json["input_tokens"]
    both = (await s.client.post(COUNT, {"instructions": "Be brief.", "input": "Hi"})).json["input_tokens"]
    assert 0 < system < both
    assert len(s.engine.seen) == 2, "a count generates nothing"


@served()
async def test_a_prompt_beyond_the_context_is_counted(s: Served) -> None:
    assert (await s.client.post(COUNT, {"input": "x" * 600})).json["input_tokens"] > 600
    assert (await s.client.post(PATH, {"input": "x" * 600})).error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({}, "input", "or instructions, or previous_response_id"),
        ({"input": None, "instructions": ""}, "input", "required"),
        ({"input": ""}, "input", "not empty"),
        ({"input": 5}, "input", "a text or a list"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "wizard"),
        ({"input": "Hi", "model": "other"}, "model", "not served"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"input": "Hi", "truncation": "auto"}, "truncation", "auto"),
        ({"input": "Hi", "personality": "friendly"}, "personality", "instructions"),
        ({"input": "Hi", "prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"input": "Hi", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"input": "Hi", "inptu": 5}, "inptu", "input"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"input": "Hi", "previous_response_id": "resp_x"}, "previous_response_id", "resp_x"),
    ],
)
@served()
async def test_what_cannot_be_counted_is_refused(s: Served, asked: dict[str, Any], param: str, words: str) -> None:
    reply = await s.client.post(COUNT, asked)
    assert reply.status in (400, 404) and reply.error["param"] == param and words in reply.error["message"]


@served()
async def test_the_official_sdk_counts(s: Served) -> None:
    async with sdk(s) as client:
        made = await client.responses.create(model="m", input="Hi", instructions="Be brief.")
        assert made.usage is not None
        counted = await client.responses.input_tokens.count(model="m", input="Hi", instructions="Be brief.")
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
        further = await client.responses.input_tokens.count(previous_response_id=made.id, input="And?")
        assert further.input_tokens > counted.input_tokens
        with pytest.raises(openai.BadRequestError, match="conversation is not supported"):
            await client.responses.input_tokens.count(input="Hi", conversation="conv_1")
