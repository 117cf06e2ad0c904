"""Stories and questions in many people's wordings, from data/stories.txt and data/asked.txt.

A line of stories.txt (in three parts) is `pattern|unit|text`; no pattern: that of the line before; no unit: {o}. One
of asked.txt is `pattern|text`, where the pattern `e` is any expression, `p*n` a part, `a?b` the larger one and by how
much, `/x` an average. Places are those of stories.py and forms.py, and in stories also {r} {q} {t} names, {x} a number
that does not matter, {cur} a currency, {day} and {city}; `\\n` begins a new line. A number in a pattern is itself (12
of a dozen); `^` `_` `%` divide as in working.py.
"""

from random import Random
from typing import Final

from perilune.tasks.more_programs import DAYS
from perilune.tasks.problem import pick
from perilune.tasks.words import CITIES, lines, listed


def _rows(text: str) -> list[list[str]]:
    return [row.replace("\\n", "\n").split("|") for row in text.strip().split("\n")]


def _stories(text: str) -> tuple[tuple[str, str, str], ...]:
    found: list[tuple[str, str, str]] = []
    for pattern, unit, form in _rows(text):
        found.append((pattern or found[-1][0], form, unit or "{o}"))
    return tuple(found)


STORIES, FIXED, PLAIN = map(_stories, lines("stories.txt").split("\n\n"))
_ROUNDED: Final = tuple([story for story in STORIES if set(story[0]) & set("^_%")])  # there are only a few
_QUESTIONS: Final = _rows(lines("asked.txt"))
ASKED: Final = {
    pattern: tuple([text for of, text in _QUESTIONS if of == pattern])
    for pattern in sorted({of for of, _ in _QUESTIONS})
}
_FILLED: Final = (
    ("{cur}", listed("euros dollars pounds rupees francs yen pesos zloty kr naira rand lira baht dinars shillings")),
    ("{day}", DAYS),
    ("{city}", CITIES),
)


def more(rng: Random, edible: bool) -> tuple[str, str, str]:
    """Pattern, text and unit of one story of stories.txt."""
    pattern, text, unit = pick(rng, _ROUNDED if rng.random() < 0.1 else STORIES)
    for place, words in _FILLED:
        if place in text or place in unit:
            word = pick(rng, words)
            text, unit = text.replace(place, word), unit.replace(place, word)
    return pattern, text, unit
