"""Stories in many words: who, what happened, and what is asked, as sentences with places to fill.

Places: {n} the person at first, {P} and {p} the pronoun, {h} the possessive, {i} the object form, {has} and {does} to
agree, {m} another person, {o} the things, {box} what holds them, {a} {b} {c} {k} the numbers. Numbers are in the order
of a story's pattern (arithmetic.py), not of its sentences.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.composed.bills import account
from perilune.tasks.more_stories import FIXED, more
from perilune.tasks.problem import pick
from perilune.tasks.wordings import lined
from perilune.tasks.words import NAMES, WOMEN, lines, listed, made_up

Story = tuple[str, str, str]  # pattern of the expression, text, unit of the answer

_EDIBLE: Final = frozenset(listed("""
    apples oranges pears plums cookies cakes eggs lemons mangoes melons grapes cherries carrots nuts rolls muffins pies
    sandwiches tomatoes
"""))  # fmt: skip
_PRONOUNS: Final[dict[str, tuple[str, str, bool]]] = {  # pronoun, possessive, object, third person singular
    "he": ("his", "him", True), "she": ("her", "her", True), "it": ("its", "it", True), "we": ("our", "us", False),
    "they": ("their", "them", False),
}  # fmt: skip
_SENTENCES, _PLACES = lines("sentences.txt").split("\n\n")
SENTENCES: Final = lined(_SENTENCES)
_SAID: Final = tuple([(who, he, *_PRONOUNS[he]) for who, he in [row.rsplit(" ", 1) for row in SENTENCES["said"]]])

_JOINS: Final = (" and then ", " and ", ", then ", " but ", " and later ", ", and ", ", after that ")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """A place where a number goes up and down."""

    unit: str
    starts: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    questions: tuple[str, ...]


def _scene(row: str) -> Scene:
    """From the unit and the sentences of each kind, separated by `|`."""
    unit, *kinds = row.split(" # ")
    return Scene(unit, *[tuple(kind.split("|")) for kind in kinds])


SCENES: Final = tuple(map(_scene, _PLACES.strip("\n").split("\n")))
_THINGS: Final = Scene("{o}", *[SENTENCES[kind] for kind in ("starts", "gains", "losses", "questions")])
_SINGLE: Final = ("a-b", "a+b", "a*k", "a/k")
_ONE: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "a*k": (("{n} {has} {g}. How many {o} is that?", "{o}"),
        ("{k} {o} cost {a} euros each. What do they cost together?", "euros"),
        ("{n} walks {a} km a day. How many km in {k} days?", "km")),
    "a/k": (("{n} shares {a} {o} equally among {k} friends. How many does each get?", "{o}"),
        ("{a} {o} go into {k} {box} evenly. How many are in one?", "{o}"),
        ("{k} {o} cost {a} euros. What does one cost?", "euros")),
}  # fmt: skip


def people(rng: Random, named: str) -> tuple[dict[str, str], bool]:
    """The words for a story's person, and whether it begins with that person's name; `named` is a name to use."""
    roll = rng.random()
    if roll < 0.5:
        she, he = (named, "she", "her", "her", True), (named, "he", "his", "him", True)
        known = (she,) if named in WOMEN else (he,) if named in NAMES else (she, he)
        subject, pronoun, his, him, single = pick(rng, (*known, (named, named, f"{named}'s", named, True)))
    elif roll < 0.68:
        subject, pronoun, his, him, single = "I", "I", "my", "me", False
    else:
        fits = ("My friend {n}", "Uncle {n}") * (named not in WOMEN) + ("My cousin {n}",) * (
            named in WOMEN or named not in NAMES
        )
        subject, pronoun, his, him, single = pick(rng, [s for s in _SAID if "{n}" not in s[0] or s[0] in fits])
        subject = subject.format(n=named, s=pick(rng, NAMES) if rng.random() < 0.5 else made_up(rng).capitalize())
    words = {"n": subject, "p": pronoun, "P": pronoun[0].upper() + pronoun[1:], "h": his, "i": him,
             "has": "has" if single else "have", "does": "does" if single else "do", "has3": "has",
             "s": "s" if single else "",
             "n0": "me" if subject == "I" else "us" if subject == "We" else subject}  # fmt: skip
    return words, subject == named


def other(rng: Random, named: str, his: str) -> str:
    return named if rng.random() < 0.5 else pick(rng, SENTENCES["others"]).format(h=his)


def changes(rng: Random, edible: bool) -> Story:
    """A start, one to three changes in either direction, and a question; some sentences are joined."""
    count = pick(rng, (1, 2, 2, 2, 2, 2, 2, 2, 3))
    ups = [rng.random() < 0.5 for _ in range(count)]
    scene = pick(rng, SCENES) if rng.random() < 0.45 else _THINGS
    gains, losses, questions = scene.gains, scene.losses, scene.questions
    if scene is _THINGS and edible and rng.random() < 0.3:
        losses = SENTENCES["eaten"]
    parts = [pick(rng, scene.starts)]
    for up, letter in zip(ups, "bcd"):
        one = pick(rng, gains if up else losses).replace("{b}", f"{{{letter}}}")
        joinable = one.startswith("{P} ") and len(parts) > (0 if parts[0].startswith("{n} ") else 1)
        roll = rng.random()
        if joinable and parts[-1].startswith(("{P} ", "{n} ")) and roll < 0.3:
            parts[-1] = parts[-1][:-1] + pick(rng, _JOINS) + one[4:]
        elif roll < 0.5 or (one[0] == "{" and one[1] in "bcd" and roll < 0.65):
            head = pick(rng, SENTENCES["times"]) + " "
            parts.append(head + ("{p}" + one[3:] if one.startswith("{P}") else one[0].lower() + one[1:]))
        else:
            parts.append(one)
    pattern = "a" + "".join([("+" if up else "-") + letter for up, letter in zip(ups, "bcd")])
    plain = [q for q in questions if not re.search("left|still|remain|keep", q)] if all(ups) else []
    question = pick(rng, plain or questions)
    text = " ".join(parts)
    return pattern, f"{question} {text}" if rng.random() < 0.05 else f"{text} {question}", scene.unit


def groups(rng: Random, edible: bool) -> Story:
    """Several equal groups, something added or taken, and a question."""
    up = rng.random() < 0.5
    first = pick(rng, SENTENCES["group_starts"]).replace("{g}", pick(rng, SENTENCES["groups"]))
    losses = SENTENCES["eaten" if edible and rng.random() < 0.3 else "losses"]
    second = pick(rng, SENTENCES["group_gains"] if up else losses)
    asked = pick(rng, SENTENCES["totals" if up else "left"])
    return ("a*k+b" if up else "a*k-b"), f"{first} {second} {asked}", "{o}"


def fixed(rng: Random, edible: bool) -> Story:
    return pick(rng, FIXED)


def single(rng: Random, edible: bool) -> Story:
    """A story of one step."""
    pattern = pick(rng, _SINGLE)
    if pattern in _ONE:
        text, unit = pick(rng, _ONE[pattern])
        return pattern, text.replace("{g}", pick(rng, SENTENCES["groups"])), unit
    change = pick(rng, SENTENCES["gains" if pattern == "a+b" else "losses"])
    return pattern, f"{pick(rng, SENTENCES['starts'])} {change} {pick(rng, SENTENCES['questions'])}", "{o}"


KINDS: Final = (*(changes,) * 4, *(groups,) * 2, *(fixed,) * 4, single, *(more,) * 9, *(account,) * 5)


def wide(rng: Random, thing: str) -> Story:
    """A story in wide wordings; some have an irrelevant sentence."""
    kind = pick(rng, KINDS)
    pattern, text, unit = kind(rng, thing in _EDIBLE)
    if kind not in (more, account) and rng.random() < 0.1:  # there, its age or price could matter
        sentence = pick(rng, SENTENCES["idle"])
        begin, _, rest = text.partition(". ")
        text = f"{begin}. {sentence} {rest}" if rest else text
    return pattern, text, unit
