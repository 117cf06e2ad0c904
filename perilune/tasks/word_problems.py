"""Word problems of one or more steps: the family `word_problems`.

The trace first writes the story as one expression and then works it as an arithmetic problem is worked. Stories are
put together from sentences, so that names, things, verbs, order and question vary independently.

Structure: `NEW_*` sentences, names and things never occur in training; their words do, in other sentences. A
structural problem has new names and things, and its first sentence, its question or the whole story is new.
"""

import re
from collections.abc import Callable
from random import Random
from typing import Final

from perilune.tasks.arithmetic import drawn_numbers, parted
from perilune.tasks.composed.plans import plan
from perilune.tasks.composed.school import lesson
from perilune.tasks.composed.tales import tale
from perilune.tasks.more_stories import PLAIN as STORIES
from perilune.tasks.problem import Problem, Reply, belongs, pick, user, widely
from perilune.tasks.stories import SENTENCES, Story, other, people, wide
from perilune.tasks.wordings import capital, numeral, phrase, small
from perilune.tasks.words import CONTAINERS, NAMES, NEW_NAMES, NEW_OBJECTS, OBJECTS, invents_more, made_up
from perilune.tasks.working import Tokens, solve, solve_trace

NEW_STARTS: Final = (
    "First {n} counts {a} {o}.", "In the house {n} keeps {a} {o}.", "{a} {o} are in the shop of {n}.",
    "In the beginning {n} owns {a} {o}.",
)  # fmt: skip
NEW_QUESTIONS: Final = (
    "In the end, how many {o} does {n} have?", "Now what is the number of {o}?", "How many {o} does {n} have left now?",
)  # fmt: skip
NEW_STORIES: Final[tuple[Story, ...]] = (
    ("a*k+b", "{n} buys {k} {box} of {a} {o} each. {m} gives {n} {b} more {o}. How many {o} does {n} have now?", "{o}"),
    ("a*k-b", "There are {k} {box} with {a} {o} each. {n} takes {b} {o}. How many {o} are left?", "{o}"),
    ("b-a*k", "{n} has {b} {o} and fills {k} {box} with {a} {o} each. How many {o} are left over?", "{o}"),
    ("a+b+c", "{n} reads {a} pages on Monday, {b} pages on Tuesday and {c} pages on Friday. How many pages is that?",
     "pages"),
    ("a-b-c", "{n} has {a} {o}. {m} takes {b} of them and {p} takes {c}. How many {o} are left?", "{o}"),
    ("(a+b)*k", "In each of {k} {box} there are {a} {o} and {b} coins. How many things is that?", "things"),
    ("a+b+a", "{m} has {b} more {o} than {n}. {n} has {a} {o}. How many {o} do they have together?", "{o}"),
)  # fmt: skip


def _changes(rng: Random, new: bool) -> Story:
    """A start, two changes in either direction, and a question."""
    first, second = rng.random() < 0.5, rng.random() < 0.5
    middle = (
        pick(rng, SENTENCES["plain_gains"] if first else SENTENCES["plain_losses"]),
        pick(rng, SENTENCES["plain_gains"] if second else SENTENCES["plain_losses"]).replace("{b}", "{c}"),
    )
    how = int(rng.random() * 3) if new else -1
    start = pick(rng, NEW_STARTS if how in (0, 2) else SENTENCES["plain_starts"])
    question = pick(rng, NEW_QUESTIONS if how in (1, 2) else SENTENCES["plain_questions"])
    pattern = f"a{'+' if first else '-'}b{'+' if second else '-'}c"
    return pattern, " ".join((start, *middle, question)), "{o}"


def _fixed(rng: Random, new: bool) -> Story:
    return pick(rng, NEW_STORIES if new else STORIES)


_KINDS: Final[tuple[Callable[[Random, bool], Story], ...]] = (_changes, _fixed)


def sample_word_problems(rng: Random, split: str, thinking: bool) -> Problem:
    new, words = split == "structural", {}
    while True:
        roll = rng.random() if widely(split) else 1
        fresh = split == "train" and rng.random() < 0.16
        wider, everyday = fresh or roll < 0.85, fresh or roll < 0.42
        if wider:
            words = _words(rng, new)
            roll = rng.random()
            if everyday:
                pattern, text, unit = lesson(rng, "fresh" if fresh else "story")
            else:
                pattern, text, unit = plan(rng) if roll < 0.45 else (tale if roll < 0.64 else wide)(rng, words["o"])
        else:
            pattern, text, unit = pick(rng, _KINDS)(rng, new)
        for _ in range(6 if wider else 1):
            numbers = {c: n if c.isdigit() else max(2, n) for c, n in drawn_numbers(rng, pattern).items()}
            tokens: Tokens = [numbers.get(c, c) for c in parted(pattern)]
            solved = solve(tokens, everyday)
            if solved and _sensible(pattern, text, numbers, solved[0]):
                break
            solved = None
        if solved is None:
            continue
        value, steps = solved
        key = ("rounded" if set(pattern) & set("_^%") else "expression", "".join(map(str, tokens)))
        if belongs(key, split):
            break
    words = _worded(rng, words, text) if wider else _words(rng, new)
    if widely(split):
        most = 0 if re.search(r"[$€£]\{|\}:", text) else 0.2  # no words there
        shown = {
            c if c.isalpha() else f"_{c}": numeral(rng, n, most if n < 21 else 0.4 * most) for c, n in numbers.items()
        }
        shown["C"] = capital(shown.get("c", ""))
        text = _STARTS.sub(lambda m: m[0].upper(), text) if wider else text
        question = phrase(rng, text, asking=0.0).format(x=2 + int(rng.random() * 40), **shown | words)
        if wider and words["n"].startswith(("My ", "The ", "A ", "Our ", "We")):
            question = re.sub(rf"(?<=[a-z,] ){words['n']}\b", small(words["n"]), question)
        question = question[0].upper() + question[1:] if wider and rng.random() < 0.9 else question
    else:
        question = text.format(**numbers, **words)
    content = f"{value} {unit.format(**words)}".strip()
    reply = Reply(solve_trace(steps) if thinking else "", content)
    return Problem("word_problems", split, key, (user(question),), reply, thinking=thinking)


def _sensible(pattern: str, text: str, numbers: dict[str, int], value: int) -> bool:
    """At most 7 days per week; what is missing to a goal (the last letter) is at most the goal."""
    if numbers.get("k", 0) > 7 and re.search(r"\{k\} days (a|of the) week", text):
        return False
    goal = pattern[1:2] == "-" and pattern[0] == max(set(pattern) & set("abcdefg"), default="")
    return not goal or value <= numbers[pattern[0]]


_STARTS: Final = re.compile(r"(?<=[.?!] )\{[mh]\}")
_THIRD: Final = re.compile(r"\{[nPp]\} [a-z]+s\b")  # "{n} buys": not for "I"


def _worded(rng: Random, words: dict[str, str], text: str) -> dict[str, str]:
    """The words of a story of stories.py: as `words`, with pronouns."""
    said, _ = people(rng, words["n"])
    while not said["s"] and _THIRD.search(text):
        said, _ = people(rng, words["n"])
    who = other(rng, words["m"], said["h"])
    return words | said | {"m": who, "M": capital(who), "H": capital(said["h"]), "q": words["p"],
                           "r": words["n"], "t": words["m"]}  # fmt: skip


def _words(rng: Random, new: bool) -> dict[str, str]:
    names = NEW_NAMES if new else NAMES
    people: list[str] = []
    while len(people) < 3:
        name = made_up(rng).capitalize() if rng.random() < (0.25 if invents_more() else 0.08) else pick(rng, names)
        if name not in people:
            people.append(name)
    thing = pick(rng, NEW_OBJECTS if new else OBJECTS)
    if not new and rng.random() < (0.3 if invents_more() else 0.1):
        thing = made_up(rng) + "s"
    box = pick(rng, CONTAINERS)
    while box == thing:
        box = pick(rng, CONTAINERS)
    return {"n": people[0], "m": people[1], "p": people[2], "o": thing, "box": box}
