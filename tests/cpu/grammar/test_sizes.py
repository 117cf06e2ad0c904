"""Schemas without an end: what nothing finite satisfies is refused by name, and forbidden where it may be left out."""

import contextlib
import json
import subprocess
import sys
import tracemalloc
from time import process_time
from types import SimpleNamespace
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import RequestError
from perilune.grammar import matcher, shortest_end, sizes
from perilune.grammar.constrain import AnswerFormat, constrain
from perilune.grammar.expressions import example, length
from perilune.grammar.json_schema import enforceable
from perilune.grammar.matcher import vocabulary
from perilune.grammar.references import SchemaError, resolved
from perilune.grammar.shortest_values import shortest_values
from perilune.grammar.sizes import bounded
from perilune.text.tokenizer import Tokenizer
from tests.cpu.grammar.test_grammar import Monkey, read, tools

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/X"}}, "required": ["next"]}
LIST = {"type": "array", "items": {"$ref": "#/$defs/X"}, "minItems": 1}


def endless(schema: Any) -> Any:
    return {"$defs": {"X": NODE}, **schema}


X = {"$ref": "#/$defs/X"}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "# -> #/properties/a -> #"),
        (endless({"$ref": "#/$defs/X"}), "#/$defs/X -> #/$defs/X/properties/next -> #/$defs/X"),
        (endless({"type": "object", "properties": {"a": X}, "required": ["a"]}), "#/$defs/X/properties/next"),
        ({"$defs": {"X": LIST}, "$ref": "#/$defs/X"}, "#/$defs/X/items"),
        (endless({"type": "array", "prefixItems": [X], "minItems": 1}), "#/$defs/X/properties/next"),
        (endless({"anyOf": [X, {"type": "array", "items": X, "minItems": 2}]}), "#/$defs/X/properties/next"),
        (endless({"oneOf": [X]}), "#/$defs/X/properties/next"),
        (endless({"allOf": [{"type": "object"}, X]}), "#/$defs/X/properties/next"),
        ({"allOf": [{"required": ["a"]}, {"properties": {"a": {"$ref": "#"}}}], "type": "object"}, "#"),
        ({"$ref": "#"}, "# -> #"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#/$defs/b"),
        (
            {
                "$defs": {
                    "odd": {"type": "object", "properties": {"e": {"$ref": "#/$defs/even"}}, "required": ["e"]},
                    "even": {"type": "array", "items": {"$ref": "#/$defs/odd"}, "minItems": 3},
                },
                "$ref": "#/$defs/odd",
            },
            "#/$defs/odd -> #/$defs/odd/properties/e -> #/$defs/even -> #/$defs/even/items -> #/$defs/odd",
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, "#/additionalProperties -> #"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False, "minProperties": 1},
            "# -> #/properties/a -> #",
        ),
    ],
)
def test_what_nothing_finite_satisfies_is_refused(nano: Tokenizer, schema: Any, path: str) -> None:
    with pytest.raises(RequestError) as e:
        constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert path in str(e.value) and "\n" not in str(e.value) and "no finite value satisfies it" in str(e.value)
    assert e.value.param == "response_format" and e.value.code == "unsupported_schema"


@pytest.mark.parametrize(
    "schema",
    [
        endless({"type": "object", "properties": {"node": X}}),
        endless({"type": "object", "properties": {"node": X}, "additionalProperties": False}),
        endless({"type": "object", "properties": {"node": X, "b": {"type": "integer"}}, "required": ["b"]}),
        endless({"type": "array", "items": X}),
        endless({"type": "array", "prefixItems": [{"type": "null"}, X]}),
        endless({"type": "object", "additionalProperties": X}),
        endless({"type": "object", "patternProperties": {"^a": X}, "additionalProperties": {"type": "integer"}}),
        endless({"anyOf": [X, {"type": "string", "maxLength": 3}]}),
        endless({"oneOf": [X, {"type": "array", "items": X}]}),
        endless({"type": ["object", "null"], "properties": {"a": X}, "required": ["a"]}),
        endless({"properties": {"a": X}, "required": ["a"], "maxLength": 4, "maxItems": 2}),
        endless({"type": "object", "properties": {"a": {"anyOf": [X, {"type": "null"}]}}, "required": ["a"]}),
        endless(
            {
                "type": "object",
                "properties": {"a": X, "b": {"type": "integer"}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            }
        ),
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "null"}}, "required": ["b"]},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 2}, {"type": "null"}]},
        {"type": "object", "properties": {"big": {"type": "string", "minLength": 10**12}}},
        {"anyOf": [{"type": "array", "minItems": 1e15}, {"type": "boolean"}]},
        {"type": ["string", "null"], "minLength": 10**9},
    ],
)
@pytest.mark.slow
def test_what_has_a_finite_value_is_answered_by_it(nano: Tokenizer, schema: Any) -> None:
    """The part without an end cannot be begun, however long the answer may be."""
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.least < 20
    for seed, room in enumerate(
        (constraint.least, constraint.least + 5, *3 * [constraint.least + 2 * constraint.leap])
    ):
        Monkey(nano, seed).answer(constraint, room, schema)


@pytest.mark.parametrize(
    "schema",
    [
        endless({"type": "object", "properties": {"node": X}, "additionalProperties": False}),
        {"$defs": {"X": LIST}, "properties": {"a": X}},
    ],
)
def test_a_tool_of_which_the_arguments_may_be_empty_is_called(nano: Tokenizer, schema: Any) -> None:
    """Of the vendor's own test schemas: `{}` is valid, and an endless list may not be begun."""
    declared = tools(schema)
    constraint = constrain(nano, tools=declared, choice="required")
    assert constraint is not None
    for seed in range(5):
        calls = read(nano, Monkey(nano, seed).type(constraint, 500), declared)[2]
        assert calls
        for _, _, arguments in calls:
            jsonschema.validate(json.loads(arguments), schema)


_NAMES = st.sampled_from("ABC")
_PART = st.one_of(
    _NAMES.map(lambda name: {"$ref": f"#/$defs/{name}"}),
    st.just({"type": "null"}),
    _NAMES.map(lambda name: {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"$ref": "#/$defs/C"}]}),
    st.builds(
        lambda n, name: {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "minItems": n},
        st.integers(0, 2),
        _NAMES,
    ),
)
_DEFINITION = st.one_of(
    st.builds(
        lambda parts, required: {"type": "object", "properties": parts, "required": sorted(parts)[:required]},
        st.dictionaries(st.sampled_from("xyz"), _PART, min_size=1, max_size=3),
        st.integers(0, 3),
    ),
    _PART,
)
GRAPHS = st.fixed_dictionaries(dict.fromkeys("ABC", _DEFINITION))


def has_value(schema: Any, definitions: Any, finite: set[str]) -> bool:
    """Whether a finite value satisfies it, if those definitions have one; for the schemas above."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in finite
    if "anyOf" in schema:
        return any(has_value(part, definitions, finite) for part in schema["anyOf"])
    if schema["type"] == "array":
        return schema["minItems"] == 0 or has_value(schema["items"], definitions, finite)
    properties = schema.get("properties", {})
    return all(has_value(properties[name], definitions, finite) for name in schema.get("required", ()))


def _any(*names: str) -> Any:
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}


def _object(required: str, **properties: Any) -> Any:
    return {"type": "object", "properties": properties, "required": list(required)}


# Definitions with values that may be nested without end: B and C lead to an end, but the keys alone do not say so.
ENDING = [
    {"A": _object("y", y=_any("A", "C")), "B": _object("", x={"type": "null"}), "C": _object("x", x={"type": "null"})},
    {
        "A": _object(
            "tp", t={"anyOf": [_object("s", s=_any("B")), LIST | {"items": _any("A")}]}, p=_any("B"), v=_any("A")
        ),
        "B": {"type": "array", "items": _any("A"), "maxItems": 3},
        "C": _object("v", v=_any("C")),
    },
    {
        "A": {"allOf": [_object("a", a=_any("A", "B")), _object("b", b=_any("A", "B"))]},
        "B": {"anyOf": [_object("c", c=_any("A")), _object("d", d={"type": "string", "pattern": "[A-Z]{2}-[0-9]"})]},
    },
]


@pytest.mark.parametrize("number", range(len(ENDING)))
def test_an_end_is_found_behind_keys_that_lead_on_for_ever(nano: Tokenizer, number: int) -> None:
    schema = {"$ref": "#/$defs/A", "$defs": ENDING[number]}
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.least < 60
    for room in (constraint.least, constraint.least + 10):
        Monkey(nano, room).answer(constraint, room, schema)


def test_the_search_for_an_end_is_bounded(nano: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 500 definitions each may be any of six: a text may mean thousands of them at once, 0.1 s a byte."""
    monkeypatch.setattr(shortest_end, "MAX_SECONDS", 0.2)
    parts = {f"d{i}": _object("n", n=_any(*(f"d{(7 * i + k) % 500}" for k in range(6)))) for i in range(499)}
    schema = {"$ref": "#/$defs/d0", "$defs": parts | {"d499": {"type": "null"}}}
    with pytest.raises(RequestError, match="none does, or it is too large"):
        constrain(nano, answer=AnswerFormat("json_schema", schema))
    monkeypatch.setattr(matcher, "MAX_COMPILE_SECONDS", 0.01)
    with pytest.raises(RequestError, match="to compile"):
        constrain(nano, answer=AnswerFormat("regex", "a?" * 4_000))


@pytest.mark.parametrize("slow", [0, 1])
def test_both_compilations_are_bounded(nano: Tokenizer, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tokens and over bytes. The slow one puts the clock forward."""
    now, made, real = 0.0, 0, matcher.LLMatcher

    def compile(*args: Any, **options: Any) -> Any:
        nonlocal now, made
        now += 3.0 * (made == slow)
        made += 1
        return real(*args, **options)

    grammar = matcher.lark_grammar("start: /ab/")
    monkeypatch.setattr(matcher, "LLMatcher", compile)
    monkeypatch.setattr(matcher, "time", SimpleNamespace(thread_time=lambda: now))
    with pytest.raises(matcher.GrammarError, match="longer than 2 s to compile"):
        matcher.Matcher(vocabulary(nano), grammar, "")
    assert made == slow + 1


def test_values_that_double_take_no_memory() -> None:
    parts = {f"d{i}": _object("lr", l=_any(f"d{i + 1}"), r=_any(f"d{i + 1}")) for i in range(20)}
    tracemalloc.start()
    values = shortest_values([{"$ref": "#/$defs/d0", "$defs": parts | {"d20": {"type": "null"}}}])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values[0] == b'{"l":null,"r":null}' and peak < 2_000_000


@pytest.mark.parametrize(
    "unused",
    [
        _object("n", n={"anyOf": [{"allOf": [{"$ref": "#/$defs/A"}, {"type": "object"}]}, {"type": "null"}]}),
        LIST | {"prefixItems": [{"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "minItems": 1}]},
    ],
)
def test_unused_definitions_are_not_looked_at(nano: Tokenizer, unused: Any) -> None:
    """The compiler refuses such a definition only where it is used; its value requires itself."""
    schema = {"$ref": "#/$defs/X", "$defs": {"A": unused, "X": {"type": "array", "items": {"type": "null"}}}}
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.least == len(nano.encode("[]")) + 1
    assert shortest_values([schema]) == (b"[]",)


def test_definitions_that_lead_far(nano: Tokenizer) -> None:
    """100 definitions, each of which needs the next one."""
    parts = {f"d{i}": _object("n", n={"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, NODE]}) for i in range(100)}
    schema = {"$ref": "#/$defs/d0", "$defs": parts | {"d100": {"type": "object"}, "X": {"type": "null"}}}
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.least > 200


@settings(max_examples=150, deadline=None)
@given(definitions=GRAPHS)
@hypothesis.example(definitions=ENDING[0])
@pytest.mark.slow
def test_graphs_of_references_are_judged_as_by_trying(nano: Tokenizer, definitions: Any) -> None:
    finite = set[str]()
    for _ in definitions:
        finite = {name for name, part in definitions.items() if has_value(part, definitions, finite)}
    schema = {"$ref": "#/$defs/A", "$defs": definitions}
    if "A" not in finite:
        with pytest.raises(SchemaError, match="no finite value"):
            bounded(enforceable(resolved(schema)))
        return
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None
    for room in (constraint.least, constraint.least + 30):
        ids = Monkey(nano, room).type(constraint, room)
        assert ids[-1] == nano.special("<|im_end|>")
        with contextlib.suppress(RecursionError):  # of the validator, where alternatives refer to themselves
            jsonschema.validate(json.loads(nano.decode(ids[:-1])), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "minLength": 999_999_999_999}, "#: minLength 999999999999"),
        ({"type": "object", "properties": {"a": {"minItems": 1e18, "type": "array"}}, "required": ["a"]}, "minItems 1"),
        ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "pattern"),
        ({"type": "string", "pattern": "^((a{9999}){9999}){9999}$"}, "pattern"),
        ({"type": "array", "items": {"type": "string", "minLength": 400}, "minItems": 400}, "shortest value takes"),
        ({"type": "number", "minimum": 1e300}, "minimum 1e\\+300"),
        ({"type": "integer", "maximum": -1e300}, "maximum -1e\\+300"),
    ],
)
def test_lower_bounds_beyond_every_answer_are_refused_at_once(nano: Tokenizer, schema: Any, words: str) -> None:
    begun = process_time()
    with pytest.raises(RequestError, match=words):
        constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert process_time() - begun < 0.5


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "maxLength": 10**9}, '"' + "a" * 300 + '"'),
        ({"type": "string", "maxLength": 1e18}, '"a"'),
        ({"type": "string", "maxLength": 10**30}, '"a"'),
        ({"type": "array", "items": {"const": 1}, "maxItems": 1e30}, "[1,1]"),
        ({"type": "object", "maxProperties": 1e30}, "{}"),
        ({"type": "string", "pattern": "^a{0,100000}$"}, '"aaa"'),
        ({"type": "number", "maximum": 1.7976931348623157e308, "minimum": -1.7976931348623157e308}, "-6.02e23"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**63 - 1)),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "12"),
        ({"type": "integer"}, str(2**63 - 1)),
        ({"type": "integer"}, "-" + "9" * 18),
        ({"type": "integer", "maximum": -(5 * 10**17)}, str(-(6 * 10**17))),
        ({"type": ["null", "integer"]}, "null"),
        ({"type": ["number", "integer"]}, "1" * 20),
        ({"type": "number", "minimum": 1e-300, "maximum": 1}, "0.5"),
        ({"type": "number", "minimum": -1e-300}, "0"),
        ({"type": "array", "items": {"const": 1}, "minItems": 2.0, "maxItems": 2.0}, "[1,1]"),
        ({"type": "string", "minLength": 3.0, "maxLength": 3.0}, '"abc"'),
        ({"type": "object", "minProperties": 1.0, "maxProperties": 1.0, "required": ["a"]}, '{"a":1}'),
        ({"type": ["integer", "string"], "format": "int64"}, '"a"'),
        ({"format": "double"}, '"a"'),
    ],
)
def test_other_bounds_are_taken(nano: Tokenizer, schema: Any, text: str) -> None:
    begun = process_time()
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.answer is not None
    matcher = vocabulary(nano).compile(constraint.answer)
    assert matcher.takes(nano.encode(text)) and process_time() - begun < 0.5
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"const": 1}, "maxItems": 2.0}, "[1,1,1]"),
        ({"type": "string", "minLength": 3.0}, '"ab"'),
        ({"type": "number", "minimum": 1e-300, "maximum": 1}, "0"),
        ({"type": "number", "maximum": -1e-300, "minimum": -1}, "0"),
        ({"type": "number", "maximum": 1e-300, "minimum": -1}, "0.1"),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63)),
        ({"type": "integer"}, "1" * 20),
        ({"type": "integer"}, "-" + "1" * 20),
        ({"type": "integer", "minimum": 5}, "1" * 20),
        ({"type": "integer", "exclusiveMaximum": 5}, "-" + "1" * 20),
        ({"type": ["null", "integer"]}, "1" * 20),
        ({"type": "array", "items": {"type": "integer"}}, "[" + "1" * 20),
    ],
)
def test_bounds_that_are_taken_are_held(nano: Tokenizer, schema: Any, text: str) -> None:
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.answer is not None
    assert not vocabulary(nano).compile(constraint.answer).takes(nano.encode(text))


@pytest.mark.parametrize("keyword", ["minLength", "maxItems", "minProperties"])
@pytest.mark.parametrize("value", [2.5, -1, "2", True, None])
def test_counts_that_are_none_are_refused_by_name(nano: Tokenizer, keyword: str, value: Any) -> None:
    with pytest.raises(RequestError, match=keyword):
        constrain(nano, answer=AnswerFormat("json_schema", {keyword: value}))


def test_measuring_ends_soon() -> None:
    many = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(3_000)
    }
    begun = process_time()
    bounded({"$ref": "#/$defs/d0", "$defs": many | {"d3000": {"type": "null"}}})
    circles = {
        f"d{i}": {
            "anyOf": [{"allOf": [{"$ref": f"#/$defs/d{(i * k + k) % 300}"} for k in range(1, 9)]}, {"minLength": i}]
        }
        for i in range(300)
    }
    bounded({"$ref": "#/$defs/d0", "$defs": circles})
    assert process_time() - begun < 6


@pytest.mark.parametrize("word", ["anyOf", "allOf", "oneOf", "items"])
def test_what_the_compiler_does_not_reach_is_refused_by_its_depth(nano: Tokenizer, word: str) -> None:
    schema: Any = {"type": "null"}
    for _ in range(126 if word == "items" else 62):
        schema = {word: schema} if word == "items" else {word: [schema]}
    with pytest.raises(RequestError, match="nests deeper than the compiler of grammars reads, about 120 levels") as e:
        constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert "recursion" not in str(e.value)


def test_an_example_of_nested_repeats_takes_no_memory() -> None:
    assert example("x(((a{9999}){9999}){9999})?") == b"x"
    assert example("((a{9999}){9999}){9999}") == b""
    assert length("(a{3}b?){2}|c{7}") == 6 and length("(") == 0


def test_what_python_thinks_of_a_pattern_is_not_logged() -> None:
    code = "from perilune.grammar.expressions import example, length; example('[[a]b||c]'); length('[[a]b||c]')"
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_a_schema_without_bounds_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {"enum": [1, "x"]}}}
    assert bounded(schema)[0] == schema
    assert bounded(True) == (True, 0)


def test_required_names_in_many_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 names in 2,000 parts of an allOf, 25 KB, took 11 s."""
    looked_up = 0

    def member(node: Any, name: str) -> Any:
        nonlocal looked_up
        looked_up += 1
        return True

    monkeypatch.setattr(sizes, "_member", member)
    schema = {"type": "object", "required": [f"n{i}" for i in range(1_500)], "allOf": [{}] * 1_500}
    assert sizes.bounded(schema) == (schema, sizes.MAX_BYTES) and looked_up == 0
    schema["allOf"] = [{}] * 100
    assert sizes.bounded(schema)[1] < sizes.MAX_BYTES and looked_up > 150_000
