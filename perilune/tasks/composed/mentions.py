"""Values mentioned in running text beside the word that the key is made of, for `json_extract`.

A value of any kind (person, place, number, amount, code, date, flag, list, choice) is attached to a noun in one of many
ways of speech: before it, after it, with a verb between, in brackets, as "no parking". The nouns are drawn from all
nouns and from made-up words, so that what is learnt is which value goes with which word, not what is usual. A key is
the noun itself, with other words at times, and the mentions are chained to sentences with clauses that do not matter.
"""

from dataclasses import dataclass
from random import Random
from typing import Any, Final

from perilune.tasks.composed.clauses import ACTS, bare_noun, clause, full_name, sentence, with_article
from perilune.tasks.composed.subjects import ASIDES
from perilune.tasks.fields import NEW_BASES
from perilune.tasks.problem import pick
from perilune.tasks.records import drawn
from perilune.tasks.wordings import capital, enumerated, in_words
from perilune.tasks.words import ADJECTIVES, CITIES, OBJECTS, any_word, compound, listed, made_up


@dataclass(frozen=True, slots=True)
class Mention:
    """`key` in words; `text`: a part of a sentence, or (`whole`) a sentence without its full stop."""

    key: str
    value: Any
    text: str
    whole: bool = False


_KEPT: Final = tuple([base.replace("_", " ") for bases in NEW_BASES.values() for base in bases])
_ROLES: Final = listed("""
    owner witness captain coach guide driver founder editor referee manager inspector winner speaker contact host author
    designer buyer seller tenant keeper sponsor assistant trainer supervisor agent technician translator reporter
""")
_PLACES: Final = listed("city office branch workshop station stop garage venue location home origin destination base")
_UNITS: Final = listed("""
    seats rooms pages points tickets guests floors hours minutes days weeks nights goals votes steps windows wheels
    doors books copies members students beds tables chairs boxes crates items pieces tracks levels stars batteries lamps
""")
_SIZES: Final = ("weight:kg", "length:cm", "height:m", "distance:km", "volume:litres", "power:watts", "speed:km/h",
    "area:m2", "depth:m", "duration:minutes", "price:euros", "fee:dollars", "rent:euros", "temperature:degrees",
    "width:mm", "range:km", "discount:percent", "budget:euros", "cost:francs", "capacity:litres")  # fmt: skip
_FLAGS: Final = listed("""
    parking breakfast balcony heating wifi parking pets smoking garden lift pool receipt signature helmet battery
    licence deposit delivery lunch shower radio kitchen insurance roof camera alarm guarantee manual charger
    towels cleaning
""")
_STATES: Final = tuple(
    [
        row.split(":")
        for row in """
in stock:is available right now:is sold out at the moment:can be had at once:is out of stock, sorry:have run out of it
open:is open as usual:is shut today:opens its doors again:stays closed for now:has closed for good
paid:has been paid in full:still has to be paid:was settled last week:remains unpaid:nobody has paid for it yet
finished:is done at last:is still being worked on:was completed in time:is not ready yet:will take a while longer
working:runs fine again:is broken:does its job:does not start any more:stopped last night
urgent:cannot wait any longer:can wait:has to happen at once:is in no hurry at all:there is plenty of time
vegetarian:has no meat in it:comes with bacon:is made without meat or fish:contains chicken:is full of beef
""".strip().split("\n")
    ]
)  # key, true, false, true, false, false
_CODES: Final = ("serial number", "order number", "customer number", "part number", "case number", "reference", "code",
    "ticket number", "invoice number", "plate", "tracking code", "model number", "batch", "member id")  # fmt: skip
_CHOSEN: Final = ("color", "size", "status", "condition", "mood", "kind", "level", "shape", "grade", "mode")
_WORTH: Final[dict[str, tuple[str, ...]]] = {
    "color": ("red", "blue", "green", "white", "black", "yellow", "grey", "brown", "purple", "orange"),
    "size": ("small", "medium", "large", "tiny", "huge"), "status": ("open", "closed", "pending", "sold", "paused"),
    "condition": ("new", "used", "damaged", "worn", "clean"), "mood": ("happy", "calm", "angry", "tired", "nervous"),
    "level": ("easy", "medium", "hard", "basic"), "shape": ("round", "square", "oval", "flat", "long"),
    "grade": ("good", "fair", "poor", "excellent"), "mode": ("manual", "automatic", "silent", "fast"),
}  # fmt: skip


def _noun(rng: Random) -> str:
    """A noun that no structural problem has as a key."""
    while (noun := bare_noun(rng)).endswith(_KEPT):
        pass
    return noun


def _key_noun(rng: Random, usual: tuple[str, ...]) -> str:
    return _noun(rng) if rng.random() < 0.25 else pick(rng, usual)


def _person(rng: Random) -> Mention:
    role, name = _key_noun(rng, _ROLES), full_name(rng)
    forms = ("{n} is the {k}", "the {k} is {n}", "the {k}, {n}, {v} it", "{n}, the {k}, {v} it",
        "the {k}'s name is {n}", "{n} was there as {k}", "we chose {n} as {k}", "{k} {n} {v} it",
        "ask {n}, who is the {k}", "the new {k} is called {n}", "{n} works as the {k} now")  # fmt: skip
    parts = ("with {n} as {k}", "{k} {n}", "{k}: {n}", "{n} ({k})", "the {k} being {n}", "by {k} {n}")
    return _made(rng, role, name, forms, parts, n=name, v=pick(rng, ACTS)[1])


def _made(rng: Random, key: str, value: Any, forms: tuple[str, ...], parts: tuple[str, ...], **words: str) -> Mention:
    whole = rng.random() < 0.55
    return Mention(key, value, pick(rng, forms if whole else parts).format(k=key, **words), whole)


def _place(rng: Random) -> Mention:
    key = _key_noun(rng, _PLACES)
    city = made_up(rng).capitalize() if rng.random() < 0.4 else pick(rng, CITIES)
    forms = ("the {k} is {n}", "the {k} is in {n}", "{n} is the {k}", "as {k} we picked {n}", "its {k} moved to {n}",
        "they have their {k} in {n}", "the {k} lies in {n}")  # fmt: skip
    return _made(rng, key, city, forms, ("with its {k} in {n}", "{k} {n}", "{k}: {n}", "{k} in {n}"), n=city)


def _count(rng: Random) -> Mention:
    key = _key_noun(rng, _UNITS)
    key = key if key.endswith("s") else key[:-1] + "ies" if key[-2:] in ("ty", "xy", "ry", "ny", "cy") else key + "s"
    n = 2 + int(10 ** (rng.random() * 3.3))
    shown = in_words(n) if n < 21 and rng.random() < 0.35 else f"{n:,}" if rng.random() < 0.3 else str(n)
    forms = ("there are {n} {k}", "it has {n} {k}", "we counted {n} {k}", "the number of {k} is {n}",
        "{n} {k} were {v}", "that makes {n} {k}", "they {w} {n} {k}", "it took {n} {k}", "only {n} {k} are left",
        "you get {n} {k}", "{k} came to {n}")  # fmt: skip
    more = ("{k}", "{k}", "{k}", "number of {k}", "{k} count", "{k} total")
    made = _made(rng, key, n, forms, ("with {n} {k}", "{n} {k}", "{k}: {n}", "{k} {n}", "for {n} {k}", "of {n} {k}"),
        n=shown, v=(verb := pick(rng, ACTS))[2], w=verb[1])  # fmt: skip
    return Mention(pick(rng, more).format(k=key), n, made.text, made.whole)


def _size(rng: Random) -> Mention:
    key, _, unit = pick(rng, _SIZES).partition(":")
    if rng.random() < 0.15:
        key = made_up(rng)
    value: float = 1 + int(10 ** (rng.random() * 3.6))
    if rng.random() < 0.45:
        value = round(value + 1 + int(rng.random() * 99) / 100, 2)
    shown = f"{value:,}" if rng.random() < 0.3 else str(value)
    if unit == "euros" and rng.random() < 0.4:
        shown, unit = f"${shown}" if rng.random() < 0.5 else f"EUR {shown}", ""
    text = f"{shown} {unit}".rstrip()
    forms = ("the {k} is {n}", "its {k} comes to {n}", "for the {k} they wrote {n}", "the {k} was {n}, they say",
        "with {n} the {k} is fine", "the {k} went up to {n}", "we measured a {k} of {n}", "{n} is the {k}")  # fmt: skip
    made = _made(rng, key, value, forms, ("{k} {n}", "{k}: {n}", "a {k} of {n}", "{n} {k}", "{k} of {n}"), n=text)
    keyed = f"{key} {unit}" if unit in ("kg", "cm", "km", "euros", "minutes", "percent") and rng.random() < 0.3 else key
    return Mention(keyed, value, made.text, made.whole)


def _flag(rng: Random) -> Mention:
    key, held = _key_noun(rng, _FLAGS), rng.random() < 0.5
    yes = ("there is {a}{k}", "it comes with {a}{k}", "{k} is included", "{k}: yes", "{k} available",
        "the {k} is there", "{k} is allowed", "we do have {a}{k}", "it has {a}{k}", "{k} can be had",
        "you will find {a}{k} there")  # fmt: skip
    no = ("there is no {k}", "it comes without {k}", "{k} is not included", "{k}: no", "no {k} available",
        "the {k} is missing", "{k} is not allowed", "we do not have {a}{k}", "it has no {k}", "nothing with {k}",
        "you need not look for {a}{k}", "it lacks {a}{k}")  # fmt: skip
    parts = ("with {k}", "including {k}", "{k} yes", "plus {k}") if held else ("without {k}", "no {k}", "{k} no")
    article = "" if key in ("parking", "smoking", "heating", "pets", "towels", "cleaning") else "a "
    article = "an " if article and key[0] in "aeiou" else article
    made = _made(rng, key, held, yes if held else no, parts, a=article)
    named = pick(rng, ("{k}", "{k}", "has {k}", "with {k}", "{k} included", "{k} available")).format(k=key)
    return Mention(named, held, made.text, made.whole)


def _state(rng: Random) -> Mention:
    """A boolean, stated in other words than its key."""
    key, yes, no, also, never, nor = pick(rng, _STATES)
    held = rng.random() < 0.5
    text = pick(rng, (yes, also) if held else (no, never, nor))
    if not text.startswith(("nobody", "there")):
        text = f"{'we' if text.startswith('have') else pick(rng, ('it', 'this one', 'the thing'))} {text}"
    return Mention(pick(rng, (key, key, f"is {key}")), held, text, True)


def _code(rng: Random) -> Mention:
    key, code = pick(rng, _CODES) if rng.random() < 0.8 else _noun(rng), drawn(rng, "code")[1]
    forms = ("the {k} is {n}", "it has the {k} {n}", "please quote {k} {n}", "{n} is its {k}",
        "you find it under {k} {n}", "the label says {n} as {k}", "{k} {n} was used")  # fmt: skip
    return _made(rng, key, code, forms, ("({k} {n})", "{k} {n}", "{k}: {n}", "with the {k} {n}"), n=code)


def _moment(rng: Random) -> Mention:
    kind = pick(rng, ("date", "clock", "weekday"))
    shown = drawn(rng, kind)[1]
    key = pick(rng, ("start", "end", "arrival", "departure", "deadline", "delivery", "opening", "pickup", "visit"))
    key = _noun(rng) if rng.random() < 0.15 else key
    by = {"date": "on", "clock": "at", "weekday": "on"}[kind]
    named = pick(rng, ("{k}", "{k}", "{k} " + {"date": "date", "clock": "time", "weekday": "day"}[kind])).format(k=key)
    forms = ("the {k} is {b} {n}", "{k} {b} {n}", "{n} is the {k}", "{b} {n} there is the {k}",
        "the {k} was set to {n}", "we plan the {k} for {n}")  # fmt: skip
    made = _made(rng, key, shown, forms, ("{k} {b} {n}", "{k}: {n}", "{k} {n}", "with the {k} {b} {n}"), n=shown, b=by)
    return Mention(named, shown, made.text, made.whole)


def _choice(rng: Random) -> Mention:
    key = pick(rng, _CHOSEN)
    worth = pick(rng, _WORTH[key]) if key in _WORTH and rng.random() < 0.7 else compound(rng)
    forms = ("the {k} is {n}", "its {k} was {n}", "I would call the {k} {n}", "{n} is the {k}",
        "we chose {n} as the {k}", "{k} {n}, as before")  # fmt: skip
    return _made(rng, key, worth, forms, ("{k} {n}", "{k}: {n}", "in {k} {n}", "of {k} {n}", "{n} ({k})"), n=worth)


def _list(rng: Random) -> Mention:
    keys = listed("items extras colors tools topics guests parts toppings languages cities")
    key = made_up(rng) + "s" if rng.random() < 0.2 else pick(rng, keys)
    things = any_word if rng.random() < 0.6 else lambda rng: pick(rng, OBJECTS) if rng.random() < 0.6 else compound(rng)
    draw = full_name if key == "guests" else things
    found = list(dict.fromkeys(draw(rng) for _ in range(2 + int(rng.random() * 3))))
    join = pick(rng, (" and ", " and ", ", ", " as well as ", " plus "))
    shown = enumerated([with_article(w) for w in found], join) if draw is any_word and rng.random() < 0.4 else (
        enumerated(found, join))  # fmt: skip
    forms = ("the {k} are {n}", "we have these {k}: {n}", "as {k} there are {n}", "{n} are the {k}", "the {k} were {n}")
    return _made(rng, key, found, forms, ("{k}: {n}", "with the {k} {n}", "{k} {n}", "({k}: {n})"), n=shown)


def _called(rng: Random) -> Mention:
    key = _noun(rng)
    name = f"{made_up(rng).capitalize()}{pick(rng, ('', '', ' ' + made_up(rng).capitalize(), ' ' + pick(rng, 'ABXZ')))}"
    adjective = pick(rng, ADJECTIVES)
    forms = ("the {k} is called {n}", "the {k} {n} is {j}", "{n} is the name of the {k}", "the {k} {n} was {v}",
        "a {j} {k} named {n} was {v}", "they named the {k} {n}", "{n}, a {k}, was {v}")  # fmt: skip
    made = _made(rng, key, name, forms, ("{k} {n}", "the {k} {n}", "{k}: {n}", "from the {k} {n}"), n=name, j=adjective,
        v=pick(rng, ACTS)[2])  # fmt: skip
    return Mention(pick(rng, ("{k}", "{k}", "{k} name")).format(k=key), name, made.text, made.whole)


# Values that imply their key, which is not in the text.
_SORTS: Final = {key: tuple(found.split(",")) for key, found in (row.split(":") for row in """
species:herons,otters,red foxes,seals,barn owls,storks,bats,wild boars,deer,swans,moles,crayfish,lynxes,toads
fruit:pears,plums,red apples,figs,cherries,limes,quinces,peaches
instrument:cello,trumpet,flute,drums,banjo,bass guitar,harp,church organ
vehicle:van,tractor,bicycle,moped,minibus,cargo bike,lorry,tram
material:oak,steel,linen,brass,recycled glass,cork,slate,wool,bamboo
sport:rowing,judo,table tennis,hockey,fencing,cross-country skiing,handball
drink:green tea,cider,lemonade,cocoa,tomato juice,espresso
crop:barley,rye,maize,sugar beet,hops,potatoes,oats
product:garden hose,desk lamp,kettle,bread knife,tent,phone case,wool blanket,step ladder
profession:plumber,night nurse,baker,judge,tax adviser,welder,beekeeper
dish:lentil soup,lasagne,fish pie,goulash,mushroom risotto,pancakes
furniture:bookcase,armchair,bunk bed,oak table,wardrobe,desk
tool:chisel,spirit level,drill,tin snips,hand saw,wrench
subject:algebra,modern history,botany,art,chemistry,Latin
weather:fog,light rain,hail,heavy snow,sunshine,thunderstorms
""".strip().split("\n"))}  # fmt: skip
_GRAMS: Final = listed("flour sugar butter rice salt oats cheese milk cream honey nuts spinach sand cement clay")


def _sort(rng: Random) -> Mention:
    key = pick(rng, tuple(_SORTS))
    forms = ("we saw {n} there", "they talk about {n}", "this time it was {n}", "it is about {n}", "{n} again",
        "nothing but {n}", "I ordered {n}", "it says {n}", "she is very fond of {n}", "{n}, of course",
        "there was a lot of talk about {n}", "they have {n} now")  # fmt: skip
    thing = pick(rng, _SORTS[key]) if rng.random() < 0.8 else compound(rng)
    return _made(rng, key, thing, forms, ("with {n}", "{n}", "{n} as usual", "for {n}", "about {n}"), n=thing)


def _measured(rng: Random) -> Mention:
    """A quantity of a thing; the key names the thing and the unit."""
    thing = pick(rng, _GRAMS) if rng.random() < 0.6 else any_word(rng)
    unit, names = pick(rng, (("g", "g"), ("kg", "kg"), ("ml", "ml"), ("grams", "g"), ("litres", "l"), ("cups", "cups")))
    n = 1 + int(10 ** (rng.random() * 2.9))
    forms = ("you need {n} {u} of {k}", "take {n} {u} {k}", "it takes {n} {u} of {k}", "add {n} {u} of {k}")
    parts = ("{k} {n} {u}", "{n} {u} {k}", "{n} {u} of {k}", "{k}: {n} {u}", "{k} ({n} {u})")
    made = _made(rng, thing, n, forms, parts, n=str(n), u=unit)
    return Mention(f"{thing} {names}" if rng.random() < 0.7 else thing, n, made.text, made.whole)


_KINDS: Final = (
    _sort, _measured, _state, _person, _person, _place, _count, _count, _size, _size, _flag, _code, _moment, _choice,
    _list, _called,
)  # fmt: skip
_OPENINGS: Final = ("Here are the details: ", "Hi, ", "Note: ", "For the file: ", "", "", "", "", "Dear all, ", "FYI ",
    "As discussed, ", "Offer: ", "Hello, just to let you know: ", "To whom it may concern: ", "Update: ")  # fmt: skip


def mentions(rng: Random) -> list[Mention]:
    """Two to seven mentions: keys share no word, no value occurs twice."""
    found: list[Mention] = []
    words: set[str] = set()
    for _ in range(2 + int(rng.random() * 6)):
        one = pick(rng, _KINDS)(rng)
        parts = set(one.key.rstrip("s").split(" "))
        again = one.key in _SORTS and any(other.key in _SORTS for other in found)
        if not again and not parts & words and all(str(one.value) not in other.text for other in found):
            words |= parts
            found.append(one)
    return found if len(found) > 1 else mentions(rng)


def _begun(one: Mention) -> str:
    """The text with a capital, unless it begins with a value, which stays as it is."""
    first = one.value[0] if isinstance(one.value, list) else one.value
    return one.text if one.text.startswith(str(first)) else capital(one.text)


def text_of(rng: Random, stated: list[Mention]) -> str:
    """Sentences with all of them, in the order given, and now and then with clauses that do not matter."""
    out = pick(rng, _OPENINGS)
    style = rng.random()
    open_ = False  # whether a sentence is under way
    for one in stated:
        if one.whole:
            if open_ and rng.random() < 0.45:
                out += pick(rng, (", and ", "; ", " and ", ", but ", ", while ")) + one.text
            else:
                out += (". " if open_ else "") + (one.text if out and style < 0.1 else _begun(one))
        elif open_:
            out += pick(rng, (", ", ", ", " - ", "; ", " and ")) + one.text
        else:
            out += _begun(one)
        open_ = True
        if rng.random() < 0.14:
            made = sentence(rng, clause(rng)) if rng.random() < 0.6 else pick(rng, ASIDES).rstrip(".")
            out += ". " + capital(made) + ". "
            open_ = False
    return out.rstrip() + ("." if open_ else "")
