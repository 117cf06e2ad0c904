"""Two-step word problems: the family `word_problems`.

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
from perilune.tasks.composed.tales import tale
from perilune.tasks.problem import Problem, Reply, belongs, pick, user, widely
from perilune.tasks.stories import Story, other, people, wide
from perilune.tasks.wordings import capital, numeral, phrase, small
from perilune.tasks.words import CONTAINERS, NAMES, NEW_NAMES, NEW_OBJECTS, OBJECTS, invents_more, made_up
from perilune.tasks.working import Tokens, solve, solve_trace

STARTS: Final = (
    "{n} has {a} {o}.", "{n} had {a} {o}.", "{n} starts with {a} {o}.", "{n} owns {a} {o}.", "{n} collects {a} {o}.",
    "At first {n} has {a} {o}.", "There are {a} {o} in the house of {n}.", "{n} keeps {a} {o} in a room.",
    "In the morning {n} has {a} {o}.", "{n} bought {a} {o}.", "{n} counts {a} {o}.", "{n}'s shop has {a} {o}.",
)  # fmt: skip
GAINS: Final = (
    "{n} buys {b} more.", "Then {n} finds {b} more.", "{m} gives {n} {b} more.", "{n} gets {b} {o} from {m}.",
    "{n} receives {b} more {o}.", "Later {n} collects {b} more.", "Then {m} brings {b} {o} to {n}.",
    "{n} wins {b} {o}.", "{b} more {o} arrive.", "{n} takes {b} {o} from {m}.", "{m} sends {n} {b} {o}.",
    "Then {n} picks up {b} {o}.", "{n} then bought {b} more.", "{m} sells {b} {o} to {n}.",
)  # fmt: skip
LOSSES: Final = (
    "{n} gives {b} to {m}.", "Then {n} loses {b}.", "{n} sells {b} of them.", "{n} gives away {b} {o}.",
    "{m} takes {b} {o} from {n}.", "Then {b} {o} break.", "{n} throws away {b}.", "{n} sends {b} {o} to {m}.",
    "{m} gets {b} {o} from {n}.", "{n} sold {b} {o}.", "Later {n} uses {b} of them.", "{m} borrows {b} of them.",
    "{m} buys {b} {o} from {n}.", "{b} {o} get lost.",
)  # fmt: skip
QUESTIONS: Final = (
    "How many {o} does {n} have now?", "How many {o} does {n} have in the end?", "How many {o} are there now?",
    "How many {o} does {n} have?", "How many does {n} have now?", "What is the number of {o} now?",
)  # fmt: skip
NEW_STARTS: Final = (
    "First {n} counts {a} {o}.", "In the house {n} keeps {a} {o}.", "{a} {o} are in the shop of {n}.",
    "In the beginning {n} owns {a} {o}.",
)  # fmt: skip
NEW_QUESTIONS: Final = (
    "In the end, how many {o} does {n} have?", "Now what is the number of {o}?", "How many {o} does {n} have left now?",
)  # fmt: skip
STORIES: Final[tuple[Story, ...]] = (
    ("a*k+b", "{n} has {k} {box} with {a} {o} each and {b} more {o}. How many {o} does {n} have?", "{o}"),
    ("a*k+b", "There are {k} {box} with {a} {o} in each. {n} adds {b} {o}. How many {o} are there now?", "{o}"),
    ("a*k+b", "{n} fills {k} {box} with {a} {o} each and has {b} {o} left over. How many {o} are there?", "{o}"),
    ("a*k-b", "{n} has {k} {box} with {a} {o} in each. {n} sells {b} {o}. How many {o} are left?", "{o}"),
    ("a*k-b", "{n} buys {k} {box} of {a} {o} each and gives {b} {o} to {m}. How many {o} does {n} have now?", "{o}"),
    ("a*k-b", "A hall has {k} rows of {a} seats. {b} seats are taken. How many seats are free?", "seats"),
    ("a*k-b", "A train has {k} cars with {a} seats each. {b} seats are taken. How many seats are free?", "seats"),
    ("b+a*k", "{n} has {b} {o} and buys {k} {box} with {a} {o} each. How many {o} does {n} have now?", "{o}"),
    ("b-a*k", "{n} has {b} coins and buys {k} {o} for {a} coins each. How many coins are left?", "coins"),
    ("b-a*k", "{n} pays with {b} coins for {k} {o} that cost {a} coins each. How many coins does {n} get back?",
     "coins"),
    ("b-a*k", "{n} has {b} {o} and puts {a} into each of {k} {box}. How many {o} remain?", "{o}"),
    ("b-a*k", "Of {b} {o}, {n} packs {k} {box} with {a} in each. How many {o} are left?", "{o}"),
    ("b-a*k", "{n} owns {b} {o} and gives {a} to each of {k} friends. How many {o} does {n} have left over?", "{o}"),
    ("b-a*k", "{n} fills {k} {box} with {a} {o} each. {n} had {b} {o}. How many {o} are left?", "{o}"),
    ("b-a*k", "There are {b} {o}. {k} people take {a} {o} each. How many {o} are left?", "{o}"),
    ("a*k+b", "{n} buys {k} {o} for {a} coins each and a bag for {b} coins. How many coins does {n} pay?", "coins"),
    ("a*k+b", "Each day {n} reads {a} pages. After {k} days {n} reads {b} more pages. How many pages is that?",
     "pages"),
    ("a+b+a", "{n} has {a} {o}. {m} has {b} more than {n}. How many {o} do they have together?", "{o}"),
    ("a+b+a", "{n} has {a} {o}, and {m} has {b} {o} more. How many {o} do the two have?", "{o}"),
    ("a+b+a", "{m} owns {b} {o} more than {n}, who has {a}. How many {o} do the two have together?", "{o}"),
    ("a+b+a", "{n} collects {b} more {o} than {m}, and {m} collects {a} {o}. How many {o} do they collect?", "{o}"),
    ("a+b+a", "{n} makes {b} more {o} than {m}. {m} makes {a}. How many {o} do both make together?", "{o}"),
    ("a-b+a", "{n} makes {b} fewer {o} than {m}. {m} makes {a}. How many {o} do both make together?", "{o}"),
    ("a-b+a", "{m} has {b} fewer {o} than {n}, and {n} has {a} {o}. How many {o} is that together?", "{o}"),
    ("a-b+a", "{n} has {a} {o}. {m} has {b} fewer than {n}. How many {o} do they have together?", "{o}"),
    ("a*k+a", "{n} has {a} {o}. {m} has {k} times as many. How many {o} do they have together?", "{o}"),
    ("a*k-a", "{n} has {a} {o}. {m} has {k} times as many. How many more {o} does {m} have?", "{o}"),
    ("a+b+c", "{n} has {a} {o}, {m} has {b} and {p} has {c}. How many {o} do they have together?", "{o}"),
    ("a+b+c", "{n} drives {a} km on Monday, {b} km on Tuesday and {c} km on Friday. How many km is that?", "km"),
    ("a+b-c", "{n} has {a} {o} and {m} has {b}. Together they sell {c} of them. How many {o} are left?", "{o}"),
    ("a-b-c", "There are {a} {o}. {n} takes {b} of them, then {m} takes {c}. How many {o} remain?", "{o}"),
    ("a-b-c", "{n} has {a} {o}. {m} gets {b} and {p} gets {c} of them. How many {o} does {n} have left?", "{o}"),
    ("a+b+c", "{n} finds {a} {o} on Monday, {b} {o} on Friday and {c} {o} on Sunday. How many {o} is that?", "{o}"),
    ("a+b+c", "On Monday {n} makes {a} {o}, on Tuesday {b} and on Friday {c}. How many {o} does {n} make?", "{o}"),
    ("a*k-b", "{n} fills {k} {box} with {a} {o} each. {m} takes {b} {o}. How many {o} remain?", "{o}"),
    ("a*k-b", "In each of {k} {box} there are {a} {o}. {b} {o} get lost. How many {o} are left?", "{o}"),
    ("a*k+b", "In each of {k} {box} there are {a} {o}. {m} brings {b} {o}. How many {o} are there now?", "{o}"),
    ("a*k+b", "{n} gets {k} {box} of {a} {o} each. Then {n} finds {b} more {o}. How many {o} is that?", "{o}"),
    ("a-b-c", "A trip is {a} km long. {n} drives {b} km before lunch and {c} km after it. How many km are left?", "km"),
    ("a-b-c", "{n} had {a} coins and bought a book for {b} coins and a lamp for {c} coins. How many coins are left?",
     "coins"),
    ("(a+b)*k", "There are {k} {box}. Each holds {a} {o} and {b} spoons. How many things are there?", "things"),
    ("(a+b)*k", "{n} has {k} {box} and puts {a} {o} and {b} coins into each. How many things does {n} have?", "things"),
    ("(a+b)*k", "Every one of the {k} {box} contains {b} coins and {a} {o}. How many things are in them?", "things"),
    ("(a+b)*k", "In every box there are {a} {o} and {b} cards. How many things are in {k} boxes?", "things"),
    ("(a+b)*k", "{k} people have {a} {o} and {b} books each. How many things do they have?", "things"),
    ("(a+b)*k", "In each of {k} rooms {n} counts {a} {o} and {b} keys. How many things does {n} count?", "things"),
    ("(a+b)*k", "Each day {n} makes {a} {o} and {m} makes {b}. How many {o} do they make in {k} days?", "{o}"),
    ("(a+b)*k", "Each of {k} {box} has {a} {o} and {b} coins in it. How many things are in the {box}?", "things"),
    ("(a-b)*k", "Each day {n} makes {a} {o} and sells {b} of them. How many {o} are left after {k} days?", "{o}"),
    ("(a-b)*k", "Each of {k} {box} had {a} {o}. {n} takes {b} {o} from each. How many {o} are left?", "{o}"),
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
    middle = (pick(rng, GAINS if first else LOSSES), pick(rng, GAINS if second else LOSSES).replace("{b}", "{c}"))
    how = int(rng.random() * 3) if new else -1
    start = pick(rng, NEW_STARTS if how in (0, 2) else STARTS)
    question = pick(rng, NEW_QUESTIONS if how in (1, 2) else QUESTIONS)
    pattern = f"a{'+' if first else '-'}b{'+' if second else '-'}c"
    return pattern, " ".join((start, *middle, question)), "{o}"


def _told(rng: Random, new: bool) -> Story:
    return pick(rng, NEW_STORIES if new else STORIES)


_KINDS: Final[tuple[Callable[[Random, bool], Story], ...]] = (_changes, _told)


def sample_word_problems(rng: Random, split: str, thinking: bool) -> Problem:
    new, words = split == "structural", {}
    while True:
        wider = widely(split) and rng.random() < 0.7
        if wider:
            words = _words(rng, new)
            roll = rng.random()
            pattern, text, unit = plan(rng) if roll < 0.45 else (tale if roll < 0.64 else wide)(rng, words["o"])
        else:
            pattern, text, unit = pick(rng, _KINDS)(rng, new)
        for _ in range(6 if wider else 1):
            numbers = {c: max(2, n) for c, n in drawn_numbers(rng, pattern).items()}
            tokens: Tokens = [numbers.get(c, c) for c in parted(pattern)]
            solved = solve(tokens)
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
        shown = {c: numeral(rng, n, 0.2 if n < 21 else 0.08) for c, n in numbers.items()}
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
    """At most 7 days a week; to a goal (the last letter) no more is missing than itself."""
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
