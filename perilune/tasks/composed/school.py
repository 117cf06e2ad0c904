"""Everyday stories for `word_problems` with numbers of everyday size, from the grammar in data/school.txt.

A line there is `symbol: form|form`. A form has <symbols>, choices [this/that], choices of tense [now//then], and places
for numbers, with letters for their size (`_SIZES`); ${a} is an amount of money. Text in backquotes is not shown:
`=pages` is the answer's unit, all else is appended to the expression (`:` divides, `~` is the expression so far, `!u`
is put before it). {U} is the unit. Sentences with & between them may come in any order, but for the last one.
"""

import re
from random import Random
from typing import Final

from perilune.tasks.composed.tales import KIN, RULES, THIRD, Story
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, expand, small
from perilune.tasks.working import solve

_AMOUNTS: Final = (*range(2, 13), *range(2, 41))
_SIZES: Final = {
    **dict.fromkeys("kj", range(2, 10)), **dict.fromkeys("abc", _AMOUNTS), "e": (10, 12, 15, 20, 24, 25, 30),
    "u": (*range(40, 400), *range(50, 400, 10)), "w": (10, 20, 20, 50, 50, 100, 200), "f": range(40, 130, 10),
    "y": range(4, 12), "z": range(8, 21), "g": range(28, 50), "v": range(51, 75), "l": range(60, 96),
    "d": range(500, 3001, 10), "S": range(2, 6), "T": range(5, 60, 5), "V": range(5, 60, 5), "R": range(60, 900, 20),
}  # fmt: skip
_PLACE: Final = re.compile("`[^`]*`|\\{[" + "".join(_SIZES) + "]\\}")
_FIRST: Final = re.compile(r"^\{[mh]\}")
_MONEY: Final = (("dollars", "$"), ("euros", "€"), ("pounds", "£"), ("bucks", "$"), ("euro", "€"), ("quid", "£"))


def _joined(before: str, piece: str) -> str:
    """The expression so far, continued by a piece."""
    if piece[0] == "!":
        return piece[1:] + "+" * (before[0] != "-") + before
    if "~" in piece and re.search("[-+]", re.sub(r"\([^)]*\)", "", before)):
        flat = "-~" in piece and "(" not in before
        before = before.translate({43: 45, 45: 43}) if flat else f"({before})"
    return piece.replace("~", before) if "~" in piece else before + piece


def _drawn(rng: Random, money: str, kind: str) -> Story:
    """A story of a symbol. Its numbers are named by size and number of the form, e.g. k3."""
    now, seen = rng.random() < 0.5, set[str]()

    def chosen(m: re.Match[str]) -> str:
        return m[1].split("//")[now] if "//" in m[1] else pick(rng, m[1].split("/"))

    def form(m: re.Match[str]) -> str:
        """For a symbol, a form not yet used if there is one."""
        found = pick(rng, [f for f in RULES[m[1]] if f not in seen] or RULES[m[1]])
        seen.add(found)
        while "[" in found:
            found = re.sub(r"\[([^][]*)\]", chosen, found)
        named = rf"\g<0>{len(seen)}"
        found = _PLACE.sub(lambda m: m[0] if "=" in m[0] else re.sub("[A-Za-z]", named, m[0]), found)
        return re.sub(r"<(\w+)>", form, found)

    *facts, ask = re.sub(r"<(\w+)>", form, f"<{kind}>").split(" & ")
    rng.shuffle(facts)
    text, pattern, unit = ". ".join([*facts, ask]), "", "{o}"
    for piece in re.findall("`([^`]*)`", text):
        if piece[0] == "=":
            unit = piece[1:].replace("$", money)
        else:
            pattern = _joined(pattern, piece.replace(":", "/")).lstrip("+")
    return pattern, re.sub("`[^`]*`", "", text).replace("{U}", unit), unit


def lesson(rng: Random, kind: str = "story") -> Story:
    """A story with its numbers in the pattern; in the text the place {_12} is for 12."""
    tries, fits = 0, False
    while not fits:
        if tries % 150 == 0:
            money, sign = pick(rng, _MONEY)
            form, text, unit = _drawn(rng, money, kind)
            parts = re.findall(r"[A-Za-z]?\d+|.", form)
            most = 100 if unit in ("years", "percent") else 700 if ")*60" in form else 9999
        tries += 1
        numbers = {name: str(pick(rng, _SIZES[name[0]])) for name in parts if name[0].isalpha()}
        tokens = [numbers.get(part, part) for part in parts]
        solved = solve([int(t) if t.isdigit() else t for t in tokens], wide=True)
        fits = (
            solved is not None
            and solved[1] != []
            and 1 < solved[0] < most
            and all(min(n, k) > 0 for _, n, k, _ in solved[1])
        )
    pattern = "".join(tokens)
    text = re.sub(r":\{([TV]\d+)\}", lambda m: f":{numbers[m[1]]:0>2}", text)  # 9:05
    text = re.sub(r"\{([A-Za-z]\d+)\}", lambda m: f"{{_{numbers[m[1]]}}}", text)
    text = re.sub(r"\$(?!\{)", money, text)
    text = re.sub(r"\$(\{\w+\})", sign + r"\1" if rng.random() < 0.4 else r"\1 " + money, text)
    text = re.sub(r"s (note|bill)\b", r" \1", text)
    if unit == "years" and "younger" not in text:
        text = text.replace("{q}", pick(rng, KIN[::6])).replace("{t}", pick(rng, THIRD[::5]))
    said, _, ask = text.rpartition(". ")
    roll = rng.random()
    if said and roll < 0.08 and "{_" not in ask:
        text = f"{ask.replace('{p}', '{n}')} {said}."
    elif said and roll < 0.16:
        text = f"{said}, so {small(ask)}"
    elif roll > 0.93 and unit not in ("years", "percent"):
        first, _, rest = text.partition(". ")
        text = f"{first}. {pick(rng, RULES['idle'][:12])} {rest}" if rest else text
    text = ". ".join([capital(s) for s in text.split(". ")])
    if kind != "story" and roll > 0.89:  # as it is in a book
        text = f'{expand(rng, RULES, "<task>")} "{_FIRST.sub(lambda m: m[0].upper(), text)}"'
    return pattern, text, unit
