"""JSON objects with keys that the request does not name, or names as people talk; training draws of `json_extract`.

A server can force keys that a model has not read (`response_format`). So keys are drawn from synonyms that the prompt
does not have, and the thought says only that none are named: the model learns which value goes with any key.

data/facts.txt: requests; slots (name, kind, keys); texts, with {slot or kind, more keys}. A clause in [] is repeated,
its values `+` are a list. A kind `forms/forms` is yes or no, `forms=value` a choice.
"""

import re
from random import Random
from typing import Any, Final

from perilune.tasks.composed import entries, slips
from perilune.tasks.composed.entries import CASES, Made, Wanted, lines_of, placed, type_of
from perilune.tasks.fields import bare
from perilune.tasks.problem import pick, user
from perilune.tasks.records import lines, record
from perilune.tasks.wordings import capital, enumerated, expand, lined, phrase, singular, small
from perilune.tasks.working import TRACES

THOUGHT: Final = "no keys named"
_FORMS, _SLOTS, _KINDS = lines("facts.txt").strip().split("\n\n")
_RULES: Final = {**entries.RULES, **lined(_FORMS)}
_NAMED: Final = dict([row.split(" ", 1) for row in _SLOTS.split("\n")])
_TEXTS: Final = [(about, forms.split("|")) for about, _, forms in [row.partition(": ") for row in _KINDS.split("\n")]]
_LASTS: Final = (" and ", ", ", ", and ", " & ", ", then ", ", and then ")
_REMARKS: Final = {"integer": ("number", "a number"), "number": ("as a number",), "boolean": ("true or false",),
    "array": ("a list, same order", "a list in that order")}  # fmt: skip


def _fact(rng: Random) -> tuple[str, str, slips.Found]:
    """What a text is about, the text, what it states."""
    about, forms = pick(rng, _TEXTS)
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
        value, text = slips.drawn_slip(rng, kind.rstrip("+"))
        found[keys] = [*found.get(keys, ([],))[0], value] if kind[-1] == "+" else bare(value), ""
        seen.extend([text] * (not text[0].isdigit()))
        return text

    form = re.sub(r"\[(.*?)\]", series, pick(rng, forms))
    text = re.sub(r"\{(.*?)\}", filled, capital(form) if rng.random() < 0.75 else form)
    if len({*seen}) < len(seen):  # two names alike
        return _fact(rng)
    return about, text, [(keys, value, True, kind) for keys, (value, kind) in found.items()]


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
    """Sums: beside their numbers, alone, or under a key not named."""
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
