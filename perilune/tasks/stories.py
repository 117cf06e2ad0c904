"""Stories in many words: who, what happened, and what is asked, as sentences with places to fill.

Places: {n} the person at first, {P} and {p} the pronoun, {h} the possessive, {i} the object form, {has} and {does} to
agree, {m} another person, {o} the things, {box} what holds them, {a} {b} {c} {k} the numbers. Numbers are in the order
of a story's pattern (arithmetic.py), not of its sentences.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.composed.bills import account
from perilune.tasks.more_stories import more
from perilune.tasks.problem import pick
from perilune.tasks.words import NAMES, WOMEN, listed, made_up

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
    _scene("A train starts with {a} passengers.|There were {a} people on the train.|{a} passengers are in a train.",
        "{b} people board at the station.|At the second stop {b} more get on.|{b} joined.",
           "{b} people leave at the station.|At the second stop {b} get off.|{b} got out.",
           "How many people are on the train then?|How many passengers are left?|How many are in the train now?",
           "passengers"),
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
    _scene("{n} had {a} dollars.|{n} {has} {a} dollars.|There are {a} dollars in the piggy bank of {n}.|{n} got {a} "
        "dollars for {h} birthday.", "{P} earned {b} dollars.|{m} gave {i} {b} dollars.|{P} found {b} dollars.|{P} "
        "made {b} dollars by washing cars.",
           "{P} spent {b} dollars.|{P} paid {b} dollars for a game.|Lunch cost {i} {b} dollars.|{P} bought shoes for "
           "{b} dollars.|{P} gave {m} {b} dollars.", "How many dollars {does} {p} have left?|How much money {does} "
           "{n} have now?|How much is left?|How many dollars is that?", "dollars"),
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
    _scene("{n} is on page {a}.|A hiker stands at {a} metres.|A balloon floats at {a} metres.|The lift is on level "
        "{a}.", "It goes up by {b}.|Then it goes {b} higher.|{b} further up.|After that {b} "
        "more.", "It goes down by {b}.|Then it goes {b} lower.|Then {b} back.|{b} further down.",
           "Where is it now?|What is the number now?|At which number does it end?", ""),
)  # fmt: skip

# Groups, rates, prices, shares, comparisons.
_GROUPS: Final = (
    "{k} {box} with {a} {o} each", "{k} {box} of {a} {o} each", "{k} {box} with {a} {o} in each",
    "{k} {box}, each with {a} {o}", "{k} {box} holding {a} {o} each", "{k} {box} of {a} {o}",
    "{k} {box} that contain {a} {o} each", "{k} {box} containing {a} {o} apiece",
    "{k} {box} and in each of them {a} {o}",
)  # fmt: skip
_GROUP_STARTS: Final = (
    "{n} {has} {g}.", "{n} bought {g}.", "There are {g}.", "{n} had {g}.", "{n} packed {g}.", "A shop has {g}.",
    "{n} got {g}.", "A truck brings {g}.", "{n} ordered {g}.", "{n} found {g} in the attic.",
    "On the table stand {g}.", "{n} filled {g}.", "{n} sells {g}.", "We carried {g}.", "The school bought {g}.",
)  # fmt: skip
_GROUP_GAINS: Final = (
    "{P} found {b} more {o}.", "{m} brought {b} more {o}.", "There are {b} loose {o} as well.", "{P} added {b} {o}.",
    "Another {b} {o} lie on the floor.", "{P} also {has} {b} single {o}.", "{b} {o} are left over.",
    "{P} bought {b} more.", "{P} got {b} {o} on top.",
    "Besides, there are {b} {o} outside.", "{m} gave {i} {b} {o}.",
)  # fmt: skip
_TOTALS: Final = (
    "How many {o} are there in total?", "How many {o} is that?", "How many {o} {does} {p} have altogether?",
    "How many {o} in all?", "What is the total number of {o}?", "How many {o} are there now?",
    "How many {o} does that make?", "How many {o} are there altogether?", "total {o}?",
    "How many {o} {does} {n} have?", "How many {o} all together?", "So how many {o}?",
    "Work out how many {o} there are.",
)  # fmt: skip
_LEFT: Final = (
    "How many {o} are left?", "How many {o} remain?", "How many {o} {does} {p} still have?", "How many are left over?",
    "How many {o} {does} {n} have left?", "How many {o} are still there?", "What is left?",
    "How many {o} is that now?", "how many {o} left?",
)  # fmt: skip

FIXED: Final[tuple[Story, ...]] = (
    ("a*k+b",
        "{n} {has} {h} lessons {k} days a week, {a} minutes each day, and practise{s} {b} minutes on Sunday. How many "
        "minutes is that in a week?", "minutes"),
    ("a*k+b", "{n} reads {a} pages a day for {k} days and {b} pages on the last day. How many pages {does} {p} read?",
        "pages"),
    ("a*k+b",
        "A machine makes {a} parts an hour. It runs for {k} hours and {b} parts were there already. How many parts "
        "are there?", "parts"),
    ("a*k+b", "A taxi costs {b} euros plus {a} euros per km. What does a trip of {k} km cost?", "euros"),
    ("a*k+b",
        "A plumber asks {a} dollars an hour and {b} dollars for the trip. {P} worked {k} hours. What is the bill?",
        "dollars"),
    ("a*k+b", "{n} bought {k} {o} at {a} euros each and a bag for {b} euros. How much did {p} pay?", "euros"),
    ("a*k+b",
        "One ticket costs {a} dollars. {n} buys {k} tickets and pays a fee of {b} dollars. What does it cost "
        "altogether?", "dollars"),
    ("a*k+b", "{k} shirts for {a} euros each and one hat for {b} euros: what is the total price?", "euros"),
    ("a*k+b", "{n} saved {a} euros a month for {k} months. {P} already had {b} euros. How much {does} {p} have now?",
        "euros"),
    ("a*k+b",
        "In a hall there are {k} rows with {a} chairs and {b} extra chairs at the back. How many chairs are in the "
        "hall?", "chairs"),
    ("a*k+b", "{n} runs {a} km every day for {k} days and then walks {b} km. How far is that in total?", "km"),
    ("a*k+b", "A gardener planted {k} rows of {a} trees and {b} more near the gate. How many trees are there?",
        "trees"),
    ("a*k+b",
        "A film is shown {k} times a week to {a} people each time, and once to {b} people. How many people see it?",
        "people"),
    ("a*k-b", "{n} works {k} hours for {a} euros an hour and pays {b} euros for the train. What is left?", "euros"),
    ("a*k-b", "{n} bought {k} {o} at {a} euros each and got a discount of {b} euros. How much did {p} pay?", "euros"),
    ("a*k-b", "A hall has {k} rows of {a} seats. {b} seats are broken. How many can be used?", "seats"),
    ("a*k-b", "A theatre has {k} rows with {a} seats each, and {b} tickets are sold. How many seats are empty?",
        "seats"),
    ("a*k-b", "{n} earns {a} dollars a day. After {k} days {p} spends {b} dollars. How many dollars are left?",
        "dollars"),
    ("a*k-b", "A hen farm collects {a} eggs a day. In {k} days {b} eggs broke. How many good eggs are there?", "eggs"),
    ("a*k-b", "A plant makes {a} bottles an hour. Of the bottles of {k} hours {b} are faulty. How many are good?",
        "bottles"),
    ("a*k-b", "{n} baked {k} trays of {a} cookies. {b} cookies were burnt. How many were fine?", "cookies"),
    ("a*k-b", "{k} buses with {a} seats each bring a school to the zoo. {b} seats stay empty. How many people go?",
        "people"),
    ("b-a*k", "{n} had {b} euros and bought {k} {o} for {a} euros each. How much is left?", "euros"),
    ("b-a*k", "{n} had {b} dollars. {P} bought {k} tickets at {a} dollars each. How much money {does} {p} have left?",
        "dollars"),
    ("b-a*k", "{n} pays with a {b} euro note for {k} {o} at {a} euros each. How much change is that?", "euros"),
    ("b-a*k", "A book has {b} pages. {n} reads {a} pages a day for {k} days. How many pages are left?", "pages"),
    ("b-a*k", "A tank of {b} litres loses {a} litres a day. How many litres are left after {k} days?", "litres"),
    ("b-a*k", "A shop has {b} {o} and sells {a} on each of {k} days. How many are left?", "{o}"),
    ("b-a*k", "{n} needs {b} {o} and already {has} {k} {box} of {a}. How many are missing?", "{o}"),
    ("b-a*k", "The trip is {b} km. {n} drove {k} hours at {a} km per hour. How many km are still to go?", "km"),
    ("b-a*k", "{n} {has} {b} {o}. {P} gives {a} to each of {h} {k} friends. How many {does} {p} keep?", "{o}"),
    ("b-a*k", "Out of {b} {o}, {k} {box} are filled with {a} each. How many stay outside?", "{o}"),
    ("a+b-c", "{n} is {a} years old. {m} is {b} years older. {q} is {c} years younger than that. How old is {q}?",
        "years"),
    ("a+b+c", "{n} spent {a} euros on food, {b} euros on clothes and {c} euros on books. How much did {p} spend?",
        "euros"),
    ("a+b+c", "In the first week {a} people came, in the second {b} and in the third {c}. How many came in total?",
        "people"),
    ("a+b+c", "A school has {a} red, {b} blue and {c} green chairs. How many chairs does it have?", "chairs"),
    ("a+b+c", "{n} jogged {a} minutes, swam {b} minutes and cycled {c} minutes. How many minutes of sport is that?",
        "minutes"),
    ("a+b+c", "Three bags weigh {a} kg, {b} kg and {c} kg. What do they weigh together?", "kg"),
    ("a+b+c", "{n} {has} {a} {o}, {m} {b} and {q} {c}. How many {o} do the three have?", "{o}"),
    ("a+b-c", "A baker makes {a} white loaves and {b} brown loaves. {c} loaves are sold. How many are left?", "loaves"),
    ("a+b-c", "{n} got {a} euros from {m} and {b} euros from {q}. {P} spent {c} euros. How much is left?", "euros"),
    ("a+b-c", "There are {a} boys and {b} girls in a camp. {c} of them go swimming. How many stay?", "children"),
    ("a+b-c",
        "A shelf has {a} novels and {b} comics. {c} of these books are taken away. How many books are left on it?",
        "books"),
    ("c-a-b", "{n} wants to buy a bike for {c} euros. {P} {has} {a} euros and gets {b} euros. How much is missing?",
        "euros"),
    ("c-a-b", "{n} needs {c} {o}. {P} already {has} {a} and {m} brings {b}. How many more are needed?", "{o}"),
    ("c-a-b", "The goal is {c} points. {n} has {a} points and wins {b}. How many points are missing?", "points"),
    ("c-a-b", "Of {c} tickets {a} were sold on Monday and {b} on Tuesday. How many tickets are left?", "tickets"),
    ("c-a-b", "A rope is {c} cm long. {n} cuts off {a} cm and then {b} cm. How long is the rest?", "cm"),
    ("c-a-b",
        "A company has {c} workers: {a} in the office, {b} in the shop, the rest in the store. How many work in the "
        "store?", "workers"),
    ("c-a-b", "There are {c} pupils. {a} walk to school, {b} take the bus and the others cycle. How many cycle?",
        "pupils"),
    ("c-a-b", "{n} had {c} euros, paid {a} for a meal and {b} for the train. How much is left?", "euros"),
    ("c-a-b",
        "{n} had {c} dollars and bought a cap for {b} dollars and socks for {a} dollars. How much money is left?",
        "dollars"),
    ("a+b+a", "{n} {has} {a} {o}. {m} {has3} {b} more than {n0}. How many do they have together?", "{o}"),
    ("a+b+a", "{n} sold {a} {o} on Monday and {b} more than that on Tuesday. How many {o} is that in both days?",
        "{o}"),
    ("a-b+a", "{n} sold {a} {o} on Monday and {b} fewer on Tuesday. How many {o} were sold in both days?", "{o}"),
    ("a+b+a", "In May {n} read {a} pages, in June {b} pages more than in May. How many pages in total?", "pages"),
    ("a*k+a", "{n} {has} {a} {o} and {m} {has3} {k} times as many. How many {o} do they have together?", "{o}"),
    ("a*k+a", "{n} collected {a} {o}. {m} collected {k} times that. What is the total?", "{o}"),
    ("a*k-a", "{n} {has} {a} {o}, {m} {k} times as many. How many more does {m} have?", "{o}"),
    ("a*k+b",
        "{m} {has3} {k} times as many {o} as {n0}, who {has} {a}, and buys {b} more. How many {o} does {m} have now?",
        "{o}"),
    ("a*k-b",
        "{m} {has3} {k} times as many {o} as {n0}, who {has} {a}, and gives away {b}. How many {o} does {m} have now?",
        "{o}"),
    ("a*k*j", "{n} works {k} hours a day on {j} days for {a} euros an hour. What {does} {p} earn?", "euros"),
    ("a*k*j", "There are {j} shelves with {k} {box} each, and each holds {a} {o}. How many {o} is that?", "{o}"),
    ("a*k*j", "A pack has {a} {o}. A crate holds {k} packs. How many {o} are in {j} crates?", "{o}"),
    ("a*k*j", "{n} runs {a} km, {k} times a week. How many km is that in {j} weeks?", "km"),
    ("a*k+c*j", "{n} bought {k} pens at {a} cents and {j} pads at {c} cents. How many cents is that?", "cents"),
    ("a*k+c*j", "Adults pay {a} euros, children {c} euros. What do {k} adults and {j} children pay?", "euros"),
    ("a*k+c*j", "There are {k} {box} with {a} {o} and {j} {box} with {c} {o}. How many {o} are there in total?", "{o}"),
    ("(a+b)*k",
        "Each day {n} walks {a} minutes in the morning and {b} minutes in the evening. How many minutes is that in "
        "{k} days?", "minutes"),
    ("(a+b)*k", "A menu costs {a} euros and a drink {b} euros. What do {k} people pay for a menu and a drink each?",
        "euros"),
    ("(a+b)*k", "{n} puts {a} red and {b} blue beads on each string. How many beads are on {k} strings?", "beads"),
    ("(a+b)*k", "Every week {n} drives {a} km to work and {b} km to friends. How many km in {k} weeks?", "km"),
    ("(a-b)*k", "{n} earns {a} euros a day and spends {b} euros a day. How much {does} {p} save in {k} days?", "euros"),
    ("(a-b)*k", "A shop buys a lamp for {b} euros and sells it for {a} euros. What does it gain with {k} lamps?",
        "euros"),
    ("(a-b)*k", "Each of {k} {box} had {a} {o}, and {b} were taken out of each. How many {o} are left in all?", "{o}"),
    ("(a+b)/k",
        "{n} {has} {a} {o} and gets {b} more. {P} shares all of them equally among {k} friends. How many does each "
        "get?", "{o}"),
    ("(a+b)/k", "{a} boys and {b} girls form {k} equal teams. How many children are in a team?", "children"),
    ("(a+b)/k", "{n} picked {a} {o} and {m} picked {b}. They put them into {k} {box} evenly. How many are in each?",
        "{o}"),
    ("(a+b)/k",
        "{n} saved {a} euros and {m} saved {b} euros. They buy {k} tickets with all of it. What does one ticket cost?",
        "euros"),
    ("(a-b)/k",
        "{n} had {a} {o}, gave away {b} and shared the rest equally among {k} children. How many did each child get?",
        "{o}"),
    ("(a-b)/k", "Of {a} {o} {b} are broken. The others are packed into {k} {box} evenly. How many are in each?", "{o}"),
    ("(a-b)/k", "A trip of {a} km: {b} km are done. The rest is driven in {k} equal parts. How long is one part?",
        "km"),
    ("(a-b)/k", "{n} {has} {a} euros and spends {b}. With the rest {p} buys {k} equal presents. What does one cost?",
        "euros"),
    ("a/k+b",
        "{n} shares {a} {o} equally among {k} children. {m} is one of them and already had {b}. How many does {m} "
        "have now?", "{o}"),
    ("a/k+b",
        "{k} friends split a bill of {a} euros, and {n} also pay{s} {b} euros for a taxi. What {does} {p} pay in all?",
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
        she, he = (named, "she", "her", "her", True), (named, "he", "his", "him", True)
        known = (she,) if named in WOMEN else (he,) if named in NAMES else (she, he)
        subject, pronoun, his, him, single = pick(rng, (*known, (named, named, f"{named}'s", named, True)))
    elif roll < 0.68:
        subject, pronoun, his, him, single = "I", "I", "my", "me", False
    else:
        fits = ("My friend {n}", "Uncle {n}") * (named not in WOMEN) + ("My cousin {n}",) * (
            named in WOMEN or named not in NAMES
        )
        subject, pronoun, his, him, single = pick(rng, [s for s in _SAID if "{n}" not in s[0] or s[0] in fits])
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
    plain = [q for q in questions if not re.search("left|still|remain|keep", q)] if all(ups) else []
    question = pick(rng, plain or questions)
    text = " ".join(parts)
    return pattern, f"{question} {text}" if rng.random() < 0.05 else f"{text} {question}", unit


def groups(rng: Random, edible: bool) -> Story:
    """Several equal groups, something added or taken, and a question."""
    up = rng.random() < 0.5
    first = pick(rng, _GROUP_STARTS).replace("{g}", pick(rng, _GROUPS))
    losses = _EATEN if edible and rng.random() < 0.3 else _LOSSES
    second = pick(rng, _GROUP_GAINS if up else losses)
    return ("a*k+b" if up else "a*k-b"), f"{first} {second} {pick(rng, _TOTALS if up else _LEFT)}", "{o}"


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


KINDS: Final = (*(changes,) * 4, *(groups,) * 2, *(fixed,) * 4, single, *(more,) * 9, *(account,) * 5)


def wide(rng: Random, thing: str) -> Story:
    """A story of the training side; some have a sentence that does not matter."""
    kind = pick(rng, KINDS)
    pattern, text, unit = kind(rng, thing in _EDIBLE)
    if kind not in (more, account) and rng.random() < 0.1:  # an age or a price could matter there
        sentence = pick(rng, _IDLE)
        begin, _, rest = text.partition(". ")
        text = f"{begin}. {sentence} {rest}" if rest else text
    return pattern, text, unit
