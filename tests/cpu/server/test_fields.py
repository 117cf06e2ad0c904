"""Request fields by name: implemented, accepted without effect, refused, unknown; and those of vLLM's clients."""

import inspect
import json
import logging
import re
import typing
from typing import Any

import anthropic.resources
import anthropic.types
import anthropic.types.beta
import openai.resources
import openai.resources.responses
import openai.types.chat
import openai.types.responses
import openai.types.shared_params
import pytest

from perilune.core.errors import RequestError
from perilune.server import fields
from perilune.server.anthropic import protocol as anthropic_protocol
from perilune.server.body import Body
from perilune.server.conversation import spelled
from perilune.server.fields import Refused
from perilune.server.openai import protocol
from perilune.server.responses import protocol as responses_protocol
from tests.serving import CHAT, HELLO, TEXT, WEATHER, Reply, Served, serve, served

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "a"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 50},
    COUNT: {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


def message(reply: Reply) -> str:
    said: str = reply.json["error"]["message"]
    return said


# ---- unknown names


@pytest.mark.parametrize(
    ("path", "change", "unknown", "meant"),
    [
        (CHAT, {"temprature": 0.5}, "temprature", "temperature"),
        (CHAT, {"maxTokens": 5}, "maxTokens", "max_tokens"),
        (CHAT, {"repitition_penalty": 1.1}, "repitition_penalty", "repetition_penalty"),
        (CHAT, {"frobnicate": 1}, "frobnicate", None),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking", "thinking"),
        (CHAT, {"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget", "thinking.budget_tokens"),
        (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "json_schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}},
            "response_format.json_schema.strikt",
            "strict",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a", "nam": "b"}]}, "messages[0].nam", "messages[0].name"),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_call": []}, *HELLO]},
            "messages[1].tool_call",
            "tool_calls",
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "paramaters": {}}}]},
            "tools[0].function.paramaters",
            "parameters",
        ),
        (TEXT, {"max_token": 5}, "max_token", "max_tokens"),
        (TEXT, {"stream_option": {}}, "stream_option", "stream_options"),
        (RESPONSES, {"max_output_token": 5}, "max_output_token", "max_output_tokens"),
        (RESPONSES, {"reasoning": {"efort": "low"}}, "reasoning.efort", "reasoning.effort"),
        (RESPONSES, {"text": {"fromat": {"type": "text"}}}, "text.fromat", "text.format"),
        (MESSAGES, {"stop_sequence": ["a"]}, "stop_sequence", "stop_sequences"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_token": 9}}, "thinking.budget_token", "budget_tokens"),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel": True}}, "tool_choice.disable_parallel", "dis"),
        (MESSAGES, {"output_config": {"efort": "low"}}, "output_config.efort", "output_config.effort"),
        (COUNT, {"sistem": "a"}, "sistem", "system"),
        ("/tokenize", {"add_special_token": False}, "add_special_token", "add_special_tokens"),
        ("/detokenize", {"token": [1]}, "token", "tokens"),
    ],
    ids=lambda v: json.dumps(v)[:40],
)
@served()
async def test_a_misspelt_name_is_refused_with_the_right_one(
    s: Served, path: str, change: dict[str, Any], unknown: str, meant: str | None
) -> None:
    reply = await s.client.post(path, {**BODIES[path], **change})
    assert reply.status == 400, reply.text
    said = message(reply)
    assert said.startswith(f"unknown field '{unknown}': ") and "\n" not in said
    if meant is None:
        assert said.endswith("leave it out (serve --lenient-fields ignores such)")
    else:
        assert "did you mean '" in said and meant in said.split("did you mean")[1]
    if path not in (MESSAGES, COUNT):
        assert (reply.error["param"], reply.error["code"]) == (unknown, "unknown_parameter")
    assert s.engine.seen == []
    assert (await s.client.post(path, BODIES[path])).status == 200


@served()
async def test_a_required_field_that_is_misspelt_is_the_complaint(s: Served) -> None:
    reply = await s.client.post(CHAT, {"mesages": HELLO})
    assert reply.error["message"] == "unknown field 'mesages': did you mean 'messages'?"
    reply = await s.client.post(CHAT, {"model": "m"})
    assert reply.error["message"] == "messages is required"


@served()
async def test_a_name_of_any_length_gives_a_short_error(s: Served) -> None:
    reply = await s.client.post(CHAT, {"messages": HELLO, "x" * 100_000: 1})
    assert reply.status == 400 and len(reply.error["message"]) < 200 and len(reply.error["param"]) <= 64
    many = {f"unknown_field_number_{i}": 1 for i in range(20_000)}
    assert (await s.client.post(CHAT, {"messages": HELLO, **many})).status == 400


@served()
async def test_other_programs_may_keep_things_in_messages_and_tools(s: Served) -> None:
    messages = [
        {"role": "user", "content": "a", "provider_specific_fields": {}, "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None, "tool_call": None},
        {"role": "assistant", "content": "b", "function_call": None, "thinking_blocks": [], "reasoning": "r"},
        {"role": "user", "content": [{"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}]},
    ]
    tools = [{**WEATHER, "function": {**WEATHER["function"], "cache_control": {}}, "defer_loading": False}]
    reply = await s.client.post(CHAT, {"messages": messages, "tools": tools})
    assert reply.status == 200, reply.text


def test_lenient_servers_ignore_unknown_names_with_one_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    fields._warned.clear()

    async def test(s: Served) -> None:
        for _ in range(3):
            body = {"messages": HELLO, "frobnicate": 1, "chat_template_kwargs": {"enable_thinking": True}}
            assert (await s.client.post(CHAT, body)).status == 200
        for path, body in BODIES.items():
            assert (await s.client.post(path, {**body, "frobnicate": 1})).status == 200
        reply = await s.client.post(CHAT, {"messages": HELLO, "use_beam_search": True})
        assert reply.status == 400, "a known field is never dropped silently"

    with caplog.at_level(logging.WARNING):
        serve(test, lenient_fields=True)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and "frobnicate" in said[0] and "chat_template_kwargs.enable_thinking" in said[1]
    with caplog.at_level(logging.WARNING):
        for i in range(2 * fields.MAX_WARNED_NAMES):
            fields.check({f"n{i}": 1}, (), {}, "", lenient=True)
    assert len(fields._warned) == fields.MAX_WARNED_NAMES


# ---- names of the SDKs

SDKS = [
    (protocol.ChatBody, openai.resources.chat.completions.Completions.create),
    (protocol.CompletionBody, openai.resources.Completions.create),
    (responses_protocol.ResponsesBody, openai.resources.responses.Responses.create),
    (responses_protocol.ResponsesBody, openai.resources.responses.Responses.stream),
    (responses_protocol.InputTokensBody, openai.resources.responses.input_tokens.InputTokens.count),
    (anthropic_protocol.MessagesBody, anthropic.resources.Messages.create),
    (anthropic_protocol.MessagesBody, anthropic.resources.beta.messages.Messages.create),
    (anthropic_protocol.CountBody, anthropic.resources.Messages.count_tokens),
    (anthropic_protocol.CountBody, anthropic.resources.beta.messages.Messages.count_tokens),
]
TYPES = [
    (protocol.StreamOptions, openai.types.chat.ChatCompletionStreamOptionsParam),
    (responses_protocol.Reasoning, openai.types.shared_params.Reasoning),
    (responses_protocol.Text, openai.types.responses.ResponseTextConfigParam),
    (responses_protocol.StreamOptions, openai.types.responses.response_create_params.StreamOptions),
    (anthropic_protocol.Thinking, anthropic.types.ThinkingConfigEnabledParam),
    (anthropic_protocol.Thinking, anthropic.types.beta.BetaThinkingConfigEnabledParam),
    (anthropic_protocol.Thinking, anthropic.types.beta.BetaThinkingConfigAdaptiveParam),
    (anthropic_protocol.OutputConfig, anthropic.types.OutputConfigParam),
    (anthropic_protocol.OutputConfig, anthropic.types.beta.BetaOutputConfigParam),
    (anthropic_protocol.ToolChoice, anthropic.types.ToolChoiceToolParam),
    (anthropic_protocol.ToolChoice, anthropic.types.ToolChoiceAnyParam),
]
# Arguments of the SDK's method that are no part of the body.
NOT_SENT = {
    "self",
    "extra_headers",
    "extra_query",
    "extra_body",
    "timeout",
    "text_format",
    "starting_after",
    "response_id",
}


def unknown(body: type[Body], names: set[str]) -> set[str]:
    return names - set(body.model_fields) - set(body.FIELDS)


@pytest.mark.parametrize(("body", "method"), SDKS)
def test_no_argument_of_an_sdk_is_unknown(body: type[Body], method: Any) -> None:
    names = set(inspect.signature(method).parameters) - NOT_SENT
    assert len(names) > 5 and not unknown(body, names)


@pytest.mark.parametrize(("body", "kind"), TYPES)
def test_no_field_of_an_sdks_objects_is_unknown(body: type[Body], kind: Any) -> None:
    names = set(typing.get_type_hints(kind))
    assert names and not unknown(body, names)


def test_every_name_is_in_one_place() -> None:
    for body, table in (
        (protocol.ChatBody, fields.CHAT),
        (protocol.CompletionBody, fields.COMPLETION),
        (protocol.StreamOptions, fields.STREAM_OPTIONS),
        (protocol.TokenizeBody, fields.TOKENIZE),
        (responses_protocol.ResponsesBody, fields.RESPONSES),
        (responses_protocol.InputTokensBody, fields.INPUT_TOKENS),
        (responses_protocol.Reasoning, fields.REASONING),
        (responses_protocol.Text, fields.TEXT),
        (anthropic_protocol.MessagesBody, fields.MESSAGES),
        (anthropic_protocol.Thinking, fields.THINKING),
        (anthropic_protocol.OutputConfig, fields.OUTPUT_CONFIG),
    ):
        assert not set(body.model_fields) & set(table), body
        assert all(entry if isinstance(entry, str) else entry.use for entry in table.values())


# vLLM 0.26: what its OpenAI-compatible server knows besides OpenAI's own fields, with the value that asks for nothing.
VLLM: dict[str, Any] = {
    "best_of": 1,
    "use_beam_search": False,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "documents": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
    "priority": 0,
    "request_id": "abc",
    "session_id": "s",
    "logits_processors": None,
    "return_tokens_as_token_ids": False,
    "return_token_ids": False,
    "return_token_offsets": False,
    "return_prompt_text": None,
    "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0,
    "cache_salt": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "vllm_xargs": None,
    "repetition_detection": None,
    "thinking_token_budget": -1,
    "include_reasoning": True,
    "stream_interval": 5,
    "watermarking": False,
    "detokenize": True,
    "prompt_embeds": None,
}
ONLY_CHAT = {
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "include_reasoning",
    "return_prompt_text",
}
ONLY_TEXT = {"prompt_embeds"}


@pytest.mark.parametrize(("path", "others"), [(CHAT, ONLY_TEXT), (TEXT, ONLY_CHAT)])
@served()
async def test_vllms_names_are_known_and_their_defaults_accepted(s: Served, path: str, others: set[str]) -> None:
    defaults = {name: value for name, value in VLLM.items() if name not in others}
    reply = await s.client.post(path, {**BODIES[path], **defaults})
    assert reply.status == 200, reply.text


@pytest.mark.parametrize(
    ("path", "field", "value", "use"),
    [
        (CHAT, "use_beam_search", True, "best_of"),
        (CHAT, "length_penalty", 1.2, "best_of"),
        (CHAT, "logits_processors", ["x"], "logit_bias"),
        (CHAT, "kv_transfer_params", {"do_remote_decode": True}, "disaggregated"),
        (CHAT, "vllm_xargs", {"a": 1}, "extensions"),
        (CHAT, "documents", [{"title": "a", "text": "b"}], "message"),
        (CHAT, "chat_template", "{{ x }}", "--chat-template"),
        (CHAT, "mm_processor_kwargs", {"a": 1}, "preprocessor"),
        (CHAT, "detokenize", False, "return_token_ids"),
        (CHAT, "store", True, "/v1/responses"),
        (CHAT, "modalities", ["text", "audio"], "text"),
        (CHAT, "audio", {"voice": "a", "format": "wav"}, "text"),
        (CHAT, "web_search_options", {}, "tool"),
        (CHAT, "verbosity", "low", "system message"),
        (CHAT, "moderation", {"model": "x"}, "moderation"),
        (CHAT, "best_of", 2, "/v1/completions"),
        (CHAT, "functions", [], "tools"),
        (CHAT, "function_call", "auto", "tool_choice"),
        (TEXT, "suffix", "b", "prompt"),
        (TEXT, "prompt_embeds", "abc", "prompt"),
        (TEXT, "thinking_token_budget", 5, "/v1/chat/completions"),
        (RESPONSES, "messages", HELLO, "input"),
        (RESPONSES, "max_tokens", 5, "max_output_tokens"),
        (RESPONSES, "top_k", 5, "/v1/chat/completions"),
        (RESPONSES, "moderation", {"model": "x"}, "moderation"),
        (MESSAGES, "stop", ["a"], "stop_sequences"),
        (MESSAGES, "logprobs", True, "/v1/chat/completions"),
        (MESSAGES, "container", "c", "client"),
        (MESSAGES, "mcp_servers", [{"url": "x"}], "client"),
        (MESSAGES, "thread", {"type": "create"}, "conversation"),
        ("/tokenize", "chat_template", "x", "--chat-template"),
    ],
)
@served()
async def test_what_is_not_supported_is_refused_with_what_to_use(
    s: Served, path: str, field: str, value: Any, use: str
) -> None:
    reply = await s.client.post(path, {**BODIES[path], field: value})
    assert reply.status == 400, reply.text
    said = message(reply)
    assert said.startswith(f"{field} is not supported: ") and use in said and "\n" not in said
    if path != MESSAGES:
        assert (reply.error["param"], reply.error["code"]) == (field, "unsupported_parameter")
    assert s.engine.seen == []


def test_only_so_many_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """500,000 took 12 s."""
    monkeypatch.setattr(fields, "MAX_COMPARED_NAMES", 1, raising=False)
    fields.check_open([{"x": 1}, {"contents": 1}], (), lenient=False)


def test_refusals_look_at_types_too() -> None:
    entry = Refused("use", (1.0, True))
    assert not entry.asks(None) and not entry.asks(1.0) and not entry.asks(True)
    assert entry.asks(1) and entry.asks(False) and entry.asks({"a": 1})


# ---- bodies of real clients


@served()
async def test_bodies_with_everything_that_changes_no_answer(s: Served) -> None:
    hosted = {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"ttl": "1h"},
    }
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "Hi", **ephemeral}]
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}, **ephemeral}]
    chat = {**BODIES[CHAT], **hosted, "user": "u", "store": False, "verbosity": "medium", "modalities": ["text"]}
    chat |= {"prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": True, "functions": None}
    claude = {
        "model": "m",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": blocks}],
        "system": [{"type": "text", "text": "You are.", **ephemeral}],
        "tools": tools,
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 100}},
        "betas": ["x"],
        "anthropic_version": "vertex-2023-10-16",
        "container": None,
        "mcp_servers": [],
        "speed": "standard",
        "stream": True,
    }
    codex = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"id": "x"},
        "text": {"verbosity": "medium"},
        **hosted,
    }
    count = {k: v for k, v in claude.items() if k not in ("service_tier", "betas")}
    for path, body in ((CHAT, chat), (MESSAGES, claude), (RESPONSES, codex), (COUNT, count)):
        reply = await s.client.post(path, body)
        assert reply.status == 200, reply.text


@pytest.mark.parametrize(
    ("param", "named"),
    [("stop[0]", "stop_sequences[0]"), ("stop_token_ids", "stop_token_ids"),
     ("tools[0].function.parameters.properties.stop", "tools[0].input_schema.properties.stop")],
)  # fmt: skip
def test_fields_have_the_names_of_the_clients_api(param: str, named: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"{named} is bad")) as e, spelled(anthropic_protocol.FIELDS):
        raise RequestError(f"{param} is bad", param=param, status=503, retry_seconds=5)
    assert (e.value.param, e.value.status, e.value.retry_seconds) == (named, 503, 5)
