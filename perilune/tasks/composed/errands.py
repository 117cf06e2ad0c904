"""Requests as colleagues write them, for `tool_call` and `tools_multi`: with a sentence around them, without the tool's
verb, several in one message.

data/errands.txt has rules for sentences, then groups of tools; `%` begins a group with its nouns. A row is a tool:
names | descriptions | parameters | requests. A parameter is `names:kind:descriptions`, with a `+` if one request may
give several values of it; {a} is the first one. Requests begin with `=` if they are no imperatives, with `?` if they
are questions; what follows `~` is said again for further calls. `<...>` may become "it" or "there", `*` is a
plural, `(x/y)` one of the two.

In a text that is not finished, 0 and 1 (as characters) are around the words of a call, 2 before what keeps its case.
"""

import re
from random import Random
from typing import Any, Final

from perilune.tasks import catalog
from perilune.tasks.composed.clauses import clause, sentence
from perilune.tasks.problem import ToolCall, pick
from perilune.tasks.records import lines
from perilune.tasks.tools import Request, Tool, catalog_tool, opening
from perilune.tasks.wordings import capital, expand, lined, small
from perilune.tasks.words import CITIES, NAMES, any_word

_HEAD, *_BLOCKS = lines("errands.txt").split("% ")
_RULES: Final = lined(_HEAD)
_GROUPS: Final = tuple([tuple(block.strip().split("\n")) for block in _BLOCKS])
_WORDS: Final = dict([word.split("=") for word in _RULES["word"]])
_KEPT: Final = frozenset(_RULES["kept"])
_OF_CALL: Final = re.compile("\0([^\0\1]*)\1")
_LEAD: Final = re.compile(r" ?(in|into|to|for|on|of|with) ")
Known = tuple[str, Any, str]  # a kind, a value and how it is written


class _Ask:
    """A tool and what asks for it: a text with marks, its mood, the arguments of its calls and how they are written."""

    def __init__(self, rng: Random, row: str) -> None:
        names, about, parameters, *self.forms = row.split("|")
        self.rng, self.many, self.places = rng, "", dict[str, catalog.Parameter]()
        for letter, one in zip("abc", parameters.split(";")):
            known, kind, *said = one.split(":")
            self.many += letter * (kind[-1] == "+")
            name, kind, noted = pick(rng, known.split(",")), kind.rstrip("+"), tuple("".join(said).split("/"))
            if kind == "on,off" and rng.random() < 0.5:
                name, kind, noted = "on", "bool", ("true for on, false for off", "Whether it is on")
            choices = tuple(kind.split(",")) if "," in kind else ()
            self.places[letter] = catalog.Parameter(name, kind, True, choices, noted if noted[0] else ())
        self.names, declared = tuple(names.split(",")), tuple(self.places.values())
        verb, noun = self.names[0].replace("_", " ").split(" ", 1)
        self.tool = catalog_tool(rng, catalog.Entry(verb, noun, self.names, tuple(about.split("/")), declared, ()))

    def say(self, count: int = 1, it: Known | None = None) -> bool:
        """`count` calls, or one about what is called "it"; whether the tool has a request for that."""
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
        if it and (found := re.search(r"<(in )?[^>]*\{(\w)\}>", body)):
            body = body.replace(found[0], pick(rng, ("in there", "there")) if found[1] else "it")
            self._draw({found[2]: it[1:]})
            self.text = self._joined([self._put(body)], head)
            return True
        body = re.sub("[<>]", "", body)
        many = [x for x in self.many if parted or f"* {{{x}}}" in body]
        shared = pick(rng, many) if count > 1 and many and (len(self.places) == 1 or rng.random() < 0.45) else ""
        for _ in range(count):
            known = self.places.items() if shared and self.calls else ()
            self._draw({x: (self.calls[0][p.name], self.texts[0][x]) for x, p in known if x != shared})
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
        """What a next request may call "it"."""
        kinds = [p.kind for p in self.places.values()]
        found = [
            (p.kind, self.calls[-1][p.name], self.texts[-1][x])
            for x, p in self.places.items()
            if kinds.count(p.kind) == 1 or (p.kind == "city" and x == "b")
        ]
        return pick(self.rng, found) if found else None


def context(rng: Random, nouns: tuple[str, ...] = (), kind: str = "all", done: str = "") -> str:
    """A sentence that asks for nothing, without a full stop."""
    if kind == "all" and rng.random() < 0.2:
        return sentence(rng, clause(rng))
    noun = pick(rng, nouns) if nouns and rng.random() < 0.6 else any_word(rng)
    return expand(rng, _RULES, f"<{kind}>").format(o=noun, n=pick(rng, NAMES), c=pick(rng, CITIES), v=done)


def _begun(text: str, change: Any = capital) -> str:
    return text[:1] + change(text[1:]) if text[:1] == "\0" else str(change(text))


def _framed(rng: Random, text: str) -> str:
    return _begun(pick(rng, (*_RULES["frame"], "Use the tool to {}.")).format(text))


def _message(rng: Random, asks: list[_Ask]) -> str:
    """All in one sentence, in several, or as notes."""
    roll, ends = rng.random(), ["?" if a.mood == "?" else "." for a in asks]
    if all(a.mood == "!" for a in asks) and roll < 0.6:
        return _framed(rng, asks[0].text + "".join([pick(rng, _RULES["and"]) + a.text for a in asks[1:]]))
    if roll > 0.75 and "?" not in ends[:-1]:
        join = pick(rng, ("\n", *_RULES["join"]))
        return join.join([a.text for a in asks]) + (ends[-1] if ends[-1] == "?" else pick(rng, ("", ".", "")))
    said = list[str]()
    for a, end in zip(asks, ends):
        then = pick(rng, _RULES["then"]) if said else ""
        if a.mood != "!":
            then = pick(rng, ("", "", "And ", "Also, ")) if said else ""
        elif not then or rng.random() < 0.2:
            said.append(_framed(rng, a.text))
            continue
        said.append(_begun(then + a.text + end))
    return pick(rng, (" ", " ", " ", "\n")).join(said)


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
        head, *rows = pick(rng, _GROUPS)
        tools = [_Ask(rng, row) for row in rows]
        others = [_Ask(rng, row) for row in pick(rng, _GROUPS)[1:]]
        others = [a for a in others if all(a.tool.noun != t.tool.noun for t in tools)]
        roll, nouns = rng.random(), tuple(head.split(" "))
        sizes = [1] * count if roll < 0.4 or count == 1 else [count] if roll < 0.75 else [1, count - 1]
        rng.shuffle(sizes)
        known = [*tools, *([pick(rng, others)] if others and rng.random() < 0.3 else [])]
        asks = rng.sample(known, len(sizes)) if len(sizes) <= len(known) else []
        for ask, size, last in zip(asks, sizes, [None, *asks]):
            kept = last and last.names[0][:2] not in ("de", "cl", "bo")  # not what is gone
            it = last.it() if last and kept and size == len(last.calls) == 1 and rng.random() < 0.5 else None
            if not it or not ask.say(1, it):
                ask.say(size)
        if count == 1 and rng.random() < 0.15 and (it := asks[0].it()) and it[0] in _WORDS:
            ask = asks[0]
            if not ask.say(1, it):
                ask.say()
            elif "it" in (said := ask.text[1:-1]).split():
                said = f"{said}?" if ask.mood == "?" else _framed(rng, said)
                ask.text, ask.mood = f"\0{pick(rng, _RULES['intro']).format(_WORDS[it[0]] + it[2], said)}\1", "="
        if not asks or any(len(a.calls) > 1 and "volume" in a.names for a in asks):  # only the last would count
            continue
        text = _message(rng, asks)
        if re.search("\\d\1 ?(plus|[-+/&]) ?\0", text):  # would be a sum
            continue
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
            return whole, made, [a.tool for some, p in ((tools, 0.7), (others, 0.3)) for a in some if rng.random() < p]


def thanks(rng: Random) -> tuple[str, list[Tool]]:
    """A message that thanks for what tools did and asks for nothing, and such tools."""
    head, *rows = pick(rng, _GROUPS)
    nouns, tools = tuple(head.split(" ")), [_Ask(rng, row) for row in rows]
    said = [context(rng, nouns, "thanks", pick(rng, tools).names[0].split("_")[-1])]
    said += [context(rng, nouns)] * (rng.random() < 0.6) + [context(rng, nouns, "end")] * (rng.random() < 0.8)
    if rng.random() < 0.2:
        rng.shuffle(said)
    return pick(rng, (". ", ". ", "! ")).join(map(capital, said)) + pick(rng, (".", "!", "")), [a.tool for a in tools]
