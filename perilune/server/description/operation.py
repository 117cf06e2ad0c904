"""Every endpoint: what it is for, the type of its body, what it answers and one request to try."""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pydantic import BaseModel

from perilune.server.anthropic.messages import VERSION
from perilune.server.anthropic.protocol import CountBody, MessagesBody
from perilune.server.batches.api import MAX_PAGE_BATCHES, PAGE_BATCHES, PAGE_FILES
from perilune.server.batches.protocol import BatchBody
from perilune.server.body import RequestBody
from perilune.server.description import answers, batch_answers
from perilune.server.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from perilune.server.responses.items import MAX_PAGE_ITEMS, PAGE_ITEMS
from perilune.server.responses.protocol import InputTokensBody, ResponsesBody

HTML, PLAIN, JSON, EVENTS = "text/html", "text/plain", "application/json", "text/event-stream"
BYTES, FORM = "application/octet-stream", "multipart/form-data"
_QUESTION = {"role": "user", "content": "What is 347 + 589?"}
EXAMPLE_IDS = {"responses": "resp_1", "files": "file-1", "batches": "batch_1", "models": "kimi-nano"}
_READS_MODEL = "Anthropic's clients, known by the header anthropic-version, get the form of their API."


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the query, or a header."""

    name: str
    schema: Mapping[str, Any]
    meaning: str
    place: str = "query"


@dataclass(frozen=True, slots=True)
class Operation:
    """A route and method.

    body      type of the request's body; None: it has none
    answer    type of the answer with status 200, or the media type of one that is not JSON
    other     form of the answer for clients with the header anthropic-version
    event     type of the data of a stream's events, if they have no names; events: their names, if they have
    errors    statuses of errors besides those of every endpoint
    example   body of a request to try; `example_query` follows its path
    form      meanings of the fields of a multipart body; `form_example`: such fields as curl sends them
    """

    method: str
    path: str
    tag: str
    summary: str
    _: KW_ONLY
    meaning: str = ""
    body: type[RequestBody] | None = None
    answer: type[BaseModel] | str
    other: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    events: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    example: Mapping[str, Any] | None = None
    example_query: str = ""
    form: Mapping[str, str] | None = None
    form_example: tuple[str, ...] = ()

    @property
    def example_path(self) -> str:
        path = re.sub(r"(\w+)/\{\w+\}", lambda found: f"{found[1]}/{EXAMPLE_IDS[found[1]]}", self.path)
        return path + self.example_query


GENERATION_ERRORS = (429, 500, 503, 504)
ANTHROPIC_VERSION = Parameter(VERSION, {"type": "string"}, "a date; with it the answer has Anthropic's form", "header")
_FILES = "With serve --files-dir DIR; otherwise a 404."


def _limit(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


_AFTER = Parameter("after", {"type": "string"}, "an id of the list: what follows it is sent")
RESPONSE_EVENTS = (
    *(f"response.{name}" for name in ("created", "in_progress", "completed", "incomplete", "failed")),
    *(f"response.{name}" for name in ("output_item.added", "output_item.done")),
    *(f"response.{name}" for name in ("content_part.added", "content_part.done")),
    *(f"response.{part}.{when}" for part in ("output_text", "reasoning_text") for when in ("delta", "done")),
    *(
        f"response.{what}.{when}"
        for what in ("function_call_arguments", "custom_tool_call_input")
        for when in ("delta", "done")
    ),
)
BACKGROUND_EVENTS = (*RESPONSE_EVENTS, "response.cancelled", "error")
MESSAGE_EVENTS = (
    "message_start",
    "ping",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "chat",
        "The next message of a conversation",
        meaning="OpenAI's API, with the fields of vLLM. A thought comes as reasoning_content.",
        body=ChatBody,
        answer=answers.ChatCompletion,
        event=answers.ChatCompletionChunk,
        errors=GENERATION_ERRORS,
        example={"messages": [_QUESTION], "max_tokens": 400},
    ),
    Operation(
        "POST",
        "/v1/completions",
        "completions",
        "The continuation of a text",
        meaning="The prompt is taken as it is: no chat template, control tokens included.",
        body=CompletionBody,
        answer=answers.Completion,
        event=answers.CompletionChunk,
        errors=GENERATION_ERRORS,
        example={"prompt": "The capital of Norway is", "max_tokens": 8, "temperature": 0},
    ),
    Operation(
        "POST",
        "/v1/responses",
        "responses",
        "The next response of a conversation",
        meaning="Finished responses are kept for the API key that made them, until newer ones need the room: "
        "previous_response_id continues one.",
        body=ResponsesBody,
        answer=answers.Response,
        events=BACKGROUND_EVENTS,
        errors=GENERATION_ERRORS,
        example={"input": "What is 347 + 589?", "instructions": "Answer briefly.", "max_output_tokens": 400},
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "responses",
        "Number of prompt tokens of the same request to /v1/responses",
        meaning="Nothing is generated or kept. Without input, instructions or the conversation so far are counted.",
        body=InputTokensBody,
        answer=answers.InputTokenCount,
        example={"input": "What is 347 + 589?", "instructions": "Answer briefly."},
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        "responses",
        "A response that is stored, or is being made in the background",
        answer=answers.Response,
        events=BACKGROUND_EVENTS,
        errors=(400, 404),
        parameters=(
            Parameter(
                "stream",
                {"enum": ["true", "false"]},
                "true: the events, of a response that was made with background and stream true",
            ),
            Parameter(
                "starting_after",
                {"type": "integer", "minimum": -1, "maximum": 2**53},
                "number of an event: those after it are sent",
            ),
        ),
    ),
    Operation(
        "DELETE",
        "/v1/responses/{id}",
        "responses",
        "Forgets a stored response",
        answer=answers.DeletedResponse,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/v1/responses/{id}/cancel",
        "responses",
        "Ends a response that is made in the background",
        meaning="What it has so far stays. One that has ended is answered as it is.",
        answer=answers.Response,
        errors=(400, 404),
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        "responses",
        "The items that the request of a response sent",
        meaning="Those of the responses that it continues are theirs.",
        answer=answers.InputItems,
        errors=(400, 404),
        parameters=(
            Parameter("order", {"enum": ["asc", "desc"]}, "desc, the default: the last item first"),
            Parameter(
                "limit",
                _limit(MAX_PAGE_ITEMS),
                f"items of a page, {PAGE_ITEMS} by default",
            ),
            Parameter("after", {"type": "string"}, "id of an item: those after it are sent"),
        ),
        example_query="?order=asc",
    ),
    Operation(
        "POST",
        "/v1/files",
        "batches",
        "Keeps a file of requests for a batch",
        meaning=f"{_FILES} A line is a request: "
        '`{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}`. '
        "serve --max-body-mb bounds the size of a file, --files-gb that of all files.",
        answer=batch_answers.File,
        errors=(400, 404, 408, 413, 415, 503, 507),
        form={
            "file": "the file, with its name",
            "purpose": 'must be "batch"',
            "expires_after[anchor]": "created_at",
            "expires_after[seconds]": "when the file is deleted, 3,600 to 2,592,000; 30 days by default",
        },
        form_example=("purpose=batch", "file=@requests.jsonl"),
    ),
    Operation(
        "GET",
        "/v1/files",
        "batches",
        "The files of the key",
        answer=batch_answers.FileList,
        errors=(400, 404),
        parameters=(
            Parameter("purpose", {"type": "string"}, "only files of this purpose"),
            Parameter("order", {"enum": ["asc", "desc"]}, "desc, the default: the newest first"),
            Parameter("limit", _limit(PAGE_FILES), "files of a page"),
            _AFTER,
        ),
    ),
    Operation("GET", "/v1/files/{id}", "batches", "What a file is", answer=batch_answers.File, errors=(404,)),
    Operation(
        "DELETE",
        "/v1/files/{id}",
        "batches",
        "Deletes a file that no batch reads",
        answer=batch_answers.DeletedFile,
        errors=(400, 404),
    ),
    Operation("GET", "/v1/files/{id}/content", "batches", "A file itself", answer=BYTES, errors=(404,)),
    Operation(
        "POST",
        "/v1/batches",
        "batches",
        "Answers all requests of a file when the engine has room beside other requests",
        meaning=f"{_FILES} At most half of the requests that the engine computes together are batches', they begin "
        "only while there is room for more, and wait until no other request waits. The key's limits hold: what is "
        "beyond them waits. A server that starts again goes on where the last one was. Answers come in two files, of "
        "those with status 200 and of others, in any order: custom_id says which is which.",
        body=BatchBody,
        answer=batch_answers.Batch,
        errors=(429, 507),
        example={
            "input_file_id": "file-1",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    ),
    Operation(
        "GET",
        "/v1/batches",
        "batches",
        "The batches of the key, the newest first",
        answer=batch_answers.BatchList,
        errors=(400, 404),
        parameters=(
            Parameter(
                "limit",
                _limit(MAX_PAGE_BATCHES),
                f"batches of a page, {PAGE_BATCHES} by default",
            ),
            _AFTER,
        ),
    ),
    Operation("GET", "/v1/batches/{id}", "batches", "How far a batch is", answer=batch_answers.Batch, errors=(404,)),
    Operation(
        "POST",
        "/v1/batches/{id}/cancel",
        "batches",
        "Ends a batch",
        meaning="What was answered stays, in the batch's files.",
        answer=batch_answers.Batch,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/v1/messages",
        "messages",
        "The next message, as Anthropic's API has it",
        body=MessagesBody,
        answer=answers.Message,
        events=MESSAGE_EVENTS,
        errors=GENERATION_ERRORS,
        example={"max_tokens": 400, "messages": [_QUESTION]},
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "messages",
        "Number of prompt tokens of the same request to /v1/messages",
        body=CountBody,
        answer=answers.TokenCount,
        example={"messages": [_QUESTION]},
    ),
    Operation(
        "GET",
        "/v1/models",
        "models",
        "The served model, what it can do, and how it samples by itself",
        meaning=_READS_MODEL,
        answer=answers.ModelList,
        other=answers.MessagesModelList,
    ),
    Operation(
        "GET",
        "/v1/models/{model}",
        "models",
        "The served model by its name",
        meaning=_READS_MODEL,
        answer=answers.Model,
        other=answers.MessagesModel,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokens",
        "Token ids of a text or of a conversation",
        body=TokenizeBody,
        answer=answers.Tokens,
        example={"prompt": "Hello", "return_token_strs": True},
    ),
    Operation(
        "POST",
        "/detokenize",
        "tokens",
        "The text of token ids",
        body=DetokenizeBody,
        answer=answers.Detokenized,
        example={"tokens": [72, 101]},
    ),
    Operation("GET", "/tokenizer_info", "tokens", "The tokenizer's kind and end tokens", answer=answers.TokenizerInfo),
    Operation(
        "GET",
        "/v1/usage",
        "server",
        "What the key of the request has used since the server's start",
        meaning="A key with operator = true gets every key's.",
        answer=answers.UsageReport,
    ),
    Operation(
        "GET",
        "/health",
        "server",
        "200 while requests are taken, else 503",
        answer=answers.Status,
        errors=(503,),
    ),
    Operation(
        "GET",
        "/health/ready",
        "server",
        "The same as /health: the probe of readiness",
        answer=answers.Status,
        errors=(503,),
    ),
    Operation(
        "GET",
        "/health/live",
        "server",
        "200 while the server process answers: the probe of liveness",
        answer=answers.Status,
    ),
    Operation(
        "GET",
        "/metrics",
        "server",
        "Counts and times in Prometheus' text form",
        meaning="With keys, only for one with operator = true.",
        answer=PLAIN,
    ),
    Operation("GET", "/openapi.json", "server", "This description, OpenAPI 3.1", answer=JSON),
    Operation("GET", "/", "server", "A page to talk with the model", answer=HTML),
)
