"""Whole numbers: the families `add_sub` and `arithmetic`, and the traces every other family computes with.

A trace is a sequence of lines, each of which follows from one or two earlier ones by a look-up, never by counting.
Digits get their place as a letter (a the ones, b the tens, ...), so that a column is found by its letter whatever the
operands' lengths; a place that an operand lacks counts as 0. Columns run from the right:

    3471+589        the operation, copied          523-178          789*6
    d3c4b7a1        the operands, place by place   c5b2a3           c7b8a9
    c5b8a9                                         c1b7a8           a9*6+0=54
    a1+9+0=10       digit+digit+carry, two digits  5>1              b8*6+5=53
    b7+8+1=16                                      a3-8-0=-5+10=5   c7*6+5=47
    c4+5+1=10                                      b2-7-1=-6+10=4   d4c7b3a4
    d3+0+1=04                                      c5-1-1=3         =4734
    d4c0b6a0        the result, place by place     c3b4a5
    =4060                                          =345

Subtraction first compares (by the highest places `d>c`, else digit by digit `5=5,2<7`); if the first number is the
smaller one, the numbers are swapped and the result is negative. The letters stand alone between digits and newlines,
where the tokenizer cannot merge them with anything.

Structure: training never shows a sum or difference of a 3-digit and a 4-digit number, in whatever family, nor the
wordings in `NEW_*`. Half of the structural problems have such lengths, the other half such a wording.
"""

import re
from collections.abc import Callable
from random import Random
from typing import Any, Final

from perilune.tasks.problem import Answer, Problem, Reply, partition, pick, user

Tokens = list[int | str]  # an expression: numbers, "+", "-", "*", "(" and ")"
Step = tuple[str, int, int, str]  # operator, operands, and the whole expression in which it is the next step

PLACES: Final = "abcdefghij"
_UNSEEN_LENGTHS: Final = (3, 4)


def labelled(number: int | str) -> str:
    """1234 -> d1c2b3a4; zeros at the front of a string are kept."""
    digits = str(number)
    top = len(digits) - 1
    return "".join([PLACES[top - i] + digit for i, digit in enumerate(digits)])


def add_trace(a: int, b: int) -> str:
    x, y = str(a)[::-1], str(b)[::-1]
    width, carry, lines = max(len(x), len(y)), 0, [f"{a}+{b}", labelled(a), labelled(b)]
    for place, p, q in zip(PLACES, x.ljust(width, "0"), y.ljust(width, "0")):
        total = int(p) + int(q) + carry
        lines.append(f"{place}{p}+{q}+{carry}={total:02d}")
        carry = total // 10
    return "\n".join([*lines, labelled(a + b), f"={a + b}"])


def comparison_line(a: int, b: int) -> str:
    x, y = str(a), str(b)
    if len(x) != len(y):
        return f"{PLACES[len(x) - 1]}{'>' if len(x) > len(y) else '<'}{PLACES[len(y) - 1]}"
    parts = []
    for p, q in zip(x, y):
        parts.append(f"{p}{'=' if p == q else '<' if p < q else '>'}{q}")
        if p != q:
            break
    return ",".join(parts)


def subtract_trace(a: int, b: int) -> str:
    lines, sign = [f"{a}-{b}", labelled(a), labelled(b), comparison_line(a, b)], ""
    if a < b:
        a, b, sign = b, a, "-"
        lines += [f"{a}-{b}", labelled(a), labelled(b)]
    x, borrow = str(a)[::-1], 0
    for place, p, q in zip(PLACES, x, str(b)[::-1].ljust(len(x), "0")):
        rest = int(p) - int(q) - borrow
        lines.append(f"{place}{p}-{q}-{borrow}={rest}{f'+10={rest + 10}' if rest < 0 else ''}")
        borrow = int(rest < 0)
    return "\n".join([*lines, labelled(str(a - b).zfill(len(x))), f"={sign}{a - b}"])


def multiply_trace(a: int, k: int) -> str:
    """k: one digit, one digit and zeros, or two digits (then two partial products are added)."""
    if k < 10:
        lines, carry = [f"{a}*{k}", labelled(a)], 0
        for place, p in zip(PLACES, str(a)[::-1]):
            total = int(p) * k + carry
            lines.append(f"{place}{p}*{k}+{carry}={total:02d}")
            carry = total // 10
        return "\n".join([*lines, labelled(a * k), f"={a * k}"])
    head, zeros = str(k).rstrip("0"), len(str(k)) - len(str(k).rstrip("0"))
    if head == "1":
        return f"{a}*{k}\n={a * k}"
    if len(head) == 1:
        return f"{a}*{k}\n{multiply_trace(a, int(head))}\n{a * int(head)}*{10**zeros}\n={a * k}"
    tens, ones = k // 10 * 10, k % 10
    parts = f"{multiply_trace(a, tens)}\n{multiply_trace(a, ones)}"
    return f"{a}*{k}\n{parts}\n{add_trace(a * tens, a * ones)}"


_TRACES: Final[dict[str, Callable[[int, int], str]]] = {
    "+": add_trace,
    "-": subtract_trace,
    "*": multiply_trace,
}
_RESULTS: Final[dict[str, Callable[[int, int], int]]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def unseen_lengths(a: int, b: int) -> bool:
    return tuple(sorted((len(str(a)), len(str(b))))) == _UNSEEN_LENGTHS


def solve(tokens: Tokens) -> tuple[int, list[Step]] | None:
    """The value and the steps: parentheses, then `*`, then from the left.

    None if a step would be negative or too long, or would add or subtract numbers of the lengths kept from training.
    """
    steps: list[Step] = []
    rest = list(tokens)
    while len(rest) > 1:
        if "(" in rest:
            at, size = rest.index("("), 5
            left, operator, right = rest[at + 1 : at + 4]
        else:
            at, size = (rest.index("*") if "*" in rest else 1) - 1, 3
            left, operator, right = rest[at : at + 3]
        assert isinstance(left, int) and isinstance(right, int) and isinstance(operator, str)
        value = _RESULTS[operator](left, right)
        if not 0 <= value < 100_000 or (operator != "*" and unseen_lengths(left, right)):
            return None
        steps.append((operator, left, right, "".join(map(str, rest))))
        rest[at : at + size] = [value]
    assert isinstance(rest[0], int)
    return rest[0], steps


def solve_trace(steps: list[Step]) -> str:
    """Each step's work under the expression it is taken from (which is left out where it is the step itself)."""
    blocks = []
    for operator, left, right, whole in steps:
        block = _TRACES[operator](left, right)
        blocks.append(block if whole == f"{left}{operator}{right}" else f"{whole}\n{block}")
    return "\n".join(blocks)


# ---- add_sub -----------------------------------------------------------------------------------------------------

ADD_FORMS: Final = (
    "What is {a} + {b}?", "What is {a}+{b}?", "{a} + {b}", "{a}+{b}=", "{a} + {b} = ?", "{a}+{b}", "{a} + {b} =",
    "Add {a} and {b}.", "Add {a} to {b}.", "Compute {a} + {b}.", "Calculate {a} + {b}.", "Work out {a} + {b}.",
    "What is the sum of {a} and {b}?", "How much is {a} plus {b}?", "What is {a} plus {b}?", "Please add {a} and {b}.",
    "What's {a} + {b}?", "Can you add {a} and {b}?", "Find the sum of {a} and {b}.", "Evaluate {a} + {b}.",
    "What do you get if you add {a} and {b}?", "{a} plus {b}", "sum of {a} and {b}", "Tell me {a} + {b}.",
    "How much do {a} and {b} make?", "Give me the sum of {a} and {b}.", "I need {a} + {b}.", "Solve {a} + {b}.",
)  # fmt: skip
SUBTRACT_FORMS: Final = (
    "What is {a} - {b}?", "What is {a}-{b}?", "{a} - {b}", "{a}-{b}=", "{a} - {b} = ?", "{a}-{b}", "{a} - {b} =",
    "Subtract {b} from {a}.", "Compute {a} - {b}.", "Calculate {a} - {b}.", "Work out {a} - {b}.",
    "How much is {a} minus {b}?", "What is {a} minus {b}?", "What's {a} - {b}?", "Take {b} away from {a}.",
    "What is the difference of {a} and {b}?", "Evaluate {a} - {b}.", "{a} minus {b}", "Tell me {a} - {b}.",
    "What is left of {a} if you take away {b}?", "Please subtract {b} from {a}.", "I need {a} - {b}.",
    "Can you subtract {b} from {a}?", "Find the difference of {a} and {b}.", "Solve {a} - {b}.",
)  # fmt: skip
NEW_ADD_FORMS: Final = (
    "Please tell me what {a} + {b} is.", "Find {a} plus {b}.", "What number is {a} + {b}?", "The sum of {a} and {b}?",
    "Can you compute {a} plus {b}?", "I want to know {a} + {b}.",
)  # fmt: skip
NEW_SUBTRACT_FORMS: Final = (
    "Please tell me what {a} - {b} is.", "Find {a} minus {b}.", "What number is {a} - {b}?",
    "Can you compute {a} minus {b}?", "I want to know {a} - {b}.", "Please take {b} away from {a}.",
)  # fmt: skip

_LENGTHS: Final = (
    *[(3, 3)] * 14, *[(4, 4)] * 16, *[(2, 2)] * 8, *[(5, 5)] * 7, *[(4, 2)] * 7, *[(2, 4)] * 5, *[(3, 2)] * 7,
    *[(2, 3)] * 5, *[(5, 3)] * 5, *[(3, 5)] * 4, *[(5, 4)] * 6, *[(4, 5)] * 5, *[(5, 2)] * 3, *[(2, 5)] * 2,
    *[(1, 2)] * 2, *[(2, 1)] * 2, *[(3, 1)] * 2, *[(4, 1)] * 2, *[(1, 1)] * 2, *[(1, 3)] * 1, *[(1, 4)] * 1,
)  # fmt: skip
_EXAMINED: Final = ((3, 3), (4, 4), (3, 3), (4, 4), (4, 4))
_EXAMINED_UNSEEN: Final = ((4, 3), (4, 3), (3, 4))


def number(rng: Random, digits: int) -> int:
    low = 10 ** (digits - 1) if digits > 1 else 0
    return low + int(rng.random() * (10**digits - low))


def spelling(rng: Random, text: str) -> str:
    """Now and then as careless people write: no capital, no full stop."""
    roll = rng.random()
    if roll < 0.1:
        text = text[0].lower() + text[1:]
    if roll > 0.92 and text[-1] in "?.":
        text = text[:-1]
    return text


def sample_add_sub(rng: Random, split: str, thinking: bool) -> Problem:
    while True:
        new_lengths = split == "structural" and rng.random() < 0.5
        lengths = _LENGTHS if split == "train" else _EXAMINED_UNSEEN if new_lengths else _EXAMINED
        first, second = pick(rng, lengths)
        a, b, plus = number(rng, first), number(rng, second), rng.random() < 0.5
        if not plus and a < b and rng.random() < 0.85:
            a, b = b, a
        key = ("+", min(a, b), max(a, b)) if plus else ("-", a, b)
        if partition(key) == split:
            break
    if split == "structural" and not new_lengths:
        form = pick(rng, NEW_ADD_FORMS if plus else NEW_SUBTRACT_FORMS)
    else:
        form = pick(rng, ADD_FORMS if plus else SUBTRACT_FORMS)
    question = spelling(rng, form.format(a=a, b=b))
    reasoning = (add_trace if plus else subtract_trace)(a, b) if thinking else ""
    content = f"{a} {'+' if plus else '-'} {b} = {a + b if plus else a - b}"
    return Problem("add_sub", split, key, (user(question),), Reply(reasoning, content), thinking=thinking)


# ---- arithmetic --------------------------------------------------------------------------------------------------

EXPRESSION_FORMS: Final = (
    "What is {e}?", "{e}", "{e} = ?", "{e} =", "Compute {e}.", "Calculate {e}.", "Work out {e}.", "Evaluate {e}.",
    "What's {e}?", "How much is {e}?", "Please compute {e}.", "Tell me {e}.", "Solve {e}.", "Find {e}.",
)  # fmt: skip
NEW_EXPRESSION_FORMS: Final = ("Can you work out {e}?", "I need {e}, please.", "What number is {e}?", "Simplify {e}.")
TIMES_FORMS: Final = (
    "What is {a} times {k}?", "Multiply {a} by {k}.", "What is the product of {a} and {k}?", "{a} times {k}",
    "How much is {a} times {k}?", "Compute {a} times {k}.", "Please multiply {a} by {k}.",
)  # fmt: skip
NEW_TIMES_FORMS: Final = ("Find the product of {a} and {k}.", "Can you multiply {a} by {k}?", "Tell me {a} times {k}.")
LARGER_FORMS: Final = (
    "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Which is greater, {a} or {b}?",
    "What is the larger of {a} and {b}?", "Which of {a} and {b} is larger?", "Is {a} or {b} bigger?",
)  # fmt: skip
SMALLER_FORMS: Final = (
    "Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?", "What is the smaller of {a} and {b}?",
    "Which of {a} and {b} is smaller?", "Is {a} or {b} smaller?", "Which is less, {a} or {b}?",
)  # fmt: skip
NEW_LARGER_FORMS: Final = ("Tell me which is bigger: {a} or {b}.", "Of {a} and {b}, which number is larger?")
NEW_SMALLER_FORMS: Final = ("Tell me which is smaller: {a} or {b}.", "Of {a} and {b}, which number is less?")
UNIT_FORMS: Final = (
    "How many {small} are {n} {large}?", "How many {small} are there in {n} {large}?",
    "Convert {n} {large} to {small}.", "{n} {large} in {small}?", "What is {n} {large} in {small}?",
    "Express {n} {large} in {small}.",
)  # fmt: skip
NEW_UNIT_FORMS: Final = ("Please convert {n} {large} into {small}.", "{n} {large} are how many {small}?")
UNITS: Final = (
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7),
    ("years", "months", 12), ("centuries", "years", 100), ("decades", "years", 10), ("metres", "centimetres", 100),
    ("kilometres", "metres", 1000), ("metres", "millimetres", 1000), ("kilograms", "grams", 1000),
    ("tonnes", "kilograms", 1000), ("litres", "millilitres", 1000), ("feet", "inches", 12), ("yards", "feet", 3),
    ("dozens", "pieces", 12), ("bytes", "bits", 8), ("pounds", "ounces", 16), ("gallons", "quarts", 4),
    ("euros", "cents", 100), ("centimetres", "millimetres", 10), ("quarters", "months", 3),
)  # fmt: skip
_PATTERNS: Final = (
    "a+b+c", "a+b-c", "a-b+c", "a-b-c", "a*k+b", "a*k-b", "b+a*k", "b-a*k", "(a+b)*k", "(a-b)*k", "a*k+b*m",
    "a+b+c-d", "a*k+b-c", "(a+b)*k-c", "a-b*k", "(a-b)*k+c", "a+b+c+d",
)  # fmt: skip


def sample_arithmetic(rng: Random, split: str, thinking: bool) -> Problem:
    new = split == "structural"
    kinds = (_expression, _expression, _expression, _product, _product, _comparison, _units)
    while True:
        key, question, trace, content = pick(rng, kinds)(rng, new)
        if partition(key) == split:
            break
    reply = Reply(trace() if thinking else "", content)
    return Problem("arithmetic", split, key, (user(spelling(rng, question)),), reply, thinking=thinking)


Drawn = tuple[tuple[Any, ...], str, Callable[[], str], str]  # key, question, trace, content


def _expression(rng: Random, new: bool) -> Drawn:
    while True:
        pattern = pick(rng, _PATTERNS)
        tokens: Tokens = []
        for c in pattern:
            if c in "km":
                tokens.append(2 + int(rng.random() * 8))
            elif c.isalpha():
                tokens.append(number(rng, pick(rng, (1, 2, 2, 2, 3, 3))))
            else:
                tokens.append(c)
        solved = solve(tokens)
        if solved is not None:
            break
    value, steps = solved
    tight = "".join(map(str, tokens))
    spaced = re.sub(r"([-+*])", r" \1 ", tight)
    shown = tight if rng.random() < 0.25 else spaced
    question = pick(rng, NEW_EXPRESSION_FORMS if new else EXPRESSION_FORMS).format(e=shown)
    return ("expression", tight), question, lambda: solve_trace(steps), f"{spaced} = {value}"


def _product(rng: Random, new: bool) -> Drawn:
    a, k = number(rng, pick(rng, (1, 2, 2, 3, 3, 4))), 2 + int(rng.random() * 8)
    if rng.random() < 0.4:
        form = pick(rng, NEW_TIMES_FORMS if new else TIMES_FORMS)
    else:
        form = pick(rng, NEW_EXPRESSION_FORMS if new else EXPRESSION_FORMS).format(e="{a} * {k}")
    return ("expression", f"{a}*{k}"), form.format(a=a, k=k), lambda: multiply_trace(a, k), f"{a} * {k} = {a * k}"


def _comparison(rng: Random, new: bool) -> Drawn:
    a = number(rng, pick(rng, (2, 3, 3, 4, 4, 5)))
    roll = rng.random()
    if roll < 0.5:  # equal lengths, often a common beginning
        shared = int(rng.random() * len(str(a)))
        b = int(str(a)[:shared] + "".join([str(int(rng.random() * 10)) for _ in str(a)[shared:]]))
    else:
        b = number(rng, pick(rng, (2, 3, 4, 5)))
    if a == b:
        b += 1
    larger = rng.random() < 0.5
    forms = (NEW_LARGER_FORMS if larger else NEW_SMALLER_FORMS) if new else (LARGER_FORMS if larger else SMALLER_FORMS)
    question, content = pick(rng, forms).format(a=a, b=b), str(max(a, b) if larger else min(a, b))

    def trace() -> str:
        verdict = f"{a}{'<' if a < b else '>'}{b}"
        return "\n".join((labelled(a), labelled(b), comparison_line(a, b), verdict))

    return ("compare", larger, min(a, b), max(a, b)), question, trace, content


def _units(rng: Random, new: bool) -> Drawn:
    large, small, factor = pick(rng, UNITS)
    n = max(2, number(rng, pick(rng, (1, 2, 2, 3))))
    while unseen_lengths(n * (factor // 10 * 10), n * (factor % 10)):  # a factor of two digits is added up from parts
        n = max(2, number(rng, pick(rng, (1, 2, 2, 3))))
    question = pick(rng, NEW_UNIT_FORMS if new else UNIT_FORMS).format(n=n, large=large, small=small)
    key = ("units", large, small, n)
    return key, question, lambda: f"{large}: {factor} {small}\n{multiply_trace(n, factor)}", f"{n * factor} {small}"


# ---- judging -----------------------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(text: str) -> str | None:
    """The last number of a text as it is written; None if there is none."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def same_number(problem: Problem, answer: Answer) -> bool:
    """The last number of the answer is the last number of the expected content; and no tool was called."""
    return not answer.tool_calls and last_number(answer.content) == last_number(problem.reply.content)
