"""Values of the parameters of catalog.py's tools, by kind, and how people write them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.fields import bare
from perilune.tasks.problem import pick
from perilune.tasks.records import Shown, lines, same
from perilune.tasks.records import drawn as drawn_for_record
from perilune.tasks.wordings import enumerated, in_words, lined, parted
from perilune.tasks.words import NAMES, SURNAMES, any_word, listed, made_up


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str
    required: bool
    choices: tuple[str, ...]
    descriptions: tuple[str, ...]


FILES: Final = tuple(f"\n{lines(f'catalog{name}.txt')}".split("\n# ") for name in ("", "_more", "_town"))
_POOLS: Final = {
    name: tuple(values.split("|"))
    for head, *_ in FILES
    for name, values in [line[2:].split(" ", 1) for line in head.split("\n") if line.startswith("@ ")]
}
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


SENTENCES: Final = parted(
    "Where is the {w}?|Don't forget the {w}!|How much is this {w}?|Happy birthday, {n}!|We're late, sorry!|Hi {n}, "
    "can you call me?|I'm out of {w}. Help!|It's {n}'s {w}."
)
_VENUES: Final = parted("{n}'s|{n}'s|{s}'s|{n}'s Diner|St. {n}'s|Dr. {s}'s|O'{s}")


def filled(rng: Random, forms: tuple[str, ...]) -> str:
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
NOTED: Final = lined("""
date: YYYY-MM-DD|date as YYYY-MM-DD|ISO date, YYYY-MM-DD
clock24: HH:MM|24 hour time, HH:MM|time in 24-hour format (HH:MM)
cur: ISO 4217 code, e.g. EUR|three letter currency code
lang: two letter language code|ISO 639-1 code, e.g. en
land: two letter country code|ISO 3166 code, e.g. FR
""")
# Other names begin with their codes.
CODES: Final = dict(name.split(":") for name in listed("""
    German:de Spanish:es Polish:pl Dutch:nl Greek:el Turkish:tr Portuguese:pt Chinese:zh Japanese:ja
    Spain:ES Poland:PL Japan:JP Chile:CL Nepal:NP Portugal:PT Turkey:TR Vietnam:VN Ireland:IE Iceland:IS Morocco:MA
    """))  # fmt: skip
_PAST: Final = {0: "{} o'clock", 15: "quarter past {}", 30: "half past {}", 40: "twenty to {}", 45: "quarter to {}"}


def spoken(rng: Random) -> Shown:
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
    "restaurant": _mostly("restaurant", lambda rng: filled(rng, _VENUES)),
    "cm": lambda rng: (n := 150 + int(rng.random() * 50), str(n)),
    "bool": lambda rng: (rng.random() < 0.5, ""),
    "warm": lambda rng: (n := 15 + int(rng.random() * 11), str(n)),
    "hour": lambda rng: (n := int(rng.random() * 24), pick(rng, (f"{n}:00", f"{n:02d}:00", str(n), f"{n} o'clock"))),
    "server": same(lambda rng: f"{pick(rng, _HOSTS)}{pick(rng, '- 0').strip()}{1 + int(rng.random() * 9)}"),
    "sku": same(lambda rng: f"{any_word(rng)[:3].upper()}-{1 + int(rng.random() * 990)}"),
    "aircraft": same(lambda rng: pick(rng, "ABKLQSTU") + pick(rng, "AFHKLQRSX") + str(100 + int(rng.random() * 8900))),
    "hall": same(lambda rng: made_up(rng).capitalize() if rng.random() < 0.3 else pick(rng, _HALLS)),
}  # fmt: skip


def drawn(rng: Random, p: Parameter) -> Shown:
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
    value, text = _DRAW[kind](rng) if kind in _DRAW else drawn_for_record(rng, kind)
    return bare(value) if kind == "room" else value, text
