"""Whole-number expressions described in words, and what people ask besides: parts, percent, averages, remainders.

An expression is described from the inside out ("half of the sum of 12 and 30"), so that words and order vary for every
part of it. Percentages are worked as divisions by one digit, one after the other: 15 % of 80 is 80/5/4*3.
"""

import ast
import re
from collections.abc import Callable
from random import Random
from typing import Any, Final

from perilune.tasks.forms import FORMS
from perilune.tasks.more_stories import ASKED
from perilune.tasks.problem import pick
from perilune.tasks.wordings import enumerated, expand, phrase
from perilune.tasks.words import OBJECTS
from perilune.tasks.working import (
    DIVISORS,
    divide_trace,
    labelled,
    multipliable,
    multiply_trace,
    solve,
    solve_trace,
    subtract_trace,
)

Drawn = tuple[tuple[Any, ...], str, Callable[[], str], str]  # key, question, trace, content

# ---- descriptions ----------------------------------------------------------------------------------------------------


def described(rng: Random, tree: Any, outer: bool = True) -> str:
    """A number, or (operator, tree, tree), in words."""
    if isinstance(tree, int):
        return str(tree)
    sign, x, y = tree
    forms = FORMS[("outer" if outer and rng.random() < 0.6 else "within") + sign]
    if isinstance(x, tuple) and isinstance(y, tuple):
        forms = FORMS["both" + sign]
    elif not isinstance(x, int):
        forms = FORMS["after" + sign]
    elif not isinstance(y, int):
        forms = FORMS["before" + sign]
    if isinstance(y, int) and f"{sign}{y}" in FORMS and rng.random() < 0.7:
        forms = FORMS[f"{sign}{y}"]
    elif sign == "/" and isinstance(y, int) and y not in range(4, 10):
        forms = FORMS["after/"] if isinstance(x, tuple) else FORMS["outer/"] if outer else FORMS["within/"][:1]
    return pick(rng, forms).format(x=described(rng, x, False), y=described(rng, y, False))


def _tree(node: ast.AST, numbers: dict[str, int]) -> Any:
    if isinstance(node, ast.BinOp):
        sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(node.op)]
        return sign, _tree(node.left, numbers), _tree(node.right, numbers)
    return numbers[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)


def in_words_of(rng: Random, pattern: str, numbers: dict[str, int]) -> str:
    """A pattern of arithmetic.py as a described expression in a question; "" if it has three operations in a row."""
    tree = _tree(ast.parse(pattern, mode="eval").body, numbers)
    both = all(isinstance(part, tuple) for part in tree[1:])
    if len(re.findall(r"[-+*/]", pattern)) > 2 + both or (tree[0] == "/" and isinstance(tree[2], tuple)):
        return ""
    return phrase(rng, pick(rng, FORMS["asked"])).format(e=described(rng, tree))


# ---- squares, parts -----------------------------------------------------------------------------------------


def square(rng: Random) -> Drawn:
    while True:
        a = 2 + int(rng.random() * pick(rng, (11, 30, 98)))
        if multipliable(a, a):
            break
    solved = solve([a, "*", a])
    assert solved
    return (
        ("expression", f"{a}*{a}"),
        phrase(rng, pick(rng, FORMS["square"] + ASKED["a^2"])).format(a=a),
        lambda: solve_trace(solved[1]),
        f"{a} * {a} = {a * a}",
    )


def power(rng: Random) -> Drawn:
    """A third or a higher power of a small number, or the product of the numbers up to it."""
    a, n = pick(rng, ((2, 3), (2, 4), (2, 5), (2, 6), (3, 3), (3, 4), (4, 3), (5, 3), (6, 3), (7, 3), (8, 3), (9, 3)))
    form, shown, factors = pick(rng, ASKED["a^3" if n == 3 and rng.random() < 0.5 else "a^n"]), f"{a}^{n}", [a] * n
    if 2 < a < 8 and rng.random() < 0.3:
        form, shown, factors = pick(rng, FORMS["!"]), f"{a}!", [*range(a, 1, -1)]
    tight = "*".join(map(str, factors))
    solved = solve([t if t == "*" else int(t) for t in re.findall(r"\d+|\*", tight)])
    assert solved
    question = phrase(rng, form).format(a=a, n=n)
    return ("expression", tight), question, lambda: solve_trace(solved[1]), f"{shown} = {solved[0]}"


def root(rng: Random) -> Drawn:
    """The square root of a square, tried by multiplying."""
    n = 2 + int(rng.random() * 19)
    question = phrase(rng, pick(rng, FORMS["root"])).format(n=n * n)
    return ("root", str(n)), question, lambda: f"{multiply_trace(n, n)}\n={n}", str(n)


_PERCENT: Final = {50: "/2", 25: "/4", 20: "/5", 75: "/4*3", 40: "/5*2", 60: "/5*3", 80: "/5*4", 10: "/5/2",
    30: "/5/2*3",
    5: "/5/4", 15: "/5/4*3", 90: "/5/2*9", 70: "/5/2*7"}  # fmt: skip
_PARTS: Final = {"two thirds": "/3*2", "three quarters": "/4*3", "two fifths": "/5*2", "three fifths": "/5*3",
    "a third": "/3", "a quarter": "/4", "half": "/2", "a fifth": "/5", "one sixth": "/6", "an eighth": "/8",
    "1/2": "/2",
    "3/4": "/4*3", "1/3": "/3", "2/3": "/3*2", "1/4": "/4", "one tenth": "/5/2", "four fifths": "/5*4"}  # fmt: skip


def part(rng: Random) -> Drawn:
    """A fraction or a percentage of a number, a whole number."""
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
        question = phrase(rng, pick(rng, FORMS["part"] + ASKED["p*n"])).format(p=shown, n=n, o=pick(rng, OBJECTS))
        return ("part", shown, n), question, lambda: f"{shown} of {n}\n{solve_trace(steps)}", str(value)
    question = phrase(rng, pick(rng, ASKED[f"n{change}p"])).format(p=shown, n=n)
    head = f"{n}{change}{shown} of {n}"
    return ("changed", change + shown, n), question, lambda: f"{head}\n{solve_trace(steps)}", str(value)


# ---- averages, remainders, larger divisors ---------------------------------------------------------------------------


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
    question = phrase(rng, pick(rng, FORMS["average"] + ASKED["/x"])).format(x=listed, o=pick(rng, OBJECTS))
    steps = [*total[1], *shared[1]]
    return ("average", *found), question, lambda: solve_trace(steps), str(shared[0])


def remainder(rng: Random) -> Drawn:
    a, k = 3 + int(rng.random() * pick(rng, (30, 100, 1000))), 2 + int(rng.random() * 8)
    rest, lines = 0, [f"{a}%{k}", labelled(a)]
    for digit in str(a):
        whole = 10 * rest + int(digit)
        rest = whole % k
        lines.append(f"{whole}/{k}={whole // k}r{rest}")
    question = phrase(rng, pick(rng, FORMS["rest"] + ASKED["a%k"])).format(a=a, k=k, o=pick(rng, OBJECTS))
    return ("rest", a, k), question, lambda: "\n".join(lines), str(rest)


def shared(rng: Random) -> Drawn:
    """A quotient; the divisor has one or two digits."""
    k = pick(rng, pick(rng, ((10, 12, 14, 15, 16, 18, 20, 24, 25), DIVISORS, range(2, 10), range(2, 10))))
    a = k * (2 + int(rng.random() * pick(rng, (12, 40))))
    question = phrase(rng, pick(rng, FORMS["whole"])).format(a=a, k=k, o=pick(rng, OBJECTS))
    return ("expression", f"{a}/{k}"), question, lambda: divide_trace(a, k), f"{a} / {k} = {a // k}"


_MORE: Final = (("bigger", "larger", "more", "greater", "higher"), ("smaller", "less", "lower", "below"))


def whether(rng: Random) -> Drawn:
    """Whether one number is larger or smaller than another one: yes or no."""
    a = 10 + int(rng.random() * pick(rng, (90, 990, 9990)))
    b = max(1, a + pick(rng, (-1, 1)) * (1 + int(rng.random() * pick(rng, (9, 90, a)))))
    if rng.random() < 0.3:
        b = int(str(a)[::-1]) if str(a)[::-1] != str(a) else a + 9
    up = rng.random() < 0.5
    word = pick(rng, _MORE[0 if up else 1])
    form = pick(rng, FORMS["whether"]).replace("{w} than", "below" if word == "below" else f"{word} than")
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
    form = phrase(rng, pick(rng, FORMS["order"][: 5 if names[0] == "small" else 8]))
    answer = ", ".join(map(str, sorted(found, reverse=down)))
    return ("order", down, *found), form.format(x=shown, f=first, l=last), lambda: "\n".join(lines), answer


def more(rng: Random) -> Drawn:
    kinds = (square, root, power, power, part, part, part, part, average, average, remainder, shared, shared, ahead)
    return pick(rng, kinds)(rng)


# ---- for training only -----------------------------------------------------------------------------------------------

_ERRORS: Final = ("an error", "an error", "#REF!", "#VALUE!", "####", "a question mark", "zero", "nothing", "N/A")
_BEGINS: Final = re.compile(r"(?:^|(?<=[.?!:] ))[a-z]")


def asked_from(rng: Random, kind: str, kept: tuple[str, ...] = ()) -> str:
    """A form of this kind, put together; most sentences begin with a capital."""
    form = expand(rng, FORMS, pick(rng, FORMS[kind])).replace(" ,", ",").replace(".?", "?").replace("~", "\n")
    form = _BEGINS.sub(lambda m: m[0].upper(), form) if rng.random() < 0.8 else form
    return phrase(rng, form, kept, asking=0.1)


def column(rng: Random) -> Drawn:
    """The sum of three to five numbers of a table in which the sum is missing or wrong."""
    solved = None
    while solved is None:
        top, step = pick(rng, ((40, 1), (100, 1), (100, 5), (1000, 5), (1000, 25), (1000, 1), (3000, 50)))
        found = [step * (1 + int(rng.random() * (top // step))) for _ in range(pick(rng, (3, 3, 4, 4, 4, 5)))]
        tokens = [t for n in found for t in (n, "+")][:-1]
        solved = solve(tokens)
    listed = enumerated(list(map(str, found)), pick(rng, (" and ", " and ", ", ")))
    question = asked_from(rng, "col").format(x=listed, err=pick(rng, _ERRORS))
    shown, (value, steps) = " ".join(map(str, tokens)), solved
    return ("expression", shown.replace(" ", "")), question, lambda: solve_trace(steps), f"{shown} = {value}"


_PRIMES: Final = (11, 13, 17, 19, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def divided(rng: Random) -> Drawn:
    """A quotient without remainder; the divisor has two digits and is mostly a prime."""
    k = pick(rng, _PRIMES if rng.random() < 0.7 else DIVISORS)
    a = k * (2 + int(rng.random() * pick(rng, (10, 40, 98))))
    question = asked_from(rng, "dv").format(a=a, k=k, o=pick(rng, OBJECTS))
    return ("expression", f"{a}/{k}"), question, lambda: divide_trace(a, k), f"{a} / {k} = {a // k}"


def restated(rng: Random, sign: str, form: str) -> str:
    """A form of a question about {a} and {b} (or {k}) behind a sentence that holds the same numbers, and at times a
    number that has nothing to do with them; some questions leave the numbers out."""
    before = expand(rng, FORMS, pick(rng, FORMS[f"rs{sign}"]))
    if rng.random() < 0.25 and "{a}" in before:
        form = pick(rng, FORMS[f"rs_a{sign}"])
    elif form[-1] in ".?" and form[-2] not in " .":
        form = form[:-1] + expand(rng, FORMS, pick(rng, FORMS["rs_e"])) + form[-1]
    if before.rstrip()[-1] in ".?!":
        form = form[:1].upper() + form[1:]
    elif form[:1].isalpha() and form[:2] not in ("I ", "I'"):
        form = form[:1].lower() + form[1:]
    before = before[:1].upper() + before[1:] if rng.random() < 0.7 else before
    made = before + form
    return re.sub(r"\{([ro])\}", lambda m: pick(rng, OBJECTS) if m[1] == "o" else str(1 + int(rng.random() * 99)), made)
