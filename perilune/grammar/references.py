"""Resolves a JSON schema's references inside the document (draft 2020-12); one plain form of `$ref` remains.

`$id`, `$anchor` and JSON pointers to any place are understood; so is `#name` as an `$id`, as drafts 6 and 7 wrote
anchors. Nothing is fetched: a reference to another document is refused by name.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
ONE = (
    "items", "additionalProperties", "propertyNames", "not", "if", "then", "else", "contains", "additionalItems",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
DEFINITIONS = ("$defs", "definitions")
_CONTAINED = ("minContains", "maxContains")
_NUMBERS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
_MAX_DIGITS = 9  # of an index in a JSON pointer
MAX_PARTS = 200_000  # schemas in a document, with copies: a reference to a schema that has no name copies it
_VALUES_OF_PART = 4  # values of an enum that count as one part, again in each copy
_NAMES = ("$id", "$anchor", "$dynamicAnchor")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,256}")  # short, because each reference repeats the name
MAX_URI_CHARS = 2_048  # an $id is joined to those of the enclosing schemas


class SchemaError(ValueError):
    """A schema that cannot be enforced; the text is the reason, in one line, and names the keyword."""


def resolved(schema: Any) -> Any:
    """The same schema, in which each `$ref` is "#", "#/$defs/NAME" or "#/definitions/NAME", without $id and anchors.

    Raises SchemaError for a reference without a target, or with one that is no schema.
    """
    return _Document(schema).rewritten() if isinstance(schema, Mapping) else schema


def target(root: Any, reference: Any) -> Any:
    """The target of a reference in the form that `resolved` writes; None for any other value."""
    if reference == "#":
        return root
    steps = reference.split("/") if isinstance(reference, str) else ()
    if len(steps) != 3 or steps[0] != "#" or steps[1] not in DEFINITIONS or not isinstance(root, Mapping):
        return None
    definitions = root.get(steps[1])
    return definitions.get(steps[2]) if isinstance(definitions, Mapping) else None


def with_parts(node: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema in which every schema directly inside it is changed."""
    made = dict(node)
    for word, value in node.items():
        if word in MAPS and isinstance(value, Mapping):
            made[word] = {name: change(part) for name, part in value.items()}
        elif (word in LISTS or word == "items") and isinstance(value, list):
            made[word] = [change(part) for part in value]
        elif word in ONE:
            made[word] = change(value)
    return made


def nodes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in one schema or several, each before those inside it. Some are no schemas (a map of properties, an
    enum's value)."""
    level = [value]
    while level:
        value = level.pop()
        if isinstance(value, Mapping):
            yield value
            level += value.values()
        elif isinstance(value, list):
            level += value


def references(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The `$ref` of each schema in `parts` that has one."""
    return (reference for part in parts if isinstance(reference := part.get("$ref"), str))


class _Document:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._resources: dict[str, Mapping[str, Any]] = {"": root}  # by URI without fragment
        self._anchors: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._dynamic = Counter[str]()  # schemas by their dynamic anchor
        self._left = MAX_PARTS
        self._pointers: dict[int, str] = {}  # plain reference by id() of the schema
        self._numbers = itertools.count()
        self._added: dict[str, Any] = {}
        self._waiting: list[tuple[str, Any, str]] = []  # name, schema, base URI
        for word in DEFINITIONS:
            for name, value in mapping(root.get(word)).items():
                if isinstance(value, Mapping) and _PLAIN.fullmatch(name):
                    self._pointers.setdefault(id(value), f"#/{word}/{name}")
        self._pointers[id(root)] = "#"
        self._register(root, "")

    def rewritten(self) -> Any:
        made = self._rewritten(self._root, "")
        while self._waiting:
            name, schema, base = self._waiting.pop()
            self._added[name] = self._rewritten(schema, base)
        return made | {"$defs": {**mapping(made.get("$defs")), **self._added}} if self._added else made

    def _rewritten(self, node: Any, base: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        self._count(1 + len(items(node.get("enum"))) // _VALUES_OF_PART)
        _check_form(node)
        base = self._base(node, base)
        made = with_parts(node, lambda part: self._rewritten(part, base))
        made = {word: v for word, v in made.items() if word not in _NAMES or not isinstance(v, str)}
        if "$ref" in node:
            made["$ref"] = self._pointer(node["$ref"], base)
        if "$dynamicRef" in node:
            self._check_dynamic(made.pop("$dynamicRef"))
            made = {"$ref": self._pointer(node["$dynamicRef"], base)} | ({"allOf": [made]} if made else {})
        return made

    def _check_dynamic(self, reference: Any) -> None:
        """A dynamic reference is a plain one unless its name is a dynamic anchor of several schemas."""
        name = urldefrag(reference).fragment if isinstance(reference, str) else ""
        if self._dynamic[name] > 1:
            raise SchemaError(f"$dynamicRef {reference!r:.200}: {self._dynamic[name]} schemas have this $dynamicAnchor")

    def _register(self, node: Any, base: str) -> None:
        """Records the `$id` and anchors of the schemas in `node`."""
        if not isinstance(node, Mapping):
            return
        self._count()
        inside = self._base(node, base)
        if inside != base:
            self._resources.setdefault(inside, node)
        for word in _NAMES:
            name = node.get(word)
            if isinstance(name, str):
                name = urldefrag(name).fragment if word == "$id" else name
                self._dynamic[name] += word == "$dynamicAnchor"
                if name and not name.startswith("/"):
                    self._anchors.setdefault((inside, name), node)
        with_parts(node, lambda part: self._register(part, inside))

    def _base(self, node: Mapping[str, Any], base: str) -> str:
        """The URI, without fragment, against which references inside a schema are read."""
        name = node.get("$id")
        return self._joined(base, name, "$id") if isinstance(name, str) else base

    def _joined(self, base: str, name: str, word: str) -> str:
        if name.startswith("#"):  # urljoin would not join it to a URN
            return base
        if len(base) + len(name) > MAX_URI_CHARS:
            raise SchemaError(f"{word} has more than {MAX_URI_CHARS} characters")
        try:
            return urldefrag(urljoin(base, name)).url
        except ValueError as e:
            raise SchemaError(f"{word} {name!r:.80} is not a URI reference: {e}") from e

    def _pointer(self, reference: Any, base: str) -> str:
        """The plain form of a reference. Its target gets a name in $defs if it has none."""
        if not isinstance(reference, str):
            raise SchemaError(f"$ref must be a string, not a value of type {type(reference).__name__}")
        uri = self._joined(base, reference, "$ref")
        fragment = unquote(reference.partition("#")[2])
        if uri not in self._resources:
            raise SchemaError(f"$ref {reference!r:.200} is not in the schema: put what it names into $defs")
        found: Any = self._resources[uri]
        if fragment.startswith("/"):
            found, uri = self._at(found, fragment, uri)
        elif fragment:
            found = self._anchors.get((uri, fragment))
        if not isinstance(found, Mapping | bool):
            raise SchemaError(f"$ref {reference!r:.200} names no schema in this one")
        if (plain := self._pointers.get(id(found))) is not None:
            return plain
        known = mapping(self._root.get("$defs"))
        name = next(name for number in self._numbers if (name := f"ref{number}") not in known)
        self._pointers[id(found)] = f"#/$defs/{name}"
        self._waiting.append((name, found, uri))
        return self._pointers[id(found)]

    def _at(self, found: Any, pointer: str, base: str) -> tuple[Any, str]:
        """The target of a JSON pointer, and the base URI of the schema around it."""
        for step in pointer.split("/")[1:]:
            if isinstance(found, list):
                index = int(step) if step.isdecimal() and len(step) <= _MAX_DIGITS else len(found)
                found = found[index] if index < len(found) else None
                continue
            base = self._base(found, base) if isinstance(found, Mapping) else base
            found = mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
        return found, base

    def _count(self, parts: int = 1) -> None:
        self._left -= parts
        if self._left < 0:
            raise SchemaError(f"the schema is too large: more than {MAX_PARTS} parts with its references resolved")


def _check_form(node: Mapping[str, Any]) -> None:
    """Refuses values of types that the rewriting code does not expect."""
    for word, value in node.items():
        if word in MAPS:
            fine, form = isinstance(value, Mapping), "an object"
        elif word == "propertyNames":
            fine, form = isinstance(value, Mapping | bool), "a schema"
        elif word in ("required", "type"):
            fine, form = not isinstance(value, Mapping) and all(isinstance(v, str) for v in items(value)), "names"
        elif word in _CONTAINED and value is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            fine, form = number and 0 <= value < math.inf, "a number of at least 0"
        elif word in _NUMBERS:
            fine, form = not isinstance(value, float) or math.isfinite(value), "a finite number"
        elif word in ("const", "enum"):
            fine, form = _finite(value), "of finite numbers"
        else:
            continue
        if not fine:
            raise SchemaError(f"{word} must be {form}")


def _finite(value: Any) -> bool:
    """Whether all numbers in JSON data are finite: parsers of request bodies accept NaN, Infinity and 1e999."""
    level = [value]
    while level:
        value = level.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return False
        level += value if isinstance(value, list) else mapping(value).values()
    return True


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a map, else an empty one: clients may send anything."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """`value` if it is a list, else an empty one: clients may send anything."""
    return value if isinstance(value, list) else []
