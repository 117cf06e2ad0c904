"""Rewrites `unevaluatedProperties` and `unevaluatedItems` by plain keywords. A value may satisfy a schema in several
ways. A way is a set of subschemas that hold together, with the properties and items that they evaluate (JSON Schema
core 2020-12, chapter 11).

An `anyOf` has a way for every subset of its alternatives. Beyond MAX_BRANCHES alternatives it has ways only for each
one alone and for all of them, which excludes some valid values.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.grammar.negation import MAX_DEPTH, Negation
from perilune.grammar.references import SchemaError, items, mapping, target

MAX_BRANCHES = 4  # alternatives of an anyOf of which all subsets are tried
MAX_WAYS = 32  # ways of one schema
WORDS = ("unevaluatedProperties", "unevaluatedItems")
_APPLIED = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref")


@dataclass(frozen=True)
class Way:
    """Schemas that hold together (`held`), and what they evaluate."""

    held: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_properties: bool = False
    first_items: int = 0
    all_items: bool = False
    contained: tuple[Any, ...] = ()  # schemas of `contains`: they evaluate items that satisfy one of them

    def __add__(self, other: "Way") -> "Way":
        return Way(
            self.held + other.held,
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_properties or other.all_properties,
            max(self.first_items, other.first_items),
            self.all_items or other.all_items,
            self.contained + other.contained,
        )

    def closed(self, properties: Any, items: Any) -> Any:
        """The schema of this way. Parameters: the values of unevaluatedProperties and unevaluatedItems, which hold for
        what the way does not evaluate; None: the keyword is not there."""
        made: dict[str, Any] = {"allOf": list(self.held)} if self.held else {}
        if properties is not None and not self.all_properties:
            made |= {"properties": dict.fromkeys(sorted(self.names), True), "additionalProperties": properties}
            if self.patterns:
                made["patternProperties"] = dict.fromkeys(sorted(self.patterns), True)
        if items is not None and not self.all_items:
            made["items"] = {"anyOf": [*self.contained, items]} if self.contained else items
            if self.first_items:
                made["prefixItems"] = [True] * self.first_items
        return made


def without_unevaluated(root: Any, node: Mapping[str, Any], negation: Negation) -> Any:
    """`node`, a part of the document `root`, without the two keywords. Raises SchemaError if it has too many ways."""
    properties, items = (node.get(word) for word in WORDS)
    rest = {word: value for word, value in node.items() if word not in WORDS}
    definitions = {word: rest.pop(word) for word in ("$defs", "definitions", "$schema") if word in rest}
    made = [way.closed(properties, items) for way in _Ways(root, negation).of(rest, 0)]
    negation.count(len(made))
    return definitions | (made[0] if len(made) == 1 else {"anyOf": made})


class _Ways:
    def __init__(self, root: Any, negation: Negation) -> None:
        self._root = root
        self._negation = negation

    def of(self, node: Any, depth: int) -> list[Way]:
        if not isinstance(node, Mapping) or depth > MAX_DEPTH:
            return [Way((node,))]
        self._negation.visit()
        ways = [self._plain(node)]
        if any(word in node for word in WORDS):  # `node` has a keyword of its own and evaluates the whole value
            way = ways[0]
            whole = Way((node,), all_properties=WORDS[0] in node, all_items=WORDS[1] in node)
            return [_and_seen(whole, way)]
        if "$ref" in node:
            ways = _product(ways, self.of(target(self._root, node["$ref"]), depth + 1))
        for part in items(node.get("allOf")):
            ways = _product(ways, self.of(part, depth + 1))
        if "anyOf" in node:
            ways = _product(ways, self._any(items(node["anyOf"]), depth + 1))
        if "oneOf" in node:
            ways = _product(ways, self._one(items(node["oneOf"]), depth + 1))
        if "if" in node:
            ways = _product(ways, self._condition(node, depth + 1))
        for name, part in mapping(node.get("dependentSchemas")).items():
            absent, present = {"properties": {name: False}}, Way(({"required": [name]},))
            ways = _product(ways, [Way((absent,)), *_product([present], self.of(part, depth + 1))])
        return ways

    def _plain(self, node: Mapping[str, Any]) -> Way:
        """The way of the keywords that are not in _APPLIED."""
        held = {word: value for word, value in node.items() if word not in _APPLIED}
        return Way(
            (held,) if held else (),
            frozenset(mapping(node.get("properties"))),
            frozenset(mapping(node.get("patternProperties"))),
            "additionalProperties" in node,
            len(items(node.get("prefixItems"))),
            "items" in node,
            (node["contains"],) if "contains" in node else (),
        )

    def _any(self, parts: Sequence[Any], depth: int) -> list[Way]:
        counts = range(1, len(parts) + 1) if len(parts) <= MAX_BRANCHES else {1, len(parts)}
        found = []
        for count in counts:
            for chosen in itertools.combinations(parts, count):
                ways = [Way()]
                for part in chosen:
                    ways = _product(ways, self.of(part, depth))
                found += ways
        return found

    def _one(self, parts: Sequence[Any], depth: int) -> list[Way]:
        _check_ways(len(parts))
        found = []
        for i, part in enumerate(parts):
            others = [{"not": other} for j, other in enumerate(parts) if j != i]
            found += _product([Way(tuple(others))], self.of(part, depth))
        return found

    def _condition(self, node: Mapping[str, Any], depth: int) -> list[Way]:
        met = _product(self.of(node["if"], depth), self.of(node.get("then", True), depth))
        return met + _product([Way(({"not": node["if"]},))], self.of(node.get("else", True), depth))


def _and_seen(whole: Way, seen: Way) -> Way:
    return whole + Way((), seen.names, seen.patterns, seen.all_properties, seen.first_items, seen.all_items)


def _product(some: Sequence[Way], others: Sequence[Way]) -> list[Way]:
    _check_ways(len(some) * len(others))
    return [a + b for a in some for b in others]


def _check_ways(count: int) -> None:
    if count > MAX_WAYS:
        raise SchemaError(f"unevaluated: more than {MAX_WAYS} combinations of alternatives")
