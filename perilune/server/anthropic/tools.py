"""Tools of a Messages request, which may come in the middle of a conversation.

A tool with `defer_loading` is not declared at the head of the prompt. It is declared where a tool's result or a message
of the system refers to it, so that the cached prefix stays as it was; only then can it be called.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.server.conversation import wrong
from perilune.text.tools import DeclarationForm, Tool, declaration, parse_tools, show

_CHANGES = ("tool_addition", "tool_removal")


@dataclass
class ToolSet:
    """The tools of a request as its messages are read, in the form of chat tools.

    head      declared at the head of the prompt
    callable  by name, as after the last message
    """

    form: DeclarationForm
    head: list[dict[str, Any]] = field(default_factory=list)
    callable: dict[str, dict[str, Any]] = field(default_factory=dict)
    _deferred: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, tools: Sequence[Mapping[str, Any]], form: DeclarationForm) -> "ToolSet":
        found = cls(form)
        for i, tool in enumerate(tools):
            chat = chat_tool(tool, f"tools[{i}]")
            if tool.get("defer_loading") is True:
                found._deferred[str(tool.get("name"))] = chat
            else:
                found.head.append(chat)
        if found._deferred:
            parse_tools([*found.head, *found._deferred.values()])  # names the tool that is wrong, loaded or not
        found.callable = {str(tool["function"].get("name")): tool for tool in found.head}
        return found

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Those that can be called. A name that two have is in it twice, for the error that says so."""
        changed = self.callable.keys() != {str(tool["function"].get("name")) for tool in self.head}
        return list(self.callable.values()) if changed else self.head

    def applied(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with each reference to a tool as text: its declaration, or that it is gone."""
        return [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        if message.get("role") == "system":
            if any(_kind(block) in _CHANGES for block in content):
                return {**message, "content": list(self._changed(content, f"{where}.content"))}
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
        references = [i for i, block in enumerate(content) if _kind(block) == "tool_reference"]
        if not references:
            return content
        loaded = [self._load(content[i].get("tool_name"), f"{where}[{i}].tool_name") for i in references]
        return [b for i, b in enumerate(content) if i not in references] + [_text(self._declared(loaded))]

    def _changed(self, content: list[Any], where: str) -> Iterator[Any]:
        for i, block in enumerate(content):
            spot = f"{where}[{i}].tool"
            if _kind(block) not in _CHANGES:
                yield block
                continue
            tool = block.get("tool")
            if not isinstance(tool, Mapping):
                raise wrong(spot, "must be an object with a type")
            if block["type"] == "tool_removal":
                name = tool.get("name")
                if not isinstance(name, str) or self.callable.pop(name, None) is None:
                    raise wrong(f"{spot}.name", f"{show(name)} is not a tool of this conversation")
                yield _text(f"The tool {name} is no longer available.\n")
                continue
            definition = tool.get("definition")
            if isinstance(definition, Mapping):
                chat = chat_tool(definition, f"{spot}.definition")
                (parsed,) = parse_tools([chat])
                self._deferred[parsed.name] = chat
                name = parsed.name
            else:
                name = tool.get("name")
            yield _text(self._declared([self._load(name, f"{spot}.name")]))

    def _load(self, name: Any, where: str) -> dict[str, Any]:
        known = {str(tool["function"].get("name")): tool for tool in self.head} | self._deferred
        if not isinstance(name, str) or name not in known:
            raise wrong(where, f"{show(name)} is not a tool of this request")
        self.callable[name] = known[name]
        return known[name]

    def _declared(self, tools: Sequence[dict[str, Any]]) -> str:
        parsed: Sequence[Tool] = parse_tools(list({t["function"]["name"]: t for t in tools}.values()))
        return declaration(parsed, self.form)


def chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tool as the chat API declares it; RequestError for one that is not run by the client."""
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
