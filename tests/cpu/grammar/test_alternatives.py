"""not, if, oneOf, contains, dependentSchemas, propertyNames, unevaluated*: whatever is enforced is valid.

Random small schemas against a validator: no value that the grammar accepts may fail it, and few that pass it may be
refused.
"""

import json
import random
import tracemalloc
from typing import Any

import jsonschema
import pytest

from perilune.core.errors import RequestError
from perilune.grammar import json_schema
from perilune.grammar.constrain import AnswerFormat, constrain
from perilune.grammar.json_schema import enforceable
from perilune.grammar.matcher import vocabulary
from perilune.text.tokenizer import Tokenizer
from tests.cpu.grammar.test_grammar import Monkey

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 5, -1, 0.5, "", "a", "b", "ab", "abc", "ca", "xyz",
    [], [1], ["a"], [1, "a"], ["a", 1], [1, 2], [2, 1, "a"], ["a", "a", 1], [None], [[1], 2], [1, 1, 1, 1],
    {}, {"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": 1}, {"a": "a", "b": 2}, {"c": 1}, {"a": 1, "c": "x"},
    {"a": 1, "b": "b", "c": 0}, {"ab": 1}, {"a": {"b": 1}},
]  # fmt: skip
NAMES = ("a", "b", "c", "ab")


def made(r: random.Random, depth: int) -> Any:
    """A random schema."""
    leaf = [
        lambda: {"type": r.choice(["string", "integer", "number", "object", "array", "null", ["string", "null"]])},
        lambda: {"const": r.choice(VALUES)},
        lambda: {"enum": r.sample(VALUES[:22], 3)},
        lambda: {r.choice(["minimum", "exclusiveMaximum"]): r.randint(0, 3)},
        lambda: {r.choice(["minLength", "maxLength"]): r.randint(0, 2)},
        lambda: {r.choice(["minItems", "maxItems"]): r.randint(0, 2)},
        lambda: {"required": r.sample(NAMES, r.randint(1, 2))},
        lambda: {"dependentRequired": {r.choice(NAMES): [r.choice(NAMES)]}},
        lambda: r.random() < 0.7,
    ]
    if depth == 0:
        return r.choice(leaf)()

    def inner() -> Any:
        return made(r, depth - 1)

    branch = [
        lambda: {"not": inner()},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
        lambda: {"if": inner(), r.choice(["then", "else"]): inner()},
        lambda: {"oneOf": [inner(), inner()]},
        lambda: {"anyOf": [inner(), inner()]},
        lambda: {"allOf": [inner(), inner()]},
        lambda: {"contains": inner(), "minContains": r.randint(0, 2), "maxContains": r.randint(0, 3)},
        lambda: {"contains": inner(), "items": inner()},
        lambda: {"prefixItems": [inner()], "items": inner()},
        lambda: {"properties": {r.choice(NAMES): inner(), "b": inner()}, "additionalProperties": inner()},
        lambda: {"dependentSchemas": {r.choice(NAMES): inner()}},
        lambda: {"propertyNames": r.choice([{"enum": ["a", "c"]}, {"pattern": "^a"}, {"maxLength": 1}, True])},
        lambda: {"properties": {"a": inner()}, "anyOf": [inner(), inner()], "unevaluatedProperties": r.random() < 0.3},
        lambda: {"allOf": [inner()], "if": inner(), "then": inner(), "unevaluatedProperties": inner()},
        lambda: {"prefixItems": [inner()], "anyOf": [inner(), {"contains": inner()}], "unevaluatedItems": False},
        lambda: {"oneOf": [inner(), {"prefixItems": [inner(), True]}], "unevaluatedItems": inner()},
        lambda: {"$ref": "#/$defs/it", "unevaluatedProperties": False},
    ]
    return r.choice(branch)()


def accepted(nano: Tokenizer, grammar: str, value: Any) -> bool:
    matcher = vocabulary(nano).compile(grammar)
    ids = nano.encode(json.dumps(value, separators=(",", ":")))
    return all(matcher.advance(i) for i in ids) and matcher.complete


@pytest.mark.slow
def test_what_is_enforced_is_valid(nano: Tokenizer) -> None:
    r = random.Random(7)
    refused = narrow = right = 0
    for _ in range(120):
        schema = {"allOf": [made(r, r.choice((1, 1, 2)))], "$defs": {"it": made(r, 0)}}
        judge = jsonschema.Draft202012Validator(schema)
        valid = [value for value in VALUES if judge.is_valid(value)]
        try:
            constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
        except RequestError:
            refused += bool(valid)
            continue
        assert constraint is not None and constraint.answer is not None
        for value in VALUES:
            if accepted(nano, constraint.answer, value):
                assert value in valid, (schema, value)
                right += 1
            elif value in valid:
                narrow += 1
    # Refused although something satisfies it; valid values that the grammar leaves out.
    assert refused < 16 and narrow < 0.05 * right, (refused, narrow, right)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}}, "required": ["kind"],
         "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["n"]}, "unevaluatedProperties": False},
        {"type": "array", "items": {"enum": ["x", "y", "z"]}, "contains": {"const": "z"}, "maxItems": 6},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": {"type": "integer"},
         "maxProperties": 3},
        {"type": "string", "not": {"enum": ["no", "none", "nothing", ""]}, "maxLength": 8},
        {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]},
        {"type": "object", "dependentSchemas": {"card": {"properties": {"cvc": {"type": "string", "maxLength": 3}},
         "required": ["cvc"]}}, "properties": {"card": {"type": "integer"}}, "required": ["card"],
         "unevaluatedProperties": False},
    ],
)  # fmt: skip
def test_answers_by_chance_are_valid(nano: Tokenizer, schema: Any) -> None:
    for seed in range(6):
        constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
        assert constraint is not None
        Monkey(nano, seed).answer(constraint, constraint.least + 12 * seed, schema)


def test_many_alternatives_that_list_their_values(nano: Tokenizer) -> None:
    """As forms spell a choice with titles: comparing each pair of 250 would visit more schemas than are allowed."""
    words = [f"c{i}" for i in range(250)]
    for key, alternatives in (
        (None, [{"const": word, "title": word.upper()} for word in words]),
        ("kind", [{"type": "object", "properties": {"kind": {"const": word}}, "required": ["kind"]} for word in words]),
    ):
        constraint = constrain(nano, answer=AnswerFormat("json_schema", {"oneOf": alternatives}))
        assert constraint is not None and constraint.answer is not None
        for word, fine in (("c249", True), ("c250", False)):
            assert accepted(nano, constraint.answer, word if key is None else {key: word}) is fine
        with pytest.raises(RequestError, match="some could hold together"):
            constrain(nano, answer=AnswerFormat("json_schema", {"oneOf": [*alternatives, alternatives[7]]}))


def test_names_are_compared_with_patterns_by_the_compiler(nano: Tokenizer) -> None:
    """Python's `re` would take years for these names, and stop all threads meanwhile."""
    name, other = "a" * 80 + "b", "a" * 80
    schema = {"type": "object", "propertyNames": {"pattern": "^(a|a)*$"}, "properties": {name: {}, other: {}}}
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.answer is not None
    assert accepted(nano, constraint.answer, {other: 1}) and not accepted(nano, constraint.answer, {name: 1})
    with pytest.raises(RequestError, match="cannot be negated"):
        constrain(nano, answer=AnswerFormat("json_schema", {"not": {"patternProperties": {"^(?:a|a){80}$b": False}}}))


@pytest.mark.parametrize("word", ["not", "allOf"])
def test_references_inside_one_another_are_bounded(nano: Tokenizer, word: str) -> None:
    """20^7 schemas by references: visiting them all would take an hour."""
    chain = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 20} for i in range(7)} | {"a7": {}}
    first: Any = {"$ref": "#/$defs/a0"}
    schema = {"$defs": chain, "unevaluatedProperties": False, word: [first] if word == "allOf" else first}
    with pytest.raises(RequestError, match="more than 20000 schemas by its references"):
        constrain(nano, answer=AnswerFormat("json_schema", schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"oneOf": [True] * 1_500}},
        {"not": {"prefixItems": [True] * 8_000}},
        {"oneOf": [{"required": ["a"]}] * 1_500, "unevaluatedProperties": False},
    ],
)
def test_pairs_of_alternatives_are_not_made(nano: Tokenizer, schema: Any) -> None:
    """Those of 10,000 alternatives would take 15 GB."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="unevaluated: more than"):
            constrain(nano, answer=AnswerFormat("json_schema", schema))
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_many_names_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 names of propertyNames took 8 s; 80,000 of dependentRequired, each of which copied all before it, 12 s."""
    compared = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(f"n{i}") for i in range(500)]
    made = enforceable({"type": "object", "propertyNames": {"enum": names}, "properties": {"n7": {}, "x": {}}})
    assert made["properties"] == dict.fromkeys(map(str, names), True) | {"n7": {}, "x": False} and compared < 5_000
    copies: list[int] = []

    def both(node: dict[str, Any], *others: Any) -> dict[str, Any]:
        copies.append(len(others))
        return node

    monkeypatch.setattr(json_schema, "_and", both)
    enforceable({"type": "object", "dependentRequired": {name: [] for name in names}})
    enforceable({"type": "object", "dependentSchemas": dict.fromkeys(names, True)})
    assert copies == [500, 500]


def test_listed_values_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """120 alternatives of 200 values each and a null, 230 KB, took 6 s: each pair of them spelled its values."""
    spelled = 0
    spell = json_schema._spelled

    def counted(value: Any) -> str:
        nonlocal spelled
        spelled += 1
        return spell(value)

    monkeypatch.setattr(json_schema, "_spelled", counted)
    lists = [{"enum": [f"{i} {j}" for j in range(50)]} for i in range(30)]
    made = enforceable({"oneOf": [*lists, {"type": "null"}]})
    assert made == {"anyOf": [*lists, {"type": "null"}]} and spelled == 1_500
