"""Tools of Messages requests that are loaded in the middle of a conversation, as Claude Code does."""

from typing import Any

import pytest

from tests.serving import CALL, WEATHER, Served, served

PATH = "/v1/messages"
FUNCTION = WEATHER["function"]
WEATHER_TOOL = {"name": FUNCTION["name"], "description": "Now", "input_schema": FUNCTION["parameters"]}
LATER = {**WEATHER_TOOL, "defer_loading": True}
SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
SPARE = {"name": "spare", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True}
FOUND = {"type": "tool_reference", "tool_name": "get_weather"}
BY_NAME = {"type": "tool_reference", "name": "get_weather"}


def asked(*content: Any, **more: Any) -> dict[str, Any]:
    """A search for tools has been called; `content`: its result. Without one, the request before the call."""
    use = {"type": "tool_use", "id": "functions.ToolSearch:0", "name": "ToolSearch", "input": {"query": "weather"}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": list(content)}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}] if content else []
    messages = [{"role": "user", "content": "Is it raining?"}, *turns]
    return {"max_tokens": 300, "messages": messages, "tools": [SEARCH, LATER, SPARE], **more}


def with_system(*blocks: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Is it raining?"}, {"role": "system", "content": list(blocks)}]
    return {"max_tokens": 300, "messages": messages, "tools": [WEATHER_TOOL, SEARCH, SPARE]}


@served(answer=CALL.format(1))
async def test_a_tool_that_a_result_refers_to_is_declared_there_and_can_be_called(s: Served) -> None:
    await s.client.post(PATH, asked())
    before = s.prompt()
    assert "ToolSearch" in before and "get_weather" not in before and "spare" not in before
    reply = await s.client.post(PATH, asked({"type": "text", "text": "One tool."}, FOUND))
    assert reply.status == 200, reply.text
    head = before.partition("Is it raining?")[0]
    assert s.prompt().startswith(head), "the prefix in the cache stays what it was"
    result = s.prompt().rpartition("## Return of functions.ToolSearch:0\n")[2]
    assert result.startswith("One tool.# Tools") and "type get_weather = (_: {" in result and "// Now" in result
    assert "spare" not in s.prompt()
    (use,) = reply.json["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", {"city": "Oslo"})
    constraint = s.engine.constraints[-1]
    assert constraint is not None and constraint.tools
    counted = await s.client.post(f"{PATH}/count_tokens", asked({"type": "text", "text": "One tool."}, FOUND))
    assert counted.json["input_tokens"] == len(s.engine.seen[-1][0])


@served(answer=CALL.format(1))
async def test_a_tool_that_was_not_loaded_cannot_be_called(s: Served) -> None:
    reply = await s.client.post(PATH, {**asked(), "tool_choice": {"type": "tool", "name": "get_weather"}})
    assert reply.status == 400 and "get_weather" in reply.text
    reply = await s.client.post(PATH, {**asked(FOUND), "tool_choice": {"type": "tool", "name": "get_weather"}})
    assert reply.status == 200
    reply = await s.client.post(PATH, {**asked(FOUND), "tool_choice": {"type": "none"}})
    assert reply.status == 200 and "tool_declare" not in s.prompt()


@served()
async def test_messages_of_the_system_add_and_remove_tools(s: Served) -> None:
    text = {"type": "text", "text": "Use the tools."}
    defined = {"name": "late", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": defined}}
    known = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "spare"}}
    gone = {"type": "tool_removal", "tool": BY_NAME}
    forced = {"tool_choice": {"type": "tool", "name": "late"}}
    assert (await s.client.post(PATH, {**with_system(text, added, known), **forced})).status == 200
    last = s.prompt().rpartition("<|im_system|>")[2]
    assert last.startswith("system<|im_middle|>Use the tools.# Tools") and "type late = " in last
    assert "type spare = " in last
    assert (await s.client.post(PATH, with_system(text, gone))).status == 200
    assert "type get_weather = " in s.prompt(), "declared at the head, which stays in the cache"
    assert "The tool get_weather is no longer available." in s.prompt()
    forced = {"tool_choice": {"type": "tool", "name": "get_weather"}}
    assert (await s.client.post(PATH, {**with_system(text, gone), **forced})).status == 400
    back = {"type": "tool_addition", "tool": BY_NAME}
    assert (await s.client.post(PATH, {**with_system(gone, back), **forced})).status == 200


@pytest.mark.parametrize(
    "body, words",
    [
        (
            asked({"type": "tool_reference", "tool_name": "other"}),
            ["messages[2].content[0].content[0].tool_name", "'other'"],
        ),
        (asked({"type": "tool_reference"}), ["messages[2].content[0].content[0].tool_name"]),
        (with_system({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "other"}}), ["'other'"]),
        (with_system({"type": "tool_removal"}), ["messages[1].content[0].tool"]),
        (
            with_system({"type": "tool_addition", "tool": {"type": "tool_reference"}}),
            ["messages[1].content[0].tool.name"],
        ),
        (
            with_system({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "x"}}}),
            ["messages[1].content[0].tool.definition.input_schema"],
        ),
        ({**asked(), "tools": [SEARCH, {"name": "no schema", "defer_loading": True}]}, ["tools[1].input_schema"]),
    ],
)
@served()
async def test_references_that_lead_nowhere_are_one_clear_error(
    s: Served, body: dict[str, Any], words: list[str]
) -> None:
    reply = await s.client.post(PATH, body)
    assert reply.status == 400, reply.text
    message = reply.json["error"]["message"]
    assert all(word in message for word in words), message


@served()
async def test_a_tool_is_declared_once_however_often_it_is_referred_to(s: Served) -> None:
    """References are short and a declaration may be long: the prompt must not grow by their product."""
    long = {**LATER, "description": "x" * 2000}
    body = {**asked(*[FOUND] * 1000), "tools": [SEARCH, long]}
    body["messages"] = [*body["messages"], *body["messages"][1:] * 50]
    reply = await s.client.post(f"{PATH}/count_tokens", body)
    assert reply.status == 200 and reply.json["input_tokens"] < 20_000


@served()
async def test_conversations_of_claude_code_share_their_system_prompt(s: Served) -> None:
    heads = []
    for version in ("2.1.330.d78", "2.1.330.a01"):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli;"}
        system = [billing, {"type": "text", "text": "You are an agent."}]
        reply = await s.client.post(PATH, {**asked(), "system": system})
        assert reply.status == 200
        heads.append(s.prompt())
    assert heads[0] == heads[1] and "system<|im_middle|>You are an agent.<|im_end|>" in heads[0]
