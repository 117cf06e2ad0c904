"""The judge of calls over awkward schemas, the schemas it draws, and the schemas said in other words."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from time import process_time
from typing import Any

import jsonschema
import pytest

from perilune.client.endpoint import Chunk, EndpointError, Reply, Usage
from perilune.evals import schemas
from perilune.evals.misfits import misfits
from perilune.evals.schema_maker import ODD_ONE_IN, Drawn
from perilune.evals.schema_maker import schemas as draw
from perilune.evals.schemas import Case, judge
from perilune.grammar.json_schema import enforceable
from perilune.grammar.matcher import GrammarError, json_grammar, vocabulary
from perilune.grammar.references import SchemaError
from perilune.grammar.string_formats import FORMATS
from perilune.text.stream import ToolArguments, ToolStart
from perilune.text.tokenizer import Tokenizer

# ---- what is drawn


def test_the_same_seed_draws_the_same_schemas_of_every_sort() -> None:
    drawn = draw(64, 5)
    assert drawn == draw(64, 5) != draw(64, 6) and draw(8, 5) == drawn[:8]
    for d in drawn:
        jsonschema.Draft202012Validator.check_schema(d.schema)
    assert len({d.sort for d in drawn}) >= 28
    text = json.dumps([d.schema for d in drawn])
    for word in ("$ref", "$defs", "anyOf", "oneOf", "allOf", "enum", "const", "pattern", "format", "minimum",
                 "minLength", "maxItems", "prefixItems", "additionalProperties", "patternProperties"):  # fmt: skip
        assert f'"{word}"' in text, word


def test_the_plan_asks_for_every_schema_alone_before_it_mixes_them() -> None:
    drawn = draw(20, 5)
    cases = schemas.plan(drawn, 100, 5)
    assert cases == schemas.plan(drawn, 100, 5)
    assert [c.schemas for c in cases[:20]] == [(i,) for i in range(20)]
    assert {c.kind for c in cases} == set(schemas.KINDS) and max(len(c.schemas) for c in cases) == 3
    assert {(c.stream, c.thinking) for c in cases} == {(a, b) for a in (True, False) for b in (True, False)}
    body = schemas.request(dataclasses.replace(cases[0], kind="named", earlier=2, native=False), drawn, 99)
    assert body["tool_choice"]["function"]["name"] == body["tools"][0]["function"]["name"] == schemas.name(0)
    assert body["max_tokens"] == 99 and sum("tool_calls" in m for m in body["messages"]) == 2


# ---- the judge

CITY = Drawn("string", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
CASE = Case("required", (0,), False, False, True, earlier=2, native=True, temperature=1.0, seed=0)
NAME = schemas.name(0)
RIGHT = Reply("", "hm", ((NAME, '{"city": "Oslo"}'),), "tool_calls", Usage(9, 9, 2), (f"functions.{NAME}:2",))


@pytest.mark.parametrize(
    "change, why",
    [
        ({}, ""),
        ({"finish_reason": "length"}, "finish_reason"),
        ({"finish_reason": "length", "closed_by_grammar": True}, ""),
        ({"closed_by_grammar": True}, "finish_reason"),
        ({"ids": (f"functions.{NAME}:0",)}, "instead of"),
        ({"ids": ("call_1",)}, "instead of"),
        ({"tool_calls": (("other", "{}"),), "ids": ("functions.other:2",)}, "not declared"),
        ({"tool_calls": ((NAME, '{"city": 5}'),)}, "/city: 5"),
        ({"tool_calls": ((NAME, '{"city": "Os'),)}, "no JSON"),
        ({"tool_calls": ((NAME, '{"city": "<|im_end|>"}'),)}, "leak of <|im_end|> in arguments"),
        ({"reasoning": "so</think>"}, "leak of </think> in reasoning"),
        ({"content": "<|tool_call_begin|>"}, "leak"),
        ({"content": "text"}, "text beside"),
        ({"tool_calls": (), "ids": (), "finish_reason": "stop"}, "no call"),
    ],
)
def test_every_fault_is_found(change: dict[str, Any], why: str) -> None:
    found = "; ".join(judge(CASE, [CITY], dataclasses.replace(RIGHT, **change)))
    assert why in found and bool(found) == bool(why)


def test_calls_are_counted_and_structured_answers_read() -> None:
    two = dataclasses.replace(RIGHT, tool_calls=2 * RIGHT.tool_calls, ids=(*RIGHT.ids, f"functions.{NAME}:3"))
    assert not list(judge(CASE, [CITY], two))
    for change in ({"parallel": False}, {"kind": "named"}):
        assert "2 calls instead of one" in "".join(judge(dataclasses.replace(CASE, **change), [CITY], two))
    answer = dataclasses.replace(CASE, kind="json_schema")
    said = Reply('{"city": "x"}', "", (), "stop", None)
    assert not list(judge(answer, [CITY], said))
    assert list(judge(answer, [CITY], dataclasses.replace(said, content="{}")))
    free = dataclasses.replace(CASE, kind="auto")
    assert not list(judge(free, [CITY], dataclasses.replace(said, content="no need")))
    assert not list(judge(free, [CITY], dataclasses.replace(said, content="on and on", finish_reason="length")))
    assert list(judge(free, [CITY], dataclasses.replace(RIGHT, finish_reason="length")))


@pytest.mark.parametrize(
    "form, good, bad",
    [
        ("date", ["2024-02-29", "0001-01-01"], ["2023-02-29", "0000-01-01", "2024-04-31", "24-01-01"]),
        ("date-time", ["2024-02-29T23:59:59.123456789Z", "2024-01-01t00:00:00+01:00"],
         ["2024-01-01T23:59:60Z", "2024-01-01T00:00:00", "2023-02-29T00:00:00Z", "2024-01-01"]),
        ("time", ["23:59:59Z", "12:00:00.5-23:59"], ["24:00:00Z", "12:00:00", "12:00Z"]),
        ("duration", ["P1Y", "PT1H", "P1Y2M3DT4H5M6S", "P3W"], ["P", "PT", "P1W2D", "1Y", "P1H"]),
        ("hostname", ["a", "a-b.c", "x" * 63], ["-a", "a-", "a..b", "x" * 64, "a_b", ".".join(130 * "a")]),
        ("email", ["a@b", "a.b+c@d.e"], ["@", "a@", ".a@b", "a b@c", "x" * 65 + "@a", "a@" + "x" * 64]),
        ("ipv4", ["1.2.3.4"], ["1.2.3", "01.2.3.4", "256.1.1.1"]),
        ("ipv6", ["::", "1::2"], ["1::2::3", "fe80::1%eth0", ":"]),
        ("uri", ["http://a/b?c#d", "urn:x"], ["a b:", "//x", "http://é"]),
        ("uri-reference", ["", "/a%20b", "#x"], ["a b", "%zz", "<"]),
        ("iri", ["http://é/"], ["http://a b"]),
        ("json-pointer", ["", "/a~1b"], ["a", "/~2"]),
        ("uuid", ["00000000-0000-0000-0000-00000000000a"], ["0" * 32]),
    ],
)  # fmt: skip
def test_formats_are_judged_and_enforced_alike(nano: Tokenizer, form: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "format": form}
    matcher = vocabulary(nano).compile(json_grammar(enforceable(schema)))
    assert not list(misfits(nano.decode(matcher.from_start), schema))
    for text in bad:
        assert list(misfits(json.dumps(text), schema)), text
        assert not matcher.takes(vocabulary(nano).singles(json.dumps(text, ensure_ascii=False).encode())), text
    for text in good:
        assert not list(misfits(json.dumps(text), schema)), text


def test_numbers_are_judged_exactly() -> None:
    cents = {"type": "number", "multipleOf": 0.01}
    assert not list(misfits("0.07", cents)) and list(misfits("0.075", cents))
    assert not list(misfits("1.0", {"type": "integer"})) and list(misfits("NaN", {}))
    assert not list(misfits("1e" + 30 * "9", {"type": "number", "minimum": 0}))


class Scripted:
    """An endpoint that refuses schemas with `uniqueItems` and answers everything else rightly."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def answer(self, body: dict[str, Any]) -> Reply:
        self.asked.append(body)
        for i, tool in enumerate(body.get("tools", ())):
            if "uniqueItems" in json.dumps(tool):
                raise EndpointError(f"x answered 400: tools[{i}].function.parameters: no uniqueItems", status=400)
        if "tools" not in body:
            return Reply('{"city": ""}', "", (), "stop", Usage(1, 5, 0))
        called = body["tools"][0]["function"]["name"]
        earlier = sum("tool_calls" in m for m in body["messages"])
        return Reply(
            "", "", ((called, '{"city": ""}'),), "tool_calls", Usage(1, 5, 0), (f"functions.{called}:{earlier}",)
        )

    async def complete(self, body: dict[str, Any]) -> Reply:
        return self.answer(body)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        reply = self.answer(body)
        for (called, arguments), id in zip(reply.tool_calls, reply.ids):
            yield Chunk(0.0, (ToolStart(0, id, called),))
            yield Chunk(0.0, (ToolArguments(0, arguments),), reply.finish_reason, reply.usage)


def test_refusals_are_blamed_on_their_schema_and_asked_for_once() -> None:
    unique = Drawn("uniqueItems", {"properties": {"a": {"uniqueItems": True}}})
    cases = [
        dataclasses.replace(CASE, schemas=s, stream=k % 2 == 1) for k, s in enumerate([(0,), (0, 1), (1, 0), (0, 1)])
    ]
    endpoint = Scripted()
    outcome = asyncio.run(schemas.run(endpoint, [CITY, unique], cases, concurrency=1, max_tokens=9))  # type: ignore[arg-type]
    assert list(outcome.refused) == [1] and len(endpoint.asked) == 4
    tally = outcome.tallies["required"]
    assert (tally.answers, tally.valid, tally.refused, tally.calls, tally.streamed) == (3, 3, 1, 3, 1)
    made = schemas.rows("m", outcome, 2, seed=1)
    assert made[-1]["kind"] == "all" and made[-1]["valid_share"] == 100.0 and made[-1]["refused_share"] == 50.0
    assert schemas.table(made).row_count == 5
    (line,) = schemas.refusals(outcome, [CITY, unique])
    assert line.startswith("1 x uniqueItems: ") and "no uniqueItems" in line


def test_an_endpoint_that_is_gone_ends_the_run() -> None:
    class Gone(Scripted):
        def answer(self, body: dict[str, Any]) -> Reply:
            raise EndpointError("cannot connect")

    with pytest.raises(EndpointError, match="cannot connect"):
        asyncio.run(schemas.run(Gone(), [CITY], [CASE], concurrency=2, max_tokens=9))  # type: ignore[arg-type]


# ---- schemas in other words

OPERAND = {
    "$defs": {
        "Op": {
            "type": "object",
            "properties": {"args": {"type": "array", "items": {"$ref": "#/$defs/X"}}},
            "required": ["args"],
        },
        "X": {"oneOf": [{"type": "number"}, {"$ref": "#/$defs/Op"}], "description": "either"},
    },
    "$ref": "#/$defs/X",
}


def tagged(tag: Any) -> Any:
    return {"type": "object", "properties": {"k": tag}, "required": ["k"]}


PASSWORD = {"type": "string", "pattern": "^(?=.*[A-Z])(?=.*\\d)(?=.*[!(\\])]).{6,}$"}
ONE_OF_TWO = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
}
IF = {
    "type": "object",
    "properties": {"k": {"enum": ["a", "b", 1]}, "x": {"type": "string"}},
    "required": ["k"],
    "additionalProperties": False,
    "if": {"properties": {"k": {"const": "a"}}},
    "then": {"required": ["x"]},
}


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        (OPERAND, ['1', '{"args":[1,{"args":[]}]}'], ['"x"', "{}"]),
        (ONE_OF_TWO, ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
        (IF, ['{"k":"a","x":""}', '{"k":"b"}', '{"k":1,"x":""}'], ['{"k":"a"}', '{"k":2}']),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ['{"ab":1}', "{}"], ['{"A":1}']),
        ({"type": "object", "propertyNames": {"type": "string"}}, ['{"A":1}'], ["1"]),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
         ['{"b":1}', '{"a":1,"b":1}', "{}"], ['{"a":1}']),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.1"], ["0", "0.0", "0.6"]),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.2"], ["-1", "-0.9"]),
        (PASSWORD, ['"Aa0aa)"'], ['"a0aa))"', '"A0)"']),
        ({"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}, ['"1."', '"-.5"', '"00"'], ['"-"', '"."']),
        ({"type": "string", "format": "password", "minLength": 2}, ['"ab"'], ['"a"']),
        ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-02-29"'], ['"1999-01-01"', '"2"']),
        ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,2]"]),
        ({"properties": {"format": {"const": {"format": "date", "title": "t"}}}},
         ['{"format":{"format":"date","title":"t"}}'], ['{"format":{}}']),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, ["1", "-3"], ["2", "1.5", '"a"']),
        ({"oneOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}]},
         ['{"k":1}', '{"k":2}'], ["{}", '{"k":3}', "1"]),
        ({"oneOf": [{"enum": [1, "a"]}, {"enum": ["b", 1.0]}]}, ['"a"', '"b"'], ["1"]),
        ({"type": "object", "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}},
         ['{"k":"b"}', '{"k":"a","x":1}'], ["{}", '{"k":"a"}']),
        ({"$defs": {"A": {"type": "string"}}, "oneOf": [{"$ref": "#/$defs/A"}, {"type": "string", "minLength": 1}]},
         ['""'], ['"a"', "1"]),
        ({"oneOf": [tagged({"const": 1}), {"allOf": [tagged({"enum": [2, 3]})]}, {"type": "null"}]},
         ['{"k":1}', '{"k":3}', "null"], ["{}", '{"k":4}']),
    ],
)  # fmt: skip
def test_other_words_mean_the_same(nano: Tokenizer, schema: Any, good: list[str], bad: list[str]) -> None:
    before = json.dumps(schema)
    known = vocabulary(nano)
    matcher = known.compile(json_grammar(enforceable(schema)))
    assert json.dumps(schema) == before
    assert not list(misfits(nano.decode(matcher.from_start), schema))
    for text in good:
        assert matcher.takes(known.singles(text.encode())) and not list(misfits(text, schema)), text
    for text in bad:
        assert not matcher.takes(known.singles(text.encode())) and list(misfits(text, schema)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a(?=b)"},
        {"type": "string", "pattern": "^(?=ab"},
        {"type": "string", "pattern": "^(?=a)b|c"},
        {"type": "string", "pattern": "^(?=a)?b"},
        {"type": "array", "uniqueItems": True},
    ],
)
def test_what_has_no_other_words_stays_and_is_refused(nano: Tokenizer, schema: Any) -> None:
    assert enforceable(schema) == schema
    with pytest.raises(GrammarError):
        vocabulary(nano).compile(json_grammar(enforceable(schema)))


def test_telling_alternatives_apart_ends_soon() -> None:
    again = [{"$ref": "#/$defs/A"}] * 9
    schema = {
        "$defs": {"A": {"allOf": again, "anyOf": again}},
        "oneOf": [*again, *({"const": i} for i in range(2_000))],
    }
    begun = process_time()
    with pytest.raises(SchemaError, match="alternatives"):
        enforceable(schema)
    assert process_time() - begun < 3
    many = {"oneOf": [tagged({"const": i}) for i in range(60)]}
    assert len(enforceable(many)["anyOf"]) == 60


def test_words_that_references_name_stay(nano: Tokenizer) -> None:
    schema = {"x-types": {"A": {"type": "integer"}}, "properties": {"a": {"$ref": "#/x-types/A", "x-order": 1}}}
    matcher = vocabulary(nano).compile(json_grammar(enforceable(schema)))
    assert matcher.takes(nano.encode('{"a":1}')) and not matcher.takes(nano.encode('{"a":""}'))


def test_a_drawn_schema_is_odd_in_its_turn() -> None:
    odd = {d.sort for d in draw(ODD_ONE_IN * 40, 5)[ODD_ONE_IN - 1 :: ODD_ONE_IN]}
    assert {"uniqueItems", "propertyNames", "odd format"} <= odd and len(FORMATS) >= 8


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("1.25", True),
        ("1.255", False),
        ("1" + "0" * 60, True),
        ("123456789012345678901234567890123456789.123", False),
        ("1e999999999", True),
        ("3e-99999999", False),
        ("0e-999999", True),
    ],
)
def test_multiples_of_any_size_are_judged_exactly(text: str, fits: bool) -> None:
    assert (not list(misfits(text, {"type": "number", "multipleOf": 0.01}))) == fits
