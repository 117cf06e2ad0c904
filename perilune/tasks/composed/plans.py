"""Stories for `word_problems` from a plan of operations: what each does is said by the meaning of a verb or a state.

A plan is a start (a number, groups, or groups of which each loses some), changes, and an end: what is left, packs of
equal size, equal shares. Each part is worded separately, at times in a sentence of its own. {C} is {c} with a capital.
"""

from random import Random
from typing import Final

from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, expand, singular

Story = tuple[str, str, str]  # pattern, text, unit

# Things, what holds them, what makes them fewer, what makes them more, and what they are put into.
_TOPICS: Final = tuple([tuple([tuple(part.split(", ")) for part in row.split(" | ")]) for row in """
melons, pears, plums, lemons | crates, sacks, baskets | were rotten, were thrown away, fell off the cart, are unripe, \
were eaten by wasps | were picked later, came from the market | nets, bags, bowls
seedlings, tulips, roses, shrubs | trays, beds, tubs | dried out, were eaten by snails, froze, are withered, \
did not come up | were planted since, came from a nursery | rows, circles
buses, vans, trams, taxis | depots, yards, garages | are in repair, are out of service, have a flat tyre, were sold, \
stay inside | were bought, came back from abroad | lines, rows
labels, stamps, photos, stickers | packets, albums, folders | have been used so far, are stuck on parcels, got torn, \
were spoilt by rain, went to a collector | were found in a drawer, were printed since | sheets, packs
dogs, rabbits, hens, goats | pens, stables, cages | were adopted, ran away, are with the vet, found a new home, \
were caught by the fox | were born, were brought in | groups, pens
rolls, muffins, pies, slices | trays, tins | were burnt, were eaten, were set aside for the café, \
went to the staff, got mouldy | were baked after that | bags, boxes
guests, pupils, runners, visitors | coaches, tents, boats | are ill, went home, gave up, had to leave | \
joined, came late | teams, rows
chairs, desks, lamps, bikes | rooms, trucks, halls | are taken, are broken, were stolen, are lent out | \
were delivered, came back from repair | rows, piles
tickets, coupons, badges, keys | rolls, boxes, drawers | are spent, got lost, were handed out, are invalid, \
were torn up | turned up, were ordered on top | bundles, sets
pages, files, forms, letters | binders, boxes, trays | are done, are finished, were checked, need no answer, \
went to the archive | came in, were added | piles, folders
""".replace("\\\n", "").strip().split("\n")])  # fmt: skip
_RULES: Final[dict[str, tuple[str, ...]]] = {
    "one": ("There are {a} {o} <place>.", "{a} {o} are <place>.", "<who> {a} {o}.", "{a} {o} <place>.",
        "It all began with {a} {o}.", "{o}: {a}.", "Number of {o} <place>: {a}.", "<who> {a} {o} <place>."),
    "many": ("There are {k} {B} <place>. Each has {a} {o}.", "Every {1} has {a} {o}. There are {k} {B}.",
        "{k} {B} hold {a} {o} each.", "<who> {k} {B}, {a} {o} in each {1}.", "<who> {k} {B} of {a} {o}.",
        "{a} {o} fit into a {1}, and {k} {B} are full.", "{k} {B}. {a} {o} per {1}.", "{k} {B} hold {a} {o} apiece.",
        "In one {1} there are {a} {o}. <who> {k} {B} like that.", "<who> {k} full {B}. A {1} takes {a} {o}."),
    "lost": ("In each of {k} {B} there are {a} {o}, but {b} of them <-> each time.", "Every {1} had {a} {o}. "
        "From each, {b} <->. There are {k} {B}.", "Of the {a} {o} in a {1}, {b} <->. It is the same in all {k} {B}."),
    "who": ("{n} {has}", "{n} had", "We have", "The owner counts", "The firm has", "{m} looked after"),
    "place": ("in the north", "at {r}'s", "outside", "here", "in the village", "on the list", "by the road"),
    "less": ("{x} <->.", "{x} of them <->.", "Of these, {x} <->.", "<then> {x} <->.", "{x} {o} <->.",
        "<then> {x} of the {o} <->.", "We know that {x} <->."),
    "more": ("{x} more <+>.", "<then> {x} more {o} <+>.", "{x} others <+>.", "Then {x} <+>."),
    "then": ("On Monday", "By noon", "So far", "This week", "Since then", "Overnight"),
    "left": ("How many {o} are left?", "How many are left?", "How many {o} does that leave?", "What is left?",
        "Tell me how many {o} remain.", "how many remain", "So how many {o} are still there?", "What remains?"),
    "sum": ("How many {o} is that?", "How many {o} are there then?", "How many is that in all?", "Count the {o}."),
    "rest": ("The rest", "The others", "The remaining {o}", "The {o} that remain", "All the other {o}"),
    "all": ("All of them", "They", "The {o}", "All those {o}"),
    "pack": ("<it> go into {I} of {j}. How many {I} is that?", "<it> make {I} of {j}. How many {I}?",
        "<it> are put in {I}, {j} in each. How many {I} are needed?", "How many {I} of {j} can be made of "
        "<it>?", "If {m} puts <it> into {I} of {j}, how many {I} are there?"),
    "split": ("<it> are split evenly between {j} <f>. How many does each get?", "{j} <f> take equal parts. <it> are "
        "shared out. How many {o} for one?", "<it> go to {j} <f>, the same number to each. How many {o} apiece?"),
    "half": ("Half of <it> are red. How many red ones is that?", "{m} gets half of <it>. How many does {m} get?",
        "Every second one of <it> is new. How many are new?", "How many are half of <it>?"),
    "f": ("neighbours", "people", "schools", "friends", "towns", "helpers"),
}  # fmt: skip
_STATES: Final = ("are ", "have ", "do ", "need ", "stay ")  # losses that leave the things in place: no gain may follow


def counted(rng: Random) -> Story:
    """Things that become fewer or more, and are packed or shared at times."""
    things, boxes, losses, gains, into = pick(rng, _TOPICS)
    start, box, end = pick(rng, ("one", "one", "many", "many", "lost")), pick(rng, boxes), rng.random()
    pattern = {"one": "a", "many": "a*k", "lost": "(a-b)*k"}[start]
    fewer, more = list(losses), pick(rng, gains)
    rng.shuffle(fewer)
    said = [pick(rng, _RULES[start]).replace("<->", fewer[-1])]
    if start == "lost" and fewer.pop().startswith(_STATES):
        more = ""
    count = pick(rng, (1, 1, 2) if start == "one" else (0, 1, 1, 1, 2) if start == "many" else (0, 0, 1))
    if end > 0.55 and start != "lost":
        count = int(start == "one")
    for letter in "cd"[:count]:
        up = more != "" and rng.random() < 0.3
        form = pick(rng, _RULES["more" if up else "less"]).replace("<+>", more).replace("<->", fewer[-1])
        earlier = "-" in pattern and not up
        form = form.replace("{x}", pick(rng, ("another {x}", "{x} more"))) if earlier else form
        form = form.replace("{x}", f"{{{letter}}}")
        if form[0] in "{a" and rng.random() < 0.4:
            link = pick(rng, (", and ", "; ") if up else (", but ", ", ", ", and "))
            said[-1] = said[-1].rstrip(".") + link + form
        else:
            said.append(form)
        more = "" if up or fewer.pop().startswith(_STATES) else more
        pattern += ("+" if up else "-") + letter
    unit, ask = "{o}", "<left>" if "-" in pattern else "<sum>"
    if end > 0.55 and start != "lost":
        ask = "<half>" if end > 0.9 else "<pack>" if end > 0.7 else "<split>"
        small = "2" if end > 0.9 else str(2 + int(rng.random() * 8))
        unit = "{I}" if ask == "<pack>" else unit
        if pattern == "a*k":  # arithmetic.py would make the dividend long
            many = str(2 + int(rng.random() * 8))
            pattern, said = f"a*{many}", [one.replace("{k}", many) for one in said]
        pattern = f"({pattern})/{small}" if len(pattern) == 3 and count else f"{pattern}/{small}"
        ask = pick(rng, _RULES[ask[1:-1]]).replace("{j}", small)
        whole = pick(rng, _RULES["rest" if "-" in pattern else "all"])
        inside = "them" if whole == "They" else whole[0].lower() + whole[1:]
        ask = capital(ask.replace("<it>", whole if ask.startswith("<it>") or ". <it>" in ask else inside))
    elif ask == "<left>" and rng.random() < 0.1:
        said, ask = ["How many {o} are left?", *said], ""
    text = expand(rng, _RULES, " ".join([*said, ask]).strip())
    words = (box, singular(box), pick(rng, into), pick(rng, (*things, "{o}")))
    for place, word in zip(("{B}", "{1}", "{I}", "{o}"), words):
        text = text.replace(f" a {place}", f" an {place}") if word[0] in "aeo" else text
        text, unit = text.replace(place, word), unit.replace(place, word)
    text = ". ".join([capital(s) for s in text.split(". ")])
    return pattern, text.replace(". {c}", ". {C}"), unit


# Unit, where it is at first, what goes on with it upwards and downwards, and the question.
_LEVELS: Final = tuple([tuple([part.split(", ") for part in row.split(" | ")]) for row in """
cm | a snail/sits {} cm up a wall, a beetle/is at {} cm | climbs {} cm, gets {} cm higher | slides back {} cm, \
drops {} cm | How high is it?, How far up is it now?
degrees | the kiln/is at {} degrees, the water/has {} degrees | gets {} degrees hotter, warms by {} degrees | \
cools by {} degrees, gets {} degrees colder | What does the thermometer show?, How hot is it?
metres | a balloon/floats at {} metres, the lift/is at {} metres | rises {} metres, goes up {} metres | \
sinks {} metres, comes down {} metres | At what height is it?, How high is that?
euros | the account/is at {} euros, the fund/has {} euros | grows by {} euros, earns {} euros | \
pays out {} euros, shrinks by {} euros | What is in it?, How much money is there?
points | our team/has {} points, the club/starts with {} points | wins {} points, picks up {} points | \
gives up {} points, is fined {} points | How much is that now?, What is the score?
litres | the tank/has {} litres in it, the pool/starts with {} litres | takes in {} litres, gets {} litres more | \
loses {} litres, lets out {} litres | How much is in it?, How much water is that now?
""".replace("\\\n", "").strip().split("\n")])  # fmt: skip
_OFTEN: Final = ("per {u} for {k} {u}s", "every {u}, {k} {u}s long", "each {u} over {k} {u}s", "a {u} during {k} {u}s",
    "{k} times", "in each of {k} {u}s")  # fmt: skip


def level(rng: Random) -> Story:
    """A quantity that goes up and down, at once or by the hour."""
    (unit,), starts, ups, downs, asks = pick(rng, _LEVELS)
    subject, _, start = pick(rng, starts).partition("/")
    said, pattern, letters, ask = [f"{subject} {start}".replace("{}", "{a}")], "a", iter("bcd"), pick(rng, asks)
    relative, rate = rng.random() < 0.3, int(rng.random() * 2.5)
    for i in range(pick(rng, (2, 2, 3) if relative else (1, 2, 2, 3))):
        up, letter = rng.random() < 0.4 or (i == 0 and relative), next(letters)
        one = pick(rng, ups if up else downs).replace("{}", f"{{{letter}}}")
        pattern += ("+" if up else "-") + letter
        if i == rate:
            one += " " + pick(rng, _OFTEN).replace("{u}", pick(rng, ("day", "night", "week", "month")))
            pattern += "*k"
        said.append(f"{pick(rng, ('', 'then ', 'after that ', 'later ' if i else 'first '))}it {one}")
    if relative:
        said, pattern = [f"{subject} {said[1][said[1].index('it ') + 3 :]}", *said[2:]], pattern[2:]
        ask = pick(rng, (f"How many {unit} more than at first is that?", f"By how many {unit} is it up in the end?",
            f"How many {unit} above its start is it?", f"It was at zero {unit} before. And now?"))  # fmt: skip
    for i in range(len(said) - 1, 1, -1):
        if rng.random() < 0.5:
            said[i - 1 : i + 1] = [said[i - 1] + pick(rng, (" and ", ", ", ", but ")) + said[i]]
    return pattern, ". ".join([capital(s) for s in said]) + ". " + ask, unit


_FEES: Final = ("the ticket, the shoe hire", "a seat, lunch", "entry, the towel", "a lesson, the board",
    "the tour, an audio guide", "a bed, breakfast", "the film, popcorn", "a boat, the life jacket",
    "the course, the book")  # fmt: skip


def fees(rng: Random) -> Story:
    """Two prices for each of several people, or one of them only once."""
    one, two = pick(rng, _FEES).split(", ")
    many, cur = (
        f"{{k}} {pick(rng, ('people', 'friends', 'pupils', 'of us'))}",
        pick(rng, ("euros", "dollars", "francs")),
    )
    text = pick(rng, (f"{one} costs {{a}} {cur} and {two} {{b}}", f"{one} is {{a}} {cur}, {two} {{b}} {cur}",
        f"you pay {{a}} {cur} for {one} and {{b}} {cur} for {two}", f"{one}: {{a}} {cur}; {two}: {{b}} {cur}",
        f"they want {{a}} {cur} for {one}, and {two} is another {{b}}"))  # fmt: skip
    pay = pick(rng, ("How much is that?", "What is the bill?", "Total?", "What does it cost?"))
    if rng.random() < 0.6:
        pattern, who = "(a+b)*k", pick(rng, (f"{many} take both.", f"{many} need the two of them.",
            f"There are {many}, and everyone wants both.", f"{many} pay for both each."))  # fmt: skip
    else:
        pattern, who = "a*k+b", pick(rng, (f"Only the first is paid per person; the other once. There are {many}.",
            f"{many} need {one}, but {two} just once.", f"{many} share {two}, but each has {one}."))  # fmt: skip
    return pattern, f"{capital(text)}. {capital(who)} {pay}", cur


def plan(rng: Random) -> Story:
    return pick(rng, (counted, counted, counted, counted, level, level, fees))(rng)
