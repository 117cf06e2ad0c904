"""Numbers with a label each in a text, and comparisons of expressions.

Every part varies by itself: what is counted, where, in which layout, and what is asked.
"""

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Final

from perilune.tasks.composed.sums import Drawn
from perilune.tasks.more_programs import DAYS, MONTHS
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, enumerated, lined, numeral, phrase
from perilune.tasks.words import CITIES, NAMES, OBJECTS, PLAIN, listed
from perilune.tasks.working import Tokens, labelled, solve, solve_trace, subtract_trace

_UNITS: Final = listed("visitors guests votes points steps parcels calls emails kilometres litres kilograms pages")
_LABELS: Final[tuple[tuple[str, Sequence[str]], ...]] = (("on ", DAYS), ("in ", MONTHS), ("in ", CITIES),
    ("for ", NAMES), ("from ", NAMES), ("at desk ", "12345"), ("at gate ", "ABCDE"),
    ("in row ", "12345"), ("in week ", "1234"), ("in box ", "ABCD"))  # fmt: skip
_ASKS: Final = lined("""
begin: we counted|there were|I noted|the list has|it was|we had|the report says|I got
total: how many {o} is that in all?|what is the total?|total?|how many {o} altogether?|add them up|what do they add up \
to?|give the sum of the numbers|and together?|sum, please
more: how many more {o} {p} than {q}?|by how much does the number {p} exceed the one {q}?|how many fewer {o} {q} than \
{p}?|what is the difference between the numbers {p} and {q}?|{p}: how many more than {q}?|how much larger \
is the number {p} than the one {q}?
spread: how far apart are the largest and the smallest number?|largest minus smallest?|subtract the smallest number \
from the largest|what is the difference between the highest and the lowest?|what is the range, highest minus lowest?
""")
_METERS: Final = lined("""
shown: the meter|the odometer|the counter|the gauge|our water meter|the display|the dial
verb: showed|read|stood at|was at|said
times: at first;afterwards|in the morning;in the evening|last week;today|before the trip;after it|in May;in June
ask: how much did it go up?|what was used in between?|by how much did it rise?|give the difference of the two readings.\
|what is the change?
""")


def _layout(rng: Random, o: str, ask: str, count: int) -> str:
    """Each number with its label, in a sentence or in lines, and what is asked, before or after."""
    ask = capital(ask) + ("" if ask[-1] == "?" else ".")
    if rng.random() < 0.4:
        mark, gap = pick(rng, ("", "- ", "* ")), pick(rng, ("\n", "\n\n"))
        head = pick(rng, (f"{capital(o)}:", f"Number of {o}", f"{capital(o)} counted:"))
        table = "\n".join([head, *[f"{mark}{{b{i}}}: {{n{i}}}" for i in range(count)]])
        return ask + gap + table if rng.random() < 0.5 else table + gap + ask
    rest, begin = [f"{{n{i}}} {{l{i}}}" for i in range(1, count)], pick(rng, _ASKS["begin"])
    text = f"{{L0}} {begin} {{n0}} {o}, {enumerated(rest)}."
    if rng.random() < 0.6:
        text = f"{capital(begin)} {enumerated([f'{{n0}} {o} {{l0}}', *rest])}."
    return f"{text} {ask}" if rng.random() < 0.8 else f"{ask} {text}"


def stated(rng: Random, numbers: list[int], kind: str, large: int = 0, small: int = 0) -> str:
    """A text with the numbers, and a question for their total, their spread, or how much more `large` is."""
    named = {f"n{i}": numeral(rng, n, 0.03) for i, n in enumerate(numbers)}
    if kind == "more" and len(numbers) == 2 and rng.random() < 0.3:
        (it, verb, times, ask), (n, m) = (pick(rng, forms) for forms in _METERS.values()), named.values()
        n, m = (n, m) if numbers[0] == small else (m, n)
        then, later = times.split(";")
        said = pick(rng, (f"{it} {verb} {{n}} {then} and {{m}} {later}", f"{then} {it} {verb} {{n}}, {later} {{m}}"))
        return phrase(rng, f"{capital(said)}. {capital(ask)}").format(n=n, m=m)
    o, (before, pool) = pick(rng, OBJECTS if rng.random() < 0.6 else _UNITS), pick(rng, _LABELS)
    at, step = int(rng.random() * len(pool)), 1 + int(rng.random() * (len(pool) // len(numbers)))
    for i in range(len(numbers)):
        label = before + pool[(at + i * step) % len(pool)]
        named |= {f"l{i}": label, f"L{i}": capital(label), f"b{i}": capital(label.split(" ", 1)[1])}
    p, q = (f"{{l{numbers.index(n)}}}" if n in numbers else "" for n in (large, small))
    ask = pick(rng, _ASKS[kind]).format(o=o, p=p, q=q)
    return phrase(rng, _layout(rng, o, ask, len(numbers))).format(**named)


def reading(rng: Random) -> Drawn:
    """Two to four numbers, most of them with labels."""
    kind = pick(rng, ("total", "more", "spread"))
    while True:
        count = 2 + int(rng.random() * 3) if kind == "more" else 3 + int(rng.random() * 2)
        top = pick(rng, (50, 100, 300, 1000))
        numbers = list({2 + int(rng.random() * top): 0 for _ in range(count)})
        if len(numbers) < count:
            continue
        small, large = sorted(numbers[:2]) if kind == "more" else (min(numbers), max(numbers))
        tokens: Tokens = [large, "-", small]
        if kind == "total":
            tokens = [t for n in numbers for t in (n, "+")][:-1]
        if (solved := solve(tokens)) is not None:
            break
    if kind == "spread":
        question = stated(rng, numbers, kind)
        if rng.random() < 0.5:
            form = pick(rng, ("{x}: ^", "Numbers: {x}. ^", "Of {x}, ^", "I have {x}: ^", "^ {x}", "{x}\n^"))
            listed = enumerated(list(map(str, numbers)), pick(rng, (" and ", ", ")))
            question = phrase(rng, form.replace("^", pick(rng, _ASKS[kind]))).format(x=listed)
        lines = [f"{n}:{x}:{y}" for n, x, y in zip(numbers, accumulate(numbers, max), accumulate(numbers, min))]
        trace = "\n".join([*lines, subtract_trace(large, small)])
        return (kind, *numbers), question, lambda: trace, f"{large} - {small} = {large - small}"
    shown = " ".join(map(str, tokens))
    question, (value, steps) = stated(rng, numbers, kind, large, small), solved
    return ("expression", shown.replace(" ", "")), question, lambda: solve_trace(steps), f"{shown} = {value}"


# ---- comparisons of expressions --------------------------------------------------------------------------------------

_RELATIONS: Final = lined("""
>: is greater than|is more than|is larger than|is above|exceeds|>|is bigger than
<: is less than|is smaller than|is below|<|is under
=: equals|is equal to|is the same as|=|is exactly
""")
_TRUTH: Final = (("true", "false"), ("true", "false"), ("yes", "no"), ("yes", "no"), ("right", "wrong"), ("T", "F"))
_SIDES: Final = (("left", "right", "equal"), ("first", "second", "same"), ("A", "B", "both"), ("one", "two", "tie"))
_GAPS: Final = ((">", "<", "="), ("more than", "less than", "the same as"), ("above", "below", "equal to"),
    ("greater", "smaller", "equal"))  # fmt: skip
_PUT: Final = lined("""
truth: {U} or {v}: {l} {r} {m}|{l} {r} {m}: {u} or {v}?|Answer {u} or {v}: {l} {r} {m}.|Does it hold that {l} {r} {m}? \
Say {u} or {v}.|My friend claims that {l} {r} {m}. {U} or {v}?
gap: {l} ___ {m}: put {u}, {v} or {w} in the gap.|Which fits, {u}, {v} or {w}? {l} ___ {m}|{l} [ ] {m}^Fill in {u}, \
{v} or {w}.|Compare {l} with {m}: {u}, {v} or {w}?
side: {u}: {l}^{v}: {m}^Which is {b}? Say {u}, {v}, or {w} if they do not differ.|Which is {b}, {l} or {m}? Answer {u} \
for the first one, {v} for the second, {w} if there is no difference.|Take {l} and {m}. Write {u} if the first is {b}, \
{v} if the second is {b} and {w} if they are equal.
typed: Which is {b}: {l} or {m}? Give the expression as it is written.|{l} or {m}, which one is {b}? Copy it exactly.|\
Of {l} and {m}, write the {b} one just as I typed it.|{l}^{m}^Repeat the line with the {b} value.
""")


def _side(rng: Random, near: int) -> tuple[Tokens, str]:
    """An expression of about this value, and how the question shows it."""
    k, b, sign = 2 + int(rng.random() * 8), 1 + int(rng.random() * (near - 1)), pick(rng, "+-**")
    tokens: Tokens = [near // k + 1, "*", k] if sign == "*" else [near + b if sign == "-" else near - b, sign, b]
    shown = pick(rng, {"+": ("+", "+", "plus"), "-": ("-", "-", "minus"), "*": ("*", "x", "\u00d7", "times")}[sign])
    return tokens, f"{tokens[0]} {shown} {k if sign == '*' else b}"


def compared(rng: Random) -> Drawn:
    """Two expressions, or one and a number: whether a statement holds, or which is larger, in words of the question."""
    left, shown = _side(rng, 6 + int(rng.random() * 90))
    x, steps = solve(left) or (0, [])
    near = max(2, x + pick(rng, (0, 1, -1)) * int(rng.random() * 15))
    right, other = _side(rng, near)
    if rng.random() < 0.4:
        right, other = [near], str(near)
    y, more = solve(right) or (0, [])
    found, kind, up = ">" if x > y else "<" if x < y else "=", pick(rng, tuple(_PUT)), rng.random() < 0.6
    w, relation = "", found if rng.random() < 0.3 else pick(rng, "<>=")
    if kind == "truth":
        u, v = pick(rng, _TRUTH)
        answer = u if found == relation else v
    elif kind == "gap":
        named = dict(zip("><=", pick(rng, _GAPS)))
        answer = named[found]
        u, v, w = rng.sample(list(named.values()), 3)
    else:
        u, v, w = pick(rng, _SIDES) if rng.random() < 0.7 else rng.sample(PLAIN, 3)
        if kind == "typed" and found == "=":
            kind = "side"
        u, v = (shown, other) if kind == "typed" else (u, v)
        answer = w if found == "=" else u if (found == ">") is up else v
    form = pick(rng, _PUT[kind]).replace("^", "\n").replace("{r}", pick(rng, _RELATIONS[relation]))
    form = form.replace("{b}", pick(rng, ("larger", "bigger", "greater") if up else ("smaller", "lower", "less")))
    form = form.replace("the less ", "the smaller ")
    quote = pick(rng, ("", "", '"', "'")) if kind != "truth" else ""
    question = phrase(rng, form, asking=0.0).format(
        l=shown,
        m=other,
        U=capital(u),
        **{n: quote + t + quote for n, t in zip("uvw", (u, v, w))},
    )
    blocks = [*map(solve_trace, [s for s in (steps, more) if s]), labelled(x), labelled(y), f"{x}{found}{y}"]
    return ("compared", question), question, lambda: "\n".join(blocks), answer
