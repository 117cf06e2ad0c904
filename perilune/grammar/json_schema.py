"""Rewrites JSON schemas to equivalent ones of keywords that llguidance, the grammar compiler, can enforce.

llguidance refuses some keywords that others can express, and checks a few formats less strictly than parsers do (it
accepts February 29 in every year). Keywords that cannot be rewritten stay; compiling the grammar refuses them by name.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perilune.grammar.expressions import finder
from perilune.grammar.negation import TYPES, Negation
from perilune.grammar.references import SchemaError, items, mapping, target, with_parts
from perilune.grammar.sizes import KINDS, MAX_BYTES, MAX_EXACT, NAMED, is_number, kind_of
from perilune.grammar.string_formats import EQUIVALENT, FORMATS, HINTS, MAX_CHARS
from perilune.grammar.unevaluated import WORDS as UNEVALUATED
from perilune.grammar.unevaluated import without_unevaluated

_REMARKS = (
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
    "discriminator", "externalDocs", "xml",
)  # fmt: skip
# Counting keywords; above its value here a keyword is dropped. Only maxima are dropped: the compiler's memory grows
# with each counted character, and no answer has so many items.
_UNBOUNDED = float("inf")
_COUNTS: Mapping[str, float] = {
    "minLength": _UNBOUNDED,
    "maxLength": MAX_BYTES,
    "minItems": _UNBOUNDED,
    "maxItems": 1 << 32,
    "minProperties": _UNBOUNDED,
    "maxProperties": 1 << 32,
    "minContains": _UNBOUNDED,
    "maxContains": 1 << 32,
}
_FARTHEST, _NEAREST = 10**18, 1e-30  # ends of number ranges farther from 0 are dropped, nearer ones become 0
_ENDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_GREATEST = 2**63 - 1  # maximum added to integers without one
_DEEPEST = 16  # references and alternatives followed to distinguish two schemas
_STARTS = 4  # the item that `contains` needs is one of the first 4; for several needed items see _heads
_MAX_CONTAINED = 64  # largest minContains
_MAX_OVERLAPPING = 32  # alternatives of a oneOf that may overlap: each then gets a `not` for every other one
_MAX_VISITED = 50_000  # schemas visited to distinguish alternatives, 1 us each: clients choose how many there are


def enforceable(schema: Any) -> Any:
    """The same schema, or one that holds for exactly the same values, with fewer keywords that cannot be enforced.

    Exceptions: strings of some formats are narrowed to what all parsers read (no year 0, no leap seconds), and numbers
    by a millionth of a small range. Upper bounds that an answer hardly reaches are dropped: of characters above
    MAX_BYTES, of numbers above 10^18. Integers without bounds get 1 - 10^18 and 2^63 - 1. Raises SchemaError for a
    lower bound that no number reaches.
    """
    return _Rewriter(schema).rewrite(schema)


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_VISITED
        self._negation = Negation(root)
        # By id() of a schema with listed values: the schema, to keep its id in use, and the values' kinds or texts.
        self._known_kinds: dict[int, tuple[Any, set[str]]] = {}
        self._known_values: dict[int, tuple[Any, set[str]]] = {}

    def rewrite(self, node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        # The compiler refuses annotations beside some references. The root keeps x-...: references may lead there.
        made = {k: v for k, v in node.items() if k not in _REMARKS and k != "x-guidance"}
        if node is not self._root:
            made = {k: v for k, v in made.items() if not k.startswith("x-")}
        if any(word in made for word in UNEVALUATED):
            made = without_unevaluated(self._root, made, self._negation)
        _check_exact(made)
        steps = (
            self._counts,
            self._one_of,
            self._condition,
            self._choice,
            self._not,
            self._contains,
            self._string,
            self._exact,
            self._integer,
            self._range,
            self._number,
            self._names,
            self._dependencies,
            self._sizes,
        )
        for step in steps:
            made = step(made)
        return with_parts(made, self.rewrite)

    # ---- keywords

    def _counts(self, node: dict[str, Any]) -> dict[str, Any]:
        """Counts written as fractions (2.0) become whole; maxima above _COUNTS are dropped."""
        made = {}
        for word, value in node.items():
            if word in _COUNTS and isinstance(value, float) and value.is_integer():
                value = int(value)
            if word in _COUNTS and is_number(value) and value > _COUNTS[word]:
                continue
            made[word] = value
        return made

    def _one_of(self, node: dict[str, Any]) -> dict[str, Any]:
        """`oneOf` as `anyOf` if no two alternatives can hold at once. Also if each alternative only requires one
        distinct property: then as objects with exactly one of these (a non-object would satisfy all alternatives)."""
        choices = node.get("oneOf")
        if not isinstance(choices, list) or not choices:
            return node
        if self._all_apart(choices):
            made = choices
        elif all(
            isinstance(c, Mapping) and c.keys() == {"required"} and len(items(c["required"])) == 1 for c in choices
        ) and len(names := {c["required"][0] for c in choices}) == len(choices):
            made = [
                {"type": "object", "required": [name], "properties": dict.fromkeys(names - {name}, False)}
                for name in sorted(names)
            ]
        else:
            return node
        rest = {k: v for k, v in node.items() if k != "oneOf"}
        return _and(rest, {"anyOf": made}) if "anyOf" in rest else rest | {"anyOf": made}

    def _condition(self, node: dict[str, Any]) -> dict[str, Any]:
        """`if` as two alternatives, if it tests a required property with listed values for some of these values."""
        asked = node.get("if")
        if not isinstance(asked, Mapping) or asked.keys() - {"properties", "required"}:
            return node
        tested = asked.get("properties")
        if not isinstance(tested, Mapping) or len(tested) != 1:
            return node
        ((name, test),) = tested.items()
        every, some = self._listed(node, name), self._listed({"properties": {name: test}}, name)
        plain = isinstance(test, Mapping) and test.keys() in ({"const"}, {"enum"})
        if not plain or every is None or some is None or set(items(asked.get("required"))) - {name}:
            return node
        if name not in self._required(node) or node.get("type") != "object":
            return node
        spelled = {_spelled(v) for v in some}
        rest = {k: v for k, v in node.items() if k not in ("if", "then", "else")}
        made = []
        for word, values in (
            ("then", [v for v in every if _spelled(v) in spelled]),
            ("else", [v for v in every if _spelled(v) not in spelled]),
        ):
            if values:
                follows = node.get(word, True)
                held = {"properties": {name: {"enum": values}}}
                made.append({"allOf": [held, follows]} if follows is not True else held)
        return _and(rest, {"anyOf": made})

    def _choice(self, node: dict[str, Any]) -> dict[str, Any]:
        """`oneOf`, `if` and `dependentSchemas` as `anyOf`, with `not` for what an alternative excludes."""
        if "oneOf" in node:
            parts = items(node["oneOf"])
            if len(parts) > _MAX_OVERLAPPING:
                raise SchemaError(
                    f"oneOf has more than {_MAX_OVERLAPPING} alternatives, of which some could hold together: use "
                    "anyOf, or distinguish them by type or a const"
                )
            others = [[{"not": other} for other in (*parts[:i], *parts[i + 1 :])] for i in range(len(parts))]
            made = [{"allOf": [part, *rest]} for part, rest in zip(parts, others)]
            node = _and({k: v for k, v in node.items() if k != "oneOf"}, {"anyOf": made})
        if "if" in node:
            asked = node["if"]
            met, unmet = [asked, node.get("then", True)], [{"not": asked}, node.get("else", True)]
            if "then" in node or "else" in node:
                node = _and(node, {"anyOf": [{"allOf": met}, {"allOf": unmet}]})
        dependent = [
            {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, part]}]}
            for name, part in (node.get("dependentSchemas") or {}).items()
        ]
        node = _and(node, *dependent) if dependent else node
        return {k: v for k, v in node.items() if k not in ("if", "then", "else", "dependentSchemas")}

    def _not(self, node: dict[str, Any]) -> dict[str, Any]:
        if "not" not in node:
            return node
        rest = {k: v for k, v in node.items() if k != "not"}
        return _and(rest, {"anyOf": self._negation.alternatives(node["not"])})

    def _contains(self, node: dict[str, Any]) -> dict[str, Any]:
        """`contains` as `prefixItems`: at most _STARTS - 1 other items come before the last needed one. With
        `maxContains`, or more than three needed items, the needed ones are adjacent."""
        rest = {k: v for k, v in node.items() if k not in ("contains", "minContains", "maxContains")}
        wanted, least, most = node.get("contains"), node.get("minContains", 1), node.get("maxContains")
        if wanted is None or (least == 0 and most is None):
            return rest
        if not is_number(least) or least > _MAX_CONTAINED:
            raise SchemaError(f"minContains cannot be enforced above {_MAX_CONTAINED}")
        ahead = {"not": wanted} if most is not None else True
        counts = [int(least)] if most is None else range(int(least), min(int(most), int(least) + _STARTS - 1) + 1)
        made: list[Any] = [{"type": [name for name in TYPES if name != "array"]}]
        for count in counts:
            for head in _heads(count, wanted, ahead, apart=most is None and count <= 3):
                made.append({"type": "array", "minItems": len(head), "items": ahead})
                if head:
                    made[-1]["prefixItems"] = head
        return _and(rest, {"anyOf": made})

    def _listed(self, node: Any, name: str) -> list[Any] | None:
        """The only values that a property may have; None: they are not listed."""
        listing = self._listing(node, name)
        return None if listing is None else _values_of(listing)

    def _listing(self, node: Any, name: str) -> Mapping[str, Any] | None:
        """The schema that lists the only values of a property, if one does."""
        for facet in self._facets(node):
            properties = facet.get("properties")
            for inner in self._facets(properties.get(name)) if isinstance(properties, Mapping) else ():
                if "const" in inner or isinstance(inner.get("enum"), list):
                    return inner
        return None

    def _string(self, node: dict[str, Any]) -> dict[str, Any]:
        pattern = node.get("pattern")
        if isinstance(pattern, str) and pattern in EQUIVALENT:
            node = node | {"pattern": EQUIVALENT[pattern]}
        elif isinstance(pattern, str) and pattern.startswith("^(?="):
            ahead, pattern = _ahead(pattern)
            node = node | {"pattern": pattern}
            for expression in ahead:
                node = _and(node, {"pattern": expression})
        form = node.get("format")
        if form in HINTS:
            return {k: v for k, v in node.items() if k != "format"}
        if not isinstance(form, str) or form not in FORMATS:
            return node
        rest = {k: v for k, v in node.items() if k != "format"}
        wanted: dict[str, Any] = {"pattern": FORMATS[form]}
        if form in MAX_CHARS:
            wanted["maxLength"] = MAX_CHARS[form]
        if form in ("email", "idn-email"):
            wanted["allOf"] = [{"pattern": "^[^@]{1,64}@"}]
        return _and(rest, wanted) if wanted.keys() & rest.keys() else rest | wanted

    def _exact(self, node: dict[str, Any]) -> dict[str, Any]:
        """Refuses an end of a range that the compiler rounds outwards. An integer's minimum beyond _FARTHEST rises."""
        whole = _is_whole(node)
        for word, sign in _ENDS.items():
            end = node.get(word)
            if not is_number(end) or abs(end) < MAX_EXACT or sign * end >= 1 << 63:
                continue
            if sign > 0 and end <= -_FARTHEST:
                if whole:
                    node = {k: v for k, v in node.items() if k != word} | {"minimum": 128 - _FARTHEST}  # exact
                continue
            if sign < 0 and end >= _FARTHEST and not (whole and end <= _GREATEST):
                continue
            inwards = sign if word.startswith("exclusive") and node.get("type") != "number" else 0
            if sign * min(int(float(end) + inwards), _GREATEST) < sign * (int(end) + inwards):
                raise SchemaError(f"{word} {end} cannot be enforced: it is beyond 2^53 and would be rounded")
        return node

    def _integer(self, node: dict[str, Any]) -> dict[str, Any]:
        """Adds the bounds that an integer lacks: a model may write digits for ever, and few parsers take more than 64
        bits."""
        if not _is_whole(node) or "const" in node or "enum" in node:
            return node
        low = next((node[word] for word in ("minimum", "exclusiveMinimum") if word in node), None)
        high = next((node[word] for word in ("maximum", "exclusiveMaximum") if word in node), None)
        if low is None and (high is None or (is_number(high) and high > -_FARTHEST)):
            node = node | {"minimum": 1 - _FARTHEST}  # llguidance counts no further down
        if high is None and (low is None or (is_number(low) and low < _GREATEST)):
            node = node | {"maximum": _GREATEST}
        return node

    def _range(self, node: dict[str, Any]) -> dict[str, Any]:
        """Drops ends of a range beyond _FARTHEST, and makes ends within _NEAREST of 0 zero.

        llguidance cannot represent either in 64 bits. An integer's maximum beyond is kept: it is read as 2^63 - 1.
        """
        for word, sign in _ENDS.items():
            end = node.get(word)
            if not is_number(end):
                continue
            if sign * end >= 1 << 63:
                raise SchemaError(f"{word} {end} cannot be enforced: ends of ranges go up to 2^63 - 1")
            rest = {k: v for k, v in node.items() if k != word}
            if sign * end <= -_FARTHEST and not (sign < 0 and _is_whole(node)):
                node = rest
            elif 0 < abs(end) < _NEAREST:
                name = "Minimum" if sign > 0 else "Maximum"
                name = f"exclusive{name}" if sign * end > 0 else name.lower()
                other = rest.get(name, 0)
                node = rest | {name: (max if sign > 0 else min)(0, other) if is_number(other) else other}
        return node

    def _number(self, node: dict[str, Any]) -> dict[str, Any]:
        """Moves an exclusive end inwards by a millionth of the range if it is the integer part of all numbers in it.

        llguidance would accept the end itself: 0 for "above 0 and below 0.5".
        """
        low, high = node.get("exclusiveMinimum", node.get("minimum")), node.get("exclusiveMaximum", node.get("maximum"))
        if low is None or high is None or not (is_number(low) and is_number(high)) or node.get("type") == "integer":
            return node
        if not 0 < high - low < 1:
            return node
        for word, other, at, away in (
            ("exclusiveMinimum", "minimum", low, high - low),
            ("exclusiveMaximum", "maximum", high, low - high),
        ):
            if is_number(node.get(word)) and float(at).is_integer() and at * away >= 0:
                node = {k: v for k, v in node.items() if k != word} | {other: at + away * 1e-6}
        return node

    def _names(self, node: dict[str, Any]) -> dict[str, Any]:
        """`propertyNames` with a list of names as `properties`, with a pattern or length as `patternProperties`."""
        if "propertyNames" not in node:
            return node
        names, rest = node["propertyNames"], {k: v for k, v in node.items() if k != "propertyNames"}
        if isinstance(names, Mapping) and names.keys() == {"$ref"}:
            names = target(self._root, names["$ref"])
        if isinstance(names, bool):
            return rest if names else _and(rest, {"maxProperties": 0})
        said = {k: v for k, v in names.items() if k not in _REMARKS and (k, v) != ("type", "string")}
        listed = items(said["enum"]) if said.keys() == {"enum"} else [said["const"]] if said.keys() == {"const"} else ()
        other, properties = rest.get("additionalProperties", True), dict(rest.get("properties") or {})
        if listed and "patternProperties" not in rest:
            allowed = dict.fromkeys((name for name in listed if isinstance(name, str)), other)
            return rest | {
                "properties": allowed | {n: part if n in allowed else False for n, part in properties.items()},
                "additionalProperties": False,
            }
        pattern = said.get("pattern") if said.keys() == {"pattern"} else _length(said)
        if (said and not pattern) or set(items(rest.get("required"))) - properties.keys():
            return node
        if pattern and ("patternProperties" in rest or (properties and other is not True)):
            return node
        if not pattern:
            return rest
        try:
            found = finder(pattern)
            kept = {name: part if found(name) else False for name, part in properties.items()}
        except ValueError:
            return node
        made = rest | {"patternProperties": {pattern: other}, "additionalProperties": False}
        return made | {"properties": kept} if kept else made

    def _dependencies(self, node: dict[str, Any]) -> dict[str, Any]:
        needs = node.get("dependentRequired")
        if not isinstance(needs, Mapping) or not all(isinstance(v, list) for v in needs.values()):
            return node
        made = {k: v for k, v in node.items() if k != "dependentRequired"}
        choices = [[{"properties": {name: False}}, {"required": list(others)}] for name, others in needs.items()]
        return _and(made, *({"anyOf": choice} for choice in choices)) if choices else made

    def _sizes(self, node: dict[str, Any]) -> dict[str, Any]:
        most = node.get("maxItems")
        if node.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
            return {k: v for k, v in node.items() if k != "uniqueItems"}
        return node

    # ---- whether two schemas can hold at once

    def _all_apart(self, choices: list[Any]) -> bool:
        """Whether `_apart` is true of every pair. Many alternatives that list their values, or those of a property that
        all of them require, are not compared pair by pair."""
        if _all_values_apart(map(self._values, choices)):
            return True
        if all(self._kinds(choice) == {"object"} for choice in choices):
            for name in sorted(set.intersection(*map(self._required, choices))):
                if _all_values_apart(self._property(choice, name) for choice in choices):
                    return True
        return all(self._apart(a, b) for i, a in enumerate(choices) for b in choices[:i])

    def _apart(self, a: Any, b: Any) -> bool:
        """Whether types or listed values (of a required property) show that no value satisfies both."""
        if self._left <= 0:
            return False
        kinds, others = self._kinds(a), self._kinds(b)
        if not kinds & others:
            return True
        if kinds & others != {"object"}:
            return _values_apart(self._values(a), self._values(b))
        needed = self._required(a) & self._required(b)
        return any(_values_apart(self._property(a, name), self._property(b, name)) for name in needed)

    def _facets(self, node: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """The schema, and those that its `$ref` and `allOf` name: a value that satisfies it satisfies them all."""
        self._left -= 1
        if not isinstance(node, Mapping) or depth > _DEEPEST or self._left <= 0:
            return
        yield node
        if "$ref" in node:
            yield from self._facets(target(self._root, node["$ref"]), depth + 1)
        for part in items(node.get("allOf")):
            yield from self._facets(part, depth + 1)

    def _kinds(self, node: Any, depth: int = 0) -> set[str]:
        found = set(KINDS)
        if depth > _DEEPEST or self._left <= 0:
            return found
        for facet in self._facets(node, depth):
            if "type" in facet:
                named = facet["type"] if isinstance(facet["type"], list) else [facet["type"]]
                found &= {kind for name in named if isinstance(name, str) for kind in NAMED.get(name, KINDS)}
            if "const" in facet or items(facet.get("enum")):
                found &= self._kinds_listed(facet)
            for word in ("anyOf", "oneOf"):
                if choices := items(facet.get(word)):
                    found &= {kind for choice in choices for kind in self._kinds(choice, depth + 1)}
        return found

    def _kinds_listed(self, facet: Mapping[str, Any]) -> set[str]:
        """The kinds that its enum and const both have."""
        if id(facet) not in self._known_kinds:
            lists = (items(facet.get("enum")), [facet["const"]] if "const" in facet else [])
            kinds = set.intersection(*({kind_of(v) for v in values} for values in lists if values))
            self._known_kinds[id(facet)] = (facet, kinds)
        return self._known_kinds[id(facet)][1]

    def _required(self, node: Any) -> set[str]:
        return {n for facet in self._facets(node) for n in items(facet.get("required")) if isinstance(n, str)}

    def _values(self, node: Any) -> set[str] | None:
        """The only values a schema allows, spelled; None: it does not list them."""
        return self._property({"properties": {"": node}}, "")

    def _property(self, node: Any, name: str) -> set[str] | None:
        if (listing := self._listing(node, name)) is None:
            return None
        if id(listing) not in self._known_values:
            self._known_values[id(listing)] = (listing, {_spelled(v) for v in _values_of(listing)})
        return self._known_values[id(listing)][1]


def _heads(count: int, wanted: Any, other: Any, *, apart: bool) -> Iterator[list[Any]]:
    """Lists for `prefixItems` that end in `wanted` and have it `count` times. `apart`: `other` items may be between the
    wanted ones, not only before them."""
    if not count:
        yield []
    elif not apart:
        yield from ([other] * start + [wanted] * count for start in range(_STARTS))
    else:
        for places in itertools.combinations(range(count + _STARTS - 1), count):
            yield [wanted if i in places else other for i in range(places[-1] + 1)]


def _length(said: Mapping[str, Any]) -> str | None:
    """An expression for strings of the length in `said`; None if `said` is empty or has other keywords."""
    least, most = said.get("minLength", 0), said.get("maxLength", "")
    return rf"^[\s\S]{{{least},{most}}}$" if said and said.keys() <= {"minLength", "maxLength"} else None


def _check_exact(node: Mapping[str, Any]) -> None:
    """Refuses listed whole numbers that the compiler would round, or on which it crashes."""
    for word in ("const", "enum"):
        level = [node.get(word)]
        while level:
            value = level.pop()
            if isinstance(value, int) and abs(value) > MAX_EXACT:
                raise SchemaError(f"{word} {str(value)[:32]} cannot be enforced: whole numbers listed go up to 2^53")
            level += value if isinstance(value, list) else mapping(value).values()


def _spelled(value: Any) -> str:
    """Equal texts for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""

    def plain(v: Any) -> Any:
        if isinstance(v, float) and v.is_integer():
            return int(v)
        if isinstance(v, list):
            return [plain(e) for e in v]
        return {k: plain(e) for k, e in v.items()} if isinstance(v, Mapping) else v

    return json.dumps(plain(value), sort_keys=True)


def _ahead(pattern: str) -> tuple[list[str], str]:
    """The expressions of the look-aheads that a pattern begins with, and the pattern without them.

    A malformed pattern, or one with alternatives, is left as it is: its meaning could change.
    """
    found, rest = [], pattern
    while rest.startswith("^(?="):
        end, _ = _scan(rest, 1)
        if end is None or rest[end : end + 1] in ("*", "+", "?", "{"):
            return [], pattern
        found.append(f"^(?:{rest[4 : end - 1]})")
        rest = "^" + rest[end:]
    return ([], pattern) if _scan(rest, 0)[1] else (found, rest)


def _scan(pattern: str, at: int) -> tuple[int | None, bool]:
    """(index after the group that begins at `at`, None: it has no end; whether a `|` is outside of all groups)."""
    depth, in_class, end, alternative = 0, False, None, False
    while at < len(pattern):
        c = pattern[at]
        if c == "\\":
            at += 1
        elif in_class or c == "[":
            in_class = c != "]"
        else:
            depth += (c == "(") - (c == ")")
            alternative = alternative or (c == "|" and depth == 0)
            if c == ")" and depth == 0 and end is None:
                end = at + 1
        at += 1
    return end, alternative


def _values_of(listing: Mapping[str, Any]) -> list[Any]:
    """The values in a schema's const or enum."""
    return [listing["const"]] if "const" in listing else list(listing["enum"])


def _values_apart(a: set[str] | None, b: set[str] | None) -> bool:
    return a is not None and b is not None and a.isdisjoint(b)


def _all_values_apart(listed: Iterable[set[str] | None]) -> bool:
    """Whether no value is in two of these sets; False if one is None."""
    found = set[str]()
    for values in listed:
        if values is None or not found.isdisjoint(values):
            return False
        found |= values
    return True


def _is_whole(node: Mapping[str, Any]) -> bool:
    """Whether all numbers of a schema are whole by its type."""
    kinds = items(node["type"]) if isinstance(node.get("type"), list) else [node.get("type")]
    return "integer" in kinds and "number" not in kinds


def _and(node: dict[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    return node | {"allOf": [*items(node.get("allOf")), *others]}
