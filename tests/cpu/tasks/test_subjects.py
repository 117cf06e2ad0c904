"""Texts composed from clauses: what they state, and what is asked of them, read back by rules of this file."""

import json
import random
import re
from typing import Any

import pytest

from perilune.tasks import calls, smalltalk
from perilune.tasks.composed import briefs, entries, paragraphs, procedures, slips, subjects
from perilune.tasks.composed.notices import notice
from perilune.tasks.fields import NEW_BASES
from perilune.tasks.wordings import in_words


def in_text(value: Any, text: str) -> bool:
    """Whether a text has the value, as people may write it."""
    if isinstance(value, list):
        return all(in_text(v, text) for v in value)
    if isinstance(value, str):
        return value in text
    said = {str(value), f"{value:,}", f"{value:.2f}", f"{value:.1f}"}
    if isinstance(value, int):
        said.add(in_words(abs(value)))
    return any(re.search(rf"(?<![\d.]){re.escape(s)}(?!\d)", text.lower()) for s in said)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


def test_domains_can_be_read_and_their_keys_are_not_those_kept_for_structural_problems() -> None:
    kept = {base for bases in NEW_BASES.values() for base in bases}
    rng = random.Random(1)
    assert len(subjects.DOMAINS) > 20
    for domain in subjects.DOMAINS:
        for at in domain.attributes:
            assert at.predicates and at.questions and at.keys, (domain.name, at.slot)
            assert not kept & {*at.keys, *domain.keys}
            one = subjects.subject(rng, domain, [at])
            for clause in (*at.predicates, *at.notes):
                assert clause.span in clause.text and "[" not in clause.text
            assert one.facts[at][1] in subjects.described(rng, one)[0].text


def test_slips_have_no_key_twice() -> None:
    for one in slips.SLIPS + slips.NOTICES:
        keys = [k for slots, _ in one.parts for names, _ in slots for k in names if k]
        assert len({*keys}) == len(keys) and not {*keys} & {base for bases in NEW_BASES.values() for base in bases}


def test_sentences_state_every_value_once_and_name_their_subject_first() -> None:
    rng = random.Random(2)
    for _ in range(300):
        many = subjects.subjects(rng, 2)
        for at in set(many[0].facts) & set(many[1].facts):
            assert many[0].facts[at][1] != many[1].facts[at][1]
        for one in many:
            made = subjects.described(rng, one)
            assert one.name[1] in made[0].text
            stated = [at for s in made for at in s.stated]
            assert sorted(map(id, stated)) == sorted(map(id, one.facts))
            for s in made:
                assert all(shown in s.text and one.facts[at][1] in shown for at, shown in s.stated.items())


def test_tables_and_lines_are_read_back() -> None:
    rng = random.Random(3)
    for _ in range(100):
        many = subjects.subjects(rng, 2)
        header, *rows = subjects.table(rng, many).split("\n")
        assert len(rows) == 2
        for one, row in zip(many, rows):
            cell = next(c for c in subjects._CELLS if c in header or c == subjects._CELLS[-1])
            if not any(cell.strip() in shown for _, shown in one.facts.values()):
                assert row.split(cell)[1:] == [shown for _, shown in one.facts.values()] or len(one.facts) < 2
        text = subjects.listed_lines(rng, many[0])
        assert all(shown in text for _, shown in many[0].facts.values())


def test_objects_hold_what_the_text_says_under_keys_that_the_prompt_names() -> None:
    rng = random.Random(4)
    kinds = set()
    for _ in range(1500):
        messages, trace, made = entries.entry(rng)
        text = "\n".join(m["content"] for m in messages)
        found = leaves(made)
        nulls = found.count(None)
        assert all(v is None or isinstance(v, bool) or in_text(v, text) for v in found), (text, made)
        for key in made:
            assert key in text, (key, text)
        assert len(trace.split("\n")) == len(found)
        assert trace.count(": null") == nulls
        nested = [v for v in made.values() if isinstance(v, dict | list)]
        kinds.add("null" if nulls else "nested" if nested else "flat")
        assert json.loads(json.dumps(made)) == made
    assert kinds == {"null", "nested", "flat"}


def test_notices_ask_for_keys_whose_values_are_in_the_text() -> None:
    rng = random.Random(9)
    for _ in range(2000):
        text, found = slips.slip(rng, rng.choice(slips.NOTICES), rng)
        messages, trace, made = notice(rng, text, found)
        asked = "".join([m["content"] for m in messages])
        assert all(key in asked for key in made) and len(trace.split("\n")) == len(leaves(made)), (asked, made)
        assert all(kind[0] == "~" or not there or in_text(v, text) for _, v, there, kind in found), (text, found)


def test_only_the_subject_that_is_asked_for_is_in_the_object() -> None:
    rng = random.Random(5)
    seen = 0
    for _ in range(18000):
        messages, _, made = entries.entry(rng)
        text = "\n".join(m["content"] for m in messages)
        only = re.search(r"(?:I mean|It is about) (.+?)\.", text)
        row = only and re.search(rf"(?m)^{re.escape(only[1])} \| .*$", text)
        if row and not any(isinstance(v, dict | list) for v in made.values()):
            seen += 1
            assert all(v is None or in_text(v, row[0]) for v in made.values()), (text, made)
    assert seen > 3


# ---- questions -------------------------------------------------------------------------------------------------------


def test_scenes_ask_for_what_they_say() -> None:
    assert len(paragraphs.SCENES) > 40
    for form, asked in (*paragraphs.SCENES, *paragraphs.REPORTS):
        places = {"sort", *re.findall(r"\{(\w+)\}", form)}
        assert len(asked) > 1, form
        for question, answer in asked:
            assert set(re.findall(r"\{(\w+)\}", question + answer)) <= places, question
            assert not set(re.findall(r"\{\w+\}", answer)) & set(re.findall(r"\{\w+\}", question)), question
    rng = random.Random(6)
    bought = 0
    for forms in (paragraphs.SCENES, paragraphs.REPORTS) * 300:
        text, found = paragraphs.scene(rng, set(), forms)
        assert not re.search(r"[{\[]", text)
        only = re.search(r"only had (.*), so", text)
        bought += bool(only)
        for question, trace, answer in found:
            assert trace in text and question.endswith("?")
            assert answer in trace, (text, question, answer)
            assert not (only and question.endswith(("get?", "buy?"))) or answer == only[1]
    assert bought > 5


def test_paragraphs_hold_their_answer_in_the_sentence_that_the_thought_quotes() -> None:
    rng = random.Random(7)
    reversed_, meant = 0, 0
    for _ in range(4000):
        made = paragraphs.paragraph(rng)
        quoted, *rest = made.trace.split("\n")
        assert quoted in made.text and made.answer in made.text
        assert made.answer.lower() in made.trace.lower(), made
        for line in rest:  # a pronoun: the quoted sentence has it and not the name
            pronoun, _, name = line.partition(": ")
            assert re.search(rf"\b{pronoun}\b", quoted, re.IGNORECASE) and name not in quoted
            assert 0 <= made.text.lower().index(name.lower()) < made.text.index(quoted)
        meant += bool(rest)
        reversed_ += made.question.startswith("Who ") or made.question.startswith("Which ")
    assert meant > 50 and reversed_ > 100


def test_orders_and_counts_of_short_texts_are_as_their_clauses_say() -> None:
    rng = random.Random(15)
    ups, kin = (
        ("tall", "old", "heav", "fast", "larg"),
        "(my|our|his|her|the new) (friend|neighbour|boss|cousin|colleague) ",
    )
    ordered = counted = 0
    for _ in range(3000):
        made = briefs.brief(rng)
        assert made.trace.endswith(f": {made.answer}") and not re.search(r"[{}<>|]", made.text + made.question)
        clauses, answer = re.split(r"[.;]\s?|, (?:and |while )?| while | and ", made.text.lower()), made.answer.lower()
        end = re.search(r"the (?:most|(\w+?)i?est\b)", made.question.lower())
        said = [re.sub(f"^{kin}", "", one) for one in clauses]
        if end is None or " > " not in made.trace or answer in ("yes", "no"):
            continue
        pairs = [m for c in said if (m := re.fullmatch(r"(.+?) is (\w+?)i?er than (.+)", c))]
        numbers = [m for c in said if (m := re.fullmatch(r"(\D+?) (?:won|sold|has|got|costs|is|needed) (\d+)\b.*", c))]
        if len(pairs) > 1:
            above = [(m[1], m[3])[:: 1 if m[2] in ups else -1] for m in pairs]
            assert {p for pair in above for p in pair} - {pair[end[1] in ups] for pair in above} == {answer}, made
            ordered += 1
        elif len(numbers) == made.trace.count(">") + 1:
            best = min if end[1] in ("cheap", "young", "fast", "few") else max
            assert best(numbers, key=lambda m: int(m[2]))[1] == answer, made
            counted += 1
    assert ordered > 100 and counted > 50, (ordered, counted)


# ---- procedures ------------------------------------------------------------------------------------------------------

_CODE_LINE = re.compile(
    r"\w+(\[.*\])? [-+*/]*= .*|\w+, \w+ = .*|(for|while|if|elif|else|def)\b.*:|    .*|\w+\.\w+\(.*\)|print\(.*\)|"
)


def test_code_gives_what_python_gives(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(8)
    ran = 0
    for _ in range(1200):
        _, question, trace, answer = procedures.procedure(rng)
        code = "\n".join([line for line in question.split("\n") if _CODE_LINE.fullmatch(line)])
        if "print(" in code and "{" not in code.split("print(")[0].split("=")[0]:
            exec(code, {})
            assert capsys.readouterr().out.strip() == answer, question
            ran += 1
        assert trace and answer
        for a, sign, b, c in re.findall(r"(?:^|[:\n])(-?\d+)([-+*/])(\d+)=(-?\d+)", trace):
            assert eval(f"{a}{sign.replace('/', '//')}{b}") == int(c)
    assert ran > 600


def test_sentences_name_the_numbers_of_their_steps() -> None:
    rng = random.Random(9)
    for _ in range(300):
        start, steps = procedures._steps(rng)
        assert procedures._run(start, steps)[1]
        for text in (procedures._recipe(rng, start, steps), procedures._event(rng, start, steps)):
            assert "{" not in text
            for sign, k in re.findall(r"\('([-+*/])', (\d+)\)", str(steps)):
                words = {2: "twi|double|hal|two", 3: "tripl|three", 1: "one"}.get(int(k), in_words(int(k)))
                assert re.search(rf"\b{k}\b|{words}", text, re.IGNORECASE), (text, sign, k)


def test_simple_recipes_are_worked_from_their_words_alone() -> None:
    signs = {"add": "+", "increase": "+", "put": "+", "count": "+", "raise": "+", "plus": "+", "take away": "-",
             "subtract": "-", "decrease": "-", "remove": "-", "lower": "-", "minus": "-", "multiply": "*",
        "times": "*",
             "double": "*", "triple": "*", "divide": "/", "halve": "/"}  # fmt: skip
    rng = random.Random(10)
    worked = 0
    for _ in range(2500):
        start, steps = procedures._steps(rng)
        if any(kind != "do" for kind, *_ in steps):
            continue
        text = procedures._recipe(rng, start, steps)
        parts = text.lower().split(". ")
        if len(parts) != len(steps) + 2 or not re.fullmatch(r".*\b\d+.*", parts[0]) or "\n" in text:
            continue
        value = int(re.findall(r"\d+", parts[0])[-1])
        for part in parts[1:-1]:
            verb = next((v for v in signs if part.startswith(v)), None)
            k = 2 if part.startswith(("double", "halve")) else 3 if part.startswith("triple") else None
            k = k or next(iter(map(int, re.findall(r"\d+", part))), None)
            if verb is None or k is None or "more" in part or "parts" in part:
                break
            value = {"+": value + k, "-": value - k, "*": value * k, "/": value // k}[signs[verb]]
        else:
            worked += 1
            assert value == procedures._run(start, steps)[0], text
    assert worked > 100


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_the_same_is_asked_again_with_one_other_value() -> None:
    rng = random.Random(11)
    for _ in range(80):
        p = calls._again(rng, "train", thinking=True)
        before = json.loads(p.messages[1]["tool_calls"][0]["function"]["arguments"])
        (call,) = p.reply.tool_calls
        changed = [k for k in call.arguments if call.arguments[k] != before[k]]
        assert (
            call.name == p.messages[1]["tool_calls"][0]["function"]["name"] and before.keys() == call.arguments.keys()
        )
        assert len(changed) == 1 and str(call.arguments[changed[0]]) in p.messages[-1]["content"]
        first = before[changed[0]]
        code = re.fullmatch(r"[A-Z]{2,3}|[a-z]{2}|\d\d:\d\d|\d{4}-\d\d-\d\d", str(first))  # converted
        assert in_text(first, p.messages[0]["content"]) or code, first


def test_what_is_not_wanted_is_declared_and_not_called() -> None:
    rng = random.Random(12)
    for _ in range(80):
        p = calls._contrast(rng, "train", thinking=True)
        names = [tool["function"]["name"] for tool in p.tools]
        assert len(names) > 1 and [c.name for c in p.reply.tool_calls] == [
            n for n in names if n == p.reply.tool_calls[0].name
        ]


def test_small_talk_needs_no_tool_and_gets_the_answer_it_gets_without_tools() -> None:
    rng = random.Random(13)
    answers = {content for _, content, *_ in smalltalk.TALK}
    for _ in range(50):
        p = calls._talk(rng, "train", thinking=True)
        assert p.tools and not p.reply.tool_calls and p.reply.content in answers


def test_lists_of_requests_have_a_row_for_each() -> None:
    rng = random.Random(14)
    texts = ["Weather in Oslo?", "Set a timer for 3 minutes.", "Call Anna."]
    for count in (2, 3):
        for _ in range(40):
            made = calls._rows(rng, texts[:count], [])
            rows = [line for line in made.split("\n") if re.match(r"[-*(\d]", line)]
            assert len(rows) == count
            assert all(text[1:] in row for text, row in zip(texts, rows))
