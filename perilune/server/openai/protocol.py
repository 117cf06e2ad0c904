"""The request bodies of the OpenAI-compatible endpoints, and the pieces all answers share.

Types are strict ("1" is not a number). What becomes of fields that a body does not declare is in server/fields.py.
"""

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, PrivateAttr
from starlette.responses import Response

from perilune.core.errors import RequestError, shown
from perilune.core.messages import Delta, Order
from perilune.core.sampling import MAX_BIASED, MAX_LOGPROBS, SamplingParams
from perilune.core.step import TokenLogprob
from perilune.grammar.constrain import AnswerFormat
from perilune.server import fields
from perilune.server.answer_format import Effort, answer_format, thinking_budget
from perilune.server.body import Body, RequestBody
from perilune.text.chat import PromptOptions
from perilune.text.stream import Style
from perilune.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON cannot spell
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
)
MAX_SALT_CHARS = 256
MAX_PRIORITIES = 100
MAX_DEADLINE_SECONDS = 86_400
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

Strings = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class StreamOptions(Body):
    """`continuous_usage_stats`: every chunk has the usage so far."""

    FIELDS: ClassVar = fields.STREAM_OPTIONS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Thinking(Body):
    """Kimi's field `thinking`. `keep`: "all" preserves the reasoning of earlier turns. `budget_tokens`: see
    ChatBody."""

    type: Literal["enabled", "disabled"]
    keep: Literal["all"] | None = None
    budget_tokens: int | None = None


class TemplateKwargs(Body):
    thinking: bool | None = None
    preserve_thinking: bool | None = None


class SamplingBody(RequestBody):
    """The common fields of chat and text completions.

    `truncate_prompt_tokens`: the prompt's last (`truncation_side` "right": first) tokens to keep; -1: as many as the
    context holds beside max_tokens. `request_id` becomes part of the response's id. `cache_salt`: only requests with
    the same one share cached KV. `priority`: 0 to 100, larger ones are admitted later. `deadline_seconds`: an answer
    that is not complete by then ends with error 504.
    """

    MAX_MEMBERS: ClassVar = {"logit_bias": MAX_BIASED}
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
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Strings | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_seconds: float | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: dict[str, Any] | None = None

    def check_supported(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed: send stream: false", param="prompt_logprobs")
        if (kept := self.truncate_prompt_tokens) is not None and kept != -1 and kept < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, or -1 for what the context holds, not {shown(kept)}",
                param="truncate_prompt_tokens",
            )
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_CHARS:
            raise RequestError(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters", param="cache_salt")
        if self.priority is not None and not 0 <= self.priority <= MAX_PRIORITIES:
            raise RequestError(
                f"priority must be 0 to {MAX_PRIORITIES}, not {shown(self.priority)}: larger ones are served later",
                param="priority",
            )
        if (seconds := self.deadline_seconds) is not None and not 0 < seconds <= MAX_DEADLINE_SECONDS:
            raise RequestError(
                f"deadline_seconds must be above 0 and at most {MAX_DEADLINE_SECONDS}, not {seconds:g}",
                param="deadline_seconds",
            )
        if self.request_id is not None and not _REQUEST_ID.fullmatch(self.request_id):
            raise RequestError(
                "request_id must be 1 to 128 printable ASCII characters without spaces", param="request_id"
            )

    def check_nested(self, *, lenient: bool) -> None:
        fields.check_response_format(self.response_format, lenient=lenient)

    def truncated(self, prompt: list[int], answer: int | None, context: int) -> list[int]:
        """The part of the prompt that `truncate_prompt_tokens` keeps; `answer`: tokens that may follow, if bounded.

        `context`: tokens of prompt and answer together, at most.
        """
        kept = self.truncate_prompt_tokens
        if kept is None:
            return prompt
        if kept == -1:
            kept = max(context - max(answer or 1, 1), 1)
        return prompt[:kept] if self.truncation_side == "right" else prompt[-kept:]

    @property
    def cache_keys(self) -> tuple[str, ...]:
        """Submit.cache_keys: only requests with equal ones share cached KV."""
        return () if self.cache_salt is None else (f"salt:{self.cache_salt}",)

    @property
    def order(self) -> Order:
        return Order(self.priority or 0, self.deadline_seconds)

    def response_id(self, prefix: str) -> str:
        return f"{prefix}-{self.request_id or uuid.uuid4().hex}"

    @property
    def stream_style(self) -> Style:
        return Style(bool(self.include_stop_str_in_output), self.skip_special_tokens is False)

    def answer_format(self) -> AnswerFormat | None:
        guided = {kind: getattr(self, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
        return answer_format(self.response_format, guided, self.structured_outputs)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

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
        for name in SAMPLING_FIELDS:
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
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class ContinuedBody(RequestBody):
    """vLLM's fields that say whether the last message is the beginning of the answer; text/beginning.py has other ways.

    `add_generation_prompt`: true: the answer is a new message. false with `continue_final_message`: the answer goes on
    with the last message. false alone, for /tokenize: the conversation is rendered without the head of an answer.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def continues(self) -> bool | None:
        """Whether the last message should be continued, by these fields; None: they do not say."""
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message contradict each other: send one of them",
                param="add_generation_prompt",
            )
        return False if self.add_generation_prompt else self.continue_final_message


class ChatBody(SamplingBody, ContinuedBody):
    """`echo`: an answer that continues the last message begins with that message's text.

    `thinking_token_budget` is vLLM's name of max_thinking_tokens; -1 is no bound.
    """

    FIELDS: ClassVar = fields.CHAT
    PROMPT: ClassVar = ("messages",)
    messages: list[dict[str, Any]]
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking: Thinking | None = None
    max_thinking_tokens: int | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    _head: list[dict[str, Any]] | None = PrivateAttr(default=None)

    def check_supported(self) -> None:
        super().check_supported()
        if not self.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise RequestError(
                    f"{name} is not supported: use tools and tool_choice", param=name, code="unsupported_parameter"
                )
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {shown(self.top_logprobs)}",
                    param="top_logprobs",
                )
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
        if self.truncate_prompt_tokens is not None and self.truncation_side == "right":
            raise RequestError(
                "truncation_side 'right' would cut off the assistant's turn: use 'left'", param="truncation_side"
            )
        self.thinking_budget()

    def check_nested(self, *, lenient: bool) -> None:
        super().check_nested(lenient=lenient)
        fields.check_open(self.messages, self.tools or (), lenient=lenient)

    def declare_first(self, tools: list[dict[str, Any]]) -> None:
        """Declares only these tools at the head of the prompt; the tools that can be called are still `tools`."""
        self._head = tools

    @property
    def head_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the prompt declares. None with tool_choice "none", so that the model calls none."""
        return None if self.tool_choice == "none" else (self.tools if self._head is None else self._head) or None

    def think(self) -> bool | None:
        """Whether the model should think; None: its default."""
        kwargs = None if self.chat_template_kwargs is None else self.chat_template_kwargs.thinking
        asked = {
            "thinking": None if self.thinking is None else self.thinking.type == "enabled",
            "chat_template_kwargs.thinking": kwargs,
        }
        effort = None if self.reasoning_effort is None else self.reasoning_effort != "none"
        said = _agreed({**asked, "reasoning_effort": effort})
        # An effort only bounds the thought; it does not switch thinking on for a model that cannot think.
        return None if said and not any(asked.values()) else said

    def preserve_thinking(self) -> bool | None:
        kimi = True if self.thinking is not None and self.thinking.keep == "all" else None
        kwargs = None if self.chat_template_kwargs is None else self.chat_template_kwargs.preserve_thinking
        return _agreed({"thinking.keep": kimi, "chat_template_kwargs.preserve_thinking": kwargs})

    def prompt_options(self) -> PromptOptions:
        return {
            "thinking": self.think(),
            "preserve_thinking": self.preserve_thinking(),
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": self.continues(),
        }

    def thinking_budget(self) -> int | None:
        """Limit of the thought, tokens; None: no limit."""
        limits = {
            "max_thinking_tokens": self.max_thinking_tokens,
            "thinking_token_budget": None if self.thinking_token_budget == -1 else self.thinking_token_budget,
            "thinking.budget_tokens": None if self.thinking is None else self.thinking.budget_tokens,
        }
        budget = thinking_budget(limits, self.reasoning_effort)
        if budget and self.think() is False:
            name = next(name for name, limit in limits.items() if limit)
            raise RequestError(f"{name} is {budget}, but thinking is switched off: leave it out", param=name)
        return budget


class CompletionBody(SamplingBody):
    FIELDS: ClassVar = fields.COMPLETION
    PROMPT: ClassVar = ("prompt",)
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check_supported(self) -> None:
        super().check_supported()
        if self.stream and self.best_of is not None and self.best_of > self.wanted:
            raise RequestError("best_of above n cannot be streamed: send stream: false", param="best_of")
        if self.suffix:
            raise RequestError(
                "suffix is not supported: the model only continues a prompt",
                param="suffix",
                code="unsupported_parameter",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"logprobs must be between 0 and {MAX_LOGPROBS}, not {shown(self.logprobs)}", param="logprobs"
            )

    @property
    def wanted(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def silent(self) -> bool:
        """Whether only the prompt is wanted (max_tokens 0): the one token that the engine generates is dropped."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scored_prompt(self) -> int | None:
        """How many likeliest tokens to report at each prompt token: `prompt_logprobs`, or `echo` with `logprobs`."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)


class TokenizeBody(ContinuedBody):
    """Either a raw prompt or a conversation, rendered as /v1/chat/completions would.

    `add_special_tokens` changes nothing: no prompt of this family begins with a token of its own.
    """

    FIELDS: ClassVar = fields.TOKENIZE
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    tokens: list[int]


def _agreed(votes: Mapping[str, bool | None]) -> bool | None:
    """The common value of all fields that are set, None if none is; RequestError if they differ."""
    said = {name: vote for name, vote in votes.items() if vote is not None}
    if len(set(said.values())) > 1:
        first = next(iter(said))
        other = next(name for name in said if said[name] != said[first])
        raise RequestError(f"{first} and {other} contradict each other", param=first.partition(".")[0])
    return next(iter(said.values()), None)


def json_response(payload: Any) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")


@dataclass(slots=True)
class Predictions:
    """Counts of speculation over generations: steps that had drafts, drafts, and accepted drafts."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, delta: Delta) -> None:
        self.steps += delta.verified or delta.drafted > 0
        self.drafted += delta.drafted
        self.accepted += delta.accepted

    @classmethod
    def total(cls, parts: Iterable["Predictions"]) -> "Predictions":
        parts = list(parts)
        return cls(sum(p.steps for p in parts), sum(p.drafted for p in parts), sum(p.accepted for p in parts))


def usage(
    prompt: int,
    completion: int,
    cached: int,
    reasoning: int,
    predictions: Predictions,
    media: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """OpenAI's usage object, and `acceptance_length`: tokens per step with drafts, 1 + accepted drafts.
    `media`: image_tokens and video_tokens, if there are any."""
    p = predictions
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, **(media or {})},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": p.accepted,
            "rejected_prediction_tokens": p.drafted - p.accepted,
            "acceptance_length": round(1 + p.accepted / p.steps, 3) if p.steps else 1.0,
        },
    }


def named(token: int) -> str:
    """A token by its id, for `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprob, *, as_ids: bool = False) -> dict[str, Any]:
    """One element of logprobs.content; `as_ids`: tokens are spelled as `named` does."""

    def spell(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        text = named(token) if as_ids else raw.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    top: Sequence[tuple[int, float]] = entry.top
    return {**spell(entry.token, entry.logprob), "top_logprobs": [spell(t, p) for t, p in top]}


def prompt_logprob_table(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form: for each prompt token its own and the `count` likeliest tokens by id; None for the first token.

    `rank` counts from 1 and is null for a token that is not among the likeliest.
    """

    def row(entry: TokenLogprob) -> dict[str, dict[str, Any]]:
        ranked: list[tuple[int, float, int | None]] = [(t, p, rank) for rank, (t, p) in enumerate(entry.top[:count], 1)]
        if all(t != entry.token for t, _, _ in ranked):
            ranked.append((entry.token, entry.logprob, None))
        return {
            str(t): {
                "logprob": finite(p),
                "rank": rank,
                "decoded_token": tokenizer.token_bytes(t).decode(errors="replace"),
            }
            for t, p, rank in ranked
        }

    return [None, *map(row, entries)]
