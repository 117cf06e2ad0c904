"""Computes the length of the shortest value of each part of a schema, and removes parts without a short enough one.

A part that requires itself has no finite value; one with a huge `minLength` or `minItems` has none that could be
written. Such a part is forbidden if it is optional, so that the model cannot begin a value that never ends; otherwise
the schema is refused. Expects schemas from `references.resolved`.
"""

import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeGuard

from perilune.grammar.expressions import length
from perilune.grammar.references import SchemaError, items, mapping, nodes, references, target, with_parts

MAX_BYTES = 32_768  # of the shortest value: near what a grammar of counted characters can hold in memory
MAX_EXACT = 2**53  # llguidance reads whole numbers as 64-bit floats; those near -2^63 overflow its stack
# Remainders of all multipleOf of a schema. llguidance computes a state of up to 1 KB for each: 5,000,000 took 16 s and
# 1.1 GB.
MAX_REMAINDERS = 100_000
# Names in all patternProperties of a schema. llguidance compares each pair of one object, again for each part of an
# allOf: 64 took up to a second, 192 up to 80 s.
MAX_PATTERN_NAMES = 64
MAX_PATTERN_COMPARISONS = 256 * 64**2  # of one value: 0.5 s where each reference brings the names again
# Properties of one object. llguidance's time to compile grows with their square: 8,000 took 20 s, and no text was found
# then, as for any schema that is such an object itself.
MAX_PROPERTIES_OF_OBJECT = 2_000
_MOST = 300_000  # parts measured per schema, a few microseconds each: clients choose how many there are
_PAIRS_OF_MEASURE = 4  # a required name in a part of an allOf takes about a fourth of the time of a measure

_ENFORCED = "that can be enforced"

# Kinds of values; numbers are "whole" without and "broken" with a fraction.
KINDS = ("null", "boolean", "whole", "broken", "string", "array", "object")
_LEAST: tuple[float, ...] = (4, 4, 1, 3, 2, 2, 2)  # bytes of the shortest: null, true, 0, 0.5, "", [], {}
_NONE: tuple[float, ...] = (math.inf,) * len(KINDS)
NAMED: Mapping[str, frozenset[str]] = {
    "integer": frozenset({"whole"}),
    "number": frozenset({"whole", "broken"}),
    **{name: frozenset({name}) for name in ("null", "boolean", "string", "array", "object")},
}
_FORMATS = {"ipv4": 7, "ipv6": 2, "uri": 8, "uuid": 36}  # characters of the shortest; others have become patterns
_NUMBER = 24  # characters, at most, of the shortest number in a range

Sizes = tuple[float, ...]  # bytes of the shortest value of each kind; infinite: there is none


def bounded(schema: Any) -> tuple[Any, int]:
    """The schema without parts that no value of MAX_BYTES satisfies, and the largest size of a part's shortest value.

    Raises SchemaError if no value of that length satisfies the schema itself, naming the part to blame.
    """
    if not isinstance(schema, Mapping):
        return schema, 0
    return _Bounded(schema).made()


class _TooMany(Exception):
    """The schema has too many parts to measure them all."""


class _Bounded:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST
        self._named: dict[str, Sizes] = {}  # by reference: sizes of its target, which may contain it
        self._known: dict[int, Sizes] | None = None  # by id() of a schema, once `_named` is final
        self._heaviest = 0.0

    def made(self) -> tuple[Any, int]:
        try:
            self._settle()
            self._known = {}
            if min(self._of(self._root)) > MAX_BYTES:
                return self._refused()
            made = self._without(self._root)
        except _TooMany:
            return self._root, MAX_BYTES
        return made, int(self._heaviest)

    def _settle(self) -> None:
        """Fixed-point iteration over the sizes of all references' targets, which start at infinity ("no value")."""
        users: dict[str, set[str]] = {}
        names = dict.fromkeys(references(nodes(self._root)))
        for name in names:
            for used in references(nodes(target(self._root, name))):
                users.setdefault(used, set()).add(name)
        waiting = OrderedDict(names)
        while waiting:
            name, _ = waiting.popitem(last=False)
            size = self._of(target(self._root, name))
            if size != self._named.get(name, _NONE):
                self._named[name] = size
                waiting.update(dict.fromkeys(users.get(name, ())))

    # ---- sizes

    def _of(self, node: Any) -> Sizes:
        if not isinstance(node, Mapping):
            return _NONE if node is False else _LEAST
        if self._known is not None and (found := self._known.get(id(node))) is not None:
            return found
        self._left -= 1
        if self._left < 0:
            raise _TooMany
        sizes = self._own(node)
        if "$ref" in node:
            sizes = _both(sizes, self._named.get(node["$ref"], _NONE) if isinstance(node["$ref"], str) else _LEAST)
        for part in items(node.get("allOf")):
            sizes = _both(sizes, self._of(part))
        for word in ("anyOf", "oneOf"):
            if choices := items(node.get(word)):
                sizes = _both(sizes, tuple(min(each) for each in zip(*(self._of(c) for c in choices))))
        if self._known is not None:
            self._known[id(node)] = sizes
            self._heaviest = max(self._heaviest, *(s for s in sizes if s <= MAX_BYTES), 0)
        return sizes

    def _own(self, node: Mapping[str, Any]) -> Sizes:
        sizes = dict(zip(KINDS, _LEAST))
        sizes["string"] = _string(node)
        sizes["whole"] = max(1, _number(node))
        sizes["broken"] = max(3, _number(node))
        sizes["array"] = self._array(node)
        sizes["object"] = self._object(node)
        kinds = kinds_of(node.get("type"))
        for values in (node.get("enum"), [node["const"]] if "const" in node else None):
            if isinstance(values, list):
                lengths = [(kind_of(v), len(json.dumps(v, ensure_ascii=False, separators=(",", ":")))) for v in values]
                for kind in KINDS:
                    sizes[kind] = max(sizes[kind], min((n for k, n in lengths if k == kind), default=math.inf))
        return tuple(sizes[kind] if kind in kinds else math.inf for kind in KINDS)

    def _array(self, node: Mapping[str, Any]) -> float:
        count = _count(node, "minItems")
        if count > _count(node, "maxItems", math.inf):
            return math.inf
        firsts = items(node.get("prefixItems"))[: min(int(count), MAX_BYTES)]
        rest = count - len(firsts)
        size = sum(min(self._of(part)) for part in firsts)
        if rest > 0:
            size += rest * min(self._of(node.get("items", True)))
        return 2 + size + max(count - 1, 0)

    def _object(self, node: Mapping[str, Any]) -> float:
        parts = [node, *(part for part in items(node.get("allOf")) if isinstance(part, Mapping))]
        names = dict.fromkeys(n for part in parts for n in items(part.get("required")) if isinstance(n, str))
        self._left -= len(names) * (len(parts) - 1) // _PAIRS_OF_MEASURE
        if self._left < 0:
            raise _TooMany
        size = 2.0 + max(len(names) - 1, 0)
        for name in names:
            member = _LEAST
            for part in parts:
                member = _both(member, self._of(_member(part, name)))
            size += len(json.dumps(name, ensure_ascii=False)) + 1 + min(member)
        more = int(min(_count(node, "minProperties"), MAX_BYTES)) - len(names)
        return size + sum(sorted(self._more(node, names, more))[:more]) if more > 0 else size

    def _more(self, node: Mapping[str, Any], names: Mapping[str, None], count: int) -> Iterator[float]:
        """Sizes, commas included, of `count` or more members that `names` does not have."""
        for name, part in mapping(node.get("properties")).items():
            if name not in names:
                yield len(json.dumps(name, ensure_ascii=False)) + 2 + min(self._of(part))
        other = True if node.get("patternProperties") else node.get("additionalProperties", True)
        yield from itertools.repeat(5 + min(self._of(other)), count)

    # ---- what is left

    def _without(self, node: Any) -> Any:
        """The schema with False in place of parts that have no value short enough; such alternatives are left out."""
        if not isinstance(node, Mapping):
            return node
        inverted = {word: node[word] for word in ("not", "if", "contains") if word in node}
        made = with_parts(node, self._kept) | inverted
        for word in ("anyOf", "oneOf"):
            if isinstance(made.get(word), list):
                made[word] = [choice for choice in made[word] if choice is not False]
        sizes = self._own(node)
        endless = {kind for kind in kinds_of(node.get("type")) if sizes[KINDS.index(kind)] > MAX_BYTES}
        if endless and not node.keys() & {"enum", "const"}:
            made["type"] = [name for name in _names(node.get("type")) if not NAMED[name] & endless]
        return made

    def _kept(self, node: Any) -> Any:
        if isinstance(node, Mapping) and min(self._of(node)) > MAX_BYTES:
            return False
        return self._without(node)

    # ---- reasons

    def _refused(self) -> tuple[Any, int]:
        """Raises SchemaError with the reason why no value is short enough.

        A contradiction is left as it is: the compiler, which sees all of them, names the keywords.
        """
        node: Any = self._root
        path, seen = "#", {"#": None}
        while isinstance(node, Mapping):
            for word in ("minLength", "minItems", "minProperties"):
                if _count(node, word) > MAX_BYTES:
                    raise SchemaError(f"{path}: {word} {node[word]} is more than the {MAX_BYTES} bytes {_ENFORCED}")
            if "pattern" in node and MAX_BYTES < _string(node) < math.inf:
                raise SchemaError(f"{path}: its pattern matches nothing below the {MAX_BYTES} bytes {_ENFORCED}")
            step = next((s for s in self._needs(node) if min(self._of(s[1])) > MAX_BYTES), None)
            if step is None:
                break
            name, node = step
            path = name if name.startswith("#") else path + name
            if path in seen:
                loop = " -> ".join([*list(seen)[list(seen).index(path) :], path])
                raise SchemaError(f"no finite value satisfies it: {loop} requires itself: make it optional or nullable")
            seen[path] = None
        size = min(self._of(self._root))
        if math.isfinite(size):
            raise SchemaError(f"its shortest value takes {size:.0f} bytes, more than the {MAX_BYTES} {_ENFORCED}")
        return self._root, 0

    def _needs(self, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """(step, schema) of each part that every value of `node` needs; step: a piece of the path, or a reference."""
        if isinstance(node.get("$ref"), str):
            yield node["$ref"], target(self._root, node["$ref"])
        for i, part in enumerate(items(node.get("allOf"))):
            yield f"/allOf/{i}", part
        for word in ("anyOf", "oneOf"):
            choices = items(node.get(word))
            if choices and all(min(self._of(choice)) > MAX_BYTES for choice in choices):
                yield f"/{word}/0", choices[0]
        parts = [("", node), *((f"/allOf/{i}", part) for i, part in enumerate(items(node.get("allOf"))))]
        for name in (name for _, part in parts if isinstance(part, Mapping) for name in items(part.get("required"))):
            for step, part in parts:
                if isinstance(name, str) and isinstance(part, Mapping):
                    properties = part.get("properties")
                    listed = isinstance(properties, Mapping) and name in properties
                    yield step + (f"/properties/{name}" if listed else "/additionalProperties"), _member(part, name)
        if not items(node.get("required")) and _count(node, "minProperties") > 0:
            yield from ((f"/properties/{name}", part) for name, part in mapping(node.get("properties")).items())
        firsts = items(node.get("prefixItems"))
        for i, part in enumerate(firsts[: min(int(_count(node, "minItems")), len(firsts))]):
            yield f"/prefixItems/{i}", part
        if _count(node, "minItems") > len(firsts) and "items" in node:
            yield "/items", node["items"]


def _member(node: Mapping[str, Any], name: str) -> Any:
    """The schema that one schema has for a property."""
    properties = node.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if node.get("patternProperties") else node.get("additionalProperties", True)


def _string(node: Mapping[str, Any]) -> float:
    least = _count(node, "minLength")
    if least > _count(node, "maxLength", math.inf):
        return math.inf
    pattern, form = node.get("pattern"), node.get("format")
    matched = length(pattern) if isinstance(pattern, str) else 0
    return 2 + max(least, matched, _FORMATS.get(form, 0) if isinstance(form, str) else 0)


def _number(node: Mapping[str, Any]) -> int:
    """Characters of the shortest number in the range: 1 if it contains 0, else about those of the end nearer to 0."""
    low = max((v for w in ("minimum", "exclusiveMinimum") if is_number(v := node.get(w))), default=0)
    high = min((v for w in ("maximum", "exclusiveMaximum") if is_number(v := node.get(w))), default=0)
    near = low if low > 0 else high
    if low <= 0 <= high:
        return 1
    size = len(str(int(near) if float(near).is_integer() else near))
    if is_number(step := node.get("multipleOf")):
        size += len(str(step))
    return min(size, _NUMBER)


def _count(node: Mapping[str, Any], word: str, default: float = 0) -> float:
    value = node.get(word)
    return value if is_number(value) and value >= 0 else default


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def multiple(node: Mapping[str, Any]) -> Fraction | None:
    """The multipleOf of a schema; None: it has none, or one that the compiler refuses."""
    step = node.get("multipleOf")
    if not is_number(step) or not step or (isinstance(step, float) and not math.isfinite(step)):
        return None
    return Fraction(repr(abs(step)))


def remainders(step: Fraction) -> int:
    """Remainders that numbers have when divided by `step`, both without their decimal point: 5 for 0.05."""
    scale = 1
    while (step * scale).denominator > 1:
        scale *= 10
    return int(step * scale)


def remainders_of(schemas: Any) -> int:
    """Remainders of all multipleOf in one schema or several."""
    return sum(remainders(step) for node in nodes(schemas) if (step := multiple(node)) is not None)


def pattern_names(schemas: Any) -> int:
    """Names in all patternProperties of one schema or several."""
    return sum(len(mapping(node.get("patternProperties"))) for node in nodes(schemas))


def pattern_comparisons(root: Any) -> float:
    """How many pairs of names in patternProperties the compiler compares for one value, at most: all names that hold
    together, for each choice among the alternatives of the value. A recursive reference adds nothing."""
    if not pattern_names(root):
        return 0.0
    known: dict[int, tuple[float, float]] = {}  # by id() of a schema: choices, and names that hold together
    left = [(node, False) for node in nodes(root)]  # schemas, and whether their parts are known
    while left:
        node, ready = left.pop()
        if not ready and id(node) in known:
            continue
        together = [*items(node.get("allOf")), *([target(root, node["$ref"])] if "$ref" in node else [])]
        choices = [items(node.get(word)) for word in ("anyOf", "oneOf") if items(node.get(word))]
        if not ready:
            known[id(node)] = 1.0, 0.0
            left.append((node, True))
            left += [(part, False) for parts in (together, *choices) for part in parts if isinstance(part, Mapping)]
            continue
        ways, names = 1.0, float(len(mapping(node.get("patternProperties"))))
        for more, others in (known.get(id(part), (1.0, 0.0)) for part in together):
            ways, names = ways * more, names + others
        for found in ([known.get(id(part), (1.0, 0.0)) for part in parts] for parts in choices):
            ways *= sum(more for more, _ in found)
            names += max(others for _, others in found)
        known[id(node)] = ways, names
    return max(ways * names * names for ways, names in known.values() if names)


def _names(named: Any) -> Sequence[str]:
    every = [n for n in NAMED if n != "integer"]
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else every
    return [n for n in names if isinstance(n, str) and n in NAMED]


def kinds_of(named: Any) -> set[str]:
    return {kind for name in _names(named) for kind in NAMED[name]}


def kind_of(value: Any) -> str:
    """One of KINDS."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "whole"
        case float():
            return "whole" if value.is_integer() else "broken"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _both(a: Sizes, b: Sizes) -> Sizes:
    return tuple(map(max, a, b))
