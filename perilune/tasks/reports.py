"""Paragraphs that report who did what, when, where, why and with whom, and questions about one of their parts.

Sentences are put together from parts, and a question asks for one part with the others as given, so that the words
vary independently of the questions. Answers are copied from the paragraph.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.problem import pick
from perilune.tasks.wordings import in_words
from perilune.tasks.words import ADJECTIVES, CITIES, NAMES, OBJECTS, PLAIN, SURNAMES, listed, made_up

_VERBS: Final = tuple(tuple(row.split()) for row in """
build built built|found founded founded|open opened opened|close closed closed|buy bought bought|sell sold sold
paint painted painted|repair repaired repaired|invent invented invented|discover discovered discovered
write wrote written|lose lost lost
steal stole stolen|find found found|design designed designed|plant planted planted|clean cleaned cleaned
destroy destroyed destroyed|win won won|break broke broken|order ordered ordered|visit visited visited
rent rented rented|move moved moved
test tested tested|record recorded recorded|publish published published|restore restored restored|sink sank sunk
carry carried carried|hide hid hidden|burn burned burned|describe described described|film filmed filmed
photograph photographed photographed
inspect inspected inspected|measure measured measured|borrow borrowed borrowed|return returned returned
deliver delivered delivered|pack packed packed|collect collected collected|donate donated donated
display displayed displayed|finish finished finished
start started started|run ran run|lead led led|plan planned planned|replace replaced replaced|remove removed removed
install installed installed|fix fixed fixed|sign signed signed|print printed printed|translate translated translated
sing sang sung
bake baked baked|cook cooked cooked|serve served served|taste tasted tasted|grow grew grown|cut cut cut|draw drew drawn
teach taught taught|present presented presented|advertise advertised advertised|cancel cancelled cancelled
organise organised organised
rescue rescued rescued|catch caught caught|feed fed fed|train trained trained|count counted counted
weigh weighed weighed|choose chose chosen|keep kept kept|forget forgot forgotten|mention mentioned mentioned
approve approved approved|reject rejected rejected
""".replace("\n", "|").strip("|").split("|"))  # fmt: skip
_THINGS: Final = listed("""
    bridge tower museum school church mill factory hotel library theatre market garden statue clock painting ship boat
    canal road dam well wall gate barn shop bakery brewery station hall stadium pool cinema studio workshop camera
    piano organ machine
    engine tractor bicycle wagon map letter report novel poem song film recipe cake bread soup contract law plan
    project survey concert race course school_bus laptop server website program printer sensor robot satellite vaccine
    medicine fossil coin
    treasure ring crown flag tent kite lamp mirror carpet dress coat chair table cabinet roof door window fence forest
    island cave
""")  # fmt: skip
_GROUPS: Final = ("the villagers", "the council", "the students", "a group of friends", "two brothers", "the monks",
    "the police", "the firm", "three engineers", "the club", "a young doctor", "the mayor", "the neighbours",
    "an old fisherman", "the museum",
                  "the crew", "a local artist", "the workers", "a team of scientists", "the owner", "a merchant",
                  "the parents", "the city", "her grandmother", "a French architect", "the volunteers",
                  "a retired teacher", "the new manager", "the tourists")  # fmt: skip
_TIMES: Final = ("in {y}", "in {y}", "in {y}", "on {d} {M}", "on {W}", "last {S}", "in {M} {y}", "two years ago",
    "yesterday", "at noon", "in the {S} of {y}", "on {M} {d}, {y}", "after the war", "during the night", "last week",
    "this morning", "at {h} o'clock", "before the storm", "every {W}")  # fmt: skip
_WHERES: Final = ("in {c}", "in {c}", "in {c}", "near {c}", "behind the {t}", "in front of the {t}", "next to the {t}",
    "on the {a} hill", "by the river", "at the {t}", "under the {t}", "on the {a} island", "in the {a} valley",
    "on {N} Street", "in the old town", "at the edge of the forest", "in the cellar", "along the coast")  # fmt: skip
_WHYS: Final = ("because the {t} was too small", "because it was {a}", "to save money", "because nobody used the {t}",
    "because the {t} had burned down", "to help the poor", "because the weather was bad", "because of a strike",
    "to honour {P}", "because they needed a new {t}",
                "to attract more visitors", "because the old one was broken", "because prices had risen", "for fun",
                "to protect the {t}", "because of the {a} winter", "because there was no {t}", "to win a bet",
                "because it was late")  # fmt: skip
_WITH: Final = ("with {P}", "together with {P}", "with the help of {P}", "with a {a} {t}",
    "with {n} helpers")  # fmt: skip
_SEASONS: Final = ("spring", "summer", "autumn", "winter")
_MONTHS: Final = listed("""
        January February March April May June July August September October November December
    """)  # fmt: skip
_DAYS: Final = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_SOURCES: Final = ("", "", "", "", "", "In the end ", "As far as we know, ", "It is said that ",
    "According to the paper, ", "Surprisingly, ", "Later, ", "At that time ", "Then ")  # fmt: skip
# Lasting facts: sentence, questions, what the answer is in the sentence.
_FACTS: Final = (
    ("{x} is {n} metres high.", ("How high is {x}?", "What is the height of {x}?", "How tall is {x}?"), "{n} metres"),
    ("{x} is {n} metres long.", ("How long is {x}?", "What is the length of {x}?"), "{n} metres"),
    ("{x} is made of {m}.", ("What is {x} made of?", "Which material is {x} made of?"), "{m}"),
    ("{x} belongs to {p}.", ("Who owns {x}?", "Who does {x} belong to?", "To whom does {x} belong?"), "{p}"),
    ("{x} opens at {h}.", ("When does {x} open?", "At what time does {x} open?"), "{h}"),
    ("{x} closes at {h}.", ("When does {x} close?", "At what time does {x} close?", "Until when is {x} open?"), "{h}"),
    ("{x} is painted {c}.", ("What colour is {x}?", "In which colour is {x} painted?"), "{c}"),
    ("{x} weighs {n} kilograms.", ("How heavy is {x}?", "How much does {x} weigh?"), "{n} kilograms"),
    ("{x} has {n} rooms.", ("How many rooms does {x} have?", "How many rooms are there in {x}?"), "{n}"),
    ("{x} has {n} windows.", ("How many windows does {x} have?",), "{n}"),
    ("{x} is called {w}.", ("What is {x} called?", "What is the name of {x}?"), "{w}"),
    ("{x} costs {n} euros.", ("How much does {x} cost?", "What does {x} cost?", "What is the price of {x}?"),
        "{n} euros"),
    ("{x} was named after {p}.", ("Who was {x} named after?", "After whom was {x} named?"), "{p}"),
    ("{x} holds {n} people.", ("How many people fit into {x}?", "How many people does {x} hold?"), "{n}"),
    ("{x} lies {n} km from {city}.", ("How far is {x} from {city}?",), "{n} km"),
    ("Entry to {x} is {n} dollars.", ("How much is the entry to {x}?", "What does it cost to enter {x}?"),
        "{n} dollars"),
    ("{x} is run by {p}.", ("Who runs {x}?", "By whom is {x} run?"), "{p}"),
    ("{x} is {n} years old.", ("How old is {x}?", "What is the age of {x}?"), "{n} years"),
    ("{x} can be reached by {v}.", ("How can {x} be reached?", "How do you get to {x}?"), "by {v}"),
    ("{x} is closed on {d}.", ("On which day is {x} closed?", "When is {x} closed?"), "{d}"),
    ("{x} is open from {h} to {h2}.", ("When does {x} open?", "From when is {x} open?"), "{h}"),
    ("The best time to see {x} is {s}.", ("What is the best time to see {x}?", "When should one see {x}?"), "{s}"),
    ("{x} is famous for its {w2}.", ("What is {x} famous for?", "What is {x} known for?"), "its {w2}"),
    ("{x} takes {n} minutes.", ("How long does {x} take?", "How many minutes does {x} take?"), "{n} minutes"),
    ("{x} attracts {n} visitors a year.", ("How many visitors does {x} attract a year?",
        "How many people visit {x} each year?"), "{n}"), ("{x} has a battery that lasts {n} hours.",
        ("How long does the battery of {x} last?",), "{n} hours"),
    ("{p} lives in {city}.", ("Where does {p} live?", "In which city does {p} live?"), "{city}"),
    ("{p} works as a {j}.", ("What does {p} work as?", "What is {p}'s job?"), "a {j}"),
    ("{p} speaks {l}.", ("Which language does {p} speak?", "What language does {p} speak?"), "{l}"),
    ("{p} was born in {y}.", ("When was {p} born?", "In which year was {p} born?"), "{y}"),
    ("{p} has {n} children.", ("How many children does {p} have?",), "{n}"),
    ("{p} likes {o} best.", ("What does {p} like best?",), "{o}"),
    ("{p} plays the {i}.", ("Which instrument does {p} play?", "What does {p} play?"), "the {i}"),
    ("{p} is married to {p2}.", ("Who is {p} married to?", "Whom did {p} marry?"), "{p2}"),
    ("{p}'s dog is called {w}.", ("What is {p}'s dog called?", "What is the name of {p}'s dog?"), "{w}"),
)  # fmt: skip
_MATERIALS: Final = listed("""
        wood stone glass steel brick bronze marble paper clay copper iron silk wool concrete plastic bamboo ice leather
    """)  # fmt: skip
_VEHICLES: Final = ("train", "boat", "bus", "cable car", "tram", "plane", "foot bridge")
_JOBS: Final = listed("""
        baker teacher nurse painter lawyer fisherman tailor carpenter singer chemist farmer judge librarian gardener
    """)  # fmt: skip
_LANGUAGES: Final = listed("""
        French Polish Arabic Hindi Japanese Swahili Dutch Greek Turkish Finnish Portuguese Welsh Danish Czech
    """)  # fmt: skip
_INSTRUMENTS: Final = listed("violin piano flute guitar drums cello trumpet harp organ clarinet")
_COLOURS: Final = listed("""
        red blue green yellow black white grey brown orange purple pink turquoise
    """)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """A paragraph, a question about it, the sentence that answers, the answer."""

    text: str
    question: str
    sentence: str
    answer: str


def _person(rng: Random) -> str:
    first = made_up(rng).capitalize() if rng.random() < 0.2 else pick(rng, NAMES)
    return (
        first
        if rng.random() < 0.3
        else f"{first} {made_up(rng).capitalize() if rng.random() < 0.3 else pick(rng, SURNAMES)}"
    )


def _word(rng: Random) -> str:
    return made_up(rng) if rng.random() < 0.5 else pick(rng, PLAIN)


def _thing(rng: Random) -> str:
    """What is done something to: a noun with an article, an adjective or a name, or a number of things."""
    roll, noun = rng.random(), pick(rng, _THINGS).replace("_", " ")
    if roll < 0.3:
        return f"the {noun}"
    if roll < 0.55:
        return f"the {pick(rng, ADJECTIVES)} {noun}"
    if roll < 0.7:
        return f"the {_word(rng)} {noun}"
    if roll < 0.85:
        return f"the {made_up(rng).capitalize()} {noun.capitalize()}"
    return f"{_number(rng)} {pick(rng, OBJECTS)}"


def _number(rng: Random) -> str:
    n = 2 + int(10 ** (rng.random() * 3))
    return in_words(n) if n < 13 and rng.random() < 0.5 else f"{n:,}" if rng.random() < 0.5 else str(n)


def _filled(rng: Random, form: str) -> str:
    return form.format(
        y=1700 + int(rng.random() * 330), d=1 + int(rng.random() * 28), M=pick(rng, _MONTHS), W=pick(rng, _DAYS),
        S=pick(rng, _SEASONS), h=1 + int(rng.random() * 12), n=2 + int(rng.random() * 30),
        c=pick(rng, CITIES) if rng.random() < 0.7 else made_up(rng).capitalize(),
        t=pick(rng, _THINGS).replace("_", " "), a=pick(rng, ADJECTIVES), N=made_up(rng).capitalize(), P=_person(rng),
    )  # fmt: skip


def _definite(rng: Random) -> str:
    """One thing with an article."""
    while True:
        thing = _thing(rng)
        if thing.startswith("the "):
            return thing


def _event(rng: Random, thing: str = "") -> tuple[str, list[tuple[str, str]]]:
    """A sentence about something done (to `thing`), and questions with their answers."""
    base, past, done = pick(rng, _VERBS)
    who = _person(rng) if rng.random() < 0.6 else pick(rng, _GROUPS)
    what = thing or _thing(rng)
    when = _filled(rng, pick(rng, _TIMES)) if rng.random() < 0.7 else ""
    where = _filled(rng, pick(rng, _WHERES)) if rng.random() < 0.55 else ""
    why = _filled(rng, pick(rng, _WHYS)) if rng.random() < 0.25 else ""
    whom = _filled(rng, pick(rng, _WITH)) if rng.random() < 0.15 else ""
    passive = rng.random() < 0.3
    were = "were" if not what.startswith("the ") else "was"
    core = f"{what} {were} {done} by {who}" if passive else f"{who} {past} {what}"
    tail = " ".join([part for part in ((whom, where) if rng.random() < 0.5 else (where, whom)) if part])
    if when and rng.random() < 0.4:
        sentence = f"{when}{', ' if rng.random() < 0.5 else ' '}{core} {tail}".rstrip()
    else:
        sentence = " ".join([part for part in (core, tail, when) if part])
    sentence += f" {why}" if why else ""
    asked = [(f"Who {past} {what}?", who), (f"By whom {were} {what} {done}?", who), (f"What did {who} {base}?", what)]
    if when:
        plain = re.sub("^(in|on) (?!the)", "", when)
        asked += [(f"When did {who} {base} {what}?", plain), (f"When {were} {what} {done}?", plain)]
        if re.fullmatch(r"in \d{4}", when):
            asked += [(f"In which year {were} {what} {done}?", plain), (f"What year did {who} {base} {what}?", plain)]
    if where:
        plain = where.removeprefix("in ") if re.match("in [A-Z]", where) else where
        asked += [(f"Where did {who} {base} {what}?", plain), (f"Where {were} {what} {done}?", plain)]
    if why:
        asked += [(f"Why did {who} {base} {what}?", why), (f"Why {were} {what} {done}?", why)] * 2
    if whom.startswith(("with ", "together")) and who not in whom:
        asked.append(
            (
                f"With whom did {who} {base} {what}?" if "help" not in whom else f"Who helped {who}?",
                re.sub("^(together )?with (the help of )?", "", whom),
            )
        )
    if m := re.match(r"([\d,]+|[a-z]+) (\w+)$", what if not what.startswith("the ") else ""):
        asked += [(f"How many {m[2]} did {who} {base}?", m[1]), (f"How many {m[2]} were {done}?", m[1])]
    return sentence, asked


def _fact(
    rng: Random, fact: tuple[str, tuple[str, ...], str] | None = None, subject: str = ""
) -> tuple[str, list[tuple[str, str]]]:
    form, questions, answer = fact or pick(rng, _FACTS)
    thing, person = subject or _definite(rng), subject if subject and form.startswith("{p}") else _person(rng)
    hour = 1 + int(rng.random() * 11)
    words = {
        "x": thing, "n": _number(rng), "m": pick(rng, _MATERIALS), "p": person, "p2": _person(rng),
        "h": pick(rng, (f"{hour}", f"{hour}:30", f"{hour} am", f"{hour:02d}:15", f"{hour} o'clock")),
        "h2": f"{hour + 1} pm", "c": pick(rng, _COLOURS), "w": made_up(rng).capitalize(),
        "w2": f"{pick(rng, ADJECTIVES)} {pick(rng, OBJECTS)}", "city": pick(rng, CITIES), "v": pick(rng, _VEHICLES),
        "d": pick(rng, _DAYS), "s": pick(rng, _SEASONS), "j": pick(rng, _JOBS).split("_")[0],
        "l": pick(rng, _LANGUAGES), "y": str(1900 + int(rng.random() * 120)), "o": pick(rng, OBJECTS),
        "i": pick(rng, _INSTRUMENTS),
    }  # fmt: skip
    sentence = form.format(**words)
    return sentence.rstrip("."), [(q.format(**words), answer.format(**words)) for q in questions]


def _passive(rng: Random, thing: str) -> tuple[str, list[tuple[str, str]]]:
    """A sentence about something done to `thing`, which it begins with."""
    while True:
        sentence, asked = _event(rng, thing)
        if sentence.startswith(f"{thing} was "):
            return sentence, asked


def _about_one(rng: Random) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sentences about one thing or one person, named first and then mostly meant by a pronoun."""
    person = rng.random() < 0.35
    subject = _person(rng) if person else _definite(rng)
    forms = [fact for fact in _FACTS if fact[0].startswith("{p}" if person else "{x}") and "{p}'s" not in fact[0]]
    pronoun, made = pick(rng, ("She", "He")) if person else "It", []
    for i, fact in enumerate(rng.sample(forms, 2 + int(rng.random() * 4))):
        done = not person and rng.random() < 0.4
        sentence, asked = _passive(rng, subject) if done else _fact(rng, fact, subject)
        if i and rng.random() < 0.7:
            sentence = pronoun + sentence.removeprefix(subject)
        made.append((sentence, asked))
    return made


def report(rng: Random) -> Report:
    """A paragraph of two to six sentences and a question that exactly one of them answers."""
    while True:
        one = rng.random() < 0.5
        if one:
            made = _about_one(rng)
        else:
            made = [_event(rng) if rng.random() < 0.55 else _fact(rng) for _ in range(2 + int(rng.random() * 5))]
        at = int(rng.random() * len(made))
        question, answer = pick(rng, made[at][1])
        sentences = []
        for sentence, _ in made:
            opening = "" if one else pick(rng, _SOURCES)
            sentences.append((opening + sentence if opening else sentence[0].upper() + sentence[1:]) + ".")
        text = pick(rng, (" ", " ", " ", "\n")).join(sentences)
        if answer in sentences[at] and text.count(answer) == 1:
            return Report(text, question, sentences[at], answer)
