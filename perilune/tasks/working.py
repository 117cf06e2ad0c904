"""Written working of sums: the traces that every family computes with, and expressions solved step by step.

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
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

Tokens = list[int | str]  # numbers, operators (the keys of TRACES) and parentheses
Step = tuple[str, int, int, str]  # operator, operands, and the whole expression in which it is the next step

PLACES: Final = "abcdefghij"
_LABELLED: Final = tuple(["%s".join(PLACES[n::-1]) + "%s" for n in range(10)])  # d%sc%sb%sa%s
_UNSEEN_LENGTHS: Final = (1, 5)


def labelled(number: int | str) -> str:
    """1234 -> d1c2b3a4; zeros at the front of a string are kept."""
    digits = str(number)
    return _LABELLED[len(digits) - 1] % tuple(digits)


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


def divisor(k: int) -> int:
    """What a division by k begins with: 10 or 100 if k ends with it, else the largest digit up to its root, or k."""
    zeros = len(str(k)) - len(str(k).rstrip("0"))
    return 10**zeros if zeros else next((n for n in range(9, 1, -1) if k % n == 0 and n * n <= k), k)


DIVISORS: Final = (*[k for k in range(10, 100) if max(divisor(k), k // divisor(k)) < 20], 100)


def divide_trace(a: int, k: int, sign: str = "/") -> str:
    """k: one digit or a prime. From the left, with the remainder before each digit, e.g. `b14/6=2r2`. 96/12 is 96/3/4.

    `/`: no remainder is left; `_` rounds down, `^` up; `%` gives the remainder.
    """
    if k > 9 and sign != "%" and (first := divisor(k)) < k:
        parts = f"{a}{sign}{k}\n{a}{sign}{first}{sign}{k // first}\n{divide_trace(a, first, sign)}"
        return f"{parts}\n{divide_trace(_RESULTS[sign](a, first), k // first, sign)}"
    if k > 9 and k % 10 == 0:
        return f"{a}{sign}{k}\n={_RESULTS[sign](a, k)}"
    digits = str(a)
    rest, lines, quotient = 0, [f"{a}{sign}{k}", labelled(a)], ""
    for place, p in zip(PLACES[len(digits) - 1 :: -1], digits):
        whole = 10 * rest + int(p)
        quotient, rest = quotient + str(whole // k), whole % k
        lines.append(f"{place}{whole}/{k}={whole // k}r{rest}")
    if sign == "%":
        return "\n".join([*lines, f"={rest}"])
    lines += [labelled(quotient), f"={a // k}"]
    return "\n".join([*lines, add_trace(a // k, 1)] if sign == "^" and rest else lines)


_BY_TWO_DIGITS: Final = re.compile(r"[a-j]\d+/(\d\d+)=")


def with_multiples(trace: str) -> str:
    """The trace, with the multiples of a divisor of two digits before its first line: `1:17,2:34,...,9:153`.

    Training has them, so that the next digit is a matter of looking: `b39/17=2r5` as 34 is the last one up to 39.
    """
    lines, before = list[str](), ""
    for line in trace.split("\n"):
        found = _BY_TWO_DIGITS.match(line)
        k = found[1] if found else ""
        if k and k != before:
            lines.append(",".join([f"{i}:{i * int(k)}" for i in range(1, 10)]))
        before = k
        lines.append(line)
    return "\n".join(lines)


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


TRACES: Final[dict[str, Callable[[int, int], str]]] = {
    "+": add_trace,
    "-": subtract_trace,
    "*": lambda a, b: multiply_trace(a, b) if b < 100 else multiply_trace(b, a),
    "/": divide_trace,
    **{sign: partial(divide_trace, sign=sign) for sign in "_^%"},
}
_RESULTS: Final[dict[str, Callable[[int, int], int]]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "_": lambda a, b: a // b,
    "^": lambda a, b: -(-a // b),
    "%": lambda a, b: a % b,
}


def unseen_lengths(a: int, b: int) -> bool:
    return tuple(sorted((len(str(abs(a))), len(str(abs(b)))))) == _UNSEEN_LENGTHS


def multipliable(a: int, b: int) -> bool:
    """Whether one factor has at most two digits, and its parts add up to lengths that training may show."""
    a, k = (a, b) if b < 100 else (b, a)
    return k < 10 or (k < 100 and not unseen_lengths(a * (k // 10 * 10), a * (k % 10)))


def signed_trace(operator: str, a: int, b: int) -> str:
    """A step with a number below 0: by the digits, -8+24 as 24-8, and the sign of the result last."""
    x, y = abs(a), abs(b)
    plus = (b < 0) is (operator == "-")
    if operator in "*/":
        block = TRACES[operator](x, y)
    elif (a < 0) is plus:
        block = subtract_trace(y, x) if plus else subtract_trace(x, y)
    else:
        block = add_trace(x, y)
    result = f"={_RESULTS[operator](a, b)}"
    return block if block.endswith("\n" + result) else f"{block}\n{result}"


def solve(tokens: Tokens, wide: bool = False) -> tuple[int, list[Step]] | None:
    """The value and the steps: parentheses, then `*`, `/` and divisions with remainder, then from the left.

    None if a step would be negative or a division by more than one digit (both: unless `wide`), too long, or a division
    with remainder, or would add or subtract numbers of lengths that are kept from training.
    """
    steps: list[Step] = []
    rest = list(tokens)
    while len(rest) > 1:
        low, end = 0, len(rest)
        if ")" in rest:  # the first innermost parentheses
            low = end = rest.index(")")
            while rest[low - 1] != "(":
                low -= 1
        for at in range(low, end - 1, 2):
            if rest[at + 1] not in ("+", "-"):
                break
        else:
            at = low
        left, operator, right = rest[at : at + 3]
        assert isinstance(left, int) and isinstance(right, int) and isinstance(operator, str)
        if operator == "*" and not multipliable(abs(left), abs(right)):
            return None
        if operator in "/_^%" and (
            not (1 < right < 10 or (wide and right in DIVISORS and operator != "%"))
            or (operator == "/" and left % right)
        ):
            return None
        value = _RESULTS[operator](left, right)
        if not (-100_000 if wide else 0) <= value < 100_000 or (operator in "+-" and unseen_lengths(left, right)):
            return None
        steps.append((operator, left, right, "".join(map(str, rest))))
        alone = low and end - low == 3  # the parentheses go too
        rest[low - 1 if alone else at : end + 1 if alone else at + 3] = [value]
    assert isinstance(rest[0], int)
    return rest[0], steps


def solve_trace(steps: list[Step]) -> str:
    """Each step's work under the expression it is taken from (which is left out where it is the step itself)."""
    blocks = []
    for operator, left, right, whole in steps:
        signed = left < 0 or right < 0
        block = signed_trace(operator, left, right) if signed else TRACES[operator](left, right)
        blocks.append(block if whole == f"{left}{operator}{right}" and not signed else f"{whole}\n{block}")
    return "\n".join(blocks)
