"""Records in plain sentences, as people write them: orders, flights, meetings, pets, servers and more.

data/records.txt, records_life.txt, records_work.txt, records_home.txt, records_town.txt and new_records.txt have a
block per kind. `= slot kind keys | questions` declares a slot: its JSON keys and questions that its value answers; its
kind may be choices with commas. `- sentence` states the slots in braces. `! slot keys | sentences if true / sentences
if false` is a yes-or-no slot. Questions that name another slot are in record_questions.txt or among the slot's.

The sentences do not name their values' keys ("Anna, 34, lives in Oslo"), so a key has to be understood, not found.
The kinds of new_records.txt never occur in training.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, Final

from perilune.tasks.fields import Field
from perilune.tasks.problem import pick
from perilune.tasks.wordings import agreeing, enumerated, in_words, lined
from perilune.tasks.words import ADJECTIVES, CITIES, NAMES, OBJECTS, PLAIN, SURNAMES, any_word, lines, listed, made_up

Shown = tuple[Any, str]  # a value as JSON has it, and as the text has it


@dataclass(frozen=True, slots=True)
class Slot:
    """`states`: for a yes-or-no slot, the sentences that say yes and those that say no. `naming`: questions that name
    another slot."""

    kind: str
    keys: tuple[str, ...]
    questions: tuple[str, ...] = ()
    states: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    naming: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """Sentences come with the slots they state."""

    name: str
    slots: dict[str, Slot]
    sentences: tuple[tuple[str, tuple[str, ...]], ...]


def parse(text: str) -> tuple[Kind, ...]:
    """The blocks of a file of records."""
    kinds = []
    for block in text.split("# ")[1:]:
        name, *lines = [line for line in block.split("\n") if line]
        slots, sentences = {}, []
        for line in lines:
            mark, rest = line[0], line[2:]
            if mark == "-":
                sentences.append((rest, tuple(dict.fromkeys(_PLACE.findall(rest)))))
                continue
            head, _, tail = rest.partition(" | ")
            slot, *keys = head.split()
            if mark == "!":
                yes, no = [tuple(part.split("|")) for part in tail.split(" / ")]
                slots[slot] = Slot("flag", tuple(keys), states=(yes, no))
            else:
                asked = [q for q in tail.split("|") if q]
                plain, naming = [tuple(q for q in asked if ("{" in q) is named) for named in (False, True)]
                slots[slot] = Slot(keys[0], tuple(keys[1:]), plain, naming=naming)
        kinds.append(Kind(name, slots, tuple(sentences)))
    return tuple(kinds)


_PLACE: Final = re.compile(r"\{(\w+)\}")

# ---- values ------------------------------------------------------------------------------------------------------

_LISTS: Final = lined(lines("values.txt"))
_SUFFIXES: Final = ("", "", " GmbH", " Ltd", " Inc", " & Sons", " Group", " Labs", " Foods", " AG", " Books",
    " Software", " Logistics", " Bank", " Motors", "soft", " Media")  # fmt: skip
_EVENTS: Final = ("party", "workshop", "meeting", "conference", "dinner", "lecture", "training", "reading", "fair",
    "picnic", "exhibition", "tournament", "webinar", "hackathon", "reunion")  # fmt: skip
_HOTELS: Final = ("Hotel {}", "{} Inn", "Grand {}", "{} Hotel", "{} Palace", "Hotel zum {}", "Villa {}")  # fmt: skip
_ROOMS: Final = ("room {n}", "Room {n}", "room {l}{n}", "the {w} room", "hall {l}", "Hall {n}", "meeting room {n}",
    "{l}{n}", "the library", "Studio {n}", "lab {n}", "the {w} hall")  # fmt: skip
_PLACES: Final = ("the town hall", "the city park", "the {w} centre", "the old theatre", "{c}", "the museum",
    "the {w} cafe", "hall {n}", "the library", "the {w} garden", "{c} Arena", "the school yard",
    "the {w} stadium")  # fmt: skip
_STREETS: Final = ("{n} {W} Street", "{W} Road {n}", "{n} {W} Avenue", "{W}strasse {n}", "{n} {W} Lane",
    "{W} Square {n}", "{n} Rue de {W}", "{n} Old {W} Road")  # fmt: skip
_TASKS: Final = ("call", "update the", "write the", "check the", "clean the", "send the", "review the", "order the",
    "fix the", "print the", "test the", "prepare the", "book the")  # fmt: skip
_TOPICS: Final = ("budget", "new website", "release", "holiday plan", "contract", "sales numbers", "moving plans",
    "next trip", "school concert", "marketing plan", "security audit", "hiring", "quarterly report", "office move",
    "customer survey", "timetable")  # fmt: skip
_MONTHS: Final = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December")  # fmt: skip
_FAMILY: Final = listed("""
        Müller García Nguyen O'Brien Petrov Haddad Okafor Yamamoto Lindqvist Nowak Schmidt Fernandes Moreau Bianchi
        Hansen Ozturk Mbeki Ivanova Chowdhury Larsen Kowalczyk Santos
    """)  # fmt: skip
_FIRST: Final = listed("""
        Marta Luca Jana Pavel Sofie Aisha Hassan Keiko Olga Pedro Lena Tomas Ewa Nils Chiara Raj Mohammed Ana Lars Sven
        Elif Ali Ming Andrei Claire Julien Mateo Camila Femi Thandi Oleg Isabel
    """)  # fmt: skip


def _person(rng: Random) -> str:
    roll = rng.random()
    first = made_up(rng).capitalize() if roll < 0.15 else pick(rng, _FIRST if roll < 0.4 else NAMES)
    if rng.random() < 0.25:
        return first
    roll = rng.random()
    return f"{first} {made_up(rng).capitalize() if roll < 0.2 else pick(rng, _FAMILY if roll < 0.4 else SURNAMES)}"


def _named(rng: Random) -> str:
    """A name for a thing: a word or two, capitalised."""
    one = (made_up(rng) if rng.random() < 0.5 else pick(rng, PLAIN)).capitalize()
    return one if rng.random() < 0.6 else f"{pick(rng, ADJECTIVES).capitalize()} {one}"


def _filled(rng: Random, forms: tuple[str, ...]) -> str:
    return pick(rng, forms).format(
        n=1 + int(rng.random() * 40), l=pick(rng, "ABCDEFG"), w=any_word(rng), W=_named(rng), c=pick(rng, CITIES)
    )


def _code(rng: Random) -> str:
    letters, number = (
        pick(rng, "ABCDEFGHKLMNPRSTUVWX") + pick(rng, "ABCDEFGHKLMNPRSTUVWX"),
        100 + int(rng.random() * 99900),
    )
    return pick(rng, ("{a}{n}", "{a}-{n}", "{a}/{n}", "#{n}", "{a}-2024-{n}", "INV-{n}", "{n}-{a}")).format(
        a=letters, n=number
    )


def _phone(rng: Random) -> str:
    n = str(1000000 + int(rng.random() * 8999999))
    return pick(rng, (f"555-{n[:4]}", f"+49 {n[:3]} {n[3:]}", f"0{n}", f"{n[:3]} {n[3:]}", f"+1 {n[:3]} 555 {n[3:]}",
        f"0{n[:3]}/{n[3:]}", f"({n[:3]}) {n[3:]}"))  # fmt: skip


def _money(rng: Random) -> Shown:
    roll = rng.random()
    if roll < 0.5:
        n = int(10 ** (0.7 + rng.random() * 3))
        return n, f"{n:,}" if n > 999 and rng.random() < 0.5 else str(n)
    cents = pick(rng, (50, 99, 95, 25, 90, 10, int(rng.random() * 100)))
    n = int(10 ** (0.3 + rng.random() * 2.3))
    text = f"{n}.{cents:02d}"
    return float(text), text if cents % 10 or rng.random() < 0.7 else text[:-1]


def _whole(rng: Random, low: int, high: int, words: float = 0.0) -> Shown:
    n = low + int(rng.random() * (high - low + 1))
    if n > 999 and rng.random() < 0.4:
        return n, f"{n:,}"
    return n, in_words(n) if rng.random() < words and n < 100 else str(n)


def _date(rng: Random) -> Shown:
    """A date as the text writes it; `iso_of` gives YYYY-MM-DD."""
    y, m, d = 1995 + int(rng.random() * 40), 1 + int(rng.random() * 12), 1 + int(rng.random() * 28)
    month = _MONTHS[m - 1]
    form = pick(rng, ("{y}-{m:02d}-{d:02d}",) * 4 + ("{d} {M} {y}", "{M} {d}, {y}", "{M} {d}", "{d} {M}",
        "{d}.{m}.{y}", "{d:02d}/{m:02d}/{y}", "{d}{t} {M}", "{M} {d}{t}, {y}"))  # fmt: skip
    ending = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd"}.get(d, "th")
    text = form.format(y=y, m=m, d=d, M=month, t=ending)
    return text, text


def iso_of(text: str) -> str | None:
    """The date as YYYY-MM-DD if it has a month's name and a year."""
    m = re.fullmatch(r"(\d+) (\w+) (\d{4})|(\w+) (\d+)(?:st|nd|rd|th)?, (\d{4})", text)
    if m is None:
        return None
    day, month, year = (m[1], m[2], m[3]) if m[1] else (m[5], m[4], m[6])
    return f"{year}-{_MONTHS.index(month) + 1:02d}-{int(day):02d}"


def _clock(rng: Random) -> str:
    h, m = int(rng.random() * 24), pick(rng, ("00", "15", "30", "45", "10", "20"))
    return pick(rng, (f"{h:02d}:{m}", f"{h}:{m}", f"{h % 12 + 1} pm", f"{h % 12 + 1}:{m} am", f"{h % 12 + 1}am",
        f"{h % 12 + 1} o'clock", f"{h:02d}:{m}", f"{h % 12 + 1}:{m} pm"))  # fmt: skip


def _foods(rng: Random) -> Shown:
    count = 2 + int(rng.random() * 4)
    found = list({pick(rng, _LISTS["food"]) if rng.random() < 0.8 else made_up(rng): 0 for _ in range(count)})
    if len(found) == 1:
        return found, found[0]
    return found, enumerated(found, pick(rng, (" and ", ", ", ", and ")))


def same(draw: Callable[[Random], str]) -> Callable[[Random], Shown]:
    def both(rng: Random) -> Shown:
        text = draw(rng)
        return text, text

    return both


def _decimal(rng: Random, low: float, high: float) -> Shown:
    text = f"{low + rng.random() * (high - low):.1f}"
    return (float(text), text) if not text.endswith(".0") or rng.random() < 0.2 else (int(text[:-2]), text[:-2])


_CLUBS: Final = ("United", "FC", "Tigers", "Rovers", "City")


def _email(rng: Random) -> str:
    domain = made_up(rng) + pick(rng, (".com", ".org", ".net", ".de", ".io", ".co.uk"))
    return pick(rng, NAMES).lower() + pick(rng, ("", ".", "_")) + f"{made_up(rng)}@{domain}"


def _flight(rng: Random) -> str:
    return pick(rng, "ABKLQSTU") + pick(rng, "AFHKLQRSX") + pick(rng, ("", " ")) + str(100 + int(rng.random() * 8900))


def _version(rng: Random) -> str:
    first, second = int(rng.random() * 9), int(rng.random() * 20)
    return f"{first}.{second}" + pick(rng, ("", f".{int(rng.random() * 9)}"))


_DRAW: Final[dict[str, Callable[[Random], Shown]]] = {
    "person": same(_person), "person2": same(_person),
    "city": same(lambda rng: made_up(rng).capitalize() if rng.random() < 0.2 else pick(rng, CITIES)),
    "city2": same(lambda rng: pick(rng, CITIES)), "company": same(lambda rng: _named(rng) + pick(rng, _SUFFIXES)),
    "code": same(_code),
    "email": same(_email),
    "phone": same(_phone), "date": _date, "clock": same(_clock), "money": _money, "foods": _foods,
    "age": lambda rng: _whole(rng, 2, 99, 0.05), "count": lambda rng: _whole(rng, 2, 400, 0.05),
    "few": lambda rng: _whole(rng, 2, 12, 0.6),
    "small": lambda rng: _whole(rng, 1, 12, 0.2), "small2": lambda rng: _whole(rng, 0, 9, 0.1),
    "big": lambda rng: _whole(rng, 500, 90000), "year": lambda rng: (n := 1900 + int(rng.random() * 126), str(n)),
    "pages": lambda rng: _whole(rng, 40, 990), "minutes": lambda rng: _whole(rng, 5, 180),
    "degrees": lambda rng: _whole(rng, -12, 39), "size": lambda rng: _whole(rng, 18, 190),
    "hours": lambda rng: _whole(rng, 8, 42), "port": lambda rng: (n := 1000 + int(rng.random() * 60000), str(n)),
    "memory": lambda rng: (n := 2 ** (1 + int(rng.random() * 9)), str(n)),
    "weight": lambda rng: _decimal(rng, 0.5, 90), "decimal": lambda rng: _decimal(rng, 0.5, 60),
    "rating": lambda rng: _decimal(rng, 1, 9.9),
    "product": same(lambda rng: pick(rng, OBJECTS) if rng.random() < 0.7 else f"{any_word(rng)} {pick(rng, OBJECTS)}"),
    "product_name": same(lambda rng: _named(rng) + pick(rng,
        ("", f" {1 + int(rng.random() * 900)}", " Pro", " X", " Mini", " Plus", ""))),
    "event": same(lambda rng: f"{any_word(rng)} {pick(rng, _EVENTS)}" if rng.random() < 0.6 else f"{_named(rng)} "
    f"{pick(rng, _EVENTS)}"),
    "place": same(lambda rng: _filled(rng, _PLACES)), "room": same(lambda rng: _filled(rng, _ROOMS)),
    "street": same(lambda rng: _filled(rng, _STREETS)),
    "hotel": same(lambda rng: pick(rng, _HOTELS).format(_named(rng))),
    "restaurant": same(lambda rng: pick(rng, ("{}", "Cafe {}", "{} Grill", "Chez {}", "Trattoria {}",
        "the {} House")).format(_named(rng))),
    "book": same(lambda rng: pick(rng, ("The {}", "{}", "The {} of {c}", "A {} in {c}",
        "{} and {}")).format(_named(rng), _named(rng), c=pick(rng, CITIES))),
    "flight_code": same(_flight),
    "seat": same(lambda rng: f"{1 + int(rng.random() * 40)}{pick(rng, 'ABCDEF')}"),
    "pet": same(lambda rng: pick(rng, ("Bello", "Minka", "Rex", "Luna", "Felix", "Coco", "Balu", "Tiger", "Snowy",
        "Lady")) if rng.random() < 0.6 else made_up(rng).capitalize()),
    "version": same(_version),
    "line_number": lambda rng: _whole(rng, 3, 900), "calories": lambda rng: _whole(rng, 90, 2900),
    "percent": lambda rng: _whole(rng, 5, 100),
    "path": same(lambda rng: pick(rng, ("{a}.py", "src/{a}.c", "{a}/{b}.js", "lib/{a}.rs",
        "{a}_{b}.go")).format(a=any_word(rng), b=any_word(rng))),
        "letter": same(lambda rng: pick(rng, ("A", "B", "C", "D", "A-", "B+", "C+", "A+"))),
    "topic": same(lambda rng: pick(rng, _TOPICS) if rng.random() < 0.6 else f"{any_word(rng)} project"),
    "team": same(lambda rng: f"{pick(rng, CITIES)} {pick(rng, _CLUBS)}" if rng.random() < 0.4 else _named(rng)),
    "team2": same(lambda rng: f"FC {pick(rng, CITIES)}" if rng.random() < 0.3 else made_up(rng).capitalize()),
    "project": same(_named), "band": same(lambda rng: f"The {_named(rng)}s"),
    "host": same(lambda rng: any_word(rng) + pick(rng, ("-", "", ".", "")) + pick(rng, ("01", "7", "db", "web"))),
    "ip": same(lambda rng: "10." + ".".join([str(int(rng.random() * 255)) for _ in range(3)])),
    "errand": same(lambda rng: (verb := pick(rng, _TASKS)) + " " + (pick(rng,
        NAMES) if verb == "call" else any_word(rng) + pick(rng, (" report", " page", " list", "", " order")))),
}  # fmt: skip


_NUMBER: Final = re.compile(r"\d+(\.\d+)?")


@lru_cache(maxsize=4096)
def _choices(kind: str) -> tuple[Shown, ...]:
    """The choices of "early,very_late" or "1.5,3"; texts that are numbers become numbers."""
    texts = kind.replace("_", " ").split(",")
    return tuple([(json.loads(text) if _NUMBER.fullmatch(text) else text, text) for text in texts])


def drawn(rng: Random, kind: str) -> Shown:
    if kind in _LISTS:
        text = pick(rng, _LISTS[kind])
        return text, text
    return pick(rng, _choices(kind)) if "," in kind else _DRAW[kind](rng)


_FIELD_KINDS: Final[dict[type, str]] = {int: "small", float: "decimal", bool: "flag", list: "words"}


@dataclass(frozen=True, slots=True)
class Stated:
    """A record: its text, and for each slot that the text states the field, the value, and the value as written."""

    kind: Kind
    text: str
    found: dict[str, tuple[Field, Any, str]]


def record(rng: Random, new: bool, most: int = 4) -> Stated:
    """One to `most` sentences about a random record, no slot stated twice."""
    kind = pick(rng, NEW_KINDS if new else KINDS)
    values: dict[str, Shown] = {}
    stated: dict[str, bool] = {}
    parts: list[str] = []
    for _ in range(pick(rng, (1, 2, 2, 3, 3, 4)[: most + 2])):
        for _ in range(6):
            sentence, slots = pick(rng, kind.sentences)
            if not any(s in stated for s in slots) or (
                parts and sum(s not in stated for s in slots) > 1 and _naming(slots, stated)
            ):
                break
        else:
            continue
        for s in slots:
            if s not in values:
                values[s] = drawn(rng, kind.slots[s].kind)
        stated |= dict.fromkeys(slots, True)
        words = {s: values[s][1] for s in slots}
        parts.append(agreeing(sentence, words).format(**words))
    for s, slot in kind.slots.items():
        if slot.kind == "flag" and rng.random() < 0.4:
            yes = rng.random() < 0.5
            values[s] = (yes, "yes" if yes else "no")
            parts.insert(1 + int(rng.random() * len(parts)), pick(rng, slot.states[0 if yes else 1]))
            stated[s] = True
    found = {}
    for s in stated:
        others = {k for o in stated if o != s for k in kind.slots[o].keys}
        keys = [k for k in kind.slots[s].keys if k not in others]  # a key must mean one value only
        if not keys:
            continue
        key = pick(rng, keys)
        value, shown = values[s]
        found[s] = (Field(key, key.replace("_", " "), _FIELD_KINDS.get(type(value), "title")), value, shown)
    return Stated(kind, _joined(rng, parts), found)


def _naming(slots: tuple[str, ...], stated: dict[str, bool]) -> bool:
    """Whether a sentence repeats only what the record is about: its first known slot."""
    again = [s for s in slots if s in stated]
    return len(again) == 1 and again[0] == next(iter(stated))


def _joined(rng: Random, parts: list[str]) -> str:
    """The sentences as one text: prose mostly, sometimes a letter, lines, or without care."""
    roll = rng.random()
    parts = [p if p[-1] in ".!?" else p + "." if roll < 0.8 else p for p in parts]
    if roll < 0.72:
        text = " ".join(parts)
    elif roll < 0.8:
        text = "\n".join(parts)
    elif roll < 0.88:
        text = f"{pick(rng, _GREETINGS)}\n\n{' '.join(parts)}\n\n{pick(rng, _FAREWELLS)}"
    elif roll < 0.94:
        text = pick(rng, _NOTES) + " " + " ".join(parts)
    else:
        text = ", ".join([p.rstrip(".!") for p in parts])
    text = text.replace(" a a", " an a").replace(" a e", " an e")
    return text + " " + pick(rng, _NOTES) if rng.random() < 0.12 else text


_GREETINGS: Final = ("Hi all,", "Dear team,", "Hello,", "Hi,", "Dear Sir or Madam,", "Good morning,", "Hey,",
    "To whom it may concern,", "Dear colleagues,")  # fmt: skip
_FAREWELLS: Final = ("Best regards", "Thanks", "Kind regards", "Cheers", "See you", "Yours sincerely", "All the best",
    "Thank you")  # fmt: skip
_NOTES: Final = (
    "Just so you know.", "More details will follow.", "Hope that helps.", "That is all for now.",
    "Sorry for the delay.", "As discussed on the phone.", "FYI.", "Please confirm.", "See you soon!",
    "This may still change.", "Many people asked about it.",
    "We are looking forward to it.", "Nothing else is known.", "Let me know if anything is unclear.",
    "Feel free to forward this.", "Here are the news of the week.", "It rained all day.",
)  # fmt: skip


def _asked() -> dict[tuple[str, str], tuple[str, ...]]:
    rows = [line.split(" ", 2) for line in lines("record_questions.txt").strip().split("\n")]
    return {(kind, slot): tuple(questions.split("|")) for kind, slot, questions in rows}


_ASKED: Final = _asked()


def question(rng: Random, stated: Stated) -> tuple[str, str, str] | None:
    """A question that the record answers, with the slot's name and the answer as the text has it."""
    slots = [s for s in stated.found if stated.kind.slots[s].questions]
    if not slots:
        return None
    slot = pick(rng, slots)
    declared = stated.kind.slots[slot]
    naming = (*_ASKED.get((stated.kind.name, slot), ()), *declared.naming)
    forms = [q for q in naming if all(s in stated.found for s in _PLACE.findall(q))]
    form = pick(rng, forms if forms and rng.random() < (0.4 if declared.naming else 0.75) else declared.questions)
    known = {s: shown for s, (_, _, shown) in stated.found.items()}
    return form.format(**known), slot, known[slot]


KINDS: Final = tuple(
    kind
    for name in ("records.txt", *(f"records_{part}.txt" for part in ("life", "work", "home", "town")))
    for kind in parse(lines(name))
)
NEW_KINDS: Final = parse(lines("new_records.txt"))
