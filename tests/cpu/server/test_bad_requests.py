"""Requests that are refused: one error that names the field, and nothing else happens."""

import json
import logging
import re
from typing import Any

import pytest

from perilune.core.errors import RequestError
from perilune.server.errors import describe
from tests.serving import CHAT, HELLO, TEXT, WEATHER, Served, serve, served

BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [1]}, "messages", "messages[0] must be an object"),
    ({}, "messages", "required"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "must be an object"),
    *(
        (
            {"messages": [{"role": role, "content": None, "tool_call_id": "functions.f:0"}]},
            "messages[0].content",
            "null",
        )
        for role in ("system", "developer", "user", "tool")
    ),
    ({"messages": [{"role": "assistant", "content": None}, *HELLO]}, "messages[0].content", "neither tool_calls nor"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content", "null"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages[0].content[0]",
        "does not see pictures",
    ),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "between"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_k": -5}, "top_k", "top_k"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"seed": "x"}, "seed", "integer"),
    ({"seed": 2**70}, "seed", "seed"),
    ({"stop": 5}, "stop", "array"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"functions": []}, "functions", "tools"),
    ({"tools": [{"type": "function"}]}, "*", "function"),
    ({"tools": {}}, "tools", "array"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "'get_weather' is that of tools[0] too"),
    ({"thinking": {"type": "sometimes"}}, "thinking", "enabled"),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, "thinking", "contradict"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "boolean"),
    ({"n": 0}, "n", "between 1"),
    ({"n": 1000}, "n", "between 1"),
    ({"n": 1.5}, "n", "integer"),
    ({"n": 128}, "n", "102 fit"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "between -2"),
    ({"presence_penalty": -3}, "presence_penalty", "between -2"),
    ({"presence_penalty": "1"}, "presence_penalty", "number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "between"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "512"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "max_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "json_schema"),
    ({"response_format": "json_object"}, "response_format", "object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "JSON schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
        "true or false",
    ),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": 5}, "guided_json", "JSON schema"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_choice": []}, "guided_choice", "list"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "list"),
    ({"guided_grammar": ["a"]}, "guided_grammar", "string"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one of them"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one of them"),
    ({"structured_outputs": {"frobnicate": 1}}, "structured_outputs.frobnicate", "json_object"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "string"),
    ({"guided_json": {"type": "object"}, "min_tokens": 5}, "min_tokens", "guided_json"),
    ({"tools": [WEATHER], "ignore_eos": True}, "ignore_eos", "tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "must be"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    *(
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": given}}, "tool_choice", why)
        for given, why in (
            (None, "mode must be"),
            ({"mode": "none", "tools": []}, "mode must be 'auto' or 'required', not 'none'"),
            ({"mode": "auto", "tools": []}, "tools must list"),
            ({"mode": "auto", "tools": [{"name": "f"}]}, "tools must list"),
            ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}, "does not declare"),
        )
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "does not declare",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "tools[0].function.strict",
        "true or false",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"max_thinking_tokens": -1}, "max_thinking_tokens", "at least 0"),
    ({"max_thinking_tokens": 5, "thinking": {"type": "disabled"}}, "max_thinking_tokens", "switched off"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens", "switched off"),
    ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens", "at least 0"),
    (
        {"max_thinking_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 6}},
        "max_thinking_tokens",
        "contradict",
    ),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", "medium"),
    ({"reasoning_effort": "low", "thinking": {"type": "disabled"}}, "thinking", "contradict"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "contradict"),
    ({"reasoning_effort": "low", "max_thinking_tokens": 5}, "reasoning_effort", "one of them"),
    ({"thinking_token_budget": 5, "max_thinking_tokens": 6}, "max_thinking_tokens", "contradict"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "one at least"),
    ({"allowed_token_ids": [5, 512]}, "allowed_token_ids", "names token 512"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids", "array"),
    ({"bad_words": [""]}, "bad_words", "characters"),
    ({"bad_words": ["x" * 65]}, "bad_words", "64 tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least 1"),
    ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, "truncation_side", "left"),
    ({"request_id": "a b"}, "request_id", "printable"),
    ({"request_id": "x" * 129}, "request_id", "128"),
]


@pytest.mark.parametrize(("change", "param", "words"), BAD_CHAT, ids=lambda v: json.dumps(v)[:50])
@served(max_waiting=98)
async def test_bad_chat_requests_are_named(s: Served, change: dict[str, Any], param: str, words: str) -> None:
    body = {"messages": HELLO, **change} if change else {}
    for stream in ({}, {"stream": True}) if "stream" not in json.dumps(change) else ({},):
        reply = await s.client.post(CHAT, {**body, **stream})
        assert reply.status == 400, reply.text
        assert words in reply.error["message"]
        assert param == "*" or reply.error["param"] == param
        assert reply.error["type"] == "invalid_request_error"
    assert s.engine.seen == []
    assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [600]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 5000}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"600": 1}}, "logit_bias"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a{20}"}, "max_tokens"),
        ({"suffix": "s"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ],
    ids=str,
)
@served()
async def test_bad_completions_are_named(s: Served, change: dict[str, Any], param: str) -> None:
    reply = await s.client.post(TEXT, {"prompt": "a", **change})
    assert reply.status == 400 and reply.error["param"] == param, reply.text
    assert s.engine.seen == []


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b'{"messages": [' + b"[" * 5000, b"[1]", b'"x"', b"null"])
@served()
async def test_bodies_that_are_no_json_object(s: Served, body: bytes) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        reply = await s.client.post(path, body)
        assert reply.status == 400 and reply.error["code"] == "invalid_json", reply.text


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HALVES = [
    (CHAT, '{"messages":[{"role":"user","content":"H"}]}', "messages[0].content"),
    (CHAT, '{"messages":[{"role":"user","content":[{"type":"text","text":"a H"}]}]}', "messages[0].content[0].text"),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"stop":["x","H"]}', "stop[1]"),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"tools":[{"function":{"parameters":{"enum":["H"]}}}]}',
     "tools[0].function.parameters.enum[0]"),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"guided_json":"{\\"const\\":\\"H\\"}"}', "guided_json.const"),
    (CHAT, '{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":{"H":1}}}]}]}',
     "messages[0].tool_calls[0].function.arguments"),
    (TEXT, '{"prompt":"H"}', "prompt"),
    (MESSAGES, '{"max_tokens":9,"messages":[{"role":"user","content":"H"}]}', "messages[0].content"),
    (RESPONSES, '{"input":[{"role":"user","content":"H"}]}', "input[0].content"),
    ("/tokenize", '{"prompt":"H"}', "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "where"), HALVES, ids=str)
@pytest.mark.parametrize("half", ["\\ud800", "\\udc00x", "x\\udfff\\ud83d"])
@served()
async def test_halves_of_characters_are_named(s: Served, path: str, body: str, where: str, half: str) -> None:
    written = half.replace("\\", "\\\\") if "guided" in body else half
    reply = await s.client.post(path, body.replace("H", written).encode())
    error = reply.json["error"]
    assert reply.status == 400 and error.get("param", where) == where
    assert f"lone surrogate {half.strip('x')[:6]} at " in error["message"]
    assert f"{where}: not Unicode text" in error["message"] and "recursion" not in error["message"]
    whole = body.replace("H", "\\ud83d\\ude00".replace("\\", "\\\\" if "guided" in body else "\\"))
    assert "surrogate" not in (await s.client.post(path, whole.encode())).text


@pytest.mark.parametrize(
    "path", [CHAT, TEXT, MESSAGES, RESPONSES, f"{RESPONSES}/input_tokens", "/tokenize", "/v1/messages/count_tokens"]
)
@pytest.mark.parametrize("depth", [201, 5_000, 100_000])
@served()
async def test_bodies_that_nest_too_deeply_are_refused_by_depth(s: Served, path: str, depth: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        text = '{"messages":' + opening * depth + "1" + closing * depth + "}"
        reply = await s.client.post(path, text.encode())
        message = reply.json["error"]["message"]
        assert reply.status == 400 and "recursion" not in message
        assert "the JSON of the body is nested deeper than 200 levels at line 1 column " in message


@served()
async def test_schemas_that_nest_too_deeply_are_refused_by_depth(s: Served) -> None:
    for depth in (150, 100_000):
        deep = '{"items":' * depth + "{}" + "}" * depth
        reply = await s.client.post(CHAT, {"messages": HELLO, "guided_json": deep})
        assert reply.status == 400 and reply.error["param"] == "guided_json"
        assert "guided_json nests deeper than 128 levels" in reply.error["message"]


@served()
async def test_no_schema_without_an_end_gets_a_stream(s: Served) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": endless}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}
    for field in ({"response_format": format}, {"tools": [tool]}, {"guided_json": endless}):
        reply = await s.client.post(CHAT, {"messages": HELLO, "stream": True, **field})
        assert reply.status == 400 and "# -> #/properties/a -> #" in reply.error["message"]
        assert reply.error["code"] == "unsupported_schema"
    assert s.engine.seen == []


@served()
async def test_a_long_string_is_refused_by_what_it_takes(s: Served) -> None:
    for least, status in ((200, 200), (400, 400)):  # one byte is one token here
        body = {"messages": HELLO, "max_tokens": 300, "guided_json": {"type": "string", "minLength": least}}
        reply = await s.client.post(CHAT, {**body, "thinking": {"type": "disabled"}})
        assert reply.status == status, reply.text
    assert "needs at least 403" in reply.error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_that_can_be_expected_is_one_line(path: str, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    body: dict[str, Any] = {TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}.get(path, {"messages": HELLO})
    if path == MESSAGES:
        body["max_tokens"] = 50

    async def test(s: Served) -> None:
        s.engine.answer, s.engine.fail_at = "abcdef", 3
        reply = await s.client.post(path, {**body, "stream": stream})
        assert "logits are not finite" in reply.text and (stream or reply.status == 500)
        for bad in (b"{", b'{"messages":"\\ud800"}', b"[" * 500):
            assert (await s.client.post(path, bad)).status == 400

    with caplog.at_level(logging.DEBUG):
        serve(test)
    said = [r for r in caplog.records if r.levelno > logging.INFO]
    assert [r.levelname for r in said] == ["WARNING"], caplog.text
    assert "logits are not finite" in said[0].getMessage() and "\n" not in said[0].getMessage()
    assert not any(r.exc_info for r in caplog.records) and "Traceback" not in caplog.text


def test_a_bug_in_a_stream_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        async def broken(*args: Any) -> Any:
            raise ZeroDivisionError("a bug")
            yield

        s.engine.generate = broken  # type: ignore[method-assign]
        reply = await s.client.post(CHAT, {"messages": HELLO, "stream": True})
        assert "internal error" in reply.text and "a bug" not in reply.text

    serve(test)
    (record,) = (r for r in caplog.records if r.exc_info)
    assert "a stream of /v1/chat/completions failed" in record.getMessage() and "ZeroDivisionError" in caplog.text


@served()
async def test_prompts_beyond_the_context(s: Served) -> None:
    long = "x" * 600
    for path, body, param in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (TEXT, {"prompt": long}, "prompt"),
        (TEXT, {"prompt": ["a", [120] * 600]}, "prompt"),
        (TEXT, {"prompt": [[97], [120] * 600], "stream": True}, "prompt"),
    ):
        reply = await s.client.post(path, body)
        assert reply.status == 400 and reply.error["param"] == param
    body = {"messages": [{"role": "user", "content": long}]}
    error = (await s.client.post(CHAT, body)).error
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    count = (await s.client.post("/tokenize", body)).json["count"]
    assert str(count) in error["message"] and "512" in error["message"]


@pytest.mark.parametrize("size", [600, 100_000])
@served()
async def test_agents_recognise_a_prompt_beyond_the_context(s: Served, size: int) -> None:
    """So that they shorten the conversation and go on."""
    claude_code = r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
    litellm, opencode = (
        r"(?i)this model's maximum context length is 512 tokens",
        r"(?i)maximum context length is \d+ tokens",
    )
    question = [{"role": "user", "content": "x" * size}]
    for path, body in (
        (CHAT, {"messages": question}),
        ("/v1/responses", {"input": question}),
        ("/v1/messages", {"messages": question, "max_tokens": 100}),
    ):
        reply = await s.client.post(path, body)
        assert reply.status == 400
        message = reply.json["error"]["message"]
        found = re.search(claude_code, message)
        assert found and int(found[1]) > int(found[2]) == 511, message
        assert re.search(litellm, message) and re.search(opencode, message)
        assert path.startswith("/v1/messages") or reply.json["error"]["code"] == "context_length_exceeded"


@served(max_body_mb=1)
async def test_large_bodies_are_refused(s: Served) -> None:
    pieces = [b" " * 400_000] * 3
    reply = await s.client.request("POST", CHAT, pieces)
    assert reply.status == 413 and reply.error["code"] == "body_too_large"
    s.client.headers = {"content-length": "2000000"}
    assert (await s.client.request("POST", CHAT, [])).status == 413
    s.client.headers = {}
    assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200


@served()
async def test_unknown_model_route_and_method(s: Served) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        reply = await s.client.post(path, {**body, "model": "gpt-4"})
        assert reply.status == 404 and reply.error["code"] == "model_not_found" and "'m'" in reply.error["message"]
        assert (await s.client.post(path, {**body, "model": "m"})).status == 200
    assert (await s.client.get("/v1/nothing")).status == 404
    assert "/v1/nothing" in (await s.client.get("/v1/nothing")).error["message"]
    reply = await s.client.get(CHAT)
    assert reply.status == 405 and reply.error["message"] and reply.headers["allow"] == "POST"


@served(vendor_strict=True)
async def test_strict_servers_refuse_what_the_vendor_does(s: Served) -> None:
    for fields in (
        {"top_p": 0.9},
        {"temperature": 0.7},
        {"temperature": 0.6},  # that of the other mode
        {"temperature": 1.0, "thinking": {"type": "disabled"}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"n": 2},
    ):
        reply = await s.client.post(CHAT, {"messages": HELLO, **fields})
        name = next(iter(fields))
        assert reply.status == 400 and reply.error["param"] == name and name in reply.error["message"]
    for fields in (
        {},
        {"top_p": 0.95, "temperature": 1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"temperature": 0.6, "thinking": {"type": "disabled"}},
    ):
        assert (await s.client.post(CHAT, {"messages": HELLO, **fields})).status == 200
    assert (await s.client.post(TEXT, {"prompt": "a", "temperature": 0.3})).status == 200


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("size", [10, 1_100_000])
@served()
async def test_bodies_with_a_byte_order_mark_are_refused_by_it(s: Served, coding: str, size: int) -> None:
    text = json.dumps({"messages": HELLO, "user": "x" * size})
    reply = await s.client.post(CHAT, text.encode(coding))
    assert reply.status == 400 and "begins with a byte order mark" in reply.error["message"]


@served()
async def test_a_long_method_is_not_repeated(s: Served) -> None:
    for path, status in ((CHAT, 405), ("/nowhere", 404)):
        reply = await s.client.request("A" * 3000, path, [b""])
        assert reply.status == status and len(reply.error["message"]) < 100


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"logit_bias": {"x" * 60_000: 1}}),
        (CHAT, {"structured_outputs": {"x" * 60_000: 1}}),
        (CHAT, {"priority": 10**4000}),
        (CHAT, {"logprobs": True, "top_logprobs": 10**4000}),
        (TEXT, {"logprobs": 10**4000}),
        ("/nowhere/" + "x" * 60_000, {}),
    ],
)
@served()
async def test_long_values_of_a_client_are_repeated_in_part(s: Served, path: str, more: dict[str, Any]) -> None:
    given = {"prompt": "a"} if path == TEXT else {"messages": HELLO}
    reply = await s.client.post(path, {**given, **more})
    assert reply.status in (400, 404) and len(reply.error["message"]) < 1200 and len(reply.error["param"] or "") <= 200


def test_every_message_is_bounded_and_on_one_line() -> None:
    error = describe(RequestError("x\n\ud800" * 999, param="y" * 999))[1]["error"]
    assert len(error["message"]) <= 2000 and error["message"].isprintable() and len(error["param"]) <= 200


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("guided_regex", "|".join(f"x{i}" for i in range(15_000))),
        ("guided_grammar", "root ::= " + " | ".join(f'"x{i}"' for i in range(15_000))),
        ("guided_choice", ["a" * 40_000, "b" * 40_000]),
    ],
)
@served()
async def test_grammars_are_bounded_before_they_are_compiled(s: Served, field: str, asked: object) -> None:
    reply = await s.client.post(CHAT, {"messages": HELLO, field: asked})
    assert reply.status == 400 and reply.error["param"] == field
    assert "characters, at most 65536 can be enforced: make it shorter" in reply.error["message"]
    tool = {
        "type": "custom",
        "name": "f",
        "format": {"type": "grammar", "syntax": "lark", "definition": "x" * 70_000},
    }
    reply = await s.client.post(RESPONSES, {"input": "Hi", "tools": [tool]})
    assert reply.status == 400 and reply.error["param"].startswith("tools[0].format")


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "string", "pattern": f"^({'ab|' * 3_000}c)$"}, "one of its patterns has 9005 "),
        (
            {"properties": {"a": {"patternProperties": {f"^({'ab|' * 3_000}c)$": True}}}},
            "one of its patterns has 9005 ",
        ),
        ({"propertyNames": {"pattern": f"^({'ab|' * 3_000}c)$"}}, "one of its patterns has 9005 "),
        (
            {"properties": {f"p{i}": {"pattern": f"^({'ab|' * 2_000}c)$"} for i in range(12)}},
            "the text of all its patterns has 66055 ",
        ),
    ],
)
@served()
async def test_patterns_are_bounded_before_they_are_compiled(s: Served, schema: dict[str, object], what: str) -> None:
    reply = await s.client.post(CHAT, {"messages": HELLO, "guided_json": schema})
    assert reply.status == 400 and reply.error["param"] == "guided_json"
    assert what in reply.error["message"] and reply.error["code"] == "unsupported_schema"
