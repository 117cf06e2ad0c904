"""Tools a request declares: validation, and the declarations the models were trained on.

K2 up to K2-Thinking reads JSON, K2.5 and later TypeScript. The declaration's bytes matter: a model calls tools
measurably worse when they are declared in another form. Keys are sorted before anything is written, so that clients
that order them differently share a prompt's prefix; only the first release of K2-Instruct, trained on Jinja's plain
`tojson`, gets them in the client's order. A schema the TypeScript form cannot express turns the whole declaration into
compact JSON, as in training.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from perilune.core.errors import RequestError

MAX_DEPTH: Final = 128  # nested objects and arrays in a schema or in arguments: far above use, far below the stack
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Form:
    """The form of calls with text, not JSON, as arguments: a Lark grammar, or a regular expression for all of it."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function. `parameters` is its JSON schema; `raw` the whole declaration as the client sent it. With a
    `form` the arguments of a call are text of that form."""

    name: str
    parameters: Mapping[str, Any]
    raw: Mapping[str, Any]
    form: Form | None = None


DeclarationForm = Literal["tojson", "json", "typescript"]
Declared = Sequence[Tool | Mapping[str, Any]] | None  # a request's tools, as they came or already parsed


def parse_tools(value: Declared) -> tuple[Tool, ...]:
    """The tools of a request (None: none). RequestError names the entry and the field that is wrong."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RequestError("tools must be a list", param="tools")
    tools = tuple(e if isinstance(e, Tool) else _parse_tool(e, f"tools[{i}]") for i, e in enumerate(value))
    first: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if (other := first.setdefault(tool.name, i)) != i:
            raise RequestError(
                f"tools[{i}].function.name {tool.name!r} is that of tools[{other}] too: give every tool its own name",
                param=f"tools[{i}].function.name",
            )
    return tools


def check_depth(value: Any, where: str) -> None:
    """RequestError if JSON data nests deeper than MAX_DEPTH; everything below may then recurse safely."""
    if depth(value) >= MAX_DEPTH:
        raise RequestError(f"{where} nests deeper than {MAX_DEPTH} levels", param=where)


def depth(value: Any) -> int:
    """Levels of nested objects and arrays in JSON data."""
    count, level = 0, [value]
    while level := [child for parent in level for child in _children(parent)]:
        count += 1
    return count


def check_text(value: Any, where: str) -> None:
    """RequestError if a text in JSON data has half of a surrogate pair, which is no character of Unicode."""
    level = [(value, where)]
    while level:
        found, at = level.pop()
        at = at[:200]  # else every value would copy a long name around it
        if isinstance(found, Mapping):
            for key, inner in found.items():
                level.append((inner, f"{at}.{key}" if at else key))
                _check_string(key, f"a key of {at}" if at else "a key", at)
        elif isinstance(found, list):
            level += ((inner, f"{at}[{i}]") for i, inner in enumerate(found))
        elif isinstance(found, str):
            _check_string(found, at, at)


def _check_string(text: str, where: str, param: str) -> None:
    if half := _SURROGATE.search(text):
        raise RequestError(
            f"lone surrogate \\u{ord(half[0]):04x} at {where[:200]}: not Unicode text",
            param=param[:200] or None,
            code="invalid_json",
        )


def show(value: Any) -> str:
    """A client's value for an error message: short, whatever it is."""
    return (
        f"{value!r:.80}" if isinstance(value, str | int | float | None) else f"a value of type {type(value).__name__}"
    )


def declaration(tools: Sequence[Tool], form: DeclarationForm = "typescript") -> str:
    """The body of the `tool_declare` message.

    tojson      JSON as the client ordered it, separators ", " and ": "
    json        compact JSON, keys sorted at every level
    typescript  TypeScript; "json" for all tools if the schema of one has no TypeScript form
    """
    if form == "tojson":
        return json.dumps([tool.raw for tool in tools], ensure_ascii=False, default=dict)
    entries = [_sorted(tool.raw) for tool in tools]
    if form == "typescript":
        try:
            functions = [_function(entry["function"]) for entry in entries]
        except _Inexpressible:
            pass
        else:
            return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


def _parse_tool(entry: Any, where: str) -> Tool:
    if not isinstance(entry, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    check_depth(entry, where)
    if entry.get("type") != "function":
        raise RequestError(f"{where}.type must be 'function', not {show(entry.get('type'))}", param=f"{where}.type")
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 64 letters, digits, '_', '.' or '-', not {show(name)}",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where}.function.description must be a string", param=f"{where}.function.description")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema object", param=f"{where}.function.parameters"
        )
    return Tool(name, parameters or {}, entry)


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [v for v in value.values() if isinstance(v, Mapping | list)]
    return [v for v in value if isinstance(v, Mapping | list)] if isinstance(value, list) else []


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


# --- JSON schema -> TypeScript -------------------------------------------------------------------------------------

_STEP = "  "
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class _Inexpressible(Exception):
    """This schema has no TypeScript form."""


@dataclass(slots=True)
class _Names:
    """What `$ref` may point to while one function is written."""

    definitions: dict[str, Any] = field(default_factory=dict)
    self_reference: bool = False


def _function(function: Mapping[str, Any]) -> str:
    """Interfaces for what `$ref` names, the description as comments, then the function's type."""
    names = _Names()
    fields, extra = _members(function.get("parameters") or {}, _STEP, names)
    pieces = []
    if names.self_reference:
        argument = "parameters"
        # This one form does not put required fields first, and leaves out additionalProperties.
        pieces.append("interface parameters " + _braced([text for _, _, text in fields], ""))
    else:
        argument = _braced([text for _, _, text in sorted(fields)] + extra, "")
    # Definitions inside definitions come too late to get an interface of their own: the trained form has none.
    for name, schema in tuple(names.definitions.items()):
        written = _type(schema, "", names)
        if not isinstance(schema, Mapping):
            raise _Inexpressible
        pieces.append("".join(line + "\n" for line in _description(schema, "")) + f"interface {name} {written}")
    pieces += ["\n".join(_description(function, "")), f"type {function['name']} = (_: {argument}) => any;"]
    return "\n".join(piece for piece in pieces if piece)


def _members(schema: Mapping[str, Any], indent: str, names: _Names) -> tuple[list[tuple[bool, str, str]], list[str]]:
    """An object's properties as (optional, name, written), and its additionalProperties written (0 or 1 entry)."""
    if definitions := schema.get("$defs"):
        names.definitions.update(_mapping(definitions))
    extra = []
    more = schema.get("additionalProperties")
    if more is not None:
        written = ("any" if more else "never") if isinstance(more, bool) else _type(_mapping(more), indent, names)
        extra.append(f"{indent}[k: string]: {written}")
    if "properties" not in schema:
        return [], extra
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise _Inexpressible
    needed = {name for name in required if isinstance(name, str)}
    fields = []
    for name, value in _mapping(schema["properties"]).items():
        written = _type(value, indent, names)
        optional = name not in needed
        notes = "".join(line + "\n" for line in _notes(value, indent) + _default(value, indent))
        fields.append((optional, name, f"{notes}{indent}{name}{'?' if optional else ''}: {written}"))
    return fields, extra


def _type(schema: Any, indent: str, names: _Names) -> str:
    """The type a schema describes; `indent` is that of the line it begins on."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    schema = _mapping(schema)
    if "$ref" in schema:
        return _reference(schema["$ref"], names)
    if "anyOf" in schema:
        return " | ".join([_type(choice, indent, names) for choice in _list(schema["anyOf"])])
    if "enum" in schema:
        return _enumeration(schema)
    if not schema:
        return "any"
    kind = schema.get("type")
    if isinstance(kind, list):
        if not all(isinstance(k, str) and k in _UNION_NAMES for k in kind):
            raise _Inexpressible
        return " | ".join(_UNION_NAMES[k] for k in kind)
    if kind == "object":
        fields, extra = _members(schema, indent + _STEP, names)
        return _braced([text for _, _, text in sorted(fields)] + extra, indent)
    if kind == "array":
        return _array(schema, indent, names)
    if not isinstance(kind, str):
        raise _Inexpressible  # none of $ref, anyOf, enum and type: oneOf, allOf, const ...
    return "number" if kind == "integer" else kind


def _array(schema: Mapping[str, Any], indent: str, names: _Names) -> str:
    items = schema.get("items")
    if not items:
        return "Array<any>"
    inner = indent + _STEP
    if notes := _notes(items, inner):
        return "Array<\n" + "\n".join(notes) + f"\n{inner}{_type(items, inner, names)}\n{indent}>"
    return f"Array<{_type(items, indent, names)}>"


def _braced(lines: list[str], indent: str) -> str:
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"


def _reference(target: Any, names: _Names) -> str:
    if target == "#":
        names.self_reference = True
        return "parameters"
    name = target.rsplit("/", 1)[-1] if isinstance(target, str) and target.startswith("#/$defs/") else None
    if name is None or not isinstance(names.definitions.get(name), Mapping):
        raise _Inexpressible
    return name


def _enumeration(schema: Mapping[str, Any]) -> str:
    values, kind = _list(schema["enum"]), schema.get("type")
    if isinstance(kind, list):
        if len(kind) == 2 and "null" in kind:
            kind = kind[0] if kind[0] != "null" else kind[1]
        elif len(kind) == 1:
            kind = kind[0]
        else:
            raise _Inexpressible
    wanted = _ENUM_TYPES.get(kind, object) if isinstance(kind, str) else object
    if not all(value is None or isinstance(value, wanted) for value in values):
        raise _Inexpressible
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _notes(schema: Any, indent: str) -> list[str]:
    """Comment lines above a field or an array item: its description and its limits."""
    if not isinstance(schema, Mapping):
        return []
    limits: tuple[str, ...] = ()
    if not any(word in schema for word in ("$ref", "anyOf", "enum")) and isinstance(schema.get("type"), str):
        limits = _LIMITS.get(schema["type"], ())
    stated = ", ".join(f"{name}: {schema[name]}" for name in limits if name in schema)
    return _description(schema, indent) + ([f"{indent}// {stated}"] if stated else [])


def _description(schema: Mapping[str, Any], indent: str) -> list[str]:
    text = schema.get("description")
    if not text:
        return []
    if not isinstance(text, str):
        raise _Inexpressible
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")]


def _default(schema: Any, indent: str) -> list[str]:
    value = schema.get("default") if isinstance(schema, Mapping) else None
    if value is None:
        return []
    # Numbers and booleans are spelled as in Python (True, not true), as in the training data.
    written = repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)
    return [f"{indent}// Default: {written}"]


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _Inexpressible
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Inexpressible
    return value
