"""JSON objects asked for from texts about subjects (subjects.py), for `json_extract`.

A prompt is put together from parts that vary independently: what the text is about, how it is set out, which of its
values are wanted (of one subject, of all, nested, by name), what the keys are called and how they are given, and how
and where the request is put. The trace copies value by value: the path of the key, its type, the value.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from random import Random
from typing import Any, Final

from perilune.tasks.composed import slips, subjects
from perilune.tasks.composed.mentions import mentions, text_of
from perilune.tasks.composed.subjects import Domain, Subject
from perilune.tasks.fields import bare, named, written
from perilune.tasks.problem import pick, user
from perilune.tasks.wordings import capital, enumerated, expand, in_words, lined, phrase
from perilune.tasks.words import any_word, lines, made_up

Messages = tuple[dict[str, Any], ...]
Made = tuple[Messages, str, dict[str, Any]]  # messages, trace, object


@dataclass(frozen=True, slots=True)
class Wanted:
    """A key, what it means, its JSON type, and what it is in each subject (None: not in the text)."""

    key: str
    meaning: str
    type: str
    values: tuple[Any, ...]


# ---- keys --------------------------------------------------------------------------------------------------------


def _snake(words: str) -> str:
    return named(words, camel=False)


CASES: Final[tuple[tuple[Callable[[str], str], str], ...]] = (
    *[(_snake, "snake_case")] * 9, *[(partial(named, camel=True), "camelCase")] * 4, (str, ""), (str, ""),
    (lambda words: "".join([w.capitalize() for w in words.split(" ")]), "PascalCase"),
    (lambda words: words.replace(" ", "-"), "kebab-case"), (lambda words: _snake(words).upper(), "capitals"),
)  # fmt: skip
_PREFIXED: Final = 0.08  # of objects: keys with the name of what they belong to, as in patient_name
_INVENTED: Final = 0.05  # of objects: keys that mean nothing, explained in the request
_FIRST_NAMES: Final = ("first_name", "given_name", "forename")
_LAST_NAMES: Final = ("last_name", "surname", "family_name")


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    return "number" if isinstance(value, float) else "array" if isinstance(value, list) else "string"


def _wanted(rng: Random, many: list[Subject], with_names: bool) -> tuple[list[Wanted], str]:
    """Keys for some attributes of the subjects, in any order, and the case that the keys are in."""
    case, case_name = pick(rng, CASES)
    domain, roll = many[0].domain, rng.random()
    sources: list[tuple[tuple[str, ...], tuple[Any, ...]]] = []
    stated = [at for at in domain.attributes if any(at in one.facts for one in many)]
    rng.shuffle(stated)
    for at in stated[: 1 + int(rng.random() * (len(stated) + 1))]:
        values = tuple([bare(one.facts[at][0]) if at in one.facts else None for one in many])
        sources.append((at.keys, values))
    if with_names or rng.random() < 0.6:
        names = [one.name[0] for one in many]
        split = [n.split(" ") for n in names]
        if domain.person and all(len(n) == 2 for n in split) and rng.random() < 0.2:
            sources[:0] = [
                (_FIRST_NAMES, tuple([n[0] for n in split])),
                (_LAST_NAMES, tuple([n[1] for n in split])),
            ]
        else:
            sources.insert(0, (domain.keys, tuple(names)))
        if rng.random() < 0.3:
            rng.shuffle(sources)
    if len(many) == 1 and rng.random() < 0.08:
        absent = [at for at in domain.attributes if at not in many[0].facts]
        if absent:
            at = pick(rng, absent)
            sources.insert(int(rng.random() * (len(sources) + 1)), (at.keys, (None,)))
    found: dict[str, Wanted] = {}
    for keys, values in sources:
        words = pick(rng, keys).replace("_", " ")
        meaning = pick(rng, keys).replace("_", " ")
        if roll < _PREFIXED and words != domain.name:
            words = f"{domain.name} {words}"
        elif _PREFIXED <= roll < _PREFIXED + _INVENTED:
            words = made_up(rng) if rng.random() < 0.5 else pick(rng, "abcdefghxyz") + str(len(found) + 1)
        key = case(words)
        value = next((v for v in values if v is not None), None)
        found.setdefault(key, Wanted(key, meaning, type_of(value), values))
    return list(found.values()), "" if roll < _PREFIXED + _INVENTED else case_name


TYPES: Final[dict[str, tuple[str, ...]]] = {
    "string": ("string", "text", "str"), "integer": ("integer", "number", "int", "a number"),
    "number": ("number", "float", "decimal"), "boolean": ("boolean", "true/false", "bool"),
    "array": ("list of strings", "array of strings", "list"),
}  # fmt: skip
_PLACEHOLDERS: Final = {"string": ("...", "text", "?", ""), "integer": (0, 0, 1), "number": (0.0, 0, 1.5),
    "boolean": (True, False), "array": (["..."], [], ["a", "b"])}  # fmt: skip


def _typed(rng: Random, w: Wanted) -> str:
    return pick(rng, TYPES[w.type])


def in_line(rng: Random, wanted: list[Wanted], explained: bool, typed: bool | None = None) -> str:
    """Keys in a line of prose; `typed`: whether with types, for strings too (None: at random)."""
    every = typed
    if typed is None:
        typed = rng.random() < 0.3
    if explained and rng.random() < 0.15:
        keys = ", ".join([w.key for w in wanted])
        form = pick(rng, ("({} {})", ", {} {}")).format(pick(rng, ("keys", "as", "named", "under the keys")), keys)
        return f"the {enumerated([w.meaning for w in wanted], ' and ')} {form}".replace(" ,", ",")
    form = pick(rng, RULES["explained" if explained else "typed" if typed else "bare"])
    # Otherwise only keys that are no strings get a type.
    strings = explained or not typed or every or rng.random() < 0.6
    shown = [
        form.format(k=w.key, m=w.meaning, t=_typed(rng, w)) if strings or w.type != "string" else w.key for w in wanted
    ]
    if rng.random() < 0.2:  # the number of keys, which is no key
        count = str(len(shown)) if rng.random() < 0.5 or len(shown) > 19 else in_words(len(shown))
        noun = pick(rng, ("key", "field", "value", "key", "property", "entry", "thing"))
        if len(shown) > 1:
            noun = {"property": "properties", "entry": "entries"}.get(noun, noun + "s")
        head = pick(rng, ("exactly {c} {n}, ", "the {c} {n} ", "{c} {n}: ", "these {c} {n}: ", "just {c} {n}, ",
            "exactly {c} {n}, namely ", "{c} {n}, i.e. ", "the following {n}: ", "{n} as follows: ", "{c} {n} called ",
            "the {n} named ", "no more than {c} {n}, to wit ", "{c} {n} that are called "))  # fmt: skip
        return head.format(c=count, n=noun) + (
            shown[0] if len(shown) == 1 else enumerated(shown, pick(rng, (" and ", ", ")))
        )
    if len(shown) == 1:
        return shown[0]
    roll = rng.random()
    if roll < 0.35:
        return pick(rng, (", ", ", ", ", ", " / ", "; ", " + ", " | ", " ", ",", "/", " ... ", "\n")).join(shown)
    if roll < 0.42:
        return pick(rng, ("[{}]", "({})", "{{{}}}")).format(", ".join(shown))
    if roll < 0.5:
        return pick(rng, (", then ", " then ", " and ", " and also ")).join(shown)
    return enumerated(shown, pick(rng, (" and ", " and ", ", and ", " plus ", " & ", " as well as ")))


def template(rng: Random, wanted: list[Wanted]) -> str:
    """An object with places to fill in."""
    how = rng.random()
    parts = []
    for w in wanted:
        if how < 0.25:
            place = pick(rng, ("...", "...", "_", '"?"'))
        elif how < 0.5:
            place = json.dumps(pick(rng, _PLACEHOLDERS[w.type]))
        elif how < 0.65:
            place = f"<{w.meaning}>" if rng.random() < 0.7 else f"<{w.meaning}, {_typed(rng, w)}>"
        elif how < 0.8:
            place = _typed(rng, w)
        else:
            place = f'"{_typed(rng, w)}"' if how < 0.9 else "null"
        parts.append(f'"{w.key}": {place}' if how < 0.9 or rng.random() < 0.9 else f"{w.key}: {place}")
    if rng.random() < 0.25:
        return "{\n  " + ",\n  ".join(parts) + "\n}"
    return "{" + ", ".join(parts) + "}"


def _schema(rng: Random, wanted: list[Wanted]) -> str:
    properties: dict[str, Any] = {}
    for w in wanted:
        properties[w.key] = {"type": w.type}
        if w.type == "array":
            properties[w.key]["items"] = {"type": "string"}
        if rng.random() < 0.2:
            properties[w.key]["description"] = w.meaning
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.4:
        schema["required"] = [w.key for w in wanted]
    return json.dumps(schema, indent=2 if rng.random() < 0.15 else None)


def _code(rng: Random, wanted: list[Wanted]) -> str:
    """A type as a programming language declares it."""
    name = any_word(rng).capitalize()
    script = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "array": "string[]"}
    python = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list[str]"}
    sql = {"string": "TEXT", "integer": "INTEGER", "number": "REAL", "boolean": "BOOLEAN", "array": "TEXT[]"}
    roll = rng.random()
    if roll < 0.4:
        return f"interface {name} {{ " + " ".join([f"{w.key}: {script[w.type]};" for w in wanted]) + " }"
    if roll < 0.75:
        return f"class {name}:\n" + "\n".join([f"    {w.key}: {python[w.type]}" for w in wanted])
    return f"{name.lower()}({', '.join([f'{w.key} {sql[w.type]}' for w in wanted])})"


def rows(rng: Random, wanted: list[Wanted], explained: bool = False) -> str:
    form = pick(rng, RULES["row" if explained or rng.random() < 0.3 else "rows"])
    return "\n".join([form.format(k=w.key, m=w.meaning, t=_typed(rng, w), i=i) for i, w in enumerate(wanted, 1)])


# ---- requests ----------------------------------------------------------------------------------------------------

_NO_UNITS: Final = (" Numbers without units.", " Numbers as numbers, no units.", " Plain numbers please.")

# Requests and their parts by kind; a form may have <kind> for any of a kind.
RULES: Final = {
    kind: tuple([form.replace("\\n", "\n") for form in forms]) for kind, forms in lined(lines("json_asks.txt")).items()
}


def request(rng: Random, wanted: list[Wanted], about: str, explained: bool, place: str) -> str:
    made = _put(rng, wanted, about, explained, place)
    if rng.random() < 0.12:
        made += ("" if made[-1] in ".?!}\n" else ".") + pick(rng, RULES["tails"])
    return f"{pick(rng, RULES['purposes'])} {made}" if rng.random() < 0.1 else made


def _put(rng: Random, wanted: list[Wanted], about: str, explained: bool, place: str) -> str:
    roll = rng.random()
    if roll < 0.6 or (explained and roll < 0.8):
        return worded(rng, "<ask>", in_line(rng, wanted, explained), about, place)
    if explained:
        block = rows(rng, wanted, True)
    else:
        block = pick(rng, (template, template, template, _schema, _code, rows))(rng, wanted)
    return worded(rng, "<block>", block, about, place)


def worded(rng: Random, symbol: str, keys: str, about: str, place: str) -> str:
    """A request of the rules with the keys, which <block> has in a layout and <ask> in a line."""
    form = expand(rng, RULES, symbol)
    if rng.random() < 0.8:
        form = capital(form)
    if symbol == "<ask>":
        form = phrase(rng, form)
    elif "\n" not in form:
        form = phrase(rng, form, asking=0.0)
    return form.format(keys=keys, block=keys, about=about, place=place)


def placed(rng: Random, ask: str, text: str, before: bool, system: float = 0.0) -> Messages:
    """The request and the text as one message, in either order; with probability `system`, as system and user."""
    if before and rng.random() < system and "JSON" in ask:
        return {"role": "system", "content": pick(rng, RULES["system"]).format(ask=ask)}, user(text)
    shown = pick(rng, RULES["given"]).format(t=text)
    if rng.random() < 0.03:
        first, second = (ask, shown) if before else (shown, ask)
        between = pick(rng, ("Ok.", "Yes?", "I have read it.", "Go on.", "Sure."))
        return user(first), {"role": "assistant", "content": between}, user(second)
    join = pick(rng, ("\n\n", "\n\n", "\n", " ", "\n\n\n" if before else "\n---\n"))
    return (user(ask + join + shown if before else shown + join + ask),)


# ---- texts -------------------------------------------------------------------------------------------------------


def _text(rng: Random, many: list[Subject]) -> str:
    roll = rng.random()
    if len(many) > 1 and roll < 0.3:
        return subjects.table(rng, many)
    if roll < 0.55:
        made = [s.text for one in many for s in subjects.described(rng, one)]
        if rng.random() < 0.2:
            made.insert(int(rng.random() * (len(made) + 1)), pick(rng, subjects.ASIDES))
        text = " ".join(made)
    elif roll < 0.68 and len(many) == 1 and many[0].domain.person:
        text = subjects.confessed(rng, many[0])
    elif roll < 0.85:
        text = pick(rng, ("\n", "\n", ". ")).join([subjects.noted(rng, one) for one in many])
    else:
        text = "\n\n".join([subjects.listed_lines(rng, one) for one in many])
    return subjects.unkempt(rng, text, [one.name[1] for one in many] + [v for o in many for _, v in o.facts.values()])


def lines_of(prefix: str, wanted: list[Wanted], at: int) -> list[str]:
    found = []
    for w in wanted:
        value = w.values[at]
        kind = {"integer": "number", "array": "list"}.get(w.type, w.type)
        found.append(f"{prefix}{w.key}: null" if value is None else f"{prefix}{w.key}: {kind} {written(value)}")
    return found


_GROUPS: Final = ("details", "info", "data", "more", "about", "extra", "meta", "facts")


def entry(rng: Random) -> Made:
    """The prompt's messages, the trace and the object."""
    roll = rng.random()
    if roll < 0.74:
        return _slipped(rng) if roll < 0.4 else _paired(rng) if roll < 0.47 else _mentioned(rng)
    roll = rng.random()
    if roll < 0.07:
        return _all(rng)
    if roll < 0.12:
        return _by_name(rng)
    several = roll < 0.24
    while True:
        many = subjects.subjects(rng, 2 + (rng.random() < 0.3) if several else 1)
        wanted, case = _wanted(rng, many, with_names=False)
        at = int(rng.random() * len(many))
        if wanted and any(w.values[at] is not None for w in wanted):
            break
    explained = any(not set(re.split(r"[_ -]", w.key.lower())) & set(w.meaning.split()) for w in wanted) and (
        rng.random() < 0.25 or any(re.fullmatch(r"[a-z]\d", w.key) or len(w.key) < 2 for w in wanted)
    )
    explained = explained or any(not _plain(w, many[0]) for w in wanted)
    about = ""
    if several:
        about = pick(rng, (" of {}", " for {}", " about {}")).format(many[at].name[1])
        if any(w.values[at] == many[at].name[0] for w in wanted) and len(wanted) > 1:
            wanted = [w for w in wanted if w.values[at] != many[at].name[0]]
    if 3 <= len(wanted) and roll > 0.94:
        return _nested(rng, many[0].domain.name, _text(rng, many), wanted, at, about)
    before = rng.random() < 0.5
    if roll > 0.88 and not several:
        return _by_example(rng, many[0], wanted)
    ask = request(rng, wanted, about, explained, "below" if before else "above")
    if several and many[at].name[1] not in ask:
        ask += pick(rng, (" Only {}.", " I mean {}.", " It is about {}.", " ({} only)")).format(many[at].name[1])
    if any(w.values[at] is None for w in wanted):
        ask += expand(rng, RULES, pick(rng, RULES["null"])).format(place="above")
    elif rng.random() < 0.06:
        ask += pick(rng, _NO_UNITS)
    if case and rng.random() < 0.15:
        ask += pick(rng, RULES["cased"]).format(c=case)
    messages = placed(rng, ask, _text(rng, many), before, system=0.25)
    return messages, "\n".join(lines_of("", wanted, at)), {w.key: w.values[at] for w in wanted}


def _mentioned(rng: Random) -> Made:
    """Values that a text mentions beside words of any kind (mentions.py), which the keys are made of."""
    stated = mentions(rng)
    text = text_of(rng, stated)
    (case, case_name), explained = pick(rng, CASES), rng.random() < 0.08
    wanted: list[Wanted] = []
    for one in rng.sample(stated, len(stated) if rng.random() < 0.55 else 1 + int(rng.random() * len(stated))):
        key = case(one.key) if not explained else made_up(rng) if rng.random() < 0.5 else f"k{len(wanted) + 1}"
        wanted.append(Wanted(key, one.key, type_of(one.value), (one.value,)))
    absent = rng.random() < 0.08
    if absent:
        word = pick(rng, ("remark", "phone", "website", "nickname", "postcode"))
        wanted.insert(int(rng.random() * (len(wanted) + 1)), Wanted(case(word), word, "string", (None,)))
    wanted = list({w.key: w for w in wanted}.values())
    return _asked(rng, text, wanted, explained, "" if explained else case_name)


def _asked(rng: Random, text: str, wanted: list[Wanted], explained: bool, case_name: str) -> Made:
    before = rng.random() < 0.5
    ask = request(rng, wanted, "", explained, "below" if before else "above")
    if any(w.values[0] is None for w in wanted):
        ask += expand(rng, RULES, pick(rng, RULES["null"])).format(place="above")
    elif case_name and rng.random() < 0.1:
        ask += pick(rng, RULES["cased"]).format(c=case_name)
    messages = placed(rng, ask, text, before, system=0.2)
    return messages, "\n".join(lines_of("", wanted, 0)), {w.key: w.values[0] for w in wanted}


@lru_cache(maxsize=256)
def _words(domain: Domain) -> tuple[str, ...]:
    """The keys of a domain in words."""
    known = [*domain.keys, *_FIRST_NAMES, *_LAST_NAMES, *[k for at in domain.attributes for k in at.keys]]
    return tuple([k.replace("_", " ") for k in known])


def _plain(w: Wanted, one: Subject) -> bool:
    """Whether the key's meaning is clear from its words."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", w.key).lower().replace("-", " ").replace("_", " ")
    return words.endswith(_words(one.domain))


def _nested(rng: Random, name: str, text: str, wanted: list[Wanted], at: int, about: str) -> Made:
    group = pick(rng, _GROUPS) if rng.random() < 0.7 else name
    cut = 1 + int(rng.random() * (len(wanted) - 2))
    outer, inner = wanted[:cut], wanted[cut:]
    if any(w.key == group for w in outer):
        group = f"the_{group}"
    values = {w.key: w.values[at] for w in outer} | {group: {w.key: w.values[at] for w in inner}}
    if rng.random() < 0.5:
        block = template(rng, outer).rstrip("}\n") + f', "{group}": {template(rng, inner)}}}'
        ask = capital(expand(rng, RULES, "<block>")).format(block=block, about=about, place="there")
    else:
        keys = pick(rng, RULES["nested"]).format(
            keys=", ".join([w.key for w in outer]), g=group, inner=in_line(rng, inner, False)
        )
        ask = capital(expand(rng, RULES, "<ask>")).format(keys=keys, about=about, place="there")
    if about and about not in ask:
        ask += f" Only{about}."
    if any(w.values[at] is None for w in wanted):
        ask += pick(rng, RULES["null"][1:2])
    trace = "\n".join([*lines_of("", outer, at), *lines_of(f"{group}.", inner, at)])
    return placed(rng, ask, text, rng.random() < 0.5), trace, values


def _slipped(rng: Random) -> Made:
    """Values of a log line, a label, an advert, a mail and so on (slips.py)."""
    kind, roll, seed = pick(rng, slips.SLIPS), rng.random(), rng.random()
    text, found = slips.slip(rng, kind, Random(seed) if roll < 0.12 else rng)
    (case, case_name), explained, missing = pick(rng, CASES), rng.random() < 0.15, rng.random() < 0.5
    other, shown = slips.slip(rng, kind, Random(seed)) if roll < 0.12 else ("", found)
    wanted, first = [], {}
    for (names, value, there, _), (_, example, *_) in zip(found, shown):
        if there or (missing and roll >= 0.2):
            word = pick(rng, names)
            meaning = pick(rng, [n for n in names if n != word])
            wanted.append(Wanted(case(word), meaning, type_of(value), (value if there else None,)))
            first[wanted[-1].key] = example
    if roll < 0.12:
        return _like(rng, other, first, text, wanted)
    if rng.random() < 0.4:
        rng.shuffle(wanted)
    if rng.random() < 0.4:
        wanted = wanted[: 1 + int(rng.random() * len(wanted))]
    if roll < 0.2 and len(wanted) > 2:
        return _nested(rng, kind.heads[0].split(" ")[-1].lower(), text, wanted, 0, "")
    return _asked(rng, text, wanted, explained, case_name)


def _paired(rng: Random) -> Made:
    """Things with a number each: an object from the one to the other, or a list of each."""
    text, thing, number, made = slips.pairs(rng)
    columns = rng.random() < 0.5
    values = {f"{thing}s": list(made), f"{number}s": list(made.values())} if columns else made
    ask = (
        capital(expand(rng, RULES, "<need> <json>")) + ": " + pick(rng, RULES["columns"] if columns else RULES["maps"])
    )
    wanted = [Wanted(key, "", type_of(value), (value,)) for key, value in values.items()]
    messages = placed(rng, ask.format(d=thing, m=number), text, rng.random() < 0.5)
    return messages, "\n".join(lines_of("", wanted, 0)), values


def _all(rng: Random) -> Made:
    """Every subject of the text as an object of a list."""
    many = subjects.subjects(rng, 2 + (rng.random() < 0.4))
    wanted, _ = _wanted(rng, many, with_names=True)
    explained = any(not _plain(w, many[0]) for w in wanted)
    name = pick(rng, RULES["plurals"]).format(many[0].domain.name)
    if rng.random() < 0.4 and not explained:
        block = f'{{"{name}": [{template(rng, wanted)}, ...]}}'
        ask = expand(rng, RULES, "<block>").format(block=block, about="", place="there")
    else:
        ask = pick(rng, RULES["each"]).format(
            p=name,
            d=many[0].domain.name,
            keys=in_line(rng, wanted, explained),
            do=pick(rng, ("Give me", "Make", "Return")),
        )
    trace = "\n".join([line for i in range(len(many)) for line in lines_of(f"{i + 1}. ", wanted, i)])
    rows = [{w.key: w.values[i] for w in wanted} for i in range(len(many))]
    return placed(rng, capital(ask), _text(rng, many), rng.random() < 0.5), trace, {name: rows}


def _by_name(rng: Random) -> Made:
    """One attribute of several subjects by their names; or only the names."""
    domain = pick(rng, subjects.DOMAINS)
    at = pick(rng, domain.attributes)
    many: list[Subject] = []
    while len(many) < 2 or (len(many) < 4 and rng.random() < 0.4):
        many.append(subjects.subject(rng, domain, [at], many))
    names = [one.name[1] for one in many]
    if rng.random() < 0.3:
        key = pick(rng, ("names", f"{domain.name}s", "found", "list"))
        ask = pick(rng, RULES["names"])
        messages = placed(rng, ask.format(d=domain.name, k=key), _text(rng, many), rng.random() < 0.5)
        return messages, f"{key}: list {json.dumps(names, ensure_ascii=False)}", {key: names}
    values = {one.name[1]: one.facts.get(at, (None, ""))[0] for one in many}
    ask = pick(rng, RULES["by_name"]).format(d=domain.name, m=subjects.label(rng, at.keys), names=", ".join(names))
    wanted = [Wanted(name, "", type_of(value), (value,)) for name, value in values.items()]
    return placed(rng, ask, _text(rng, many), rng.random() < 0.5), "\n".join(lines_of("", wanted, 0)), values


def _by_example(rng: Random, one: Subject, wanted: list[Wanted]) -> Made:
    """Asks by an example: another text of the same form, and its object."""
    other = subjects.subject(rng, one.domain, list(one.facts), [one])
    by_value: list[tuple[Any, Any]] = [(one.name[0], other.name[0])]
    by_value += [(one.facts[at][0], other.facts[at][0]) for at in one.facts if at in other.facts]
    shown, kept = {}, []
    for w in wanted:
        pair = next((b for a, b in by_value if a == w.values[0] and type(a) is type(w.values[0])), None)
        if pair is not None:
            shown[w.key] = pair
            kept.append(w)
    if not kept:
        return entry(rng)
    seed = rng.random()
    texts = []
    for x in (other, one):  # both in the same layout
        same = Random(seed)
        texts.append(subjects.noted(same, x) if seed < 0.4 else " ".join([s.text for s in subjects.described(same, x)]))
    return _like(rng, texts[0], shown, texts[1], kept)


def _like(rng: Random, other: str, shown: dict[str, Any], text: str, wanted: list[Wanted]) -> Made:
    """A text and its object as an example, then the text that is meant."""
    form = pick(rng, RULES["like"])
    made = form.format(a=other, b=text, j=json.dumps(shown, ensure_ascii=False))
    return (user(made.rstrip()),), "\n".join(lines_of("", wanted, 0)), {w.key: w.values[0] for w in wanted}
