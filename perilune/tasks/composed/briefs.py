"""Short texts with a question, for `doc_questions`: facts side by side, changes, orders, counts, rules, lists.

A block of data/briefs.txt begins with forms: `text|text => question^answer^label|... => begin of the
thought`. The thought ends with `label: answer`; `;` begins a new line of it. Then there are rows: the kind of A to D,
the kind of X to W, cells. <2,A,X> is cell 2 (or one of those with # between them) with A for {l} and X for {p}. {Q}
asks for A. [a/b] is a choice. Clauses with & between them may come in any order. In the last block they stay in order,
because those after the first have no verb ("the red bike is for Ann, the blue one for Bo").

The file begins with common knowledge, `question|...^answer^label=>data` (a/b: {a} and {b}; a=b: both ways; a+b+...: a
ring), then words by sorts.
"""

import re
from itertools import permutations
from random import Random
from typing import Final

from perilune.tasks.composed import subjects
from perilune.tasks.composed.accounts import FORMS
from perilune.tasks.composed.paragraphs import EITHER, PLACE, Paragraph, filling
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, enumerated, in_words, parted, small
from perilune.tasks.words import NAMES, lines, listed

_KNOWN, _SORTS, *_TEXTS = (block.split("\n") for block in lines("briefs.txt").strip().split("\n\n"))
_BLOCKS: Final = [
    [[row.split(" => ") for row in rows if "=>" in row], [row.split("|") for row in rows if "=>" not in row]]
    for rows in _TEXTS
]
_KNOWING: Final = parted(
    "{Q}|my nephew wants to know: {q}?|{Q}, mate?|{q}|{Q}? One word will do.|Quiz: {q}?|{Q}? I forgot."
)
_PARITY: Final = parted(
    "is {n} odd or even|is {n} an odd or an even number|is the number {n} even or odd|{n}: odd or even"
)
_LISTS: Final = parted("{q}: {l}|{q}, {l}|{l}: {q}|on my list are {l}, and {q}|I've got {l}. {Q}")
_SHARES: Final = (*[0] * 7, *[1] * 5, *[2] * 3, *[3] * 4, 4, 4, 4, 5, 5, 6, 7, *[8] * 6)  # numbers of blocks
_PAIRS: Final = parted("old,new,spare,best|big,small,long,round|red,green,blue,white|first,second,third,last")
_NOUNS: Final = listed("server office printer shop bike key machine tent door")
_STATES: Final = {
    "{mood}": parted("fine,tired|happy,sad|well,ill|awake,asleep"),
    "{state}": parted("ok,broken|new,old|clean,dirty|on,off|warm,cold"),
    "{result}": parted("succeeded,failed|passed,failed|worked,crashed|finished,failed"),
}
_STEPS: Final = listed("lint test build deploy backup login upload payment scan import")
_THEN: Final = parted("then |later |after that |the next day |soon |a week later ||")
_LAST: Final = (" and ", ", and ", ", ", "; ")
_KIN: Final = parted("my friend |our neighbour |his boss |my cousin |her cousin |the new colleague ")
_YES: Final = parted("{Q}? Answer yes or no.|{q}, yes or no?|{Q}? Please reply with yes or no.|{Q}?")
_PLACED: Final = re.compile(r"(^|: |> |\b(?:from|to|out of) )(?:in|on) (?=the )", re.MULTILINE)


def _value(rng: Random, form: str) -> str:
    if form == "{n}":
        return str(2 + int(rng.random() * pick(rng, (10, 98))))
    if form == "{year}":
        return str(1900 + int(rng.random() * 125))
    if form == "{step}":
        return pick(rng, _STEPS)
    if form == "{who}" and rng.random() < 0.6:
        return pick(rng, NAMES)
    form = EITHER.sub(lambda m: pick(rng, m[1].split("/")), form)
    form = PLACE.sub(lambda m: _value(rng, "{n}") if m[1] == "n" else filling(rng, m[1]), form)
    return re.sub(r"\bthe an? ", "the ", form)


def _values(rng: Random, kind: str, taken: list[str]) -> list[str]:
    """Four values, none part of another or of `taken`. A kind in _STATES: one value, and three times its opposite."""
    if kind in _STATES:
        usual, odd = pick(rng, _STATES[kind]).split(",")
        return [odd, usual, usual, usual]
    if kind == "{pair}":
        noun = pick(rng, _NOUNS)
        return [f"the {a} {noun}" for a in rng.sample(pick(rng, _PAIRS).split(","), 4)]
    found: list[str] = []
    while len(found) < 4:
        value = _value(rng, kind)
        last = value.split(" ")[-1] if kind[-1] in "}]" and kind != "{clock}" else value
        if not any(last in other.split(" ") or value in other or other in value for other in found + taken):
            found.append(value)
    return sorted(found, key=int, reverse=True) if kind in ("{n}", "{year}") else found


def _domain(rng: Random) -> tuple[str, list[str], list[str], list[str]]:
    """Four facts from data/subjects.txt: the question word for the subject, four subjects, their values, cells."""
    while True:
        domain = pick(rng, subjects.DOMAINS)
        at, many = pick(rng, domain.attributes), list[subjects.Subject]()
        for _ in range(4):
            many.append(subjects.subject(rng, domain, [at], many))
        ask, said = pick(rng, at.questions), pick(rng, at.predicates)
        if "{s}" not in ask or ask[-1] != "?" or not all(one.facts for one in many):
            continue
        values = [one.facts[at][1] for one in many]
        if not any(a in b for a, b in permutations(values, 2)):
            break
    names = [domain.forms[0].format(s=one.name[1]) for one in many]
    span = "{v}" if ask.startswith("How many") else said.span
    cells = ["{l} " + said.text.replace(span, "{p}"), small(ask[:-1]).replace("{s}", "{l}")]
    who = "who" if domain.person else f"which {domain.name}"
    return who, names, [span.replace("{v}", value) for value in values], cells


def _text(rng: Random, groups: list[list[str]]) -> str:
    style, link = rng.random(), pick(rng, (" and ", ", and ", ", while ", ", ", "; "))
    said = [one for group in groups for one in (group if style < 0.55 else [enumerated(group, link)])]
    if style > 0.88:
        return ", ".join(said)
    return pick(rng, (". ", ". ", ". ", ".\n")).join(map(capital, said)) + "."


def brief(rng: Random) -> Paragraph:
    """A text, a question, the thought before the answer, the answer."""
    number = pick(rng, _SHARES)
    forms, rows = _BLOCKS[number]
    kind, what, *cells = pick(rng, rows) if rows else ("", "")
    if not number and rng.random() < 0.35:
        kind, (who, names, values, cells) = "", _domain(rng)
    else:
        names = _values(rng, kind, []) if kind else []
        values = _values(rng, what, names) if what else []
        noun = names[0].split(" ")[-1] if kind == "{pair}" else (re.findall(r"\w+", kind) or [""])[-1]
        who = "who" if noun == "who" else "what" if noun in ("thing", "things", "gear") else f"which {noun}"
        who = "which" if (who == "what" and number) or "[" in kind else who
    turn = rng.random()
    words = dict(zip("ABCD", names)) | dict(zip("XYZW", values)) | {"Q": who}

    def made(m: re.Match[str]) -> str:
        cell, *at = m[1].split(",")
        forms = cells[int(cell) - 1].split("#")
        form = forms[int((turn if turn < 0.6 else rng.random()) / (0.6 if turn < 0.6 else 1) * len(forms))]
        return form.replace("{l}", f"{{{at[0]}}}").replace("{p}", f"{{{at[-1]}}}") if at else form

    def opened(form: str) -> str:
        form = EITHER.sub(lambda m: pick(rng, m[1].split("/")), re.sub(r"<(\d[^<>]*)>", made, form))
        return re.sub("{then}", lambda m: pick(rng, _THEN), form)

    def filled(form: str) -> str:
        for m in PLACE.finditer(form):
            while m[0][1:-1] not in words:
                value = filling(rng, m[1])
                if not any(value in other or other in value for other in words.values()):
                    words[m[0][1:-1]] = value
        return re.sub(r"\ba (?=[aeioAEIO])", "an ", form.format(**words))

    text, asks, *begin = pick(rng, forms)
    if "{year" in text:
        words |= zip(("year", "year2", "year3"), reversed(_values(rng, "{year}", [])))
    groups, kin = [], tuple(names) if who == "who" and names[0][:4] != "the " else "/"
    ways = text.split("|")
    # Leaves out the last ways, which would give "Sam called Ann, Bo Kim" or "Sam: Ann".
    few = 0 if number else 4 if kind == what else 2 if values[0][:1].isupper() or " a {p}" in cells[0] else 0
    for group in opened(pick(rng, ways[: len(ways) - few])).split("+"):
        said = [filled(one) for one in group.split("&")]
        if number != 8 and (number != 2 or rng.random() < 0.5):
            rng.shuffle(said)
        if number == 4 and what and rng.random() < 0.4:  # "Ann sold 9 apples, Bo 4"
            pairs = [next(pair for pair in zip(names, values) if one.startswith(f"{pair[0]} ")) for one in said[1:]]
            said = [enumerated([said[0], *map(" ".join, pairs)], pick(rng, _LAST))]
        if kind == "{pair}" and (number == 8 or rng.random() < 0.5):
            said[1:] = [one.replace(f" {noun} ", " one ") for one in said[1:]]
        said = [enumerated(said, pick(rng, _LAST))] if number == 8 else said
        groups.append([pick(rng, _KIN) + one if one.startswith(kin) and rng.random() < 0.1 else one for one in said])
    if number == 4 and kind and "{year}" not in what and rng.random() < 0.2:
        groups = [[re.sub(r"\b\d+", lambda m: in_words(int(m[0])), one) for one in said] for said in groups]
    if rng.random() < 0.1:
        groups.insert(pick(rng, (0, 9)), [small(pick(rng, subjects.ASIDES).rstrip("."))])
    asked, answer, label = [filled(opened(one)) for one in pick(rng, asks.split("|")).split("^")]
    if asked.startswith("is it") and rng.random() < 0.6:
        name = next(one for one in names if asked.split(" that ", 1)[1].startswith(one))
        verb, _, rest = asked.split(f" that {name} ", 1)[1].partition(" ")
        if verb in ("is", "are", "was"):
            asked = f"{verb} {name} {rest}"
        elif re.fullmatch("[a-z]+[^aehiosux]s", verb):
            asked = f"does {name} {verb[:-1]} {rest}"
    if not number and asked.startswith("who ") and rng.random() < 0.5:
        asked = re.sub(r"\ban? ", "the ", asked)
    asked = re.sub("^(where|who|what) is ", r"\1's ", asked) if rng.random() < 0.15 else asked
    thought = "\n".join([*map(filled, begin), f"{label}: {answer}"]).replace(";", "\n")
    form = pick(rng, _YES if answer in ("yes", "no") else FORMS["plain"])
    if (
        re.match(r"(?!\w+ \w+ (?:is|was|does)\b)(who|which \w+|what) (?!(is|are|was|do|did|does|will)\b)", asked)
        and rng.random() < 0.25
    ):
        form = pick(rng, FORMS["indirect"])
    question = form.format(q=asked, Q=capital(asked))
    return Paragraph(
        _PLACED.sub(r"\1", _text(rng, groups)), question, *[_PLACED.sub(r"\1", one) for one in (thought, answer)]
    )


def _sorted(rng: Random) -> tuple[str, str, str]:
    """Which one of a few things is of another sort."""
    (a, words), (b, others) = [row.split(": ") for row in rng.sample(_SORTS, 2)]
    many = dict.fromkeys(rng.sample(words.split(), 2 + int(rng.random() * 2)), a) | {pick(rng, others.split()): b}
    if a in ("fruit", "vegetable") and b not in ("fruit", "vegetable", "animal") and rng.random() < 0.4:
        a, many = "food", {w: "food" if s == a else s for w, s in many.items()}
    if not {a, b} & {"colour", "country"} and rng.random() < 0.4:
        many = {f"{w}s": s for w, s in many.items()}
    odd, names = [*many][-1], rng.sample([*many], len(many))
    label = pick(rng, (b, b, f"not {a}", f"not {a}", "odd one out"))
    what = re.sub(r"\ba (?=[aeiou])", "an ", f"a {label}".replace("a not ", "not a ").replace("a food", "food"))
    asked = pick(rng, ("which of [these/them] is {w}", "which [/one ]is {w}", "one of these is {w}, which one"))
    if label[0] == "o":
        asked, what = pick(rng, ("which is the {w}", "which one does not belong", "what's the {w}")), label
    asked = EITHER.sub(lambda m: pick(rng, m[1].split("/")), asked).format(w=what)
    form = pick(rng, _LISTS)
    shown = enumerated(names, " or " if form.endswith("l}") and rng.random() < 0.3 else " and ")
    shown = ", ".join(names) if form[0] == "{" and rng.random() < 0.5 else shown
    asked = form.format(q=asked, Q=capital(asked), l=shown)
    return asked, "\n".join([f"{w}: {many[w]}" for w in names] + [label]), odd


def known(rng: Random) -> tuple[str, str, str]:
    """A question of common knowledge, the thought and the answer."""
    roll = rng.random()
    if roll < 0.25:
        asked, label, answer = _sorted(rng)
    elif roll < 0.35:
        n = int(10 ** (1 + rng.random() * 2))
        asked, label, answer = pick(rng, _PARITY).format(n=n), f"{n} ends in {n % 10}", ("even", "odd")[n % 2]
    else:
        forms, data = pick(rng, _KNOWN).split("=>")
        ring, row = data.split("+"), pick(rng, data.split(",")).split("=")
        at = int(rng.random() * len(ring))
        cells = row[0].split("/") if len(row) == 1 else rng.sample(row, 2)
        if ring[1:]:
            cells = [ring[at - 1], ring[at]]
        parts = forms.split("^")
        at = 3 * int(rng.random() * (len(parts) // 3))
        form = EITHER.sub(lambda m: pick(rng, m[1].split("/")), pick(rng, parts[at].split("|")))
        asked, answer, label = [x.format(**dict(zip("abc", cells))) for x in (form, *parts[at + 1 : at + 3])]
    form = pick(rng, _KNOWING if rng.random() < 0.3 else FORMS["plain"])
    return form.format(q=asked, Q=capital(asked)), f"{label}: {answer}", answer
