"""What becomes of a request field that no body declares: one table per API.

A field is one of four things: declared by its body (implemented, or checked there); in a table with a text, which says
why it changes no answer here (accepted); in a table as Refused (400 with what to use instead, unless its value asks
for nothing); or unknown (400 with the name it resembles; `lenient_fields` ignores it, with one warning per name).

The names are those of the OpenAI and Anthropic SDKs and of vLLM's OpenAI-compatible server.
"""

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.core.errors import RequestError

log = logging.getLogger("perilune.server")

MAX_WARNED_NAMES = 256  # bounded, because clients choose the names
MAX_COMPARED_NAMES = 10_000  # names of a request compared with known ones, 25 us each
MAX_NAME_CHARS = 64  # characters of a client's name in a message
TYPO_RATIO = 0.85  # difflib ratio from which an unknown name is a typo. Lower: refuses names of other programs.
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Refused:
    """`use`: what to do instead. `idle`: values that ask for nothing, and are accepted, besides null."""

    use: str
    idle: tuple[Any, ...] = (False, "", [], {})

    def asks(self, value: Any) -> bool:
        return value is not None and not any(type(value) is type(i) and value == i for i in self.idle)


Fields = Mapping[str, str | Refused]

_HOSTED = "for a hosted service's records, billing, routing or cache"
_PREPROCESSOR = Refused("pictures are read as the model's own preprocessor reads them")
_BEAMS = "beams are not searched: use n, best_of or temperature"
_TRANSFER = Refused("this server does not take part in disaggregated serving")
_TEMPLATE = Refused("the server's own template is used, see serve --chat-template")

_ACCOUNT: Fields = dict.fromkeys(
    (
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "session_id",
        "client_metadata",
    ),
    _HOSTED,
)
_MODERATION: Fields = {"moderation": Refused("no moderation model is served")}
_VERBOSITY: Fields = {
    "verbosity": Refused("no model of this family knows it: say in a system message how long answers are", ("medium",))
}

# vLLM's names, and OpenAI's of the chat and completions APIs.
_SAMPLING: Fields = {
    **_ACCOUNT,
    **_MODERATION,
    "prediction": "it makes answers faster elsewhere; drafts of tokens are made here without it",
    "stream_interval": "an event has the tokens of a step",
    "add_special_tokens": "no prompt of this family begins with a token of its own",
    "spaces_between_special_tokens": "the text of tokens is joined as it is",
    "guided_decoding_backend": "a choice among another server's own parts",
    "return_mm_kwargs": "of another server's render endpoints",
    "store": Refused("answers are kept by /v1/responses only"),
    "use_beam_search": Refused(_BEAMS),
    "early_stopping": Refused(_BEAMS),
    "length_penalty": Refused(_BEAMS, (1.0, 1)),
    "logits_processors": Refused("use logit_bias, allowed_token_ids or bad_words"),
    "logprob_token_ids": Refused("use logprobs with the number of the likeliest tokens to report"),
    "detokenize": Refused("use return_token_ids, which come beside the text", (True,)),
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": _TRANSFER,
    "vllm_xargs": Refused("there are no extensions that take them"),
    "repetition_detection": Refused("use repetition_penalty or frequency_penalty"),
    "watermarking": Refused("texts get no watermark"),
    "routed_experts_prompt_start": Refused("routing is not reported", (0,)),
    "return_token_offsets": Refused("use POST /tokenize with return_token_strs"),
    "guided_whitespace_pattern": Refused("use guided_grammar"),
}
CHAT: Fields = {
    **_SAMPLING,
    **_VERBOSITY,
    "best_of": Refused("/v1/completions has it", (1,)),
    "modalities": Refused("answers are text", (["text"],)),
    "audio": Refused("answers are text"),
    "mm_processor_kwargs": _PREPROCESSOR,
    "media_io_kwargs": _PREPROCESSOR,
    "web_search_options": Refused("declare a tool that searches, which the client runs", ()),
    "documents": Refused("put them into a message"),
    "chat_template": _TEMPLATE,
    "return_prompt_text": Refused("use return_token_ids, or POST /tokenize"),
}
COMPLETION: Fields = {
    **_SAMPLING,
    "max_completion_tokens": Refused("send max_tokens"),
    "prompt_embeds": Refused("send a text or token ids as prompt"),
    "thinking_token_budget": Refused("/v1/chat/completions has it", (-1,)),
}
STREAM_OPTIONS: Fields = {"include_obfuscation": "events are not padded"}
TOKENIZE: Fields = {
    "mm_processor_kwargs": _PREPROCESSOR,
    "media_io_kwargs": _PREPROCESSOR,
    "chat_template": _TEMPLATE,
}

_AT_CHAT = "/v1/chat/completions has it"
_IDLE_AT_CHAT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "top_k": (0, -1),
    "skip_special_tokens": (True,),
    "include_reasoning": (True,),
    "add_generation_prompt": (True,),
}


def of_chat(declared: Iterable[str]) -> Fields:
    """Table of an API that is translated to chat: CHAT, and the chat body's fields (`declared`) as Refused."""
    here = {name: Refused(_AT_CHAT, _IDLE_AT_CHAT.get(name, Refused("").idle)) for name in declared}
    return {**CHAT, **here}


RESPONSES: Fields = {
    **{name: entry for name, entry in _ACCOUNT.items() if name not in ("user", "metadata")},  # the answer repeats both
    "messages": Refused("send input"),
    "max_tokens": Refused("send max_output_tokens"),
    "max_completion_tokens": Refused("send max_output_tokens"),
    "reasoning_effort": Refused("send reasoning.effort"),
    "response_format": Refused("send text.format"),
    **_MODERATION,
    "access_programs": _HOSTED,
    "background_options": _HOSTED,
    "context_management": "the whole conversation is read, nothing is taken out",
    "image": "of generated images, which no model here makes",
}
_IN_A_COUNT = "it changes no prompt"
INPUT_TOKENS: Fields = {
    **dict.fromkeys(
        (
            "background",
            "cache_salt",
            "deadline_seconds",
            "include",
            "max_output_tokens",
            "max_tool_calls",
            "metadata",
            "priority",
            "store",
            "stream",
            "stream_options",
            "temperature",
            "top_logprobs",
            "top_p",
            "user",
        ),
        _IN_A_COUNT,
    ),
    "personality": Refused("say in instructions how to answer"),
    "prompt": Refused("send instructions and input"),
}
REASONING: Fields = {
    "generate_summary": "the older name of summary",
    "context": Refused("earlier thoughts stay as the model's template wants it", ("auto", "current_turn")),
    "mode": Refused("there is one mode", ("standard",)),
}
TEXT: Fields = _VERBOSITY

# Messages: fields of the API, and what Bedrock and Vertex clients put into the body.
MESSAGES: Fields = {
    **dict.fromkeys(
        (
            "metadata",
            "service_tier",
            "betas",
            "anthropic_beta",
            "anthropic_version",
            "billing_policy",
            "fallback_credit_token",
            "inference_geo",
            "user_profile_id",
            "workspace_id",
            "diagnostics",
            "client_metadata",
        ),
        _HOSTED,
    ),
    "cache_control": "the prefix cache needs no marks",
    "speed": "there is one speed",
    "context_management": "the whole conversation is read, nothing is taken out",
    "fallbacks": "there is one model, which refuses nothing by policy",
    "compaction": Refused("ask for a summary in a message"),
    "thread": Refused("send the whole conversation, or use /v1/responses"),
    "max_completion_tokens": Refused("send max_tokens"),
    "stop": Refused("send stop_sequences"),
    "reasoning_effort": Refused("send output_config.effort"),
    "response_format": Refused("send output_config.format"),
    "container": Refused("only tools that the client runs are served"),
    "mcp_servers": Refused("only tools that the client runs are served"),
}
COUNT: Fields = dict.fromkeys(
    (
        "cache_salt",
        "deadline_seconds",
        "max_tokens",
        "priority",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
    ),
    _IN_A_COUNT,
)
THINKING: Fields = {
    "display": "thoughts are always shown",
    "block_binding": "thoughts of earlier turns are not checked",
}
OUTPUT_CONFIG: Fields = {"task_budget": "no model of this family sees a budget: max_tokens bounds an answer"}

# Known fields of objects that no body declares. Messages and tools may have others, in which clients keep data; only
# typos are refused.
_RESPONSE_FORMAT: Mapping[str, tuple[str, ...]] = {
    "response_format": ("type", "json_schema"),
    "response_format.json_schema": ("name", "description", "schema", "strict"),
}
_MESSAGE = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "partial",
    "prefix",
)
_FUNCTION = ("name", "description", "parameters", "strict")


def check(given: Mapping[str, Any], declared: Collection[str], table: Fields, where: str, *, lenient: bool) -> None:
    """RequestError for the first unacceptable field of `given`, which holds only fields that are not `declared`.

    `where` is put before names, e.g. "thinking." `lenient`: unknown fields are ignored.
    """
    for name, value in given.items():
        entry = table.get(name)
        if isinstance(entry, Refused):
            if entry.asks(value):
                raise RequestError(
                    f"{where}{name} is not supported: {entry.use}", param=where + name, code="unsupported_parameter"
                )
        elif entry is None:
            _unknown(name, [*declared, *(n for n, e in table.items() if isinstance(e, str))], where, lenient)


def check_response_format(given: Any, *, lenient: bool) -> None:
    """RequestError for an unknown field of a chat body's response_format."""
    for where, known in _RESPONSE_FORMAT.items():
        if isinstance(given, Mapping):
            unknown = {str(name): value for name, value in given.items() if name not in known}
            check(unknown, known, {}, f"{where}.", lenient=lenient)
            given = given.get("json_schema")


def check_open(messages: Sequence[Any], tools: Sequence[Any], *, lenient: bool) -> None:
    """RequestError for a field of a chat message or a tool that looks like a typo of a known one."""
    left = iter(range(MAX_COMPARED_NAMES))
    for i, message in enumerate(messages):
        _check_typos(message, _MESSAGE, f"messages[{i}]", lenient, left)
    for i, tool in enumerate(tools):
        _check_typos(tool.get("function"), _FUNCTION, f"tools[{i}].function", lenient, left)


def _check_typos(given: Any, known: Collection[str], where: str, lenient: bool, left: Iterator[int]) -> None:
    for name, _ in zip(given.keys() - known if isinstance(given, Mapping) else (), left):
        missing = [k for k in known if k not in given]
        if given[name] is not None and difflib.get_close_matches(str(name)[:MAX_NAME_CHARS], missing, 1, TYPO_RATIO):
            _unknown(str(name), missing, f"{where}.", lenient)


def _unknown(name: str, known: Collection[str], where: str, lenient: bool) -> None:
    spelled = (where + name)[:MAX_NAME_CHARS]
    if lenient:
        if spelled not in _warned and len(_warned) < MAX_WARNED_NAMES:
            _warned.add(spelled)
            log.warning("request field %r is unknown and ignored (said once)", spelled)
        return
    snake = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name[:MAX_NAME_CHARS]).lower()  # some clients send camelCase
    found = difflib.get_close_matches(snake, known, 1) or [k for k in known if len(snake) > 3 and snake in k]
    remedy = f"did you mean {where + found[0]!r}?" if found else "leave it out (serve --lenient-fields ignores such)"
    raise RequestError(f"unknown field {spelled!r}: {remedy}", param=spelled, code="unknown_parameter")
