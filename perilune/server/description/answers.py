"""Schemas of the endpoints' answers, for /openapi.json only: no answer is made of these classes. Tests check that every
answer of the examples and of the fuzzed requests has their fields and no others."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """`param`: the field that is wrong. `code`: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error of any API but the Messages API."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """`details`, an error_code for programs, is there only if the request has the field thread."""

    type: str
    message: str
    details: dict[str, str] = {}


class MessagesError(BaseModel):
    """An error of the Messages API, and of the list of models for Anthropic's clients."""

    type: Literal["error"]
    error: MessagesErrorDetail


# ---- chat and completions


class PromptTokens(BaseModel):
    """`image_tokens` and `video_tokens`, those of pictures and videos, are there only if there are any."""

    cached_tokens: int
    image_tokens: int = 0
    video_tokens: int = 0


class CompletionTokens(BaseModel):
    """`acceptance_length`: tokens per step that had drafts."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    acceptance_length: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class Head(BaseModel):
    """`system_fingerprint` is there only where the model has random weights."""

    id: str
    created: int
    model: str
    system_fingerprint: str = ""


class Function(BaseModel):
    """`arguments`: JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: Function


class FunctionPart(BaseModel):
    name: str = ""
    arguments: str


class ToolCallPart(BaseModel):
    """`id`, `type` and the function's name come with the first part of a call."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionPart


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChosenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class Choice(BaseModel):
    """`closed_by_grammar`: max_tokens ran out before the form was complete, and the grammar closed it."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    closed_by_grammar: bool = False
    token_ids: list[int] = []


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class Delta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallPart] = []


class ChunkChoice(BaseModel):
    """`finish_reason` is null except in the last chunk of a choice."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: ChatLogprobs | None = None
    closed_by_grammar: bool = False
    token_ids: list[int] = []


class ChatCompletionChunk(Head):
    """An event of a stream. With stream_options.include_usage the last one has the usage and no choice."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


class LogprobLists(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Choice):
    text: str
    logprobs: LogprobLists | None
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: LogprobLists | None
    closed_by_grammar: bool = False
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionChunk(Head):
    """An event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None


# ---- responses


class TextPart(BaseModel):
    """Text of a message or of a thought."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class Item(BaseModel):
    """An item of the output: message, reasoning, function_call (`arguments`) or custom_tool_call (`input`)."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[TextPart] = []
    summary: list[Any] = []
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""


class InputTokens(BaseModel):
    """`image_tokens` and `video_tokens`, those of pictures and videos, are there only if there are any."""

    cached_tokens: int
    image_tokens: int = 0
    video_tokens: int = 0
    cache_write_tokens: int


class OutputTokens(BaseModel):
    reasoning_tokens: int


class InputTokenCount(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]
    closed_by_grammar: bool = False


class ResponseError(BaseModel):
    code: str
    message: str


class ResponseReasoning(BaseModel):
    effort: str | None
    summary: str | None


class ResponseText(BaseModel):
    format: dict[str, Any]


class Response(BaseModel):
    """What the request asked for and what came of it."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    completed_at: int | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    service_tier: str
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(BaseModel):
    """A page of the items that the request sent. `has_more`: `after` with `last_id` gives the next page."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---- messages


class Block(BaseModel):
    """text, thinking or tool_use."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class Message(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    closed_by_grammar: bool = False
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


# ---- models and the server


class Capabilities(BaseModel):
    chat: bool
    thinking: str
    tools: bool
    structured_output: bool
    input: list[str]


class Model(BaseModel):
    """`synthetic` and `declared_acceptance` are there only where the model has random weights."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    capabilities: Capabilities
    sampling_defaults: dict[str, dict[str, float]]
    synthetic: str = ""
    declared_acceptance: float | None = None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class MessagesModel(BaseModel):
    """A model as Anthropic's clients know it: requests with the header anthropic-version get this form."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class MessagesModelList(BaseModel):
    data: list[MessagesModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class KeyUsage(BaseModel):
    """`key`: its name, null on a server without keys."""

    key: str | None
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    in_flight: int


class UsageReport(BaseModel):
    object: Literal["usage"]
    since: int
    data: list[KeyUsage]


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] = []


class Detokenized(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    model_max_length: int


class Status(BaseModel):
    """`synthetic` and `declared_acceptance` are there only where the model has random weights."""

    status: Literal["ok"]
    synthetic: str = ""
    declared_acceptance: float | None = None
