"""Whole-number expressions described in words, and what people ask besides: parts, percent, averages, remainders.

An expression is described from the inside out ("half of the sum of 12 and 30"), so that words and order vary for every
part of it; or its value is put into a letter ("if n is 9, what is 4n - 8"). Percentages and divisors of two digits are
worked as divisions by one digit, one after the other: 15 % of 80 is 80/5/4*3.
"""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from perilune.tasks.more_stories import ASKED
from perilune.tasks.problem import pick
from perilune.tasks.wordings import enumerated, phrase
from perilune.tasks.words import OBJECTS
from perilune.tasks.working import Tokens, labelled, multipliable, solve, solve_trace, subtract_trace

Drawn = tuple[tuple[Any, ...], str, Callable[[], str], str]  # key, question, trace, content

# ---- descriptions ----------------------------------------------------------------------------------------------------

# As a noun phrase, which may stand inside another one; then as a part of a sentence, for the outermost operation.
_WITHIN: Final[dict[str, tuple[str, ...]]] = {  # what is put together from others is last
    "+": ("the sum of {y} and {x}", "the total of {y} and {x}", "the sum of {y} and {x}"),
    "-": ("the difference between {x} and {y}", "the difference of {x} and {y}"),
    "*": ("the product of {y} and {x}", "{y} lots of {x}", "{y} times {x}"),
    "/": ("the quotient of {x} and {y}", "one {y}th of {x}", "the {y}th part of {x}"),
}  # fmt: skip
_OUTER: Final[dict[str, tuple[str, ...]]] = {
    "+": ("{x} plus {y}", "{x} increased by {y}", "{y} more than {x}", "{y} added to {x}", "{x} and another {y}",
        "{x} with {y} on top"),
    "-": ("{x} minus {y}", "{x} reduced by {y}", "{y} less than {x}", "{x} less {y}", "{x} with {y} taken away"),
    "*": ("{x} multiplied by {y}", "{x} times {y}", "{x} taken {y} times"),
    "/": ("{x} divided by {y}", "{x} split into {y} equal parts", "{x} shared by {y}"),
}  # fmt: skip
_AFTER: Final[dict[str, tuple[str, ...]]] = {  # {x} is put together from others
    "+": ("{x}, plus {y}", "{y} more than {x}", "{x}, increased by {y}", "{x}, and {y} on top"),
    "-": ("{x}, minus {y}", "{y} less than {x}", "{x}, reduced by {y}", "{x}, with {y} taken away"),
    "*": ("{x}, multiplied by {y}", "{y} times {x}", "{x}, times {y}"),
    "/": ("{x}, divided by {y}", "{x}, split into {y} equal parts"),
}  # fmt: skip
_BEFORE: Final[dict[str, tuple[str, ...]]] = {  # {y} is
    "+": ("{x} plus {y}", "the sum of {x} and {y}", "{x} increased by {y}"), "-": ("{x} minus {y}",
    "{x} reduced by {y}"),
    "*": ("{x} times {y}", "the product of {x} and {y}"), "/": ("{x} divided by {y}",),
}  # fmt: skip
_SMALL: Final[dict[tuple[str, int], tuple[str, ...]]] = {
    ("*", 2): ("twice {x}", "double {x}", "two times {x}", "the double of {x}"),
    ("*", 3): ("three times {x}", "the triple of {x}", "triple {x}"),
    ("/", 2): ("half of {x}", "one half of {x}", "a half of {x}"), ("/", 3): ("a third of {x}", "one third of {x}"),
    ("/", 4): ("a quarter of {x}", "one quarter of {x}", "a fourth of {x}"),
    ("/", 5): ("a fifth of {x}", "one fifth of {x}"),
}  # fmt: skip
_FRAMES: Final = ("What is {e}?", "How much is {e}?", "Work out {e}.", "Give me {e}.", "I need {e}.", "{e}?", "{e}",
    "Tell me {e}.", "What do I get for {e}?", "Find {e}.", "what's {e}", "Which number is {e}?", "Calculate {e}.",
    "Determine {e}.", "Can you find {e}?", "A number is {e}. Which one is it?", "My number is {e}. Say it in digits.",
    "The puzzle asks for {e}.", "I'm looking for {e}.", "whats {e}?", "{e} is how much?",
    "Let me have {e}.")  # fmt: skip


def described(rng: Random, tree: Any, outer: bool = True) -> str:
    """A number, or (operator, tree, tree), in words."""
    if isinstance(tree, int):
        return str(tree)
    sign, x, y = tree
    forms = _OUTER[sign] if outer and rng.random() < 0.6 else _WITHIN[sign]
    if not isinstance(x, int):
        forms = _AFTER[sign]
    elif not isinstance(y, int):
        forms = _BEFORE[sign]
    if isinstance(y, int) and (sign, y) in _SMALL and rng.random() < 0.7:
        forms = _SMALL[sign, y]
    elif sign == "/" and y in (2, 3):
        forms = _AFTER[sign] if not isinstance(x, int) else _OUTER[sign] if outer else _WITHIN[sign][:1]
    return pick(rng, forms).format(x=described(rng, x, False), y=described(rng, y, False))


def in_words_of(rng: Random, pattern: str, numbers: dict[str, int]) -> str:
    """A pattern of arithmetic.py as a described expression in a question; "" if it has more than two operations."""
    tree: Any
    plain = pattern.replace("(", "").replace(")", "")
    if len(plain) == 3:
        tree = (plain[1], numbers[plain[0]], numbers[plain[2]])
    elif len(plain) == 5:
        a, first, b, second, c = list(plain)
        left = pattern[0] == "(" or (pattern[2] != "(" and not (first in "+-" and second in "*/"))
        if left:
            tree = (second, (first, numbers[a], numbers[b]), numbers[c])
        else:
            tree = (first, numbers[a], (second, numbers[b], numbers[c]))
    else:
        return ""
    return phrase(rng, pick(rng, _FRAMES)).format(e=described(rng, tree))


# ---- letters, squares, parts -----------------------------------------------------------------------------------------

_LET: Final = ("If {v} = {a}, what is {e}?", "Let {v} be {a}. Compute {e}.", "{v} is {a}. What is {e}?",
    "{e} for {v} = {a}?",
    "Given {v}={a}, find {e}.", "What is {e} when {v} equals {a}?", "Suppose {v} is {a}. How much is {e}?",
    "For {v} = {a}, work out {e}.", "Put {a} for {v} in {e}.", "{v} stands for {a}, so {e} is?")  # fmt: skip


def letter(rng: Random) -> Drawn:
    """An expression with a letter, and its value."""
    while True:
        v, a, k = pick(rng, "xnyakmpt"), 2 + int(rng.random() * 60), 2 + int(rng.random() * 8)
        b = 1 + int(rng.random() * pick(rng, (10, 100)))
        made: tuple[tuple[str, Tokens], ...] = (
            (f"{k}{v} - {b}", [k, "*", a, "-", b]), (f"{k}{v} + {b}", [k, "*", a, "+", b]), (f"{k}*{v}", [k, "*", a]),
            (f"{v} + {b}", [a, "+", b]), (f"{b} - {v}", [b, "-", a]), (f"{k}{v}", [k, "*", a]), (f"{v} - {b}", [a, "-",
                b]),
            (f"{k}({v} + {b})", [k, "*", "(", a, "+", b, ")"]), (f"{b} + {k}{v}", [b, "+", k, "*", a]),
        )  # fmt: skip
        shown, tokens = pick(rng, made)
        if (solved := solve(list(tokens))) is not None:
            break
    value, steps = solved
    question = phrase(rng, pick(rng, _LET)).format(v=v, a=a, e=shown)
    tight = "".join(map(str, tokens))
    return ("expression", tight), question, lambda: solve_trace(steps), f"{tight} = {value}"


_SQUARE: Final = ("{a} squared", "What is {a} squared?", "the square of {a}", "{a}^2", "{a} to the power of 2",
    "What's {a}²?",
    "Square {a}.", "{a} times itself", "What is {a} multiplied by itself?",
    "How much is the square of {a}?")  # fmt: skip


def square(rng: Random) -> Drawn:
    while True:
        a = 2 + int(rng.random() * pick(rng, (11, 30, 98)))
        if multipliable(a, a):
            break
    solved = solve([a, "*", a])
    assert solved
    return (
        ("expression", f"{a}*{a}"),
        phrase(rng, pick(rng, _SQUARE + ASKED["a^2"])).format(a=a),
        lambda: solve_trace(solved[1]),
        f"{a} * {a} = {a * a}",
    )


def power(rng: Random) -> Drawn:
    """A third or a higher power of a small number."""
    a, n = pick(rng, ((2, 3), (2, 4), (2, 5), (2, 6), (3, 3), (3, 4), (4, 3), (5, 3), (6, 3), (7, 3), (8, 3), (9, 3)))
    tokens: Tokens = [a]
    for _ in range(n - 1):
        tokens += ["*", a]
    solved = solve(tokens)
    assert solved
    tight = "".join(map(str, tokens))
    question = phrase(rng, pick(rng, ASKED["a^3" if n == 3 and rng.random() < 0.5 else "a^n"])).format(a=a, n=n)
    return ("expression", tight), question, lambda: solve_trace(solved[1]), f"{a}^{n} = {solved[0]}"


_PERCENT: Final = {50: "/2", 25: "/4", 20: "/5", 75: "/4*3", 40: "/5*2", 60: "/5*3", 80: "/5*4", 10: "/5/2",
    30: "/5/2*3",
    5: "/5/4", 15: "/5/4*3", 90: "/5/2*9", 70: "/5/2*7"}  # fmt: skip
_PARTS: Final = {"two thirds": "/3*2", "three quarters": "/4*3", "two fifths": "/5*2", "three fifths": "/5*3",
    "a third": "/3", "a quarter": "/4", "half": "/2", "a fifth": "/5", "one sixth": "/6", "an eighth": "/8",
    "1/2": "/2",
    "3/4": "/4*3", "1/3": "/3", "2/3": "/3*2", "1/4": "/4", "one tenth": "/5/2", "four fifths": "/5*4"}  # fmt: skip
_PART_FORMS: Final = ("What is {p} of {n}?", "{p} of {n}", "{p} of {n}?", "How much is {p} of {n}?",
    "Calculate {p} of {n}.",
    "Find {p} of {n}.", "I need {p} of {n}.", "what's {p} of {n}", "Of {n} {o}, {p} are sold. How many is that?",
    "If {p} of {n} {o} are broken, how many are broken?", "{p} out of {n} people came. How many came?",
    "A jar of {n} {o} is {p} red. How many are red?", "We keep {p} of our {n} {o}. How many do we keep?",
    "Tell me {p} of {n} euros.", "The price is {n}. What is {p} of it?")  # fmt: skip


def part(rng: Random) -> Drawn:
    """A fraction or a percentage of a number, without a rest."""
    while True:
        if rng.random() < 0.55:
            percent = pick(rng, tuple(_PERCENT))
            shown = pick(rng, ("{}%", "{} %", "{} percent", "{} per cent")).format(percent)
            work = _PERCENT[percent]
        else:
            shown, work = pick(rng, tuple(_PARTS.items()))
        whole = 1
        for factor in work.split("*")[0].split("/")[1:]:
            whole *= int(factor)
        n = whole * (1 + int(rng.random() * pick(rng, (10, 30, 100))))
        tokens: list[int | str] = [n, *[int(c) if c.isdigit() else c for c in work]]
        change = pick(rng, "++--****************") if "/" in work and shown[0].isdigit() and shown[1] != "/" else "*"
        tokens = tokens if change == "*" else [n, change, *tokens]
        if (solved := solve(tokens)) is not None:
            break
    value, steps = solved
    if change == "*":
        question = phrase(rng, pick(rng, _PART_FORMS + ASKED["p*n"])).format(p=shown, n=n, o=pick(rng, OBJECTS))
        return ("part", shown, n), question, lambda: f"{shown} of {n}\n{solve_trace(steps)}", str(value)
    question = phrase(rng, pick(rng, ASKED[f"n{change}p"])).format(p=shown, n=n)
    head = f"{n}{change}{shown} of {n}"
    return ("changed", change + shown, n), question, lambda: f"{head}\n{solve_trace(steps)}", str(value)


# ---- averages, remainders, larger divisors ---------------------------------------------------------------------------

_AVERAGE: Final = ("What is the average of {x}?", "average of {x}", "Find the mean of {x}.", "The mean of {x}?",
    "What do {x} average to?", "My marks are {x}. What is my average?", "Average: {x}", "Compute the average of {x}.",
    "What's the mean value of {x}?", "We sold {x} {o}. What is the average?",
    "The temperatures were {x}. What was the average?")  # fmt: skip


def average(rng: Random) -> Drawn:
    count = pick(rng, (2, 3, 3, 4, 5))
    while True:
        found = [1 + int(rng.random() * pick(rng, (20, 60, 99))) for _ in range(count)]
        found[-1] += -sum(found) % count
        tokens: list[int | str] = [found[0]]
        for n in found[1:]:
            tokens += ["+", n]
        total = solve(tokens)
        if total and (shared := solve([total[0], "/", count])):
            break
    listed = enumerated(list(map(str, found)), pick(rng, (" and ", ", ")))
    question = phrase(rng, pick(rng, _AVERAGE + ASKED["/x"])).format(x=listed, o=pick(rng, OBJECTS))
    steps = [*total[1], *shared[1]]
    return ("average", *found), question, lambda: solve_trace(steps), str(shared[0])


_REST: Final = ("What is the remainder of {a} divided by {k}?", "{a} mod {k}", "{a} % {k}", "{a} modulo {k}?",
    "What remains when {a} is divided by {k}?", "Divide {a} by {k}. What is left over?", "remainder of {a} / {k}",
    "{a} {o} are packed in boxes of {k}. How many are left over?",
    "If {k} children share {a} {o} evenly, how many remain?",
    "How many {o} are left over when {a} are put into groups of {k}?", "What is the rest of {a} : {k}?")  # fmt: skip
_WHOLE: Final = ("How many times does {k} fit into {a}?", "How often does {k} go into {a}?",
    "How often does {k} fit into {a}?",
    "What is {a} divided by {k}?", "{a} / {k}", "{a} ÷ {k}", "Divide {a} by {k}.", "Split {a} evenly in {k}.",
    "{a} split {k} ways?", "Share {a} equally among {k}.", "{a} {o} in packs of {k}: how many packs?",
    "How many {k}s are in {a}?", "If I deal {a} cards to {k} people, how many does each get?")  # fmt: skip
_FACTORS: Final = {12: (3, 4), 15: (3, 5), 14: (2, 7), 16: (4, 4), 18: (3, 6), 20: (4, 5), 24: (4, 6), 25: (5, 5),
    30: (5, 6), 40: (5, 8), 36: (6, 6), 10: (2, 5)}  # fmt: skip


def remainder(rng: Random) -> Drawn:
    a, k = 3 + int(rng.random() * pick(rng, (30, 100, 1000))), 2 + int(rng.random() * 8)
    rest, lines = 0, [f"{a}%{k}", labelled(a)]
    for digit in str(a):
        whole = 10 * rest + int(digit)
        rest = whole % k
        lines.append(f"{whole}/{k}={whole // k}r{rest}")
    question = phrase(rng, pick(rng, _REST + ASKED["a%k"])).format(a=a, k=k, o=pick(rng, OBJECTS))
    return ("rest", a, k), question, lambda: "\n".join(lines), str(rest)


def shared(rng: Random) -> Drawn:
    """A quotient, also by two digits that are a product of two."""
    k = pick(rng, tuple(_FACTORS)) if rng.random() < 0.5 else 2 + int(rng.random() * 8)
    a = k * (2 + int(rng.random() * pick(rng, (12, 40))))
    first, second = _FACTORS.get(k, (k, 1))
    solved = solve([a, "/", first] if second == 1 else [a, "/", first, "/", second])
    assert solved
    head = "" if second == 1 else f"{a}/{k}\n"
    question = phrase(rng, pick(rng, _WHOLE)).format(a=a, k=k, o=pick(rng, OBJECTS))
    return ("expression", f"{a}/{k}"), question, lambda: head + solve_trace(solved[1]), f"{a} / {k} = {a // k}"


_MORE: Final = (("bigger", "larger", "more", "greater", "higher"), ("smaller", "less", "lower", "below"))
_YES_NO: Final = ("Is {a} {w} than {b}? yes or no", "Is {a} {w} than {b}, yes or no?",
    "Yes or no: {a} is {w} than {b}.",
    "True or false, in one word yes or no: {a} is {w} than {b}", "is {a} {w} than {b}? Answer yes or no.",
    "Would you say {a} is {w} than {b}? yes/no")  # fmt: skip


def whether(rng: Random) -> Drawn:
    """Whether one number is larger or smaller than another one: yes or no."""
    a = 10 + int(rng.random() * pick(rng, (90, 990, 9990)))
    b = max(1, a + pick(rng, (-1, 1)) * (1 + int(rng.random() * pick(rng, (9, 90, a)))))
    if rng.random() < 0.3:
        b = int(str(a)[::-1]) if str(a)[::-1] != str(a) else a + 9
    up = rng.random() < 0.5
    word = pick(rng, _MORE[0 if up else 1])
    form = pick(rng, _YES_NO).replace("{w} than", "below" if word == "below" else f"{word} than")
    answer = "yes" if (a > b if up else a < b) else "no"
    lines = [labelled(a), labelled(b), f"{a}{'>' if a > b else '<'}{b}"]
    question = phrase(rng, form, asking=0.0).format(a=a, b=b)
    return ("whether", up, a, b), question, lambda: "\n".join(lines), answer


def ahead(rng: Random) -> Drawn:
    """Which of two numbers is the larger one, and by how much."""
    a = 10 + int(rng.random() * pick(rng, (90, 990)))
    b = max(10, min(999, a + pick(rng, (-1, 1)) * (1 + int(rng.random() * pick(rng, (9, 90, 500))))))
    b -= a == b
    best, least = max(a, b), min(a, b)
    lines = [labelled(a), labelled(b), f"{a}{'>' if a > b else '<'}{b}"]
    question = phrase(rng, pick(rng, ASKED["a?b"])).format(a=a, b=b)
    lines.append(subtract_trace(best, least))
    return ("ahead", a, b), question, lambda: "\n".join(lines), f"{best}, by {best - least}"


_ORDER: Final = ("Put {x} in order from {f} to {l}.", "Order {x}, {f} first.", "Sort {x} from {f} to {l}.",
    "Write {x} from {f} to {l}.", "Arrange {x}: {f} to {l}.", "{x} - in order please, {f} first",
    "List {x} with the {f} first.", "Which order do {x} go in, {f} to {l}?")  # fmt: skip


def ordered(rng: Random) -> Drawn:
    """A few numbers in order; the trace takes the best of what is left at each step."""
    found = list(dict.fromkeys([10 + int(rng.random() * pick(rng, (90, 990))) for _ in range(pick(rng, (3, 3, 4)))]))
    down = rng.random() < 0.4
    names = pick(rng, (("smallest", "largest"), ("lowest", "highest"), ("small", "large"), ("least", "greatest")))
    first, last = names[::-1] if down else names
    left, lines = list(found), []
    for best in sorted(found, reverse=down):
        lines.append(f"{','.join(map(str, left))}:{best}")
        left.remove(best)
    shown = enumerated(list(map(str, found)), pick(rng, (" and ", ", ")))
    form = phrase(rng, pick(rng, _ORDER[:5] if names[0] == "small" else _ORDER))
    answer = ", ".join(map(str, sorted(found, reverse=down)))
    return ("order", down, *found), form.format(x=shown, f=first, l=last), lambda: "\n".join(lines), answer


def more(rng: Random) -> Drawn:
    """One of the above."""
    kinds = (letter, letter, square, power, part, part, part, part, average, average, remainder, shared, shared, ahead)
    return pick(rng, kinds)(rng)
