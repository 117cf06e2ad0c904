"""Paragraphs with a question, composed from subjects (subjects.py) and from scenes, for `doc_questions`.

A scene is a sentence form with places and the questions that it answers: `sentence | question > answer | ...`. Places
of one kind in a paragraph never have the same value, so that others of the kind are near every answer. The thought
quotes the sentence that answers; if a pronoun is in it, the next line says who or what is meant.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.composed import subjects
from perilune.tasks.composed.accounts import passage
from perilune.tasks.composed.subjects import Attribute, Sentence, Subject
from perilune.tasks.problem import pick
from perilune.tasks.records import drawn, lines
from perilune.tasks.wordings import agreeing, capital, careless, in_words, singular, small
from perilune.tasks.words import ADJECTIVES, CITIES, OBJECTS, listed, made_up


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str
    question: str
    trace: str
    answer: str


# ---- scenes ------------------------------------------------------------------------------------------------------


def _scene(line: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    sentence, *asked = line.split(" | ")
    return sentence, tuple((q, a) for q, _, a in (one.partition(" > ") for one in asked))


SCENES: Final = tuple(_scene(line) for line in lines("scenes.txt").strip().split("\n"))
_PLACE: Final = re.compile(r"\{(\w+?)\d?\}")
_BEASTS: Final = listed("fox owl heron otter badger lynx seal crane moth ant whale hare stork beetle swan mole bee bat")
_SPOTS: Final = ("in the cellar", "behind the fountain", "on the first floor", "on the second floor", "near the gate",
    "under the stairs", "in the kitchen", "beside the river", "on the top shelf", "in the garden", "at the station",
    "on the left", "on the right", "in the north", "in the attic", "by the window", "below the bridge")  # fmt: skip
_WHENS: Final = ("in spring", "at night", "after lunch", "on Sundays", "at dawn", "in winter", "every autumn",
    "before noon", "in the evening", "at midnight", "during the holidays", "on Friday", "last Tuesday")  # fmt: skip
_CAUSES: Final = ("a full disk", "heavy rain", "a broken pipe", "a lost key", "thick fog", "a strike", "bad wiring",
    "an old map", "a loose screw", "strong wind", "a late bus", "the summer heat", "a missing signature")  # fmt: skip
_AIMS: Final = ("keep warm", "save money", "find food", "stay dry", "learn Greek", "sell more bread", "see the stars",
    "cross the river", "win the prize", "hide from the wind", "get more light", "scare off birds")  # fmt: skip
_KINDS: Final = {
    "person": "person", "job": "job", "year": "year", "date": "date", "clock": "clock", "land": "land",
    "lang": "lang", "colour": "color", "day": "weekday", "food": "dish", "team": "company", "sport": "sport",
}  # fmt: skip
_LISTS: Final = {"beast": _BEASTS, "spot": _SPOTS, "when": _WHENS, "cause": _CAUSES, "aim": _AIMS, "things": OBJECTS,
    "adj": ADJECTIVES}  # fmt: skip


def _number(rng: Random) -> str:
    n = 2 + int(10 ** (rng.random() * 3.2))
    return in_words(n) if n < 21 and rng.random() < 0.5 else f"{n:,}" if rng.random() < 0.3 else str(n)


def _thing(rng: Random) -> str:
    noun = made_up(rng) if rng.random() < 0.3 else singular(pick(rng, OBJECTS))
    return f"{pick(rng, ADJECTIVES)} {noun}" if rng.random() < 0.4 else noun


def _filling(rng: Random, kind: str) -> str:
    if kind in _LISTS:
        return pick(rng, _LISTS[kind])
    if kind in _KINDS:
        return drawn(rng, _KINDS[kind])[1]
    if kind == "n":
        return _number(rng)
    if kind == "city":
        return pick(rng, CITIES) if rng.random() < 0.6 else made_up(rng).capitalize()
    return made_up(rng).capitalize() if kind == "name" else _thing(rng)


_Asked = tuple[str, str, str]  # question, trace, answer


def scene(rng: Random, taken: set[str]) -> tuple[str, list[_Asked]]:
    """A sentence (or two), and what can be asked about it. `taken`: values that it must not use, and then its own."""
    form, asked = pick(rng, SCENES)
    words: dict[str, str] = {}
    for m in _PLACE.finditer(form):
        place = m[0][1:-1]
        while place not in words:
            value = _filling(rng, m[1])
            if value not in taken:
                taken.add(value)
                words[place] = value
    text = capital(agreeing(form, words).format(**words))
    found = [(agreeing(q, words).format(**words), agreeing(a, words).format(**words)) for q, a in asked]
    return text, [(q, text, a if a in text else capital(a)) for q, a in found]


# ---- questions about subjects --------------------------------------------------------------------------------------

_LABEL: Final = ("What is the {k} of {s}?", "What {k} does {s} have?", "{s}: which {k}?", "Which {k} is given for {s}?",
    "Tell me the {k} of {s}.", "the {k} of {s}?", "What does the text say about the {k} of {s}?",
    "Name the {k} of {s}.")  # fmt: skip
_WHO: Final = ("Who {p}?", "Who {p}?", "Which person {p}?", "Who is it that {p}?", "Name the person who {p}.")
_WHICH: Final = ("Which {d} {p}?", "Which {d} {p}?", "Which {d} is it that {p}?", "Name the {d} that {p}.",
    "What is the name of the {d} that {p}?")  # fmt: skip


def _forward(rng: Random, one: Subject, at: Attribute, stated: str, alone: bool) -> tuple[str, str]:
    """A question for an attribute of a subject, and its answer."""
    forms = at.questions if alone else [q for q in at.questions if "{s}" in q]
    called = one.called if rng.random() < 0.7 else one.domain.forms[0].format(s=one.name[1])
    if forms and rng.random() < 0.8:
        question = pick(rng, tuple(forms)).format(s=called)
    else:
        question = pick(rng, _LABEL).format(k=at.keys[0].replace("_", " "), s=called)
    shown = one.facts[at][1]
    return question, shown if question.startswith("How many") else stated


def _reverse(rng: Random, said: Sentence, at: Attribute) -> str:
    """A question for the subject, in the sentence's words: who "needs it by May" may not have "come in May"."""
    one = said.about
    predicates = [p.text.replace("{v}", one.facts[at][1]) for p in at.predicates]
    predicate = pick(rng, [p for p in predicates if p in said.text] or predicates)
    return pick(rng, _WHO if one.domain.person else _WHICH).format(p=predicate, d=one.domain.name)


def _trace(sentence: Sentence) -> str:
    if sentence.about.name[1] in sentence.text:
        return sentence.text
    return f"{sentence.text}\n{sentence.about.pronoun}: {sentence.about.name[1]}"


def _about_subjects(rng: Random) -> Paragraph:
    many = subjects.subjects(rng, pick(rng, (1, 1, 2, 2, 3)))
    made = [s for one in many for s in subjects.described(rng, one)]
    known = [s for s in made if s.stated]
    target = pick(rng, known)
    at = pick(rng, tuple(target.stated))
    if rng.random() < (0.3 if len(many) > 1 else 0.15):
        question, answer = _reverse(rng, target, at), target.about.name[1]
    else:
        question, answer = _forward(rng, target.about, at, target.stated[at], len(many) == 1)
    texts = [s.text for s in made]
    taken = {shown for one in many for _, shown in one.facts.values()}
    while rng.random() < 0.35 and len(texts) < 9:  # at the ends only: pronouns mean the sentence before
        other = scene(rng, taken)[0] if rng.random() < 0.6 else pick(rng, subjects.ASIDES)
        texts.insert(0 if rng.random() < 0.5 else len(texts), other)
    return Paragraph(pick(rng, (" ", " ", " ", "\n")).join(texts), question, _trace(target), answer)


def _about_notes(rng: Random) -> Paragraph:
    """A question about lines or a table; the thought is the line that answers."""
    while True:
        many = subjects.subjects(rng, pick(rng, (1, 2, 3)))
        one = pick(rng, tuple(many))
        # A unit may be missing in notes, and is then no part of the answer.
        known = [at for at in one.facts if all(c.span == "{v}" for c in at.predicates)]
        if known:
            break
    at = pick(rng, known)
    shown = one.facts[at][1]
    roll = rng.random()
    if len(many) > 1 and roll < 0.4:
        text = subjects.table(rng, many)
    elif roll < 0.7 or len(many) > 1:
        text = "\n".join([subjects.noted(rng, each) for each in many])
    else:
        text = subjects.listed_lines(rng, one)
    line = next(row for row in text.split("\n") if shown in row and (len(many) == 1 or one.name[1] in row))
    question = _forward(rng, one, at, shown, len(many) == 1)[0]
    return Paragraph(text, question, line, shown)


def _of_scenes(rng: Random) -> Paragraph:
    taken: set[str] = set()
    made = [scene(rng, taken) for _ in range(2 + int(rng.random() * 4))]
    question, trace, answer = pick(rng, pick(rng, tuple(made))[1])
    texts = [text for text, _ in made]
    if rng.random() < 0.3:
        texts.insert(int(rng.random() * (len(texts) + 1)), pick(rng, subjects.ASIDES))
    return Paragraph(pick(rng, (" ", " ", " ", "\n")).join(texts), question, trace, answer)


def _of_clauses(rng: Random) -> Paragraph:
    text, question, answer, line = passage(rng)
    return Paragraph(text, question, line, answer)


_UNKEMPT: Final = 0.08  # of paragraphs: all in lower case


def paragraph(rng: Random) -> Paragraph:
    """A paragraph, a question that one of its sentences answers, the thought and the answer, copied from it."""
    while True:
        roll = rng.random()
        kind = _of_clauses if roll < 0.65 else _about_subjects if roll < 0.77 else _about_notes if roll < 0.8 else None
        made = (kind or _of_scenes)(rng)
        if made.answer in made.text and made.trace.split("\n")[0] in made.text:
            break
    question = careless(rng, made.question)
    if rng.random() < _UNKEMPT and "\n" not in made.trace:
        answer = made.answer.lower()
        return Paragraph(made.text.lower(), question, made.trace.lower(), answer)
    return Paragraph(made.text, small(question) if rng.random() < 0.08 else question, made.trace, made.answer)
