"""Clauses with parts that can be asked for: a subject, a verb in one of several moods, an object and a few adjuncts.

Some verbs and nouns are made up: then only the order of words shows which part is which.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Final

from perilune.tasks.problem import pick
from perilune.tasks.records import drawn
from perilune.tasks.wordings import in_words
from perilune.tasks.words import ADJECTIVES, CITIES, NAMES, NOUNS, OBJECTS, PLAIN, SURNAMES, listed, made_up


@dataclass(slots=True)
class Noun:
    """A noun phrase as the text has it, and shorter ones that mean the same in a question."""

    text: str
    short: str
    person: bool = False
    plural: bool = False
    counted: str = ""  # of "nine red boats": "nine", and the short form is "red boats"


@dataclass(slots=True)
class Clause:
    """`parts`: (question word such as "where", part of the text that answers it), the verb's own one first."""

    who: Noun
    verb: tuple[str, ...]  # base, past, participle
    what: Noun | None
    mood: str
    parts: list[tuple[str, str]] = field(default_factory=list)


ACTS: Final = tuple(tuple(row.split()) for row in """
admire admired admired|adopt adopted adopted|arrange arranged arranged|ask asked asked
assemble assembled assembled|attach attached attached|auction auctioned auctioned|bring brought brought
break broke broken|build built built|bury buried buried|buy bought bought|carve carved carved|catch caught caught
change changed changed|chase chased chased|check checked checked|collect collected collected|cover covered covered
cross crossed crossed|damage damaged damaged|dig dug dug|draw drew drawn|dry dried dried|earn earned earned
eat ate eaten|examine examined examined|explain explained explained|fetch fetched fetched|fill filled filled
find found found|follow followed followed|get got got|guard guarded guarded|hang hung hung|heat heated heated
hire hired hired|hold held held|ignore ignored ignored|improve improved improved|inherit inherited inherited
introduce introduced introduced|invite invited invited|keep kept kept|learn learned learned|leave left left
lend lent lent|lift lifted lifted|load loaded loaded|lock locked locked|lose lost lost|love loved loved
make made made|mark marked marked|miss missed missed|mix mixed mixed|name named named|need needed needed
notice noticed noticed|offer offered offered|open opened opened|pass passed passed|pick picked picked
postpone postponed postponed|pour poured poured|prefer preferred preferred|prepare prepared prepared
press pressed pressed|produce produced produced|protect protected protected|pull pulled pulled|push pushed pushed
raise raised raised|read read read|receive received received|recommend recommended recommended
refuse refused refused|report reported reported|require required required|rescue rescued rescued
reserve reserved reserved|save saved saved|score scored scored|see saw seen|sell sold sold|send sent sent
shake shook shaken|share shared shared|show showed shown|sketch sketched sketched|sort sorted sorted
spend spent spent|split split split|spot spotted spotted|steal stole stolen|stop stopped stopped
store stored stored|study studied studied|support supported supported|take took taken|tie tied tied
throw threw thrown|trade traded traded|use used used|wake woke woken|want wanted wanted|warn warned warned
wash washed washed|watch watched watched|wear wore worn|weave wove woven|wrap wrapped wrapped|write wrote written
""".strip().replace("\n", "|").split("|"))  # fmt: skip
STAYS: Final = tuple(tuple(row.split()) for row in """
arrive arrived arrived|bloom bloomed bloomed|camp camped camped|crash crashed crashed|dance danced danced
disappear disappeared disappeared|fall fell fallen|grow grew grown|hide hid hidden|land landed landed
live lived lived|meet met met|move moved moved|play played played|rest rested rested|return returned returned
sing sang sung|sit sat sat|sleep slept slept|start started started|stay stayed stayed|stop stopped stopped
swim swam swum|travel travelled travelled|vanish vanished vanished|wait waited waited|walk walked walked
work worked worked
""".strip().replace("\n", "|").split("|"))  # fmt: skip
_ROLES: Final = listed("""
    owner baker witness captain coach mayor teacher gardener guide driver doctor florist writer engineer manager guard
    farmer singer painter judge nurse clerk cook tailor chairman founder editor referee hunter sister uncle neighbour
    cousin grandfather aunt daughter son colleague tenant inspector winner thief guest speaker director keeper
""")
CREATURES: Final = listed("""
    fox owl heron otter badger lynx seal crane moth ant whale hare stork beetle swan mole cat dog goat crow robot drone
""")
_BODIES: Final = listed("team club company council school family band crew bank firm library hotel committee ministry")
_STUFFS: Final = listed("water oil salt sugar sand coal milk flour wool paint soup tea honey gravel ink cement")
_VEHICLES: Final = listed("train bus taxi ferry bicycle tram plane boat sledge van horse lorry foot")
_AGO: Final = listed("days weeks months years")
_DAYS: Final = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_SEASONS: Final = listed("spring summer autumn winter")
_SPOTS: Final = ("in", "in", "at", "near", "behind", "under", "next to", "on", "above", "outside", "beside", "inside")


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def bare_noun(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.25:
        return made_up(rng)
    return pick(rng, PLAIN if roll < 0.55 else NOUNS).replace("_", " ")


def full_name(rng: Random) -> str:
    first = made_up(rng).capitalize() if rng.random() < 0.3 else pick(rng, NAMES)
    if rng.random() < 0.12:
        return f"{pick(rng, ('Mr.', 'Mrs.', 'Ms.', 'Dr.', 'Prof.', 'Capt.', 'St.', 'J.'))} {pick(rng, SURNAMES)}"
    if rng.random() < 0.55:
        return first
    return f"{first} {made_up(rng).capitalize() if rng.random() < 0.4 else pick(rng, SURNAMES)}"


def quantity(rng: Random) -> str:
    n = 2 + int(10 ** (rng.random() * 3))
    return in_words(n) if n < 21 and rng.random() < 0.4 else f"{n:,}" if rng.random() < 0.4 else str(n)


def doer(rng: Random) -> Noun:
    roll = rng.random()
    if roll < 0.4:
        name = full_name(rng)
        return Noun(name, name.split(" ")[-1 if "." in name else 0] if rng.random() < 0.3 else name, person=True)
    if roll < 0.58:
        role = pick(rng, _ROLES)
        if roll < 0.5:
            name = full_name(rng)
            text = pick(rng, ("the {r}, {n},", "{n}, the {r},", "a {r} called {n}", "the {r} {n}")).format(
                r=role, n=name
            )
            text = text.replace("a owner", "an owner").replace("a en", "an en").replace("a ed", "an ed")
            return Noun(text, f"the {role}" if rng.random() < 0.6 else name, person=True)
        return Noun(f"the {role}", f"the {role}", person=True)
    if roll < 0.72:
        noun = f"the {made_up(rng) if rng.random() < 0.4 else pick(rng, ADJECTIVES)} {pick(rng, _BODIES)}"
        return Noun(noun, noun)
    if roll < 0.82:
        beast = made_up(rng) if rng.random() < 0.3 else pick(rng, CREATURES)
        adjective = pick(rng, ADJECTIVES)
        return Noun(f"the {adjective} {beast}", f"the {beast}" if rng.random() < 0.5 else f"the {adjective} {beast}")
    if roll < 0.9:
        many = _third(pick(rng, _ROLES)).replace("thiefs", "thieves").replace("mans", "men")
        many = f"{pick(rng, ADJECTIVES)} {many}" if rng.random() < 0.5 else many
        return Noun(f"the {many}", f"the {many}", person=True, plural=True)
    name = made_up(rng).capitalize()
    return Noun(name, name)


def deed(rng: Random) -> Noun:
    """A noun phrase as object of a verb."""
    roll, noun = rng.random(), bare_noun(rng)
    if roll < 0.2:
        number, many = quantity(rng), f"{pick(rng, ADJECTIVES)} {pick(rng, OBJECTS)}"
        many = many.split(" ")[1] if rng.random() < 0.6 else many
        return Noun(f"{number} {many}", many, plural=True, counted=number)
    if roll < 0.5:
        adjective = pick(rng, ADJECTIVES) if rng.random() < 0.7 else made_up(rng)
        full = f"{adjective} {noun}"
        return Noun(with_article(full) if rng.random() < 0.5 else f"the {full}", f"the {full}")
    if roll < 0.62:
        stuff = pick(rng, _STUFFS)
        return Noun(f"{pick(rng, ADJECTIVES)} {stuff}" if rng.random() < 0.4 else stuff, f"the {stuff}")
    if roll < 0.72:
        full = f"the {noun} of {full_name(rng) if rng.random() < 0.5 else 'the ' + pick(rng, _ROLES)}"
        return Noun(full, full)
    return Noun(with_article(noun) if rng.random() < 0.4 else f"the {noun}", f"the {noun}")


# ---- adjuncts: the question's words, and the part ------------------------------------------------------------------

Part = tuple[str, str]


def where(rng: Random) -> Part:
    roll = rng.random()
    if roll < 0.35:
        city = made_up(rng).capitalize() if rng.random() < 0.4 else pick(rng, CITIES)
        return pick(rng, ("where", "where", "in which city", "in what town")), f"in {city}"
    if roll < 0.42:
        return pick(rng, ("where", "in which street", "on which street")), f"on {made_up(rng).capitalize()} Street"
    if roll < 0.5:
        return pick(rng, ("where", "in which room")), f"in room {int(rng.random() * 400)}"
    noun = bare_noun(rng)
    full = f"{pick(rng, ADJECTIVES)} {noun}" if rng.random() < 0.4 else noun
    return "where", f"{pick(rng, _SPOTS)} {with_article(full) if rng.random() < 0.3 else 'the ' + full}"


def when(rng: Random) -> Part:
    roll = int(rng.random() * 10)
    if roll == 0:
        return pick(rng, ("when", "in which year", "what year")), f"in {1700 + int(rng.random() * 330)}"
    if roll == 1:
        return pick(rng, ("when", "on which day", "what day")), f"on {pick(rng, _DAYS)}"
    if roll == 2:
        return pick(rng, ("when", "on what date")), f"on {drawn(rng, 'date')[1]}"
    if roll == 3:
        return pick(rng, ("when", "at what time", "what time")), f"at {drawn(rng, 'clock')[1]}"
    if roll == 4:
        return "when", f"{quantity(rng)} {pick(rng, _AGO)} {pick(rng, ('later', 'ago', 'before'))}"
    if roll == 5:
        return pick(rng, ("how long", "for how long")), f"for {quantity(rng)} {pick(rng, ('hours', *_AGO))}"
    if roll == 6:
        return pick(rng, ("until when", "how long")), f"until {pick(rng, (*_DAYS, 'noon', 'dawn', 'midnight'))}"
    if roll == 7:
        return pick(rng, ("how often", "when")), f"every {pick(rng, ('second ', '', '', 'other '))}{pick(rng, _DAYS)}"
    if roll == 8:
        return "when", f"{pick(rng, ('before', 'after', 'during'))} the {bare_noun(rng)}"
    return "when", pick(rng, ("last {}", "in {}", "next {}", "in late {}", "this {}")).format(pick(rng, _SEASONS))


def _reason(rng: Random) -> Part:
    noun = bare_noun(rng)
    return pick(rng, ("why", "why", "for what reason")), pick(
        rng, ("because of {n}", "because the {b} was too {a}", "because {w} asked for it", "due to {n}",
        "to please {w}", "because there was no {b}", "to save the {b}", "because the {b} had {v}", "out of {b}",
        "in order to {c} the {b}", "since the {b} was {a}", "because {w} had {v} the {b}", "for the sake of {w}"),
    ).format(n=with_article(noun), b=noun, a=pick(rng, ADJECTIVES), w=full_name(rng), v=pick(rng, ACTS)[2],
        c=pick(rng, ACTS)[0])  # fmt: skip


def _means(rng: Random) -> Part:
    if rng.random() < 0.4:
        vehicle = pick(rng, _VEHICLES)
        return "how", f"on {vehicle}" if vehicle == "foot" else f"by {vehicle}"
    noun = bare_noun(rng)
    full = f"{pick(rng, ADJECTIVES)} {noun}" if rng.random() < 0.5 else noun
    return pick(rng, ("how", "with what", "using what")), f"with {with_article(full)}"


def _partner(rng: Random) -> Part:
    if rng.random() < 0.5:
        return pick(rng, ("with whom", "together with whom")), f"with {full_name(rng)}"
    return pick(rng, ("for whom", "for which person")), f"for {full_name(rng)}"


def _price(rng: Random) -> Part:
    money = pick(rng, ("{} euros", "${}", "{} dollars", "{} francs", "EUR {}", "{} crowns")).format(quantity(rng))
    return pick(rng, ("for how much", "at what price", "for how much money")), f"for {money}"


def _receiver(rng: Random) -> Part:
    if rng.random() < 0.5:
        return pick(rng, ("to whom", "to which person")), f"to {full_name(rng)}"
    return pick(rng, ("from whom", "from which person")), f"from {full_name(rng)}"


_ADJUNCTS: Final = (where, where, where, when, when, when, _reason, _means, _partner)
_GIVEN: Final = listed("sell send bring lend show get buy take offer throw receive inherit fetch read write steal")


def invented(rng: Random) -> tuple[str, ...]:
    stem = made_up(rng).rstrip("aeiouy") or "blor"
    return stem, stem + "ed", stem + "ed"


def clause(rng: Random, verb: tuple[str, ...] = (), who: Noun | None = None) -> Clause:
    """A clause with one to three adjuncts; `verb` and `who` fix those."""
    stays = not verb and rng.random() < 0.25
    if not verb:
        verb = pick(rng, STAYS) if stays else invented(rng) if rng.random() < 0.12 else pick(rng, ACTS)
    stays = stays or verb in STAYS
    made = Clause(who or doer(rng), verb, None if stays else deed(rng), pick(rng, _MOODS))
    kinds = dict.fromkeys([pick(rng, _ADJUNCTS) for _ in range(1 + int(rng.random() * 2.4))])
    if verb[0] in _GIVEN and rng.random() < 0.5:
        kinds = dict.fromkeys([_price if verb[0] in ("sell", "buy") and rng.random() < 0.6 else _receiver, *kinds])
    made.parts = [kind(rng) for kind in kinds]
    return made


_MOODS: Final = ("past", "past", "past", "past", "present", "present", "will", "passive", "passive", "must", "can")


def _third(base: str) -> str:
    if base.endswith(("s", "sh", "ch", "x", "o")):
        return base + "es"
    return base[:-1] + "ies" if base[-1] == "y" and base[-2] not in "aeiou" else base + "s"


def finite(made: Clause) -> str:
    """The verb in the clause's mood, after its subject."""
    base, past, _ = made.verb
    if made.mood in ("will", "must", "can"):
        return f"{made.mood} {base}"
    if made.mood == "present":
        return base if made.who.plural else _third(base)
    return past


def passive(made: Clause) -> bool:
    return made.mood == "passive" and made.what is not None


def sentence(rng: Random, made: Clause) -> str:
    """The clause without a capital or a full stop; an adjunct may stand first."""
    parts = [text for _, text in made.parts]
    rng.shuffle(parts)
    first = parts.pop() if len(parts) and rng.random() < 0.25 else ""
    if made.what and passive(made):
        were = "were" if made.what.plural else "was"
        between = f" {parts.pop()}" if parts and rng.random() < 0.3 else ""
        core = f"{made.what.text} {were} {made.verb[2]}{between} by {made.who.text}"
        core = core.rstrip(",") if not parts else core
    else:
        core = f"{made.who.text} {finite(made)}" + (f" {made.what.text}" if made.what else "")
    text = " ".join([core, *parts])
    return (f"{first}{pick(rng, (', ', ' '))}{text}" if first else text).rstrip(",")
