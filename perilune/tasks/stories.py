"""Stories in many words: who, what happened, and what is asked, as sentences with places to fill.

Places: {n} the person at first, {P} and {p} the pronoun, {h} the possessive, {i} the object form, {has} and {does} to
agree, {m} another person, {o} the things, {box} what holds them, {a} {b} {c} {k} the numbers. Numbers are in the order
of a story's pattern (arithmetic.py), not of its sentences.
"""

from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.composed.bills import account
from perilune.tasks.more_stories import more
from perilune.tasks.problem import pick
from perilune.tasks.words import NAMES, listed, made_up

Story = tuple[str, str, str]  # pattern of the expression, text, unit of the answer

_EDIBLE: Final = frozenset(listed("""
    apples oranges pears plums cookies cakes eggs lemons mangoes melons grapes cherries carrots nuts rolls muffins pies
    sandwiches tomatoes
"""))  # fmt: skip
_SAID: Final = (  # subject, pronoun, possessive, object, third person singular
    ("My brother", "he", "his", "him", True), ("My sister", "she", "her", "her", True),
    ("Mr {s}", "he", "his", "him", True),
    ("Mrs {s}", "she", "her", "her", True), ("A farmer", "he", "his", "him", True),
    ("The teacher", "she", "her", "her", True),
    ("Our neighbour", "he", "his", "him", True), ("A boy", "he", "his", "him", True),
    ("A girl", "she", "her", "her", True),
    ("My aunt", "she", "her", "her", True), ("Grandpa", "he", "his", "him", True),
    ("Grandma", "she", "her", "her", True),
    ("The twins", "they", "their", "them", False), ("We", "we", "our", "us", False),
    ("The children", "they", "their", "them", False),
    ("A collector", "she", "her", "her", True), ("The shop", "it", "its", "it", True),
    ("A school", "it", "its", "it", True),
    ("The club", "it", "its", "it", True), ("The baker", "he", "his", "him", True),
    ("My friend {n}", "he", "his", "him", True),
    ("My cousin {n}", "she", "her", "her", True), ("Uncle {n}", "he", "his", "him", True),
    ("Dr {s}", "she", "her", "her", True),
)  # fmt: skip
_OTHERS: Final = (
    "a friend", "{h} brother", "{h} sister", "{h} mother", "{h} father", "a neighbour", "{h} cousin", "{h} aunt",
    "{h} uncle",
    "a classmate", "the neighbours", "{h} best friend", "a customer", "{h} grandmother", "a colleague", "the teacher",
    "{h} son",
)  # fmt: skip

_STARTS: Final = (
    "{n} had {a} {o}.", "{n} had {a} {o}.", "{n} {has} {a} {o}.", "{n} {has} {a} {o} at home.",
    "{n} started with {a} {o}.",
    "{n} had {a} {o} in a drawer.", "{n} bought {a} {o}.", "At first {n} had {a} {o}.",
    "In the beginning there were {a} {o} on the table.",
    "{n} owned {a} {o}.", "{n} began the day with {a} {o}.", "{n} got {a} {o} for {h} birthday.",
    "There were {a} {o} in the basket.",
    "{n} had collected {a} {o}.", "There are {a} {o} on the shelf.", "{n} made {a} {o}.", "Last week {n} had {a} {o}.",
    "{n} brought {a} {o}.", "{n} had exactly {a} {o}.", "Yesterday {n} counted {a} {o}.", "{n} {has} a box of {a} {o}.",
    "This morning {n} had {a} {o}.", "{a} {o} were in the cupboard.", "{n} ordered {a} {o}.", "{n} picked {a} {o}.",
)  # fmt: skip
_GAINS: Final = (
    "{P} bought {b} more.", "{P} bought another {b}.", "{P} bought {b} more {o}.", "{P} got {b} more from {m}.",
    "{P} received {b} {o} from {m}.",
    "{P} found {b} more.", "{P} found {b} {o} in the garden.", "{P} made {b} more.", "{P} won {b} in a game.",
    "{P} ordered {b} more {o}.",
    "{P} added {b} to the collection.", "{P} picked up {b} more.", "{P} was given {b} more.",
    "{P} got {b} {o} as a present.", "{P} collected another {b}.",
    "{m} gave {i} {b} more.", "{m} brought {b} {o}.", "{m} sent {i} {b} {o}.", "{m} added {b} to the pile.",
    "{m} gave {b} {o} to {i}.",
    "{m} bought {b} {o} for {i}.", "{b} more {o} came in the post.", "{b} more arrived.", "{P} earned {b} more.",
    "{P} took {b} more from the cellar.",
    "{P} borrowed {b} {o} from {m}.", "{P} got back {b} that {m} had borrowed.", "Another {b} {o} were delivered.",
    "{P} gained {b}.", "{P} put {b} more with them.",
    "{P} traded for {b} more.", "{m} handed {i} another {b}.", "{P} picked {b} more.", "{P} dug up {b} more.",
    "{P} brought home {b} more.",
)  # fmt: skip
_LOSSES: Final = (
    "{P} gave {b} away.", "{P} gave {b} to {m}.", "{P} gave {b} {o} to {m}.", "{P} gave {m} {b} of them.",
    "{P} sold {b}.", "{P} sold {b} of them to {m}.",
    "{P} lost {b}.", "{P} lost {b} of them on the way.", "{P} used {b}.", "{P} used up {b} of them.",
    "{P} threw {b} away.", "{P} threw away {b} broken ones.",
    "{P} donated {b} to a charity.", "{P} lent {b} to {m}.", "{P} returned {b} to the shop.", "{P} handed {b} to {m}.",
    "{P} dropped {b} and they broke.",
    "{P} left {b} at school.", "{P} traded {b} away.", "{P} passed {b} on to {m}.", "{P} sent {b} {o} to {m}.",
    "{P} shared {b} with {m}.", "{P} took {b} out.",
    "{b} of them broke.", "{b} {o} were stolen.", "{b} went missing.", "{b} of the {o} were bad.",
    "{b} {o} fell into the water.", "{m} took {b} of them.",
    "{m} bought {b} from {i}.", "{m} borrowed {b} {o}.", "{m} broke {b} of them.", "{P} spent {b} on a swap.",
    "{P} gave back {b}.", "{P} removed {b}.",
    "{b} were sold.", "{b} got damaged.", "{P} mailed {b} to {m}.", "{P} forgot {b} on the train.",
    "The dog chewed up {b}.",
)  # fmt: skip
_EATEN: Final = ("{P} ate {b}.", "{m} ate {b} of them.", "{b} were eaten.", "{P} ate {b} of them for lunch.",
    "They ate {b} {o} at the party.")  # fmt: skip
_QUESTIONS: Final = (
    "How many {o} {does} {p} have now?", "How many {o} {does} {n} have now?", "How many {o} are left?",
    "How many {does} {p} have left?", "How many {o} are there now?",
    "How many {o} {does} {p} have in the end?", "How many {o} is that now?", "How many are there in the end?",
    "What is the number of {o} now?", "How many {o} remain?",
    "So how many {o} {does} {p} have?", "Now how many {o} {does} {n} have?", "Tell me how many {o} there are now.",
    "Count the {o}.", "How many {o} then?", "How many {o}?",
    "With how many {o} {does} {p} end up?", "How many {o} {does} {p} still have?", "How many {o} should there be now?",
    "What's left?", "How many has {n} got now?",
    "How many {o} in total now?", "what is the number of {o} at the end", "How many {o} {does} {n} have after that?",
    "How many does that make?", "How many {o} at the end of the day?",
)  # fmt: skip
_TIMES: Final = (
    "Then ", "Later ", "After that ", "The next day ", "On Tuesday ", "In the afternoon ", "In the evening ",
    "On Friday ", "A week later ", "Afterwards ", "Soon after ", "At school ",
    "On the weekend ", "At noon ", "After lunch ", "Next, ", "Then, ", "Later that day ", "On Monday ", "Yesterday ",
    "At the market ", "During the week ", "A bit later ", "In May ",
)  # fmt: skip
_JOINS: Final = (" and then ", " and ", ", then ", " but ", " and later ", ", and ", ", after that ")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """A place where a number goes up and down."""

    starts: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    questions: tuple[str, ...]
    unit: str


def _scene(starts: str, gains: str, losses: str, questions: str, unit: str) -> Scene:
    """Sentences of each kind, parted by `|`."""
    parts = [tuple([s.strip() for s in text.split("|")]) for text in (starts, gains, losses, questions)]
    return Scene(parts[0], parts[1], parts[2], parts[3], unit)


SCENES: Final = (
    _scene("A bus has {a} passengers.|There are {a} people on a bus.|{a} people ride on the bus.|A bus leaves the "
        "station with {a} people on board.",
           "At the next stop {b} get on.|{b} people get on.|{b} more board.|Then {b} step in.",
           "{b} get off.|At the next stop {b} people get off.|{b} leave the bus.|Then {b} step out.",
           "How many people are on the bus now?|How many passengers are on board?|How many are still on the bus?",
           "people"),
    _scene("A library has {a} books.|There are {a} books in the library.|A small library owns {a} books.",
        "{b} books are returned.|{b} new books arrive.|It buys {b} more.|{b} books come back.",
           "{b} books are lent out.|{b} old books are thrown away.|People borrow {b} books.|{b} are checked out.",
           "How many books does the library have now?|How many books are in the library now?|How many books are "
           "there?", "books"),
    _scene("There are {a} cars in a car park.|A parking lot has {a} cars in it.|{a} cars are parked.|In the morning "
        "{a} cars stand in the garage.", "{b} more cars come.|{b} drive in.|{b} cars arrive.|Then {b} more park there.",
           "{b} cars leave.|{b} drive away.|{b} of them drive off.|Then {b} cars go.",
           "How many cars are there now?|How many cars are in the car park?|How many cars are still parked?", "cars"),
    _scene("A tank holds {a} litres of water.|There are {a} litres in a tank.|A barrel contains {a} litres.",
        "{b} litres are poured in.|It rains and {b} litres are added.|We fill in {b} litres.",
           "{b} litres are used.|{b} litres leak out.|We take out {b} litres.|{b} litres run off.",
           "How many litres are in it now?|How much water is left?|How many litres is that?", "litres"),
    _scene("{n} {has} {a} euros.|I have {a} euros in my account.|The account of {n} has {a} euros.|There were {a} "
        "euros in the wallet.|{n} had {a} euros saved.", "{P} earned {b} euros.|{b} euros are paid in.|{m} gave {i} "
        "{b} euros.|{P} got {b} euros for work.|{P} saved {b} more.",
           "{P} spent {b} euros on food.|{P} paid {b} euros for a ticket.|{P} bought a shirt for {b} euros.|{b} euros "
           "are taken out.|A bill of {b} euros was paid.|{P} lent {m} {b} "
           "euros.", "How much money is left?|How many euros {does} {p} have now?|What is the balance?|How much is "
           "that now?|How many euros remain?", "euros"),
    _scene("A bakery baked {a} rolls.|In the morning the bakery had {a} loaves.|The baker makes {a} buns.",
        "{b} more were baked.|At noon {b} more come out of the oven.|Another {b} were made.",
        "{b} were sold before noon.|{b} are sold.|Customers bought {b}.|{b} were burnt.|A hotel took {b}.",
           "How many are left?|How many were left in the evening?|How many remain unsold?|How many are there now?",
           "pieces"),
    _scene("A class has {a} pupils.|There are {a} students in the school.|{a} children are in the club.|A course "
        "began with {a} students.", "{b} new ones join.|{b} more come.|{b} students are added.|In spring {b} "
        "joined.", "{b} leave.|{b} move away.|{b} drop out.|{b} are ill today.",
           "How many are there now?|How many students is that?|How many are in it now?|How many children are left?",
           "students"),
    _scene("{n} scored {a} points in the first round.|A team has {a} points.|{n} {has} {a} points.|The score was {a}.",
        "{P} won {b} points.|{b} more points were added.|In the next round {p} got {b} points.|{P} scored another "
        "{b}.", "{P} lost {b} points.|{b} points were taken off.|A penalty cost {i} {b} points.",
           "What is the score now?|How many points {does} {p} have?|How many points is that?|What is the total?",
           "points"),
    _scene("A farm has {a} hens.|There are {a} sheep on a meadow.|A farmer keeps {a} cows.|A herd has {a} animals.",
        "{b} are born.|{b} more are bought.|The farmer buys {b}.|{b} young ones are born.",
        "{b} are sold.|{b} run away.|A fox takes {b}.|The farmer sells {b}.|{b} die.",
           "How many animals are there now?|How many are left?|How big is the herd now?|How many does the farmer "
           "have?", "animals"),
    _scene("A store house has {a} pallets.|There are {a} parcels in the store room.|The stock is {a} units.|A shop "
        "has {a} items in stock.", "{b} arrive.|A truck brings {b}.|{b} are delivered.|{b} more come "
        "in.", "{b} are shipped.|{b} are sold.|{b} leave the store.|{b} are sent out.|Customers buy {b}.",
           "How many are in stock now?|What is the stock now?|How many are left?|How many units remain?", "units"),
    _scene("{n}'s mailbox has {a} e-mails.|There are {a} messages in the mailbox.|{n} {has} {a} unread mails.",
        "{b} new ones arrive.|{P} got {b} more.|{b} more come in.",
        "{P} deleted {b}.|{P} answered {b} and filed them.|{b} were moved to the archive.|{P} removed {b}.",
           "How many are in the mailbox now?|How many messages are left?|How many e-mails {does} {p} have?",
           "messages"),
    _scene("A lift carries {a} people.|{a} people are in the cinema.|There are {a} guests at the party.|A hotel has "
        "{a} guests.|{a} visitors are in the museum.", "{b} come in.|{b} more arrive.|{b} people join.|{b} new guests "
        "check in.", "{b} go home.|{b} leave.|{b} of them go.|{b} guests check out.",
           "How many people are there now?|How many are left?|How many guests is that?|How many stay?", "people"),
    _scene("{a} birds sit on a roof.|There are {a} ducks on the pond.|{a} fish swim in the pond.|{a} bees are on the "
        "flowers.", "{b} more come.|{b} fly in.|{b} join them.|Then {b} more "
        "arrive.", "{b} leave.|{b} go away.|{b} of them disappear.|A noise scares off {b}.",
           "How many are there now?|How many are left?|How many stay?|How many animals is that?", "animals"),
)  # fmt: skip

# Groups, rates, prices, shares, comparisons.
_GROUPS: Final = (
    "{k} {box} with {a} {o} each", "{k} {box} of {a} {o} each", "{k} {box} with {a} {o} in each",
    "{k} {box}, each with {a} {o}", "{k} {box} holding {a} {o} each", "{k} {box} of {a} {o}",
    "{k} {box} that contain {a} {o} each", "{k} {box} containing {a} {o} apiece",
    "{k} {box} and in each of them {a} {o}",
)  # fmt: skip

FIXED: Final[tuple[Story, ...]] = (
    ("a*k+b", "A taxi costs {b} euros plus {a} euros per km. What does a trip of {k} km cost?", "euros"),
    ("a*k+b",
        "A plumber asks {a} dollars an hour and {b} dollars for the trip. {P} worked {k} hours. What is the bill?",
        "dollars"),
    ("b-a*k", "{n} needs {b} {o} and already {has} {k} {box} of {a}. How many are missing?", "{o}"),
    ("c-a-b",
        "A company has {c} workers: {a} in the office, {b} in the shop, the rest in the store. How many work in the "
        "store?", "workers"),
    ("c-a-b", "There are {c} pupils. {a} walk to school, {b} take the bus and the others cycle. How many cycle?",
        "pupils"),
    ("a*k+b",
        "{m} {has3} {k} times as many {o} as {n0}, who {has} {a}, and buys {b} more. How many {o} does {m} have now?",
        "{o}"),
    ("a*k*j", "There are {j} shelves with {k} {box} each, and each holds {a} {o}. How many {o} is that?", "{o}"),
    ("a*k*j", "A pack has {a} {o}. A crate holds {k} packs. How many {o} are in {j} crates?", "{o}"),
    ("a/k+b",
        "{n} shares {a} {o} equally among {k} children. {m} is one of them and already had {b}. How many does {m} "
        "have now?", "{o}"),
    ("a/k+b",
        "{k} friends split a bill of {a} euros, and {n} also pays {b} euros for a taxi. What {does} {p} pay in all?",
        "euros"),
    ("a/k-b",
        "{a} {o} are split evenly between {k} people. {n} gives away {b} of {h} share. How many {does} {p} have left?",
        "{o}"),
    ("b-a/k", "{k} tickets cost {a} euros together. {n} {has} {b} euros and buys one. How many euros are left?",
        "euros"),
    ("a/k*j", "{k} {o} cost {a} euros. What do {j} {o} cost?", "euros"),
    ("a/k*j", "A car needs {k} hours for {a} km. How far does it get in {j} hours?", "km"),
    ("a/k*j", "{n} reads {a} pages in {k} days. How many pages is that in {j} days at the same speed?", "pages"),
)  # fmt: skip
_SINGLE: Final = ("a-b", "a+b", "a*k", "a/k")
_ONE: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "a*k": (("{n} {has} {g}. How many {o} is that?", "{o}"),
        ("{k} {o} cost {a} euros each. What do they cost together?", "euros"),
        ("{n} walks {a} km a day. How many km in {k} days?", "km")),
    "a/k": (("{n} shares {a} {o} equally among {k} friends. How many does each get?", "{o}"),
        ("{a} {o} go into {k} {box} evenly. How many are in one?", "{o}"),
        ("{k} {o} cost {a} euros. What does one cost?", "euros")),
}  # fmt: skip
_IDLE: Final = (
    "It was a sunny day.", "{n} likes {o}.", "{n} is {x} years old.", "The weather was fine.",
    "There were {x} people in the street.", "{m} was there too.", "It took {x} minutes to get there.",
    "{m} {has3} {x} years of experience.", "It happened on the {x}th of May.", "{n} lives at number {x}.",
    "Nobody else was there.", "The shop opens at {x} o'clock.", "{h} bag was heavy.", "They are very pretty.",
)  # fmt: skip


def people(rng: Random, named: str) -> tuple[dict[str, str], bool]:
    """The words for a story's person, and whether it begins with that person's name; `named` is a name to use."""
    roll = rng.random()
    if roll < 0.5:
        subject, pronoun, his, him, single = pick(
            rng,
            (
                (named, "she", "her", "her", True),
                (named, "he", "his", "him", True),
                (named, named, f"{named}'s", named, True),
            ),
        )
    elif roll < 0.68:
        subject, pronoun, his, him, single = "I", "I", "my", "me", False
    else:
        subject, pronoun, his, him, single = pick(rng, _SAID)
        subject = subject.format(n=named, s=pick(rng, NAMES) if rng.random() < 0.5 else made_up(rng).capitalize())
    words = {"n": subject, "p": pronoun, "P": pronoun[0].upper() + pronoun[1:], "h": his, "i": him,
             "has": "has" if single else "have", "does": "does" if single else "do", "has3": "has",
             "s": "s" if single else "",
             "n0": "me" if subject == "I" else "us" if subject == "We" else subject}  # fmt: skip
    return words, subject == named


def other(rng: Random, named: str, his: str) -> str:
    return named if rng.random() < 0.5 else pick(rng, _OTHERS).format(h=his)


def changes(rng: Random, edible: bool) -> Story:
    """A start, one to three changes in either direction, and a question; some sentences are joined."""
    count = pick(rng, (1, 2, 2, 2, 2, 2, 2, 2, 3))
    ups = [rng.random() < 0.5 for _ in range(count)]
    scene = pick(rng, SCENES) if rng.random() < 0.45 else None
    if scene:
        starts, gains, losses, questions, unit = scene.starts, scene.gains, scene.losses, scene.questions, scene.unit
    else:
        starts, gains, losses, questions, unit = _STARTS, _GAINS, _LOSSES, _QUESTIONS, "{o}"
        if edible and rng.random() < 0.3:
            losses = _EATEN
    parts = [pick(rng, starts)]
    for up, letter in zip(ups, "bcd"):
        one = pick(rng, gains if up else losses).replace("{b}", f"{{{letter}}}")
        joinable = one.startswith("{P} ") and len(parts) > (0 if parts[0].startswith("{n} ") else 1)
        roll = rng.random()
        if joinable and parts[-1].startswith(("{P} ", "{n} ")) and roll < 0.3:
            parts[-1] = parts[-1][:-1] + pick(rng, _JOINS) + one[4:]
        elif roll < 0.5 or (one[0] == "{" and one[1] in "bcd" and roll < 0.65):
            head = pick(rng, _TIMES)
            parts.append(head + ("{p}" + one[3:] if one.startswith("{P}") else one[0].lower() + one[1:]))
        else:
            parts.append(one)
    pattern = "a" + "".join([("+" if up else "-") + letter for up, letter in zip(ups, "bcd")])
    question = pick(rng, questions)
    text = " ".join(parts)
    return pattern, f"{question} {text}" if rng.random() < 0.05 else f"{text} {question}", unit


def fixed(rng: Random, edible: bool) -> Story:
    return pick(rng, FIXED)


def single(rng: Random, edible: bool) -> Story:
    """One step only."""
    pattern = pick(rng, _SINGLE)
    if pattern in _ONE:
        text, unit = pick(rng, _ONE[pattern])
        return pattern, text.replace("{g}", pick(rng, _GROUPS)), unit
    change = pick(rng, _GAINS if pattern == "a+b" else _LOSSES)
    return pattern, f"{pick(rng, _STARTS)} {change} {pick(rng, _QUESTIONS)}", "{o}"


KINDS: Final = (*(changes,) * 4, *(fixed,) * 2, single, *(more,) * 9, *(account,) * 5)


def wide(rng: Random, thing: str) -> Story:
    """A story of the training side; some have a sentence that does not matter."""
    kind = pick(rng, KINDS)
    pattern, text, unit = kind(rng, thing in _EDIBLE)
    if kind not in (more, account) and rng.random() < 0.1:  # an age or a price could matter there
        sentence = pick(rng, _IDLE)
        begin, _, rest = text.partition(". ")
        text = f"{begin}. {sentence} {rest}" if rest else text
    return pattern, text, unit
