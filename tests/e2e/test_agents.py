"""What agents need of the server, and what breaks on other servers, with answers of the scripted engine as K2.6.

The engine plays its script whatever the request enforces; forced calls, schemas and budgets of thoughts are tested with
kimi-nano (test_serve.py, test_apis.py). Whole programs run in tests/soak/agents.
"""

import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from perilune.text.tokenizer import CONTROL_SLOTS, Tokenizer
from tests.e2e.agent_client import APIS, CHAT, MESSAGES, RESPONSES, ask, body
from tests.e2e.server import HANG_SECONDS, WEATHER, Server, needs_nano
from tests.session_script import Call, Step, lines, write

MODEL = "kimi-k2.6"
RECORDED = sorted(Path(__file__).with_name("sessions").glob("*.json"))
THOUGHT = "Two cities and a file."
FILE = "".join(f'line {i}: <|im_end|> </think> "quoted" \\ {chr(0x4E00 + i)}\n' for i in range(100))
PARALLEL: tuple[Call, ...] = (
    ("get_weather", {"city": "Oslo"}),
    ("write_file", {"path": "a/ü.txt", "text": FILE}),
    ("get_weather", {"city": "São Paulo"}),
    ("nothing", "{}"),
)
TOOLS: Any = [
    WEATHER,
    {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "nothing", "parameters": {}}},
]
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
EVERY_API = pytest.mark.parametrize("api", APIS)


def control(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Control tokens that do not end an answer: those of thoughts and calls, and the others."""
    m = tokenizer.markers
    meant = {m.think_begin, m.think_end, m.section_begin, m.section_end, m.call_begin, m.argument_begin, m.call_end}
    slots = {*range(tokenizer.vocab_size - CONTROL_SLOTS, tokenizer.vocab_size)} - tokenizer.stop_ids
    return sorted(slots & meant), sorted(slots - meant)


def noisy(tokenizer: Tokenizer, line: dict[str, Any]) -> dict[str, Any]:
    """A control token without a meaning in front of every token."""
    rng, (_, others) = random.Random(1), control(tokenizer)
    return {**line, "tokens": [id for token in line["tokens"] for id in (rng.choice(others), token)]}


def soup(tokenizer: Tokenizer, line: dict[str, Any]) -> dict[str, Any]:
    """2,000 words and control tokens without any order."""
    rng, words = random.Random(2), tokenizer.encode(" some words of an answer")
    kinds = (*control(tokenizer), words, words)
    return {**line, "tokens": [rng.choice(rng.choice(kinds)) for _ in range(2000)] + line["tokens"][-1:]}


@pytest.fixture(scope="module")
def tokenizer(kimi_k26: Path) -> Tokenizer:
    return Tokenizer.from_directory(kimi_k26)


@pytest.fixture(scope="module")
def k26(kimi_k26: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Every step writes 5 tokens, as with drafts: the end of one field and the beginning of the next come at once."""

    def session(task: str, step: Step, **options: Any) -> list[dict[str, Any]]:
        return lines(tokenizer, task, [step], **options)

    weather: Call = ("get_weather", {"city": "Oslo"})
    found = [
        *session("call from inside a thought", Step(THOUGHT, "", (weather,), called_in_thought=True)),
        *session("call four tools at once", Step(THOUGHT, "I do it all.", PARALLEL)),
        *(noisy(tokenizer, line) for line in session("make some noise", Step(THOUGHT, "I do it all.", PARALLEL))),
        *(soup(tokenizer, line) for line in session("make a soup", Step("", ""), tools=False)),
        *session("go on and on", Step("The next city.", "", (weather,))),
        *session("answer in words", Step(THOUGHT, "In words."), tools=False),
    ]
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    write(script, found)
    engine = ["--script", str(script), "--answer-tokens", "4", "--width", "5"]
    command = [sys.executable, "-m", "tests.scripted_engine", *engine, "serve", str(kimi_k26), "--port", "0"]
    server = Server("--served-model-name", MODEL, command=command)
    with httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=64)) as client:
        yield client
    server.kill()
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


def arguments(calls: tuple[Call, ...]) -> list[Any]:
    return [json.loads(given) if isinstance(given, str) else given for _, given in calls]


@EVERY_API
@STREAMED
def test_a_call_begun_inside_a_thought_is_a_call(k26: httpx.Client, api: str, stream: bool) -> None:
    answer = ask(k26, api, body(api, "Please call from inside a thought.", TOOLS), stream=stream)
    assert (answer.reasoning, answer.text) == (THOUGHT, "")
    assert answer.calls == [("functions.get_weather:0", "get_weather", '{"city": "Oslo"}')]


@STREAMED
def test_sixty_four_streams_of_parallel_calls_are_whole(k26: httpx.Client, stream: bool) -> None:
    def one(i: int) -> None:
        api = APIS[i % 3]
        answer = ask(k26, api, body(api, f"{i}: Please call four tools at once.", TOOLS), stream=stream)
        assert (answer.reasoning, answer.text) == (THOUGHT, "I do it all.")
        assert [json.loads(given) for _, _, given in answer.calls] == arguments(PARALLEL)
        assert [id for id, _, _ in answer.calls] == [f"functions.{name}:{k}" for k, (name, _) in enumerate(PARALLEL)]

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(one, range(64)))


@EVERY_API
@STREAMED
def test_control_tokens_among_an_answers_tokens_change_nothing(k26: httpx.Client, api: str, stream: bool) -> None:
    clean = ask(k26, api, body(api, "Please call four tools at once.", TOOLS), stream=stream)
    noise = ask(k26, api, body(api, "Please make some noise.", TOOLS), stream=stream)
    assert (noise.reasoning, noise.text, noise.calls) == (clean.reasoning, clean.text, clean.calls)


@EVERY_API
@STREAMED
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["without", "with"])
def test_no_control_marker_ever_leaves(k26: httpx.Client, api: str, stream: bool, tools: Any) -> None:
    asked = body(api, "Please make a soup.", tools)
    reply = k26.post(api, json={**asked, "stream": stream}, timeout=HANG_SECONDS)
    assert "words" in reply.text
    assert not any(sign in reply.text for sign in ("<|", "|>", "think>", "[EOS]", "[BOS]", "[PAD]", "[UNK]"))


HISTORIES: list[dict[str, Any]] = [
    {"reasoning_content": "I look it up."},
    {"reasoning": "I look it up."},
    {"reasoning_content": "I look it up.", "reasoning": "I look it up."},
    {"reasoning_content": None},
    {"reasoning_content": "", "content": None},
    {"content": None},
    {"content": ""},
    {"content": []},
    {"content": [{"type": "text", "text": "I look."}], "reasoning_content": "I look it up."},
    {"content": "<think>I look it up.</think>I look."},
    {"reasoning_details": [{"type": "reasoning.text", "text": "I look it up.", "format": "x", "index": 0}]},
    {"reasoning_content": "I look it up.", "provider_specific_fields": {"x": 1}, "annotations": [], "refusal": None},
    {"thinking_blocks": [{"type": "thinking", "thinking": "I look it up.", "signature": "s"}], "audio": None},
]


@pytest.mark.parametrize("echoed", HISTORIES)
def test_reasoning_echoed_or_missing_in_chat_history_is_never_refused(k26: httpx.Client, echoed: Any) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "functions.get_weather:0", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "Please answer in words."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call], **echoed},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    for thinking in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled", "keep": "all"}}):
        answer = ask(k26, CHAT, {"messages": messages, "tools": TOOLS, **thinking}, stream=False)
        assert answer.text == "In words."


def test_thoughts_echoed_or_missing_in_other_apis_are_never_refused(k26: httpx.Client) -> None:
    use = {"type": "tool_use", "id": "functions.get_weather:0", "name": "get_weather", "input": {"city": "Oslo"}}
    thoughts: Any = [
        [],
        [{"type": "thinking", "thinking": "I look it up.", "signature": ""}],
        [{"type": "thinking", "thinking": "I look it up.", "signature": "EqQBCkYIARgCKkDnotours=="}],
        [{"type": "thinking", "thinking": "", "signature": ""}],
        [{"type": "redacted_thinking", "data": "EqQBCkYIARgCKkDnotours=="}],
    ]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "rain"}]}
    sizes = []
    for thought in thoughts:
        asked = body(MESSAGES, "Please answer in words.", TOOLS)
        asked["messages"] += [{"role": "assistant", "content": [*thought, use]}, {"role": "user", "content": [result]}]
        answer = ask(k26, MESSAGES, asked, stream=False)
        assert answer.text == "In words."
        sizes.append(answer.prompt_tokens)
    assert sizes[1] == sizes[2] > sizes[0] == sizes[3] == sizes[4], "a thought that is sent back is read, if it can be"
    call = {"type": "function_call", "call_id": use["id"], "name": "get_weather", "arguments": '{"city": "Oslo"}'}
    output = {"type": "function_call_output", "call_id": use["id"], "output": "rain"}
    items: Any = [
        [],
        [{"type": "reasoning", "id": "rs_1", "summary": []}],
        [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAA"}],
        [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look it up."}]}],
    ]
    for item in items:
        asked = body(RESPONSES, "Please answer in words.", TOOLS)
        asked["input"] += [*item, call, output]
        assert ask(k26, RESPONSES, asked, stream=False).text == "In words."


@EVERY_API
@pytest.mark.parametrize("id", ["call_ZlXoe32", "toolu_01A09q90qw", "a1B2c3D4e", "chatcmpl-tool-7f", "functions.x-y:9"])
def test_ids_of_other_servers_are_accepted(k26: httpx.Client, api: str, id: str) -> None:
    asked = body(api, "Please go on and on.", TOOLS)
    if api == RESPONSES:
        asked["input"] += [
            {"type": "function_call", "call_id": id, "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": id, "output": "rain"},
        ]
    elif api == MESSAGES:
        asked["messages"] += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "get_weather", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "rain"}]},
        ]
    else:
        call = {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        asked["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": "rain"},
        ]
    ((given, _, _),) = ask(k26, api, asked, stream=True).calls
    assert given == f"functions.get_weather:{10 if id.endswith(':9') else 1}"


@EVERY_API
def test_cached_tokens_are_reported(k26: httpx.Client, api: str) -> None:
    asked = body(api, f"{api} " + "one two three four " * 200 + "Please answer in words.", TOOLS)
    first, again = ask(k26, api, asked, stream=True), ask(k26, api, asked, stream=False)
    assert first.prompt_tokens == again.prompt_tokens > 800
    assert first.cached_tokens < 400 and again.cached_tokens > again.prompt_tokens - 128


def test_three_hundred_tool_turns_are_read_from_the_cache(k26: httpx.Client) -> None:
    system = "You are a careful agent. " * 300
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Please go on and on."},
    ]
    prompt = cached = 0
    for turn in range(300):
        answer = ask(k26, CHAT, {"messages": messages, "tools": TOOLS}, stream=True)
        prompt, cached = prompt + answer.prompt_tokens, cached + answer.cached_tokens
        ((id, name, given),) = answer.calls
        assert id == f"functions.get_weather:{turn}" and answer.reasoning == "The next city."
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": given}}
        messages += [
            {"role": "assistant", "content": None, "reasoning_content": answer.reasoning, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": f"{turn} degrees and rain"},
        ]
    print(f"{cached / prompt:.2%} of {prompt} prompt tokens were cached")
    assert cached / prompt >= 0.97


@pytest.mark.parametrize("path", RECORDED, ids=[p.stem for p in RECORDED])
def test_recorded_sessions_are_answered(k26: httpx.Client, path: Path) -> None:
    """Requests as programs send them that cannot be installed here."""
    session = json.loads(path.read_text())
    before = 0
    for sent in session["requests"]:
        answer = ask(k26, session["path"], sent, stream=sent["stream"])
        assert answer.prompt_tokens > before, "each request holds the one before"
        before = answer.prompt_tokens


@needs_nano
@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": {}}]
)
def test_a_tool_without_parameters_is_called_with_an_empty_object(server: Server, parameters: Any) -> None:
    function = {"name": "look"} if parameters is None else {"name": "look", "parameters": parameters}
    asked = body(CHAT, "Look.", [{"type": "function", "function": function}], tool_choice="required")
    asked |= {"parallel_tool_calls": False, "max_tokens": 60, "reasoning_effort": "none"}
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as client:
        ((_, name, given),) = ask(client, CHAT, asked, stream=True).calls
    assert name == "look" and isinstance(json.loads(given), dict)


@needs_nano
@pytest.mark.parametrize("schema", [{}, True, {"type": "object"}, {"type": "object", "properties": {}}])
def test_an_empty_schema_is_any_json(server: Server, schema: Any) -> None:
    asked = {"max_tokens": 60, "reasoning_effort": "none", "guided_json": schema, "temperature": 1.5}
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as client:
        json.loads(ask(client, CHAT, body(CHAT, "Hi", **asked), stream=False).text)
        wrongs: list[Any] = ["", "{", []]
        for wrong in wrongs:
            reply = client.post(CHAT, json={**body(CHAT, "Hi"), "guided_json": wrong})
            assert reply.status_code == 400 and "guided_json" in reply.json()["error"]["message"]
