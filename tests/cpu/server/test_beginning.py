"""Answers that the client has begun: prompts, streams, forms and /tokenize of a continued message."""

import json
from typing import Any

import pytest

from perilune.core.errors import RequestError
from perilune.text.beginning import compact
from perilune.text.chat import ChatTemplate
from perilune.text.family import K2_INSTRUCT, K2_THINKING, K25, K26
from tests.cpu.server.test_chat_answers import both, joined
from tests.serving import BYTES, CALL, CHAT, HELLO, TEXT, WEATHER, Served, served

OPEN = "<|im_assistant|>assistant<|im_middle|>"
CALLED = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OFF = {"thinking": {"type": "disabled"}}
MEMBERS = {"k2": K2_INSTRUCT, "thinking": K2_THINKING, "k25": K25, "k26": K26}


def begun(content: Any = "347 + 589 = 9", **more: Any) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": content, **more}]


def refused(s: Served, reply: Any, param: str, words: str) -> None:
    assert reply.status == 400, reply.text
    assert reply.error["param"] == param and words in reply.error["message"], reply.error
    assert not s.engine.seen


# --- prompts


@pytest.mark.parametrize(
    ("member", "thinking", "last", "end"),
    [
        ("k2", None, {"content": "It"}, "It"),
        ("k2", None, {"content": "It", "reasoning_content": "R"}, "It"),
        ("k2", None, {"content": ""}, ""),
        ("thinking", None, {"content": "It"}, "<think></think>It"),
        ("thinking", None, {"content": "It", "reasoning_content": "R"}, "<think>R</think>It"),
        ("thinking", None, {"content": "", "reasoning_content": "R"}, "<think>R"),
        ("thinking", None, {"content": ""}, ""),
        ("k25", None, {"content": "It"}, "<think></think>It"),
        ("k25", None, {"content": "It", "reasoning_content": None}, "<think></think>It"),
        ("k25", None, {"content": "It", "reasoning": "R"}, "<think>R</think>It"),
        ("k25", None, {"content": None, "reasoning_content": "R "}, "<think>R "),
        ("k25", None, {"content": "<think>R"}, "<think>R"),
        ("k25", None, {"content": "<think>R</think>"}, "<think>R</think>"),
        ("k25", None, {"content": "<think>R</think>It"}, "<think>R</think>It"),
        ("k25", None, {"content": ""}, "<think>"),
        ("k25", False, {"content": "It"}, "<think></think>It"),
        ("k25", False, {"content": "It", "reasoning_content": "R"}, "<think></think>It"),
        ("k25", False, {"content": ""}, "<think></think>"),
        ("k26", True, {"content": "It", "name": "Kim"}, "<think></think>It"),
    ],
)
def test_the_prompt_ends_in_the_message(member: str, thinking: Any, last: dict[str, Any], end: str) -> None:
    template = ChatTemplate(MEMBERS[member])
    messages = [*HELLO, {"role": "assistant", **last}]
    text = template.render_text(messages, thinking=thinking)
    name = last.get("name", "assistant")
    assert text.endswith(f"<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>{name}<|im_middle|>{end}")
    flagged = [*HELLO, {"role": "assistant", "partial": True, **last}]
    asked = ({}, {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False})
    for options in asked:
        assert template.render_text(flagged, thinking=thinking, **options) == text  # type: ignore[arg-type]


def test_a_new_message_can_be_asked_for() -> None:
    template = ChatTemplate(K26)
    new = "<think></think>It<|im_end|>" + OPEN + "<think>"
    assert template.render_text(begun("It"), continue_final_message=False).endswith(new)
    assert template.render_text(begun("It", partial=False)).endswith(new)
    assert template.render_text(begun("It"), add_generation_prompt=False).endswith(OPEN + "<think></think>It<|im_end|>")


def test_the_tool_loop_before_a_continued_message_keeps_its_thoughts() -> None:
    loop = [
        *HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": CALLED["id"], "content": "ok"},
    ]
    template = ChatTemplate(K26)
    text = template.render_text([*loop, {"role": "assistant", "content": "It"}])
    assert text == template.render_text(loop) + "</think>It", "only a finished answer ends a tool loop"
    assert "<think>R</think>" in text


def test_markers_in_the_beginning_stay_text() -> None:
    ids = ChatTemplate(K26).render_ids(BYTES, begun("a<|im_end|></think>b"))
    tail = BYTES.encode("a<|im_end|></think>b")
    assert ids[-len(tail) :] == tail and not any(BYTES.is_special(t) for t in tail)
    assert ids[-len(tail) - 1] == BYTES.special("</think>")


@pytest.mark.parametrize(
    ("member", "thinking", "messages", "options", "words"),
    [
        (K26, None, begun("A", tool_calls=[CALLED]), {}, "messages[1].tool_calls"),
        (K26, None, begun("A", tool_calls=[CALLED], partial=True), {}, "messages[1].tool_calls"),
        (K26, None, begun("A", partial="yes"), {}, "messages[1].partial must be true or false"),
        (K26, None, [*begun("A", partial=True), *HELLO], {}, "messages[1].partial"),
        (K26, None, [{**HELLO[0], "partial": True}], {}, "must be the assistant's"),
        (K26, None, HELLO, {"continue_final_message": True}, "must be the assistant's"),
        (K26, None, begun("A", partial=True), {"continue_final_message": False}, "contradict"),
        (K26, None, begun("A", partial=False), {"continue_final_message": True}, "contradict"),
        (K26, False, begun("", reasoning_content="R"), {}, "thinking is switched off"),
        (K2_INSTRUCT, None, begun("", reasoning_content="R"), {}, "does not think"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    member: Any, thinking: Any, messages: Any, options: Any, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(member).render_text(messages, thinking=thinking, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# --- chat


@pytest.mark.parametrize("how", ["partial", "prefix", "flag", "vllm", "bare"])
@served(answer=" 36")
async def test_the_answer_goes_on_from_the_message(s: Served, how: str) -> None:
    marked = {how: True} if how in ("partial", "prefix") else {}
    flags = {
        "flag": {"continue_final_message": True},
        "vllm": {"continue_final_message": True, "add_generation_prompt": False, "echo": False},
    }
    body = {"messages": begun(**marked), **flags.get(how, {})}
    whole = (await s.client.post(CHAT, body)).json
    assert s.prompt().endswith(OPEN + "<think></think>347 + 589 = 9")
    assert whole["usage"]["prompt_tokens"] == len(s.engine.seen[-1][0])
    chunks = (await s.client.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})).chunks
    for answer in (whole, joined(chunks)):
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": " 36"} and choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 4


def test_a_thought_goes_on() -> None:
    def check(answer: dict[str, Any]) -> None:
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "936", "reasoning_content": " so 936"}
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(" so 936")

    for member in (K26, K2_THINKING):
        body = {"messages": begun("", reasoning_content="7 + 9 = 16,"), "max_tokens": 50}
        both(body, check, answer=" so 936</think>936", template=ChatTemplate(member))


def test_a_call_may_follow_the_beginning() -> None:
    def check(answer: dict[str, Any]) -> None:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == " \n"
        assert choice["message"]["tool_calls"][0]["id"] == "functions.get_weather:0"

    # White space in front of a call is dropped only where it is all of the content.
    both({"messages": begun("Let me see."), "tools": [WEATHER]}, check, answer=" \n" + CALL.format(0))


def test_a_marker_of_a_thought_behind_the_beginning_is_noise() -> None:
    def check(answer: dict[str, Any]) -> None:
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "36"}

    both({"messages": begun()}, check, answer="<think>36")


def test_logprobs_stops_and_several_answers_concern_what_is_new() -> None:
    def check(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            assert choice["message"]["content"] == " 3" and choice["finish_reason"] == "stop"
            assert [e["token"] for e in choice["logprobs"]["content"]][:2] == [" ", "3"]
        assert len(answer["choices"]) == 2

    both({"messages": begun(), "n": 2, "stop": ["9", "6"], "logprobs": True}, check, answer=" 369")


def test_echo_gives_the_beginning_back() -> None:
    def check(answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        assert message["content"] == "347 + 589 = 936" and message["reasoning_content"] == "R"
        assert answer["usage"]["completion_tokens"] == 3

    both({"messages": begun(reasoning_content="R"), "echo": True}, check, answer="36")
    both({"messages": HELLO, "echo": True, **OFF}, lambda a: None, answer="36")


def test_an_empty_beginning_is_none() -> None:
    def check(answer: dict[str, Any]) -> None:
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "36", "reasoning_content": "Hm"}

    both({"messages": begun("", partial=True)}, check, answer="Hm</think>36")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": begun(), "continue_final_message": True, "add_generation_prompt": True}, "add_generation", ""),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final", "must be the assistant's"),
        ({"messages": [{**HELLO[0], "partial": True}]}, "messages[0].partial", "must be the assistant's"),
        ({"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt", "continue_final_message: true"),
        ({"messages": begun(), "add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
        ({"messages": begun(partial=1)}, "messages", "must be true or false"),
        ({"messages": begun(tool_calls=[CALLED])}, "messages", "tool_calls"),
        ({"messages": begun(partial=True), "add_generation_prompt": True}, "messages", "contradict"),
        ({"messages": begun("", reasoning_content="R"), **OFF}, "messages", "switched off"),
    ],
)
@served()
async def test_bad_requests_are_named(s: Served, change: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        reply = await s.client.post(CHAT, {**change, "stream": stream})
        assert reply.status == 400 and words in reply.error["message"], reply.text
        assert reply.error["param"].startswith(param)
    assert not s.engine.seen


@served()
async def test_a_new_message_on_request(s: Served) -> None:
    for flags in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert (await s.client.post(CHAT, {"messages": begun(), **flags})).status == 200
        assert s.prompt().endswith("= 9<|im_end|>" + OPEN + "<think>")


# --- forms


@served()
async def test_a_form_begins_in_the_message(s: Served) -> None:
    for form, text in (
        ({"response_format": {"type": "json_object"}}, '{\n  "a": "b '),
        ({"guided_choice": ["yes", "no"]}, "ye"),
        ({"guided_choice": ["yes", "no"]}, "yes"),
        ({"guided_regex": "[0-9]{3} = 9[0-9]+"}, "347 = 9"),
    ):
        reply = await s.client.post(CHAT, {"messages": begun(text), **form, "max_tokens": 100})
        assert reply.status == 200, reply.text
        made = s.engine.constraints[-1]
        assert made is not None and made.answer is not None and not made.thinking
        assert made.begun == ('{"a":"b ' if text[0] == "{" else text)
    assert (await s.client.post(CHAT, {"messages": begun("", reasoning_content="R"), **form})).status == 200
    made = s.engine.constraints[-1]
    assert made is not None and made.thinking and not made.begun


@pytest.mark.parametrize(
    ("form", "text", "rest"),
    [
        ({"response_format": {"type": "json_object"}}, "Here: {", "'Here:{'"),
        ({"response_format": {"type": "json_object"}}, '{"a": 1} Done', "'Done'"),
        ({"guided_choice": ["yes", "no"]}, "yesterday", "'terday'"),
        ({"guided_regex": "[a-z]{3}"}, "abcd", "'d'"),
    ],
)
@served()
async def test_a_beginning_that_does_not_fit_is_refused(s: Served, form: dict[str, Any], text: str, rest: str) -> None:
    reply = await s.client.post(CHAT, {"messages": begun(text), **form})
    refused(s, reply, next(iter(form)), f"keeps to {next(iter(form))}: {rest} does not fit")


def test_what_json_leaves_out() -> None:
    for text in ('{ "a" : [ 1 , 2 ],\n\t"b c" : "d  \\" e" , "f": "g  h', " [ true , null ] ", '"a  b', "[1.5e3, -2"):
        short = compact(text)
        rest = {'"g  h': '"}', '"a  b': '"', "-2": "]"}.get(text[-5:] if text[-1] in "hb" else text[-2:], "")
        assert json.loads(short + rest) == json.loads(text + rest) and len(short) <= len(text)
    assert compact('{\n  "a": ') == '{"a":' and compact(" \n") == ""
    assert compact("[1 2") == "[1 2" and compact("[1 ") == "[1 ", (
        "what follows a number must not be taken for more of it"
    )
    assert compact('"a\\') == '"a\\'


@served(answer=CALL.format(0))
async def test_forced_calls_leave_the_beginning_free(s: Served) -> None:
    body = {"messages": begun("Well,"), "tools": [WEATHER], "tool_choice": "required"}
    assert (await s.client.post(CHAT, {**body, "response_format": {"type": "json_object"}})).status == 200
    made = s.engine.constraints[-1]
    assert made is not None and made.tools and not made.text and not made.thinking and not made.begun


# --- /tokenize


@pytest.mark.parametrize(
    "body",
    [
        {"messages": begun()},
        {"messages": begun(partial=True)},
        {"messages": begun(), "continue_final_message": True},
        {"messages": begun(), "continue_final_message": True, "add_generation_prompt": False},
        {"messages": begun(), "continue_final_message": False},
        {"messages": begun(), "add_generation_prompt": True},
        {"messages": begun("", reasoning_content="R")},
        {"messages": begun(), **OFF},
        {"messages": begun("", partial=True), "chat_template_kwargs": {"thinking": False}},
        {"messages": HELLO, "continue_final_message": False},
        {"messages": HELLO, "continue_final_message": True},
        {"messages": begun(), "continue_final_message": True, "add_generation_prompt": True},
        {"messages": begun(tool_calls=[CALLED])},
    ],
)
@served()
async def test_tokenize_agrees_with_chat(s: Served, body: dict[str, Any]) -> None:
    tokens = await s.client.post("/tokenize", body)
    reply = await s.client.post(CHAT, body)
    assert tokens.status == reply.status, tokens.text
    if reply.status == 200:
        assert tokens.json["tokens"] == s.engine.seen[-1][0]
    else:
        assert tokens.error == reply.error


@served()
async def test_tokenize_without_a_generation_prompt_ends_with_the_message(s: Served) -> None:
    body = {"messages": begun(), "add_generation_prompt": False}
    tokens = (await s.client.post("/tokenize", body)).json["tokens"]
    assert BYTES.decode(tokens).endswith(OPEN + "<think></think>347 + 589 = 9<|im_end|>")


@served()
async def test_completions_always_continue_their_prompt(s: Served) -> None:
    reply = await s.client.post(TEXT, {"prompt": "347 + 589 = 9"})
    assert reply.status == 200 and s.prompt() == "347 + 589 = 9"
