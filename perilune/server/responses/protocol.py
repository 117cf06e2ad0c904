"""The bodies of POST /v1/responses and /v1/responses/input_tokens, and their translation to a chat
body."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from perilune.core.errors import RequestError
from perilune.server.answer_format import Effort
from perilune.server.body import Body, RequestBody
from perilune.server.conversation import Conversation, content_of, string, text_of, wrong
from perilune.server.fields import INPUT_TOKENS, REASONING, RESPONSES, TEXT, of_chat
from perilune.server.openai.protocol import ChatBody
from perilune.server.pictures.parts import chat_part, check_detail, earlier
from perilune.server.responses import custom
from perilune.text.tools import Form, show

# (chat's field, this API's field), see conversation.spelled.
FIELDS = (
    ("messages", "input"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("].function.", "]."),
)
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Accepted without effect: encrypted reasoning is for clients to send back, and every answer has it as plain text.
_INCLUDABLE = ("reasoning.encrypted_content",)


class Reasoning(Body):
    """`summary` is accepted: the whole reasoning is returned, which needs no summary."""

    FIELDS: ClassVar = REASONING
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class Text(Body):
    FIELDS: ClassVar = TEXT
    format: dict[str, Any] | None = None


class StreamOptions(Body):
    """`include_obfuscation` pads events against observers of encrypted traffic; nothing is padded here."""

    include_obfuscation: bool | None = None


class InputBody(RequestBody):
    """The fields that make up the prompt of a response."""

    PROMPT: ClassVar = ("input",)
    input: Any = None  # a text or a list of items
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None  # refused, with a remedy of its own

    def check_supported(self) -> None:
        if self.input is not None and not (isinstance(self.input, str | list) and self.input):
            raise wrong("input", "must be a text or a list of items that is not empty")
        if self.conversation is not None:
            raise wrong(
                "conversation",
                "is not supported: use previous_response_id or send the conversation as input",
                code="unsupported_parameter",
            )
        if self.truncation == "auto":
            raise wrong(
                "truncation",
                "'auto' is not supported: shorten the input, or leave it out",
                code="unsupported_parameter",
            )

    def references(self) -> dict[str, str]:
        """Item id -> path in the request, for each stored item that the input refers to."""
        places: dict[str, str] = {}
        for i, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if _is_reference(item):
                id = string(item, "id", f"input[{i}]", empty=False)
                if id in places:
                    raise wrong(f"input[{i}].id", f"refers to item {show(id)} for the second time")
                places[id] = f"input[{i}].id"
        return places

    def resolve(self, items: Mapping[str, Any]) -> None:
        """Replaces the references by the `items`."""
        self.input = [items[item["id"]] if _is_reference(item) else item for item in self.input]

    def chat(self, before: Sequence[Mapping[str, Any]]) -> tuple[ChatBody, list[Mapping[str, Any]]]:
        """The same request to the chat endpoint, and the messages that `input` adds to those `before` it.

        As with vLLM, an assistant's message or a thought at the end of `input` is the beginning of the answer, which
        OpenAI's API lacks. With status "completed" it is refused: the client may want a new message after it.
        """
        conversation = Conversation(earlier(before, "previous_response_id"))
        continued, raw = False, self.forms()
        if isinstance(self.input, str):
            conversation.say("user", self.input)
        elif self.input is not None:
            for i, item in enumerate(self.input):
                _add(conversation, item, f"input[{i}]", raw)
            continued = _continued(self.input[-1], f"input[{len(self.input) - 1}]")
        # Instructions are this request's alone: they are not kept for the responses that continue it.
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": system + conversation.messages,
            "tools": tools or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text.format) if self.text and self.text.format else None,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "continue_final_message": continued or (False if self.input is None else None),
            **self.sampling_fields(),
        }
        body = ChatBody(**{name: value for name, value in fields.items() if value is not None})
        return body, conversation.messages[len(before) :]

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of the chat body that change no prompt."""
        return {}

    def forms(self) -> dict[str, Form]:
        """The grammars of custom tools by name."""
        found = {}
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type") == "custom" and (form := custom.form(tool, f"tools[{i}]")) is not None:
                found[string(tool, "name", f"tools[{i}]", empty=False)] = form
        return found


class InputTokensBody(InputBody):
    FIELDS: ClassVar = {**of_chat(ChatBody.model_fields), **RESPONSES, **INPUT_TOKENS}

    def check_supported(self) -> None:
        if self.input is None and self.previous_response_id is None and not self.instructions:
            raise wrong("input", "is required, or instructions, or previous_response_id")
        super().check_supported()


class ResponsesBody(InputBody):
    FIELDS: ClassVar = {**of_chat(ChatBody.model_fields), **RESPONSES}
    input: Any
    store: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_seconds: float | None = None
    max_tool_calls: int | None = None  # counts the service's own tools, of which there are none
    background: bool | None = None
    # Refused, with a remedy of their own.
    prompt: Any = None
    top_logprobs: int | None = None

    def check_supported(self) -> None:
        if self.input is None:
            raise wrong("input", "must be a text or a list of items that is not empty")
        super().check_supported()
        if self.background and self.store is False:
            raise RequestError(
                "a response made in the background is kept: leave store out", param="store", code="invalid_value"
            )
        if self.prompt is not None:
            raise wrong(
                "prompt",
                "(a stored template) is not supported: send instructions and input",
                code="unsupported_parameter",
            )
        if self.top_logprobs:
            raise wrong(
                "top_logprobs",
                "is not supported here: /v1/chat/completions has it",
                code="unsupported_parameter",
            )
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise wrong("include", f"{show(name)} is not supported", code="unsupported_parameter")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise wrong("max_output_tokens", f"must be at least 1, not {self.max_output_tokens}")

    def sampling_fields(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_output_tokens,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "deadline_seconds": self.deadline_seconds,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }


def _is_reference(item: Any) -> bool:
    """The type may be left out or null: an item that has only an id is a reference."""
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and item.keys() <= {"id", "type"})


def _add(conversation: Conversation, item: Any, where: str, raw: Collection[str]) -> None:
    """`raw`: names of custom tools with a grammar."""
    if not isinstance(item, Mapping):
        raise wrong(where, f"must be an object, not {show(item)}")
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise wrong(f"{where}.role", f"must be user, assistant, system or developer, not {show(role)}")
        spot = f"{where}.content"
        if role != "assistant":
            conversation.say(role, content_of(item.get("content"), spot, _TEXT_PARTS, _MEDIA))
            return
        text = text_of(item.get("content"), spot, _TEXT_PARTS)
        if conversation.spoken:
            conversation.close()
        conversation.answer(text)
    elif kind == "reasoning":
        if conversation.spoken:
            conversation.close()
        conversation.think(_thought(item, where))
    elif kind == "function_call":
        id, name = string(item, "call_id", where, empty=False), string(item, "name", where, empty=False)
        conversation.call(id, name, string(item, "arguments", where))
    elif kind == "custom_tool_call":
        id, name = string(item, "call_id", where, empty=False), string(item, "name", where, empty=False)
        conversation.call(id, name, custom.arguments(string(item, "input", where), raw=name in raw))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = content_of(item.get("output"), f"{where}.output", _TEXT_PARTS, _MEDIA)
        conversation.result(string(item, "call_id", where, empty=False), output, f"{where}.call_id")
    else:
        raise wrong(
            f"{where}.type",
            f"{show(kind)} is not supported: send message, reasoning, function_call, custom_tool_call, their "
            "..._output items and item_reference",
            code="unsupported_parameter",
        )


def _picture(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_detail(part.get("detail"), where)
    return chat_part("image_url", _url(part, "image_url", where), where)


def _video(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    return chat_part("video_url", _url(part, "video_url", where), where)


def _url(part: Mapping[str, Any], name: str, where: str) -> str:
    if part.get("file_id") is not None and part.get(name) is None:
        raise wrong(f"{where}.file_id", f"is not served: send {name}", code="unsupported_parameter")
    return string(part, name, where, empty=False)


_MEDIA = {"input_image": _picture, "input_video": _video}


def _continued(last: Mapping[str, Any], where: str) -> bool:
    """Whether the last item is the beginning of the answer."""
    kind, status = last.get("type") or "message", last.get("status")
    if kind in ("function_call", "custom_tool_call"):
        raise wrong(where, f"must be followed by its {kind}_output")
    if kind != "reasoning" and last.get("role") != "assistant":
        return False
    if status not in (None, "in_progress", "incomplete", "completed"):
        raise wrong(f"{where}.status", f"must be in_progress, incomplete or completed, not {show(status)}")
    if status == "completed":
        raise wrong(
            where, "is complete: send the user's next message after it, or status 'incomplete' to have it continued"
        )
    return True


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The reasoning itself where the client kept it, else its summary, else nothing."""
    for name, part in (("content", "reasoning_text"), ("summary", "summary_text")):
        if item.get(name):
            return text_of(item[name], f"{where}.{name}", {part: "text"})
    return ""


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") == "custom":
        return custom.declared(tool, where)
    if tool.get("type") != "function":
        raise wrong(
            f"{where}.type",
            f"{show(tool.get('type'))} is not served: only tools of type 'function' and 'custom' are",
            code="unsupported_parameter",
        )
    wanted = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {k: tool[k] for k in wanted if tool.get(k) is not None}}


def _choice(choice: Any) -> Any:
    if choice in (None, "none", "auto", "required"):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": string(choice, "name", "tool_choice", empty=False)}}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        tools = [_choice(tool) for tool in listed] if isinstance(listed, Sequence) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    raise wrong(
        "tool_choice",
        "must be 'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
        f"{{'type': 'allowed_tools', 'mode': ..., 'tools': [...]}}, not {show(kind)}",
    )


def _format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise wrong("text.format.type", f"must be 'text', 'json_object' or 'json_schema', not {show(kind)}")
    if not isinstance(form.get("schema"), Mapping):
        raise wrong("text.format.schema", "must be a JSON schema object")
    wanted = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {k: form[k] for k in wanted if form.get(k) is not None}}
