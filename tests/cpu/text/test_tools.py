"""Tool declarations: the TypeScript the model was trained on, the JSON fallback, and what is refused."""

import tracemalloc
from typing import Any

import pytest

from perilune.core.errors import RequestError
from perilune.text.tools import MAX_DEPTH, Tool, check_text, declaration, parse_tools


def tool(parameters: Any = None, name: str = "f", **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **extra}}


def body(*tools: dict[str, Any]) -> str:
    """What the declaration says between the braces of its namespace."""
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    text = declaration(parse_tools(list(tools)))
    assert text.startswith(head) and text.endswith(tail), text
    return text[len(head) : -len(tail)]


def field(schema: Any, **outer: Any) -> str:
    """The lines of one optional field `x`."""
    text = body(tool({"type": "object", "properties": {"x": schema}, **outer}))
    head, tail = "type f = (_: {\n", "\n}) => any;"
    assert text.endswith(tail), text
    return text[text.index(head) + len(head) : -len(tail)]


WEATHER = tool(
    {
        "type": "object",
        "required": ["city"],
        "properties": {
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "tags": {"type": "array", "items": {"type": "string", "description": "a tag"}},
            "opts": {
                "type": "object",
                "properties": {"x": {"type": ["number", "null"]}},
                "additionalProperties": False,
            },
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "city": {"type": "string", "description": "City name", "minLength": 1},
        },
    },
    name="get_weather",
)
WEATHER_TEXT = """\
type get_weather = (_: {
  // City name
  // minLength: 1
  city: string,
  // maximum: 7, minimum: 1
  days?: number,
  opts?: {
    x?: number | null,
    [k: string]: never
  },
  tags?: Array<
    // a tag
    string
  >,
  // Default: "celsius"
  unit?: "celsius" | "fahrenheit"
}) => any;"""


def test_golden_declaration() -> None:
    assert declaration(parse_tools([WEATHER])) == (
        "# Tools\n\n## functions\nnamespace functions {\n" + WEATHER_TEXT + "\n}\n"
    )


def test_functions_follow_each_other_with_their_descriptions() -> None:
    assert body(tool(name="a", description="One\n\ntwo"), tool({}, name="b.c-d", description=None)) == (
        "// One\n\n// two\ntype a = (_: {}) => any;\ntype b.c-d = (_: {}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "lines"),
    [
        ({"type": "string"}, "  x?: string"),
        ({"type": "integer"}, "  x?: number"),
        ({"type": "null"}, "  x?: null"),
        (True, "  x?: any"),
        (False, "  x?: null"),
        ({}, "  x?: any"),
        (
            {"type": ["string", "integer", "boolean", "null", "object", "array"]},
            "  x?: string | number | boolean | null | {} | Array<any>",
        ),
        ({"anyOf": [{"type": "string", "description": "not shown"}, {"type": "array"}]}, "  x?: string | Array<any>"),
        ({"enum": ["a", 1, 2.5, True, None]}, '  x?: "a" | 1 | 2.5 | True | None'),
        ({"enum": ["a", None], "type": ["null", "string"]}, '  x?: "a" | None'),
        ({"enum": [1], "type": "number", "minimum": 0}, "  x?: 1"),
        ({"type": "array", "items": {"type": "integer"}}, "  x?: Array<number>"),
        ({"type": "array", "items": {"type": "array", "items": {}}}, "  x?: Array<Array<any>>"),
        ({"type": "array", "items": True}, "  x?: Array<any>"),
        (
            {"type": "array", "minItems": 1, "maxItems": 3, "minLength": 9},
            "  // maxItems: 3, minItems: 1\n  x?: Array<any>",
        ),
        (
            {"type": "string", "pattern": "^a$", "minLength": 1, "maximum": 3},
            "  // minLength: 1, pattern: ^a$\n  x?: string",
        ),
        ({"type": "boolean", "default": True}, "  // Default: True\n  x?: boolean"),
        ({"type": "number", "default": 1.0}, "  // Default: 1.0\n  x?: number"),
        ({"type": "string", "default": None}, "  x?: string"),
        ({"type": "object", "default": {"b": "上", "a": [1]}}, '  // Default: {"a": [1], "b": "上"}\n  x?: {}'),
        ({"type": "string", "description": "One\n\ntwo"}, "  // One\n\n  // two\n  x?: string"),
        ({"type": "object", "additionalProperties": True}, "  x?: {\n    [k: string]: any\n  }"),
        (
            {"type": "object", "additionalProperties": {"type": "object", "properties": {"y": {"type": "string"}}}},
            "  x?: {\n    [k: string]: {\n      y?: string\n    }\n  }",
        ),
        (
            {"type": "array", "items": {"type": "object", "description": "d", "properties": {"y": {"type": "string"}}}},
            "  x?: Array<\n    // d\n    {\n      y?: string\n    }\n  >",
        ),
    ],
)
def test_types(schema: Any, lines: str) -> None:
    assert field(schema) == lines


def test_required_fields_come_first_and_each_group_is_sorted() -> None:
    text = body(
        tool({"properties": {n: {"type": "null"} for n in "dbca"}, "required": ["c", "b"], "additionalProperties": {}})
    )
    assert text == ("type f = (_: {\n  b: null,\n  c: null,\n  a?: null,\n  d?: null,\n  [k: string]: any\n}) => any;")


def test_required_names_are_found_without_a_search() -> None:
    compared = list[object]()

    class Counted(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str.__eq__(self, other)

    names = [f"a{i:02}" for i in range(50)]
    schema = {"properties": dict.fromkeys(names, True), "required": [Counted(name) for name in names]}
    assert body(tool({"type": "object", **schema})).count("?") == 0 and len(compared) <= 2 * len(names)


def test_references() -> None:
    schema = {
        "$defs": {
            "Pair": {"type": "object", "description": "two", "properties": {"a": {"$ref": "#/$defs/Leaf"}}},
            "Leaf": {"type": "integer"},
        },
        "properties": {"x": {"$ref": "#/$defs/Pair", "description": "see"}},
    }
    assert body(tool(schema, description="D")) == (
        "interface Leaf number\n// two\ninterface Pair {\n  a?: Leaf\n}\n// D\n"
        "type f = (_: {\n  // see\n  x?: Pair\n}) => any;"
    )


def test_a_schema_that_refers_to_itself() -> None:
    schema = {"properties": {"name": {"type": "string"}, "child": {"$ref": "#"}}, "required": ["name"]}
    assert body(tool(schema)) == (
        "interface parameters {\n  child?: parameters,\n  name: string\n}\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"allOf": []},
        {"const": 1},
        {"$ref": "#/$defs/Absent"},
        {"$ref": "other.json"},
        {"type": ["string", "made-up"]},
        {"enum": ["a"], "type": "integer"},
        {"enum": ["a"], "type": ["string", "number"]},
        {"enum": 3},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {}, "required": None},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": "string", "description": ["no", "text"]},
        {"type": "object", "additionalProperties": "yes"},
        "string",
        None,
    ],
)
def test_what_typescript_cannot_say_is_declared_as_compact_sorted_json(schema: Any) -> None:
    raw = [
        tool(name="plain", description="é"),
        {"function": {"parameters": {"type": "object", "properties": {"z": schema}}, "name": "f"}, "type": "function"},
    ]
    text = declaration(parse_tools(raw))
    assert text.startswith('[{"function":{"description":"é","name":"plain","parameters":null},"type":"function"},')
    assert text.count('"name"') == 2 and text.index('"properties"') < text.index('"type":"object"')
    assert '{"function":{"name":"f","parameters":{"properties":{"z":' in text


def test_the_json_form_is_compact_sorted_at_every_level_and_not_escaped() -> None:
    raw = {
        "type": "function",
        "function": {
            "strict": True,
            "name": "f",
            "description": "上海",
            "parameters": {
                "type": "object",
                "required": ["b", "a"],
                "properties": {"b": {}, "a": {"z": 1, "enum": [2, 1]}},
            },
        },
    }
    assert declaration(parse_tools([raw, tool(name="g")]), "json") == (
        '[{"function":{"description":"上海","name":"f","parameters":{"properties":{"a":{"enum":[2,1],"z":1},"b":{}},'
        '"required":["b","a"],"type":"object"},"strict":true},"type":"function"},'
        '{"function":{"name":"g","parameters":null},"type":"function"}]'
    )


def test_the_tojson_form_keeps_the_clients_order_and_jinjas_separators() -> None:
    raw = {
        "type": "function",
        "function": {"name": "f", "description": "上 <b>", "parameters": {"required": ["b"], "properties": {"b": {}}}},
    }
    assert declaration(parse_tools([raw, tool(name="g")]), "tojson") == (
        '[{"type": "function", "function": {"name": "f", "description": "上 <b>", "parameters": {"required": ["b"], '
        '"properties": {"b": {}}}}}, {"type": "function", "function": {"name": "g", "parameters": null}}]'
    )


def test_parsed_tools() -> None:
    assert parse_tools(None) == ()
    parsed = parse_tools([WEATHER])
    assert parsed == (Tool("get_weather", WEATHER["function"]["parameters"], WEATHER),)
    assert parse_tools(parsed) == parsed
    assert parse_tools([tool()])[0].parameters == {}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_long_name_is_not_copied_for_each_value() -> None:
    """A name of 1 MB above 1,000 numbers took 1 GB."""
    tracemalloc.start()
    check_text({"k" * 100_000: [0] * 100}, "guided_json")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_depth_is_bounded() -> None:
    fits = MAX_DEPTH - 3  # the tool, the function and the innermost schema are levels too
    parse_tools([tool(nested(fits))])
    assert field(nested(100)) == "  x?: " + "Array<" * 100 + "string" + ">" * 100
    with pytest.raises(RequestError, match=r"tools\[0\] nests deeper than 128 levels"):
        parse_tools([tool(nested(fits + 1))])
    with pytest.raises(RequestError, match="nests deeper"):
        parse_tools([tool(nested(100_000))])


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("text", "tools"),
        ({"type": "function"}, "tools"),
        ([1], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([WEATHER, {"type": "function"}], "tools[1].function"),
        ([tool(name="")], "tools[0].function.name"),
        ([tool(name="a b")], "tools[0].function.name"),
        ([tool(name="a\n")], "tools[0].function.name"),
        ([tool(name="a" * 65)], "tools[0].function.name"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([tool([])], "tools[0].function.parameters"),
        ([tool("object")], "tools[0].function.parameters"),
        ([tool(description=3)], "tools[0].function.description"),
    ],
)
def test_malformed_tools_are_refused(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(tools)
    assert caught.value.param == param and caught.value.status == 400
    assert str(caught.value).startswith(param) and "\n" not in str(caught.value)
