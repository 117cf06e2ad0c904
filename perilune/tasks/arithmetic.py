"""Whole numbers: the families `add_sub` and `arithmetic`. working.py has the traces of their thoughts.

Structure: training never shows a sum or difference of a 1-digit and a 5-digit number, in whatever family, nor the
wordings in `NEW_*`. Half of the structural problems have such lengths, the other half such a wording.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from operator import add, floordiv, mul, sub
from random import Random
from typing import Any, Final

from perilune.tasks.composed.expressions import Asked, asked, bracketed, chain, powers
from perilune.tasks.composed.readings import reading, stated
from perilune.tasks.composed.sums import asked_from, column, divided, in_words_of, more, restated
from perilune.tasks.forms import FORMS, OPERATOR_WORDS
from perilune.tasks.more_stories import ASKED
from perilune.tasks.problem import Answer, Problem, Reply, belongs, pick, user, widely
from perilune.tasks.wordings import bare, enumerated, expand, numeral, phrase
from perilune.tasks.words import listed
from perilune.tasks.working import (
    TRACES,
    Step,
    Tokens,
    add_trace,
    comparison_line,
    divide_trace,
    labelled,
    multipliable,
    multiply_trace,
    solve,
    solve_trace,
    subtract_trace,
    unseen_lengths,
)

# ---- add_sub -----------------------------------------------------------------------------------------------------

ADD_FORMS, SUBTRACT_FORMS = FORMS["add"], FORMS["subtract"]
NEW_ADD_FORMS, NEW_SUBTRACT_FORMS = FORMS["new add"], FORMS["new subtract"]

_LENGTHS: Final = (
    *[(3, 3)] * 14, *[(4, 4)] * 16, *[(2, 2)] * 8, *[(5, 5)] * 7, *[(4, 2)] * 7, *[(2, 4)] * 5, *[(3, 2)] * 7,
    *[(2, 3)] * 5, *[(4, 3)] * 8, *[(3, 4)] * 5, *[(5, 3)] * 5, *[(3, 5)] * 4, *[(5, 4)] * 6, *[(4, 5)] * 5,
    *[(5, 2)] * 3, *[(2, 5)] * 2, *[(1, 2)] * 2, *[(2, 1)] * 2, *[(3, 1)] * 2, *[(4, 1)] * 2, *[(1, 1)] * 2,
    *[(1, 3)] * 1, *[(1, 4)] * 1,
)  # fmt: skip
_EXAMINED: Final = ((3, 3), (4, 4), (3, 3), (4, 4), (4, 4))
_EXAMINED_UNSEEN: Final = ((5, 1), (5, 1), (1, 5))


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


_FORMS: Final = {p: FORMS.get(p, ()) + ASKED.get(p, ()) for p in (*FORMS, *ASKED)}
_KEPT_ADD: Final = tuple(map(bare, NEW_ADD_FORMS))
_KEPT_SUBTRACT: Final = tuple(map(bare, NEW_SUBTRACT_FORMS))
_EITHER: Final = re.compile("difference|apart|gap|compare", re.IGNORECASE)


def asked_in(rng: Random, form: str, kept: tuple[str, ...], **numbers: int) -> str:
    """The form, worded as people write (`phrase`) and filled with numbers, most of them in digits."""
    words = (1.0 if rng.random() < 0.08 and "}th" not in form else 0.06) if form[-1] in ".?" else 0.0
    return phrase(rng, form, kept).format(**{name: numeral(rng, n, words) for name, n in numbers.items()})


def sample_add_sub(rng: Random, split: str, thinking: bool) -> Problem:
    if split == "train" and rng.random() < 0.15:
        return _continued(rng, "add_sub", "+-", thinking)
    while True:
        new_lengths = split == "structural" and rng.random() < 0.5
        lengths = _LENGTHS if widely(split) else _EXAMINED_UNSEEN if new_lengths else _EXAMINED
        first, second = pick(rng, lengths)
        a, b, plus = number(rng, first), number(rng, second), rng.random() < 0.5
        if not plus and a < b and rng.random() < 0.85:
            a, b = b, a
        key = ("+", min(a, b), max(a, b)) if plus else ("-", a, b)
        if belongs(key, split):
            break
    forms, more, kept = (
        (ADD_FORMS, _FORMS["a+b"], NEW_ADD_FORMS)
        if plus
        else (SUBTRACT_FORMS, (FORMS if a < b else _FORMS)["a-b"], NEW_SUBTRACT_FORMS)
    )
    if widely(split) and (plus or a > b) and rng.random() < 0.17:
        shown = [a, b] if rng.random() < 0.5 else [b, a]
        question = stated(rng, shown, "total" if plus else "more", a, b)
    elif not widely(split):
        unseen = split == "structural" and not new_lengths
        question = spelling(rng, pick(rng, kept if unseen else forms).format(a=a, b=b))
    else:
        form = pick(rng, more if rng.random() < 0.7 else forms)
        while not plus and a < b and _EITHER.search(form):
            form = pick(rng, forms)
        again = split == "train" and (plus or a > b) and "\n" not in form and rng.random() < 0.12
        form = restated(rng, "+" if plus else "-", form) if again else form
        turned = not plus and not again and _EITHER.search(form) and rng.random() < 0.4  # either order
        question = asked_in(
            rng, form, _KEPT_ADD if plus else _KEPT_SUBTRACT, a=b if turned else a, b=a if turned else b
        )
    reasoning = (add_trace if plus else subtract_trace)(a, b) if thinking else ""
    content = f"{a} {'+' if plus else '-'} {b} = {a + b if plus else a - b}"
    return Problem("add_sub", split, key, (user(question),), Reply(reasoning, content), thinking=thinking)


# ---- arithmetic --------------------------------------------------------------------------------------------------

EXPRESSION_FORMS, NEW_EXPRESSION_FORMS = FORMS["expression"], FORMS["new expression"]
TIMES_FORMS, NEW_TIMES_FORMS = FORMS["times"], FORMS["new times"]
LARGER_FORMS, NEW_LARGER_FORMS = FORMS["larger"], FORMS["new larger"]
SMALLER_FORMS, NEW_SMALLER_FORMS = FORMS["smaller"], FORMS["new smaller"]
UNIT_FORMS, NEW_UNIT_FORMS = FORMS["unit"], FORMS["new unit"]
_UNITS: Final = """
hours minutes 60|minutes seconds 60|days hours 24|weeks days 7|years months 12|centuries years 100|decades years 10
metres centimetres 100|kilometres metres 1000|metres millimetres 1000|kilograms grams 1000|tonnes kilograms 1000
litres millilitres 1000|feet inches 12|yards feet 3|dozens pieces 12|bytes bits 8|pounds ounces 16|gallons quarts 4
euros cents 100|centimetres millimetres 10|quarters months 3
"""
UNITS: Final = [(large, small, int(n)) for large, small, n in re.findall(r"(\w+) (\w+) (\d+)", _UNITS)]
_PATTERNS: Final = listed("""
a+b+c a+b-c a-b+c a-b-c a*k+b a*k-b b+a*k b-a*k (a+b)*k (a-b)*k a*k+b*m a+b+c-d a*k+b-c (a+b)*k-c a-b*k (a-b)*k+c
a+b+c+d
""")
_MORE_PATTERNS: Final = listed("""
a*k+c*m a/k a/k+b a/k-b b+a/k b-a/k (a+b)/k (a-b)/k a*k*m a-b+c-d a-(b+c) a+(b-c) a-(b-c) k*(a+b) k*(a-b) a*k-b*m
a+b*k (a+b)*(k+m) (a-b)*(k-m) k*(a+b*m) k*(a+b*m)-c k*(a-b*m)+c (a+b*k)*m a-(b+c*k) a+b*k-c*m (a*k+b)*m-c a-k*(b-c)
""")


def sample_arithmetic(rng: Random, split: str, thinking: bool) -> Problem:
    kinds = _WIDE if widely(split) else _KINDS
    if split == "train" and (roll := rng.random()) < 0.19:
        if roll < 0.02:
            return _continued(rng, "arithmetic", "*/", thinking)
        kinds = _FRESH
    while True:
        key, question, trace, content = pick(rng, kinds)(rng, split)
        if belongs(key, split):
            break
    reply = Reply(trace() if thinking else "", content)
    question = question if widely(split) else spelling(rng, question)
    return Problem("arithmetic", split, key, (user(question),), reply, thinking=thinking)


Drawn = tuple[tuple[Any, ...], str, Callable[[], str], str]  # key, question, trace, content

_KEPT_EXPRESSION: Final = tuple(map(bare, NEW_EXPRESSION_FORMS))
_KEPT_TIMES: Final = tuple(map(bare, NEW_TIMES_FORMS))
_KEPT_LARGER: Final = tuple(map(bare, NEW_LARGER_FORMS))
_KEPT_SMALLER: Final = tuple(map(bare, NEW_SMALLER_FORMS))
_KEPT_UNIT: Final = tuple(map(bare, NEW_UNIT_FORMS))


@lru_cache(maxsize=256)
def parted(pattern: str) -> list[str]:
    """The tokens of a pattern: its letters and signs, and whole numbers of any length."""
    return re.findall(r"\d+|.", pattern)


def drawn_numbers(rng: Random, pattern: str) -> dict[str, int]:
    """A number for each letter of a pattern: k, m and j have one digit; a dividend is a multiple of its divisor."""
    found: dict[str, int] = {}
    tokens = parted(pattern)
    for c in tokens:
        if c in "kmj":
            found[c] = 2 + int(rng.random() * 8)
        elif c.isdigit():
            found[c] = int(c)
        elif c.isalpha() and c not in found:
            found[c] = number(rng, pick(rng, (1, 2, 2, 2, 3, 3)))
    at = tokens.index("/") if "/" in tokens else 0
    if at > 0 and not tokens[at - 1].isdigit():
        divisor = found[tokens[at + 1]]
        if tokens[at - 1] == ")":
            first, operator, second = tokens[at - 4 : at - 1]
            total = found[first] + (found[second] if operator == "+" else -found[second])
            found[first] += -total % divisor
        else:
            found[tokens[at - 1]] = divisor * number(rng, pick(rng, (1, 2, 2)))
    return found


def _expression(rng: Random, split: str) -> Drawn:
    while True:
        pattern = pick(rng, _PATTERNS + _MORE_PATTERNS if widely(split) else _PATTERNS)
        numbers = drawn_numbers(rng, pattern)
        if widely(split) and not set(pattern) & set("(*/") and rng.random() < 0.2:
            numbers = {c: number(rng, 4) for c in numbers}
        tokens: Tokens = [numbers.get(c, c) for c in pattern]
        solved = solve(tokens)
        if solved is not None:
            break
    value, steps = solved
    tight = "".join(map(str, tokens))
    spaced = re.sub(r"([-+*/])", r" \1 ", tight)
    shown = tight if rng.random() < 0.25 else spaced
    if widely(split):
        question = _put(rng, pattern, numbers, shown)
    else:
        question = pick(rng, NEW_EXPRESSION_FORMS if split == "structural" else EXPRESSION_FORMS).format(e=shown)
    return ("expression", tight), question, lambda: solve_trace(steps), f"{spaced} = {value}"


def _put(rng: Random, pattern: str, numbers: dict[str, int], shown: str) -> str:
    """An expression as a question: in symbols, with the operators in words, or in words altogether."""
    if rng.random() < 0.25 and (text := in_words_of(rng, pattern, numbers)):
        return text
    roll = rng.random()
    if roll < 0.3 and pattern in _FORMS:
        return asked_in(rng, pick(rng, _FORMS[pattern]), _KEPT_EXPRESSION, **numbers)
    if roll < 0.45 and set(pattern[1::2]) == {"+"} and "(" not in pattern:
        said = [numeral(rng, n, 0.03) for n in numbers.values()]
        listed = enumerated(said, ", " if rng.random() < 0.3 else " and ")
        return phrase(rng, pick(rng, FORMS["+x"]), _KEPT_EXPRESSION).format(x=listed)
    return _framed(rng, shown)


_SIGNED: Final = re.compile(r"(?<![\w)])-\d")
_POWERS: Final = {"2": ("^2", "**2", "\u00b2", " squared"), "3": ("^3", "**3", "\u00b3", " cubed")}


def _framed(rng: Random, shown: str) -> str:
    """An expression in a question, its operators in words or in other signs at times."""
    roll, style = rng.random(), pick(rng, (0, 0, 1, 2, 3))
    shown = re.sub(r" ?\*\* ?(\d)", lambda m: _POWERS[m[1]][style], shown)
    if roll < 0.4 and "**" not in shown and not _SIGNED.search(shown):
        mixed = re.search("[-*/a-z]", shown)  # "9 minus 3 and 2" may take both away
        words = OPERATOR_WORDS | {"+": (" plus ",)} if mixed else OPERATOR_WORDS
        shown = re.sub(" ?([-+*/]) ?", lambda m: pick(rng, words[m[1]]), shown)
    elif roll < 0.65 and "**" not in shown:
        shown = shown.replace("*", pick(rng, ("x", "×", "·"))).replace("/", pick(rng, (":", "÷")))
        shown = shown.replace("-", pick(rng, "-\u2212"))
    form = pick(rng, _FORMS["e"] if rng.random() < 0.6 else EXPRESSION_FORMS)
    return phrase(rng, form, _KEPT_EXPRESSION).format(e=shown)


def _composed(rng: Random, split: str) -> Drawn:
    """An expression of composed/expressions.py; only with wide wordings."""
    solved = None
    while solved is None:
        form, shown, worked = asked(rng)
        if "**" not in worked:
            parts = re.findall(r"(?<![\d)])-\d+|\d+|.", worked)
            solved = solve([int(t) if t[-1].isdigit() else t for t in parts], wide=True)
    value, steps = solved
    question = "" if form or rng.random() < 0.8 or _SIGNED.search(worked) else in_words_of(rng, worked, {})
    question = question or (phrase(rng, form).format(e=shown) if form else _framed(rng, shown))
    content = re.sub(r"(?<=[\d)])([-+*/])", r" \1 ", worked)
    return ("expression", worked), question, lambda: solve_trace(steps), f"{content} = {value}"


def _made(rng: Random, make: Callable[[Random], Asked]) -> Drawn:
    """An expression of composed/expressions.py that is made for training only."""
    value, steps = -1, list[Step]()
    while not 0 <= value < 20_000:
        form, shown, worked = make(rng)
        value, steps = solve([int(t) if t[0].isdigit() else t for t in parted(worked)], wide=True) or (-1, [])
    if form:
        form = phrase(rng, form.replace("~", "\n"), _KEPT_EXPRESSION, asking=0.1)
        if form[0] == "{" and make is chain:
            shown = shown[0].upper() + shown[1:] if rng.random() < 0.6 else shown
    content = re.sub(r"(?<=[\d)])([-+*/])", r" \1 ", worked)
    question = form.format(e=shown) if form else _framed(rng, shown)
    return ("expression", worked), question, lambda: solve_trace(steps), f"{content} = {value}"


def _product(rng: Random, split: str) -> Drawn:
    new, wide = split == "structural", widely(split)
    while True:
        a, k = number(rng, pick(rng, (1, 2, 2, 3, 3, 4))), 2 + int(rng.random() * 8)
        if wide and rng.random() < 0.25:
            a, k = number(rng, pick(rng, (1, 2, 2, 2, 3))), 10 + int(rng.random() * 90)
        if multipliable(a, k):
            break
    if wide and k < 4 and rng.random() < 0.5:
        question = asked_in(rng, pick(rng, _FORMS[f"a*{k}"]), _KEPT_TIMES, a=a)
    elif wide and rng.random() < 0.5:
        form = pick(rng, _FORMS["a*k"] if rng.random() < 0.7 else TIMES_FORMS)
        form = restated(rng, "*", form) if split == "train" and rng.random() < 0.12 else form
        question = asked_in(rng, form, _KEPT_TIMES, a=a, k=k)
    elif wide:
        question = _put(rng, "a*k", {"a": a, "k": k}, f"{a} * {k}")
    elif rng.random() < 0.4:
        question = pick(rng, NEW_TIMES_FORMS if new else TIMES_FORMS).format(a=a, k=k)
    else:
        question = pick(rng, NEW_EXPRESSION_FORMS if new else EXPRESSION_FORMS).format(e=f"{a} * {k}")
    return ("expression", f"{a}*{k}"), question, lambda: TRACES["*"](a, k), f"{a} * {k} = {a * k}"


def _quotient(rng: Random, split: str) -> Drawn:
    k = 2 if rng.random() < 0.2 else 2 + int(rng.random() * 8)
    a = k * number(rng, pick(rng, (1, 2, 2, 3)))
    form = pick(rng, _FORMS["a/2" if k == 2 and rng.random() < 0.5 else "a/k"])
    question = asked_in(rng, form, _KEPT_EXPRESSION, a=a, k=k)
    return ("expression", f"{a}/{k}"), question, lambda: divide_trace(a, k), f"{a} / {k} = {a // k}"


def _beside(rng: Random, split: str) -> Drawn:
    """A problem of composed/sums.py; only with wide wordings."""
    return more(rng)


def _read(rng: Random, split: str) -> Drawn:
    """A text of composed/readings.py; only with wide wordings."""
    return reading(rng)


def _comparison(rng: Random, split: str) -> Drawn:
    wide = widely(split)
    a = number(rng, pick(rng, (2, 3, 3, 4, 4, 5)))
    found = [a]
    while len(found) < 2 or (wide and len(found) < 4 and rng.random() < 0.25):
        if rng.random() < 0.5:  # equal lengths, often a common beginning
            shared = int(rng.random() * len(str(a)))
            b = int(str(a)[:shared] + "".join([str(int(rng.random() * 10)) for _ in str(a)[shared:]]))
        else:
            b = number(rng, pick(rng, (2, 3, 4, 5)))
        found.append(b + 1 if b in found else b)
    larger = rng.random() < 0.5
    if len(found) > 2:
        shown = ", ".join(map(str, found[:-1])) + pick(rng, (" and ", " or ", ", ")) + str(found[-1])
        question = phrase(rng, pick(rng, _FORMS[">x" if larger else "<x"])).format(x=shown)
    elif not wide:
        new = split == "structural"
        forms = (
            (NEW_LARGER_FORMS if larger else NEW_SMALLER_FORMS) if new else (LARGER_FORMS if larger else SMALLER_FORMS)
        )
        question = pick(rng, forms).format(a=a, b=found[1])
    else:
        more, forms = (_FORMS["a>b"], LARGER_FORMS) if larger else (_FORMS["a<b"], SMALLER_FORMS)
        form = pick(rng, more if rng.random() < 0.7 else forms)
        question = asked_in(rng, form, _KEPT_LARGER if larger else _KEPT_SMALLER, a=a, b=found[1])

    def trace() -> str:
        """Pair by pair: the best number so far with the next one."""
        best, blocks = a, []
        for b in found[1:]:
            blocks += [labelled(best), labelled(b), comparison_line(best, b), f"{best}{'<' if best < b else '>'}{b}"]
            best = max(best, b) if larger else min(best, b)
        return "\n".join(blocks)

    key = ("compare", larger, *sorted(found))
    return key, question, trace, str(max(found) if larger else min(found))


def _units(rng: Random, split: str) -> Drawn:
    large, small, factor = pick(rng, UNITS)
    n = max(2, number(rng, pick(rng, (1, 2, 2, 3))))
    while unseen_lengths(n * (factor // 10 * 10), n * (factor % 10)):  # a factor of two digits is added up from parts
        n = max(2, number(rng, pick(rng, (1, 2, 2, 3))))
    if widely(split):
        form = phrase(rng, pick(rng, FORMS["n"] if rng.random() < 0.7 else UNIT_FORMS), _KEPT_UNIT)
    else:
        form = pick(rng, NEW_UNIT_FORMS if split == "structural" else UNIT_FORMS)
    question = form.format(n=n, large=large, small=small)
    key = ("units", large, small, n)
    return key, question, lambda: f"{large}: {factor} {small}\n{multiply_trace(n, factor)}", f"{n * factor} {small}"


_KINDS: Final[tuple[Callable[[Random, str], Drawn], ...]] = (
    _expression, _expression, _expression, _product, _product, _comparison, _units,
)  # fmt: skip
_WIDE: Final = (*_KINDS, _expression, _quotient, *[_beside] * 4, _read, _read, *[_composed] * 10)
_FRESH: Final[tuple[Callable[[Random, str], Drawn], ...]] = (
    *[lambda rng, split: _made(rng, chain)] * 5, *[lambda rng, split: _made(rng, bracketed)] * 3,
    *[lambda rng, split: _made(rng, powers)] * 3, *[lambda rng, split: divided(rng)] * 5,
    *[lambda rng, split: column(rng)] * 3,
)  # fmt: skip


# ---- a result that is worked on ----------------------------------------------------------------------------------

_VALUES: Final[dict[str, Callable[[int, int], int]]] = {"+": add, "-": sub, "*": mul, "/": floordiv}
_KEPT_FIRST: Final = (*_KEPT_ADD, *_KEPT_SUBTRACT, *_KEPT_EXPRESSION, *_KEPT_TIMES)
_BOTH: Final[dict[str, tuple[str, ...]]] = {
    sign: tuple([f for f in _FORMS[pattern] if "{a}" in f and "}th" not in f])
    for sign, pattern in (("+", "a+b"), ("-", "a-b"), ("*", "a*k"), ("/", "a/k"))
}


def _upon_it(rng: Random, value: int, signs: str, below: int) -> tuple[str, int]:
    """(sign, k): a random operation on a value; a product is less than `below`, which must exceed 2 * value."""
    while True:
        sign = pick(rng, signs)
        k = number(rng, pick(rng, (1, 2, 2, 3))) or 1
        if sign in "*/":
            k = 2 + int(rng.random() * pick(rng, (2, 8)))
        fits = {"+": True, "-": k <= value, "*": value * k < below, "/": value > k and value % k == 0}[sign]
        if fits and (sign in "*/" or not unseen_lengths(value, k)):
            return sign, k


def _continued(rng: Random, family: str, signs: str, thinking: bool) -> Problem:
    """An operation on the assistant's last result or, less often, on other numbers."""
    while True:
        value, history = number(rng, pick(rng, (2, 2, 3, 3, 4))), list[dict[str, Any]]()
        for turn in range(pick(rng, (1, 1, 1, 2))):
            before, (sign, k) = value, _upon_it(rng, value, "+-+-*/", 50_000)
            value = _VALUES[sign](before, k)
            question = asked_in(rng, pick(rng, _BOTH[sign]), _KEPT_FIRST, a=before, b=k, k=k)
            if turn:
                question = _upon(rng, sign, k)
            said = pick(rng, FORMS["fu_said"]).format(e=f"{before} {sign} {k}", v=value)
            history += [user(question), {"role": "assistant", "content": said}]
        a, (sign, k) = value, _upon_it(rng, value, signs, 100_000)
        new = signs == "+-" and rng.random() < 0.15
        a = max(k, number(rng, len(str(a)))) if new else a
        key: tuple[Any, ...] = ("+", min(a, k), max(a, k)) if sign == "+" else ("-", a, k)
        key = ("expression", f"{a}{sign}{k}") if sign in "*/" else key
        if belongs(key, "train") and value and not unseen_lengths(a, k):
            break
    question = _upon(rng, sign, k)
    if new:
        question = asked_from(rng, "fu_new", _KEPT_FIRST).format(a=a, b=k, s=sign)
    reply = Reply(TRACES[sign](a, k) if thinking else "", f"{a} {sign} {k} = {_VALUES[sign](a, k)}")
    return Problem(family, "train", key, (*history, user(question)), reply, thinking=thinking)


def _upon(rng: Random, sign: str, k: int) -> str:
    """A question about the last result."""
    kind = {"+": "fup", "-": "fum", "*": "fut", "/": "fud"}[sign]
    kind = f"{kind}2" if sign in "*/" and k == 2 and rng.random() < 0.6 else kind
    form = pick(rng, FORMS["fu_pre"]) + expand(rng, FORMS, pick(rng, FORMS[kind]))
    form = form[0].upper() + form[1:] if rng.random() < 0.5 else form
    return phrase(rng, form, _KEPT_FIRST, asking=0.1).format(k=numeral(rng, k, 0.04))


# ---- judging -----------------------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(text: str) -> str | None:
    """The last number of a text as it is written; None if there is none."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def same_number(problem: Problem, answer: Answer) -> bool:
    """The last number of the answer is the last number of the expected content; and no tool was called."""
    return not answer.tool_calls and last_number(answer.content) == last_number(problem.reply.content)
