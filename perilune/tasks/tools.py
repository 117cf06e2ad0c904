"""Declared tools and the requests that ask for them, put together from verbs, nouns and fields.

Verbs come in classes of equal meaning; a request may use another verb of the class than the tool's name. No other
tool of a prompt has both the class and the noun of the one that is meant, but some share one of the two. Some tools
have a name that says nothing and are recognised by their description. In training many tools come from catalog.py.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Final

from perilune.tasks import catalog
from perilune.tasks.fields import Field, fields, named, said, value, written
from perilune.tasks.problem import SEED, ToolCall, pick, widely
from perilune.tasks.wordings import agreeing, bare, enumerated, lined, parted, phrase
from perilune.tasks.words import NEW_NOUNS, NOUNS, invents_more, made_up

VERBS: Final = (
    parted("get|fetch|show|find|look up|retrieve|check|view|read"),
    parted("create|add|make|register|insert"),
    parted("delete|remove|erase|drop|discard"),
    parted("update|change|edit|modify|adjust"),
    parted("send|share|forward|deliver|mail"),
    ("list", "enumerate", "browse"),
    parted("start|launch|run|begin"),
    parted("stop|halt|end|terminate"),
    ("book", "reserve"),
    ("count", "measure"),
    ("copy", "duplicate", "clone"),
    ("lock", "block", "freeze"),
    ("rename",),
    ("print",),
    ("translate",),
    ("sort", "order"),
)
# Most tools of the world read, create, change or delete something.
_CLASSES: Final = (0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
# Classes far from every verb of the catalog that has no class ("log sample" and "create sample" are too close).
_APART: Final = (5, 9, 10, 12, 15)
REQUESTS: Final = parted(
    "{v} the {n}{c}.|{v} the {n}{c}.|Please {v} the {n}{c}.|Can you {v} the {n}{c}?|I want to {v} the {n}{c}.|{v} a "
    "{n}{c}.|I need to {v} the {n}{c}.|Could you {v} the {n}{c}?|{v} the {n}{c}|{v} {n}{c}.|I would like to {v} the "
    "{n}{c}.|{v} the {n}{c}, please.|Help me {v} the {n}{c}.|Now {v} the {n}{c}."
)
NEW_REQUESTS: Final = parted(
    "Could you please {v} the {n}{c}?|Please help me {v} the {n}{c}.|I need you to {v} the {n}{c}.|Now I want to {v} "
    "the {n}{c}."
)
# For the first class of verbs: questions without a verb.
QUESTIONS: Final = parted("What is the {n}{c}?|What's the {n}{c}?|Tell me the {n}{c}.|How is the {n}{c}?|{n}{c}?")
# Requests without the tool's verb, by class of verbs.
INDIRECT: Final[dict[int, tuple[str, ...]]] = {
    0: parted(
        "I'd like to know the {n}{c}.|Let me see the {n}{c}.|What about the {n}{c}?|Do you have the {n}{c}?|Give me "
        "the {n}{c}.|I need the {n}{c}.|Can I have the {n}{c}?|How does the {n} look{c}?|What do you know about the "
        "{n}{c}?|I'm interested in the {n}{c}.|I wonder about the {n}{c}.|Is there a {n}{c}?|What {n} do we have{c}?|"
        "Where can I find the {n}{c}?"
    ),
    1: ("I need a new {n}{c}.", "There should be a {n}{c}.", "We need a {n}{c}.", "Set up a {n}{c}.",
        "A new {n} please{c}.", "Save a {n}{c}.", "I'd like to have a new {n}{c}.", "Please put in a {n}{c}."),
    2: ("Get rid of the {n}{c}.", "I don't need the {n}{c} any more.", "The {n} can go{c}.", "Take the {n} out{c}.",
        "We no longer want the {n}{c}.", "Clear the {n}{c}.", "Throw away the {n}{c}."),
    3: ("The {n} needs new data{c}.", "The {n} is wrong{c}, correct it.", "Set the {n}{c}.", "Correct the {n}{c}.",
        "The {n} should be different{c}."),
    4: parted("Pass on the {n}{c}.|The {n} has to go out{c}.|Get the {n} out{c}.|Let them have the {n}{c}."),
    5: parted("Which {n}s are there{c}?|Show all {n}s{c}.|Give me every {n}{c}.|I want to see all the {n}s{c}."),
    8: ("I want a {n}{c}.", "Get me a {n}{c}.", "Hold a {n}{c}."),
    9: ("How many {n}s are there{c}?", "What is the number of {n}s{c}?"),
}  # fmt: skip
_KEPT: Final = tuple([bare(form.split("{v}")[0]) for form in NEW_REQUESTS])
_OPENINGS: Final = parted(" with | with the |, | for |: | using | where the | - ")
_CLAUSES: Final = parted("{l} {s}|{l} {s}|{l} {s}|{l}: {s}|{l} = {s}|{l} set to {s}|{l} is {s}")
_NATURAL: Final = lined("""
city:  in {s}| for {s}| of {s}
location:  in {s}| at {s}
place:  in {s}| at {s}
town:  in {s}
destination:  to {s}
origin:  from {s}
recipient:  to {s}
sender:  from {s}
name:  of {s}| called {s}| named {s}
customer:  for {s}| of {s}
user:  for {s}| of {s}
owner:  of {s}| owned by {s}
author:  by {s}
date:  on {s}| for {s}
day:  on {s}
time:  at {s}
deadline:  until {s}
email:  to {s}
title:  titled "{s}"| called "{s}"
message:  saying "{s}"
topic:  about {s}
language:  in {s}
price:  for {s}
days:  for {s} days
hours:  for {s} hours
guests:  for {s} guests
people:  for {s} people
nights:  for {s} nights
id:  {s}| number {s}
code:  {s}
unit:  in {s}
format:  as {s}
currency:  in {s}
""")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `verbs`: index of its verb's class. Parameters are in the order in which they are declared.

    `entry`: the entry of a catalog tool; if its verb has no class, `verbs` is -1.
    `iso`: dates must be YYYY-MM-DD, times HH:MM, languages, countries and currencies codes.
    """

    name: str
    verbs: int
    verb: str
    noun: str
    required: tuple[Field, ...]
    optional: tuple[Field, ...]
    spec: dict[str, Any]
    entry: catalog.Entry | None = None
    iso: bool = False


def tool(rng: Random, split: str, *, verbs: int | None = None, noun: str | None = None, plain: bool = False) -> Tool:
    """A random tool. `plain`: short, for prompts that declare many."""
    r, new = rng.random, split == "structural"
    if verbs is None:
        verbs = pick(rng, _CLASSES)
    verb = pick(rng, VERBS[verbs])
    if noun is None:
        noun = random_noun(rng, new)
    style = r()
    camel = style > 0.85
    named_by_nothing = style < 0.1 and not plain
    if named_by_nothing:
        name = made_up(rng) + ("_" + made_up(rng) if r() < 0.5 else "")
    elif style < 0.2:
        name = named(f"{noun} {verb}", camel=False)
    else:
        name = named(f"{verb} {noun}", camel)
    chosen = fields(rng, 1 + int(r() * (2 if plain else 3)), 0.5 if new else 0.0, camel)
    must = [True, *[r() < 0.6 for _ in chosen[1:]]]
    required = tuple(sorted([f for f, m in zip(chosen, must) if m], key=_by_name))
    optional = tuple(sorted([f for f, m in zip(chosen, must) if not m], key=_by_name))
    described = 0.0 if plain else 0.3
    function: dict[str, Any] = {"name": name}
    if named_by_nothing or r() < (0.3 if plain else 0.65):
        forms = _MORE_DESCRIPTIONS.get(verbs, ())
        form = agreeing(pick(rng, forms if forms and widely(split) and r() < 0.5 else _DESCRIPTIONS), {"n": noun})
        label = chosen[0].label
        function["description"] = form.format(v=verb, V=verb.capitalize(), n=noun, N=noun.capitalize(), p=label)
    function["parameters"] = {
        "type": "object",
        "properties": {f.name: f.schema(rng, described) for f in chosen},
        "required": [f.name for f in required],
    }
    return Tool(name, verbs, verb, noun, required, optional, {"type": "function", "function": function})


_DESCRIPTIONS: Final = parted(
    "{V} the {n}|{V} a {n}|{V} the {n}.|{V} {n}|Use this to {v} the {n}|Tool to {v} the {n}.|{V} the {n} of a user"
)
_MORE_DESCRIPTIONS: Final[dict[int, tuple[str, ...]]] = {  # by class of verbs; {p} is a parameter's label
    0: parted(
        "Current {n}|Current {n} by {p}|Returns the {n}|Returns the {n} for a {p}|Information about the {n}|{N} "
        "lookup|{N} by {p}|Gives access to the {n}|Details of a {n}|The {n} as it is now|Gets {n} data"
    ),
    1: ("Creates a new {n}", "Adds a {n} to the system", "Makes a {n}", "Sets up a {n} with the given {p}", "New {n}",
        "Saves a new {n}", "Used to put a {n} into the system"),
    2: parted("Deletes a {n}|Removes the {n} for good|Takes a {n} away|Erases the {n} with the given {p}|{N} removal"),
    3: parted("Changes a {n}|Updates the data of a {n}|Edits an existing {n}|Sets new values of the {n}|{N} update"),
    4: parted("Sends the {n} to somebody|Delivers a {n}|Hands the {n} on by mail|{N} delivery"),
    5: parted("All {n}s|Lists every {n}|Overview of {n}s|Shows all {n}s of a {p}"),
}  # fmt: skip


def _by_name(field: Field) -> str:
    return field.name


def random_noun(rng: Random, new: bool) -> str:
    if new:
        return pick(rng, NEW_NOUNS) if rng.random() < 0.7 else f"{pick(rng, NEW_NOUNS)} {pick(rng, NOUNS)}"
    roll = rng.random()
    if roll < (0.4 if invents_more() else 0.12):
        return made_up(rng) if roll < 0.3 else f"{made_up(rng)} {pick(rng, NOUNS).split('_')[0]}"
    noun = pick(rng, NOUNS).replace("_", " ")
    return noun if roll < 0.75 or " " in noun else f"{noun} {pick(rng, NOUNS).split('_')[0]}"


@lru_cache(maxsize=6)
def _pool(plain: bool, split: str) -> tuple[Tool, ...]:
    """Tools to declare beside the one that is meant. Cached, because making them takes most of the time."""
    new = split == "structural"
    rng = Random(f"{SEED}:tools:{plain}:{split if widely(split) else new}")
    return tuple([tool(rng, split, plain=plain) for _ in range(600 if new else 5000)])


def catalog_tool(rng: Random, entry: catalog.Entry | None = None, iso: bool = False) -> Tool:
    """One of the catalog's tools, under one of its names; some are `iso` (see Tool) anyway."""
    entry = entry or pick(rng, catalog.ENTRIES)
    name = pick(rng, entry.names) if rng.random() < 0.5 else entry.names[0]
    if (roll := rng.random()) < 0.06:
        name = made_up(rng)
    elif roll < 0.18:
        name = named(name.replace("_", " "), camel=True)
    iso = iso or rng.random() < 0.4
    required, optional = catalog.declared_fields(entry)
    verbs = next((i for i, known in enumerate(VERBS) if entry.verb in known), -1)
    spec = catalog.specification(rng, entry, name, iso)
    return Tool(name, verbs, entry.verb, entry.noun, tuple(required), tuple(optional), spec, entry, iso)


@lru_cache(maxsize=1)
def _catalog_pool() -> tuple[Tool, ...]:
    rng = Random(f"{SEED}:catalog")
    return tuple([catalog_tool(rng, entry) for entry in catalog.ENTRIES for _ in range(25)])


@lru_cache(maxsize=2)
def kits(common: bool = False) -> tuple[tuple[Tool, ...], ...]:
    """Tools of one noun that prompts declare together, or everyday ones."""
    rng, known = Random(f"{SEED}:kits"), catalog.COMMON if common else catalog.KITS
    return tuple([tuple([catalog_tool(rng, e, common) for e in kit]) for kit in known for _ in range(25)])


def forget_pools() -> None:
    """Pools are drawn anew: they hold made-up words, which `words.learn` changes."""
    kits.cache_clear()
    _pool.cache_clear()
    _catalog_pool.cache_clear()


def others(rng: Random, targets: list[Tool], count: int, split: str) -> list[Tool]:
    """More tools for a prompt, none of which could be meant by a request for one of `targets`, some close to it."""
    taken = {t.name for t in targets}
    meant = {(t.verbs, t.noun) for t in targets}
    plain = count > 7
    new, wide = split == "structural", widely(split)
    pool, new_pool = _pool(plain, "train" if wide else "heldout"), _pool(plain, "structural")
    known = 0.0 if not wide else 0.65 if any(t.entry for t in targets) else 0.12
    nouns = {t.noun for t in targets}
    found: list[Tool] = []
    while len(found) < count:
        if wide and rng.random() < known:
            one = pick(rng, _catalog_pool())
            if one.name not in taken and one.noun not in nouns:
                taken.add(one.name)
                nouns.add(one.noun)
                found.append(one)
            continue
        near = pick(rng, targets) if targets and rng.random() < 0.25 else None
        kind = split if not new else "structural" if rng.random() < 0.5 else "heldout"
        if near is None:
            one = pick(rng, new_pool if kind == "structural" else pool)
        elif near.verbs < 0:
            one = tool(rng, kind, verbs=pick(rng, _APART), noun=near.noun, plain=plain)
        elif rng.random() < 0.5:
            one = tool(rng, kind, noun=near.noun, plain=plain)
        else:
            one = tool(rng, kind, verbs=near.verbs, plain=plain)
        if one.name not in taken and (one.verbs, one.noun) not in meant:
            taken.add(one.name)
            found.append(one)
    return found


def confusable(one: Tool, other: Tool) -> bool:
    """Whether a request for one could mean the other."""
    return one.name == other.name or (one.verbs == other.verbs and one.noun == other.noun)


def how_many(rng: Random, split: str) -> int:
    """How many tools a prompt declares: mostly 5 to 8, at most 15; with wide wordings often 1 to 4."""
    roll = rng.random()
    if roll < 0.36 and widely(split):
        return 1 + int(rng.random() * 4)
    return 5 + int(rng.random() * 4) if roll < 0.94 else 9 + int(rng.random() * 7)


def shuffled(rng: Random, tools: list[Tool]) -> tuple[dict[str, Any], ...]:
    specs = [t.spec for t in tools]
    rng.shuffle(specs)
    return tuple(specs)


# ---- requests ----------


@dataclass(frozen=True, slots=True)
class Request:
    """A sentence that asks for a tool, and the call it asks for."""

    tool: Tool
    text: str
    opening: str  # the first words of what is asked for, as in the text
    call: ToolCall

    def quoted(self, prompt: str) -> str:
        """The opening as the prompt has it: where requests are joined, their first letters change."""
        at = prompt.lower().find(self.opening.lower())
        return self.opening if at < 0 else prompt[at : at + len(self.opening)]

    def trace(self, prompt: str) -> str:
        """The opening, the tool, and every parameter in declared order: its type and value, or `-` if not given.

        Not a name for the need instead of the opening: a model trained so named tools of its training data ("get
        definition" for a translation), found none of them declared, and refused.
        """
        lines = [self.quoted(prompt), self.tool.name]
        given = self.call.arguments
        for f in (*self.tool.required, *self.tool.optional):
            lines.append(f"{f.name}: {f.trace_type} {written(given[f.name])}" if f.name in given else f"{f.name}: -")
        return "\n".join(lines)


_JOINED: Final = re.compile(
    r"[\s,;.?!&+/-]*(\b(and|or|also|plus|as well as|then|next|oh|in|to|on|for|at|of|the|one)\b[\s,;:\"'-]*)*$", re.I
)
_OPENING: Final = re.compile(r"\S+(?: \S+){0,5}")


def opening(text: str, core: str = "") -> str:
    """The first six words of a text; of `core`, if the text has its first three words."""
    begin = " ".join(core.split()[:3]).lower()
    at = max(text.lower().find(begin), 0)
    found = _OPENING.search(text, at)
    return found[0].rstrip(".,;:!? -") if found else text


def request(rng: Random, tool: Tool, split: str) -> Request:
    """A request for the tool with random values for its required and some of its optional parameters."""
    if tool.entry:
        return _everyday(tool, rng, catalog.asked(rng, tool.entry, tool.iso))
    given = (*tool.required, *[f for f in tool.optional if rng.random() < 0.5])
    arguments = {f.name: value(rng, f) for f in given}
    return worded(rng, tool, arguments, split)


def _everyday(tool: Tool, rng: Random, asked: catalog.Asked) -> Request:
    form, shown, arguments = asked
    text = phrase(rng, form, _KEPT, 0.0 if catalog.STATEMENT.match(form) else 0.25).format(**shown)
    return Request(tool, text, opening(text, form.format(**shown)), ToolCall(tool.name, arguments))


def shortly(rng: Random, tool: Tool, known: dict[str, Any]) -> Request | None:
    """A request for a kit's tool that refers to one of the values `known`, or without them leaves one open."""
    made = tool.entry and catalog.asked_shortly(rng, tool.entry, known)
    return _everyday(tool, rng, made) if made else None


def together(rng: Random, tool: Tool, count: int, joined: bool = True) -> tuple[str, list[Request]] | None:
    """One sentence that asks for several calls of a catalog's tool, and those calls' requests.

    If not `joined`, the sentence asks for the first of them only.
    """
    if tool.entry is None or (made := catalog.asked_together(rng, tool.entry, count, tool.iso, joined)) is None:
        return None
    asked, calls = made
    return _separated(_everyday(tool, rng, asked), calls)


def in_rows(rng: Random, tool: Tool, count: int) -> tuple[str, list[Request]] | None:
    """Several calls of a catalog's tool as rows behind a common head, and those calls' requests."""
    if tool.entry is None or (made := catalog.asked_in_rows(rng, tool.entry, count, tool.iso)) is None:
        return None
    text, calls = made
    return _separated(Request(tool, text, opening(text), ToolCall(tool.name, calls[0][1])), calls)


def going_on(rng: Random, tool: Tool, count: int) -> tuple[str, list[Request]] | None:
    """Several calls of a catalog's tool, the further ones in a few words, and those calls' requests."""
    if tool.entry is None or (made := catalog.asked_on(rng, tool.entry, count, tool.iso)) is None:
        return None
    asked, calls = made
    first = _everyday(tool, rng, asked)
    pieces = first.text.split("\0")
    text, at = "".join(pieces), 0
    requests = [replace(first, text=text, opening=_own(first.opening.split("\0")[0]))]
    for piece, more, values in zip(pieces, pieces[1:], calls[1:]):
        at += len(piece)
        requests.append(replace(first, opening=_own(more), call=ToolCall(tool.name, values)))
        if text.lower().find(requests[-1].opening.lower()) != at:
            return None
    return text, requests


_LISTED: Final = parted(
    "{V} the {n}s {x}.|{V} {n}s {x}, please.|{V} the {n} for {x}.|{V} these {n}s: {x}|The {n}s {x}, please {v} them.|"
    "I want to {v} the {n}s with the {l} {x}.|{N}s {x}: {v}.|Can you {v} {n} {x}?|{V} all of these {n}s, {l} {x}.|I "
    "have several {n}s ({x}). {V} each of them.|{V} a {n} for {x}.|{N} {x}, {v} please.|Could you {v} the {n}s where "
    "the {l} is {x}?|{V} {n} once for {x}.|{V} {l} {x}.|{l}s {x}: {v} the {n}"
)
_LIST_ENDS: Final = parted(" and | and | and |, | & | and also |, and | plus | and then | as well as ")


def listed(rng: Random, count: int) -> tuple[str, list[Request]]:
    """One sentence that names several values of a tool's only parameter, and the request of each of its calls."""
    while True:
        made = tool(rng, "train")
        if len(made.required) == 1 and made.required[0].kind not in ("flag", "words", "choice", "title"):
            break
    field = made.required[0]
    values = list(dict.fromkeys([value(rng, field) for _ in range(count)]))
    verb = made.verb if rng.random() < 0.6 else pick(rng, VERBS[made.verbs])
    form = pick(rng, _LISTED).format(
        v=verb, V=verb.capitalize(), n=made.noun, N=made.noun.capitalize(), l=field.label, x="{x}"
    )
    shown = [said(v) for v in values]
    last = pick(rng, [end for end in _LIST_ENDS if end != " plus " or not shown[0].isdigit()])
    asking = 0.25 if form.startswith(verb.capitalize()) else 0.0
    text, core = (f.replace("{x}", enumerated(shown, last)) for f in (phrase(rng, form, _KEPT, asking), form))
    calls = [(s, {field.name: v}) for s, v in zip(shown, values)]
    return _separated(Request(made, text, opening(text, core), ToolCall(made.name, calls[0][1])), calls)


_WISHES: Final = parted(
    "I need {x}.|I'd like {x}.|Can I have {x}?|Please arrange {x}.|Get me {x}.|{x}, please.|I want {x}|Could you see "
    "to {x}?|We need {x}.|There should be {x}.|What I need is {x}.|{x} pls|Would you sort out {x} for me?|I could use "
    "{x}.|I'm after {x}.|Let me have {x}."
)


def wishes(rng: Random, count: int) -> tuple[str, list[Request]]:
    """One sentence that asks for things of several tools without a verb for each, and the request of each call."""
    made: list[Request] = []
    parts: list[str] = []
    while len(made) < count:
        one = tool(rng, "train", verbs=pick(rng, (1, 1, 8)))
        arguments = {f.name: value(rng, f) for f in (*one.required, *[f for f in one.optional if rng.random() < 0.4])}
        fields = [f for f in (*one.required, *one.optional) if f.name in arguments]
        head = agreeing(pick(rng, ("a {n}", "a {n}", "one {n}", "a new {n}")), {"n": one.noun}).format(n=one.noun)
        part = f"{head}{_clauses(rng, fields, arguments)}"
        if all(one.noun not in p and r.tool.noun not in part for p, r in zip(parts, made)):
            parts.append(part)
            made.append(Request(one, "", part, ToolCall(one.name, arguments)))
    x = enumerated(parts, pick(rng, (" and ", " and ", ", and ", ", and also ", " plus ", " as well as ", ", ")))
    text = phrase(rng, pick(rng, _WISHES), asking=0.0).replace("{x}", x)
    return text, [replace(r, text=text, opening=opening(r.opening)) for r in made]


def _separated(first: Request, calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, list[Request]]:
    """The text, and the request of each call: the first one begins where the text does, the others at their words."""
    places = [first.text.find(calls[0][0])]
    for shown, _ in calls[1:]:
        places.append(max(first.text.find(shown, places[-1] + 1), 0))
    begin, end = first.text.find(first.opening), places[1] if places[1:] else None
    requests = [replace(first, opening=_own(first.text[begin:end])) if end and end > begin >= 0 else first]
    for at, end, (_, arguments) in zip(places[1:], [*places[2:], None], calls[1:]):
        own = _own(first.text[at:end])
        own = own if first.text.find(own) == at else opening(first.text[at:])
        requests.append(replace(first, opening=own, call=ToolCall(first.tool.name, arguments)))
    return first.text, requests


def _own(text: str) -> str:
    """The first words of a call, without what joins it to the next one."""
    return opening(_JOINED.sub("", text) or text)


def worded(rng: Random, tool: Tool, arguments: dict[str, Any], split: str) -> Request:
    verb = tool.verb if rng.random() < 0.6 else pick(rng, VERBS[tool.verbs])
    mentioned = [f for f in (*tool.required, *tool.optional) if f.name in arguments]
    rng.shuffle(mentioned)
    new, wide = split == "structural", widely(split)
    if wide and tool.verbs in INDIRECT and rng.random() < 0.3:
        form = pick(rng, INDIRECT[tool.verbs])
    elif tool.verbs == 0 and rng.random() < 0.25:
        form = pick(rng, QUESTIONS)
    else:
        form = pick(rng, NEW_REQUESTS if new and rng.random() < 0.5 else REQUESTS)
    core = form
    if wide and rng.random() < 0.5:
        form = phrase(rng, form, _KEPT)
    clauses = _clauses(rng, mentioned, arguments)
    forms = [agreeing(f, {"n": tool.noun}) for f in (form, core)]
    text, core = (f.format(v=verb, n=tool.noun, c=clauses) for f in forms)
    text = text[0].upper() + text[1:]
    return Request(tool, text, opening(text, core), ToolCall(tool.name, arguments))


def _clauses(rng: Random, mentioned: list[Field], arguments: dict[str, Any]) -> str:
    natural = ""
    plain: list[str] = []
    for f in mentioned:
        shown = said(arguments[f.name])
        if f.name in _NATURAL and not plain and rng.random() < 0.6:
            natural += pick(rng, _NATURAL[f.name]).format(s=shown)
        else:
            if f.kind == "title" or (f.kind == "words" and len(mentioned) > 1):
                shown = f'"{shown}"'
            plain.append(pick(rng, _CLAUSES).format(l=f.label, s=shown))
    if not plain:
        return natural
    joined = (
        plain[0] if len(plain) == 1 else ", ".join(plain[:-1]) + pick(rng, (" and ", ", ", " and the ")) + plain[-1]
    )
    return natural + pick(rng, _OPENINGS) + joined
