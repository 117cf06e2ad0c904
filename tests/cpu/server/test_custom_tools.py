"""Custom tools of the Responses API: what the model sees, what it can write, and how a call comes back."""

import json
import re
from typing import Any

import pytest

from perilune.grammar.constrain import Named, constrain
from perilune.server.responses.custom import Unwrapped, arguments
from perilune.text.stream import ChatStream, ToolArguments
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import Form, Tool
from tests.cpu.grammar.test_grammar import Monkey, read
from tests.cpu.server.test_responses import told
from tests.serving import BYTES, Served, serve, served

PATH = "/v1/responses"
TEXT = {"type": "custom", "name": "code", "description": "Runs Python"}
REGEX = {
    "type": "custom",
    "name": "when",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"\d{4}-\d\d"},
}
LINES = 'start: line+\nline: WORD (" " WORD)* "\\n"\nWORD: /[a-z"{}\\\\]+/'
LARK = {"type": "custom", "name": "lines", "format": {"type": "grammar", "syntax": "lark", "definition": LINES}}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{0}:0<|tool_call_argument_begin|>"
    "{1}<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize("width", [1, 2, 50])
@pytest.mark.parametrize(
    ("tool", "written", "text"),
    [
        (TEXT, json.dumps({"input": 'print("ä\\n")\n\t# 😀'}), 'print("ä\\n")\n\t# 😀'),
        (TEXT, json.dumps({"input": "a/😀"}, ensure_ascii=False), "a/😀"),
        (TEXT, '{"input": "half \\ud83d pair"}', "half \ufffd pair"),
        (TEXT, '{"input": ""}', ""),
        (REGEX, "2026-11", "2026-11"),
        (LARK, 'ab "c\nd\n', 'ab "c\nd\n'),
    ],
    ids=str,
)
def test_a_call_comes_back_as_its_text(tool: dict[str, Any], written: str, text: str, width: int) -> None:
    async def test(s: Served) -> None:
        body = {"input": "Hi", "tools": [tool]}
        whole = (await s.client.post(PATH, body)).json
        (item,) = [i for i in whole["output"] if i["type"] == "custom_tool_call"]
        assert (item["name"], item["input"], item["status"]) == (tool["name"], text, "completed")
        assert item["id"].startswith("ctc_") and item["call_id"] == f"functions.{tool['name']}:0"
        events = told(await s.client.post(PATH, {**body, "stream": True}))
        deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
        (done,) = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == text == done["input"] and all(deltas)
        if width == 1 and len(text) > 3:
            assert len(deltas) > 3, "the text comes while it is written"
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "rain"}
        after = {"input": [result], "tools": [tool], "previous_response_id": whole["id"]}
        assert (await s.client.post(PATH, after)).status == 200
        kept = arguments(text, raw=tool is not TEXT)
        assert f"<|tool_call_argument_begin|>{kept}<|tool_call_end|>" in s.prompt() and "rain<|im_end|>" in s.prompt()
        own = {key: item[key] for key in ("type", "call_id", "name", "input")}
        question = {"role": "user", "content": "Hi"}
        assert (await s.client.post(PATH, {"input": [question, own, result], "tools": [tool]})).status == 200
        assert f"<|tool_call_argument_begin|>{kept}<|tool_call_end|>" in s.prompt()

    serve(test, answer="</think>" + CALL.format(tool["name"], written), width=width)


@served(answer="</think>Hello")
async def test_the_model_sees_a_function(s: Served) -> None:
    await s.client.post(PATH, {"input": "Hi", "tools": [TEXT, LARK]})
    assert "// Runs Python\ntype code = (_: {\n  input: string" in s.prompt()
    assert "// The call's arguments are the input itself, not JSON.\ntype lines" in s.prompt()
    constraint = s.engine.constraints[-1]
    assert constraint is not None and [name for name, _ in constraint.tools] == ["code", "lines"]
    choice = {"type": "custom", "name": "lines"}
    await s.client.post(PATH, {"input": "Hi", "tools": [TEXT, LARK], "tool_choice": choice})
    constraint = s.engine.constraints[-1]
    assert constraint is not None and [name for name, _ in constraint.tools] == ["lines"] and not constraint.text
    several = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    reply = await s.client.post(PATH, {"input": "Hi", "tools": [TEXT, LARK], "tool_choice": several})
    constraint = s.engine.constraints[-1]
    assert constraint is not None and [name for name, _ in constraint.tools] == ["lines"] and constraint.text
    assert reply.json["tool_choice"] == several and "type code" in s.prompt()


@pytest.mark.parametrize(
    ("form", "right"),
    [
        (Form("regex", "[0-9]{4}-[0-9][0-9]"), "[0-9]{4}-[0-9][0-9]"),
        (Form("lark", LINES), r'([a-z"{}\\]+( [a-z"{}\\]+)*\n)+'),
        (Form("lark", 'root ::= "yes" | "no" " "?'), r"yes|no ?"),
        (Form("lark", "start: /[^\\n]{0,20}/"), r"[^\n]{0,20}"),
    ],
)
def test_what_is_written_has_the_form(nano: Tokenizer, form: Form, right: str) -> None:
    """Every token is chosen at random among those allowed."""
    function = {"type": "function", "function": {"name": "f"}}
    tools = (Tool("f", {}, function, form), Tool("g", {"type": "object"}, function))
    constraint = constrain(nano, tools=tools, choice=Named("f"))
    assert constraint is not None
    for seed in range(4):
        monkey = Monkey(nano, seed)
        for spare in (0, 3, 40):
            ids = monkey.type(constraint, constraint.least + spare, hurry=0.3)
            _, text, calls = read(nano, ids, tools)
            assert text == "" and len(calls) == 1 and re.fullmatch(right, calls[0][2]), (ids, calls)


def test_white_space_around_raw_arguments_stays() -> None:
    tool = Tool("f", {}, {}, Form("regex", r"\s+a\s+"))
    stream = ChatStream(BYTES, thinking=False, tools=(tool,))
    ids = BYTES.encode(CALL.format("f", "\n a \n"), allow_special=True)
    events = [e for id in ids for e in stream.feed([id])] + stream.finish()
    assert "".join(e.text for e in events if isinstance(e, ToolArguments)) == "\n a \n"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"name": ""}, "tools[0].name", "not empty"),
        ({"name": "a b"}, "tools[0].name", "letters"),
        ({"format": {"type": "xml"}}, "tools[0].format.type", "'text' or 'grammar'"),
        ({"format": "text2"}, "tools[0].format.type", "'text' or 'grammar'"),
        ({"format": {"type": "grammar", "syntax": "peg"}}, "tools[0].format.syntax", "'lark' or 'regex'"),
        ({"format": {"type": "grammar", "syntax": "regex"}}, "tools[0].format.definition", "string"),
        (
            {"format": {"type": "grammar", "syntax": "regex", "definition": "("}},
            "tools[0].format",
            "cannot be enforced",
        ),
        ({"format": {"type": "grammar", "syntax": "lark", "definition": "start: b"}}, "tools[0].format", "enforced"),
    ],
)
@served()
async def test_formats_that_cannot_be_are_refused(s: Served, change: dict[str, Any], param: str, words: str) -> None:
    reply = await s.client.post(PATH, {"input": "Hi", "tools": [{**TEXT, **change}]})
    assert reply.status == 400 and reply.error["param"] == param and words in reply.error["message"], reply.error
    assert s.engine.seen == []


@served()
async def test_the_last_item_may_not_be_a_call(s: Served) -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "code", "input": "x"}
    reply = await s.client.post(PATH, {"input": [{"role": "user", "content": "a"}, call], "tools": [TEXT]})
    assert reply.error["message"] == "input[1] must be followed by its custom_tool_call_output"


@served(answer=CALL.format("code", '{"input": "print(1)"}'))
async def test_a_call_that_is_cut_off_says_so(s: Served) -> None:
    body = {"input": "Hi", "tools": [TEXT], "max_output_tokens": 35, "reasoning": {"effort": "none"}}
    response = (await s.client.post(PATH, body)).json
    assert response["status"] == "incomplete"
    assert [(i["type"], i["status"]) for i in response["output"]] == [("custom_tool_call", "incomplete")]


def test_pieces_of_escapes_wait_for_their_rest() -> None:
    whole = '{"input": "a\\u00e4\\ud83d\\ude00\\\\\\"b"}'
    for width in range(1, 8):
        unwrapped = Unwrapped()
        pieces = [unwrapped.feed(whole[at : at + width]) for at in range(0, len(whole), width)]
        assert "".join(pieces) == 'aä😀\\"b'
