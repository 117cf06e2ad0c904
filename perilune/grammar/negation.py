"""Negates JSON schemas without using `not`, to rewrite `not`, `if`, `oneOf` and `dependentSchemas`.

Every alternative returned here matches only values that violate the schema, so answers are always valid. Some violating
values match no alternative: numbers with a fraction if `integer` is negated, and arrays or objects of the same size as
one in `const`. A keyword that cannot be negated is refused by name.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perilune.grammar.expressions import example, finder
from perilune.grammar.references import SchemaError, items, mapping, target
from perilune.grammar.sizes import is_number

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_DEPTH = 16  # references and negations inside one another
MAX_ALTERNATIVES = 128  # made for one schema document
MAX_VISITED = 20_000  # schemas visited to make them, again through each reference
MAX_LISTED_CHARS = 2_000  # total length of strings that one const or enum excludes
# Keywords that do not constrain a value by themselves.
_SILENT = {
    "$defs", "definitions", "$schema", "$comment", "$vocabulary", "then", "else", "minContains", "maxContains",
    "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
_REFUSED = (
    "pattern", "format", "multipleOf", "uniqueItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    "maxProperties", "$dynamicRef",
)  # fmt: skip


class Negation:
    """Negates schemas of the document `root`, which `references.resolved` has made."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_ALTERNATIVES
        self._visits_left = MAX_VISITED

    def alternatives(self, node: Any, depth: int = 0) -> list[Any]:
        """Schemas that each match only values which violate `node`; empty if `node` allows every value.

        Raises SchemaError naming the keyword that cannot be negated.
        """
        if isinstance(node, bool):
            return [] if node else [{}]
        if not isinstance(node, Mapping):
            raise SchemaError("not: what it holds is no schema")
        if depth > MAX_DEPTH:
            raise SchemaError(f"not: more than {MAX_DEPTH} references or alternatives inside one another")
        self.visit()
        made = []
        for alternative in self._of(node, depth + 1):
            self.count(1)
            made.append(alternative)
        return made

    def visit(self) -> None:
        """Raises SchemaError if one document has too many references and schemas inside one another."""
        self._visits_left -= 1
        if self._visits_left < 0:
            raise SchemaError(f"not, if, oneOf and unevaluated: more than {MAX_VISITED} schemas by its references")

    def count(self, alternatives: int) -> None:
        """Raises SchemaError if one document's alternatives become too many."""
        self._left -= alternatives
        if self._left < 0:
            raise SchemaError(f"not, if, oneOf and unevaluated: more than {MAX_ALTERNATIVES} alternatives")

    def _of(self, node: Mapping[str, Any], depth: int) -> Iterator[Any]:
        for word, value in node.items():
            if word in _REFUSED:
                raise SchemaError(f"not: {word} inside it cannot be negated")
            if word not in _SILENT:
                yield from self._keyword(node, word, value, depth)

    def _keyword(self, node: Mapping[str, Any], word: str, value: Any, depth: int) -> Iterator[Any]:
        match word:
            case "type":
                yield from _other_types(value)
            case "const":
                yield from _unlisted([value])
            case "enum":
                yield from _unlisted(items(value))
            case "not":
                yield value
            case "allOf":
                yield from (one for part in items(value) for one in self.alternatives(part, depth))
            case "anyOf":
                yield _all([self._none(part, depth) for part in items(value)])
            case "oneOf":
                parts = items(value)
                yield _all([self._none(part, depth) for part in parts])
                yield from (_all(list(pair)) for pair in itertools.combinations(parts, 2))
            case "if":
                for follows, held in (("then", value), ("else", self._none(value, depth))):
                    if follows in node:
                        yield _all([held, self._none(node[follows], depth)])
            case "$ref":
                yield from self.alternatives(target(self._root, value), depth)
            case "dependentSchemas":
                for name, part in mapping(value).items():
                    yield _all([{"type": "object", "required": [name]}, self._none(part, depth)])
            case "prefixItems":
                for i, part in enumerate(items(value)):
                    head = [*[{}] * i, self._none(part, depth)]
                    yield {"type": "array", "minItems": i + 1, "prefixItems": head}
            case "items":
                none, before = self._none(value, depth), [True] * len(items(node.get("prefixItems")))
                if before:
                    yield {"type": "array", "minItems": len(before) + 1, "prefixItems": [*before, none]}
                else:
                    yield {"type": "array", "contains": none}
            case "contains":
                least, most = node.get("minContains", 1), node.get("maxContains")
                if is_number(least) and least > 0:
                    few = {"contains": value, "minContains": 0, "maxContains": int(least) - 1}
                    yield {"type": "array"} | ({"items": self._none(value, depth)} if least == 1 else few)
                if is_number(most):
                    yield {"type": "array", "contains": value, "minContains": int(most) + 1}
            case "additionalProperties":
                if others := self.alternatives(value, depth):
                    name = _unnamed(mapping(node.get("properties")), mapping(node.get("patternProperties")))
                    yield {"type": "object", "required": [name], "properties": {name: _any(others)}}
            case "properties":
                for name, part in mapping(value).items():
                    if others := self.alternatives(part, depth):
                        yield {"type": "object", "required": [name], "properties": {name: _any(others)}}
            case "patternProperties":
                for pattern, part in mapping(value).items():
                    if others := self.alternatives(part, depth):
                        name = example(pattern).decode()
                        if not _matches(pattern, name):
                            raise SchemaError(f"not: no name was found for patternProperties {pattern!r:.80}")
                        yield {"type": "object", "required": [name], "properties": {name: _any(others)}}
            case _:
                yield from _outside(word, value)

    def _none(self, node: Any, depth: int) -> Any:
        """The negation as one schema; False if nothing is left."""
        return _any(self.alternatives(node, depth))


def _matches(pattern: str, name: str) -> bool:
    """SchemaError for a pattern that Python does not read, although the compiler may."""
    try:
        return finder(pattern)(name)
    except ValueError as e:
        raise SchemaError(f"not: patternProperties {pattern!r:.80} cannot be negated") from e


def _unnamed(properties: Mapping[str, Any], patterns: Mapping[str, Any]) -> str:
    """The name of a property that a schema does not describe."""
    for name in ("other", "x", "0", "_"):
        if name not in properties and not any(_matches(pattern, name) for pattern in patterns):
            return name
    raise SchemaError("not: no name was found for additionalProperties")


def _outside(word: str, value: Any) -> Iterator[Any]:
    """Schemas of values that violate a keyword about sizes or names."""
    if word in _ENDS and is_number(value):
        yield {"type": "number", _ENDS[word]: value}
    elif word in _LEAST and is_number(value) and value > 0:
        kind, other = _LEAST[word]
        yield {"type": kind, other: int(value) - 1}
    elif word in _MOST and is_number(value):
        kind, other = _MOST[word]
        yield {"type": kind, other: int(value) + 1}
    elif word == "required":
        yield from ({"type": "object", "properties": {name: False}} for name in items(value))
    elif word == "dependentRequired":
        for name, others in mapping(value).items():
            for other in items(others):
                yield {"type": "object", "required": [name], "properties": {other: False}}


_ENDS = {"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
         "exclusiveMaximum": "minimum"}  # fmt: skip
_LEAST = {"minLength": ("string", "maxLength"), "minItems": ("array", "maxItems"),
          "minProperties": ("object", "maxProperties")}  # fmt: skip
_MOST = {"maxLength": ("string", "minLength"), "maxItems": ("array", "minItems")}


def _other_types(value: Any) -> Iterator[Any]:
    named = set(value if isinstance(value, list) else [value])
    if "integer" in named:
        named.add("number")
    if others := [name for name in TYPES if name not in named]:
        yield {"type": others}


def _unlisted(values: Sequence[Any]) -> Iterator[Any]:
    """Schemas of values that equal none of `values`."""
    by_type: dict[str, list[Any]] = {name: [] for name in TYPES}
    for value in values:
        by_type[_type(value)].append(value)
    if untouched := [name for name in TYPES if not by_type[name]]:
        yield {"type": untouched}
    if len(set(by_type["boolean"])) == 1:
        yield {"const": not by_type["boolean"][0]}
    numbers = sorted(by_type["number"])
    for low, high in zip([None, *numbers], [*numbers, None]) if numbers else ():
        if low is None or high is None or low < high:
            ends = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            yield {"type": "number"} | {word: end for word, end in ends.items() if end is not None}
    if texts := sorted(set(by_type["string"])):
        if sum(map(len, texts)) > MAX_LISTED_CHARS:
            raise SchemaError(f"not: more than {MAX_LISTED_CHARS} characters of excluded strings")
        yield {"type": "string", "pattern": f"^(?:{_other_than(texts)})$"}
    if arrays := by_type["array"]:
        yield {"type": "array", "minItems": 1 + max(map(len, arrays))}
        if fewest := min(map(len, arrays)):
            yield {"type": "array", "maxItems": fewest - 1}
    objects = by_type["object"]
    if objects and all(objects):  # without one property of each of them, an object equals none
        yield {"type": "object", "properties": {next(iter(value)): False for value in objects}}


_ANY = r"[\s\S]"


def _other_than(texts: Sequence[str]) -> str:
    """An expression for every string but `texts`, which differ and are sorted."""
    ways = [] if "" in texts else [""]
    groups = {c: [t[1:] for t in some] for c, some in itertools.groupby([t for t in texts if t], key=lambda t: t[0])}
    listed = "".join(_in_class(c) for c in groups)
    ways.append(f"[^{listed}]{_ANY}*" if listed else f"{_ANY}+")
    ways += [f"{_literal(c)}(?:{_other_than(rest)})" for c, rest in groups.items()]
    return "|".join(ways)


def _in_class(c: str) -> str:
    return "\\" + c if c in "\\]^-[&~" else _literal(c) if c < " " else c


def _literal(c: str) -> str:
    return f"\\x{ord(c):02x}" if c < " " else re.escape(c) if c.isascii() and not c.isalnum() and c not in ' "' else c


def _type(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _all(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else {"allOf": list(parts)}


def _any(parts: Sequence[Any]) -> Any:
    return False if not parts else parts[0] if len(parts) == 1 else {"anyOf": list(parts)}
