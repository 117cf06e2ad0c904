"""Chat completions: one answer or several, whole or streamed, around an engine that says what it is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perilune.core.config import ServerConfig
from perilune.core.errors import ConfigError
from perilune.text.chat import template_for
from tests.serving import BYTES, CALL, CHAT, HELLO, TEXT, WEATHER, Served, serve, served


def both(body: dict[str, Any], check: Callable[[dict[str, Any]], None], **setup: Any) -> None:
    """Checks a chat answer taken whole, and the same answer put together from its stream."""

    async def test(s: Served) -> None:
        whole = await s.client.post(CHAT, body)
        assert whole.status == 200, whole.text
        check(whole.json)
        stream = await s.client.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
        check(joined(stream.chunks))

    serve(test, **setup)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """What an OpenAI client makes of a chat stream."""
    assert chunks[-1]["choices"] == [] and all(c["usage"] is None for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    parts: dict[int, list[dict[str, Any]]] = {}
    for c in chunks[:-1]:
        (choice,) = c["choices"]
        parts.setdefault(choice["index"], []).append(choice)
    assert sorted(parts) == list(range(len(parts)))
    return {"choices": [joined_choice(i, parts[i]) for i in sorted(parts)], "usage": chunks[-1]["usage"]}


def joined_choice(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    finish = None
    for choice in parts[1:]:
        assert finish is None, "a chunk followed the one with finish_reason"
        finish = choice["finish_reason"]
        logprobs += (choice.get("logprobs") or {"content": []})["content"]
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({k: v for k, v in part.items() if k != "index"})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {
        "index": index,
        "message": message,
        "finish_reason": finish,
        "logprobs": {"content": logprobs} if logprobs else None,
    }


@pytest.mark.parametrize("width", [1, 4])
def test_chat_keeps_reasoning_apart_and_reports_usage(width: int) -> None:
    def check(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Grüße", "reasoning_content": "Let me see"}
        assert choice["finish_reason"] == "stop"
        usage = answer["usage"]
        assert usage["completion_tokens"] == len("Let me see") + 1 + len("Grüße".encode()) + 1
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
        assert usage["prompt_tokens"] == len("Hi") + len("userassistant") + 6  # im_user im_middle im_end twice; think
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len("Let me see")

    both({"messages": HELLO}, check, answer="Let me see</think>Grüße", width=width)


@pytest.mark.parametrize(
    "switch",
    [{"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"thinking": False}}],
)
@served()
async def test_thinking_can_be_switched_off(s: Served, switch: dict[str, Any]) -> None:
    answer = (await s.client.post(CHAT, {"messages": HELLO, **switch})).json["choices"][0]["message"]
    assert answer == {"role": "assistant", "content": "Hello"}
    assert s.prompt().endswith("<think></think>")
    assert (s.params.temperature, s.params.top_p) == (0.6, 0.95)
    await s.client.post(CHAT, {"messages": HELLO})
    assert s.prompt().endswith("<|im_middle|><think>")
    assert (s.params.temperature, s.params.top_p) == (1.0, 0.95)


@served()
async def test_reasoning_of_earlier_turns_is_kept_on_request(s: Served) -> None:
    history = [*HELLO, {"role": "assistant", "content": "A", "reasoning_content": "R1"}, *HELLO]
    await s.client.post(CHAT, {"messages": history})
    assert "R1" not in s.prompt()
    for ask in (
        {"thinking": {"type": "enabled", "keep": "all"}},
        {"chat_template_kwargs": {"preserve_thinking": True}},
    ):
        assert (await s.client.post(CHAT, {"messages": history, **ask})).status == 200
        assert "<think>R1</think>A" in s.prompt()


def test_tool_calls_carry_native_ids() -> None:
    def check(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Sure."
        assert choice["message"]["reasoning_content"] == "Need weather"
        (call,) = choice["message"]["tool_calls"]
        assert call["id"] == "functions.get_weather:0" and call["type"] == "function"
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}

    answer = "Need weather</think>Sure." + CALL.format(0)
    both({"messages": HELLO, "tools": [WEATHER]}, check, answer=answer)


def test_tool_results_go_back_and_the_next_call_counts_on() -> None:
    call = {
        "id": "functions.get_weather:0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]

    def check(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        assert choice["message"]["tool_calls"][0]["id"] == "functions.get_weather:1"
        assert choice["message"]["content"] is None

    both({"messages": messages, "tools": [WEATHER]}, check, answer="</think>" + CALL.format(0))


@served()
async def test_tool_choice_none_hides_the_tools(s: Served) -> None:
    await s.client.post(CHAT, {"messages": HELLO, "tools": [WEATHER]})
    assert "get_weather" in s.prompt()
    reply = await s.client.post(CHAT, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "none"})
    assert reply.status == 200 and "get_weather" not in s.prompt()
    assert "tool_calls" not in reply.json["choices"][0]["message"]


@pytest.mark.parametrize("width", [1, 3])
def test_chat_logprobs_cover_every_token_of_the_turn(width: int) -> None:
    def check(answer: dict[str, Any]) -> None:
        entries = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in entries).decode() == "Hm</think>é!"
        assert entries[0]["token"] == "H" and entries[0]["logprob"] == pytest.approx(-ord("H") / 100)
        assert [t["token"] for t in entries[0]["top_logprobs"]] == ["H", "I"]
        assert entries[0]["top_logprobs"][1]["logprob"] == -9999.0  # minus infinity has no JSON

    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    both(body, check, answer="Hm</think>é!", width=width)


@pytest.mark.parametrize("width", [1, 5])
def test_a_stop_string_ends_the_turn_and_frees_the_engine(width: int) -> None:
    async def test(s: Served) -> None:
        body = {"messages": HELLO, "stop": "END", "thinking": {"type": "disabled"}, "logprobs": True}
        choice = (await s.client.post(CHAT, body)).json["choices"][0]
        assert choice["message"]["content"] == "one " and choice["finish_reason"] == "stop"
        assert s.engine.cancelled == [0]
        chunks = (await s.client.post(CHAT, {**body, "stream": True})).chunks
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and s.engine.cancelled == [0, 1]
        assert 'perilune_request_success_total{finished_reason="stop"} 2.0' in (await s.client.get("/metrics")).text

    serve(test, answer="one END two", width=width)


def test_a_default_for_requests_without_a_limit() -> None:
    async def test(s: Served) -> None:
        for path in (CHAT, "/v1/responses"):
            body = {"messages": HELLO} if path == CHAT else {"input": "Hi"}
            assert (await s.client.post(path, body)).status == 200 and s.params.max_tokens == 30
        assert (await s.client.post(CHAT, {"messages": HELLO, "max_tokens": 40})).status == 200
        assert s.params.max_tokens == 40, "a request may ask for more"
        long = [{"role": "user", "content": "a" * 490}]
        assert (await s.client.post(CHAT, {"messages": long})).status == 200 and s.params.max_tokens < 30

    serve(test, default_max_tokens=30)
    with pytest.raises(ConfigError, match="default_max_tokens must be at least 1, not 0"):
        ServerConfig(default_max_tokens=0)


@served()
async def test_max_tokens_ends_with_length_and_is_clamped_to_the_context(s: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = (await s.client.post(CHAT, {"messages": HELLO, name: 3, "thinking": {"type": "disabled"}})).json
        assert answer["choices"][0]["message"]["content"] == "Hel"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
    for ask in ({"max_tokens": 10**6}, {}):
        await s.client.post(CHAT, {"messages": HELLO, **ask})
        prompt, params = s.engine.seen[-1]
        assert len(prompt) + (params.max_tokens or 0) == s.engine.info.max_model_len


@served(defaults={"temperature": 0.25})
async def test_sampling_fields_reach_the_engine(s: Served) -> None:
    ask = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5, "stop_token_ids": [9]}
    assert (await s.client.post(CHAT, {"messages": HELLO, **ask, "stop": ["a", "b"]})).status == 200
    assert {k: getattr(s.params, k) for k in ask} == {**ask, "stop_token_ids": (9,)}
    assert s.params.stop == ("a", "b") and s.params.logprobs is None
    await s.client.post(CHAT, {"messages": HELLO, "top_k": -1, "temperature": None})
    assert s.params.top_k == 0 and s.params.temperature == 0.25 and s.params.top_p == 0.95


@served()
async def test_penalties_bias_and_min_tokens_reach_the_engine(s: Served) -> None:
    ask = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1, "min_tokens": 2}
    for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        assert (await s.client.post(path, {**prompt, **ask, "logit_bias": {"65": -100, "66": 2.5}})).status == 200
        assert {k: getattr(s.params, k) for k in ask} == ask
        assert s.params.logit_bias == ((65, -100.0), (66, 2.5))
        neutral = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "min_tokens": 0}
        assert (await s.client.post(path, {**prompt, **neutral})).status == 200
        assert not s.params.penalized and s.params.logit_bias == () and s.engine.constraints[-1] is None


def test_several_answers_to_one_conversation() -> None:
    ask = {"messages": HELLO, "tools": [WEATHER], "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 1}

    def check(answer: dict[str, Any]) -> None:
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        for choice in answer["choices"]:
            assert choice["message"]["content"] == "Sure." and choice["message"]["reasoning_content"] == "Hm"
            assert choice["message"]["tool_calls"][0]["id"] == "functions.get_weather:0"
            assert choice["finish_reason"] == "tool_calls"
            entries = choice["logprobs"]["content"]
            assert b"".join(bytes(e["bytes"]) for e in entries).decode().startswith("Hm</think>Sure.<|tool")
        length = len(BYTES.encode("Hm</think>Sure." + CALL.format(0), allow_special=True)) + 1
        assert answer["usage"]["completion_tokens"] == 3 * length
        assert answer["usage"]["prompt_tokens"] < 400, "the prompt counts once"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * len("Hm")

    async def seeds(s: Served) -> None:
        await s.client.post(CHAT, ask)
        assert s.engine.seen[0][1].seed == 7 and len({p.seed for _, p in s.engine.seen}) == 3

    both(ask, check, answer="Hm</think>Sure." + CALL.format(0))
    serve(seeds)


@served(pause=0.002)
async def test_answers_to_one_conversation_are_streamed_side_by_side(s: Served) -> None:
    body = {"messages": HELLO, "n": 2, "stream": True, "thinking": {"type": "disabled"}}
    order = [c["choices"][0]["index"] for c in (await s.client.post(CHAT, body)).chunks]
    assert order != sorted(order), "the second answer waited for the first"


@served(fail_at=2, pause=0.001)
async def test_a_failure_of_one_answer_ends_all(s: Served) -> None:
    reply = await s.client.post(CHAT, {"messages": HELLO, "n": 3})
    assert reply.status == 500 and reply.error["code"] == "generation_failed"
    chunks = (await s.client.post(CHAT, {"messages": HELLO, "n": 3, "stream": True})).chunks
    assert "not finite" in chunks[-1]["error"]["message"]


@served()
async def test_the_developer_speaks_as_the_system(s: Served) -> None:
    await s.client.post(CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, *HELLO]})
    assert s.prompt().startswith("<|im_system|>system<|im_middle|>Be brief.<|im_end|>")


@served(answer="</think>Hi")
async def test_a_refusal_of_another_model_is_read_as_text(s: Served) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can not."}]}
    reply = await s.client.post(CHAT, {"messages": [*HELLO, refused, *HELLO]})
    assert reply.status == 200 and "I can not.<|im_end|>" in s.prompt(), reply.text
    refused["content"] = [{"type": "refusal", "text": "I can not."}]
    reply = await s.client.post(CHAT, {"messages": [*HELLO, refused, *HELLO]})
    assert reply.status == 400 and reply.error["param"] == "messages[1].content[0].refusal"


def test_a_model_without_chat_still_completes(tmp_path: Path) -> None:
    async def test(s: Served) -> None:
        reply = await s.client.post(CHAT, {"messages": HELLO})
        assert reply.status == 400 and "plain completions" in reply.error["message"]
        assert reply.error["code"] == "unsupported_by_model"
        assert (await s.client.post(TEXT, {"prompt": "a"})).json["choices"][0]["text"] == "Hello"
        assert (s.params.temperature, s.params.top_p) == (1.0, 1.0)

    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    serve(test, template=template_for(tmp_path))


@pytest.mark.parametrize("path", [CHAT, TEXT])
@served()
async def test_usage_tells_of_tokens_guessed_ahead(s: Served, path: str) -> None:
    ask = {"messages": HELLO, "thinking": {"type": "disabled"}} if path == CHAT else {"prompt": "Hi"}
    s.engine.answer, s.engine.width = "abcdefg", 4  # and the end: two deltas of four tokens
    usage = (await s.client.post(path, ask)).json["usage"]
    details = usage["completion_tokens_details"]
    assert (usage["completion_tokens"], details["acceptance_length"]) == (8, 4.0)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (6, 2)
    # A stop string among the tokens of a step: what follows it is dropped.
    answer = (await s.client.post(path, {**ask, "stop": "f"})).json
    text = answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
    assert text == "abcde" and answer["usage"]["completion_tokens"] == 6
    s.engine.width = 1
    details = (await s.client.post(path, ask)).json["usage"]["completion_tokens_details"]
    assert [details[k] for k in ("accepted_prediction_tokens", "rejected_prediction_tokens")] == [0, 0]
    assert details["acceptance_length"] == 1.0


@served()
async def test_a_budget_of_more_than_64_bits_is_cut(s: Served) -> None:
    """Messages to the engine's process have no room for larger numbers."""
    for asked in ({"max_thinking_tokens": 2**64}, {"thinking_token_budget": 10**400}):
        assert (await s.client.post(CHAT, {"messages": HELLO, **asked})).status == 200
        constraint = s.engine.constraints[-1]
        assert constraint is not None and constraint.thinking_budget == 2**63 - 1
