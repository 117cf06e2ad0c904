"""Slips as machines, shops and people in a hurry write them: logs, labels, adverts, mails, results; for `json_extract`.

data/slips.txt has a block per kind: `# headings / what joins parts`, then a line per part: `keys:kind = forms` (two
values: `&`; a list: `*`; yes or no: `forms ! forms`; words that are no value have no key). data/notices.txt has kinds
`~a,b` too, with forms for each, keys of nested objects (`a.b`), and last names that are a clause with "whether".
"""

from dataclasses import dataclass
from random import Random
from typing import Any, Final

from perilune.tasks.composed.subjects import ASIDES
from perilune.tasks.problem import pick
from perilune.tasks.records import Shown, drawn
from perilune.tasks.wordings import capital, enumerated
from perilune.tasks.words import SURNAMES, any_word, lines

# Names of a key in words, the value, whether the text has it, its kind.
Found = list[tuple[tuple[str, ...], Any, bool, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Slip:
    """`parts`: (names and kind of each value, forms for each choice)."""

    heads: list[str]
    joins: list[str]
    parts: list[tuple[list[tuple[tuple[str, ...], str]], list[list[str]]]]


def _slip(block: str) -> Slip:
    head, *rows = block.strip().split("\n")
    heads, _, joins = head.partition(" / ")
    parts = []
    for row in rows:
        slots, _, forms = row.partition(" = ")
        named = [slot.replace(":flag", ":~true,false").split(":") for slot in slots.split("&")]
        keys = [(tuple(k.replace("_", " ").split(",")), kind.replace(" ", "_")) for k, kind in named]
        parts.append((keys, [f.split("|") for f in forms.split(" ! ")]))
    return Slip(heads.split("|"), [j.replace("\\n", "\n").replace("_", " ") for j in joins.split()], parts)


SLIPS, NOTICES = [tuple(map(_slip, lines(name).split("# ")[1:])) for name in ("slips.txt", "notices.txt")]
_DIGITS: Final = {"iso": ("20{:02d}-{:02d}-{:02d}", 39, 12, 28), "seconds": ("{:02d}:{:02d}:{:02d}", 23, 59, 59),
    "hash": ("{:x}b{:x}c{:x}", 99, 999, 999), "node": ("{w}-{}", 30), "squad": ("{W}s",), "net": ("{W}_{}G", 9),
    "secret": ("{w}{p}{}{W}", 99)}  # fmt: skip
_MAILS: Final = ("From: {a}\nTo: {b}\nSubject: {s}\n\n{t}", "Good evening,\n{t}\nBest wishes\n{a}",
    "From: {a}\nSubject: {s}\n\n> {q}\n\n{t}", "Hi {b},\n{t}\n\n-- \n{a}")  # fmt: skip
_MAIL_KEYS: Final = {"a": ("sender", "signed by"), "b": ("recipient", "addressee"), "s": ("subject", "subject line")}


def drawn_slip(rng: Random, kind: str) -> Shown:
    if kind in _DIGITS:
        form, *most = _DIGITS[kind]
        words = {"w": any_word(rng), "W": any_word(rng).capitalize(), "p": pick(rng, "!?#$%&*+=@_-.")}
        text = str(form).format(*[int(1 + rng.random() * int(n)) for n in most], **words)
        return text, text
    if kind == "titled":
        text = f"{pick(rng, ('Mr.', 'Mrs.', 'Dr.'))} {pick(rng, SURNAMES)}"
        return text, text
    return drawn(rng, kind)


def slip(rng: Random, kind: Slip, manner: Random) -> tuple[str, Found]:
    """A slip and its values; `manner` draws the layout."""
    draw, log = manner.random, kind is SLIPS[0]
    parts, join, last = list(kind.parts), pick(manner, kind.joins), pick(manner, (", ", " and "))
    casual = not log and draw() < 0.3
    if not log and draw() < 0.3:
        manner.shuffle(parts)
    texts: list[str] = []
    found: Found = []
    for slots, forms in parts:
        values: list[Shown] = []
        meant = 0
        for _, name in slots:
            if name[0] == "~":
                options = name[1:].split(",")
                meant = int(rng.random() * len(options))
                values.append(({"true": True, "false": False}.get(options[meant], options[meant]), ""))
            elif name[-1] == "*":
                many = list({drawn_slip(rng, name[:-1])[1]: 0 for _ in range(1 + int(draw() * 4))})
                values.append((many, enumerated(many, last)))
            else:
                values.append(drawn_slip(rng, name))
        if len(values) > 1 and not any(isinstance(v, str) for v, _ in values[:2]):
            values[:2] = sorted(values[:2], key=lambda v: v[0])
        form = forms[meant][int(draw() * len(forms[meant]))]
        form = form.lower() if casual else capital(form) if join in (". ", "! ", "\n") else form
        there = draw() > 0.17 or not texts
        found += [(keys, value, there, kind) for (keys, kind), (value, _) in zip(slots, values) if keys[0]]
        texts += [form.format(*[shown for _, shown in values])] * there
    text = join.join(texts) + ("." if join == ". " else "")
    roll, head = draw(), pick(manner, kind.heads)
    if roll < 0.2 and head not in ("Log", "Output", "Review", "Feedback", "Complaint", "Chat", "Header"):
        form, (a, b) = pick(manner, _MAILS), (drawn(rng, "person")[1], drawn(rng, "person")[1])
        words = {"a": a, "b": b, "s": "Re: " * ("{q}" in form) + drawn(rng, "topic")[1]}
        kinds = dict(zip("abs", ("person", "person", "topic")))
        found += [(keys, words[x], True, kinds[x]) for x, keys in _MAIL_KEYS.items() if f"{{{x}}}" in form]
        return form.format(t=text, q=pick(rng, ASIDES), **words), found
    return (pick(manner, ("{}: {}", "{}\n{}", "{} - {}", "{}! {}")).format(head, text) if roll < 0.7 else text), found


# A thing, its number, and their kinds.
_PAIRED: Final = tuple([row.split(":") for row in ("team:score:team:count", "player:rank:person:small",
    "town:temperature:city:degrees", "winner:ticket:person:big", "article:price:product_name:money",
    "pet:age:pet:age", "cousin:age:person:age")])  # fmt: skip
_AGED: Final = ("our {t} {} is {} years old", "our {t} {} is {}", "{} is {}", "{} (the {t}) is {}")


def pairs(rng: Random) -> tuple[str, str, str, dict[str, Any]]:
    """A text with two to five things that have a number each; what the thing and the number are; all of them."""
    thing, number, kind, counted = pick(rng, _PAIRED)
    values: dict[str, Any] = {}
    texts = []
    form = pick(rng, ("{} {}", "{}: {}", "{} ({})", "{} with {}", "{} = {}", "{} has {}", "{0}: {n} {1}"))
    for _ in range(2 + int(rng.random() * 4)):
        name = drawn(rng, kind)[1]
        if all(name not in other and other not in name for other in values):
            values[name], shown = drawn(rng, counted)
            form = pick(rng, _AGED) if number == "age" else form
            called = drawn(rng, "animal")[1] if thing == "pet" else thing
            texts.append(form.format(name, shown, n=number, t=called))
    if len(texts) == 3 and rng.random() < 0.4:
        text = "first {}, then {}, and finally {}".format(*texts)
    elif rng.random() < 0.6:
        text = enumerated(texts, pick(rng, (" and ", ", ")))
    else:
        text = pick(rng, ("\n", "; ", " / ")).join(texts)
    return pick(rng, ("", "List: ", "Final: ", "What I have:\n")) + text, thing, number, values
