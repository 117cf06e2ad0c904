"""Subjects with attributes, described in sentences that are put together from clauses.

data/subjects.txt has a block per domain: `# name | pronouns | forms of the subject | kind keys`, then a line per
attribute: `slot kind keys||predicates||notes||questions`. {v} is the attribute's value, {s} the subject; what
is in brackets beside {v} is its unit. A kind is one of records.py, choices with commas included, or of this
file. Texts combine any attributes in any order and manner.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.problem import pick
from perilune.tasks.records import Shown, drawn
from perilune.tasks.wordings import agreeing, capital, careless, lined, small
from perilune.tasks.words import CITIES, any_word, lines, made_up

_SPAN: Final = re.compile(r"(?:\[[^\]]*\])?\{v\}(?: \[[^\]]*\])?")


@dataclass(frozen=True, slots=True)
class Clause:
    """Words before and after a value; `span` is the value with its unit, as a format of {v}."""

    text: str
    span: str


@dataclass(frozen=True, slots=True, eq=False)  # keys of dictionaries: hashed by identity, not through all their texts
class Attribute:
    slot: str
    kind: str
    keys: tuple[str, ...]
    predicates: tuple[Clause, ...]
    notes: tuple[Clause, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    name: str
    pronouns: tuple[str, ...]
    forms: tuple[str, ...]
    kind: str
    keys: tuple[str, ...]
    attributes: tuple[Attribute, ...]

    @property
    def person(self) -> bool:
        return self.kind == "person" and self.pronouns != ("It",)


def _clauses(text: str) -> tuple[Clause, ...]:
    found = []
    for part in filter(None, map(str.strip, text.split("|"))):
        span = _SPAN.search(part)
        assert span, part
        found.append(Clause(part.replace("[", "").replace("]", ""), span[0].replace("[", "").replace("]", "")))
    return tuple(found)


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.strip().split("|"))


def _attribute(line: str) -> Attribute:
    head, predicates, notes, questions = line.split("||")
    slot, kind, keys = head.split(" ")
    return Attribute(slot, kind, tuple(keys.split(",")), _clauses(predicates), _clauses(notes), _split(questions))


def _domain(block: str) -> Domain:
    head, *rows = [line for line in block.split("\n") if line]
    name, pronouns, forms, named = head.split(" | ")
    kind, keys = named.split(" ")
    attributes = tuple(map(_attribute, rows))
    return Domain(name, tuple(pronouns.split("/")), _split(forms), kind, tuple(keys.split(",")), attributes)


DOMAINS: Final = tuple(_domain(block) for block in lines("subjects.txt").split("# ")[1:])

# ---- values ------------------------------------------------------------------------------------------------------

_STRUCTURES: Final = ("tower", "bridge", "museum", "church", "castle", "station", "theatre", "lighthouse", "mill",
    "dam",
    "palace", "hall", "library", "temple", "fort", "gate")  # fmt: skip
_FEASTS: Final = ("Lantern {}", "{} Festival", "{} Fair", "{} Days", "Feast of {}", "{} Carnival", "{} Week")


def _goals(rng: Random) -> str:
    return f"{int(rng.random() * 7)}{pick(rng, '-:')}{int(rng.random() * 7)}"


def _place(rng: Random) -> str:
    return made_up(rng).capitalize() + pick(rng, ("", "", "", "ville", " Bay", " Hill", "burg", "stad"))


_NUMBERS: Final = {"fever": (360, 415, 10), "pulse": (48, 140, 1), "oven": (120, 250, 1)}  # low, high, divided by
_MORE: Final[dict[str, Callable[[Random], str]]] = {
    "newplace": _place, "goals": _goals,
    "structure": lambda rng: f"{made_up(rng).capitalize()} {pick(rng, _STRUCTURES).capitalize()}",
    "fest": lambda rng: pick(rng, _FEASTS).format(made_up(rng).capitalize()),
    "versus": lambda rng: f"{pick(rng, CITIES)} {pick(rng, ('against', 'v', 'vs'))} {made_up(rng).capitalize()}",
    "site": lambda rng: pick(rng, ("www.", "")) + any_word(rng) + pick(rng, (".com", ".org", ".de", ".shop", ".eu")),
    "iban": lambda rng: pick(rng, ("DE", "FR", "NL", "ES")) + str(int(1e9 + rng.random() * 9e9)),
    "length": lambda rng: f"{2 + int(rng.random() * 7)}:{int(rng.random() * 60):02d}",
}  # fmt: skip
_AS: Final = {"year2": "year", "date2": "date", "money2": "money"}


def _value(rng: Random, kind: str) -> Shown:
    if kind in _NUMBERS:
        low, high, parts = _NUMBERS[kind]
        n = low + int(rng.random() * (high - low))
        return (n, str(n)) if parts == 1 else (n / parts, str(n / parts))
    if kind in _MORE:
        text = _MORE[kind](rng)
        return text, text
    return drawn(rng, _AS.get(kind, kind))


@dataclass(slots=True)
class Subject:
    """One thing or person of a domain: how it is called in the text, and its values by attribute."""

    domain: Domain
    called: str  # with {s} filled in
    name: Shown
    facts: dict[Attribute, Shown]
    pronoun: str


def subject(rng: Random, domain: Domain, chosen: Iterable[Attribute], others: Iterable[Subject] = ()) -> Subject:
    """A subject with these attributes and no value that one of `others` has in the same place."""
    others = tuple(others)
    while True:
        name = _value(rng, domain.kind)
        if all(name[1] not in o.name[1] and o.name[1] not in name[1] for o in others):
            break
    facts: dict[Attribute, Shown] = {}
    seen = {name[1]}
    for one in chosen:
        for _ in range(9):
            made = _value(rng, one.kind)
            if made[1] not in seen and all(o.facts.get(one, ("", ""))[1] != made[1] for o in others):
                facts[one] = made
                seen.add(made[1])
                break
    form = others[0].domain.forms[0] if others else pick(rng, domain.forms)
    return Subject(domain, form.format(s=name[1]), name, facts, pick(rng, domain.pronouns))


def subjects(rng: Random, count: int) -> list[Subject]:
    """That many subjects of one domain with mostly the same two to five attributes."""
    domain = pick(rng, DOMAINS)
    chosen = rng.sample(domain.attributes, min(len(domain.attributes), 1 + int(rng.random() * (5 if count < 2 else 3))))
    found: list[Subject] = []
    for _ in range(count):
        found.append(subject(rng, domain, chosen, found))
    return found


# ---- sentences ---------------------------------------------------------------------------------------------------

_AND: Final = (" and ", " and ", ", and ", " and also ", ", but ", "; it is also known that {w} ", " and {w} ")
_FORMS: Final = lined("""
wrap: I heard that {}|As far as I know, {}|By the way, {}|According to the file, {}|It turned out that {}|You may know \
that {}|{}, I think|{}, as they say|Note that {}|Still, {}|Someone wrote that {}|Last time I looked, {}|{} these \
days|Yes, {}|Also, {}|Then again, {}|For the record, {}
me: My name is {}.|I'm {}.|I am {}.|{} here.|This is {}.|Hi, {} speaking.|Name: {}.
""")


@dataclass(frozen=True, slots=True)
class Sentence:
    """The sentence and the attributes that it states, each with its value as written there, unit included."""

    text: str
    stated: dict[Attribute, str]
    about: Subject


def _filled(form: str, shown: str) -> str:
    return agreeing(form, {"v": shown}).replace("{v}", shown)


def _said(clause: Clause, shown: str) -> str:
    return _filled(clause.text, shown)


def described(rng: Random, one: Subject) -> list[Sentence]:
    """All that is known of a subject, in sentences of one to three clauses in random order."""
    rest = list(one.facts)
    rng.shuffle(rest)
    found: list[Sentence] = []
    person = one.domain.person
    which = "who" if one.domain.pronouns != ("It",) else "which"
    style = rng.random()  # the higher, the fewer sentences of two clauses
    stated: dict[Attribute, str] = {}

    def clause(noted: bool = False) -> str:
        at = rest.pop()
        made = pick(rng, at.notes if noted else at.predicates)
        stated[at] = _filled(made.span, one.facts[at][1])
        return _said(made, one.facts[at][1])

    while rest:
        stated = {}
        far = bool(found) and rng.random() < 0.7
        who = one.pronoun if far else one.called
        roll = rng.random()
        if len(rest) > 2 and roll < 0.12:
            core = f"{who} {clause()}, {clause()} and {clause()}"
        elif len(rest) > 1 and roll < 0.4 - 0.1 * style:
            join = pick(rng, _AND).replace("{w}", one.pronoun.lower())
            core = f"{who} {clause()}{join}{clause()}"
        elif len(rest) > 1 and not far and roll < 0.62:
            noted = [at for at in rest if at.notes]
            if noted and roll > 0.5:
                rest.remove(noted[0])
                rest.append(noted[0])
                extra = clause(noted=True)
            else:
                extra = f"{which} {clause()}"
            core = f"{who}, {extra}, {clause()}" if roll < 0.58 or person else f"{who} ({extra}) {clause()}"
        else:
            core = f"{who} {clause()}"
        if rng.random() < 0.1:
            core = pick(rng, _FORMS["wrap"]).format(core if core.startswith(one.name[1]) else small(core))
        if not core.startswith(one.name[1]):  # host names stay in lower case
            core = capital(core)
        found.append(Sentence(core + ".", stated, one))
    return found


_FIRST: Final = {"is": "am", "has": "have", "was": "was", "takes": "take", "goes": "go", "does": "do", "needs": "need"}


def _mine(text: str) -> str:
    """A predicate in the first person."""
    verb, _, rest = text.partition(" ")
    if verb in _FIRST:
        verb = _FIRST[verb]
    elif re.search("(ch|sh|ss|o)es$", verb):
        verb = verb[:-2]
    elif verb[-1] == "s" and verb[-2:] not in ("ss", "us"):
        verb = verb[:-3] + "y" if verb.endswith("ies") else verb[:-1]
    return f"{verb} {rest}"


def confessed(rng: Random, one: Subject) -> str:
    """The facts about a person in the first person."""
    parts = [_said(pick(rng, at.predicates), shown) for at, (_, shown) in one.facts.items()]
    rng.shuffle(parts)
    first = pick(rng, _FORMS["me"]).format(one.name[1])
    text, join = "", pick(rng, (" and ", ". I ", ". I ", ", "))
    for part in parts:
        text += (join if join != ", " or text.count(",") else ", ") + _mine(part) if text else f"I {_mine(part)}"
    if join == ", ":
        text = text.replace(", ", " and ", 1) if len(parts) == 2 else text
    text = f"{text}."
    return f"{first} {text}" if rng.random() < 0.7 else f"{text} {first}"


# ---- lines -------------------------------------------------------------------------------------------------------

_CELLS: Final = (" | ", ", ", "; ", "\t", " / ", ",")
_LINE: Final = ("{k}: {v}", "{k}: {v}", "- {k}: {v}", "{k} = {v}", "{k} - {v}", "* {k} {v}", "{k}={v}", "{k}\t{v}",
    "{k} .... {v}", "{K}: {v}", "{k}, {v}", "> {k}: {v}", "{k}? {v}")  # fmt: skip


def label(rng: Random, keys: tuple[str, ...]) -> str:
    return pick(rng, keys).replace("_", " ")


def noted(rng: Random, one: Subject) -> str:
    """In a few words without verbs: "Anna Bell, 34, from Oslo"."""
    parts = []
    for at, (_, shown) in one.facts.items():
        parts.append(
            _said(pick(rng, at.notes), shown) if at.notes and rng.random() < 0.75 else f"{label(rng, at.keys)} {shown}"
        )
    rng.shuffle(parts)
    join = pick(rng, (", ", ", ", "; ", " - ", ". ", " / "))
    head = one.name[1] if rng.random() < 0.7 else one.called
    return head + pick(rng, (", ", ": ", " - ", "; ")) + join.join(parts)


def listed_lines(rng: Random, one: Subject) -> str:
    """A line for each value, its label before it."""
    form = pick(rng, _LINE)
    rows = [(one.domain.keys, one.name[1]), *[(at.keys, shown) for at, (_, shown) in one.facts.items()]]
    if rng.random() < 0.4:
        rng.shuffle(rows)
    join = "\n" if rng.random() < 0.75 else pick(rng, ("; ", " | ", ", "))
    return join.join([form.format(k=(k := label(rng, keys)), K=k.capitalize(), v=v) for keys, v in rows])


def table(rng: Random, many: list[Subject]) -> str:
    """A header and a row for each subject; a subject without a value has a dash there."""
    columns = list(dict.fromkeys(at for one in many for at in one.facts))
    cell = pick(rng, _CELLS)
    rows = [[label(rng, many[0].domain.keys), *[label(rng, at.keys) for at in columns]]]
    rows += [[one.name[1], *[one.facts[at][1] if at in one.facts else "-" for at in columns]] for one in many]
    return "\n".join([cell.join(row) for row in rows])


def unkempt(rng: Random, text: str, names: Iterable[str]) -> str:
    """The text as careless people write it; values stay as they are."""
    if rng.random() > 0.25:
        return text
    kept = sorted({n for n in names if n}, key=len, reverse=True)
    places = {}
    for letter, n in zip("abcdefghijklmnopqrs", kept):
        place = f"{{{letter}}}"
        places[place] = n
        text = re.sub(rf"\b{n}\b", place, text) if n.isdigit() else text.replace(n, place)
    text = careless(rng, text)
    return re.sub(r"\{[a-s]\}", lambda m: places[m[0]], text)


ASIDES: Final = lined("""
aside: It rained all day.|More on that next week.|Please keep this to yourself.|Nothing else is new.|I had to look it \
up.|The rest is history.|We talked about it over lunch.|The phone rang twice meanwhile.|Not everyone agrees.|The file \
was on my old laptop.|This took some time to find.|Coffee is ready.|The others will write later.|I forgot the umbrella \
again.|My handwriting is terrible.|No one knows why.|Photos are attached.|The neighbours were surprised.|It was the \
talk of the day.|Anyway.
""")["aside"]
