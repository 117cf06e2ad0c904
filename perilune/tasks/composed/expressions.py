"""Longer expressions, operations in sentences, and equations, for arithmetic.py.

Each comes with the expression that the trace computes: 3^2 as 3*3, a letter as its value, an equation solved for x
(3x + 5 = 20 as (20-5)/3), and a sequence of operations with parentheses.
"""

import ast
import re
from random import Random
from typing import Final

from perilune.tasks.forms import FORMS
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, enumerated, expand
from perilune.tasks.working import DIVISORS

Asked = tuple[str, str, str]  # a form with {e} ("": any form), the text for {e}, the expression to compute
Ops = list[tuple[str, int]]

_FORMS: Final = {kind[1:]: forms for kind, forms in FORMS.items() if kind[0] == "@"}
_NAMES: Final = {"+": "sum", "-": "difference", "*": "product", "/": "quotient", "^": "square"}
_ROOTS: Final = {r**n: f"{r}**{n}" for n in (3, 2) for r in range(2, 13) if r**n < 150}


def _drawn(rng: Random, value: int, count: int, kind: str) -> str:
    """An expression of `count` numbers with this value, all in parentheses; kind `^`: powers too, `-`: below 0 too."""
    if count == 1:
        return _ROOTS.get(value, str(value)) if kind == "^" else str(value)
    signed, size = kind == "-", abs(value)
    factors = [k for k in range(2, 13) if size % k == 0 and size > k]
    sign = pick(rng, "-" + "/-" * (size < 100) + "++" * (signed or value > 4) + "***" * bool(factors))
    y = 1 + int(rng.random() * (value - 1 if sign == "+" and not signed else pick(rng, (9, 20, 60))))
    if sign in "*/":
        y = pick(rng, factors if sign == "*" else (*range(2, 10), 12, pick(rng, DIVISORS)))
    elif kind == "^":
        y = pick(rng, [n for n in _ROOTS if sign == "-" or n < value] or [y])
    if signed and sign in "*-" and rng.random() < 0.25:
        y = -y
    x = {"+": value - y, "-": value + y, "*": value // y, "/": value * y}[sign]
    if sign in "+*" and rng.random() < 0.5:
        x, y = y, x
    if kind == "^" and x == y:
        return f"{_drawn(rng, x, count, '')}**2"
    left = max(1, count - pick(rng, (1, 1, 1, 2, 2, 3)))
    return f"({_drawn(rng, x, left, kind)}{sign}{_drawn(rng, y, count - left, kind)})"


def _literal(rng: Random, kind: str) -> Asked:
    value, count = 1 + int(rng.random() * pick(rng, (20, 60, 150, 400))), pick(rng, (3, 4, 4, 5, 5, 6))
    if kind:
        value, count = value * pick(rng, (1, -1 if kind == "-" else 1)), pick(rng, (2, 2, 3, 4))
    text, form = _drawn(rng, value, count, kind), ""
    shown = ast.unparse(ast.parse(text, mode="eval"))  # only the parentheses that are needed
    worked = re.sub(r"(?<!/ )(\b\d+|\([^()]*\)) \*\* (\d)", lambda m: "*".join([m[1]] * int(m[2])), shown)
    if kind == "-" and rng.random() < 0.9:
        shown = re.sub(r"(?<=[-+*/] )-\d+", r"(\g<0>)", shown)
    if kind == "x":
        given = []
        for v in pick(rng, ("x", "n", "y", "xy", "ab", "mn")):
            m = pick(rng, list(re.finditer(r"\d+", shown)))
            given.append(f"{v} = {m[0]}")
            shown = shown[: m.start()] + v + shown[m.end() :]
        said = enumerated(given)
        form = pick(rng, _FORMS["let"]).format(g=said, i=said.replace("=", "is"), e="{e}")
    if kind in "x" and "/" not in shown and rng.random() < (0.6 if kind else 0.2):
        shown = re.sub(r"(?<=[\d)]) \* (?=[a-z(])", "", shown)
    if kind == "-" and "(" not in shown and rng.random() < 0.3:
        shown = re.sub(r"-(?=\d)", pick(rng, ("minus ", "negative ")), shown)
    elif rng.random() < 0.25:
        shown = shown.replace(" ", "")
    return form, shown, worked.replace(" ", "")


def _sentences(rng: Random, start: str, ops: Ops, styles: tuple[str, ...]) -> list[str]:
    """Each operation as an order or (style `~`) a phrase; the first one names the start, if one is given."""
    said: list[str] = []
    before = ""
    for sign, k in ops:
        style = pick(rng, styles)
        small = f"{style}{sign}{k}"
        forms = _FORMS[small if small in _FORMS and rng.random() < 0.7 else style + sign]
        name = _NAMES.get(before, "number")
        it = ("it", "that", f"the {name}", f"that {name}", "the result", "what comes out")[: 6 if before else 3]
        if start and not said:
            it, forms = (start,), tuple([f.replace("that", "<it>") for f in forms if "that" in f or "<it>" in f])
        elif before in ("+", "-"):  # "times 3" could mean the last number alone
            forms = tuple([f for f in forms if f not in ("times {k}", "divided by {k}")])
        said.append(expand(rng, {"it": it}, pick(rng, forms)).format(k=k))
        before = sign
    return said


def _folded(text: str, ops: Ops) -> str:
    """The operations on a text as one expression."""
    last = ""
    for sign, k in ops:
        if last and (sign == "^" or (last in "+-" and sign in "*/")):
            text = f"({text})"
        text, last = (f"{text}*{text}", "*") if sign == "^" else (f"{text}{sign}{k}", sign)
    return text


def _operations(rng: Random, kind: str) -> Asked:
    """Two to five operations, each on the last result; kind `=`: one or two, and the start is asked for."""
    value = 2 + int(rng.random() * pick(rng, (9, 20, 60) if kind else (20, 100, 400)))
    start, count, ops = str(value), pick(rng, (1, 2, 2) if kind else (2, 3, 3, 4, 4, 5)), Ops()
    while len(ops) < count:
        sign, k = pick(rng, "+-**/" if kind else "++--**//^"), 1 + int(rng.random() * pick(rng, (10, 100)))
        if sign in "*/":
            k = pick(rng, (2, 2, 3, 4, 2 + int(rng.random() * 8), pick(rng, DIVISORS)))
        after = {"+": value + k, "-": value - k, "*": value * k, "/": value // k, "^": value**2}[sign]
        if 1 < after < 1000 and (sign != "/" or value % k == 0) and (sign != "^" or (value < 21 and not ops[1:])):
            value = after
            ops.append((sign, k))
    if kind:
        worked = _folded(str(value), [("-+/*"["+-*/".index(sign)], k) for sign, k in reversed(ops)])
        if rng.random() < 0.4:
            said = [*_sentences(rng, "", ops, ("",)), f"{pick(rng, ('get', 'end up with'))} {value}"]
            return pick(rng, _FORMS["number"]), enumerated(said), worked
        shown = re.sub(r"x\*(\d+)", r"\1x", f"{_folded('x', ops)} = {value}")
        return pick(rng, _FORMS["x"]), re.sub("[-+]", r" \g<0> ", shown) if rng.random() < 0.6 else shown, worked
    worked, styles = _folded(start, ops), pick(rng, (("",), ("", "~"), ("~",)))
    begin = f"{pick(rng, _FORMS['begin'])} {start}" if rng.random() < 0.4 else ""
    said = [begin] * bool(begin) + _sentences(rng, "" if begin else start, ops, styles)
    join = pick(rng, (". ", ". ", ", then ", ". Then ", "; ", "; then ", "\n", " and then ", ", ", ", ", ", "))
    text = join.join([capital(s) if join in (". ", "\n") else s for s in said])
    if join == ", ":
        if "" in styles:
            text = enumerated(said, pick(rng, (" and ", ", and ", ", then ", ", and then ", " and finally ")))
        if len(styles) == 1 and ("" in styles or not begin) and rng.random() < 0.5:
            return (pick(rng, _FORMS["of"]) if "" in styles else ""), text, worked
    text = capital(text) if rng.random() < 0.85 else text.lower()
    return "{e}" + pick(rng, _FORMS["end"]), text, worked


def asked(rng: Random) -> Asked:
    kind = pick(rng, (*[""] * 7, *["ops"] * 8, *"--^xx="))
    return _operations(rng, kind.strip("ops")) if kind in ("ops", "=") else _literal(rng, kind)


# ---- for training only: short chains, parentheses that are not needed, powers ----------------------------------------


def _chain_ops(rng: Random) -> tuple[int, list[tuple[str, int, int]]]:
    """A first number, and two or three operations, each with how often it is done."""
    value, count = 2 + int(rng.random() * pick(rng, (20, 60, 100, 300))), pick(rng, (2, 2, 2, 3))
    start, ops = value, list[tuple[str, int, int]]()
    while len(ops) < count:
        sign, often = pick(rng, "++--**//^" if not ops else "++--**//"), 1
        k = 1 + int(rng.random() * pick(rng, (10, 30, 100)))
        if sign in "*/":
            k = pick(rng, (2, 2, 2, 3, 3, 4, 5, 2 + int(rng.random() * 9)))
            often = 2 if k == 2 and rng.random() < 0.15 else 1
        after = {"+": value + k, "-": value - k, "*": value * k**often, "/": value // k**often, "^": value**2}[sign]
        if 1 < after < 1000 and (sign != "/" or value % k**often == 0) and (sign != "^" or value < 21):
            value = after
            ops.append((sign, k, often))
    return start, ops


def _done(rng: Random, op: tuple[str, int, int], it: str) -> str:
    """An operation as an order."""
    sign, k, often = op
    form = pick(rng, _FORMS[f"{sign}{k}" if f"{sign}{k}" in _FORMS and rng.random() < 0.8 else sign])
    said = form.replace("<it>", it).format(k=k)
    return said if often == 1 else pick(rng, ("{} twice", "{} two times", "{}, then do that once more")).format(said)


def chain(rng: Random) -> Asked:
    """Two or three operations in few words: "take 96, halve it, then subtract 11"; "halve it twice" is two of them."""
    start, ops = _chain_ops(rng)
    worked = _folded(str(start), [(sign, k) for sign, k, often in ops for _ in range(often)])
    first, (sign, k, often), roll = f"{start}", ops[0], rng.random()
    form, end = "{e}", pick(rng, FORMS["ch_left" if ops[-1][0] in "-/" and rng.random() < 0.5 else "ch_end"])
    joins = [pick(rng, (", then ", ", then ", " and then ", ", and then ", ", ")) for _ in ops]
    if roll < 0.25 and all(op[2] == 1 for op in ops):  # "96, halved, then minus 11"
        rows = [FORMS[name if name in FORMS else f"cs{sign}"] for sign, k, _ in ops for name in [f"cs{sign}{k}"]]
        said = [pick(rng, row).format(k=k) for row, (_, k, _) in zip(rows, ops)]
        said = [first, *said]
        joins[0] = pick(rng, (" ", ", "))
        joins[1:] = [j if "then" in j else ", then " for j in joins[1:]]
    elif roll < 0.4 and often == 1:  # "after halving 96, subtract 11"
        name = f"ch{sign}{k}" if f"ch{sign}{k}" in FORMS else f"ch{sign}"
        said = ["after " + pick(rng, FORMS[name]).format(k=k, n=first), *[_done(rng, op, "it") for op in ops[1:]]]
        joins[0] = ", "
    elif roll < 0.75:
        it = pick(rng, ("it", "it", "it", "that"))
        said = [pick(rng, FORMS["ch_begin"]).format(n=first), *[_done(rng, op, it) for op in ops]]
        joins.append(pick(rng, (", ", ", then ", " and ", ", finally ")))
        joins[0] = pick(rng, (", ", ", ", ": ", " and ", ", then "))
    else:
        row = [f for f in _FORMS[f"{sign}{k}" if f"{sign}{k}" in _FORMS else sign] if "<it>" in f]
        said = [pick(rng, row).replace("<it>", first).format(k=k) + (" twice" if often > 1 else "")]
        said += [_done(rng, op, pick(rng, ("it", "that", "the result"))) for op in ops[1:]]
        if rng.random() < 0.5:
            form, end = pick(rng, FORMS["ch_if"]), ""
    text = said[0] + "".join([join + part for join, part in zip(joins, said[1:])])
    return form + end, text, worked


def _redundant(rng: Random, node: ast.expr) -> tuple[str, int]:
    """An expression with some parentheses that it does not need, and how many these are."""
    if not isinstance(node, ast.BinOp):
        return ast.unparse(node), 0
    signs, extra, parts = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}, 0, []
    sign = signs[type(node.op)]
    for side in (node.left, node.right):
        text, count = _redundant(rng, side)
        if isinstance(side, ast.BinOp):
            inner = signs[type(side.op)]
            needed = sign in "*/" and (inner in "+-" or side is node.right)
            needed = needed or (side is node.right and inner in "+-")
            more = not needed and rng.random() < 0.5
            extra += more
            text = f"({text})" if needed or more else text
        parts.append(text)
        extra += count
    return f"{parts[0]} {sign} {parts[1]}", extra


def bracketed(rng: Random) -> Asked:
    """An expression of three to five numbers with one or more parentheses that it does not need."""
    extra = 0
    while not extra:
        value, count = 1 + int(rng.random() * pick(rng, (20, 60, 150))), pick(rng, (3, 3, 4, 4, 5))
        shown, extra = _redundant(rng, ast.parse(_drawn(rng, value, count, ""), mode="eval").body)
        if rng.random() < 0.06:
            shown, extra = f"({shown})", extra + 1
    worked = shown.replace(" ", "")
    form = capital(expand(rng, FORMS, pick(rng, FORMS["pe"]))) if rng.random() < 0.6 else ""
    return form, worked if rng.random() < 0.25 else shown, worked


_SUPER: Final = dict(zip("23456", "\u00b2\u00b3\u2074\u2075\u2076"))
_SHOWN: Final = {"+": " plus ", "-": " minus ", "*": " times "}


def _raised(rng: Random) -> tuple[int, int]:
    while True:
        base, n = pick(rng, (2, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11, 12)), pick(rng, (2, 2, 3, 3, 4, 5, 6))
        if base**n < 300 or base == 10 > 2 * n:
            return base, n


def powers(rng: Random) -> Asked:
    """Powers that are added, subtracted or multiplied, with each other or with a number."""
    terms = [_raised(rng) for _ in range(pick(rng, (1, 2, 2, 2, 2, 3)))]
    if len(terms) == 1 or rng.random() < 0.25:
        terms.insert(int(rng.random() * (len(terms) + 1)), (1 + int(rng.random() * pick(rng, (9, 50))), 1))
    signs = [pick(rng, "+++--*") for _ in terms[1:]]
    worked = "".join(["*".join([str(b)] * n) + s for (b, n), s in zip(terms, [*signs, ""])])
    style = pick(rng, ("^", "^", "^", "**", "**", " ^ ", "super", "words"))
    said = []
    for base, n in terms:
        up = {"super": _SUPER.get(str(n), ""), "words": f" to the power of {n}"}.get(style, f"{style}{n}")
        if style == "words" and n < 4 and rng.random() < 0.7:
            up = " squared" if n == 2 else " cubed"
        said.append(f"{base}{up}" if n > 1 else str(base))
    tight = style in ("^", "**") and rng.random() < 0.25
    gaps = [_SHOWN[s] if style == "words" else s if tight else f" {s} " for s in signs]
    text = "".join([t + g for t, g in zip(said, [*gaps, ""])])
    noted = style.strip() in ("^", "**") and rng.random() < 0.4
    form = expand(rng, FORMS, pick(rng, FORMS["pw" if noted else "pe"])).replace("{s}", style.strip())
    form = re.sub(r"brackets first\.|the brackets are not all needed\.", "no calculator here.", form)
    return capital(form), text, worked
