"""How short the shortest answer is, and when one begins to be closed: neither too early nor too late."""

import heapq
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.core.constraint import Constraint
from perilune.formats.hub import resolve_model
from perilune.grammar.constrain import AnswerFormat, Named, constrain
from perilune.grammar.enforcer import Enforcer, Phase
from perilune.grammar.matcher import GrammarError, Matcher, json_grammar, vocabulary
from perilune.text.tokenizer import AddedToken, Tokenizer
from tests.cpu.grammar.test_grammar import Monkey, read, tools
from tests.serving import SPECIAL

_MERGED = [
    '":', '": ', '","', '", "', '{"', '"}', '"}}', '"]', '[{"', "},", "}]", "]}", "[]", "{}", "0,", ",0", "true",
    "null", "aa", "aaaa", "a" * 7, "  ", " " * 9, "ab", "b1", '":0', '":"', '"b":', " null", ":null", "é",
]  # fmt: skip
TINY = Tokenizer(
    {bytes([i]): i for i in range(256)} | {text.encode(): 256 + i for i, text in enumerate(_MERGED)},
    {256 + len(_MERGED) + i: AddedToken(name, special) for i, (name, special) in enumerate(SPECIAL.items())},
)
_STRINGS = st.one_of(
    st.integers(0, 12).map(lambda n: {"type": "string", "minLength": n}),
    st.integers(1, 12).map(lambda n: {"type": "string", "minLength": n, "maxLength": n}),
    st.sampled_from(["^[ab]{5}$", "^(ab)*c$", "^a{2,9}b$", "^[0-9]{3}-[a-z]+$"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
)
_LEAVES = st.one_of(
    _STRINGS,
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {}]),
    st.sampled_from([{"enum": ["aaaa", 3]}, {"const": {"a": [None]}}, {"type": "integer", "minimum": 150}]),
)


def _containers(inner: Any) -> Any:
    def thing(properties: dict[str, Any], needed: list[bool]) -> dict[str, Any]:
        required = [name for name, need in zip(properties, needed) if need]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.one_of(
        st.builds(
            thing, st.dictionaries(st.sampled_from("abc"), inner, max_size=3), st.lists(st.booleans(), max_size=3)
        ),
        st.builds(lambda items, n: {"type": "array", "items": items, "minItems": n}, inner, st.integers(0, 4)),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    )


MULTIPLYING = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^(a{0,1000}){0,1000}$"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=5)


@pytest.fixture(scope="module", params=["kimi-nano", "kimi-k2.6"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "kimi-nano":
        return Tokenizer.from_directory(resolve_model("kimi-nano"))
    path: Path = request.getfixturevalue("kimi_k26")
    return Tokenizer.from_directory(path)


def asked(tokenizer: Tokenizer, schema: Any) -> Constraint:
    made = constrain(tokenizer, answer=AnswerFormat("json_schema", schema))
    assert made is not None
    return made


def grammar_of(tokenizer: Tokenizer, schema: Any) -> str:
    text = asked(tokenizer, schema).answer
    assert text is not None
    return text


def closes(tokenizer: Tokenizer, schema: Any, room: int, seed: int = 0) -> None:
    ids = Monkey(tokenizer, seed).type(asked(tokenizer, schema), room)
    assert ids[-1] == tokenizer.special("<|im_end|>"), tokenizer.decode(ids)
    jsonschema.validate(json.loads(tokenizer.decode(ids[:-1])), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "nano_takes", "k26_takes"),
    [
        ({"type": "string", "minLength": 200}, 10, 4),
        ({"type": "string", "minLength": 200, "maxLength": 200}, 11, 7),
        ({"type": "string", "pattern": "^[a-z]{120}$"}, 16, 11),
        ({"type": "string", "minLength": 20_000}, 630, 85),
        pytest.param(
            {"type": "array", "items": {"type": "integer"}, "minItems": 1000}, 2005, 2005, marks=pytest.mark.slow
        ),
        ({"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}, 6, 6),
        ({"type": "array", "items": {"type": "array", "items": {"const": 1}, "minItems": 40}, "minItems": 9}, 760, 760),
    ],
)
def test_the_shortest_answer_is_measured_in_tokens_of_the_vocabulary(
    tokenizer: Tokenizer, schema: Any, nano_takes: int, k26_takes: int
) -> None:
    constraint = asked(tokenizer, schema)
    assert constraint.least <= (nano_takes if tokenizer.vocab_size < 10_000 else k26_takes)
    closes(tokenizer, schema, constraint.least)


@pytest.mark.parametrize("spare", [2, 12])
def test_an_answer_that_fits_is_not_closed_early(tokenizer: Tokenizer, spare: int) -> None:
    """An answer of words, closed by nothing but its own end, in a few tokens more than it takes."""
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 120}, "tags": {"type": "array", "minItems": 2}},
        "required": ["text", "tags"],
    }
    words = "the quick brown fox jumps over the lazy dog and is described again in some other words of this test "
    answer = json.dumps({"text": words * 2, "tags": ["a", "b"]})
    ids = [*tokenizer.encode(answer), tokenizer.special("<|im_end|>")]
    enforcer = Enforcer(vocabulary(tokenizer), asked(tokenizer, schema), opened=False)
    mask = np.zeros(vocabulary(tokenizer).words, np.uint32)
    for at, token in enumerate(ids):
        left = len(ids) + spare - at
        enforcer.fill(mask, left)
        assert mask[token >> 5] >> np.uint32(token & 31) & 1, f"{tokenizer.decode(ids[:at])!r} with {left} tokens left"
        assert not enforcer.tight or enforcer.settle(token, left) == token
        enforcer.advance(token)
    assert enforcer.phase is Phase.DONE


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, spare=st.sampled_from([0, 1, 6]), seed=st.integers(0, 9))
@pytest.mark.slow
def test_any_answer_is_closed_in_time(nano: Tokenizer, schema: Any, spare: int, seed: int) -> None:
    closes(nano, schema, asked(nano, schema).least + spare, seed)


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS)
def test_no_shorter_answer_than_the_shortest_is_found_by_trying(schema: Any) -> None:
    """Breadth first through a vocabulary that is small enough for it.

    Tokens that happen to be a whole string with its quotes, as '","', are not looked for, which costs two tokens each,
    nor other values that end better, as 150 before a comma where there is a token "0,".
    """
    least = asked(TINY, schema).least - 1
    found = tried(schema, least)
    assert found is None or least <= 1.3 * found + 2 + 2 * json.dumps(schema).count('"string"')


def tried(schema: Any, bound: int) -> int | None:
    """Tokens of the shortest answer below `bound` that a search of all tokens meets; None: not one of 6,000 texts."""
    known = vocabulary(TINY)
    start = known.compile(grammar_of(TINY, schema))
    states: list[tuple[int, int, int, Any]] = [(0, 0, 0, start._tokens.deep_copy())]
    seen, made = set(), 0
    while states:
        cost, length, _, state = heapq.heappop(states)
        if state.is_accepting():
            return cost
        mask = np.frombuffer(state.compute_bitmask(), np.uint8)
        for token in np.flatnonzero(np.unpackbits(mask, bitorder="little")):
            if cost + 1 >= bound or TINY.is_special(int(token)):
                continue
            child = state.deep_copy()
            child.consume_token(int(token))
            made += 1
            longer = length - len(TINY.token_bytes(int(token)))
            key = (longer, bytes(child.compute_bitmask()), child.is_accepting())
            if key not in seen:
                seen.add(key)
                heapq.heappush(states, (cost + 1, longer, made, child))
        if made > 6_000:
            return None
    return None


def test_a_deeply_nested_text_is_closed_without_a_search_for_every_token(
    nano: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that goes deeper as long as it may, and would go on at every level: a search takes up to 0.2 s there."""
    constraint = asked(nano, {"type": "array", "items": {"$ref": "#"}})
    searches, search = [], Matcher.completion
    monkeypatch.setattr(Matcher, "completion", lambda self, enough=0: searches.append(enough) or search(self, enough))
    enforcer = Enforcer(vocabulary(nano), constraint, opened=False)
    deeper, further = (nano.encode(text)[0] for text in "[,")
    mask = np.zeros(vocabulary(nano).words, np.uint32)
    for left in range(200, 0, -1):
        enforcer.fill(mask, left)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = next((t for t in (deeper, further) if t in allowed), int(allowed[0]))
        enforcer.advance(enforcer.settle(token, left) if enforcer.tight else token)
        if enforcer.phase is Phase.DONE:
            break
    assert enforcer.phase is Phase.DONE and len(searches) < 40


def test_the_choice_of_the_fewest_tokens_counts(nano: Tokenizer) -> None:
    constraint = constrain(nano, answer=AnswerFormat("choice", ["zqxjk", "negative", "function"]))
    assert constraint is not None and constraint.least == 2
    ids = Monkey(nano, 0).type(constraint, 2)
    assert nano.decode(ids) == "function<|im_end|>"


def test_a_header_is_cut_in_any_way_that_fits(tokenizer: Tokenizer) -> None:
    declared = tools({"type": "object", "properties": {}, "additionalProperties": False})
    constraint = constrain(tokenizer, tools=declared, choice=Named("tool_0"))
    assert constraint is not None
    header = tokenizer.encode("functions.tool_0:0")
    enforcer = Enforcer(vocabulary(tokenizer), constraint, opened=False)
    for name in ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"):
        enforcer.advance(tokenizer.special(name))
    left = constraint.least - 2
    mask = np.zeros(vocabulary(tokenizer).words, np.uint32)
    enforcer.fill(mask, left + 1)  # one token more than the fewest: no token is forced yet
    assert mask[header[0] >> 5] >> np.uint32(header[0] & 31) & 1
    for seed in range(4):
        for room in range(constraint.least, constraint.least + 6):
            ids = Monkey(tokenizer, seed).type(constraint, room)
            assert read(tokenizer, ids, declared)[2] == [["functions.tool_0:0", "tool_0", "{}"]]


# ---- limits: a grammar whose states multiply: llguidance stops computing masks for it after some 100 characters.


def test_an_answer_beyond_them_is_completed(nano: Tokenizer) -> None:
    constraint = asked(nano, MULTIPLYING)
    known = vocabulary(nano)
    enforcer = Enforcer(known, constraint, opened=False)
    mask = np.zeros(known.words, np.uint32)
    ids: list[int] = []
    wanted = nano.encode('{"a":"') + known.singles(b"a" * 2_000)
    for left in range(4_000, 0, -1):
        enforcer.fill(mask, left)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = wanted[len(ids)] if len(allowed) > 1 and wanted[len(ids)] in allowed else int(allowed[0])
        enforcer.advance(token)
        ids.append(token)
        if enforcer.phase is Phase.DONE:
            break
    assert 50 < len(ids) < 2_000 and ids[-1] == nano.special("<|im_end|>")
    jsonschema.validate(json.loads(nano.decode(ids[:-1])), MULTIPLYING)


def test_the_next_answer_begins_anew(nano: Tokenizer) -> None:
    known, grammar = vocabulary(nano), grammar_of(nano, MULTIPLYING)
    mask = np.zeros(known.words, np.uint32)
    for _ in range(2):
        matcher = known.compile(grammar)
        for token in nano.encode('{"a":"aaa'):
            matcher.fill(mask)
            assert matcher.advance(token)
        with pytest.raises(GrammarError, match="lexer error") as caught:
            for _ in range(2_000):
                matcher.fill(mask)
                assert matcher.advance(known.singles(b"a")[0])
        assert "\n" not in str(caught.value) and "aaa" not in str(caught.value)
        assert not known._fresh.get(("", grammar)) and not known._grown.get(("", grammar))


def test_a_text_of_which_no_end_is_found_may_go_on(nano: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    enforcer = Enforcer(vocabulary(nano), asked(nano, {"type": "string", "minLength": 50}), opened=False)
    mask = np.zeros(vocabulary(nano).words, np.uint32)
    enforcer.fill(mask, 40)
    for token in nano.encode('"x'):
        enforcer.advance(token)
    monkeypatch.setattr("perilune.grammar.matcher.completions", lambda *args: iter(()))
    monkeypatch.setattr("perilune.grammar.matcher.Matcher.takes", lambda self, tokens: False)
    for left in (9, 5, 1):
        enforcer.fill(mask, left)
        assert not enforcer.tight and mask[nano.encode("x")[0] >> 5] >> np.uint32(nano.encode("x")[0] & 31) & 1
        enforcer.advance(nano.encode("x")[0])


def test_the_fewest_tokens_of_a_text(tokenizer: Tokenizer) -> None:
    known = vocabulary(tokenizer)
    for text in (b"", b'{"name": "x"}', "é日本".encode(), "日".encode()[1:], b" " * 300, b"hello world"):
        ids = known.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text
        if text.decode(errors="replace").isprintable():
            assert len(ids) <= len(tokenizer.encode(text.decode(errors="ignore"))) + 2
    text = b'{"a":1,"b":2}'
    spaced = known.encode(b'{"a": 1, "b": 2}', frozenset({5, 8, 13}))
    assert b"".join(map(tokenizer.token_bytes, spaced)).replace(b" ", b"") == text
    assert len(spaced) <= len(known.encode(text))


def test_json_grammars_say_that_blanks_are_optional() -> None:
    assert '"item_separator": ", ?"' in json_grammar({"type": "string"})
