"""Properties in any order: what is accepted is what the schema says, and enforcing it costs no call."""

import itertools
import json
from random import Random
from typing import Any

import jsonschema
import pytest

from perilune.grammar.matcher import json_grammar, vocabulary
from perilune.grammar.unordered import MAX_PROPERTIES, rules
from perilune.text.tokenizer import Tokenizer

POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"$ref": "#/$defs/side"}}, "required": ["x"]}
PLAIN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        'a "quoted" key': {"type": "integer"},
        "at": POINT,
        "path": {"type": "array", "items": POINT},
        "anything": True,
    },
    "required": ["name", "at"],
    "$defs": {"side": {"enum": ["left", "right"]}},
}


def accepts(nano: Tokenizer, schema: Any, text: str) -> bool:
    matcher = vocabulary(nano).compile(json_grammar(schema))
    return all(matcher.advance(t) for t in nano.encode(text)) and matcher.complete


def test_every_order_of_every_subset(nano: Tokenizer) -> None:
    values: dict[str, Any] = {
        "name": "abc",
        'a "quoted" key': -3,
        "at": {"y": "left", "x": 1.5},
        "path": [{"x": 0}, {"y": "right", "x": 2}],
        "anything": [{"z": None}],
    }
    for size in range(len(values) + 1):
        for order in itertools.permutations(values, size):
            text = json.dumps({key: values[key] for key in order})
            assert accepts(nano, PLAIN, text) == ({"name", "at"} <= set(order)), text


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "abcd", "at": {"x": 1}}',
        '{"name": "a", "at": {"y": "left"}}',
        '{"name": "a", "at": {"x": 1, "y": "up"}}',
        '{"name": "a", "at": {"x": 1}, "name": "b"}',
        '{"name": "a", "at": {"x": 1}, "other": 1}',
        '{"name": "a", "at": {"x": 1},}',
        '{"name": "a" "at": {"x": 1}}',
        '{, "name": "a", "at": {"x": 1}}',
        '{"name": "a", "at": {"x": 1}, "path": [{"x": 1},]}',
    ],
)
def test_what_the_schema_forbids(nano: Tokenizer, text: str) -> None:
    assert not accepts(nano, PLAIN, text)


def test_no_more_properties_than_an_automaton_holds(nano: Tokenizer) -> None:
    def wide(n: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}

    backwards = json.dumps({f"p{i}": i for i in reversed(range(MAX_PROPERTIES))})
    assert accepts(nano, wide(MAX_PROPERTIES), backwards)
    more = wide(MAX_PROPERTIES + 1)
    assert rules(more) is None
    assert accepts(nano, more, '{"p0": 1, "p8": 2}') and not accepts(nano, more, backwards)
    deep = wide(MAX_PROPERTIES)
    for _ in range(8):  # more states than one grammar may have: what is inside keeps its order
        deep = wide(MAX_PROPERTIES) | {"properties": wide(MAX_PROPERTIES)["properties"] | {"p0": deep}}
    assert accepts(nano, deep, '{"p2": 1, "p1": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": False}},
        {"type": "array", "items": {"type": "object", "properties": {"a": {}}}},
        {"type": "string"},
        True,
    ],
)
def test_what_is_left_to_the_compiler(schema: Any) -> None:
    assert rules(schema) is None


def test_copies_of_definitions_are_bounded() -> None:
    """A schema of 316 kB, 3,000 definitions and 100 values that refer to them, took 19 s and 1 GB."""

    def tree(values: int) -> dict[str, Any]:
        if values == 1:
            return {"$ref": "#/$defs/d0"}
        halves = {"a": tree(values // 2), "b": tree(values - values // 2)}
        return {"type": "object", "properties": halves}

    def schema(definitions: int) -> dict[str, Any]:
        return tree(100) | {"$defs": {f"d{i}": {"type": "null"} for i in range(definitions)}}

    assert rules(schema(1_900)) is not None
    assert rules(schema(2_100)) is None
    assert rules(tree(100) | {"$defs": {"d0": {"enum": ["x" * 200_000]}}}) is None


def test_random_objects_agree_with_a_validator(nano: Tokenizer) -> None:
    rng = Random(11)
    kinds: list[tuple[dict[str, Any], list[Any]]] = [
        ({"type": "integer"}, [0, -7]),
        ({"type": "string"}, ["", "é"]),
        ({"type": ["boolean", "null"]}, [None, True]),
        ({"enum": ["p", 2]}, ["p", 2]),
    ]
    agreed = 0
    for _ in range(150):
        names = rng.sample("abcdef", rng.randint(1, 5))
        picked = {n: rng.choice(kinds) for n in names}
        schema = {
            "type": "object",
            "properties": {n: s for n, (s, _) in picked.items()},
            "required": rng.sample(names, rng.randint(0, 1)),
            "additionalProperties": False,
        }
        keys = rng.sample([*names, "other"], rng.randint(0, len(names)))
        value = {
            k: rng.choice(rng.choice([*[picked[k]] * 9, rng.choice(kinds)])[1]) if k in picked else 1 for k in keys
        }
        wanted = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert accepts(nano, schema, json.dumps(value, ensure_ascii=False)) == wanted, (schema, value)
        agreed += wanted
    assert 30 < agreed < 120, "both verdicts are tried"


def test_the_end_is_found_past_properties_that_may_be_left_out(nano: Tokenizer) -> None:
    """A search that began with `language`, an identifier of 36 characters, used to get lost in it."""
    unit = {
        "path": {"type": "integer"},
        "patent": {"type": "string", "pattern": "^(ab)*c$"},
        "language": {"type": "string", "format": "uuid"},
        "zip-code": {"type": "string", "format": "ipv4"},
    }
    inner = {"type": "object", "properties": unit, "required": ["path", "zip-code", "patent"]}
    schema = {"type": "object", "properties": {"about": {"type": "string"}, "unit": inner}, "required": ["unit"]}
    matcher = vocabulary(nano).compile(json_grammar(schema))
    for begun in ("", '{"unit": {"pat', '{"unit": {"zip-code": "1.2.3.4", "l', '{"about": "x'):
        state = matcher.copy()
        assert all(state.advance(t) for t in nano.encode(begun))
        rest = state.completion()
        assert rest is not None
        jsonschema.validate(json.loads(begun + nano.decode(rest)), schema)
