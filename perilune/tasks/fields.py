"""Named, typed values: a tool's parameters and a JSON object's keys.

A field's kind decides its JSON type and how a value is drawn and said. Names are put together from a prefix and a
base ("start_date"), or made up. Bases in `NEW_BASES` are kept from training.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from perilune.tasks.problem import pick
from perilune.tasks.wordings import enumerated, lined
from perilune.tasks.words import (
    ADJECTIVES,
    CITIES,
    NAMES,
    NEW_NAMES,
    PLAIN,
    SURNAMES,
    any_word,
    compound,
    invents_more,
    listed,
    made_up,
)

BASES: Final[dict[str, tuple[str, ...]]] = {
    kind: listed(names)
    for kind, names in re.findall(
        r"(\w+): ([^;]+)",
        """
person: name customer author owner recipient sender manager guest patient student driver teacher contact player user
assignee speaker buyer seller employee artist director host client winner doctor chef;
city: city location destination origin town place region birthplace capital station airport;
word: category topic product brand label tag team department project species language genre item keyword query model
theme channel device service group folder table column plan dish drink sport animal plant material;
code: id code reference ticket serial token key account invoice order flight room plate sku case lot batch;
date: date deadline birthday day due_date departure arrival release_date created updated;
time: time alarm opening closing start end checkin checkout;
email: email mail address;
title: title subject message note summary caption headline book song comment text description;
small: count quantity age number limit days hours minutes page level rank seats floor pages points score guests copies
priority rooms nights people weeks stars width_px retries;
big: price amount distance population salary budget total stock year views cost area income;
decimal: weight height temperature rating latitude rate ratio width length speed longitude depth;
flag: urgent active public paid available verified verbose express recurring archived member;
choice: unit size color priority format status mode currency season direction level;
words: tags items members colors cities names ingredients skills topics keywords labels;
""",
    )
}
NEW_BASES: Final = lined("""
person: curator|pilot|landlord|nominee
city: harbour|depot|province
word: fabric|flavour|cuisine|habitat
code: warranty|barcode|hallmark
date: expiry|renewal|anniversary
time: curfew|sunset
email: inbox
title: motto|inscription|slogan
small: altitude|voltage|gears|storeys
big: mileage|tuition|revenue
decimal: humidity|viscosity|thickness
flag: waterproof|insured|vegan
choice: texture|orbit|rank_name
words: allergens|sponsors|hobbies
""")
CHOICES: Final = lined("""
unit: celsius|fahrenheit|kelvin
size: small|medium|large
color: red|green|blue|black
priority: low|normal|high
format: pdf|csv|json|html
status: open|closed|pending
mode: fast|slow|auto
currency: EUR|USD|GBP|JPY
season: spring|summer|autumn|winter
direction: north|south|east|west
level: basic|advanced|expert
texture: smooth|rough|grainy
orbit: polar|geostationary|lunar
rank_name: novice|captain|veteran
""")
PREFIXES: Final = listed("""
    start end new old min max first last main home work source target current next previous total default local
    primary backup base final parent public private short full other
""")
JSON_TYPES: Final = {
    "small": "integer", "big": "integer", "decimal": "number", "flag": "boolean", "words": "array",
}  # fmt: skip
# Declarations in the model's prompt say `number` for integers too.
_TRACE_TYPES: Final = {
    "small": "number", "big": "number", "decimal": "number", "flag": "boolean", "words": "list",
}  # fmt: skip
_MEANINGS: Final = lined("""
person: a person's name
city: a city
word: a word
code: an identifier
date: YYYY-MM-DD
time: HH:MM
email: an email address
title: a text
small: a whole number
big: a whole number
decimal: a number
flag: yes or no
choice: one of the values
words: a list of words
""")
# The kinds that values are drawn from; names of people, places and things are the most frequent.
KINDS: Final = listed("""
    person person city city word word word code code date time email title title small small small big big decimal flag
    choice choice words
""")
_MADE_UP_KINDS: Final = listed("word word code small big person decimal date flag title")
_DOMAINS: Final = listed("mail.com example.org post.net web.io office.eu")
_LETTERS: Final = "ABCDEFGHJKLMNPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Field:
    """`name` as in code, `label` as in speech; `choices` for the kind "choice"."""

    name: str
    label: str
    kind: str
    choices: tuple[str, ...] = ()

    @property
    def json_type(self) -> str:
        return JSON_TYPES.get(self.kind, "string")

    @property
    def trace_type(self) -> str:
        """The type as a trace states it: before the value, because it decides whether the value is quoted."""
        return "choice" if self.choices else _TRACE_TYPES.get(self.kind, "string")

    def schema(self, rng: Random, described: float) -> dict[str, Any]:
        """The field's JSON schema, with a description at the given probability."""
        if self.choices:
            schema: dict[str, Any] = {"type": "string", "enum": list(self.choices)}
        elif self.kind == "words":
            schema = {"type": "array", "items": {"type": "string"}}
        else:
            schema = {"type": self.json_type}
        if rng.random() < described:
            schema["description"] = pick(rng, _DESCRIPTIONS)(self)
        return schema


_DESCRIPTIONS: Final[tuple[Callable[[Field], str], ...]] = (
    lambda f: f"The {f.label}",
    lambda f: f"{f.label.capitalize()}",
    lambda f: f"The {f.label}, {_MEANINGS[f.kind][0]}",
    lambda f: _MEANINGS[f.kind][0].capitalize(),
)


def named(words: str, camel: bool) -> str:
    """'start date' -> start_date or startDate."""
    if camel:
        first, *rest = words.split(" ")
        return first + "".join([w.capitalize() for w in rest])
    return words.replace(" ", "_")


def field(rng: Random, new: bool, camel: bool = False) -> Field:
    """A random field; with `new`, one with a name that never occurs in training."""
    roll = rng.random()
    if roll < (0.4 if invents_more() else 0.12) and not new:
        words, kind = made_up(rng), pick(rng, _MADE_UP_KINDS)
        if roll < 0.1 and invents_more():
            words = f"{pick(rng, PREFIXES) if roll < 0.05 else made_up(rng)} {words}"
        return Field(named(words, camel), words, kind)
    kind = pick(rng, KINDS)
    base = pick(rng, (NEW_BASES if new else BASES)[kind])
    words = base.replace("_", " ")
    if roll > 0.75 and " " not in words:
        words = f"{pick(rng, PREFIXES)} {words}"
    choices: tuple[str, ...] = ()
    if kind == "choice":
        choices = CHOICES[base] if new or rng.random() < 0.6 else tuple({any_word(rng): 0 for _ in range(3)})
    return Field(named(words, camel), words, kind, choices)


def fields(rng: Random, count: int, new_share: float, camel: bool = False) -> list[Field]:
    """Fields with distinct names; each is new at the given probability."""
    found: dict[str, Field] = {}
    while len(found) < count:
        one = field(rng, rng.random() < new_share, camel)
        found.setdefault(one.name, one)
    return list(found.values())


# ---- values ------------------------------------------------------------------------------------------------------


def _person(rng: Random) -> str:
    roll = rng.random()
    first = made_up(rng).capitalize() if roll < 0.2 else pick(rng, NAMES if roll < 0.9 else NEW_NAMES)
    if rng.random() < 0.4:
        return first
    return f"{first} {made_up(rng).capitalize() if rng.random() < 0.3 else pick(rng, SURNAMES)}"


def _city(rng: Random) -> str:
    return made_up(rng).capitalize() if rng.random() < 0.35 else pick(rng, CITIES)


def _code(rng: Random) -> str:
    r, roll = rng.random, rng.random()
    if roll < 0.4:
        letters = _LETTERS[int(r() * 24)] + _LETTERS[int(r() * 24)]
        return f"{letters}{'-' if r() < 0.6 else ''}{100 + int(r() * 9900)}"
    if roll < 0.7:
        return str(1000 + int(r() * 99000))
    return f"{_LETTERS[int(r() * 24)]}{int(r() * 100)}{_LETTERS[int(r() * 24)]}"


def _date(rng: Random) -> str:
    r = rng.random
    return f"{1950 + int(r() * 90)}-{1 + int(r() * 12):02d}-{1 + int(r() * 28):02d}"


def _time(rng: Random) -> str:
    return f"{int(rng.random() * 24):02d}:{pick(rng, ('00', '15', '30', '45', '10', '05', '20', '50'))}"


def _email(rng: Random) -> str:
    name = made_up(rng) if rng.random() < 0.5 else pick(rng, NAMES).lower()
    tail = str(int(rng.random() * 100)) if rng.random() < 0.3 else ""
    return f"{name}{tail}@{pick(rng, _DOMAINS)}"


def _title(rng: Random) -> str:
    words = [any_word(rng) for _ in range(2 + int(rng.random() * 3))]
    return " ".join(words).capitalize()


def _words(rng: Random) -> list[str]:
    return list({any_word(rng): 0 for _ in range(2 + int(rng.random() * 3))})


_DRAW: Final[dict[str, Callable[[Random], Any]]] = {
    "person": _person,
    "city": _city,
    "word": lambda rng: compound(rng) if invents_more() and rng.random() < 0.2 else made_up(rng) if rng.random() < 0.4
        else pick(rng, PLAIN if rng.random() < 0.7 else ADJECTIVES),
    "code": _code,
    "date": _date,
    "time": _time,
    "email": _email,
    "title": _title,
    "small": lambda rng: 1 + int(rng.random() * (9 if rng.random() < 0.5 else 99)),
    "big": lambda rng: int(10 ** (1.3 + rng.random() * 3.6)),
    "decimal": lambda rng: int(10 ** (0.5 + rng.random() * 3)) / 10 + 0.1,
    "flag": lambda rng: rng.random() < 0.5,
    "words": _words,
}  # fmt: skip


def value(rng: Random, field: Field) -> Any:
    """A value of the field's kind: str, int, float, bool or list of str."""
    if field.choices:
        return pick(rng, field.choices)
    drawn = _DRAW[field.kind](rng)
    return round(drawn, 1) if field.kind == "decimal" else drawn


def said(value: Any) -> str:
    """A value in plain text: yes and no for booleans, "a, b and c" for lists."""
    if value is True or value is False:
        return "yes" if value else "no"
    if isinstance(value, list):
        return enumerated(value)
    return str(value)


_LEADING: Final = re.compile(r"(?:the|a|an) (?=\S)|room (?=\S{1,3}\Z|[A-Z])")


def bare(value: Any) -> Any:
    """A value as people put it into an object or a call: without the article or the word "room" that only the sentence
    needs ("the kitchen", "room 12B"). Names with a capital article keep it."""
    if isinstance(value, list):
        return [bare(v) for v in value]
    return _LEADING.sub("", value, count=1) if isinstance(value, str) and _LEADING.match(value) else value


def written(value: Any) -> str:
    """A value as JSON, as replies and traces write it."""
    return f'"{value}"' if type(value) is str else json.dumps(value, ensure_ascii=False)
