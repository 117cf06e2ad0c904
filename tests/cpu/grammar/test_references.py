"""References inside of a schema: names, anchors and pointers become one form, and what leads nowhere is refused."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import RequestError
from perilune.grammar.constrain import AnswerFormat, constrain
from perilune.grammar.matcher import vocabulary
from perilune.grammar.references import SchemaError, resolved, target
from perilune.text.tokenizer import Tokenizer
from tests.cpu.grammar.test_grammar import Monkey, tools

WORD = {"type": "string", "maxLength": 4}


def takes(nano: Tokenizer, schema: Any, text: str) -> bool:
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None and constraint.answer is not None
    return vocabulary(nano).compile(constraint.answer).takes(nano.encode(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"w": WORD}, "$ref": "#/$defs/w"},
        {"definitions": {"w": WORD}, "$ref": "#/definitions/w"},
        {"$defs": {"w": {"$anchor": "word", **WORD}}, "$ref": "#word"},
        {"$defs": {"w": {"$dynamicAnchor": "word", **WORD}}, "$ref": "#word"},
        {"$defs": {"w": {"$id": "#word", **WORD}}, "$ref": "#word"},
        {"$defs": {"w": {"$id": "word.json", **WORD}}, "$ref": "word.json"},
        {"$id": "https://e.org/a/s.json", "$defs": {"w": {"$id": "w", **WORD}}, "$ref": "https://e.org/a/w"},
        {"$id": "https://e.org/a/s.json", "$defs": {"w": WORD}, "$ref": "https://e.org/a/s.json#/$defs/w"},
        {"$id": "https://e.org/a/s.json", "$defs": {"w": WORD}, "$ref": "s.json#/$defs/w"},
        {"$id": "https://e.org/s#", "$defs": {"w": {"$id": "t#", **WORD}}, "$ref": "/t"},
        {"$id": "urn:e:s", "$defs": {"w": WORD}, "$ref": "#/$defs/w"},
        {"$id": "https://e.org/s#/$defs/w", "$defs": {"w": WORD}, "$ref": "#/$defs/w"},
        {"$id": "a schema of words", "$defs": {"w": WORD}, "$ref": "#/$defs/w"},
        {"$id": "", "$defs": {"w": WORD}, "$ref": "#/$defs/w"},
        {"$defs": {"r": {"$id": "r", "$defs": {"w": WORD}, "$ref": "#/$defs/w"}}, "$ref": "r"},
        {"$defs": {"r": {"$id": "r", "$defs": {"w": {"$anchor": "x", **WORD}}}, "x": {}}, "$ref": "r#x"},
        {"$defs": {"w w": WORD}, "$ref": "#/$defs/w%20w"},
        {"$defs": {"w/w~": WORD}, "$ref": "#/$defs/w~1w~0"},
        {"$defs": {"ref0": {"type": "null"}, "é": WORD}, "$ref": "#/$defs/%C3%A9"},
        {"$defs": {"a": {"oneOf": [{"type": "null"}, WORD]}}, "$ref": "#/$defs/a/oneOf/1"},
        {"x-types": {"w": WORD}, "$ref": "#/x-types/w"},
        {"$defs": {"a": {"items": {"items": WORD}}}, "$ref": "#/$defs/a/items/items"},
    ],
)
def test_what_names_a_part_leads_to_it(nano: Tokenizer, schema: Any) -> None:
    assert takes(nano, schema, '"abcd"')
    assert not takes(nano, schema, '"abcde"') and not takes(nano, schema, "null")


def test_a_pointer_into_what_is_rewritten_still_leads_there(nano: Tokenizer) -> None:
    """The place of an alternative moves when oneOf becomes anyOf, and a title's goes away."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
            "b": {"$ref": "#/properties/a/oneOf/0"},
            "c": {"$ref": "#/properties/b"},
            "d": {"$ref": "#/title"},
        },
        "title": {"type": "null"},
        "additionalProperties": False,
    }
    assert takes(nano, schema, '{"a":null,"b":1,"c":2,"d":null}')
    for text in ('{"b":null}', '{"c":"x"}', '{"d":1}'):
        assert not takes(nano, schema, text)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "#anchor"}, "#anchor"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "put what it names into \\$defs"),
        ({"$ref": "other.json"}, "other.json"),
        ({"$ref": 5}, "\\$ref must be a string"),
        ({"$ref": "#/type", "type": "object"}, "names no schema"),
        ({"$ref": "#/anyOf/7", "anyOf": [True]}, "names no schema"),
        ({"$id": "p" * 2048, "items": {"$id": "x"}}, "2048 characters"),
        ({"$id": "http://[", "anyOf": [{"$ref": "x"}]}, "\\$ref 'x' is not a URI reference"),
        (
            {"$defs": {"a": {"$dynamicAnchor": "x"}, "b": {"$id": "b", "$dynamicAnchor": "x"}}, "$dynamicRef": "#x"},
            "dynamicRef '#x': 2 schemas",
        ),
    ],
)
def test_what_leads_nowhere_is_refused_by_name(nano: Tokenizer, schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as e:
        constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert e.value.param == "response_format" and "\n" not in str(e.value)
    with pytest.raises(RequestError, match=words) as e:
        constrain(nano, tools=tools({"type": "object", "properties": {"a": schema}}))
    assert e.value.param == "tools[0].function.parameters"


def test_names_in_values_are_values() -> None:
    schema = {
        "properties": {"$id": {"type": "string"}, "$ref": {"type": "string"}, "$anchor": {"const": {"$id": "x"}}},
        "enum": [{"$ref": "#/nowhere"}],
        "default": {"$id": "y"},
    }
    assert resolved(schema) == schema
    assert resolved(True) is True


def test_a_copy_is_made_once_and_not_without_bound() -> None:
    part: Any = {"type": "string"}
    schema = {"properties": {"a": {"items": part}, **{f"p{i}": {"$ref": "#/properties/a/items"} for i in range(50)}}}
    assert len(resolved(schema)["$defs"]) == 1
    chain: Any = {"type": "null"}
    for _ in range(100):
        chain = {"properties": {"a": chain, **{f"b{i}": {"type": "null"} for i in range(60)}}}
    pointers = ["#" + "/properties/a" * k for k in range(1, 100)]
    with pytest.raises(SchemaError, match="too large"):
        resolved({"properties": {"a": chain}, "anyOf": [{"$ref": pointer} for pointer in pointers]})
    made = resolved({"$defs": {"d" * 300: {"$anchor": "a"}}, "$ref": "#a"})
    assert made["$ref"] == "#/$defs/ref0", "no reference copies a long name"


_SCHEMAS = st.sampled_from([{"type": "integer"}, {"type": "null"}, {"enum": ["a", 2]}, WORD])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_any_way_of_naming_means_the_same(nano: Tokenizer, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(["a", "b c", "d/e", "f~", "é"]), min_size=1, max_size=3, unique=True))
    parts = {name: dict(data.draw(_SCHEMAS)) for name in names}
    plain = json.loads(json.dumps(parts))
    properties, wanted = {}, {}
    for i, name in enumerate(names):
        way = data.draw(st.sampled_from(["pointer", "anchor", "id", "inline"]))
        escaped = name.replace("~", "~0").replace("/", "~1").replace(" ", "%20")
        if way == "anchor":
            parts[name]["$anchor"] = f"n{i}"
        elif way == "id":
            parts[name]["$id"] = f"https://e.org/n{i}"
        reference = {
            "pointer": f"#/$defs/{escaped}",
            "anchor": f"#n{i}",
            "id": f"n{i}",
            "inline": f"#/properties/p{i}x",
        }
        properties[f"p{i}"] = {"$ref": reference[way]}
        properties[f"p{i}x"] = wanted[f"p{i}"] = wanted[f"p{i}x"] = plain[name]
    schema = {"$id": "https://e.org/root", "type": "object", "properties": properties, "$defs": parts}
    expected = {"type": "object", "properties": wanted}
    made = resolved(schema)
    for name, part in made["properties"].items():
        reference = part.get("$ref")
        found = part if reference is None else target(made, reference)
        assert found == wanted[name]
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None
    ids = Monkey(nano, 1).type(constraint, 60)
    jsonschema.validate(json.loads(nano.decode(ids[:-1])), expected)


def test_copies_of_long_enums_are_bounded() -> None:
    """Each reference to a part around an enum copies it: 50 copies of 60,000 values took more than 20 s to check."""
    part: Any = {"enum": [f"v{i}" for i in range(1_000)]}
    places = ["#/properties/x"]
    for _ in range(55):
        part = {"anyOf": [part]}
        places.append(places[-1] + "/anyOf/0")
    copies = {f"r{i}": {"$ref": place} for i, place in enumerate(places)}
    schema = {"properties": {"x": part, **copies}}
    assert len(resolved(schema)["$defs"]) == 56
    values = schema["properties"]["x"]
    while "anyOf" in values:
        values = values["anyOf"][0]
    values["enum"] = [f"v{i}" for i in range(60_000)]
    with pytest.raises(SchemaError, match="too large"):
        resolved(schema)
