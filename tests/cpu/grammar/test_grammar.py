"""Constraints without a model: every token is drawn at random from what is allowed, and the answer must be right."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from perilune.core.constraint import Constraint
from perilune.core.errors import RequestError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine import wire
from perilune.grammar.constrain import AnswerFormat, Named, constrain
from perilune.grammar.enforcer import Enforcer, Phase
from perilune.grammar.expressions import example
from perilune.grammar.matcher import GrammarError, Matcher, Vocabulary, json_grammar, regex_grammar, vocabulary
from perilune.text.stream import ChatStream, Content, Reasoning, ToolArguments, ToolStart
from perilune.text.tokenizer import CONTROL_SLOTS, Tokenizer
from perilune.text.tools import Tool, parse_tools
from tests.schemas import SCHEMAS


def tools(*schemas: dict[str, Any]) -> tuple[Tool, ...]:
    entries = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": s}} for i, s in enumerate(schemas)]
    return parse_tools(entries)


class Monkey:
    """Draws among the allowed tokens; often a short one, because those do the most mischief."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.known = vocabulary(tokenizer)
        self.random = np.random.default_rng(seed)
        self.single = np.zeros(tokenizer.vocab_size, bool)
        self.single[self.known.singles(bytes(range(256)))] = True

    def allowed(self, enforcer: Enforcer, left: int) -> list[int]:
        return [int(t) for t in self._allowed(enforcer, left)]

    def type(self, constraint: Constraint, room: int, *, opened: bool = True, hurry: float = 0.0) -> list[int]:
        """`hurry`: how often a control token is taken where one is allowed."""
        enforcer = Enforcer(self.known, constraint, opened=opened)
        typed: list[int] = []
        for left in range(room, 0, -1):
            allowed = self._allowed(enforcer, left)
            controls = allowed[allowed >= self.tokenizer.vocab_size - CONTROL_SLOTS]
            short = allowed[self.single[allowed]]
            if len(controls) and self.random.random() < hurry:
                allowed = controls
            elif len(short) and self.random.random() < 0.4:
                allowed = short
            token = int(self.random.choice(allowed))
            if enforcer.tight:
                token = enforcer.settle(token, left)
            enforcer.advance(token)
            typed.append(token)
            if enforcer.phase is Phase.DONE:
                break
        return typed

    def answer(self, constraint: Constraint, room: int, schema: Any) -> None:
        """Types an answer, which must end and be valid."""
        *ids, end = self.type(constraint, room)
        assert end == self.tokenizer.special("<|im_end|>") and not any(map(self.tokenizer.is_special, ids))
        jsonschema.validate(json.loads(self.tokenizer.decode(ids)), schema, cls=jsonschema.Draft202012Validator)

    def _allowed(self, enforcer: Enforcer, left: int) -> NDArray[np.int64]:
        mask = np.zeros(self.known.words, np.uint32)
        enforcer.fill(mask, left)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def read(
    tokenizer: Tokenizer, ids: list[int], declared: tuple[Tool, ...], first: int = 0, thinking: bool = False
) -> Any:
    stream = ChatStream(tokenizer, thinking=thinking, tools=declared, first_tool_index=first)
    events = [*stream.feed(ids), *stream.finish()]
    assert not stream.incomplete
    calls: dict[int, list[str]] = {}
    for e in events:
        if isinstance(e, ToolStart):
            calls[e.index] = [e.id, e.name, ""]
        elif isinstance(e, ToolArguments):
            calls[e.index][2] += e.text
    text = "".join(e.text for e in events if isinstance(e, Content))
    return "".join(e.text for e in events if isinstance(e, Reasoning)), text, list(calls.values())


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_structured_answers_are_valid_and_complete_within_any_budget(nano: Tokenizer, number: int) -> None:
    schema = SCHEMAS[number]
    constraint = constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert constraint is not None
    monkey = Monkey(nano, number)
    for spare in (0, 2, 25):
        monkey.answer(constraint, constraint.least + spare, schema)


@pytest.mark.parametrize("number", range(0, len(SCHEMAS), 3))
@pytest.mark.slow
def test_an_answer_goes_on_wherever_its_beginning_ends(nano: Tokenizer, number: int) -> None:
    schema = SCHEMAS[number]
    answer, monkey = AnswerFormat("json_schema", schema), Monkey(nano, number)
    free = constrain(nano, answer=answer)
    assert free is not None
    compact = nano.decode(monkey.type(free, free.least + 30)[:-1])
    pretty = json.dumps(json.loads(compact), indent=2, ensure_ascii=False)
    texts = [compact] if "Infinity" in pretty else [compact, pretty]  # 1e999, say, which Python cannot write
    for text in texts:
        for end in sorted({len(text), *monkey.random.integers(1, len(text) + 1, 4).tolist()}):
            begun = text[:end]
            if text is pretty and begun[-1].isspace() and begun.rstrip()[-1] not in '{}[],:"':
                continue  # what follows a number must not be taken for more of it: refused
            constraint = constrain(nano, answer=answer, begun=begun)
            assert constraint is not None
            for spare in (0, 25):
                ids = monkey.type(constraint, constraint.least + spare, opened=False)
                assert ids[-1] == nano.special("<|im_end|>") and not any(nano.is_special(t) for t in ids[:-1])
                whole = json.loads(begun + nano.decode(ids[:-1]))
                jsonschema.validate(whole, schema, cls=jsonschema.Draft202012Validator)


def test_a_whole_answer_may_be_the_beginning(nano: Tokenizer) -> None:
    end = nano.special("<|im_end|>")
    for form, begun in ((AnswerFormat("choice", ["yes", "no"]), "yes"), (AnswerFormat("json_object"), '{"a": 1}\n')):
        made = constrain(nano, answer=form, begun=begun)
        assert made is not None and made.least == 1
        assert Monkey(nano, 0).type(made, 5, opened=False) == [end]


def test_an_answer_that_has_begun_makes_no_calls(nano: Tokenizer) -> None:
    section = nano.special("<|tool_calls_section_begin|>")
    for begun, calls in (("", True), ("\n", True), ("{", False)):
        made = constrain(nano, tools=tools(SCHEMAS[3]), answer=AnswerFormat("json_object"), begun=begun)
        assert made is not None
        allowed = Monkey(nano, 0).allowed(Enforcer(vocabulary(nano), made, opened=False), 500)
        assert (section in allowed) is calls


@pytest.mark.parametrize("number", range(0, len(SCHEMAS), 4))
def test_calls_are_valid_counted_and_complete_within_any_budget(nano: Tokenizer, number: int) -> None:
    declared = tools(*SCHEMAS[number : number + 4])
    monkey = Monkey(nano, number)
    for choice in ("required", Named("tool_1"), "auto"):
        constraint = constrain(nano, tools=declared, choice=choice, first_index=9, thinking=number % 8 == 0)
        assert constraint is not None
        for room in (constraint.least + 2, constraint.least + 60):
            ids = monkey.type(constraint, max(room, 1), hurry=0.5)
            _, text, calls = read(nano, ids, declared, 9, constraint.thinking)
            if choice != "auto":
                assert calls and not text and ids[-1] == nano.special("<|im_end|>")
            for i, (id, name, arguments) in enumerate(calls):
                assert id == f"functions.{name}:{9 + i}"
                (tool,) = (t for t in declared if t.name == name)
                jsonschema.validate(json.loads(arguments), tool.parameters, cls=jsonschema.Draft202012Validator)
            if choice == Named("tool_1"):
                assert [c[1] for c in calls] == ["tool_1"]


def test_one_call_at_most_unless_parallel(nano: Tokenizer) -> None:
    declared = tools({"type": "object", "properties": {}, "additionalProperties": False})
    counts = []
    for parallel in (True, False):
        constraint = constrain(nano, tools=declared, choice="required", parallel=parallel)
        assert constraint is not None
        made = [read(nano, Monkey(nano, s).type(constraint, 90), declared)[2] for s in range(8)]
        counts.append({len(calls) for calls in made})
    assert max(counts[0]) > 1 and counts[1] == {1}


# ---- failure modes: what these models do wrong without a grammar; numbered as in the format notes.


@pytest.fixture
def begun(nano: Tokenizer) -> tuple[Monkey, Enforcer, Tokenizer]:
    constraint = constrain(nano, tools=tools(SCHEMAS[3]), thinking=True)
    assert constraint is not None
    monkey = Monkey(nano, 0)
    return monkey, Enforcer(monkey.known, constraint, opened=True), nano


def test_1_2_9_a_thought_ends_with_its_marker_before_anything_else_begins(begun: Any) -> None:
    monkey, enforcer, nano = begun
    controls = [t for t in monkey.allowed(enforcer, 100) if nano.is_special(t)]
    assert controls == [nano.special("</think>")]
    with pytest.raises(GrammarError, match="may not come here"):
        enforcer.advance(nano.special("<|tool_calls_section_begin|>"))


def test_2_a_call_needs_its_section(begun: Any) -> None:
    monkey, enforcer, nano = begun
    enforcer.advance(nano.special("</think>"))
    controls = {t for t in monkey.allowed(enforcer, 100) if nano.is_special(t)}
    assert controls == {nano.special("<|tool_calls_section_begin|>"), nano.special("<|im_end|>")}
    enforcer.advance(nano.special("<|tool_calls_section_begin|>"))
    assert monkey.allowed(enforcer, 100) == [nano.special("<|tool_call_begin|>")]


def test_3_4_a_header_is_a_declared_name_with_the_next_counter(begun: Any) -> None:
    monkey, enforcer, nano = begun
    for name in ("</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"):
        enforcer.advance(nano.special(name))
    assert all("functions.tool_0:0".startswith(nano.token_text(t)) for t in monkey.allowed(enforcer, 100))
    for token in nano.encode("functions.tool_0:0"):
        enforcer.advance(token)
    assert monkey.allowed(enforcer, 100) == [nano.special("<|tool_call_argument_begin|>")]


def test_7_arguments_end_only_when_they_are_complete(begun: Any) -> None:
    monkey, enforcer, nano = begun
    for name in ("</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"):
        enforcer.advance(nano.special(name))
    for token in [*nano.encode("functions.tool_0:0"), nano.special("<|tool_call_argument_begin|>")]:
        enforcer.advance(token)
    for token in nano.encode('{"city": "x"'):
        assert not any(nano.is_special(t) for t in monkey.allowed(enforcer, 100))
        enforcer.advance(token)
    enforcer.advance(nano.encode("}")[0])
    assert monkey.allowed(enforcer, 100) == [nano.special("<|tool_call_end|>")]


def test_8_9_a_model_that_opens_its_thought_itself_must(nano: Tokenizer) -> None:
    constraint = constrain(nano, tools=tools(SCHEMAS[3]), thinking=True)
    assert constraint is not None
    enforcer = Enforcer(vocabulary(nano), constraint, opened=False)
    assert Monkey(nano, 0).allowed(enforcer, 50) == [nano.special("<think>")]


def test_a_choice_of_none_masks_every_marker(nano: Tokenizer) -> None:
    constraint = constrain(nano, tools=tools(SCHEMAS[3]), choice="none")
    assert constraint == Constraint()
    allowed = Monkey(nano, 0).allowed(Enforcer(vocabulary(nano), constraint, opened=False), 50)
    assert [t for t in allowed if nano.is_special(t)] == [nano.special("<|im_end|>")]


def test_a_thought_stops_at_its_budget_and_the_answer_follows(nano: Tokenizer) -> None:
    for budget in (0, 1, 7):
        constraint = constrain(nano, thinking=True, thinking_budget=budget, answer=AnswerFormat("json_object"))
        assert constraint is not None
        ids = Monkey(nano, budget).type(constraint, 60)
        assert ids.index(nano.special("</think>")) <= budget
        _, text, _ = read(nano, ids, (), thinking=True)
        assert isinstance(json.loads(text), dict)
    free = constrain(nano, thinking=True, thinking_budget=3)
    assert free == Constraint(thinking=True, thinking_budget=3) and free.least == 0


def test_a_thought_leaves_room_for_the_answer(nano: Tokenizer) -> None:
    constraint = constrain(nano, thinking=True, answer=AnswerFormat("json_schema", SCHEMAS[13]))
    assert constraint is not None
    for seed in range(3):
        ids = Monkey(nano, seed).type(constraint, constraint.least + 20)
        jsonschema.validate(json.loads(read(nano, ids, (), thinking=True)[1]), SCHEMAS[13])


def test_tools_and_a_form_together_give_one_or_the_other(nano: Tokenizer) -> None:
    declared = tools(SCHEMAS[3])
    constraint = constrain(nano, tools=declared, answer=AnswerFormat("choice", ["yes", "no"]))
    assert constraint is not None
    seen = set()
    for seed in range(12):
        _, text, calls = read(nano, Monkey(nano, seed).type(constraint, 60, hurry=0.5), declared)
        assert bool(calls) != (text in ("yes", "no")), (text, calls)
        seen.add(bool(calls))
    assert seen == {True, False}


@pytest.mark.parametrize(
    "kind, value, right",
    [
        ("regex", "[a-c]{3,5} (x|yy)+", lambda s: __import__("re").fullmatch("[a-c]{3,5} (x|yy)+", s)),
        ("choice", ["alpha", "be ta", 'é|"]'], lambda s: s in ("alpha", "be ta", 'é|"]')),
        ("choice", ["<|im_end|>"], "<|im_end|>".__eq__),
        ("grammar", 'root ::= "(" root ")" | digit\ndigit ::= [0-9]\n', lambda s: s.strip("()").isdigit()),
        ("grammar", 'start: "(" start ")" | /[0-9]/', lambda s: s.count("(") == s.count(")") == len(s) // 2),
    ],
)
def test_other_forms(nano: Tokenizer, kind: Any, value: Any, right: Any) -> None:
    constraint = constrain(nano, answer=AnswerFormat(kind, value))
    assert constraint is not None
    for spare in (0, 3, 30):
        ids = Monkey(nano, spare).type(constraint, constraint.least + spare)
        assert ids[-1] == nano.special("<|im_end|>") and right(nano.decode(ids[:-1])), nano.decode(ids)


def test_nothing_to_enforce_costs_nothing(nano: Tokenizer) -> None:
    assert constrain(nano, thinking=True) is None and constrain(nano) is None


@pytest.mark.parametrize(
    "schema, word",
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"pattern": "^a"}}, "pattern inside it cannot be negated"),
        ({"if": {"format": "uuid"}, "then": {"maxLength": 3}}, "format inside it cannot be negated"),
        ({"type": "string", "format": "phase-of-moon"}, "phase-of-moon"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "minProperties": 2.0}, "minProperties"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        # A number with a fraction satisfies one of them, and no alternative says "with a fraction".
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "nsatisfiable"),
        # llguidance crashed on the first and rounded the others.
        ({"anyOf": [{"enum": [{"a": [-(2**63)]}]}]}, "enum -9223372036854775808"),
        ({"$ref": "#/x-a", "x-a": {"const": 2**53 + 1}}, "const 9007199254740993 .* go up to 2"),
        ({"properties": 5, "propertyNames": {"maxLength": 5}}, "properties must"),
        ({"propertyNames": None}, "propertyNames must"),
        ({"minContains": -1, "contains": {"const": 1}}, "minContains must"),
        ({"minContains": -1.0, "contains": {"const": 1}}, "minContains must"),
        ({"maxContains": "x", "contains": {"const": 1}}, "maxContains must"),
        ({"maxContains": 1e999, "not": {"contains": {"const": 1}, "maxContains": 1e999}}, "maxContains must"),
        ({"items": {"minItems": 1e999}}, "minItems must be a finite"),
        ({"not": {"maxLength": -1e999}}, "maxLength must be a finite"),
        ({"minimum": float("nan")}, "minimum must be a finite"),
        ({"not": {"enum": [{"a": [float("nan")]}]}}, "enum must be of finite"),
        ({"not": {"patternProperties": {"(": False}}}, "patternProperties '\\(' cannot be negated"),
        ({"not": {"patternProperties": {r"^\p{L}+$": {"type": "string"}}}}, "cannot be negated"),
        ({"not": {"patternProperties": {"[": True}, "additionalProperties": False}}, "cannot be negated"),
        ({"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [True]}, "names no schema"),
        ({"contains": {"unevaluatedProperties": False, "allOf": [{"$ref": "#"}]}}, "does not end"),
        ({"not": {"required": [[None]]}}, "required must"),
        ({"if": {"type": {}}, "then": {"maxLength": 3}}, "type must"),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 1}, "minimum 9007199254740993 .* rounded"),
        ({"not": {"maximum": 2**53 + 1}}, "exclusiveMinimum 9007199254740993 .* rounded"),
        (False, "nsatisfiable"),
        ("text", "must be a JSON schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(nano: Tokenizer, schema: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as e:
        constrain(nano, answer=AnswerFormat("json_schema", schema))
    assert e.value.param == "response_format" and "\n" not in str(e.value)
    if isinstance(schema, dict) and "type" not in schema:
        with pytest.raises(RequestError, match=word) as e:
            constrain(nano, tools=tools({}, schema))
        assert e.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("end", [2**53 - 1, 2**53, 2**53 + 1, 2**54, 10**16 - 1, 10**18, 2**63 - 2, 2**63 - 1, 2**64])
@pytest.mark.parametrize("word", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_ends_of_ranges_beyond_2_53_are_kept_or_refused(nano: Tokenizer, end: int, word: str) -> None:
    for least in (end, -end):
        try:
            made = constrain(nano, answer=AnswerFormat("json_schema", {"type": "integer", word: least}))
        except RequestError:
            assert end > 2**53 - word.startswith("ex")
            continue
        assert made is not None and made.answer is not None
        matcher = vocabulary(nano).compile(made.answer)
        for by in (2049, 3, 2, 1, 0)[: 5 if word.startswith("ex") else 4]:
            beyond = least + by if word.endswith("aximum") else least - by
            assert not matcher.takes(nano.encode(str(beyond)))


def test_bad_requests_are_refused(nano: Tokenizer) -> None:
    for kind, value in (
        ("regex", "(a"),
        ("regex", ""),
        ("choice", []),
        ("choice", "ab"),
        ("grammar", "start: nowhere"),
        ("grammar", "root ::= nowhere"),
        ("grammar", "root ::= ("),
        ("grammar", 'start: %json {"const": -9223372036854775808}'),
    ):
        with pytest.raises(RequestError, match=r"expression|choices|grammar"):
            constrain(nano, answer=AnswerFormat(kind, value))  # type: ignore[arg-type]
    for choice in ("required", Named("x")):
        with pytest.raises(RequestError) as e:
            constrain(nano, choice=choice)  # type: ignore[arg-type]
        assert e.value.param == "tool_choice"
    with pytest.raises(RequestError, match="type must be 'object'"):
        constrain(nano, tools=tools({"type": "string"}))


def test_long_chains_of_references_do_not_overflow_the_stack(nano: Tokenizer) -> None:
    rules = "".join(f"\na{i}: a{i + 1}" for i in range(4_000))
    made = constrain(nano, answer=AnswerFormat("grammar", f'start: a0{rules}\na4000: "x"'))
    assert made is not None and made.least == 2
    chain: dict[str, Any] = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3_000)}
    with pytest.raises(RequestError, match="levels together"):
        constrain(nano, answer=AnswerFormat("json_schema", {"$defs": chain | {"d3000": True}}))


def nullable(length: int) -> dict[str, Any]:
    """A property with a chain of references; every value in the chain may also be null."""
    chained = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(length)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**chained, f"d{length}": {"type": "object"}}}


def test_schemas_that_one_value_may_follow_are_bounded(nano: Tokenizer) -> None:
    assert constrain(nano, tools=tools({"type": "object", **nullable(700)})) is not None
    for schema in (nullable(1_000), {"anyOf": [{"type": "array", "items": {"const": i}} for i in range(2_000)]}):
        with pytest.raises(RequestError, match="may follow more than 1500 schemas"):
            constrain(nano, answer=AnswerFormat("json_schema", schema))


def test_the_remainders_of_multiple_of_are_bounded(nano: Tokenizer) -> None:
    """Each takes 1 KB of the compiled grammar: 2^31 of them took minutes and all memory."""
    kept = {"a": {"multipleOf": 365}, "b": {"multipleOf": 1440}, "c": {"multipleOf": 0.01}, "d": {"multipleOf": 1e-9}}
    assert constrain(nano, tools=tools({"properties": kept}, {"properties": kept})) is not None
    for schema in (
        {"type": "integer", "multipleOf": -100_001},
        {"multipleOf": 10**400},
        {"properties": {"a": {"multipleOf": 60_000}, "b": {"multipleOf": 0.5}, "c": {"multipleOf": 40_000}}},
        {"allOf": [{"multipleOf": 991}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"multipleOf": 997}}},
    ):
        with pytest.raises(RequestError, match="multipleOf") as e:
            constrain(nano, answer=AnswerFormat("json_schema", schema))
        assert e.value.code == "unsupported_schema"
    with pytest.raises(RequestError, match="multipleOf"):
        constrain(nano, answer=AnswerFormat("grammar", r'start: %json {"multiple\u004ff": 100001}'))
    with pytest.raises(RequestError, match="multipleOf") as e:
        constrain(nano, tools=tools(*[{"properties": {"a": {"multipleOf": 60_000}}}] * 2))
    assert e.value.param == "tools[1].function.parameters"
    known = Vocabulary(nano)
    known.compile(json_grammar({"type": "integer", "multipleOf": 50_000}))
    assert known._fresh.size > 500_000


def test_names_in_pattern_properties_are_bounded(nano: Tokenizer) -> None:
    """The compiler compares them pair by pair, in an allOf more than once: 192 took 80 s."""
    names = [{"patternProperties": {f"^a{i}$": {"type": "string"}}} for i in range(65)]
    assert constrain(nano, answer=AnswerFormat("json_schema", {"anyOf": names[:64]})) is not None
    for schema in ({"allOf": names}, {"properties": {name: {"anyOf": names[:13]} for name in "abcde"}}):
        with pytest.raises(RequestError, match="patternProperties cannot be enforced for 65 names"):
            constrain(nano, answer=AnswerFormat("json_schema", schema))
    with pytest.raises(RequestError, match="patternProperties: 65 names"):
        constrain(nano, answer=AnswerFormat("grammar", f"start: %json {json.dumps({'anyOf': names})}"))


def test_names_that_references_bring_together_are_bounded(nano: Tokenizer) -> None:
    """With 10 of these, 2.4 KB, the compiler took more than 20 s, four times as long for each two more."""
    names = {"type": "object", "patternProperties": {f"^a{i}$": {"type": "string"} for i in range(60)}}
    inside = {"type": "object", "patternProperties": {"^x-": {"$ref": "#/$defs/inside"}}, "additionalProperties": False}
    known = {"$defs": {"names": names, "inside": inside}}
    ref = {"$ref": "#/$defs/names"}
    for schema in ({"anyOf": [ref] * 40}, {"allOf": [ref] * 7}, {"$ref": "#/$defs/inside"}):
        assert constrain(nano, answer=AnswerFormat("json_schema", known | schema)) is not None
    for schema in ({"allOf": [{"anyOf": [ref, {"required": [x]}]} for x in "abcdefghij"]}, {"allOf": [ref] * 100}):
        with pytest.raises(RequestError, match="patternProperties of too many schemas hold together"):
            constrain(nano, answer=AnswerFormat("json_schema", known | schema))


def test_properties_of_an_object_are_bounded(nano: Tokenizer) -> None:
    """The compiler's time grows with their square: 8,000 took 20 s."""
    names = [f"n{i}" for i in range(2_001)]
    for schema in (
        {"properties": {"a": {"type": "object", "properties": dict.fromkeys(names, True)}}},
        {"type": "object", "propertyNames": {"enum": names}},
    ):
        with pytest.raises(RequestError, match="an object has 2001 properties, at most 2000") as e:
            constrain(nano, answer=AnswerFormat("json_schema", schema))
        assert e.value.code == "unsupported_schema"


def test_too_little_room_is_refused_with_the_least_that_would_do(nano: Tokenizer) -> None:
    constraint = constrain(nano, answer=AnswerFormat("json_schema", SCHEMAS[13]))
    assert constraint is not None
    constraint.check_room(constraint.least)
    with pytest.raises(RequestError, match=f"at least {constraint.least}") as e:
        constraint.check_room(constraint.least - 1)
    assert e.value.param == "max_tokens"


def test_a_constraint_travels(nano: Tokenizer) -> None:
    constraint = constrain(nano, tools=tools(*SCHEMAS[:3]), first_index=2, thinking=True, thinking_budget=4)
    message = Submit(1, (1, 2), SamplingParams(), constraint)
    assert wire.decode(wire.encode([message])[wire.HEADER.size :]) == [message]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(constraint), type=Constraint) == constraint


# ---- completions


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"type": "object"}, "{}"),
        (SCHEMAS[16], '{"zreq":true}'),
        ({"type": "string", "pattern": "^(ab)*c$"}, '"c"'),
        ({"type": "integer", "multipleOf": 7, "minimum": 100}, "105"),
        ({"type": "string", "pattern": "[0-9]{3}-[a-z]+@"}, '"000-a@"'),
        ({"type": "string", "pattern": r"^[^\x00-\x7F]+$"}, '"\u00e9"'),
    ],
)
def test_are_short(nano: Tokenizer, schema: Any, text: str) -> None:
    found = vocabulary(nano).compile(json_grammar(schema)).completion()
    assert found is not None and nano.decode(found).replace('": ', '":') == text  # one token, and '":' as well


def test_start_in_the_middle_of_a_character(nano: Tokenizer) -> None:
    matcher = vocabulary(nano).compile(json_grammar({"type": "string"}))
    for byte in b'"\xf0\x9f':
        assert matcher.advance(vocabulary(nano).singles(bytes([byte]))[0])
    found = matcher.completion()
    assert found is not None and matcher.takes(found)


def test_leave_the_matcher_where_it_was(nano: Tokenizer) -> None:
    matcher = vocabulary(nano).compile(regex_grammar("ab+c"))
    assert matcher.completion() == matcher.completion() and not matcher.complete
    assert not matcher.advance(nano.encode("x")[0]) and matcher.takes(nano.encode("abbbc"))


@pytest.mark.parametrize(
    "expression, text",
    [
        ("^a{3}b?$", "aaa"),
        (r"\d+-[^0-9a]", "0- "),
        ("(x|yy)z", "xz"),
        ("(?=a)b", ""),
        ("(a", ""),
        ("[b-d].", "ba"),
        (r"[^\x00-\x7F]+x", "\u00e9x"),
        ("[^\x00-\U0010fffe]", ""),
    ],
)
def test_examples_of_expressions(expression: str, text: str) -> None:
    assert example(expression).decode() == text


def test_the_caches_are_bounded(nano: Tokenizer) -> None:
    known = Vocabulary(nano)
    for n in range(8):
        known.compile(regex_grammar(f"a{{{n + 1}}}"))
    assert len(known._fresh) == 8
    known._fresh.most = known._fresh.size // 2
    known._grown.most = 2
    for n in range(4):
        assert known.compile(regex_grammar(f"a{{{n + 5}}}")).advance(nano.encode("a")[0])
    assert len(known._grown) == 2 and len(known._fresh) == 4
    known.compile(regex_grammar("b"))
    known.compile(regex_grammar("c"))
    assert known._fresh.size <= known._fresh.most
    known._written.most = 100
    for n in range(8):
        assert known.written(f"{n:40}", "", lambda n=n: ("grammar", n)) == ("grammar", n)  # type: ignore[misc]
    assert len(known._written) == 2 and known.written(f"{7:40}", "", lambda: ("another", 0)) == ("grammar", 7)


def test_tools_are_read_and_compiled_once(nano: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also more than 64, which agents with several MCP servers have; those of other accounts are apart."""
    schemas = [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(100)]
    tools = parse_tools(
        [{"type": "function", "function": {"name": f"t{n}", "parameters": s}} for n, s in enumerate(schemas)]
    )
    made = constrain(nano, tools=tools)
    compiled, real = list[str](), Matcher.__init__
    monkeypatch.setattr(Matcher, "__init__", lambda self, *args: (compiled.append(args[1]), real(self, *args))[1])
    monkeypatch.setattr("perilune.grammar.constrain._of_tool", lambda *args: pytest.fail("read again"))
    assert constrain(nano, tools=tools) == made and not compiled
    monkeypatch.undo()
    assert made is not None
    enforcer, mask = Enforcer(vocabulary(nano), made, opened=False), np.zeros(vocabulary(nano).words, np.uint32)
    enforcer.fill(mask, 999)
    with monkeypatch.context() as patched:
        patched.setattr(Vocabulary, "encode", None)  # each token of text encoded every header: 7 ms for 50 tools
        enforcer.fill(mask, 998)
        for name in ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"):
            enforcer.advance(nano.special(name))
        enforcer.fill(mask, 996)
    monkeypatch.setattr(Matcher, "__init__", lambda self, *args: (compiled.append(args[1]), real(self, *args))[1])
    constrain(nano, tools=tools[:1], group="another")
    assert len(compiled) == 1


@pytest.mark.slow
def test_the_real_vocabulary(kimi_k26: Path) -> None:
    tokenizer = Tokenizer.from_directory(kimi_k26)
    declared = tools(*SCHEMAS[4:8])
    constraint = constrain(tokenizer, tools=declared, choice="required", thinking=True, thinking_budget=5)
    assert constraint is not None
    for seed in range(3):
        _, _, calls = read(tokenizer, Monkey(tokenizer, seed).type(constraint, 120, hurry=0.3), declared, thinking=True)
        for id, name, arguments in calls:
            (tool,) = (t for t in declared if t.name == name)
            jsonschema.validate(json.loads(arguments), tool.parameters)
            assert id.startswith(f"functions.{name}:")
