"""Paragraphs with a question, composed from subjects (subjects.py) and from scenes, for `doc_questions`.

A scene is a form with places and the questions that it answers: `sentences|question>answer|...`; of [a/b] one is taken.
Places of one kind in a paragraph never have the same value, so that others of the kind are near every answer. The
thought quotes the sentence that answers; if a pronoun is in it, the next line says who or what is meant.
Questions about a report are in other words than its text.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.composed import accounts, subjects
from perilune.tasks.composed.accounts import FORMS, passage
from perilune.tasks.composed.clauses import with_article
from perilune.tasks.composed.mentions import _SORTS
from perilune.tasks.composed.subjects import Attribute, Sentence, Subject
from perilune.tasks.problem import pick
from perilune.tasks.records import drawn
from perilune.tasks.wordings import agreeing, capital, careless, in_words, singular, small
from perilune.tasks.words import ADJECTIVES, CITIES, NAMES, OBJECTS, WOMEN, listed, made_up


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str
    question: str
    trace: str
    answer: str


# ---- scenes ------------------------------------------------------------------------------------------------------


_Scene = tuple[str, tuple[tuple[str, str], ...]]


def _scene(line: str) -> _Scene:
    said, *asked = line.split("|")
    return said, tuple((f"{q}?", a) for q, _, a in (one.partition(">") for one in asked))


SCENES, REPORTS = [tuple(map(_scene, block.split("\n"))) for block in (accounts.SCENES, accounts.REPORTS)]
EITHER: Final = re.compile(r"\[(.*?)\]")
_END: Final = re.compile(r"(?<=[.!?]) ")
PLACE: Final = re.compile(r"\{(\w+?)\d?\}")
_KINDS: Final = {
    "who": "person", "job": "job", "year": "year", "date": "date", "clock": "clock", "land": "land",
    "lang": "lang", "colour": "color", "day": "weekday", "food": "dish", "team": "company", "sport": "sport",
    "weekday": "dayname",
}  # fmt: skip
_LISTS: Final = {
    "things": OBJECTS,
    "adj": ADJECTIVES,
    "she": WOMEN,
    "he": tuple(n for n in NAMES if n not in WOMEN),
} | FORMS
_COUNTED: Final = listed("instrument vehicle furniture tool product")  # these get an article
_SORTED: Final = (*_COUNTED, "fruit", "drink", "dish", "colour")


def _number(rng: Random) -> str:
    n = 2 + int(10 ** (rng.random() * 3.2))
    return in_words(n) if n < 21 and rng.random() < 0.5 else f"{n:,}" if rng.random() < 0.3 else str(n)


def _thing(rng: Random) -> str:
    noun = made_up(rng) if rng.random() < 0.3 else singular(pick(rng, OBJECTS))
    return f"{pick(rng, ADJECTIVES)} {noun}" if rng.random() < 0.4 else noun


def filling(rng: Random, kind: str) -> str:
    if kind in _LISTS:
        return pick(rng, _LISTS[kind])
    if kind in _KINDS:
        return drawn(rng, _KINDS[kind])[1]
    if kind in _SORTS:
        value = pick(rng, _SORTS[kind])
        return with_article(value) if kind in _COUNTED and value[-2:] not in ("ms", "ps") else value
    if kind == "n":
        return _number(rng)
    if kind == "city":
        return pick(rng, CITIES) if rng.random() < 0.6 else made_up(rng).capitalize()
    return made_up(rng).capitalize() if kind == "name" else _thing(rng)


_Asked = tuple[str, str, str]  # question, trace, answer


def scene(rng: Random, taken: set[str], forms: tuple[_Scene, ...] = SCENES) -> tuple[str, list[_Asked]]:
    """One or more sentences, and what can be asked about them. Uses no value of `taken` and adds its own to it.

    {v} is a value of {sort}, the kind that the questions name.
    """
    form, asked = pick(rng, forms)
    words = {"sort": pick(rng, _SORTED)}
    for m in PLACE.finditer(form):
        place = m[0][1:-1]
        while place not in words:
            value = filling(rng, words["sort"] if m[1] == "v" else m[1])
            if value not in taken:
                taken.add(value)
                words[place] = value

    def filled(text: str) -> str:
        return agreeing(EITHER.sub(lambda m: pick(rng, m[1].split("/")), text), words).format(**words)

    parts = _END.split(form)
    said = [capital(filled(part)) for part in parts]
    found = []
    for q, a in asked:
        trace = next(s for s, part in zip(said, parts) if a.lower() in part.lower())
        answer = filled(a)
        found.append((capital(filled(q)), trace, answer if answer in trace else capital(answer)))
    return " ".join(said), found


# ---- questions about subjects --------------------------------------------------------------------------------------


def _forward(rng: Random, one: Subject, at: Attribute, stated: str, alone: bool) -> tuple[str, str]:
    """A question for an attribute of a subject, and its answer."""
    forms = at.questions if alone else [q for q in at.questions if "{s}" in q]
    called = one.called if rng.random() < 0.7 else one.domain.forms[0].format(s=one.name[1])
    if forms and rng.random() < 0.8:
        question = pick(rng, tuple(forms)).format(s=called)
    else:
        question = pick(rng, FORMS["label"]).format(k=at.keys[0].replace("_", " "), s=called)
    shown = one.facts[at][1]
    return question, shown if question.startswith("How many") else stated


def _reverse(rng: Random, said: Sentence, at: Attribute) -> str:
    """A question for the subject, with the sentence's predicate: the attribute's others may mean something else."""
    one = said.about
    predicates = [p.text.replace("{v}", one.facts[at][1]) for p in at.predicates]
    predicate = pick(rng, [p for p in predicates if p in said.text] or predicates)
    form = pick(rng, FORMS["who asked" if one.domain.person else "which asked"])
    return form.format(p=predicate, d=one.domain.name)


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


def _of_reports(rng: Random) -> Paragraph:
    """A scene of REPORTS. Other scenes surround it only if the question has one of its values."""
    taken: set[str] = set()
    text, found = scene(rng, taken, REPORTS)
    question, trace, answer = pick(rng, found)
    question = re.sub("^Which ", pick(rng, ("Which ", "What ")), question)
    texts = [text if rng.random() < 0.7 else text.partition(trace)[0] + trace]
    named = any(value in question for value in taken)
    while rng.random() < 0.3:
        forms = pick(rng, (SCENES, REPORTS))
        other = scene(rng, taken, forms)[0] if named and rng.random() < 0.7 else pick(rng, subjects.ASIDES)
        if other not in texts:
            texts.insert(0 if rng.random() < 0.5 else len(texts), other)
    return Paragraph(pick(rng, (" ", " ", " ", "\n")).join(texts), question, trace, answer)


def _of_clauses(rng: Random) -> Paragraph:
    text, question, answer, line = passage(rng)
    return Paragraph(text, question, line, answer)


_UNKEMPT: Final = 0.08  # of paragraphs: all in lower case


_MADE: Final = ((0.65, _of_clauses), (0.77, _about_subjects), (0.8, _about_notes))


def paragraph(rng: Random) -> Paragraph:
    """A paragraph, a question that one of its sentences answers, the thought and the answer, copied from it."""
    while True:
        roll = 2 * rng.random()
        kind = _of_reports if roll > 1 else next((made for end, made in _MADE if roll < end), _of_scenes)
        made = kind(rng)
        if made.answer in made.text and made.trace.split("\n")[0] in made.text:
            break
    question = careless(rng, made.question)
    if rng.random() < _UNKEMPT and "\n" not in made.trace:
        answer = made.answer.lower()
        return Paragraph(made.text.lower(), question, made.trace.lower(), answer)
    return Paragraph(made.text, small(question) if rng.random() < 0.08 else question, made.trace, made.answer)
