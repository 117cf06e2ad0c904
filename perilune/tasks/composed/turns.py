"""Paragraphs of contrasting facts, for `doc_questions`: past and present, plan and action, one person and another.

A row is a sentence, then questions, each with the letter of the part that answers it: {w} {u} {t} {v} are people,
{x} {y} {z} things, {b} {d} {p} {s} forms of a verb, {k} a quality of {o} with the values {i} and {j}.
"""

from random import Random
from typing import Final

from perilune.tasks.composed.clauses import ACTS, Clause, Noun, bare_noun, deed, finite, full_name
from perilune.tasks.problem import pick
from perilune.tasks.records import drawn
from perilune.tasks.wordings import capital

_ROWS: Final = tuple([row.split("|") for row in """
{w} did not {b} {x} but {y}|y what did {w} {b}
{w} {d} {x}, not {y}|x what did {w} {b}|y what did {w} not {b}
{w} wanted to {b} {x} but {d} {y}|x what did {w} want to {b}|y what did {w} {b} in the end
first {w} {d} {x}, later {y}, never {z}|x what did {w} {b} first|y what did {w} {b} later|z what did {w} never {b}
instead of {x}, {w} {d} {y}|y what did {w} {b}
{w} gave up {x} in May and now {s} {y}|y what does {w} {b} these days|x what did {w} give up
{w} {s} only {x}, {u} only {y}, while {t} {s} {z}|x what does {w} {b}|y what does {u} {b}|z what does {t} {b}
neither {w} nor {u} {d} {x}; it was {t}|t who {d} {x}
{t} {d} {x} before {u} {d} {y}|u who {d} {y}|x what did {t} {b}|t who {d} {x}
{w} asked {u} to {b} {x}, but {t} did|t who {d} {x}|u who was asked to {b} {x}|w who asked {u}
{w} handed {x} to {u} and {y} to {t}|u who got {x}|t to whom did {w} hand {y}|y what did {t} get
all of them {d} {x} except {w}, who {d} {y}|w who {d} {y}|x what did the others {b}|y what did {w} {b}
{x}, {p} by {w}, came before {y}, {p} by {u}|w who {d} {x}|u who {d} {y}|y what did {u} {b}
{w} was thanked by {u}, while {t} thanked {v}|u who thanked {w}|v whom did {t} thank|t who thanked {v}
the {k} of {o} was {i} until last year, now it is {j}|j what is the {k} of {o} today|i what was the old {k} of {o}
the {k} of {o} has been changed from {i} to {j}|j what is the {k} of {o} now|i what was the old {k} of {o}
{o} has chosen {j} as its new {k}|j which {k} did {o} choose|j what's the new {k} of {o}
the {k} of {o} remains {j}|j what is the {k} of {o}
{o} wanted {i} as its {k} but got {j}|i which {k} did {o} want|j which {k} did {o} get
the {k} of {o} is no longer {i} but {j}|j which {k} does {o} have now|i what was the {k} of {o} before
""".strip().split("\n")])  # fmt: skip
_KINDS: Final = (("colour", "color"), ("day", "weekday"), ("opening time", "clock"), ("leader", "person"),
    ("sponsor", "company"), ("deadline", "date"), ("sport", "sport"), ("dish", "dish"))  # fmt: skip


def turned(rng: Random) -> tuple[str, str, str, str] | None:
    """A paragraph, a question, its answer and the sentence that has it; None if the answer is not there once."""
    (key, kind), verb, rows = pick(rng, _KINDS), pick(rng, ACTS), list[tuple[str, str, dict[str, str]]]()
    many = rng.random() < 0.4  # whether the rows are about qualities, or about people
    for _ in range(pick(rng, (1, 2, 2, 3))):
        if many:
            words = {"i": drawn(rng, kind)[1], "j": drawn(rng, kind)[1], "k": key, "o": f"the {bare_noun(rng)}"}
        else:
            verb = verb if rng.random() < 0.5 else pick(rng, ACTS)
            words = {place: full_name(rng) for place in "wutv"} | {place: deed(rng).text for place in "xyz"}
            words |= dict(zip("bdps", (*verb, finite(Clause(Noun("", ""), verb, None, "present")))))
        form, *questions = pick(rng, _ROWS[-6:] if many else _ROWS[:-6])
        if len({words[p] for p in "wutvxyzij" if p in words}) < (2 if many else 7):
            return None
        rows.append((form.format(**words), pick(rng, questions).format(**words), words))
    link = pick(rng, (". ", ". ", ".\n", "; "))
    said = [row if link == "; " and i else capital(row) for i, (row, _, _) in enumerate(rows)]
    text = link.join(said) + "."
    at = int(rng.random() * len(rows))
    _, question, words = rows.pop(at)
    if any(words[place] in row for row, _, _ in rows for place in "wutvxyzo" if place in words):
        return None
    question = question.replace("what", "who") if key == "leader" and many else question
    start = text.lower().find(words[question[0]].lower())
    answer = text[start : start + len(words[question[0]])]
    asked = question[2:] if rng.random() < 0.3 else capital(question[2:])
    return (text, f"{asked}?", answer, said[at]) if text.lower().count(answer.lower()) == 1 else None
