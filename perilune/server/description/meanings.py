"""What each declared field of a request asks for, in one sentence, and the form of the objects that are checked by
hand.

A key is a field's name, or BODY.name where a body means something else by it. A test checks that every declared field
has an entry, and that there are no others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from perilune.core.sampling import MAX_BAD_WORDS, MAX_BIASED, MAX_CANDIDATES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS
from perilune.server.batches.files import EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from perilune.server.openai.protocol import MAX_DEADLINE_SECONDS, MAX_PRIORITIES, MAX_SALT_CHARS

_ECHO = "a text about the request that the answer repeats"
MEANINGS: Mapping[str, str] = {
    "model": "the served model's name; left out: the one that is served",
    # chat
    "messages": "the conversation, its last message last; one of the assistant's there is the beginning of the answer; "
    "parts may be pictures and videos if the model sees",
    "tools": "functions that the model may call and the client runs; arguments keep to their schemas",
    "tool_choice": "whether the answer may, has to or must not call tools, and which",
    "parallel_tool_calls": "false: at most one call in an answer",
    "functions": "refused: send tools",
    "function_call": "refused: send tool_choice",
    "echo": "the answer begins with the text that it continues",
    "CompletionBody.echo": "the answer begins with the prompt",
    "max_tokens": "tokens of the answer at most, thoughts included; default: serve --default-max-tokens",
    "CompletionBody.max_tokens": "tokens of the answer at most; default 16",
    "MessagesBody.max_tokens": "tokens of the answer at most, thoughts included",
    "max_completion_tokens": "the newer name of max_tokens",
    "thinking": "switches thinking on or off and bounds it",
    "Thinking.type": "enabled or disabled",
    "keep": '"all": thoughts of earlier turns stay in the prompt',
    "budget_tokens": "tokens that the thought may take",
    "max_thinking_tokens": "tokens that the thought may take",
    "thinking_token_budget": "vLLM's name of max_thinking_tokens; -1: no bound",
    "include_reasoning": "false: the thought is left out of the answer",
    "reasoning_effort": 'bounds the thought: "minimal" 512, "low" 2,048, "medium" 8,192 tokens; "none": no thought',
    "chat_template_kwargs": "vLLM's place of thinking",
    "TemplateKwargs.thinking": "true or false: whether the model thinks",
    "preserve_thinking": "thoughts of earlier turns stay in the prompt",
    "add_generation_prompt": "true: a new message is asked for even if the last one is the assistant's",
    "continue_final_message": "true: the last message is the beginning of the answer",
    "logprobs": "true: log-probabilities of the answer's tokens",
    "top_logprobs": f"likeliest tokens to report at each place, 0 to {MAX_LOGPROBS}",
    # sampling
    "temperature": "0: always the likeliest token; default: what the model recommends",
    "top_p": "sample from the likeliest tokens of this probability together, above 0 to 1",
    "top_k": "sample from so many of the likeliest tokens; 0 or -1: all",
    "min_p": "drop tokens less likely than this share of the likeliest, 0 to 1",
    "seed": "the same seed gives the same answer",
    "stop": f"up to {MAX_STOPS} texts of {MAX_STOP_CHARS} characters that end the answer and are no part of it",
    "stop_token_ids": "token ids that end the answer",
    "ignore_eos": "true: go on after the model's own end",
    "n": "answers to the prompt",
    "best_of": "answers made, of which the n likeliest are sent",
    "stream": "true: the answer comes as server-sent events while it is made",
    "stream_options": "what a stream has besides the answer",
    "include_usage": "a last event has the usage",
    "continuous_usage_stats": "every event has the usage so far",
    "include_obfuscation": "no effect: events are not padded",
    "frequency_penalty": "-2 to 2: less of tokens the more often they came",
    "presence_penalty": "-2 to 2: less of tokens that came",
    "repetition_penalty": "0.01 to 10: above 1 less of tokens of prompt and answer",
    "logit_bias": f"up to {MAX_BIASED} token ids, each to -100 to 100: makes tokens likelier or less likely",
    "allowed_token_ids": "the only tokens that are sampled",
    "bad_words": "texts that do not come",
    "min_tokens": "tokens before which nothing ends the answer, except max_tokens",
    "prompt_logprobs": f"log-probabilities of the prompt's tokens, with so many of the likeliest, 0 to {MAX_LOGPROBS}",
    "truncate_prompt_tokens": "tokens of the prompt that are kept; -1: as many as the context holds",
    "truncation_side": "the side on which a prompt is cut",
    "include_stop_str_in_output": "the text includes what stopped it",
    "skip_special_tokens": "false: special tokens are part of the text",
    "return_token_ids": "the answer has the ids of its tokens and the prompt's",
    "return_tokens_as_token_ids": "log-probabilities name tokens token_id:N",
    "request_id": "becomes part of the answer's id",
    "cache_salt": f"1 to {MAX_SALT_CHARS} characters: only requests with the same one share cached KV",
    "priority": f"0 to {MAX_PRIORITIES}: larger numbers are admitted later",
    "deadline_seconds": f"up to {MAX_DEADLINE_SECONDS:,}: an answer that is not complete by then ends with status 504",
    "response_format": "the answer's form: JSON, or JSON by a schema",
    "guided_json": "a JSON schema for the answer",
    "guided_regex": "a regular expression for the whole answer",
    "guided_choice": "texts, one of which is the answer",
    "guided_grammar": "a grammar (Lark or GBNF) for the answer",
    "structured_outputs": "one object in place of the guided fields: json, regex, choice, grammar or json_object",
    # completions and tokens
    "prompt": "text or token ids, or a list of such; the model continues each",
    "TokenizeBody.prompt": "the text to tokenize; or send messages",
    "CompletionBody.logprobs": f"log-probabilities of each token and of so many of the likeliest, 0 to {MAX_LOGPROBS}",
    "suffix": "refused: text after the answer is not supported",
    "add_special_tokens": "no effect: no prompt of this family begins with a token of its own",
    "return_token_strs": "the answer has the text of each token",
    "tokens": "token ids",
    # responses
    "input": "a text, or a list of items: messages, reasoning, calls and their outputs, with pictures as "
    "input_image and videos as input_video if the model sees; item_reference with the id of an item of a stored "
    "response stands for that item",
    "instructions": "a system message for this request alone",
    "previous_response_id": "a stored response that this request continues",
    "store": "false: the response is not kept",
    "background": "true: answered at once, with status queued; poll, or cancel, the response by its id",
    "text": "the form of the answer's text",
    "format": "text, json_object or json_schema",
    "reasoning": "how much the model thinks",
    "effort": "bounds the thought",
    "summary": "no effect: the whole thought is returned",
    "max_output_tokens": "tokens of the answer at most, thoughts included",
    "include": "reasoning.encrypted_content has no effect; all else is refused",
    "truncation": 'only "disabled": a prompt that does not fit is refused',
    "metadata": _ECHO,
    "user": _ECHO,
    "max_tool_calls": "no effect: it counts tools that the server runs, of which there are none",
    "conversation": "refused: send previous_response_id",
    "ResponsesBody.prompt": "refused: send instructions and input",
    "ResponsesBody.top_logprobs": "refused: /v1/chat/completions has it",
    # batches
    "input_file_id": "a file of requests, one line of JSON each",
    "endpoint": "the url of every request in the file",
    "completion_window": "after it, what is not answered ends with the error batch_expired",
    "output_expires_after": "when the files with answers are deleted; 30 days by default",
    "anchor": "the moment from which seconds count",
    "seconds": "3,600 to 2,592,000",
    # messages
    "system": "a text, or text blocks, ahead of the messages",
    "MessagesThinking.type": "enabled needs budget_tokens; adaptive leaves the amount to the model",
    "output_config": "effort, and the form of the answer",
    "OutputConfig.format": "JSON by a schema",
    "output_format": "the older place of output_config.format",
    "stop_sequences": "texts that end the answer and are no part of it",
    "ToolChoice.type": '"auto", "any", "none" or "tool", which name names',
    "name": "the tool that has to be called",
    "disable_parallel_tool_use": "true: at most one call in an answer",
}

_NULL = {"type": "null"}
_SCHEMA = {"type": "object", "description": "a JSON schema"}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def _list(item: Mapping[str, Any], least: int = 0, most: int | None = None) -> dict[str, Any]:
    made = {"type": "array", "items": item, "minItems": least}
    return made if most is None else {**made, "maxItems": most}


def _or_null(*forms: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*forms, _NULL]}


def _number(low: float | None = None, high: float | None = None, *, kind: str = "number") -> dict[str, Any]:
    bounds = {"minimum": low, "maximum": high}
    return _or_null({"type": kind} | {name: bound for name, bound in bounds.items() if bound is not None})


def _whole(low: int | None = None, high: int | None = None) -> dict[str, Any]:
    return _number(low, high, kind="integer")


_TEXT = {"type": "string", "minLength": 1}
_STOP = {**_TEXT, "maxLength": MAX_STOP_CHARS}
_INPUT = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}
_FUNCTION = _object(
    ["name"],
    name=_NAME,
    description={"type": ["string", "null"]},
    parameters=_or_null(_SCHEMA),
    strict={"type": ["boolean", "null"]},
)
_ID = {"type": "integer", "minimum": 0}
_PARTS = _list(
    _object(
        ["type"],
        type={"type": "string", "examples": ["text", "image_url", "video_url", "image", "video"]},
        text={"type": "string"},
    )
)
_WORDS: list[Mapping[str, Any]] = [{"type": "string"}, _PARTS]
_CALL = _object(
    ["id", "type", "function"],
    id=_TEXT,
    type={"const": "function"},
    function=_object(["name"], name=_NAME, arguments={"type": ["string", "object", "null"]}),
)
_CHAT_MESSAGE = {
    "anyOf": [
        _object(["role", "content"], role={"enum": ["system", "developer", "user"]}, content={"anyOf": _WORDS}),
        _object(
            ["role"],
            role={"const": "assistant"},
            content=_or_null(*_WORDS),
            reasoning_content={"type": ["string", "null"]},
            tool_calls=_or_null(_list(_CALL)),
        ),
        _object(
            ["role", "tool_call_id", "content"], role={"const": "tool"}, tool_call_id=_TEXT, content={"anyOf": _WORDS}
        ),
    ]
}
_CHAT_TOOLS = _or_null(_list(_object(["type", "function"], type={"const": "function"}, function=_FUNCTION)))
_MESSAGE = _object(["role", "content"], role={"enum": ["user", "assistant", "system"]}, content={"anyOf": _WORDS})
_JSON_SCHEMA = {"anyOf": [_SCHEMA, {"type": "boolean"}, {"type": "string", "description": "the same as JSON text"}]}
_GUIDES = {
    "json": _or_null(_JSON_SCHEMA),
    "regex": _or_null(_TEXT),
    "choice": _or_null(_list(_TEXT, 1, 1024)),
    "grammar": _or_null(_TEXT),
}
_FUNCTION = _object(["type", "function"], type={"const": "function"}, function=_object(["name"], name=_TEXT))
_NAMED = _object(["type", "name"], type={"enum": ["function", "custom"]}, name=_TEXT)
_MODE = {"enum": ["auto", "required"]}
_PENALTY = _number(-2, 2)
# JSON schemas where a body's own type says less: BODY.name, or a name of every body. Tests send what lies just inside
# and just outside of each bound.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "max_tokens": _whole(1),
    "CompletionBody.max_tokens": _whole(0),
    "MessagesBody.max_tokens": {"type": "integer", "minimum": 1},
    "max_completion_tokens": _whole(1),
    "max_output_tokens": _whole(1),
    "temperature": _number(0, 100),
    "top_p": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "seed": _whole(-(2**63), 2**63 - 1),
    "n": _whole(1, MAX_CANDIDATES),
    "best_of": _whole(1, MAX_CANDIDATES),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": _number(0.01, 10),
    "logit_bias": _or_null(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "maxProperties": MAX_BIASED,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
    "stop": _or_null({"type": "string", "maxLength": MAX_STOP_CHARS}, _list(_STOP, 0, MAX_STOPS)),
    "stop_token_ids": _or_null(_list(_ID)),
    "allowed_token_ids": _or_null(_list(_ID, 1)),
    "bad_words": _or_null(_TEXT, _list(_TEXT, 0, MAX_BAD_WORDS)),
    "min_tokens": _whole(0),
    "prompt_logprobs": _whole(0, MAX_LOGPROBS),
    "top_logprobs": _whole(0, MAX_LOGPROBS),
    "CompletionBody.logprobs": _whole(0, MAX_LOGPROBS),
    "truncate_prompt_tokens": _whole(-1),
    "cache_salt": _or_null({**_TEXT, "maxLength": MAX_SALT_CHARS}),
    "priority": _whole(0, MAX_PRIORITIES),
    "deadline_seconds": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_SECONDS}),
    "request_id": _or_null({"type": "string", "pattern": "^[!-~]{1,128}$"}),
    "response_format": _or_null(
        _object(["type"], type={"enum": ["text", "json_object"]}),
        _object(
            ["type", "json_schema"], type={"const": "json_schema"}, json_schema=_object(["schema"], schema=_JSON_SCHEMA)
        ),
    ),
    "ChatBody.tool_choice": _or_null(
        {"enum": ["auto", "none", "required"]},
        _FUNCTION,
        _object(
            ["type", "allowed_tools"],
            type={"const": "allowed_tools"},
            allowed_tools=_object(["mode", "tools"], mode=_MODE, tools=_list(_FUNCTION, 1)),
        ),
    ),
    **{f"guided_{name}": schema for name, schema in _GUIDES.items()},
    "structured_outputs": _or_null({"type": "object", "properties": {**_GUIDES, "json_object": {"type": "boolean"}}}),
    "ChatBody.messages": _list(_CHAT_MESSAGE, 1),
    "ChatBody.tools": _CHAT_TOOLS,
    "TokenizeBody.messages": _or_null(_list(_CHAT_MESSAGE)),
    "TokenizeBody.tools": _CHAT_TOOLS,
    "CompletionBody.prompt": {
        "anyOf": [{"type": "string"}, _list({"type": "string"}, 1), _list(_ID, 1), _list(_list(_ID, 1), 1)]
    },
    "suffix": {"enum": ["", None]},
    "DetokenizeBody.tokens": _list(_ID),
    "functions": _NULL,
    "function_call": _NULL,
    "ResponsesBody.input": _INPUT,
    "InputTokensBody.input": _or_null(_INPUT),
    **dict.fromkeys(
        ("ResponsesBody.tool_choice", "InputTokensBody.tool_choice"),
        _or_null(
            {"enum": ["auto", "none", "required"]},
            _NAMED,
            _object(["type", "mode", "tools"], type={"const": "allowed_tools"}, mode=_MODE, tools=_list(_NAMED, 1)),
        ),
    ),
    "Text.format": _or_null(
        _object(["type"], type={"enum": ["text", "json_object"]}),
        _object(["type", "schema"], type={"const": "json_schema"}, schema=_SCHEMA),
    ),
    "include": _or_null(_list({"const": "reasoning.encrypted_content"})),
    "truncation": {"enum": ["disabled", None]},
    "ExpiresAfter.seconds": {"type": "integer", "minimum": MIN_EXPIRY_SECONDS, "maximum": EXPIRY_SECONDS},
    "conversation": _NULL,
    "ResponsesBody.prompt": _NULL,
    "ResponsesBody.top_logprobs": {"enum": [0, None]},
    **{
        f"{body}.{name}": schema
        for body in ("CountBody", "MessagesBody")
        for name, schema in (
            ("messages", _list(_MESSAGE, 1)),
            ("system", _or_null(*_WORDS)),
            ("tools", _or_null(_list(_object(["name", "input_schema"], name=_NAME, input_schema=_SCHEMA)))),
            ("output_format", _or_null(_object(["type", "schema"], type={"const": "json_schema"}, schema=_SCHEMA))),
        )
    },
    "OutputConfig.format": _or_null(_object(["type", "schema"], type={"const": "json_schema"}, schema=_SCHEMA)),
}
