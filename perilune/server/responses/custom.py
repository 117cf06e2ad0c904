"""Tools of type "custom": a call has one text as input, free or by a grammar, instead of JSON arguments.

The model sees each as a function. A tool with free text has a single JSON argument, `input`, because the models were
trained to write JSON arguments. For a tool with a grammar the model writes the text itself, because its grammar cannot
be turned into one of JSON strings.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from perilune.server.conversation import string, wrong
from perilune.text.tools import Form, show

_PREFIX = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH = r"u[dD][89abAB][0-9a-fA-F]{2}"  # a high surrogate: the next escape may be its other half
_ESCAPE = rf"\\(?:[^u]|(?!{_HIGH})u[0-9a-fA-F]{{4}}|{_HIGH}(?:\\u[0-9a-fA-F]{{4}}|(?=[^\\]|\\[^u])))"
_WHOLE = re.compile(rf'(?:[^"\\]|{_ESCAPE})*')  # of a JSON string, up to its end or an escape that is incomplete so far
_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def declared(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The function as which the model sees a custom tool."""
    name, description = string(tool, "name", where, empty=False), tool.get("description")
    if form(tool, where) is not None:
        note = "The call's arguments are the input itself, not JSON."
        if isinstance(description, str | None):  # other types are refused when all tools are checked
            description = f"{description}\n{note}" if description else note
    function = {"name": name, "parameters": _PARAMETERS}
    return {"type": "function", "function": function | ({} if description is None else {"description": description})}


def form(tool: Mapping[str, Any], where: str) -> Form | None:
    """The grammar of a custom tool's input, None for free text. RequestError for a format that is neither."""
    given = tool.get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind == "text":
        return None
    if kind != "grammar":
        raise wrong(f"{where}.format.type", f"must be 'text' or 'grammar', not {show(kind)}")
    syntax = given.get("syntax")
    if syntax not in ("lark", "regex"):
        raise wrong(f"{where}.format.syntax", f"must be 'lark' or 'regex', not {show(syntax)}")
    return Form(syntax, string(given, "definition", f"{where}.format", empty=False))


def arguments(text: str, *, raw: bool) -> str:
    """The text that the model writes as arguments of a call with this input."""
    return text if raw else json.dumps({"input": text}, ensure_ascii=False)


class Unwrapped:
    """Extracts, while it is generated, the text from the JSON arguments of a custom tool with free text."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = self._ended = False

    def feed(self, text: str) -> str:
        self._held += text
        if not self._begun:
            found = _PREFIX.match(self._held)
            if found is None:
                return ""
            self._begun, self._held = True, self._held[found.end() :]
        if self._ended:
            return ""
        whole = _WHOLE.match(self._held)
        assert whole is not None  # it matches the empty text
        self._held = self._held[whole.end() :]
        self._ended = self._held.startswith('"')
        found_text = str(json.loads(f'"{whole[0]}"', strict=False))
        # Half a surrogate pair is no character.
        return found_text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
