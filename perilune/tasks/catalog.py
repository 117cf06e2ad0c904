"""Tools as people declare them, asked for in everyday words that need not hold the tool's name or its parameters'.

data/kits.txt has groups of tools with one noun; after an empty line, groups of everyday tools. A tool is the name of a
catalog tool or a row `name | description | requests`, where `(one/other)` is a choice, `{name:kind}` a parameter and
`<tank {tank}>` a part that "it" may replace.

data/catalog*.txt have a block per tool: `# verb noun | other names | descriptions`, then
`= parameter kind descriptions` (`!` after a required one; kinds are those of records.py and of this file, a list of
choices with commas, a pool of the file's head, or one of these with a `+`: a list of such values), then `- request`.
A request gives the parameters that it has in braces; `[name=value name=value]` at its end gives those that are implied;
`\\n` is the end of a line. Before its first tool a file may have pools of values: `@ pool value|value`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from perilune.tasks.composed.clauses import clause, sentence
from perilune.tasks.fields import Field, bare
from perilune.tasks.problem import pick
from perilune.tasks.records import Shown, iso_of, same
from perilune.tasks.records import drawn as drawn_for_record
from perilune.tasks.wordings import capital, enumerated, in_words, lined, parted
from perilune.tasks.words import CITIES, NAMES, SURNAMES, any_word, lines, listed, made_up

_PLACE: Final = re.compile(r"\{(\w+)\}")
_IMPLIED: Final = re.compile(r" \[(\w+=\w+(?: \w+=\w+)*)\]$")
# Requests that begin so are no imperatives: "Could you" does not go before them.
STATEMENT: Final = re.compile(
    r"(I|We|My|Our|The|A|An|It|This|That|There|Some(body|one|thing)|Who|If|While|When|Since|Because|As|For|From|At|On|In"
    r"|By|With|To|Just|Only|Not?|No(body|thing)|Every(body|one)?|She|He|They|You|Your|Today|Tomorrow|Tonight|Half|All"
    r"|After|Any|Before|Same|Let's|Don't|Please|Kindly|Lights|Sprinkler|Directions)\b"
)
_WRITTEN: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str
    required: bool
    choices: tuple[str, ...]
    descriptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tool of the catalog. `requests`: (wording, its parameters in order, implied parameters with values)."""

    verb: str
    noun: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...]
    marked: tuple[str, ...] = ()  # of a kit's tool: its requests with <...>, which "it" may replace


def _given(pair: str) -> tuple[str, Any]:
    name, value = pair.split("=")
    return name, int(value) if value.isdecimal() else _WRITTEN.get(value, value)


def _entry(block: str) -> Entry:
    head, *lines = [line for line in block.split("\n") if line]
    title, names, about = head.split(" | ")
    verb, noun = title.split(" ")
    parameters, requests = [], []
    for line in lines:
        if line[0] == "=":
            name, kind, *said = line[2:].split(" ", 2)
            choices = tuple(kind.split(",")) if "," in kind else ()
            descriptions = tuple(said[0].split("|")) if said else ()
            parameters.append(Parameter(name.rstrip("!"), kind, name.endswith("!"), choices, descriptions))
        else:
            implied = _IMPLIED.search(line)
            text = _IMPLIED.sub("", line[2:]).replace("\\n", "\n")
            given = dict(map(_given, implied[1].split(" "))) if implied else {}
            requests.append((text, tuple(_PLACE.findall(text)), given))
    known = (f"{verb}_{noun}", *names.split(","))
    return Entry(
        verb.replace("_", " "),
        noun.replace("_", " "),
        known,
        tuple(about.split("|")),
        tuple(parameters),
        tuple(requests),
    )


_FILES: Final = tuple(f"\n{lines(f'catalog{name}.txt')}".split("\n# ") for name in ("", "_more", "_town"))
ENTRIES: Final = tuple(_entry(block) for file in _FILES for block in file[1:])
_REFERRED: Final = re.compile(r"<[^<>{]*\{(\w+)\}>")


def _spread(form: str) -> list[str]:
    """All forms that the choices `(one/other)` of a form give."""
    if not (found := re.search(r"\(([^()]*/[^()]*)\)", form)):
        return [form]
    return [made for one in found[1].split("/") for made in _spread(form.replace(found[0], one, 1))]


def sibling(row: str, noun: str) -> Entry:
    name, description, *forms = row.split(" | ")
    kinds: dict[str, str] = dict(re.findall(r"\{(\w+):([\w,]+)\}", row))
    for key, value in re.findall(r"(\w+)=(\w+)", row):
        kinds[key] = "bool" if value in _WRITTEN else ",".join(sorted({*kinds.get(key, value).split(","), value}))
    plain = re.sub(r":[\w,]+\}", "}", "\n".join([f"- {made}" for form in forms for made in _spread(form)]))
    marked = re.sub(r"([\w}>\"])(?= \[|$)", r"\1.", plain, flags=re.M)
    needed = [f"= {k}{'!' * all(f'{{{k}' in f or f'{k}=' in f for f in forms)} {kind}\n" for k, kind in kinds.items()]
    head = f"{name.replace('_', ' ')} | {name} | {description}\n{''.join(needed)}"
    made = _entry(head + re.sub("[<>]", "", marked))
    return replace(made, noun=noun, marked=tuple([form[2:] for form in marked.split("\n") if "<" in form]))


_NAMED: Final = {entry.names[0]: entry for entry in reversed(ENTRIES)}


def _kits(text: str) -> tuple[tuple[Entry, ...], ...]:
    found = [kit.strip().split("\n") for kit in text.split("% ")[1:]]
    return tuple([tuple([sibling(r, noun) if "|" in r else _NAMED[r] for r in rows]) for noun, *rows in found])


_RARE, _, _EVERYDAY = lines("kits.txt").partition("\n\n")
KITS: Final = _kits(_RARE)
COMMON: Final = _kits(_EVERYDAY)
_POOLS: Final = {
    name: tuple(values.split("|"))
    for head, *_ in _FILES
    for name, values in [line[2:].split(" ", 1) for line in head.split("\n") if line.startswith("@ ")]
}

# ---- values ------------------------------------------------------------------------------------------------------

_MESSAGES: Final = parted(
    "I'm running late|see you at noon|the meeting is cancelled|happy birthday|thank you for everything|call me back|"
    "dinner is ready|I will be there soon|good luck|where are you|the key is under the mat|we won|please bring the "
    "documents|I am on my way|buy milk|have a nice weekend|I cannot come today|the train is delayed|good morning|"
    "where is the station|the bill is attached|can we talk tomorrow|I found your phone|the dog is fine|let's meet at "
    "the park|we need more time|how are you|I love this place|the car is ready|sorry I missed you"
)
_CURRENCIES: Final = lined("""
USD: dollars|US dollars
EUR: euros
GBP: pounds|British pounds
JPY: yen|Japanese yen
CHF: francs|Swiss francs
INR: rupees
CAD: Canadian dollars
SEK: Swedish kronor
PLN: zloty
CNY: yuan
AUD: Australian dollars
MXN: Mexican pesos
NOK: Norwegian kroner
CZK: Czech koruna
HUF: forints
BRL: Brazilian reais
THB: Thai baht
ZAR: South African rand
TRY: Turkish lira
KRW: Korean won
""")
_UNITS: Final = listed("""
    miles kilometers meters feet inches pounds kilograms ounces grams liters gallons celsius fahrenheit hours minutes
    acres yards cups
""")  # fmt: skip
_BROKEN: Final = parted(
    "the {t} is broken|the {t} does not start|the {t} crashes|I cannot log in to the {t}|the {t} is slow|the {t} "
    "shows an error|my {t} is gone|the {t} makes a noise"
)
_THINGS: Final = listed("""
    printer scanner laptop website app monitor phone mailbox search door heater projector keyboard camera
""")  # fmt: skip
_ACCOUNTS: Final = parted("savings|checking|business|joint|holiday|salary|credit card|travel|main")
_DOORS: Final = parted("front|back|garage|cellar|garden|side|balcony|kitchen")
_ROOMS: Final = parted(
    "the kitchen|the living room|the bedroom|the bathroom|the office|the hall|the garage|the cellar|the attic|the "
    "nursery|the dining room|the guest room"
)
_DAYS: Final = parted("tomorrow|today|Monday|Tuesday|Friday|next Monday|Saturday|Sunday")
_ERRANDS: Final = parted(
    "call {n}|buy {o}|pay the rent|water the plants|pick up {n}|take out the rubbish|feed the cat|renew the passport|"
    "book the train|wash the car|send the {o}|visit {n}|clean the {o}|take my pills|back up the laptop|return the {o}"
)
_HOSTS: Final = listed("web db cache mail api build proxy node app search")
_HALLS: Final = parted(
    "Birch|Rowan|Hazel|Turing|Curie|Jupiter|Ruby|Harbour|Everest|Linden|Blue Room|Room 12|Loft|Lab 3"
)
_COMMANDS: Final = parted(
    "ls -la|git status|df -h|npm install|pytest -x|make test|uptime|whoami|docker ps|cargo build|git pull|free -m|pip "
    "list|ls {w}|echo {w}|python {w}.py|cat {w}.log"
)


_SENTENCES: Final = parted(
    "Where is the {w}?|Don't forget the {w}!|How much is this {w}?|Happy birthday, {n}!|We're late, sorry!|Hi {n}, "
    "can you call me?|I'm out of {w}. Help!|It's {n}'s {w}."
)
_VENUES: Final = parted("{n}'s|{n}'s|{s}'s|{n}'s Diner|St. {n}'s|Dr. {s}'s|O'{s}")


def _filled(rng: Random, forms: tuple[str, ...]) -> str:
    return pick(rng, forms).format(n=pick(rng, NAMES), s=pick(rng, SURNAMES), w=any_word(rng))


def _message(rng: Random) -> str:
    if rng.random() < 0.6:
        return pick(rng, _MESSAGES)
    return pick(rng, ("the {} is {}", "bring the {} and the {}", "no {} without {}", "{} or {}", "I like {} and {}",
        "we are out of {} and {}")).format(any_word(rng), any_word(rng))  # fmt: skip


def _currency(rng: Random, first: bool) -> Shown:
    codes = tuple(_CURRENCIES)
    code = pick(rng, codes[:6] if first and rng.random() < 0.7 else codes[6:] if rng.random() < 0.4 else codes[1:5])
    return code, pick(rng, _CURRENCIES[code]) if rng.random() < 0.5 else code


def _count(rng: Random, high: int) -> Shown:
    n = 2 + int(rng.random() * (high - 1))
    return n, in_words(n) if rng.random() < 0.25 and n < 30 else str(n)


def _date(rng: Random) -> Shown:
    return (day := pick(rng, _DAYS), day) if rng.random() < 0.3 else drawn_for_record(rng, "date")


def _mostly(kind: str, draw: Callable[[Random], str]) -> Callable[[Random], Shown]:
    return lambda rng: drawn_for_record(rng, kind) if rng.random() < 0.65 else same(draw)(rng)


# What descriptions ask for, by kind.
_NOTED: Final = lined("""
date: YYYY-MM-DD|date as YYYY-MM-DD|ISO date, YYYY-MM-DD
clock24: HH:MM|24 hour time, HH:MM|time in 24-hour format (HH:MM)
cur: ISO 4217 code, e.g. EUR|three letter currency code
lang: two letter language code|ISO 639-1 code, e.g. en
land: two letter country code|ISO 3166 code, e.g. FR
""")
# Names that do not begin with their codes.
_CODES: Final = dict(name.split(":") for name in listed("""
    German:de Spanish:es Polish:pl Dutch:nl Greek:el Turkish:tr Portuguese:pt Chinese:zh Japanese:ja
    Spain:ES Poland:PL Japan:JP Chile:CL Nepal:NP Portugal:PT Turkey:TR Vietnam:VN Ireland:IE Iceland:IS Morocco:MA
    """))  # fmt: skip
_PAST: Final = {0: "{} o'clock", 15: "quarter past {}", 30: "half past {}", 40: "twenty to {}", 45: "quarter to {}"}


def _spoken(rng: Random) -> Shown:
    """A time as HH:MM, and as people say it."""
    hour, minute = int(rng.random() * 24), pick(rng, (0, 0, 30, 30, 15, 45, 5, 10, 20, 40))
    time, roll, twelve = f"{hour:02d}:{minute:02d}", rng.random(), (hour + 11) % 12 + 1
    if roll < 0.2 or hour % 12 + minute == 0:
        return time, time if roll < 0.2 else "noon" if hour else "midnight"
    if roll < 0.5 or not 4 < hour < 23:
        text = f"{twelve}:{minute:02d}" if minute or roll < 0.3 else str(twelve)
        return time, text + pick(rng, (" {}m", "{}m", " {}.m.")).format("pa"[hour < 12])
    named = twelve % 12 + (minute > 30) or 12
    form = "{}" if minute == 0 and roll < 0.6 else _PAST.get(minute, f"{in_words(minute)} past {{}}")
    text = form.format(in_words(named) if roll > 0.7 else named)
    return time, f"{text} in the {'morning' if hour < 12 else 'afternoon' if hour < 18 else 'evening'}"


_TAGS: Final = parted(
    "{A}-{n}|{A}-{n}|{A}{n}|{a}_{n}|{a}-{n}|{a}{n}|{A}{B}-{n}|{a}{b}-{n:03}|{A}{B}{n}|{A}-{B}-{n:02}|{A}{B}-{C}{D}-{n}|"
    "{W}-{n:02}|{W}-{V}|{W}-XL|{W}{n}|{n:04}"
)


def _tag(rng: Random) -> str:
    """A code as shops, offices and programs give it: T-90, c_9912, MUG-RED."""
    letters = {x: pick(rng, "ABCDEFGHKLMNPRSTUVWX") for x in "ABCD"}
    letters |= {x.lower(): y.lower() for x, y in letters.items()}
    words = {x: any_word(rng).split(" ")[0].upper()[:7] for x in "WV"}
    return pick(rng, _TAGS).format(n=int(10 ** (0.3 + rng.random() * 3.7)), **letters, **words)


def _own(rng: Random) -> str:
    name = any_word(rng) + (f"-{any_word(rng)}" if rng.random() < 0.15 else "")
    return name.capitalize() if rng.random() < 0.4 else name


_WHO: Final = parted("The {w}|{w}|Our {w}|{n}|A customer|The new {w}|{n}'s {w}|The {w} of {n}|Customer|No {w}|Team {w}")
_WHERE: Final = parted("|||| on floor {i}| in {c}| near the {v}| for {n}| in room {i}| with the {v} {u}| at the {v}")
_DOES: Final = parted(
    "is jammed|called twice|does not start|is out of {x}|asked for the {x}|wants a new {x}|has to be replaced|left at "
    "{i}:00|is too {x}|lost the {x} again|was here {i} times|smells of {x}|needs {i} more|broke|gets no {x}|and {x} {y}"
)


def _line(rng: Random) -> str:
    """A title or a comment of several words."""
    if (roll := rng.random()) < 0.3:
        return capital(sentence(rng, clause(rng)))
    if roll < 0.5:
        return " ".join([any_word(rng) for _ in range(2 + int(rng.random() * 4))]).capitalize()
    words = {x: any_word(rng) for x in "wvuxy"} | {"n": pick(rng, NAMES), "c": pick(rng, CITIES)}
    form = f"{pick(rng, _WHO)}{pick(rng, _WHERE)} {pick(rng, _DOES)}"
    return capital(form.format(i=2 + int(rng.random() * 20), **words))


_MINUTES: Final = parted("00|15|30|45|10|20|05")
_DRAW: Final[dict[str, Callable[[Random], Shown]]] = {
    "message": same(_message),
    "first": same(lambda rng: made_up(rng).capitalize() if rng.random() < 0.2 else pick(rng,
        (*NAMES, "mum", "dad", "my boss", "my sister"))),
    "cur": lambda rng: _currency(rng, True), "cur2": lambda rng: _currency(rng, False),
    "unit": same(lambda rng: pick(rng, _UNITS[:9])), "unit2": same(lambda rng: pick(rng, _UNITS[9:])),
    "count1": lambda rng: _count(rng, 14), "count": lambda rng: _count(rng, 100),
    "minutes": lambda rng: _count(rng, 90), "date": _date,
    "clock24": same(lambda rng: f"{int(rng.random() * 24):02d}:{pick(rng, _MINUTES)}"),
    "broken": same(lambda rng: pick(rng, _BROKEN).format(t=pick(rng,
        _THINGS) if rng.random() < 0.6 else made_up(rng))),
    "account": same(lambda rng: pick(rng, _ACCOUNTS)), "door": same(lambda rng: pick(rng, _DOORS)),
    "place": lambda rng: (bare(room := pick(rng, _ROOMS)), room),
    "noun": same(any_word), "errand": same(lambda rng: pick(rng, _ERRANDS).format(n=pick(rng, NAMES),
        o=any_word(rng))),
    "path": same(lambda rng: pick(rng, parted(
        "{a}.txt|/tmp/{a}|{a}/{b}.py|notes/{a}.md|/home/{a}/{b}.csv|{a}.json|docs/{a}.pdf|/var/log/{a}.log|src/{a}.rs"
    )).format(a=any_word(rng), b=any_word(rng))),
    "command": same(lambda rng: pick(rng, _COMMANDS).format(w=any_word(rng))),
    "code": _mostly("code", lambda rng: str(1000 + int(rng.random() * 1e5))),
    "restaurant": _mostly("restaurant", lambda rng: _filled(rng, _VENUES)),
    "cm": lambda rng: (n := 150 + int(rng.random() * 50), str(n)),
    "bool": lambda rng: (rng.random() < 0.5, ""),
    "warm": lambda rng: (n := 15 + int(rng.random() * 11), str(n)),
    "hour": lambda rng: (n := int(rng.random() * 24), pick(rng, (f"{n}:00", f"{n:02d}:00", str(n), f"{n} o'clock"))),
    "server": same(lambda rng: f"{pick(rng, _HOSTS)}{pick(rng, '- 0').strip()}{1 + int(rng.random() * 9)}"),
    "sku": same(lambda rng: f"{any_word(rng)[:3].upper()}-{1 + int(rng.random() * 990)}"),
    "aircraft": same(lambda rng: pick(rng, "ABKLQSTU") + pick(rng, "AFHKLQRSX") + str(100 + int(rng.random() * 8900))),
    "tag": same(_tag), "own": same(_own), "say": lambda rng: (line := _line(rng), f'"{line}"'),
    "hall": same(lambda rng: made_up(rng).capitalize() if rng.random() < 0.3 else pick(rng, _HALLS)),
}  # fmt: skip
_WHOLE: Final = frozenset(
    listed("count1 count minutes small big degrees year size hours age percent pages calories port small2 warm cm hour")
)
_FRACTIONS: Final = frozenset(listed("money weight rating decimal"))


def _drawn(rng: Random, p: Parameter) -> Shown:
    if p.choices:
        chosen = pick(rng, p.choices)
        text = chosen.replace("_", " ")
        return chosen, text.capitalize() if rng.random() < 0.2 and p.name == "unit" else text
    if p.kind.endswith("+"):
        texts = list({_one(rng, p.kind[:-1])[1]: 0 for _ in range(2 + int(rng.random() * 3))})
        return texts, enumerated(texts, pick(rng, (" and ", ", ", " and ")))
    return _one(rng, p.kind)


def _one(rng: Random, kind: str) -> Shown:
    if kind in _POOLS:
        text = pick(rng, _POOLS[kind])
        if " " not in text and rng.random() < 0.2:
            text = made_up(rng)
        return text, text
    kind = kind[:3] if kind[:4] in ("tag_", "own_") else kind
    value, text = _DRAW[kind](rng) if kind in _DRAW else drawn_for_record(rng, kind)
    return bare(value) if kind == "room" else value, text


# ---- declarations --------------------------------------------------------------------------------------------------


def declared_fields(entry: Entry) -> tuple[list[Field], list[Field]]:
    """Required and optional parameters, each by name."""
    found: tuple[list[Field], list[Field]] = ([], [])
    for p in sorted(entry.parameters, key=lambda p: p.name):
        whole = p.choices[0].isdecimal() if p.choices else p.kind in _WHOLE
        other = "decimal" if p.kind in _FRACTIONS else "words" if p.kind.endswith("+") else "title"
        kind = "small" if whole else "choice" if p.choices else "flag" if p.kind == "bool" else other
        choices = p.choices if kind == "choice" else ()
        found[0 if p.required else 1].append(Field(p.name, p.name.replace("_", " "), kind, choices))
    return found


def specification(rng: Random, entry: Entry, name: str, iso: bool) -> dict[str, Any]:
    """The tool as a prompt declares it: most have a description, some parameters too. `iso`: see tools.Tool."""
    properties = {}
    described = pick(rng, (0.0, 0.3, 0.9))
    known = {f.name: f for group in declared_fields(entry) for f in group}
    for p in entry.parameters:
        one = known[p.name]
        schema = one.schema(rng, 0.0)
        if p.choices and not one.choices:
            schema["enum"] = list(map(int, p.choices))
        about = pick(rng, p.descriptions or (one.label.capitalize(), f"The {one.label}"))
        if iso and (notes := _NOTED.get(p.kind.rstrip("2"))):
            schema["description"] = capital(pick(rng, ("", f"{about}, ")) + pick(rng, notes))
        elif rng.random() < described:
            schema["description"] = about
        properties[p.name] = schema
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.9 or name not in entry.names:
        function["description"] = pick(rng, entry.descriptions)
    must = [p.name for p in entry.parameters if p.required]
    function["parameters"] = {"type": "object", "properties": properties, "required": must}
    return {"type": "function", "function": function}


# ---- requests ------------------------------------------------------------------------------------------------------

Asked = tuple[str, dict[str, str], dict[str, Any]]  # the wording, what fills its places, the arguments  # fmt: skip


def asked(rng: Random, entry: Entry, iso: bool) -> Asked:
    """A request for the tool; arguments in the order of the declaration that callers see (required first)."""
    form, places, implied = pick(rng, entry.requests)
    shown: dict[str, str] = {}
    values: dict[str, Any] = dict(implied)
    by_name = {p.name: p for p in entry.parameters}
    for name in places:
        values[name], shown[name] = fresh(rng, by_name[name], iso, values)
        if by_name[name].kind == "message" and f'"{{{name}}}"' in form and rng.random() < 0.4:
            values[name] = shown[name] = _filled(rng, _SENTENCES)
    return form, shown, _ordered(entry, values)


def asked_shortly(rng: Random, entry: Entry, known: dict[str, Any]) -> Asked | None:
    """A request with a word in place of a value: "close it" for one of the values `known`, or, if there are none,
    "close a ticket", which leaves the value open. None if the tool has no such request."""
    form = pick(rng, entry.marked) if entry.marked else ""
    found = _REFERRED.search(form)
    if not found or (known and found[1] not in known):
        return None
    word = pick(
        rng, ("it", "it", "that {}", "the same {}") if known else ("a {}", "one of our {}s", "my {}", "the {}")
    ).format(found[1])
    text = form[: found.start()] + word + form[found.end() :]
    implied = _IMPLIED.search(text)
    values = dict(map(_given, implied[1].split(" "))) if implied else {}
    text, shown = _IMPLIED.sub("", text), {}
    if known:
        values[found[1]] = known[found[1]]
    for p in entry.parameters:
        if f"{{{p.name}}}" in text:
            values[p.name], shown[p.name] = fresh(rng, p, False, values | known)
    return capital(text), shown, _ordered(entry, values)


def fresh(rng: Random, p: Parameter, iso: bool, values: dict[str, Any]) -> Shown:
    """A value and how it is written; a text differs from all of `values`."""
    while True:
        value, text = _drawn(rng, p)
        if iso and p.kind == "clock24":
            return _spoken(rng)
        if iso and p.kind in ("lang", "land"):
            code = _CODES.get(text, text[:2])
            return code.lower() if p.kind == "lang" else code.upper(), text
        if p.kind == "date" and iso:
            if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
                return value, text
            if (converted := iso_of(text)) is None:
                continue
            value = converted
        if value not in values.values() or not isinstance(value, str):
            return value, text


def _ordered(entry: Entry, values: dict[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for group in declared_fields(entry) for f in group if f.name in values}


_SHARED: Final = frozenset(listed("""
    city first person email code path company team noun dish product topic lang cur2 account place errand weekday
    spot device medicine ware garment element planet study lesson service package flaw series stop plate field
    larder sign word_list class land host image appliance symbol road
    station app gate drink supply street clock24 door small2
    """))  # fmt: skip


def asked_together(
    rng: Random, entry: Entry, count: int, iso: bool, joined: bool = True
) -> tuple[Asked, list[tuple[str, dict[str, Any]]]] | None:
    """One request for `count` calls that differ in one parameter ("in Oslo and in Rome"), and for each call that
    parameter as written and the arguments; None if the tool has no suitable parameter."""
    form, shown, arguments = asked(rng, entry, iso)
    names = [
        p.name for p in entry.parameters if p.kind in _SHARED and p.name in shown and not (iso and p.kind == "lang")
    ]
    if not names or any(p.kind in ("count1", "money") and p.name in shown for p in entry.parameters):
        return None  # "four cups of tea and cocoa" may be two of each
    name = pick(rng, names)
    if joined and re.search(rf"\{{{name}\}} (is|has|gets|wants|needs|works|leads|runs|leaves|belongs)\b", form):
        return None  # "Ann and Tom leaves"
    parameter = next(p for p in entry.parameters if p.name == name)
    values = {shown[name]: arguments[name]}
    for _ in range(20):
        if len(values) == count:
            break
        value, text = _drawn(rng, parameter)
        if value not in arguments.values() and value not in values.values():
            values[text] = value
    if len(values) < count:
        return None
    join = pick(rng, (" and ", " and ", ", ", " and also ", " as well as ", " & "))
    if form[-1] == "?" and (rng.random() < 0.4 or re.search(rf"\b(is|does|has) \{{{name}\}}", form, re.I)):
        join = " or "
    if joined:
        before = re.search(rf"\b(to|in|into|for|from|at|on|of|with|by|about) {{{{{name}}}}}", form)
        if before and " " in join and rng.random() < 0.5:  # "to Rome and to Oslo"
            join += f"{before[1]} "
        quoted = f'"{{{name}}}"' in form
        texts = [f'"{text}"' for text in values] if quoted else list(values)  # each by itself: "a" and "b"
        shown[name] = enumerated(texts, join).removeprefix('"' * quoted).removesuffix('"' * quoted)
    calls = [(text, _ordered(entry, arguments | {name: value})) for text, value in values.items()]
    return (form, shown, arguments), calls


_MADE: Final = frozenset(
    listed("""
    add create set send book start make order write save post schedule buy print delete remove cancel open close record
    track plan rent reserve call check find
""")
)
_HEADS: Final = parted("{v} {n}: |{n}: |{v} {n} please. |{v} the {n} {c} times: |Can you {v} the {n}? |")
_PLURAL_HEADS: Final = parted(
    "{p}: |{p} please. |{c} {p}: |{c} {p}, |I need {c} {p}: |{v} {c} {p}: |Please {v} these {p}: |{p} for today: |{v} "
    "{p}, please: |I have {c} {p} for you. "
)
_PAIRS: Final = parted("{0}: {1}|{0} - {1}|{1} for {0}|{0}, {1}|{0} {1}|{1} ({0})|{0} = {1}")
_ROW_JOINS: Final = parted(". |, | and |; |\n|\n- |, and | / |, then ")


def asked_in_rows(
    rng: Random, entry: Entry, count: int, iso: bool
) -> tuple[str, list[tuple[str, dict[str, Any]]]] | None:
    """A request for `count` calls: a head and a few words for each ("Reminders please. Monday: dentist. Friday: rent").
    Also each call's words and arguments. None if the tool needs no parameter, more than two, or two of one kind."""
    needed = [p for p in entry.parameters if p.required]
    kinds = {p.kind or p.name for p in needed}
    if len(kinds) != len(needed) or len(needed) not in (1, 2) or any(k == "bool" or k.endswith("+") for k in kinds):
        return None
    rng.shuffle(needed)
    pair = pick(rng, _PAIRS)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(20):
        values: dict[str, Any] = {}
        texts = []
        for p in needed:
            values[p.name], text = fresh(rng, p, iso, values)
            if type(values[p.name]) in (int, float) and rng.random() < 0.7:
                label = p.name.replace("_", " ")
                text = f"{text} {label}" if label.endswith("s") else f"{label} {text}"
            texts.append(text)
        row = pair.format(*texts) if len(needed) == 2 else texts[0]
        if all(_ordered(entry, values) != known for known in rows.values()):
            rows[row] = _ordered(entry, values)
        if len(rows) == count:
            break
    else:
        return None
    head = pick(rng, _PLURAL_HEADS if entry.verb in _MADE and rng.random() < 0.7 else _HEADS)
    counted = in_words(count) if rng.random() < 0.6 else str(count)
    plural = re.sub("y$", "ie", entry.noun.removesuffix("s")) + "s"
    head = head.format(v=entry.verb, n=entry.noun, p=plural, c=counted)
    if not head:
        head = f"{entry.verb} "
    if rng.random() < 0.6:
        head = head[0].upper() + head[1:]
    join = pick(rng, _ROW_JOINS)
    join = "\n" if join == "; " and "command" in kinds else join  # "ls; pwd" is one
    said = [f"one {row}" for row in rows] if head.endswith(", ") and join in (" and ", ", and ") else list(rows)
    return head + ("\n- " if join == "\n- " else "") + join.join(said), list(rows.items())


_LEAD: Final = r"(?:\b(?:to|in|into|for|from|at|on|of|with|by|about|as|until|the|a|an|my|our) )*[\"'(<]*"
_TRAIL: Final = (
    r"(?:[\"')>](?!s\b))*(?:%| (?:degrees|minutes|percent|hours|packs|copies|door|lamps?|balance|account)\b)?"
)
_ENDS: Final = parted(" and | and |, |, and | and also | & |, then |; | plus ")
_NEXT: Final = parted(" Also | And | Then | Oh, and | Next: |\nand | ")


def asked_on(rng: Random, entry: Entry, count: int, iso: bool) -> tuple[Asked, list[dict[str, Any]]] | None:
    """A request for `count` calls, and their arguments. Each further call names only one or two values, after a null
    character ("and 17 in the hall"). None if the tool has no suitable parameter."""
    form, shown, arguments = asked(rng, entry, iso)
    given = [p for p in entry.parameters if p.name in shown and p.kind[-1] != "+"]
    shared = [p for p in given if p.kind in _SHARED]
    if not shared or "\n" in form:
        return None
    changed = [pick(rng, shared)]
    # "I only know pounds and 19 yen" gives no new amount in the first currency.
    more = [p for p in given if p not in changed and changed[0].kind != "cur2" and p.kind not in ("cur", "cur2")]
    counted = [p for p in more if p.kind in ("count1", "phone", "email")]  # each call needs its own
    if counted or (more and rng.random() < 0.75):
        changed.append(pick(rng, counted or more))
    spans = [m.span() for p in changed if (m := re.search(f"{_LEAD}\\{{{p.name}}}{_TRAIL}", form))]
    (begin, stop), (start, last) = min(spans), max(spans)
    between = form[stop:start]
    if len(between) > 14 or re.search(r"[.?!{]", between):
        between = ": " if changed[-1].kind == "message" else " "
    said = form[begin:stop] + (between + form[start:last] if changed[1:] else "")
    said = "one " * bool(re.search(rf"\b(a|an|one) {entry.noun}\b", form.lower())) + said
    body, end = form.rstrip(".?!"), form[-1] if form[-1] in ".?!" else ""
    inline, calls = last == len(body) and rng.random() < 0.7, [arguments]
    for i in range(1, count):
        taken = [*arguments.values(), *[c[changed[0].name] for c in calls]]
        values: dict[str, Any] = {}
        for p in changed:
            values[p.name], shown[f"{p.name}{i}"] = fresh(rng, p, iso, {str(v): v for v in taken})
            taken = [values[p.name]]
        calls.append(_ordered(entry, arguments | values))
        join = (pick(rng, _ENDS) if i == count - 1 else ", ") if inline else (end or ".") + pick(rng, _NEXT)
        shown[f"at{i}"] = join + "\0"
        body += f"{{at{i}}}" + said.replace("}", f"{i}}}") + (" too" if join in (". ", "? ", "! ") else "")
    return (body + end, shown, arguments), calls
