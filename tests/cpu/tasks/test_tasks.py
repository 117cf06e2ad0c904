"""The generated problems: their own replies pass, spoilt ones fail, splits share nothing, traces are right."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.core.errors import ConfigError
from perilune.tasks import arithmetic, documents, families, word_problems, words, working
from perilune.tasks.calls import REFUSAL
from perilune.tasks.families import (
    FAMILIES,
    build_families,
    check,
    constant_baseline,
    copy_baseline,
    problems,
    training_mix,
)
from perilune.tasks.fields import BASES, NEW_BASES
from perilune.tasks.problem import SPLITS, Answer, Problem, answer_of, assistant, belongs, partition
from perilune.tasks.words import NEW_NAMES, NEW_NOUNS, NEW_OBJECTS, NOUNS
from perilune.text.chat import ChatTemplate, next_tool_index
from perilune.text.tools import declaration, parse_tools

COUNT = 40
ALL = sorted(FAMILIES)
SPLIT_KEY = {"doc_questions": 2}  # a question's split is that of its paragraph: this many parts of the key


def drawn(name: str, split: str = "train", count: int = COUNT, *, thinking: bool = True) -> list[Problem]:
    few = name == "chat" and split != "train"
    return problems(name, split, 12 if few else count, thinking=thinking)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ALL)
def test_expected_replies_pass_and_render(name: str, split: str) -> None:
    template = ChatTemplate()
    for p in drawn(name, split):
        assert (p.family, p.split, p.thinking) == (name, split, True)
        assert belongs(p.key[: SPLIT_KEY.get(name)], split)
        assert p.reply.reasoning
        assert check(p, answer_of(p.reply)), p
        text = template.render_text(p.messages, tools=p.tools, thinking=True)
        assert text.endswith("<|im_assistant|>assistant<|im_middle|><think>")
        assert len(text) < 5000, "prompts must fit the model's context"


@pytest.mark.parametrize("name", ALL)
def test_problems_are_reproducible_and_distinct(name: str) -> None:
    first = drawn(name)
    assert first == drawn(name)
    assert len({p.key for p in first}) == len(first)
    assert first != problems(name, "train", len(first), seed=1, thinking=True)
    silent = drawn(name, thinking=False)
    assert [replace(p, thinking=False, reply=replace(p.reply, reasoning="")) for p in first] == silent


@pytest.mark.parametrize("name", ALL)
def test_splits_share_no_key(name: str) -> None:
    keys = {s: {p.key[: SPLIT_KEY.get(name)] for p in drawn(name, s, 100)} for s in SPLITS}
    assert not keys["train"] & keys["heldout"]
    assert not keys["train"] & keys["structural"]
    assert not keys["heldout"] & keys["structural"]
    assert not keys["train"] & keys["wide"] and not keys["structural"] & keys["wide"]


def test_one_key_in_twenty_is_held_out() -> None:
    counts = Counter(partition(("+", a, 7)) for a in range(20_000))
    assert 450 < counts["heldout"] < 550
    assert 450 < counts["structural"] < 550


@pytest.mark.parametrize("name", ALL)
def test_spoilt_answers_fail(name: str) -> None:
    for p in drawn(name) + drawn(name, "structural"):
        right = answer_of(p.reply)
        assert not check(p, Answer(""))
        assert not check(p, replace(right, tool_calls=(*right.tool_calls, ("extra_tool", "{}"))))
        if right.tool_calls:
            (tool, arguments), *rest = right.tool_calls
            assert not check(p, replace(right, tool_calls=tuple(rest)))
            spoilt = ["{}", spoilt_value(arguments)] if arguments != "{}" else []
            for wrong in ((tool + "x", arguments), *[(tool, a) for a in (*spoilt, arguments[:-1], "[1]")]):
                assert not check(p, replace(right, tool_calls=(wrong, *rest))), wrong
            assert check(p, replace(right, tool_calls=right.tool_calls[::-1])), "the order of calls is free"
        elif name == "json_extract":
            assert check(p, Answer(json.dumps(json.loads(right.content), indent=3, sort_keys=True)))
            for content in (spoilt_value(right.content), right.content[:-1], f"[{right.content}]", "{}"):
                assert not check(p, Answer(content)), content
        else:
            digits = [m.start() for m in re.finditer(r"\d", right.content)]
            at = digits[-1] if digits else len(right.content) // 2
            other = str((int(right.content[at]) + 1) % 10) if digits else "~"
            assert not check(p, Answer(right.content[:at] + other + right.content[at + 1 :]))


def spoilt_value(arguments: str) -> str:
    data = json.loads(arguments)
    key = sorted(data)[0]
    value = data[key]
    data[key] = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else [value, "x"]
    return json.dumps(data)


def test_json_types_are_told_apart() -> None:
    p = next(
        p
        for p in drawn("json_extract", count=200)
        if any(type(v) is bool for v in json.loads(p.reply.content).values())
    )
    assert not check(p, Answer(p.reply.content.replace("true", "1").replace("false", "0")))


# ---- structure -----------------------------------------------------------------------------------------------------


def shape(form: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w\\\}", r"\\d+", re.escape(form)), re.IGNORECASE)


def test_structural_sums_have_unseen_lengths_or_wordings() -> None:
    new = [shape(f.rstrip("?.")) for f in arithmetic.NEW_ADD_FORMS + arithmetic.NEW_SUBTRACT_FORMS]
    kinds: Counter[bool] = Counter()
    for p in drawn("add_sub", "structural", 200):
        assert {len(str(n)) for n in p.key[1:]} <= {1, 3, 4, 5}
        unseen = working.unseen_lengths(*p.key[1:])
        reworded = any(f.match(p.messages[0]["content"]) for f in new)
        assert unseen or reworded, p.messages
        kinds[unseen] += 1
    assert min(kinds.values()) > 60
    for p in drawn("add_sub", "train", 3000):
        assert not working.unseen_lengths(*p.key[1:])
        assert not any(f.match(p.messages[0]["content"]) for f in new), p.messages
    assert {len(str(n)) for p in drawn("add_sub", "heldout", 200) for n in p.key[1:]} == {3, 4}


def test_no_training_trace_shows_an_unseen_length_pair() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        p = training_mix(rng)
        if p.family == "doc_questions":  # their answers are telephone numbers at times: 555-4984
            continue
        for a, b in re.findall(r"(?m)^(\d+)[-+](\d+)$", p.reply.reasoning):
            assert not working.unseen_lengths(int(a), int(b)), (a, b)


def test_structural_words_do_not_occur_in_training() -> None:
    assert not set(NOUNS) & set(NEW_NOUNS)
    assert not {b for names in BASES.values() for b in names} & {b for names in NEW_BASES.values() for b in names}
    assert not set(word_problems.STORIES) & set(word_problems.NEW_STORIES)
    things = re.compile(r"\b(" + "|".join((*NEW_OBJECTS, *NEW_NAMES)) + r")\b")
    assert not any(things.search(p.messages[0]["content"]) for p in drawn("word_problems", "train", 1000))
    # The others have made-up names and a thing that their story fixes.
    assert sum(bool(things.search(p.messages[0]["content"])) for p in drawn("word_problems", "structural", 100)) > 90
    nouns = re.compile(r"\b(" + "|".join(NEW_NOUNS) + r")\b")
    for p in drawn("tool_call", "train", 300):
        assert not nouns.search(declaration(parse_tools(p.tools)).lower().replace("_", " "))
    for p in drawn("tool_call", "structural"):
        assert nouns.search(p.messages[0]["content"].lower())
    new_keys = re.compile(r"(^|_|[a-z])(" + "|".join(b for names in NEW_BASES.values() for b in names) + r")$")
    for p in drawn("json_extract", "train", 300):
        assert not any(new_keys.search(key.lower()) for key in json.loads(p.reply.content) if "_" in key), p.reply


# ---- traces ----------------------------------------------------------------------------------------------------------


def test_traces_are_written_as_documented() -> None:
    assert working.add_trace(3471, 589).split("\n") == [
        "3471+589", "d3c4b7a1", "c5b8a9", "a1+9+0=10", "b7+8+1=16", "c4+5+1=10", "d3+0+1=04", "d4c0b6a0", "=4060",
    ]  # fmt: skip
    assert working.subtract_trace(523, 178).split("\n") == [
        "523-178", "c5b2a3", "c1b7a8", "5>1", "a3-8-0=-5+10=5", "b2-7-1=-6+10=4", "c5-1-1=3", "c3b4a5", "=345",
    ]  # fmt: skip
    assert working.subtract_trace(52, 178).split("\n")[3:5] == ["b<c", "178-52"]
    assert working.subtract_trace(52, 178).endswith("=-126")
    assert working.multiply_trace(789, 6).split("\n") == [
        "789*6", "c7b8a9", "a9*6+0=54", "b8*6+5=53", "c7*6+5=47", "d4c7b3a4", "=4734",
    ]  # fmt: skip
    assert working.solve(["(", 12, "+", 30, ")", "*", 3]) == (
        126,
        [("+", 12, 30, "(12+30)*3"), ("*", 42, 3, "42*3")],
    )
    assert working.solve([5, "-", 7]) is None
    assert working.solve([5, "+", 7, "*", 2, "-", 4])[0] == 15  # type: ignore[index]


@pytest.mark.parametrize("name", ["add_sub", "arithmetic", "word_problems"])
def test_every_column_of_a_trace_is_right(name: str) -> None:
    columns = 0
    for p in drawn(name, "train", 300):
        lines = p.reply.reasoning.split("\n")
        for line in lines:
            if m := re.fullmatch(r"[a-j]([-+*\d]+)=(-?\d+)(?:\+10=(\d))?", line):
                columns += 1
                assert eval(m[1]) == int(m[2]), line
                assert m[3] is None or int(m[3]) == int(m[2]) + 10
        numbers = re.findall(r"-?\d+", p.reply.content)
        assert lines[-1].endswith(numbers[-1] if name != "word_problems" else f"={numbers[0]}") or name == "arithmetic"
    assert columns > 300


def test_multiples_of_a_divisor_of_two_digits_are_written_out() -> None:
    assert working.with_multiples(working.divide_trace(391, 17)).split("\n") == [
        "391/17", "c3b9a1", ",".join([f"{i}:{17 * i}" for i in range(1, 10)]), "c3/17=0r3", "b39/17=2r5", "a51/17=3r0",
        "c0b2a3", "=23",
    ]  # fmt: skip
    assert working.with_multiples(working.divide_trace(84, 12)) == working.divide_trace(84, 12)


def test_a_result_is_worked_on_in_the_next_turn() -> None:
    seen = 0
    for p in drawn("add_sub", "train", 400) + drawn("arithmetic", "train", 400):
        if len(p.messages) > 1:
            said = [m["content"] for m in p.messages]
            first = re.findall(r"\d+", p.reply.content)[0]
            assert re.findall(r"\d+", said[-2])[-1] == first or first in said[-1], said
            seen += 1
    assert seen > 40


def test_the_answers_of_expressions_are_pythons() -> None:
    for p in drawn("word_problems", "heldout") + drawn("arithmetic", "train", 200):
        if p.key[0] == "expression":
            assert int(re.findall(r"-?\d+", p.reply.content)[-1]) == eval(p.key[1])


def test_calls_are_traced_in_declared_order_and_fit_their_tool() -> None:
    for p in drawn("tool_call") + drawn("tool_call", "structural"):
        if p.reply.content:  # a refusal: none of the tools fits
            continue
        (call,) = p.reply.tool_calls
        (tool,) = [t["function"] for t in p.tools if t["function"]["name"] == call.name]
        properties = tool["parameters"]["properties"]
        assert set(tool["parameters"]["required"]) <= set(call.arguments) <= set(properties)
        written = re.findall(r"(?m)^  (\w+)\??: ", declaration(parse_tools([{"type": "function", "function": tool}])))
        traced = p.reply.reasoning.partition(f"\n{call.name}\n")[2]  # behind the quoted words and the tool's name
        assert re.findall(r"(?m)^(\w+): ", traced) == written
        assert [n for n in written if n in call.arguments] == list(call.arguments)
        for name, value in call.arguments.items():
            kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
            assert isinstance(value, kinds[properties[name]["type"]])  # an amount of money may be whole
            assert isinstance(value, bool) == (properties[name]["type"] == "boolean")
            assert value in properties[name].get("enum", [value])


def test_tool_conversations() -> None:
    seen: Counter[str] = Counter()
    for p in drawn("tools_multi", "train", 600):
        names = [t["function"]["name"] for t in p.tools]
        assert len(set(names)) == len(names)
        assert {c.name for c in p.reply.tool_calls} <= set(names)
        results = [m for m in p.messages if m["role"] == "tool"]
        seen[f"{len(p.reply.tool_calls)} calls"] += 1
        seen["refusal"] += p.reply.content == REFUSAL
        seen["result"] += bool(results) and not p.reply.tool_calls
        for m in results:
            assert re.fullmatch(r"functions\.[\w.-]+:\d+", m["tool_call_id"])
        if results and p.reply.tool_calls:
            seen["follow-up"] += 1
            turn = assistant(p.reply, next_tool_index(p.messages))
            assert turn["tool_calls"][0]["id"].endswith(f":{len(results)}")
    assert min(seen[k] for k in ("0 calls", "1 calls", "2 calls", "3 calls", "refusal", "result", "follow-up")) > 10


# ---- documents -------------------------------------------------------------------------------------------------------

RST = """
:mod:`queue9` --- Queues
========================

This module provides queues. See :func:`~queue9.put` and `the guide <http://x>`_; use ``None`` or *nothing* at all here.

.. function:: put(item, block=True, size=len(a))

   Put *item* into the queue. It blocks while the queue is full, unless
   :py:class:`Full` was chosen before.

   .. versionadded:: 3.2

>>> put(1)
"""


def test_passages_of_documentation(tmp_path: Path) -> None:
    file = tmp_path / "queue9.rst.txt"
    file.write_text(RST)
    found = documents.passages([file])
    assert found == [
        "This module provides queues. See queue9.put and the guide; use None or nothing at all here.",
        "put(item, block=True, size=len(a))\nPut item into the queue. It blocks while the queue is full, unless Full "
        "was chosen before. Added in version 3.2.",
    ]
    code = tmp_path / "a.py"
    code.write_text("def first():\n    return 1\n\n\ndef second():\n    return 22\n")
    assert documents.passages([code], min_chars=10) == ["def first():\n    return 1", "def second():\n    return 22"]
    assert documents.passages([code], min_chars=1, max_chars=12) == ["def first():", "    return 1"]
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.rst"):
        documents.passages([tmp_path / "nothing.rst"])


def test_a_directive_inside_a_comment_is_no_documentation(tmp_path: Path) -> None:
    file = tmp_path / "threads.rst.txt"
    file.write_text("..\n   function:: old(a)\n\nThreads share their memory.\n")
    assert documents.passages([file], min_chars=10) == ["Threads share their memory."]


def test_docstrings_keep_their_signature(tmp_path: Path) -> None:
    file = tmp_path / "shelf.py"
    file.write_text(
        "class Shelf:\n"
        "    def put(self, book: str, row: int = 3, *, lock=None) -> None:\n"
        '        """Put the book into\n        the row, which must not be full.\n\n        More."""\n'
        "    def _hidden(self):\n"
        '        """Nobody asks about this one, however long its text may be."""\n'
    )
    assert documents.docstrings([file]) == [
        "shelf.Shelf.put(book, row=3, *, lock=None)\nPut the book into the row, which must not be full."
    ]
    file.write_text("def (")
    with pytest.raises(ConfigError, match=r"cannot read .*shelf\.py as Python"):
        documents.docstrings([file])


def test_questions_are_asked_about_given_passages_of_their_split_only() -> None:
    given = [
        f"lib{i}.call_{i}(a, size={i}, *, mode='x')\nReturn the number {i} of it. Added in version 3.{i}."
        for i in range(900)
    ]
    families = build_families(given)
    for split in SPLITS:
        asked = problems(
            "doc_questions", split, 720 if split in ("train", "wide") else 200, thinking=False, families=families
        )
        texts = [g for p in asked for g in given if g.split("(")[0] + "(a" in p.messages[0]["content"]]
        assert len(texts) > 60
        assert {documents.passage_split(t) for t in texts} == {"heldout" if split == "wide" else split}
    for p in asked:
        if "signature" not in p.key:
            assert p.reply.content.rstrip(".") in p.messages[0]["content"]


# ---- baselines and the mix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ALL if FAMILIES[n].evaluated])
def test_baselines_are_far_from_right(name: str) -> None:
    asked = drawn(name, "heldout")
    assert sum(check(p, constant_baseline(name)) for p in asked) < 0.4 * len(asked)
    assert sum(check(p, copy_baseline(p)) for p in asked) < 0.4 * len(asked)


def test_the_mix() -> None:
    template, families = ChatTemplate(), Counter[str]()
    thinking = joined = systems = 0
    rng = random.Random(11)
    for _ in range(2000):
        p = training_mix(rng)
        families[p.family] += 1
        thinking += p.thinking
        assert p.split == "train" and bool(p.reply.reasoning) == p.thinking
        assert check(p, answer_of(p.reply))
        text = template.render_text(
            [*p.messages, assistant(p.reply, next_tool_index(p.messages))], tools=p.tools, add_generation_prompt=False
        )
        joined += text.count("<|im_user|>") > 1
        systems += p.messages[0]["role"] == "system"
    assert set(families) == set(FAMILIES)
    assert 0.6 < thinking / 2000 < 0.7
    assert 0.1 < joined / 2000 < 0.2
    assert 0.1 < systems / 2000 < 0.2
    assert training_mix(random.Random(3)) == training_mix(random.Random(3))


def test_wrong_requests_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown task family 'poems': choose from add_sub"):
        problems("poems", "train", 1, thinking=True)
    with pytest.raises(ConfigError, match="unknown split 'test': choose from train, heldout, structural"):
        problems("add_sub", "test", 1, thinking=True)
    with pytest.raises(ConfigError, match=r"chat has only \d+ distinct structural problems, not 5000"):
        problems("chat", "structural", 5000, thinking=True)


def test_weights_are_shares() -> None:
    assert sum(f.weight for f in FAMILIES.values()) == pytest.approx(1.0)


def test_learnt_words_are_used_and_structural_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_learnt", ())
    plain = [words.made_up(random.Random(seed)) for seed in range(300)]
    kept = ["inscription", "insured", "apricots", "orchard", "dexter"]
    assert families.learn_words(["alpha omega inscription", *kept, "apricot dexters orchards"]) == 2
    learnt = [words.made_up(random.Random(seed)) for seed in range(300)]
    assert {"alpha", "omega"} <= set(learnt) and not set(plain) & {"alpha", "omega"}
    assert not any(word in made for made in learnt for word in (*kept, "apricot"))
