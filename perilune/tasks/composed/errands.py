"""Requests as colleagues write them, for `tool_call` and `tools_multi`: with a sentence around them, without the tool's
verb, several in one message.

data/errands.txt has rules for sentences, then groups of tools; `%` begins a group with its nouns. A row is a tool:
names | descriptions | parameters | requests. A parameter is `names:kind:descriptions`, with a `+` if one request may
give several values of it; {a} is the first one. Requests begin with `=` if they are no imperatives, with `?` if they
are questions, with `>` if they are the result: `keys:kind`; what follows `~` is repeated for further calls. `<...>`
may become "it" or "there", `*` is a plural, `(x/y)` a choice.

In unfinished texts, chr(0) and chr(1) enclose the words of a call, and chr(2) precedes a word that keeps its case.
"""

import re
from random import Random
from typing import Any, Final

from perilune.tasks import catalog
from perilune.tasks.composed.clauses import clause, sentence
from perilune.tasks.problem import ToolCall, pick
from perilune.tasks.tools import Request, Tool, catalog_tool, opening
from perilune.tasks.wordings import capital, expand, lined, small
from perilune.tasks.words import CITIES, NAMES, PLAIN, any_word, lines, made_up

_HEAD, *_BLOCKS = lines("errands.txt").split("% ")
_RULES: Final = lined(_HEAD)
GROUPS: Final = tuple([tuple(block.strip().split("\n")) for block in _BLOCKS])
_WORDS: Final = dict([word.split("=") for word in _RULES["word"]])
_KEPT: Final = frozenset(_RULES["kept"])
_OF_CALL: Final = re.compile("\0([^\0\1]*)\1")
_LEAD: Final = re.compile(r" ?(in|into|to|for|on|of|with) ")
Known = tuple[str, Any, str]  # a kind, a value and how it is written
Given = dict[str, tuple[Any, str]]
# Groups of tools about one thing with a code or a name of its own, {a}.
DESKS: Final = tuple([g for g in GROUPS if re.match(r"[^;]*:(tag|own)_", g[1].split("|")[2])])
_THINGS: Final = {g[0].split(" ")[0]: g[1].split("|")[2].split(":")[1].rstrip("+") for g in DESKS}
_LAST: Final = ("delete", "cancel", "close", "seal", "empty", "release", "block")
_VAGUE: Final = ("get", "set", "add", "check", "find", "change", "give", "read", "count", "plan")
_CLEAR: Final = (*DESKS, *[g for g in GROUPS if g[0] in ("distance journey", "shift roster")])


class Ask:
    """A tool and what asks for it: a text with marks, its mood, the arguments of its calls and how they are written."""

    def __init__(self, rng: Random, row: str, flag: str = "", brand: str = "") -> None:
        """`flag`: names of one more parameter, its description, words for yes and for no. `brand`: its product."""
        names, about, parameters, *forms = row.split("|")
        self.forms, self.gives = [f for f in forms if f[0] != ">"], [f[1:] for f in forms if f[0] == ">"]
        self.rng, self.many, self.places = rng, "", dict[str, catalog.Parameter]()
        self.labels = [
            one.split(",")[0].split(":")[0].removesuffix("_id").replace("_", " ") for one in parameters.split(";")
        ]
        for letter, one in zip("abc", parameters.split(";")):
            known, kind, *said = one.split(":")
            self.many += letter * (kind[-1] == "+")
            name, kind, noted = pick(rng, known.split(",")), kind.rstrip("+"), tuple("".join(said).split("/"))
            if kind == "on,off" and rng.random() < 0.5:
                name, kind, noted = "on", "bool", ("true for on, false for off", "Whether it is on")
            choices = tuple(kind.split(",")) if "," in kind else ()
            self.places[letter] = catalog.Parameter(name, kind, True, choices, noted if noted[0] else ())
        self.meant = flag.split(";")[2:]
        if flag:
            flags, why = flag.split(";")[:2]
            self.places["f"] = catalog.Parameter(pick(rng, flags.split(",")), "bool", True, (), (why,))
        self.names, declared = tuple(names.split(",")), tuple(self.places.values())
        self.verb, self.noun = self.names[0].replace("_", " ").split(" ", 1)
        called, notes = _branded(rng, self.names, about, brand) if brand else (self.names, tuple(about.split("/")))
        self.tool = catalog_tool(rng, catalog.Entry(self.verb, self.noun, called, notes, declared, ()))

    def say(self, count: int = 1, it: Known | None = None, short: bool = False, given: Given | None = None) -> bool:
        """Makes a request for `count` calls. With `it`, for one call about a known value, which is called "it" or, if
        `short`, left out; False if the tool has no such request.

        `given`: values of other parameters, and how they are written.
        """
        rng, forms = self.rng, self.forms
        self.calls, self.texts = list[dict[str, Any]](), list[dict[str, str]]()
        if it:
            at = "".join([x for x, p in self.places.items() if p.kind == it[0]])
            forms = [f for f in forms if f[0] != "=" and at and re.search(rf"<[^>]*{{[{at}]}}>", f)]
            if not forms:
                return False
        form = re.sub(r"\(([^()]*/[^()]*)\)", lambda m: pick(rng, m[1].split("/")), pick(rng, forms))
        self.mood = form[0] if form[0] in "=?" else "!"
        head, parted, body = form.removeprefix(self.mood).rpartition(" ~ ")
        head += " " * bool(parted)
        if it and (found := re.search(r"<(in |on |to )?[^>]*\{(\w)\}>", body)):
            cut = short and rng.random() < 0.7 and re.search(r" (of|for|with|from) <[^>]*>| <(in|on|to) [^>]*>", body)
            body = body.replace(cut[0] if cut else "\0", "")
            where = {"in ": ("in there", "there"), "on ": ("there", "on it"), "to ": ("there", "to it")}
            body = body.replace(found[0], pick(rng, where.get(found[1], ("it",))))
            self._draw({found[2]: it[1:]} | (given or {}))
            self.text = self._joined([self._put(body)], head)
            return True
        body = re.sub("[<>]", "", body)
        many = [x for x in self.many if parted or f"* {{{x}}}" in body]
        shared = pick(rng, many) if count > 1 and many and (len(self.places) == 1 or rng.random() < 0.45) else ""
        for _ in range(count):
            known = self.places.items() if shared and self.calls else ()
            self._draw((given or {}) | {x: (self.calls[0][p.name], self.texts[0][x]) for x, p in known if x != shared})
        if not shared or not (found := re.fullmatch(rf"((?:.*\}})?)([^{{}}]*)\{{{shared}\}}(.*)", body)):
            body, head = (head + body, "") if "{" in head else (body, head)
            self.text = self._joined([self._put(body, i) for i in range(count)], head)
            return True
        before, lead, after = found.groups()
        again = lead.lstrip() if _LEAD.fullmatch(lead) and rng.random() < 0.5 else ""
        if not again and not after[:1].isalpha():
            lead = re.sub(r"(\w)\*", r"\1s", lead)
            if count == 2 and rng.random() < 0.2 and not lead.endswith(", "):
                lead = re.sub(r"(the )?(\w+s )$|$", lambda m: f"both {m[2] or ''}", lead, count=1)
        items = [again * bool(i) + self._put(f"{{{shared}}}", i) for i in range(count)]
        self.text = self._joined(items, self._put(head + before + lead), self._put(after))
        return True

    def _draw(self, given: dict[str, tuple[Any, str]]) -> None:
        """One more call: its arguments, and how they are written."""
        values: dict[str, Any] = {self.places[x].name: v for x, (v, _) in given.items()}
        texts = {x: text for x, (_, text) in given.items()}
        for x, p in self.places.items():
            if x not in given:
                values[p.name], text = catalog.fresh(self.rng, p, self.tool.iso, {} if p.choices else values)
                text = ("off", "on")[values[p.name]] if p.kind == "bool" else text
                if "alarm" in self.names[0]:
                    text = f"{values[p.name]:0{1 + (x == 'b')}}"
                texts[x] = text if p.kind in _KEPT else f"\2{text}"
        self.calls.append({f.name: values[f.name] for f in self.tool.required})
        self.texts.append(texts)

    def _put(self, form: str, at: int = 0) -> str:
        return form.replace("*", "").format(**self.texts[at])

    def _joined(self, items: list[str], head: str, after: str = "") -> str:
        last = " and " if "both " in head else pick(self.rng, _RULES["more"])
        last = "? and " if self.mood == "?" and len(items) == 2 and not after and self.rng.random() < 0.3 else last
        joins = ["", *[", "] * (len(items) - 2), last]
        return "".join([f"{j * bool(i)}\0{head * (not i)}{x}\1" for i, (j, x) in enumerate(zip(joins, items))])[:-1] + (
            f"{after}\1"
        )

    def it(self) -> Known | None:
        """A value that the next request may call "it"."""
        kinds = [*[p.kind for p in self.places.values()], "bool"]
        found = [
            (p.kind, self.calls[-1][p.name], self.texts[-1][x])
            for x, p in self.places.items()
            if kinds.count(p.kind) == 1 or (p.kind == "city" and x == "b")
        ]
        return pick(self.rng, found) if found else None


def _branded(rng: Random, names: tuple[str, ...], about: str, brand: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and descriptions of a tool that belongs to a product."""
    initials = "".join(re.findall("[A-Z0-9]", brand)).lower()
    short = initials if len(initials) > 1 and rng.random() < 0.4 else brand.lower()
    turned = rng.random() < 0.5
    named = [f"{short}_{'_'.join(n.split('_')[::-1]) if turned and n.count('_') == 1 else n}" for n in names]
    form = pick(rng, ("{} in {b}", "{} in {b}.", "{} ({b})", "{b}: {}", "{} of {b}", ""))
    notes = [
        form.format(n, b=brand) if form else re.sub(r"\b(an?|the) ", f"the {brand} ", n, count=1, flags=re.I)
        for n in about.split("/")
    ]
    return tuple(named), tuple(n if brand in n else f"{brand}: {n}" for n in map(capital, notes))


def _brand(rng: Random) -> str:
    made = made_up(rng).capitalize()
    if (roll := rng.random()) < 0.35:
        return made + pick(rng, PLAIN).capitalize()
    return made if roll < 0.8 else f"{made[:3].upper()}{1 + int(rng.random() * 30)}"


def thing_of(rng: Random, noun: str, place: catalog.Parameter) -> tuple[Known, str]:
    """A new value of the parameter, and the thing with this code or name as a sentence names it."""
    value, text = catalog.fresh(rng, place, False, {})
    forms = (
        ("the {o} {t}", "the {o} called {t}", "\2{t}") if place.kind[:3] == "own" else ("{o} {t}", "{o} {t}", "\2{t}")
    )
    return (place.kind, value, text), pick(rng, forms).format(o=noun, t=text)


def _about(rng: Random, noun: str, tools: list[Ask], count: int) -> tuple[list[Ask], str]:
    """One to three requests about a thing that is named first; with one request, in a sentence of its own."""
    known = [t for t in tools if t.places["a"].kind == _THINGS[noun]][:count]
    if len(known) < count:
        return [], ""
    it, said = thing_of(rng, noun, known[0].places["a"])
    if not all(a.say(1, it, short=count > 1) and a.mood == "!" for a in known):
        return [], ""
    asks = sorted(known, key=lambda a: a.verb in _LAST)
    if count > 1:
        text = _begun(pick(rng, _RULES["head"]).format(t=said), pick(rng, (capital, str))) + asks[0].text[1:]
        text += "".join([pick(rng, _RULES["and"]) + a.text for a in asks[1:]])
        return asks, f"\0{text}{pick(rng, ('.', '.', ''))}"
    fact = expand(rng, _RULES, "<thing>").format(o=any_word(rng), n=pick(rng, NAMES), c=pick(rng, CITIES))
    join, wish = pick(rng, (", ", ". ", ". ", ". ", ": ", "; ", "! ", " - ")), framed(rng, asks[0].text[1:-1])
    return asks, f"\0{capital(said)} {fact}{join}{wish if join[0] in '.!' else small(wish)}\1"


def _apart(rng: Random, ask: Ask) -> str:
    """The request's values in clauses of their own."""
    ask.say()
    values = zip(ask.places, ask.labels)  # without the flag
    facts = [expand(rng, _RULES, "<fact>").format(l=y, v=ask.texts[0][x], n=f"\2{pick(rng, NAMES)}") for x, y in values]
    rng.shuffle(facts)
    form = pick(rng, [w for w in _RULES["wish"] if "{o}" in w or ask.verb not in _VAGUE])
    wish = form.format(v=ask.verb, o=ask.noun)
    wish = framed(rng, wish) if form[0] == "{" else capital(f"{wish}.")
    join = pick(rng, (". ", ". ", ", ", "; ", "\n"))
    said = join.join(facts if join == ", " else map(capital, facts))
    if rng.random() < 0.25 and form[0] == "{":
        return f"\0{wish}{' ' if wish[-1] in '.?' else '. '}{capital(said)}.\1"
    return f"\0{capital(said)}{join if join == chr(10) else '. '}{wish}\1"


def _in_rows(rng: Random, noun: str, ask: Ask, less: str, count: int) -> str:
    """A head, a line for each call, and what is not to be done."""
    ask.say(count)
    heads = ["{v} the {o}", "{v} {o}", "please {v} the {o}", "{v} the {o}, please", *["{n}, {o}"] * (noun != ask.noun)]
    heads += ["for the cart", "into the cart", "for my basket"] * (ask.names[0] == "add_article") * 3
    head = pick(rng, heads).format(v=ask.verb, o=ask.noun, n=noun)
    label = ask.labels[1] if type(ask.calls[0][ask.places["b"].name]) is int and rng.random() < 0.6 else ""
    form = "{0} pieces" if label == "quantity" else f"{{0}} {label}" if label[-1:] == "s" else f"{label} {{0}}".lstrip()
    pair, mark = pick(rng, ("{0}, {1}", "{0}: {1}", "{0} - {1}", "{0} ({1})", "{0} = {1}")), pick(rng, ("- ", "", "• "))
    rows = [f"{mark}\0{pair.format(texts['a'], form.format(texts['b']))}\1" for texts in ask.texts]
    return "\n".join([f"{_begun(head)}:", *rows, *[f"{_begun(less)}."] * bool(less)])


def _desk(rng: Random, noun: str, tools: list[Ask], count: int) -> tuple[list[Ask], str]:
    """The tools that are asked for, and a message: about one thing, with values in clauses of their own, or in rows."""
    roll, ask = rng.random(), pick(rng, tools)
    if count == 1 and (roll < 0.5 or noun not in _THINGS):
        return [ask], _apart(rng, ask)
    if count == 1 or roll < 0.7:
        return _about(rng, noun, tools, count)
    pairs = [t for t in tools if len(t.places) == 2 and "say" not in [p.kind for p in t.places.values()]]
    if not pairs:
        return [], ""
    ask, other = pick(rng, pairs), ask
    unlike = rng.random() < 0.7 and other.noun not in (noun, ask.noun, *ask.labels)
    less = expand(rng, _RULES, "<less>").format(o=other.noun) if unlike else ""
    return [ask], _in_rows(rng, noun, ask, less, count)


def puzzle(rng: Random) -> tuple[str, str, list[Tool]]:
    """A message that asks what a word means, the question's first words, and tools that cannot answer it."""
    head, *rows = pick(rng, DESKS)
    asks = [Ask(rng, row) for row in rows]
    noun = pick(rng, (head.split(" ")[0], pick(rng, asks).noun.split(" ")[-1], pick(rng, PLAIN)))
    form = pick(rng, _RULES["mean"])
    word = any_word(rng) if '"' in form else pick(rng, (pick(rng, PLAIN), made_up(rng)))
    a, a2 = ["an" if w[0] in "aeio" else "a" for w in (noun, word)]
    question = form.rstrip(".").format(o=noun, w=word, a=a, a2=a2)
    before = expand(rng, _RULES, "<only>") if rng.random() < 0.85 else ""
    before = before.format(o=noun, v=pick(rng, asks).verb, n=pick(rng, NAMES))
    if rng.random() < 0.7:
        before = re.sub(r"\. \w", lambda m: m[0].upper(), before)
    question = capital(question) if not before or before[-2] == "." else question
    end = "." if form[-1] == "." else "?"
    text = f"{capital(before)}{question}{pick(rng, (end, end, end, ''))}"
    if rng.random() < 0.2:
        text = f"{capital(context(rng, (noun,)))}. {text}"
    return text, opening(question), [a.tool for a in asks]


def context(rng: Random, nouns: tuple[str, ...] = (), kind: str = "all", done: str = "") -> str:
    """A sentence that asks for nothing, without a full stop."""
    if kind == "all" and rng.random() < 0.2:
        return sentence(rng, clause(rng))
    noun = pick(rng, nouns) if nouns and rng.random() < 0.6 else any_word(rng)
    return expand(rng, _RULES, f"<{kind}>").format(o=noun, n=pick(rng, NAMES), c=pick(rng, CITIES), v=done)


def _begun(text: str, change: Any = capital) -> str:
    return text[:1] + change(text[1:]) if text[:1] == "\0" else str(change(text))


def wanted(text: str) -> str:
    """An Ask's text without its marks."""
    return re.sub("[\0\1\2]", "", text)


def framed(rng: Random, text: str) -> str:
    return _begun(pick(rng, (*_RULES["frame"], "Use the tool to {}.")).format(text))


def _message(rng: Random, asks: list[Ask]) -> str:
    """All in one sentence, in several, or as notes."""
    roll, ends = rng.random(), ["?" if a.mood == "?" else "." for a in asks]
    if all(a.mood == "!" for a in asks) and roll < 0.6:
        return framed(rng, asks[0].text + "".join([pick(rng, _RULES["and"]) + a.text for a in asks[1:]]))
    if roll > 0.75 and "?" not in ends[:-1]:
        join = pick(rng, ("\n", *_RULES["join"]))
        return join.join([a.text for a in asks]) + (ends[-1] if ends[-1] == "?" else pick(rng, ("", ".", "")))
    said = list[str]()
    for a, end in zip(asks, ends):
        then = pick(rng, _RULES["then"]) if said else ""
        if a.mood != "!":
            then = pick(rng, ("", "", "And ", "Also, ")) if said else ""
        elif not then or rng.random() < 0.2:
            said.append(framed(rng, a.text))
            continue
        said.append(_begun(then + a.text + end))
    return pick(rng, (" ", " ", " ", "\n")).join(said)


def _flagged(rng: Random, text: str, ask: Ask) -> str:
    """The message with words that decide the tool's flag."""
    text = re.sub("\\.\1$", "\1", text)
    meant = ask.meant[not ask.calls[0][ask.places["f"].name]]
    phrase = pick(rng, meant.split("/")).format(n=pick(rng, NAMES))
    if text[-1] == "?" or "?" in text or rng.random() < 0.3:
        return f"{text}{'.' * (text[-1] not in '.?!')} {capital(phrase)}."
    return text.rstrip(".") + pick(rng, (", and {}.", ", {}.", ", but {}.", " - {}.", " ({}).", "; {}")).format(phrase)


def around(rng: Random, text: str, nouns: tuple[str, ...] = ()) -> str:
    """The message with a sentence before or after it."""
    roll, about = rng.random(), context(rng, nouns)
    if nouns and rng.random() < 0.08:
        about = context(rng, nouns, "thanks", pick(rng, nouns))
    if roll < 0.2 or "\n" in text:
        return f"{text}{'.' * (text[-1] not in '.?!')} {capital(about)}."
    if not nouns:
        return f"{capital(about)}. {text}"
    if roll < 0.35:
        return f"{context(rng, nouns, 'lead')}: {_begun(text, small)}"
    if roll < 0.6:
        return about + pick(rng, _RULES["after2"]) + _begun(text, small)
    return capital(about) + pick(rng, _RULES["after"]) + _begun(text)


def errand(rng: Random, count: int) -> tuple[str, list[Request], list[Tool]]:
    """A message, the requests of its `count` calls and tools that may be declared beside theirs."""
    while True:
        desk = rng.random() < 0.2
        head, *rows = pick(rng, (DESKS if count > 1 else _CLEAR) if desk else GROUPS)
        flag = pick(rng, _RULES["flags"]) if count == 1 and rng.random() < 0.1 else ""
        brand, brand2 = (_brand(rng), _brand(rng)) if rng.random() < 0.12 else ("", "")
        rows = rng.sample(rows, min(len(rows), max(count, 2 + int(rng.random() * 3))))
        tools = [Ask(rng, row, flag, brand) for row in rows]
        others = [Ask(rng, row, "", brand2) for row in pick(rng, GROUPS)[1:] if rng.random() < 0.25]
        others = [a for a in others if all(a.tool.noun != t.tool.noun for t in tools)]
        roll, nouns = rng.random(), tuple(head.split(" "))
        sizes = [1] * count if roll < 0.4 or count == 1 else [count] if roll < 0.75 else [1, count - 1]
        rng.shuffle(sizes)
        known = [*tools, *([pick(rng, others)] if others and rng.random() < 0.3 else [])]
        asks = rng.sample(known, len(sizes)) if len(sizes) <= len(known) and not desk else []
        for ask, size, last in zip(asks, sizes, [None, *asks]):
            kept = last and last.names[0][:2] not in ("de", "cl", "bo")  # not delete, close, book
            it = last.it() if last and kept and size == len(last.calls) == 1 and rng.random() < 0.5 else None
            if not it or not ask.say(1, it):
                ask.say(size)
        if desk:
            asks, text = _desk(rng, nouns[0], tools, count)
        elif count == 1 and rng.random() < 0.15 and (it := asks[0].it()) and it[0] in _WORDS:
            ask = asks[0]
            if not ask.say(1, it):
                ask.say()
            elif "it" in (said := ask.text[1:-1]).split():
                said = f"{said}?" if ask.mood == "?" else framed(rng, said)
                ask.text, ask.mood = f"\0{pick(rng, _RULES['intro']).format(_WORDS[it[0]] + it[2], said)}\1", "="
        if not asks or any(len(a.calls) > 1 and "volume" in a.names for a in asks):  # only the last volume would count
            continue
        text = text if desk else _message(rng, asks)
        if flag and asks[0].meant:
            text = _flagged(rng, text, asks[0])
        if brand and rng.random() < 0.55 and text[0] == "\0":
            before = pick(rng, _RULES["brand"]).format(b=brand)
            text = f"\0{capital(before)}{(capital if before[-2] == '.' else small)(text[1:])}"
        if rng.random() < 0.5:
            text = around(rng, text, nouns)
        elif rng.random() < 0.15:
            text += "." * (text[-1] not in ".?!") + pick(rng, (*_RULES["last"], *[" Both please."] * (count == 2)))
        text = (
            (text.rstrip(".") if rng.random() < 0.2 else text)
            .replace("\2", "")
            .replace("?\1.", "?\1")
            .replace(".\1.", ".\1")
        )
        calls = [(a.tool, given) for a in asks for given in a.calls]
        whole = re.sub("[\0\1]", "", text)
        made = [
            Request(tool, whole, opening(said), ToolCall(tool.name, given))
            for said, (tool, given) in zip(_OF_CALL.findall(text), calls, strict=True)
        ]
        if len({r.opening.lower() for r in made}) == len({str(r.call) for r in made}) == count:
            return whole, made, [a.tool for some, p in ((tools, 0.9), (others, 1.0)) for a in some if rng.random() < p]


def thanks(rng: Random) -> tuple[str, list[Tool]]:
    """A message that thanks for what tools did and asks for nothing, and such tools."""
    head, *rows = pick(rng, GROUPS)
    nouns, tools = tuple(head.split(" ")), [Ask(rng, row) for row in rows]
    said = [context(rng, nouns, "thanks", pick(rng, tools).names[0].split("_")[-1])]
    said += [context(rng, nouns)] * (rng.random() < 0.6) + [context(rng, nouns, "end")] * (rng.random() < 0.8)
    if rng.random() < 0.2:
        rng.shuffle(said)
    return pick(rng, (". ", ". ", "! ")).join(map(capital, said)) + pick(rng, (".", "!", "")), [a.tool for a in tools]
