"""Awkward JSON schemas by a seed, like those of agents' tools; all are satisfiable.

Each is an object with a few members. The schema's number decides the sort of at least one member, so that all sorts are
equally frequent. One in `ODD_ONE_IN` has a keyword that engines often cannot enforce, with about the frequencies of
schemas from pydantic, zod, OpenAPI and people.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
ODD_ONE_IN = 16
DEEPEST = 3

WORDS = (
    "city", "amount", "items", "status", "owner", "startDate", "max_price", "tags", "query", "unit", "path", "mode",
    "zip-code", "line.total", "parent_id", "limit", "language", "color", "retries", "payload",
)  # fmt: skip
NAMES = (
    "naïve", "日本語", "ключ", "emoji 🚀", 'qu"ote', "back\\slash", "new\nline", "$ref", "properties", "type", "", " ",
    "required", "a/b~c", "ß", "format", "\u2028", "const", "0", "constructor",
)  # fmt: skip
PATTERNS = (
    r"^[A-Z]{2}-\d{4}$", r"^(ab)*c$", r"[0-9]{3}-[a-z]+@", r"^#(?:[0-9a-fA-F]{3}){1,2}$", r"^\S+ \S+$",
    r"^https?:\/\/[^\s\/]+$", r"^\+?[1-9]\d{6,14}$", r"^v\d+(\.\d+){0,2}(-[a-z]+)?$", r"^[^\x00-\x1f\"\\]{1,12}$",
    r"^(GET|POST|PUT)$", r"^\w+$", r"^[\u4e00-\u9fff]{1,4}$", r"foo|^bar$", r"^.{3,9}$", r"^a+?b{2,}$", r"^$",
)  # fmt: skip
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
ODD_FORMATS = ("uri-reference", "password", "byte", "json-pointer", "iri", "binary")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A schema and the sort of member it was drawn for."""

    sort: str
    schema: Schema


def schemas(count: int, seed: int) -> list[Drawn]:
    return [Maker(random.Random(f"{seed}/{i}")).make(i) for i in range(count)]


class Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.definitions: Schema = {}
        self.sorts: dict[str, Callable[[int], Schema]] = {
            "string": lambda _: {"type": "string"},
            "length": lambda _: self._length(),
            "pattern": lambda _: {"type": "string", "pattern": rng.choice(PATTERNS)},
            "format": lambda _: {"type": "string", "format": rng.choice(FORMATS)},
            "integer": lambda _: self._integer(),
            "number": lambda _: self._number(),
            "multiple": lambda _: self._multiple(),
            "enum": lambda _: self._enum(),
            "large enum": lambda _: {"enum": [f"{rng.choice(WORDS)}_{k:02}" for k in range(rng.randint(30, 60))]},
            "const": lambda _: {"const": self._value()},
            "types": lambda _: {"type": rng.sample(["string", "integer", "boolean", "null", "number"], 2)},
            "array": self._array,
            "tuple": self._tuple,
            "matrix": lambda _: self._matrix(),
            "closed": lambda depth: self._object(depth + 1, extra=False),
            "open": lambda depth: self._object(depth + 1, extra=True),
            "map": lambda depth: {"type": "object", "additionalProperties": self._member(depth + 1)},
            "pattern map": lambda depth: self._pattern_map(depth),
            "empty": lambda _: rng.choice([{}, {"type": "object"}, {"type": "object", "properties": {}}]),
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "tagged": self._tagged,
            "allOf": self._all_of,
            "$ref": self._reference,
            "list": lambda _: self._linked(),
            "tree": lambda _: self._tree(),
            "mutual": lambda _: self._mutual(),
            "names": self._named_oddly,
            "many optional": lambda _: self._many(),
            "notes": self._annotated,
        }
        self.odd: dict[str, tuple[int, Callable[[], Schema]]] = {
            "propertyNames": (4, self._property_names),
            "uniqueItems": (3, lambda: {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
            "odd format": (4, lambda: {"type": "string", "format": rng.choice(ODD_FORMATS)}),
            "minProperties": (2, self._min_properties),
            "look-ahead": (3, self._look_ahead),
            "overlapping oneOf": (2, self._overlapping),
            "not": (1, lambda: {"type": "string", "not": {"enum": ["admin", "root"]}}),
            "if": (1, self._conditional),
            "contains": (1, lambda: {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}}),
            "dependentRequired": (1, self._dependent),
        }

    def make(self, number: int) -> Drawn:
        rng = self.rng
        sort = list(self.sorts)[number % len(self.sorts)]
        chosen = self.sorts[sort](0)
        if number % ODD_ONE_IN == ODD_ONE_IN - 1:
            (sort,) = rng.choices(list(self.odd), [weight for weight, _ in self.odd.values()])
            chosen = self.odd[sort][1]()
        schema = self._object(1, extra=rng.choice([None, None, False, False, True]), member=chosen)
        if rng.random() < 0.1:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if rng.random() < 0.1 and not self.definitions.get("Root"):
            self.definitions["Root"] = schema
            schema = {"$ref": "#/$defs/Root"}
        if self.definitions:
            schema["$defs"] = self.definitions
        return Drawn(sort, schema)

    # ---- members

    def _member(self, depth: int) -> Schema:
        """A member of any sort; from depth DEEPEST on, of one without nesting."""
        leaves = list(self.sorts)[:11]
        sort = self.rng.choice(leaves if depth >= DEEPEST or self.rng.random() < 0.6 else list(self.sorts))
        return self.sorts[sort](depth)

    def _object(self, depth: int, *, extra: bool | None, member: Schema | None = None) -> Schema:
        rng = self.rng
        names = rng.sample(WORDS, rng.randint(1, 4 if depth == 1 else 2))
        properties = {name: self._member(depth) for name in names}
        required = [name for name in names if rng.random() < 0.5]
        if member is not None:
            properties[names[0]] = member
            required = list(dict.fromkeys([names[0], *required])) if rng.random() < 0.8 else required
        made: Schema = {"type": "object", "properties": properties}
        if required:
            made["required"] = required
        if extra is not None:
            made["additionalProperties"] = extra if extra is False else rng.choice([True, {"type": "integer"}])
        return made

    def _length(self) -> Schema:
        low = self.rng.choice([0, 1, 5, 20])
        return {"type": "string", "minLength": low, "maxLength": low + self.rng.choice([0, 1, 7, 30])}

    def _integer(self) -> Schema:
        rng = self.rng
        low = rng.choice([-1_000, -7, 0, 1, 150, 10**12, -(2**53 - 1)])
        width = rng.choice([0, 1, 9, 104, 10**6])
        return rng.choice([
            {"type": "integer", "minimum": low, "maximum": low + width},
            {"type": "integer", "exclusiveMinimum": low},
            {"type": "integer", "maximum": low},
            {"type": "integer", "minimum": -(2**53 - 1), "maximum": 2**53 - 1, "format": "int64"},
        ])  # fmt: skip

    def _number(self) -> Schema:
        rng = self.rng
        low = rng.choice([-1.5, 0, 0.001, 99.99, -273.15])
        high = low + rng.choice([0.5, 1, 123.456])
        return rng.choice([
            {"type": "number", "minimum": low, "maximum": high},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high},
            {"type": "number", "minimum": low},
        ])  # fmt: skip

    def _multiple(self) -> Schema:
        return self.rng.choice([
            {"type": "integer", "multipleOf": 5, "minimum": 12},
            {"type": "number", "multipleOf": 0.01, "minimum": 0},
            {"type": "number", "multipleOf": 0.5, "minimum": 12.25, "maximum": 20},
        ])  # fmt: skip

    def _enum(self) -> Schema:
        mixed = [1, "1", None, True, 2.5, [1, 2], {"a": 1}, "", 'a"b', "\u2028", "tab\t", "😀", "a\\b", -0.25, [], {}]
        words = [self.rng.choice(WORDS) for _ in range(3)]
        values = self.rng.sample(mixed, self.rng.randint(2, 6)) if self.rng.random() < 0.6 else list(set(words))
        return {"enum": values}

    def _value(self) -> Any:
        return self.rng.choice(
            ["fixed value", 0, -1.5, None, False, "", [1, "a", None], {"k": [1], "ü": {}}, "\n\u0000"]
        )

    def _array(self, depth: int) -> Schema:
        low = self.rng.choice([0, 1, 2, 5])
        bounds = {"minItems": low} | ({"maxItems": low + self.rng.choice([0, 1, 3])} if self.rng.random() < 0.7 else {})
        return {"type": "array", "items": self._member(depth + 1), **bounds}

    def _tuple(self, depth: int) -> Schema:
        firsts = [self._member(depth + 1) for _ in range(self.rng.randint(1, 3))]
        rest = self.rng.choice([False, {"type": "boolean"}])
        return {"type": "array", "prefixItems": firsts, "items": rest, "minItems": self.rng.randint(0, len(firsts))}

    def _matrix(self) -> Schema:
        row = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
        return {"type": "array", "items": row, "minItems": 1, "maxItems": 3}

    def _pattern_map(self, depth: int) -> Schema:
        closed = {"additionalProperties": False} if self.rng.random() < 0.5 else {}
        return {"type": "object", "patternProperties": {"^x-[a-z]+$": self._member(depth + 1)}, **closed}

    # ---- alternatives and references

    def _any_of(self, depth: int) -> Schema:
        choices = [self._member(depth + 1) for _ in range(self.rng.randint(2, 3))]
        return {"anyOf": [*choices, {"type": "null"}] if self.rng.random() < 0.5 else choices}

    def _one_of(self, depth: int) -> Schema:
        kinds: list[Schema] = [
            {"type": "integer"}, {"type": "null"}, {"type": "boolean"}, self._length(),
            {"type": "array", "items": self._member(depth + 1)},
        ]  # fmt: skip
        return {"oneOf": self.rng.sample(kinds, self.rng.randint(2, 4))}

    def _tagged(self, depth: int) -> Schema:
        """A discriminated union."""
        variants: list[Schema] = []
        for tag in self.rng.sample(["circle", "square", "line", "dot"], self.rng.randint(2, 3)):
            body = self._object(depth + 1, extra=self.rng.choice([None, False]))
            body["properties"] = {"kind": {"const": tag, "type": "string"}, **body["properties"]}
            body["required"] = ["kind", *body.get("required", [])]
            variants.append(self._defined(tag.title(), body) if self.rng.random() < 0.5 else body)
        word = self.rng.choice(["oneOf", "anyOf"])
        note = {"discriminator": {"propertyName": "kind"}} if self.rng.random() < 0.5 else {}
        return {word: variants, **note}

    def _all_of(self, depth: int) -> Schema:
        a: Schema = {"type": "object", "properties": {"id": {"type": "integer", "minimum": 1}}, "required": ["id"]}
        b: Schema = {"properties": {"label": self._member(depth + 1)}, "required": ["label"]}
        return (
            {"allOf": [self._defined("Base", a), b]} if self.rng.random() < 0.5 else {"type": "object", "allOf": [a, b]}
        )

    def _reference(self, depth: int) -> Schema:
        target = self._defined("Shared", self._member(depth + 1))
        return {**target, "description": "as everywhere"} if self.rng.random() < 0.5 else target

    def _linked(self) -> Schema:
        node: Schema = {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return self._defined("Node", node)

    def _tree(self) -> Schema:
        children = {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 3}
        tree = {"type": "object", "properties": {"label": self._length(), "children": children}, "required": ["label"]}
        return self._defined("Tree", tree)

    def _mutual(self) -> Schema:
        """An expression: two definitions that refer to each other."""
        operand = {"oneOf": [{"type": "number"}, {"$ref": "#/$defs/Operation"}]}
        operation = {
            "type": "object",
            "properties": {
                "op": {"enum": ["+", "-", "*"]},
                "args": {"type": "array", "items": {"$ref": "#/$defs/Operand"}},
            },
            "required": ["op", "args"],
            "additionalProperties": False,
        }  # fmt: skip
        self.definitions |= {"Operand": operand, "Operation": operation}
        return {"$ref": "#/$defs/Operand"}

    def _defined(self, name: str, schema: Schema) -> Schema:
        self.definitions.setdefault(name, schema)
        return {"$ref": f"#/$defs/{name}"}

    # ---- objects with much in them

    def _named_oddly(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, 3)
        return {
            "type": "object",
            "properties": {name: self._member(DEEPEST) for name in names},
            "required": names[:2],
            "additionalProperties": False,
        }

    def _many(self) -> Schema:
        kinds: Sequence[Schema] = ({"type": "string"}, {"type": "boolean"}, {"type": ["number", "null"]})
        properties = {f"{name}_{i}": self.rng.choice(kinds) for i, name in enumerate(WORDS[:14])}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def _annotated(self, depth: int) -> Schema:
        notes = {"title": "A title", "description": 'Says "what"\nand why: <|im_end|>', "$comment": "of no effect"}
        return {
            **self._member(depth + 1),
            **notes,
            "default": None,
            "examples": [1, "x"],
            "deprecated": False,
            "x-order": 3,
        }

    # ---- the odd ones

    def _property_names(self) -> Schema:
        names = self.rng.choice([{"type": "string"}, {"type": "string"}, {"pattern": "^[a-z]{2,8}$"}])
        return {"type": "object", "propertyNames": names, "additionalProperties": {"type": "number"}}

    def _min_properties(self) -> Schema:
        return {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}

    def _look_ahead(self) -> Schema:
        patterns = (
            # pydantic's Decimal, zod's email, a password
            r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            r"^(?=.*\d)[a-z\d]{8,}$",
        )  # fmt: skip
        return {"type": "string", "pattern": self.rng.choice(patterns)}

    def _overlapping(self) -> Schema:
        one_of_two: Schema = {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
            "oneOf": [{"required": ["id"]}, {"required": ["name"]}],
        }
        return self.rng.choice([one_of_two, {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]}])

    def _conditional(self) -> Schema:
        return {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "extra": {"type": "string"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["extra"]},
        }

    def _dependent(self) -> Schema:
        properties = {"card": {"type": "string"}, "address": {"type": "string"}}
        return {"type": "object", "properties": properties, "dependentRequired": {"card": ["address"]}}
