"""JSON objects with keys that the request does not name, or names as people talk: training data of `json_extract`.

A server can force keys that a model has not read (`response_format`). So keys are drawn from synonyms that the prompt
does not have, and the thought says only that none are named: the model learns which value goes with any key.

`related` has two like things in one sentence (who paid whom, which town is in which country); its keys are explained,
listed in a run of words, or not named. `table` has a row and its columns, `nested` objects in an object.

data/facts.txt: requests; slots (name, kind, keys); texts, with {slot or kind, more keys}. A clause in [] is repeated,
its `+` values form a list. A kind `forms/forms` is yes or no, `forms=value` a choice. Then kinds of values; relations
(`kind keys; kind keys = forms`, with A, B for the first and the second; `+`: a day may follow); more texts; objects
(`keys; kind keys = forms`); columns.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Final

from perilune.tasks.composed import entries, slips
from perilune.tasks.composed.entries import CASES, Made, Wanted, lines_of, placed, type_of, worded
from perilune.tasks.composed.subjects import ASIDES
from perilune.tasks.fields import bare
from perilune.tasks.problem import pick, user
from perilune.tasks.records import Shown, drawn, record
from perilune.tasks.wordings import capital, enumerated, expand, in_words, lined, phrase, singular, small
from perilune.tasks.words import ADJECTIVES, CITIES, NAMES, SURNAMES, any_word, lines, made_up
from perilune.tasks.working import TRACES

THOUGHT: Final = "no keys named"
_FORMS, _SLOTS, _KINDS, _VALUES, _RELATIONS, _MORE, _OBJECTS, _HEADERS = lines("facts.txt").strip().split("\n\n")
_RULES: Final = {**entries.RULES, **lined(_FORMS)}
_NAMED: Final = dict([row.split(" ", 1) for row in _SLOTS.split("\n")])
_TEXTS, _WIDER = [[(about, forms.split("|")) for about, _, forms in [row.partition(": ") for row in part.split("\n")]]
    for part in (_KINDS, _MORE)]  # fmt: skip
_LASTS: Final = (" and ", ", ", ", and ", " & ", ", then ", ", and then ")
_REMARKS: Final = {"integer": ("number", "a number"), "number": ("as a number",), "boolean": ("true or false",),
    "array": ("a list, same order", "a list in that order")}  # fmt: skip

# ---- values --------------------------------------------------------------------------------------------------------

_VALUED: Final = lined(_VALUES)
_PARTS: Final[dict[str, Callable[[Random], str]]] = {
    "w": any_word, "v": made_up, "W": lambda rng: any_word(rng).capitalize(),
    "X": lambda rng: made_up(rng).capitalize(), "f": lambda rng: pick(rng, NAMES).lower(),
    "l": lambda rng: pick(rng, SURNAMES).lower(),
    "n": lambda rng: str(1 + int(rng.random() * 99)), "d": lambda rng: str(100 + int(rng.random() * 9900)),
    "C": partial(pick, choices=CITIES), "J": lambda rng: pick(rng, ADJECTIVES).capitalize(),
    "S": lambda rng: drawn(rng, "land")[1], "F": partial(pick, choices=SURNAMES), "G": partial(pick, choices=NAMES),
}  # fmt: skip


def _value(rng: Random, kind: str, seen: Sequence[str] = ()) -> Shown:
    """A value of a kind of the file or of `drawn_slip`; an address may be made of the last name in `seen`."""
    if kind.partition(",")[0] in (*_VALUED, "person", "product_name"):
        kind = pick(rng, kind.split(","))
    if kind not in _VALUED:
        return slips.drawn_slip(rng, kind)
    form = pick(rng, _VALUED[kind])
    name = seen[-1].lower() if seen else ""
    if kind == "mail" and re.fullmatch("[a-z]+ [a-z]+", name) and rng.random() < 0.6:
        form = pick(rng, (".", ".", "_", "")).join(name.split(" ")[rng.random() < 0.2 :]) + form[form.index("@") :]
    text = re.sub(r"\{(\w)\}", lambda m: _PARTS[m[1]](rng) if m[1] in _PARTS else pick(rng, _VALUED[m[1]]), form)
    return text, f'"{text}"' if kind == "titel" and rng.random() < 0.6 else text


def _fact(rng: Random) -> tuple[str, str, slips.Found]:
    """What a text is about, the text, what it states."""
    about, forms = pick(rng, _TEXTS)
    form = pick(rng, forms)
    found = _filled(rng, capital(form) if rng.random() < 0.75 else form)
    return (about, *found) if found else _fact(rng)


def _filled(rng: Random, form: str) -> tuple[str, slips.Found] | None:
    """The form with values, and what it states; nothing if two names are alike."""
    found, seen = dict[tuple[str, ...], tuple[Any, str]](), list[str]()

    def series(m: re.Match[str]) -> str:
        clauses = [m[1]] * (2 + int(rng.random() * 3))
        return enumerated(clauses, pick(rng, _LASTS)) if rng.random() < 0.9 else pick(rng, ";/\n").join(clauses)

    def filled(m: re.Match[str]) -> str:
        first, *more = m[1].split(" ")
        words: list[str] = [*_NAMED.get(first, first).split(" "), *more]
        kind, keys, yes = words[0], tuple([w.replace("_", " ") for w in words[1:]]), rng.random() < 0.5
        if "/" in kind:
            said, _, choice = kind.split("/")[not yes].partition("=")
            found[keys] = choice or yes, "~positive,negative" if choice else ""
            return pick(rng, said.split(";")).replace("_", " ")
        value, text = _value(rng, kind.rstrip("+"), seen)
        found[keys] = [*found.get(keys, ([],))[0], value] if kind[-1] == "+" else bare(value), kind
        seen.extend([text] * (not text[0].isdigit()))
        return text

    text = re.sub(r"\{(.*?)\}", filled, re.sub(r"\[(.*?)\]", series, expand(rng, _RULES, form)))
    if len({*seen}) < len(seen):
        return None
    return text, [(keys, value, True, kind) for keys, (value, kind) in found.items()]


def _stated(rng: Random) -> tuple[str, str, list[tuple[str, Any, str]]]:
    """What a text is about, the text, and some of what it states, in any order: a key in words, the value, its kind."""
    roll = rng.random()
    if roll < 0.55:
        about, text, found = _fact(rng)
    elif roll < 0.85:
        made = record(rng, False, 1)
        about, text = made.kind.name.replace("_", " "), made.text
        found = [((f.name,), bare(v), True, "") for f, v, _ in made.found.values()]
    else:
        about, (text, found) = "note", slips.slip(rng, pick(rng, (*slips.NOTICES, *slips.SLIPS)), rng)
    kept: list[tuple[str, Any, str]] = []
    for names, value, there, kind in found:
        taken = {n for other, *_ in found if other != names for n in other}
        words = [n for n in names if there and n not in taken and "whether" not in n]
        if words:
            kept.append(((word := pick(rng, words).replace(".", " ")), value, kind))
            if isinstance(value, list) and rng.random() < 0.3:
                count = f"{word} count" if found[1:] else "count"
                kept.append((pick(rng, (f"number of {word}", count)), len(value), ""))
            elif "full name" in names and value.count(" ") == 1 and rng.random() < 0.3:
                kept[-1:] = zip(("first", "last"), value.split(" "), ("", ""))
    if rng.random() < 0.6:
        rng.shuffle(kept)
    kept = kept[: 1 + int(rng.random() * len(kept))] if rng.random() < 0.3 else kept
    return (about, text, kept) if kept else _stated(rng)


def _asked(rng: Random, rule: str, text: str, after: str = "", **words: str) -> entries.Messages:
    """A request of the rules before or after the text, mostly in one line."""
    ask = phrase(rng, capital(expand(rng, _RULES, rule))).format(**words, place="here")
    ask = (capital if rng.random() < 0.7 else small)(ask)
    if after:
        ask = f"{ask.rstrip('.')}. {expand(rng, _RULES, after)}".replace("?.", "?").replace("!.", "!")
    if rng.random() < 0.3:
        return placed(rng, ask, text, rng.random() < 0.5, system=0.3)
    join, shown = pick(rng, " \n "), pick(rng, (text, text, f'"{text}"'))
    if rng.random() < 0.5:
        return (user(f"{ask.rstrip('.')}:{join}{shown}".replace("?:", "?").replace("!:", "!")),)
    return (user(shown + "." * (shown[-1] not in '.!?"') + join + ask),)


def unnamed(rng: Random) -> Made:
    """The prompt's messages, the thought and the object, with keys that the prompt does not name."""
    about, text, kept = _stated(rng)
    case, _ = pick(rng, CASES)
    lists = [one for one in kept if isinstance(one[1], list)]
    listed = bool(lists) and about != "note" and rng.random() < 0.3
    if listed:
        kept = lists = lists[:1]
    tree = {case(word): value for word, value, _ in kept}
    if len(lists) == len(kept) == 2 and about != "note" and rng.random() < 0.5:  # one list of objects
        keys = [case(singular(word)) for word, *_ in lists]
        rows = [dict(zip(keys, values)) for values in zip(*[values for _, values, _ in lists])]
        tree = {pick(rng, ("items", "entries", "rows")): rows}
    if rng.random() < 0.25:
        return (user(text),), THOUGHT, tree
    rule = "<list>" if listed else "<noname>"
    return _asked(rng, rule, text, a=about, l=lists[0][0] if lists else ""), THOUGHT, tree


def loose(rng: Random) -> Made:
    """The same with keys as people say them, often without "JSON", some with a remark on the value."""
    about, text, kept = _stated(rng)
    listed = [one for one in kept if isinstance(one[1], list)][: about != "note" and rng.random() < 0.4]
    kept = listed or kept
    often, the = pick(rng, (0.0, 0.0, 0.3, 0.8)), "the " * (len(kept) > 1 and rng.random() < 0.3)
    wanted, shown, after = [], [], ""
    for word, value, kind in kept:
        wanted.append(Wanted(word.replace(" ", "_"), "", type_of(value), (value,)))
        said = wanted[-1].key.replace("_", " " if rng.random() < 0.8 else "_")
        remarks = _REMARKS.get(type_of(value), ("text",))
        if isinstance(value, str) and value in text:
            remarks = ("as written", "text", "one word" if " " not in value else "a string")
            after = pick(rng, _RULES["after"]).format(said) if rng.random() < 0.05 else after
        remark = f" ({pick(rng, remarks)})" if rng.random() < often else ""
        if kind[:1] == "~" and isinstance(value, str):
            said, remark = f"whether the {said} is {' or '.join(kind[1:].split(','))}", ""
        shown.append((the if said[:7] != "whether" else "") + said + remark)
    keys = enumerated(shown, pick(rng, (" and ", " and ", ", ", ", and ", " & ")))
    rule = "<loose>" if shown[1:] else "<under>" if listed else "<one>"
    messages = _asked(rng, rule, text, after, keys=keys, l=kept[0][0])
    return messages, "\n".join(lines_of("", wanted, 0)), {w.key: w.values[0] for w in wanted}


def worked(rng: Random) -> Made:
    """A sum or difference: beside its numbers, alone, or under a key that is not named."""
    y, x = sorted([2 + int(rng.random() ** 2 * 400) for _ in "yx"])
    how, (a, b) = pick(rng, (0, 0, 1, 2)), pick(rng, _RULES["pairs"]).split(" ")
    made, said = {} if how else {a: x, b: y}, []
    trace = [THOUGHT] if how > 1 else [f"{key}: number {n}" for key, n in made.items()]
    for sign in rng.sample("+-", 1 + (how < 2 and rng.random() < 0.3)):
        forms, work = _RULES[sign], TRACES[sign](x, y)
        key = pick(rng, forms[:2])
        made[key] = int(work.split("=")[-1])
        trace += [work, f"{key}: number {made[key]}"][: 3 - how]
        said.append(pick(rng, (forms[2:4], forms[4:5], forms[5:])[how]).replace("{k}", key))
    ask = phrase(rng, capital(expand(rng, _RULES, f"<sum{how}>"))).replace("{t}", enumerated(said))
    return (user(ask.format(keys=enumerated([*made]), a=a, b=b, x=x, y=y)),), "\n".join(trace), made


# ---- two like things -----------------------------------------------------------------------------------------------


def _relation(row: str, first: int = 0) -> tuple[list[str], list[str], bool]:
    """The forms of a row with its slots, from the first on, in the places of A, B, C, D; all slots; whether dated."""
    named, _, forms = row.replace("\\n", "\n").partition(" = ")
    slots = named.split("; ")
    places = {letter: f"{{{slot}}}" for letter, slot in zip("ABCD", slots[first:])}
    dated = forms[:2] == "+ "
    made = re.sub(r"\b[A-D]\b", lambda m: places.get(m[0], m[0]), forms[2 * dated :])
    return made.split("|"), slots, dated


_RELATED: Final = [_relation(row) for row in _RELATIONS.split("\n")]


def _related(rng: Random) -> tuple[str, list[Wanted], dict[str, str]]:
    """A text, what it states (the keys in words, in any order), and the kinds of the values by key."""
    if rng.random() < 0.66:
        forms, _, dated = pick(rng, _RELATED)
        form, roll = pick(rng, forms), rng.random()
        if roll < 0.3:
            form += pick(rng, _RULES["when" if dated else "tail"])
        elif roll < 0.4:
            form += pick(rng, _RULES["tail"])
    else:
        form = pick(rng, pick(rng, _WIDER)[1])
    roll, lead = rng.random(), rng.random()
    form = capital(form) if roll < 0.7 else form
    form = pick(rng, _RULES["ahead"]) + form if lead < 0.2 else f"{pick(rng, ASIDES)} {form}" if lead < 0.27 else form
    if lead > 0.85 and form[-1] not in ".}":
        form += f". {pick(rng, ASIDES)}"
    made = _filled(rng, form)
    if not made or len({json.dumps(value) for _, value, *_ in made[1]}) < len(made[1]):
        return _related(rng)
    alike, at = rng.random() < 0.6, int(rng.random() * 12)
    wanted, kinds = list[Wanted](), dict[str, str]()
    for names, value, _, kind in made[1]:
        taken = {n for w in wanted for n in (w.key, w.meaning)} | {n for o, *_ in made[1] if o != names for n in o}
        words = [n for n in names if n not in taken]
        if words:
            key = words[at % len(words)] if alike else pick(rng, words)
            wanted.append(Wanted(key, names[0], type_of(value), (value,)))
            kinds[key] = kind
    if rng.random() < 0.5:
        rng.shuffle(wanted)
    wanted = wanted[: 1 + int(rng.random() * len(wanted))] if rng.random() < 0.15 else wanted
    return (made[0], wanted, kinds) if wanted else _related(rng)


def _parted(rng: Random, wanted: list[Wanted], kinds: dict[str, str]) -> tuple[list[Wanted], dict[str, str]]:
    """Replaces some names of people by first or last names; also the remarks that ask for this, by key."""
    made, remarks = [], {}
    for w in wanted:
        kind, words, roll = kinds.get(w.key, ""), str(w.values[0]).split(" "), rng.random()
        if kind in ("person", "ms", "titled") and words[1:] and roll < 0.25:
            first = kind == "person" and roll < 0.08
            remarks[w.key] = pick(rng, _RULES["afirst" if first else "alast"])
            w = Wanted(w.key, w.meaning, w.type, (words[not first and -1],))
        made.append(w)
    return made, remarks


def _made(wanted: Sequence[Wanted], messages: entries.Messages) -> Made:
    return messages, "\n".join(lines_of("", [*wanted], 0)), {w.key: w.values[0] for w in wanted}


def _remarks(rng: Random, numbers: Sequence[str], lower: bool) -> str:
    """What is said of the keys besides: that they are in lower case, that some are numbers, that there are no more."""
    found = [pick(rng, _RULES["alow"])] * lower
    found += [pick(rng, _RULES["anum"]).format(k=key) for key in numbers if rng.random() < 0.25]
    found += [pick(rng, _RULES["aside"])] * (rng.random() < 0.1)
    return "".join([f", {one}" for one in found])


def _run(rng: Random, text: str, wanted: list[Wanted], kinds: dict[str, str]) -> Made:
    """Keys as a run of words, with remarks on their spelling among them."""
    wanted, remarks = _parted(rng, wanted, kinds)
    shown = [f"{w.key} ({remarks[w.key]})" if w.key in remarks else w.key for w in wanted]
    upper = rng.random() < 0.15
    keys = enumerated([*map(capital, shown)] if upper else shown, pick(rng, (", ", ", ", " and ", ", and ", " & ")))
    after = _remarks(rng, [w.key for w in wanted if w.type in _NUMBERS], upper or rng.random() < 0.15)
    count = str(len(shown)) if rng.random() < 0.3 else in_words(len(shown))
    ask = phrase(rng, expand(rng, _RULES, "<run>"), asking=0.0).format(K=keys, n=count, r=after, place="here")
    wanted = [Wanted(w.key.replace(" ", "_"), "", w.type, w.values) for w in wanted]
    return _made(wanted, _beside(rng, capital(ask) if rng.random() < 0.7 else ask, text))


def _beside(rng: Random, ask: str, text: str) -> entries.Messages:
    """The request and the text, in one line at times."""
    if rng.random() < 0.5:
        return placed(rng, ask, text, rng.random() < 0.5, system=0.15)
    shown = pick(rng, (text, text, f'"{text}"', f"Text: {text}"))
    return (user(pick(rng, (f"{ask} {shown}", f"{ask}\n{shown}", f"{shown}\n{ask}"))),)


_NUMBERS: Final = ("integer", "number")
_FOREIGN: Final = {word: keys for word, *keys in [row.split(" ") for row in _RULES["foreign"]]}
_ORDER: Final = ("first", "second", "third", "fourth", "fifth", "sixth")


def _meant(rng: Random, text: str, wanted: list[Wanted]) -> Made:
    """Keys in another language, made up or cut short, each with what it is for."""
    found: dict[str, Wanted] = {}
    how = rng.random()
    for w in wanted:
        word = next((word for word in f"{w.key} {w.meaning}".split(" ") if word in _FOREIGN), "")
        key = pick(rng, _FOREIGN[word]) if word and how < 0.6 else made_up(rng)
        key = key if how < 0.8 else w.key.replace(" ", "")[: 2 + int(rng.random() * 2)] if how < 0.9 else key[:1]
        key = key if key not in found and key != w.key else f"{key}{len(found) + 1}"
        found[key] = Wanted(key, w.meaning, w.type, w.values)
    form, chain = pick(rng, _RULES["piece"][-4 if rng.random() < 0.35 else 0 :]), pick(rng, _RULES["chain"])
    chained = "the {o} key" in form and rng.random() < 0.7
    pieces = [
        (chain if chained and i else form).format(k=w.key, m=w.meaning, i=i + 1, o=_ORDER[i % 6])
        for i, w in enumerate(found.values())
    ]
    shown = enumerated(pieces, pick(rng, (" and ", ", ", "; ")))
    form = expand(rng, _RULES, "<meant>")
    begins = form[:3] == "{p}" or ". {p}" in form
    form = phrase(rng, form if form[:3] == "{p}" else capital(form), asking=0.1)
    ask = form.format(p=capital(shown) if begins else shown, place="here")
    return _made([*found.values()], _beside(rng, ask, text))


def related(rng: Random) -> Made:
    """Values of a text with two like things or with addresses, files and codes, asked for in any way."""
    text, wanted, kinds = _related(rng)
    case, _ = pick(rng, CASES)
    roll = rng.random()
    if roll < 0.32:
        asked = (user(text),) if roll < 0.12 else _asked(rng, "<noname>", text, a=pick(rng, ("note", "record", "text")))
        return asked, THOUGHT, {case(w.key): w.values[0] for w in wanted}
    if roll < 0.44:
        return _meant(rng, text, wanted)
    if roll < 0.66:
        return _run(rng, text, wanted, kinds)
    wanted, remarks = _parted(rng, wanted, kinds)
    wanted = [Wanted(case(w.key), w.meaning, w.type, w.values) for w in wanted]
    before = rng.random() < 0.5
    ask = entries.request(rng, wanted, "", False, "below" if before else "above")
    for word, remark in remarks.items():
        ask += ("" if ask[-1] in ".?!\n" else ".") + f" {case(word)}: {remark}."
    return _made(wanted, placed(rng, ask, text, before, system=0.2))


# ---- rows and objects ----------------------------------------------------------------------------------------------

_COLUMNS: Final = [row.split(" ") for row in _HEADERS.split("|")]
_CHANGES: Final[tuple[Callable[[str], str], ...]] = (capital, str.upper, str, str, str, str, str)
_INNER: Final = [_relation(row, 1) for row in _OBJECTS.split("\n")]


def table(rng: Random) -> Made:
    """The names of columns and a row of values."""
    mark = pick(rng, (";", " ; ", ",", ", ", "\t", " | ", " / "))
    change = pick(rng, _CHANGES)
    found: dict[str, Any] = {}
    row = []
    for *names, kinds in rng.sample(_COLUMNS, 2 + int(rng.random() * 4)):
        key, (value, _) = pick(rng, names), _value(rng, kinds)
        if key not in found and mark.strip(" ") not in str(value) and not str(value).startswith("0"):
            found[key] = value
            row.append(str(value))
    if len(found) < 2:
        return table(rng)
    head, lower = mark.join(map(change, found)), change is not str and rng.random() < 0.5
    text = pick(rng, _RULES["table"]).replace("\\n", "\n").format(h=head, r=mark.join(row))
    wanted = [Wanted(key if lower else change(key), "", type_of(value), (value,)) for key, value in found.items()]
    after = _remarks(rng, [w.key for w in wanted if w.type in _NUMBERS], lower)
    some = rng.random() < 0.2
    wanted = rng.sample(wanted, 1 + int(rng.random() * len(wanted))) if some else wanted
    form = phrase(rng, capital(expand(rng, _RULES, "<some>" if some else "<made>")))
    ask = form.format(keys=enumerated([w.key for w in wanted]), r=after, place="here")
    join = pick(rng, ("\n", "\n\n"))
    return _made(wanted, (user(f"{ask}{join}{text}" if rng.random() < 0.4 else f"{text}{join}{ask}"),))


def nested(rng: Random) -> Made:
    """One or two objects in an object, beside other values."""
    case, _ = pick(rng, CASES)
    count, tree, texts = 1 + (rng.random() < 0.25), dict[str, Any](), list[str]()
    for forms, (outer, *inner), _ in rng.sample(_INNER, 6):
        inside = bool(inner[1:])
        if (inside and sum(isinstance(v, dict) for v in tree.values()) >= count) or len(texts) - count >= 2:
            continue
        if made := _filled(rng, capital(pick(rng, forms))):
            texts.append(made[0])
            items = [(case(pick(rng, names)), value) for names, value, *_ in made[1]]
            rng.shuffle(items)
            tree |= {case(pick(rng, outer.split(" "))): dict(items)} if inside else dict(items)
    if not any(isinstance(v, dict) for v in tree.values()) or len(tree) < len(texts):
        return nested(rng)
    rng.shuffle(texts)
    text = pick(rng, ("\n", "\n", "\n", ". ", "; ")).join(texts)
    trace, shown = list[str](), list[str]()
    mark, form, dotted = pick(rng, ('"', '"', "")), pick(rng, _RULES["ingroup"]), rng.random() < 0.12
    for key, value in rng.sample([*tree.items()], len(tree)):
        tree[key] = tree.pop(key)  # in the order asked for
        if not isinstance(value, dict):
            trace += lines_of("", [Wanted(key, "", type_of(value), (value,))], 0)
            shown.append(f"{mark}{key}{mark}")
            continue
        trace += lines_of(f"{key}.", [Wanted(k, "", type_of(v), (v,)) for k, v in value.items()], 0)
        keys = enumerated([f"{mark}{k}{mark}" for k in value])
        shown += [f"{key}.{k}" for k in value] if dotted else [form.format(g=key, i=keys)]
    roll, before = rng.random(), rng.random() < 0.4
    place = "below" if before else "above"
    if roll < 0.15:
        return _asked(rng, "<noname>", text, a="message"), THOUGHT, tree
    if roll < 0.4:
        blank = pick(rng, ("...", "", "?", None))
        block = {k: dict.fromkeys(v, blank) if isinstance(v, dict) else blank for k, v in tree.items()}
        ask = worded(rng, "<block>", json.dumps(block, indent=pick(rng, (None, None, 2))), "", place)
    else:
        ask = worded(rng, "<ask>", enumerated(shown, pick(rng, (" and ", ", ", ", and "))), "", place)
    return placed(rng, ask, text, before, system=0.1), "\n".join(trace), tree
