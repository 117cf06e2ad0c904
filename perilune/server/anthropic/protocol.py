"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation to a chat body."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perilune.core.errors import RequestError
from perilune.server.anthropic.tools import ToolSet
from perilune.server.body import Body, RequestBody
from perilune.server.conversation import Conversation, content_of, joined, string, text_of, text_part, wrong
from perilune.server.fields import COUNT, MESSAGES, OUTPUT_CONFIG, THINKING, of_chat
from perilune.server.openai.protocol import ChatBody
from perilune.server.pictures.parts import chat_part
from perilune.text.tools import DeclarationForm, check_depth, show

# (chat's field, this API's field): `spelled` renames fields in errors that are raised after the translation.
FIELDS = (
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("reasoning_effort", "output_config.effort"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("].function.parameters", "].input_schema"),
    ("].function.", "]."),
)
_TEXT = {"text": "text"}
# Claude Code puts this line, meant as a header of the request, first in its system prompt. It is removed: it differs
# between conversations, which could then share no cached prefix.
_BILLING = "x-anthropic-billing-header:"


class Thinking(Body):
    """`adaptive`: the model decides how much it thinks. Signatures of thoughts are neither made nor checked."""

    FIELDS: ClassVar = THINKING
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(Body):
    FIELDS: ClassVar = OUTPUT_CONFIG
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(RequestBody):
    """The body of count_tokens: the fields that make up the prompt."""

    FIELDS: ClassVar = {**of_chat(ChatBody.model_fields), **MESSAGES, **COUNT}
    messages: list[dict[str, Any]]
    system: Any = None  # a text or a list of text blocks
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older place of output_config.format

    def check_supported(self) -> None:
        if not self.messages:
            raise wrong("messages", "must hold at least one message")
        if (thinking := self.thinking) is not None:
            if thinking.type == "enabled" and (thinking.budget_tokens is None or thinking.budget_tokens < 1):
                raise wrong("thinking.budget_tokens", "must be at least 1 when thinking is enabled")
            if thinking.type != "enabled" and thinking.budget_tokens is not None:
                raise wrong("thinking.budget_tokens", f"does not go with thinking.type {thinking.type!r}")

    def chat(self, *, thinks_unasked: bool, tool_form: DeclarationForm = "typescript") -> ChatBody:
        """The same request to the chat endpoint.

        Without the field `thinking` the model does not think, as clients of this API expect. `thinks_unasked`: the
        model always thinks. A last message with role assistant is the beginning of the answer. `tool_form`: the form
        of tools that are declared in the middle of the conversation.
        """
        conversation = Conversation()
        system = self.system
        if isinstance(system, list):
            system = [block for block in system if not _is_billing(block)]
        if system is not None and (text := text_of(system, "system", _TEXT)):
            conversation.say("system", text)
        head = len(conversation.messages)
        tools = ToolSet.read(self.tools or (), tool_form)
        for i, message in enumerate(tools.applied(self.messages)):
            _add(conversation, message, f"messages[{i}]")
        if len(conversation.messages) == head:
            raise wrong("messages", "must hold more than redacted_thinking, which is another model's and is left out")
        if conversation.messages[-1]["role"] == "assistant":
            self._check_beginning(conversation.messages[-1])
        choice = self.tool_choice
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": conversation.messages,
            "tools": tools.tools or None,
            "tool_choice": None if choice is None else _choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            **self._thinking(thinks_unasked),
            **self.sampling_fields(),
        }
        form = None if self.output_config is None else self.output_config.format
        if form is not None and self.output_format is not None:
            raise wrong("output_format", "and output_config.format are the same field: send the latter")
        if (form := form or self.output_format) is not None:
            fields["response_format"] = _format(form)
        body = ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
        if tools.tools is not tools.head:
            body.declare_first(tools.head)
        return body

    def sampling_fields(self) -> dict[str, Any]:
        return {}

    def _check_beginning(self, message: Mapping[str, Any]) -> None:
        """RequestError if the chat message breaks Anthropic's rules for a beginning of the answer."""
        text = message["content"]
        if message.get("tool_calls"):
            raise RequestError(
                "the tool_use of the last message must be followed by a user message with its tool_result",
                param="messages",
            )
        if text and text[-1].isspace():
            raise RequestError(
                "the last message must not end in white space, as it is the assistant's", param="messages"
            )
        if text and self.thinking is not None and self.thinking.type != "disabled":
            raise RequestError(
                "a last message of the assistant's with text does not go with thinking: disable thinking, or end the "
                "messages with the user's",
                param="messages",
            )

    def _thinking(self, thinks_unasked: bool) -> dict[str, Any]:
        thinking = self.thinking
        if thinking is None:
            return {} if thinks_unasked else {"thinking": {"type": "disabled"}}
        if thinking.type == "enabled":
            return {"thinking": {"type": "enabled", "budget_tokens": thinking.budget_tokens}}
        if thinking.type == "disabled":
            return {"thinking": {"type": "disabled"}}
        effort = None if self.output_config is None else self.output_config.effort
        return {"thinking": {"type": "enabled"}, "reasoning_effort": effort}


class MessagesBody(CountBody):
    FIELDS: ClassVar = {**of_chat(ChatBody.model_fields), **MESSAGES}
    PROMPT: ClassVar = ("messages",)
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_seconds: float | None = None

    def check_supported(self) -> None:
        super().check_supported()
        if self.max_tokens < 1:
            raise wrong("max_tokens", f"must be at least 1, not {self.max_tokens}")
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise wrong(
                "thinking.budget_tokens", f"must be below max_tokens, which counts thoughts too: {budget} is not"
            )

    def sampling_fields(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "deadline_seconds": self.deadline_seconds,
        }


def _is_billing(block: Any) -> bool:
    return isinstance(block, Mapping) and str(block.get("text")).startswith(_BILLING)


def _add(conversation: Conversation, message: Mapping[str, Any], where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", f"must be user, assistant or system, not {show(role)}")
    if role == "system":
        conversation.say("system", text_of(content, f"{where}.content", _TEXT))
        return
    if not isinstance(content, str | list):
        raise wrong(f"{where}.content", "must be a string or a list of blocks")
    conversation.close()
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    said: list[Mapping[str, Any]] = []
    for i, block in enumerate(blocks):
        spot = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if role == "assistant" and kind in ("thinking", "redacted_thinking", "tool_use"):
            _add_own(conversation, block, spot)
        elif role == "user" and kind == "tool_result":
            if said:
                conversation.say("user", joined(said))
                said = []
            _add_result(conversation, block, spot)
        elif role == "user" and kind in ("image", "video"):
            said.append(_MEDIA[kind](block, spot))
        elif kind != "text":
            raise _refused(kind, role, spot)
        elif role == "assistant":
            conversation.answer(string(block, "text", spot))
        else:
            said.append(text_part(string(block, "text", spot)))
    if role == "user" and (said or not blocks):
        conversation.say("user", joined(said))
    elif role == "assistant" and not blocks:
        conversation.answer("")


def _add_own(conversation: Conversation, block: Mapping[str, Any], where: str) -> None:
    if block["type"] == "thinking":
        conversation.think(string(block, "thinking", where))
    elif block["type"] == "tool_use":
        arguments = block.get("input")
        if not isinstance(arguments, Mapping):
            raise wrong(f"{where}.input", "must be an object")
        check_depth(arguments, f"{where}.input")
        id, name = string(block, "id", where, empty=False), string(block, "name", where, empty=False)
        conversation.call(id, name, json.dumps(arguments, ensure_ascii=False))
    # A redacted_thinking block is another model's encrypted thought: it is left out.


def _add_result(conversation: Conversation, block: Mapping[str, Any], where: str) -> None:
    content = content_of(block.get("content") or "", f"{where}.content", _TEXT, _MEDIA)
    if block.get("is_error"):  # the chat template has no field for it
        content = f"Error: {content}" if isinstance(content, str) else [text_part("Error: "), *content]
    conversation.result(string(block, "tool_use_id", where, empty=False), content, f"{where}.tool_use_id")


def _picture(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    changes = block.get("transformations")
    if isinstance(changes, Mapping) and changes.get("oversized_image") == "error":
        raise wrong(
            f"{where}.transformations.oversized_image",
            "'error' is not served: send a picture of the size that the model should see, and 'downsize'",
            code="unsupported_parameter",
        )
    return chat_part("image_url", _url(block, where), where)


def _video(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A block of type video: an extension of Anthropic's API that other servers have too, with an image's `source`."""
    return chat_part("video_url", _url(block, where), where)


_MEDIA = {"image": _picture, "video": _video}


def _url(block: Mapping[str, Any], where: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("base64", "url"):
        raise wrong(
            f"{where}.source",
            f"must be of type base64, with media_type and data, or url, not {show(kind)}",
            code="unsupported_parameter",
        )
    if kind == "url":
        return string(source, "url", f"{where}.source", empty=False)
    media_type, data = (string(source, name, f"{where}.source") for name in ("media_type", "data"))
    return f"data:{media_type};base64,{data}"


def _refused(kind: Any, role: str, where: str) -> RequestError:
    allowed = "text, thinking and tool_use" if role == "assistant" else "text, image, video and tool_result"
    return wrong(
        where,
        f"is of type {show(kind)}, but blocks of the {role} may be {allowed}",
        code="unsupported_parameter",
    )


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if not choice.name:
        raise wrong("tool_choice.name", "must name the tool when tool_choice.type is 'tool'")
    return {"type": "function", "function": {"name": choice.name}}


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), Mapping):
        raise wrong("output_config.format", "must be {'type': 'json_schema', 'schema': an object}")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
