"""Prompts of every member of the family: golden strings and ids, and what holds for any conversation."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.core.errors import CheckpointError, RequestError
from perilune.text.chat import ChatTemplate, next_tool_index
from perilune.text.family import MEMBERS
from perilune.text.stream import ChatStream, Content, Event, Reasoning, ToolArguments, ToolStart
from perilune.text.tokenizer import AddedToken, Tokenizer
from tests.cpu.text.test_chat import ASK, OPEN, assistant, call, result, section, tool_turn, turn, user

TEMPLATES = {name: ChatTemplate(member) for name, member in MEMBERS.items()}
INSTRUCT = ["kimi-k2-instruct-first", "kimi-k2-instruct", "kimi-k2-instruct-0905"]
OPENING = ["kimi-k2.5", "kimi-k2.6", "kimi-k2.7-code"]
KIMI = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
SYSTEM = {
    "kimi-k2-instruct-first": "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>",
    # The published files leave a newline after the message that they add, and after no other.
    "kimi-k2-instruct": KIMI + "\n",
    "kimi-k2-instruct-0905": KIMI + "\n",
    "kimi-k2-thinking": KIMI,
    **dict.fromkeys(OPENING, ""),
}
ANSWER = "<|im_assistant|>assistant<|im_middle|>"
WEATHER = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Où?"}}},
        "name": "get_weather",
        "description": "Weather",
    },
}
AS_JSON = (
    '[{"function":{"description":"Weather","name":"get_weather","parameters":{"properties":{"city":'
    '{"description":"Où?","type":"string"}},"type":"object"}},"type":"function"}]'
)
AS_SENT = (
    '[{"type": "function", "function": {"parameters": {"type": "object", "properties": {"city": {"type": "string", '
    '"description": "Où?"}}}, "name": "get_weather", "description": "Weather"}}]'
)
AS_TYPESCRIPT = (
    "# Tools\n\n## functions\nnamespace functions {\n// Weather\ntype get_weather = (_: {\n  // Où?\n"
    "  city?: string\n}) => any;\n}\n"
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_members_prompt(name: str) -> None:
    template = TEMPLATES[name]
    thought = "<think>" if name in OPENING else ""
    assert template.render_text([user()]) == SYSTEM[name] + ASK + ANSWER + thought
    assert template.render_text([user()], add_generation_prompt=False) == SYSTEM[name] + ASK
    for role in ("system", "developer"):
        own = template.render_text([{"role": role, "content": "S"}, user()])
        assert own == "<|im_system|>system<|im_middle|>S<|im_end|>" + ASK + ANSWER + thought
    # Only the first message counts.
    late = template.render_text([user(), {"role": "system", "content": "S"}])
    assert late.startswith(SYSTEM[name] + ASK + "<|im_system|>system<|im_middle|>S<|im_end|>")
    declared = AS_TYPESCRIPT if name in OPENING else AS_SENT if name == "kimi-k2-instruct-first" else AS_JSON
    assert template.render_text([user()], tools=[WEATHER]) == (
        f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|>{SYSTEM[name]}{ASK}{ANSWER}{thought}"
    )


def test_the_newline_after_an_added_system_message_is_a_token(kimi: Tokenizer) -> None:
    ids = TEMPLATES["kimi-k2-instruct"].render_ids(kimi, [user("Hi")])
    hello = [163587, 2482, 163601, 18699, 163586, 163588, 69702, 163601]
    assert ids[:3] == [163594, 14062, 163601] and ids[-11:] == [13, 163586, 198, *hello]
    assert 198 not in TEMPLATES["kimi-k2-thinking"].render_ids(kimi, [user("Hi")])
    own = [{"role": "system", "content": "S"}, user("Hi")]
    assert 198 not in TEMPLATES["kimi-k2-instruct"].render_ids(kimi, own)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_members_history(name: str) -> None:
    messages = [
        user(),
        assistant("C1", "T1", [call("functions.f:0")]),
        result("functions.f:0"),
        assistant("A1", "T2"),
        user(),
        assistant("C2", "T3", [call("functions.f:1")]),
        result("functions.f:1", name="f"),
    ]
    thoughts = {"kimi-k2.7-code": ("T1", "T2", "T3")}.get(name, ("", "", "T3"))
    one, two, three = ("", "", "") if name in INSTRUCT else (f"<think>{thought}</think>" for thought in thoughts)
    assert TEMPLATES[name].render_text(messages, add_generation_prompt=False) == (
        SYSTEM[name]
        + ASK
        + turn(f"{one}C1{section(('functions.f:0', '{}'))}")
        + tool_turn("functions.f:0")
        + turn(f"{two}A1")
        + ASK
        + turn(f"{three}C2{section(('functions.f:1', '{}'))}")
        + tool_turn("functions.f:1", name="f")
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_prompt_ends_where_the_answer_begins(name: str) -> None:  # failure mode 5
    template = TEMPLATES[name]
    calls = [call("functions.f:0")]
    called = assistant("", "T", calls)
    ends: list[list[Any]] = [[], [assistant("A", "T")], [called], [called, result("functions.f:0")]]
    for end in ends:
        for tools in (None, [WEATHER]):
            prompt = template.render_text([user(), *end], tools=tools, continue_final_message=False)
            assert prompt.endswith(ANSWER + ("<think>" if name in OPENING else "")), end
            assert prompt.count(ANSWER) == 1 + sum(m["role"] == "assistant" for m in end)


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_that_is_empty_is_no_text(name: str) -> None:  # failure mode 6
    template = TEMPLATES[name]
    calls = [call("functions.f:0", arguments='{"a": 1}')]
    written = {
        template.render_text(
            [user(empty or ""), assistant(empty, None, calls), result("functions.f:0", empty or ""), user()]
        )
        for empty in ("", None, [], [{"type": "text", "text": ""}])
    }
    (prompt,) = written
    assert "'type'" not in prompt and '"type"' not in prompt and "None" not in prompt and "null" not in prompt
    assert f"<|im_user|>user<|im_middle|><|im_end|>{ANSWER}" in prompt


def test_thinking_members_reference_ids(kimi: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        user("Who are you?"),
        assistant("I", "dropped"),
    ]
    ids = TEMPLATES["kimi-k2-thinking"].render_ids(kimi, messages, add_generation_prompt=False)
    expected = [163594, 14062, 163601, 3900, 554, 261, 13205, 26626, 13, 163586, 163587, 2482, 163601, 24328, 554, 398]
    expected += [30, 163586, 163588, 69702, 163601, 163606, 163607]
    assert ids == [*expected, *kimi.encode("I"), 163586]


def test_members_that_do_not_think_need_no_think_tokens(kimi: Tokenizer) -> None:
    # K2-Instruct's vocabulary has reserved slots there.
    added = {id: AddedToken(kimi.token_text(id), False) for id in range(163584, 163602)}
    ranks = {kimi.token_bytes(id): id for id in range(163584)}
    bare = Tokenizer(ranks, added)
    messages = [user(), assistant("<think>plain text here</think>A", "T"), user()]
    for name in INSTRUCT:
        template = TEMPLATES[name]
        assert bare.decode(template.render_ids(bare, messages)) == (
            SYSTEM[name] + ASK + turn("<think>plain text here</think>A") + ASK + ANSWER
        )
    with pytest.raises(CheckpointError, match="no control token '<think>'"):
        TEMPLATES["kimi-k2-thinking"].render_ids(bare, messages)


def test_what_members_can_be_asked() -> None:
    asked = (None, True, False)
    for name in ("kimi-k2.5", "kimi-k2.6"):
        assert [TEMPLATES[name].thinks(a) for a in asked] == [True, True, False]
        assert [TEMPLATES[name].opens_thought(t) for t in (True, False)] == [True, False]
        assert TEMPLATES[name].render_text([user()], thinking=False).endswith(ANSWER + "<think></think>")
    for name, opens in (("kimi-k2-thinking", False), ("kimi-k2.7-code", True)):
        template = TEMPLATES[name]
        assert [template.thinks(a) for a in asked[:2]] == [True, True]
        assert template.opens_thought(True) is opens
        for refused in (lambda t: t.thinks(False), lambda t: t.render_text([user()], thinking=False)):
            with pytest.raises(RequestError, match=f"thinking cannot be disabled: {name} always thinks") as caught:
                refused(template)
            assert caught.value.param == "thinking" and caught.value.status == 400
    for name in INSTRUCT:
        template = TEMPLATES[name]
        assert [template.thinks(a) for a in (None, False)] == [False, False] and not template.opens_thought(True)
        with pytest.raises(RequestError, match=f"thinking cannot be enabled: {name} does not think"):
            template.thinks(True)


def test_preserved_thinking() -> None:
    assert [TEMPLATES["kimi-k2.6"].preserves(a) for a in (None, True, False)] == [False, True, False]
    assert [TEMPLATES["kimi-k2.7-code"].preserves(a) for a in (None, True, False)] == [True, True, True]
    messages = [user(), assistant("A", "T"), user()]
    kept, dropped = (f"{ASK}{turn(f'<think>{thought}</think>A')}{ASK}{OPEN}" for thought in ("T", ""))
    for asked, text in ((None, dropped), (False, dropped), (True, kept)):
        assert TEMPLATES["kimi-k2.6"].render_text(messages, preserve_thinking=asked) == text
        assert TEMPLATES["kimi-k2.7-code"].render_text(messages, preserve_thinking=asked) == kept
    assert TEMPLATES["kimi-k2.5"].render_text(messages) == dropped
    for name in (*INSTRUCT, "kimi-k2-thinking", "kimi-k2.5"):
        assert TEMPLATES[name].preserves(False) is False
        with pytest.raises(RequestError, match=f"{name} was not made to keep") as caught:
            TEMPLATES[name].render_text(messages, preserve_thinking=True)
        assert caught.value.param == "preserve_thinking"


def test_recommended_sampling() -> None:
    assert {name: t.sampling_defaults(thinking=True) for name, t in TEMPLATES.items() if name not in INSTRUCT} == {
        "kimi-k2-thinking": (1.0, 1.0),
        **dict.fromkeys(OPENING, (1.0, 0.95)),
    }
    assert {t.sampling_defaults(thinking=False) for n, t in TEMPLATES.items() if n in OPENING[:2]} == {(0.6, 0.95)}
    assert {TEMPLATES[name].sampling_defaults(thinking=False) for name in INSTRUCT} == {(0.6, 1.0)}


# --- properties ---------------------------------------------------------------------------------------------------

NASTY = st.lists(
    st.sampled_from(
        [
            *("<|im_end|>", "<|im_user|>", "<|im_system|>", "<|im_middle|>", "<|im_assistant|>", "<think>", "</think>"),
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "[EOS]", "[EOT]", "[BOS]"),
            *("<|reserved_token_163608|>", "<|media_pad|>", "functions.f:0", "<|", "|>", "\n", " ", "é", "{", "\ud800"),
        ]
    )
    | st.text(max_size=4),
    min_size=1,
    max_size=5,
).map("".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(NASTY, min_size=10, max_size=10), shape=st.integers(0, 2**16))
def test_no_text_of_a_client_becomes_a_control_token(kimi: Tokenizer, texts: list[str], shape: int) -> None:
    def conversation(texts: Sequence[str]) -> tuple[list[Any], list[Any]]:
        rng, fill = random.Random(shape), iter(texts)
        a, b, c, d, e, f, g, h, i, j = (next(fill) for _ in range(10))
        turns = [
            {"role": rng.choice(["system", "user"]), "content": a, **({"name": b} if rng.random() < 0.5 else {})},
            user([{"type": "text", "text": c}, {"type": "text", "text": d}]),
            assistant(e, f, [call("id", g or "f", rng.choice([h, {h: h}])), call("functions.f:7", "f", i)]),
            result("id", j, name=b),
            assistant(a, b),
            user(c),
        ]
        tool = {"type": "function", "function": {"name": "f", "description": d, "parameters": {"title": e}}}
        return turns[: rng.randint(1, len(turns))], [tool]

    harmless = ["x"] * 10
    for template in TEMPLATES.values():
        rendered = []
        for words in (texts, harmless):
            messages, tools = conversation(words)
            ids = template.render_ids(kimi, messages, tools=tools, continue_final_message=False)
            rendered.append([id for id in ids if kimi.is_special(id)])
        assert rendered[0] == rendered[1]


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """What a client keeps of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for e in events:
        match e:
            case Reasoning(text):
                message["reasoning_content"] += text
            case Content(text):
                message["content"] += text
            case ToolStart(_, id, name):
                calls.append(call(id, name, ""))
            case ToolArguments(index, text):
                calls[index]["function"]["arguments"] += text
    return {**message, "tool_calls": calls} if calls else message


ModeOptions = dict[str, Any]
MODES: list[tuple[str, ModeOptions]] = [
    *((name, {}) for name in TEMPLATES),
    ("kimi-k2.5", {"thinking": False}),
    ("kimi-k2.6", {"thinking": False}),
    ("kimi-k2.6", {"preserve_thinking": True}),
]


@pytest.mark.parametrize(("name", "options"), MODES)
def test_a_prompt_and_its_answer_begin_the_next_prompt_of_a_tool_loop(
    kimi: Tokenizer, name: str, options: ModeOptions
) -> None:
    """What the prefix cache lives on. Where reasoning is dropped the chain breaks, but only at a final answer."""
    template, rng = TEMPLATES[name], random.Random(5)
    thinking = template.thinks(options.get("thinking"))
    messages = [{"role": "system", "content": "S"}, user("What is it like?")]
    for round in range(6):
        tools = [WEATHER]
        prompt = template.render_ids(kimi, messages, tools=tools, **options)
        first = next_tool_index(messages)
        answer: list[int] = []
        if thinking:
            opening = [] if template.opens_thought(thinking) else [kimi.special("<think>")]
            answer += [*opening, *kimi.encode(f"Hm, {round}.\n\nWell"), kimi.special("</think>")]
        final = round == 3
        answer += kimi.encode(rng.choice(["", "I look.\n", "再看 "]) + ("It rains." if final else ""))
        if not final:
            answer.append(kimi.special("<|tool_calls_section_begin|>"))
            for k in range(rng.randint(1, 3)):
                head, tail = kimi.encode(f"functions.get_weather:{first + k}"), kimi.encode('{"city": "北京"}')
                answer += [kimi.special("<|tool_call_begin|>"), *head]
                answer += [kimi.special("<|tool_call_argument_begin|>"), *tail, kimi.special("<|tool_call_end|>")]
            answer.append(kimi.special("<|tool_calls_section_end|>"))
        answer.append(kimi.special("<|im_end|>"))

        inside = template.opens_thought(thinking)
        stream = ChatStream(kimi, thinking=inside, tools=tools, first_tool_index=first)
        message = message_of([*stream.feed(answer), *stream.finish()])
        assert bool(message["reasoning_content"]) is thinking and ("tool_calls" in message) is not final
        assert not final or message["content"].endswith("It rains.")
        messages.append(message)
        messages += [user("And then?")] if final else [result(c["id"], "rain") for c in message["tool_calls"]]
        following = template.render_ids(kimi, messages, tools=tools, **options)
        keeps = not final or not thinking or template.preserves(options.get("preserve_thinking"))
        assert (following[: len(prompt) + len(answer)] == prompt + answer) is keeps
