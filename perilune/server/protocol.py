"""The request bodies of the OpenAI-compatible endpoints, and the pieces all answers share.

Types are strict ("1" is not a number). A field nobody knows is ignored with one warning per name; a known OpenAI field
that Perilune does not act on is refused by name, never silently dropped.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from starlette.responses import Response

from perilune.core.errors import RequestError
from perilune.core.plan import TokenLogprob
from perilune.core.sampling import MAX_LOGPROBS, SamplingParams
from perilune.server.errors import from_validation
from perilune.text.tokenizer import Tokenizer

log = logging.getLogger("perilune.server")

MAX_WARNED = 256
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot spell
_warned: set[str] = set()

Strings = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None


class Thinking(Body):
    """Kimi's own switch. `keep`: "all" preserves the reasoning of earlier turns."""

    type: Literal["enabled", "disabled"]
    keep: Literal["all"] | None = None


class TemplateKwargs(Body):
    thinking: bool | None = None
    preserve_thinking: bool | None = None


class SamplingBody(Body):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Strings | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Known, not acted on yet.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    def check_supported(self) -> None:
        """RequestError for what would otherwise be silently ignored."""
        if self.n not in (None, 1):
            raise RequestError(f"n must be 1, not {self.n}: send the request several times", param="n")
        neutral: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("frequency_penalty", (None, 0.0)),
            ("presence_penalty", (None, 0.0)),
            ("repetition_penalty", (None, 1.0)),
            ("logit_bias", (None, {})),
        )
        for name, values in neutral:
            if getattr(self, name) not in values:
                raise unsupported(name)
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise RequestError(
                "response_format other than {'type': 'text'} is not supported yet",
                param="response_format",
                code="unsupported_parameter",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(
        self,
        defaults: Mapping[str, float],
        *,
        max_tokens: int,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The request's sampling parameters; `defaults` has values for fields of SamplingParams it leaves out."""
        chosen: dict[str, Any] = dict(defaults)
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if (value := getattr(self, name)) is not None:
                chosen[name] = value
        if chosen.get("top_k") == -1:  # a common spelling of "all"
            chosen["top_k"] = 0
        return SamplingParams(
            **chosen,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class ChatBody(SamplingBody):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    def check_supported(self) -> None:
        super().check_supported()
        if not self.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not supported: use tools and tool_choice", param=name)
        if self.parallel_tool_calls is False:
            raise unsupported("parallel_tool_calls: false", param="parallel_tool_calls")
        if self.tool_choice not in (None, "none", "auto"):
            forced = self.tool_choice == "required" or isinstance(self.tool_choice, dict)
            raise RequestError(
                "tool_choice 'required' or a named function comes with grammar enforcement, which is not built yet: "
                "use 'auto' or 'none'"
                if forced
                else "tool_choice must be 'none', 'auto', 'required' or a function",
                param="tool_choice",
                code="unsupported_parameter" if forced else "invalid_value",
            )
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {self.top_logprobs}", param="top_logprobs"
                )
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError("max_tokens and max_completion_tokens differ: send one", param="max_tokens")

    @property
    def declared_tools(self) -> list[dict[str, Any]] | None:
        """With tool_choice "none" the model is not shown any tool, so that it does not try."""
        return None if self.tool_choice == "none" else self.tools or None

    def think(self) -> bool:
        kimi = None if self.thinking is None else self.thinking.type == "enabled"
        kwargs = None if self.chat_template_kwargs is None else self.chat_template_kwargs.thinking
        return _agreed("thinking", kimi, kwargs) is not False

    def preserve_thinking(self) -> bool:
        kimi = True if self.thinking is not None and self.thinking.keep == "all" else None
        kwargs = None if self.chat_template_kwargs is None else self.chat_template_kwargs.preserve_thinking
        return bool(_agreed("preserve_thinking", kimi, kwargs))


class CompletionBody(SamplingBody):
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check_supported(self) -> None:
        super().check_supported()
        if self.best_of not in (None, 1):
            raise unsupported("best_of above 1", param="best_of")
        if self.suffix:
            raise unsupported("suffix")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs must be between 0 and {MAX_LOGPROBS}, not {self.logprobs}", param="logprobs")


class TokenizeBody(Body):
    """Either a raw prompt or a conversation, rendered as /v1/chat/completions would."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """The validated body; RequestError names the field that is wrong."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as e:
        raise from_validation(e) from e
    _warn_unknown(parsed, "")
    return parsed


def _warn_unknown(body: Body, prefix: str) -> None:
    for name in body.model_extra or ():
        # Bounded, because names come from clients.
        spelled = (prefix + name)[:64]
        if spelled not in _warned and len(_warned) < MAX_WARNED:
            _warned.add(spelled)
            log.warning("request field %r is unknown and ignored (said once)", spelled)
    for name in type(body).model_fields:
        if isinstance(inner := getattr(body, name), Body):
            _warn_unknown(inner, f"{prefix}{name}.")


def _agreed(name: str, kimi: bool | None, kwargs: bool | None) -> bool | None:
    if kimi is not None and kwargs is not None and kimi != kwargs:
        raise RequestError(f"thinking and chat_template_kwargs.{name} contradict each other", param="thinking")
    return kwargs if kimi is None else kimi


def unsupported(name: str, *, param: str | None = None) -> RequestError:
    return RequestError(f"{name} is not supported yet", param=param or name, code="unsupported_parameter")


def json_response(payload: Any) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")


def usage(prompt: int, completion: int, cached: int, reasoning: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """One element of logprobs.content."""

    def spell(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    top: Sequence[tuple[int, float]] = entry.top
    return {**spell(entry.token, entry.logprob), "top_logprobs": [spell(t, p) for t, p in top]}
