"""Problems that are composed: paragraphs of clauses, mentions beside any word, instructions."""

import json
import random
import re
from collections.abc import Callable

from perilune.tasks import tools
from perilune.tasks.arithmetic import drawn_numbers
from perilune.tasks.composed import accounts, bills, findings, instructions, mentions, plans, school, sums, tales, turns
from perilune.tasks.composed.expressions import asked
from perilune.tasks.fields import NEW_BASES
from perilune.tasks.working import divide_trace, signed_trace


def test_paragraphs_of_clauses_answer_once() -> None:
    rng = random.Random(11)
    asked: set[str] = set()
    invented = 0
    for _ in range(3000):
        text, question, answer, line = accounts.passage(rng)
        assert text.lower().count(answer.lower()) == 1 and answer in text, (text, answer)
        quoted, *meant = line.split("\n")
        assert quoted.lower() in text.lower(), (text, line)
        assert answer.lower() in line.lower() or meant, (text, answer, line)
        assert not re.search(r"[{}]|  | ,|,\.", text + question), (text, question)
        asked.update(w for w in ("who", "where", "when", "why", "how many", "whom") if w in question.lower())
        invented += "?" not in question
    assert len(asked) == 6 and invented > 200


def test_a_question_for_the_subject_repeats_what_tells_it_from_others() -> None:
    rng = random.Random(12)
    seen = 0
    for _ in range(4000):
        made = accounts.narrated(rng)
        if made is None or not made[1].lower().startswith("who "):
            continue
        text, question, answer, _ = made
        verb = question.split()[1]
        sentences = [s for s in re.split(r"[.;]|, (?:and|but|while) ", text) if re.search(rf"\b{verb}\b", s)]
        rest = " ".join(question.rstrip("?").split()[2:])
        assert len(sentences) < 2 or rest, (text, question, answer)
        seen += 1
    assert seen > 150


def test_mentions_stand_beside_the_word_of_their_key() -> None:
    rng = random.Random(13)
    kept = tuple(base.replace("_", " ") for bases in NEW_BASES.values() for base in bases)
    kinds, told = set(), {*mentions._SORTS, *[f"{be}{row[0]}" for row in mentions._STATES for be in ("", "is ")]}
    for _ in range(2000):
        stated = mentions.mentions(rng)
        text = mentions.text_of(rng, stated)
        assert len(stated) > 1 and len({one.key for one in stated}) == len(stated)
        for one in stated:
            kinds.add(type(one.value))
            assert one.text[1:] in text and not one.key.endswith(kept), (text, one)
            assert one.key in told or any(word.rstrip("s") in one.text.lower() for word in one.key.lower().split()), one
            if isinstance(one.value, str):
                assert one.value in text, (text, one)
    assert kinds == {str, int, float, bool, list}


def test_flags_say_what_they_are() -> None:
    rng = random.Random(14)
    denied = re.compile(r"\b(no|not|without|nothing|missing|lacks)\b")
    for _ in range(1000):
        one = mentions._flag(rng)
        assert bool(denied.search(one.text)) is not one.value, one


def test_plans_say_each_number_once_and_turns_answer_once() -> None:
    rng = random.Random(17)
    for _ in range(3000):
        pattern, text, unit = plans.plan(rng)
        places = [c.lower() for c in re.findall(r"{([a-kA-K])}", text)]
        assert sorted(places) == sorted(re.findall("[a-z]", pattern)), (pattern, text)
        assert "<" not in text and unit, text
        if made := turns.turned(rng):
            assert made[2] in made[0] and made[3] in made[0] and "{" not in made[0] + made[1], made


def test_instructions_are_carried_out_right() -> None:
    """The problems with the operation in their key: worked again here."""
    rng = random.Random(15)
    done: dict[str, Callable[[str], str]] = {
        "reverse": lambda w: w[::-1], "length": lambda w: str(len(w)), "upper": str.upper, "twice": lambda w: w * 2,
        "vowels": lambda w: str(len(re.findall("[aeiou]", w))), "drop vowels": lambda w: re.sub("[aeiou]", "", w),
        "consonants": lambda w: str(len(re.findall("[^aeiou]", w))), "swap": lambda w: w[-1] + w[1:-1] + w[0],
        "last": lambda w: w[-1], "capital": str.capitalize, "upper back": lambda w: w[::-1].upper(),
        "cut both": lambda w: w[1:-1], "spaced": " ".join, "dashed": "-".join,
        "same": lambda w: "yes" if w == w[::-1] else "no", "+distinct": lambda w: str(len(set(w))),
        "+letters": lambda w: "".join(sorted(w)), "+once": lambda w: "".join(dict.fromkeys(w)),
    }  # fmt: skip
    lists: dict[str, Callable[[list[str]], list[str]]] = {
        "sort": lambda x: sorted(x, key=int), "down": lambda x: sorted(x, key=int, reverse=True), "alphabet": sorted,
        "reverse": lambda x: x[::-1], "unique": lambda x: list(dict.fromkeys(x)),
        "by length": lambda x: sorted(x, key=len), "evens": lambda x: [n for n in x if int(n) % 2 == 0],
        "odds": lambda x: [n for n in x if int(n) % 2], "double": lambda x: [str(2 * int(n)) for n in x],
        "z to a": lambda x: sorted(x, reverse=True), "two": lambda x: x[:2],
        "swap ends": lambda x: [x[-1], *x[1:-1], x[0]], "+distinct": lambda x: list(dict.fromkeys(x)),
    }  # fmt: skip
    singles: dict[str, Callable[[list[str]], str]] = {"sum": lambda x: str(sum(map(int, x))),
        "max": lambda x: max(x, key=int), "count": lambda x: str(len(x)),
        "longest": lambda x: max(x, key=len), "glue": "".join, "first of all": min,
        "spread": lambda x: str(max(map(int, x)) - min(map(int, x))),
        "+single": lambda x: min(x, key=x.count), "+most": lambda x: max(x, key=x.count)}  # fmt: skip
    lines: dict[str, Callable[[list[str]], str]] = {"words": lambda x: str(len(x)), "last": lambda x: x[-1],
        "turned": lambda x: " ".join(x[::-1]), "second": lambda x: sorted(x, key=len)[-2],
        "upper": lambda x: " ".join(x).upper()}  # fmt: skip
    seen = set()
    for _ in range(12000):
        (kind, name, *given), question, trace, answer = instructions.instruction(rng)
        if kind.startswith("more "):
            kind, name = kind[5:], f"+{name}"
        assert trace and answer and "{" not in question.replace("{w}", "x"), question
        if kind == "letters":
            assert given[0] in question
            if name in done:
                seen.add(name)
                assert done[name](given[0]) == answer, (question, answer)
        elif kind == "line" and name in lines:
            seen.add(f"line {name}")
            assert given[0] in question and lines[name](given[0].split()) == answer, (question, answer)
        elif kind == "items":
            assert all(item in question for item in given[:-1])
            if name in lists:
                seen.add(name)
                assert re.findall(r"[\w-]+", answer) == lists[name](given[:-1]), (question, answer)
            elif name in singles:
                seen.add(name)
                assert answer == singles[name](given[:-1]), (question, answer)
    assert seen == {*done, *lists, *singles, *[f"line {name}" for name in lines]}


def test_described_expressions_are_worked_right() -> None:
    rng = random.Random(16)
    kinds = set()
    for _ in range(4000):
        key, question, trace, content = sums.more(rng)
        answer = int(re.findall(r"-?\d+", content)[-1])
        kinds.add(key[0])
        assert trace() and "{" not in question
        if key[0] == "expression":
            assert eval(key[1]) == answer, (question, content)
        elif key[0] == "average":
            assert sum(key[1:]) == answer * len(key[1:])
        elif key[0] == "rest":
            assert key[1] % key[2] == answer and trace().endswith(f"r{answer}")
        elif key[0] == "ahead":
            assert answer == abs(key[1] - key[2]) and content.startswith(f"{max(key[1:])}, by ")
        elif key[0] == "changed":
            assert (100 + int(re.findall(r"[+-]\d+", key[1])[0])) * key[2] == 100 * answer, (question, content)
        elif "%" in key[1] or "cent" in key[1]:
            assert int(re.findall(r"\d+", key[1])[0]) * key[2] == 100 * answer, (question, content)
    assert kinds == {"expression", "average", "rest", "part", "ahead", "changed", "root"}


def test_descriptions_name_every_number_of_a_pattern() -> None:
    rng = random.Random(17)
    for pattern in ("a+b", "a*k", "a/k", "(a+b)*k", "b-a*k", "a-(b+c)", "a+b-c", "k*(a-b)"):
        for _ in range(100):
            numbers = drawn_numbers(rng, pattern)
            text = sums.in_words_of(rng, pattern, numbers)
            assert all(str(n) in text or n in (2, 3, 4, 5) for n in numbers.values()), (pattern, numbers, text)


def test_expressions_are_worked_as_they_are_shown() -> None:
    rng = random.Random(20)
    for _ in range(3000):
        form, shown, worked = asked(rng)
        text = re.sub(r"(?<=[\d)])(?=[x(])", "*", shown)
        if "=" in shown:
            left, right = text.split(" = ")
            assert eval(left, {"x": eval(worked)}) == int(right)
        elif not re.search("[a-z]", form + shown):
            assert eval(text) == eval(worked), shown
    for a, b in ((-8, 24), (8, -24), (-8, -24)):
        assert all(signed_trace(s, a, b).endswith(f"\n={eval(f'{a}{s}{b}')}") for s in "+-*")
    assert divide_trace(144, 12).startswith("144/12\n144/3/4\n144/3\n")


def test_bills_show_each_number_of_their_pattern_and_no_other() -> None:
    rng = random.Random(18)
    for _ in range(3000):
        pattern, text, unit = bills.account(rng, False)
        assert set(re.findall("[a-z]", pattern)) == set(re.findall(r"\{([a-z]+)\}", text)) - set("nmrx"), (
            pattern,
            text,
        )
        assert unit and "  " not in text, text


def test_tales_show_each_number_of_their_pattern_and_no_other() -> None:
    rng, kinds = random.Random(19), set()
    for _ in range(4000):
        pattern, text, unit = tales.tale(rng, "apples")
        places = set(re.findall(r"\{([a-z]+)\}", text)) & set("abcdefgkj")
        assert set(re.findall("[a-z]", pattern)) == places, (pattern, text)
        assert unit and "<" not in text and "#" not in text and "%" not in text and "@" not in text, text
        assert "working day" not in text or "such days" in text, "how many of some days are working days?"
        assert "every time" not in text or "a*2" in pattern, (pattern, text)  # in the morning, in the evening
        numbers = {c: 9**9 if c == "a" else 7 for c in places}
        assert eval(pattern, {}, numbers) is not None
        kinds.add(re.sub("[a-z]", "n", pattern))
    assert len(kinds) > 60


def test_questions_about_results_are_for_a_key_that_the_result_has() -> None:
    rng, keys = random.Random(20), set()
    for _ in range(1500):
        made = findings.finding(rng)
        result = json.loads(made.result)
        assert result.get("result", result)[made.key] == made.value
        assert str(next(iter(made.arguments.values()))) in made.text and "{" not in made.text
        keys.add(made.key)
    assert len(keys) > 80


def test_several_values_of_one_parameter_are_a_call_each_in_their_order() -> None:
    rng = random.Random(21)
    for _ in range(400):
        text, requests = tools.listed(rng, 3)
        at = [text.find(str(next(iter(r.call.arguments.values())))) for r in requests]
        assert -1 not in at and len({r.tool.name for r in requests}) == 1 and "{" not in text, text


def test_everyday_stories_say_the_numbers_of_their_pattern() -> None:
    rng, kinds = random.Random(21), set()
    for i in range(4500):
        pattern, text, unit = school.lesson(rng, "fresh" if i % 3 == 0 else "story")
        said = set(re.findall(r"{_(\d+)}", text))
        assert said <= set(re.findall(r"\d+", pattern)) and unit and not set("<[`&~") & set(text), (pattern, text)
        kinds.add(re.sub(r"\d+", "n", pattern))
    assert len(kinds) > 50


def test_restated_sums_show_both_numbers_and_no_other_place() -> None:
    rng = random.Random(14)
    for sign, other, form in (("+", "b", "Add {a} and {b}."), ("-", "b", "{a} less {b}?"), ("*", "k", "{k} x {a} = ?")):
        left_out = beside = 0
        for _ in range(500):
            made = sums.restated(rng, sign, form)
            assert {*re.findall(r"\{(\w+)\}", made)} == {"a", other} and not re.search("[<>]|  ", made), made
            left_out += made.count("{a}") == 1
            beside += bool(re.search(r"\d", made))
        assert left_out > 100 and beside > 40
