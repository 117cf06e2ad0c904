"""Grammar rules for objects with properties in any order: the compiler by itself allows only the schema's order.

JSON objects are unordered, and a model makes mistakes if it must write properties in another order than it reasoned
about them: kimi-nano's exact tool calls fell from 99 % to 80 %. So an object that lists its properties is
written as an automaton over the set of properties written so far: 2^n states for n properties, hence the bounds. An
object with more keeps the schema's order. Without `additionalProperties` it has only the properties it lists.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

from perilune.grammar.references import DEFINITIONS, nodes

MAX_PROPERTIES = 8  # properties of an object in any order; one more doubles its states
_STATES = 512  # states of all automata of a schema
# Objects that one grammar may copy, about 2 s and 180 MB: a value that refers to a definition gets all definitions.
_COPIED_OBJECTS = 200_000
_WORDS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_REMARK = "// required: "
_ROOTS = ("#/$defs/", "#/definitions/")


class _Ordered(Exception):
    """Not supported here: the compiler enforces the schema, in its order of properties."""


class _Rules:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self.schemas: list[Any] = []
        self.required: dict[str, None] = {}
        self._names = itertools.count()
        self._shared = {word: root[word] for word in DEFINITIONS if word in root}
        # An object counts as 80 characters at least: definitions may hold long enums.
        self._shared_objects = max(sum(1 for _ in nodes(self._shared)), len(json.dumps(self._shared)) // 80)
        self._states = self._copied = 0

    def value(self, schema: Any) -> str:
        """The name of a rule for a value of the schema."""
        properties = _listed(schema)
        if properties and self._states + (1 << len(properties)) <= _STATES:
            return self._object(schema, properties)
        listing = isinstance(schema, Mapping) and schema.get("type") == "array" and schema.keys() == {"type", "items"}
        if listing and _listed(schema["items"]):
            name, item = self._name(), self.value(schema["items"])
            self.lines.append(f'{name}: "[" ({item} (COMMA {item})*)? "]"')
            return name
        return self._leaf(schema)

    def _object(self, schema: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
        name = self._name()
        self._states += 1 << len(properties)
        pairs = []
        for key, wanted in properties.items():
            text = json.dumps(json.dumps(key, ensure_ascii=False) + ":", ensure_ascii=False)
            pairs.append(f'{text} " "? {self.value(wanted)}')
        for i, pair in enumerate(pairs):
            self.lines.append(f"{name}_p{i}: {pair}")
        self.required |= {key: None for key in properties if key in schema.get("required", ())}
        required = sum(1 << i for i, key in enumerate(properties) if key in schema.get("required", ()))
        for had in range(1 << len(pairs)):
            ways = ['"}"'] if not required & ~had else []
            comma = "COMMA " if had else ""
            ways += [f"{comma}{name}_p{i} {name}_{had | 1 << i}" for i in range(len(pairs)) if not had >> i & 1]
            self.lines.append(f"{name}_{had}: {' | '.join(ways)}")
        self.lines.append(f'{name}: "{{" {name}_0')
        return name

    def _leaf(self, schema: Any) -> str:
        if _refers(schema):
            assert isinstance(schema, Mapping)
            self._copied += self._shared_objects
            if self._copied > _COPIED_OBJECTS:
                raise _Ordered
            schema = {**schema, **self._shared}
        name = self._name()
        self.schemas.append(schema)
        self.lines.append(f"{name}: @value{len(self.schemas) - 1}")
        return name

    def _name(self) -> str:
        return f"r{next(self._names)}"


def rules(schema: Any) -> tuple[str, list[Any]] | None:
    """(Lark grammar, schemas): the grammar's rules `@value0`, `@value1`, ... match schemas[0], schemas[1], ...
    None if the schema is not supported."""
    if not _listed(schema):
        return None
    try:
        made = _Rules(schema)
        _check_references(schema)
        top = made.value(schema)
    except (_Ordered, RecursionError):
        return None
    remark = _REMARK + json.dumps(list(made.required))
    return "\n".join([remark, f"start: {top}", *made.lines, "COMMA: /, ?/"]), made.schemas


def required_keys(text: str) -> list[str]:
    """The properties that objects require in a grammar that `rules` wrote; empty for any other grammar."""
    first, _, _ = text.partition("\n")
    return list(json.loads(first.removeprefix(_REMARK))) if first.startswith(_REMARK) else []


def _listed(schema: Any) -> Mapping[str, Any]:
    """The properties of an object schema with at most MAX_PROPERTIES of them and no keywords but _WORDS; empty for any
    other schema."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object" or schema.keys() - _WORDS:
        return {}
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    properties = {name: value for name, value in properties.items() if value is not False}
    if not 1 <= len(properties) <= MAX_PROPERTIES or not all(name in properties for name in required):
        return {}
    return properties if schema.get("additionalProperties", False) is False else {}


def _refers(node: Any) -> bool:
    if isinstance(node, Mapping):
        return "$ref" in node or any(_refers(v) for v in node.values())
    return isinstance(node, list) and any(_refers(v) for v in node)


def _check_references(node: Any) -> None:
    """Raises _Ordered for references other than to definitions: a value is compiled alone, with only these."""
    if isinstance(node, Mapping):
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith(_ROOTS):
            raise _Ordered
        for value in node.values():
            _check_references(value)
    elif isinstance(node, list):
        for value in node:
            _check_references(value)
