"""Tools of a Messages request, which may be added in the middle of a conversation.

A tool with `defer_loading` is not declared at the head of the prompt. It is declared at the tool result or system
message that refers to it, so that the cached prefix before that stays valid; only from there on can it be called.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.server.conversation import wrong
from perilune.text.tools import DeclarationForm, declaration, parse_tools, show

_CHANGES = ("tool_addition", "tool_removal")


@dataclass
class ToolSet:
    """The tools of a request as its messages are read, in the form of chat tools.

    head      tools declared at the head of the prompt
    callable  tools that may be called after the last message, by name
    """

    form: DeclarationForm
    head: list[dict[str, Any]] = field(default_factory=list)
    callable: dict[str, dict[str, Any]] = field(default_factory=dict)
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)  # all tools by name, deferred ones included
    _declared: set[str] = field(default_factory=set)  # in the prompt already: a second reference adds no declaration
    _changed: bool = False  # whether `callable` may differ from `head`

    @classmethod
    def read(cls, tools: Sequence[Mapping[str, Any]], form: DeclarationForm) -> "ToolSet":
        found = cls(form)
        for i, tool in enumerate(tools):
            chat, name = chat_tool(tool, f"tools[{i}]"), str(tool.get("name"))
            found._known[name] = chat
            if tool.get("defer_loading") is not True:
                found.head.append(chat)
                found.callable[name] = chat
                found._declared.add(name)
            else:
                found._changed = True
        if found._changed:
            parse_tools([*found._known.values()])  # checks all tools, also those that are never referred to
        return found

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The callable tools. `head` if none is deferred, added or removed: chat's check refuses duplicates in it."""
        return list(self.callable.values()) if self._changed else self.head

    def applied(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with each reference to a tool replaced by text: its declaration, or a note that it is
        missing."""
        return [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        if message.get("role") == "system":
            if any(_kind(block) in _CHANGES for block in content):
                return {**message, "content": list(self._system(content, f"{where}.content"))}
            return message
        results = [
            {**block, "content": self._result(block["content"], f"{where}.content[{i}].content")}
            if _kind(block) == "tool_result" and isinstance(block.get("content"), list)
            else block
            for i, block in enumerate(content)
        ]
        return {**message, "content": results}

    def _result(self, content: list[Any], where: str) -> list[Any]:
        """One declaration of all tools that a result refers to, after its text."""
        names = [
            self._load(block.get("tool_name"), f"{where}[{i}].tool_name")
            for i, block in enumerate(content)
            if _kind(block) == "tool_reference"
        ]
        if not names:
            return content
        return [block for block in content if _kind(block) != "tool_reference"] + [_text(self._declare(names))]

    def _system(self, content: list[Any], where: str) -> Iterator[Any]:
        for i, block in enumerate(content):
            spot = f"{where}[{i}].tool"
            if _kind(block) not in _CHANGES:
                yield block
                continue
            tool = block.get("tool")
            if not isinstance(tool, Mapping):
                raise wrong(spot, "must be an object with a type")
            name, definition = tool.get("name"), tool.get("definition")
            if block["type"] == "tool_removal":
                if not isinstance(name, str) or self.callable.pop(name, None) is None:
                    raise wrong(f"{spot}.name", f"{show(name)} is not a tool of this conversation")
                self._changed = True
                yield _text(f"The tool {name} is no longer available.\n")
                continue
            if isinstance(definition, Mapping):
                chat = chat_tool(definition, f"{spot}.definition")
                name = parse_tools([chat])[0].name
                self._known[name] = chat
                self._declared.discard(name)
            yield _text(self._declare([self._load(name, f"{spot}.name")]))

    def _load(self, name: Any, where: str) -> str:
        if not isinstance(name, str) or name not in self._known:
            raise wrong(where, f"{show(name)} is not a tool of this request")
        self.callable[name] = self._known[name]
        self._changed = True
        return name

    def _declare(self, names: Sequence[str]) -> str:
        new = [name for name in dict.fromkeys(names) if name not in self._declared]
        above = [name for name in dict.fromkeys(names) if name in self._declared]
        self._declared.update(new)
        text = declaration(parse_tools([self._known[name] for name in new]), self.form) if new else ""
        return text + "".join(f"The tool {name} is declared above.\n" for name in above)


def chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tool in the form of the chat API; RequestError for a tool that Anthropic's servers would run."""
    if tool.get("type") not in (None, "custom"):
        raise wrong(
            f"{where}.type",
            f"{show(tool['type'])} is not served: only tools with an input_schema, which the client runs, are",
            code="unsupported_parameter",
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise wrong(f"{where}.input_schema", "must be a JSON schema object")
    function = {k: tool[k] for k in ("name", "description", "strict") if tool.get(k) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
