"""Procedures of several steps for `programs`: one number that is changed step by step, and short Python programs.

The same steps are put as sentences, as numbered lines, as what happens to a thing that is counted, or as code with
loops, conditions and functions. The trace has a line per step that is carried out: `7+5=12`, `12>9:12-9=3`, `4<9:no`.
"""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from perilune.tasks.more_programs import counted, indexed, word
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, expand, in_words, lined, phrase
from perilune.tasks.words import NAMES, OBJECTS, PLAIN, any_word

Made = tuple[tuple[Any, ...], str, str, str]  # key, question, trace, answer
Op = tuple[str, int]  # one of + - * /, and by how much
# ("do", op), ("times", how often, op), ("if", < or >, bound, op, op or None), ("until", bound, op: + or *)
Step = tuple[Any, ...]

# ---- one number ----------------------------------------------------------------------------------------------------


def apply(x: int, op: Op) -> int:
    sign, k = op
    return x + k if sign == "+" else x - k if sign == "-" else x * k if sign == "*" else x // k


def _op(rng: Random, x: int, signs: str = "+-*/") -> Op:
    """An operation that leaves a small number; divisions leave no rest."""
    while True:
        sign = pick(rng, signs)
        k = 2 + int(rng.random() * (4 if sign in "*/" else 12 if rng.random() < 0.8 else 60))
        if (sign == "/" and x % k) or (sign == "-" and k > x) or (sign == "*" and x > (100 if k == 2 else 25)):
            if rng.random() < 0.7:
                continue
            sign, k = "+", 1 + int(rng.random() * 9)
        return sign, k


def _worked(x: int, op: Op) -> str:
    return f"{x}{op[0]}{op[1]}={apply(x, op)}"


def _run(x: int, steps: list[Step]) -> tuple[int, list[str]]:
    """The last number, and the trace."""
    lines = []
    for kind, *rest in steps:
        if kind == "do":
            lines.append(_worked(x, rest[0]))
            x = apply(x, rest[0])
        elif kind == "times":
            for _ in range(rest[0]):
                lines.append(_worked(x, rest[1]))
                x = apply(x, rest[1])
        elif kind == "if":
            sign, bound, then, other = rest
            held = x > bound if sign == ">" else x < bound
            found = ">" if x > bound else "<" if x < bound else "="
            op = then if held else other
            lines.append(f"{x}{found}{bound}:" + (_worked(x, op) if op else "no"))
            x = apply(x, op) if op else x
        else:
            bound, op = rest
            while x < bound:
                lines.append(f"{x}<{bound}:{_worked(x, op)}")
                x = apply(x, op)
            lines.append(f"{x}>={bound}")
    return x, lines


def _steps(rng: Random) -> tuple[int, list[Step]]:
    start = int(rng.random() * pick(rng, (10, 20, 20, 60)))
    x = start
    steps: list[Step] = []
    while len(steps) < 4 and (len(steps) < 2 or rng.random() < 0.5):
        roll = rng.random()
        step: Step
        if roll < 0.62:
            step = ("do", _op(rng, x))
        elif roll < 0.74:
            step = ("times", 2 + int(rng.random() * 2), ("+", 1 + int(rng.random() * 9)))
            if rng.random() < 0.5 and x >= 12:
                step = ("times", 2 + int(rng.random() * 2), ("-", 1 + int(rng.random() * (x // 3))))
            elif rng.random() < 0.3 and 0 < x < 30:
                step = ("times", 2, ("*", 2 + int(rng.random() * 2)))
        elif roll < 0.9:
            bound = max(1, x + int(rng.random() * 20) - 10)
            step = ("if", pick(rng, "<>"), bound, _op(rng, x, "+-*"), _op(rng, x, "+-") if rng.random() < 0.5 else None)
        elif x > 0:
            op = ("*", 2 + int(rng.random() * 2)) if rng.random() < 0.4 else ("+", 3 + int(rng.random() * 9))
            step = ("until", x + 1 + int(rng.random() * (4 * op[1])), op)
        else:
            continue
        steps.append(step)
        x = _run(x, [step])[0]
    return start, steps


_DO: Final = lined("""
+: add {k}|add {k} to it|increase it by {k}|put {k} on top|count {k} up|make it {k} more|raise it by {k}|plus {k}
-: take away {k}|subtract {k}|take {k} off|decrease it by {k}|remove {k}|lower it by {k}|make it {k} less|minus {k}
*: multiply it by {k}|take it {k} times|times {k}|multiply by {k}
/: divide it by {k}|divide by {k}|share it by {k} and keep one part|split it into {k} equal parts and keep one
""")
_SPECIAL: Final = {("*", 2): ("double it", "double the result", "take it twice"), ("*", 3): ("triple it",),
    ("/", 2): ("halve it", "take half of it", "keep half"), ("+", 1): ("add one", "count one up")}  # fmt: skip
_HAPPENS: Final = lined("""
+: {k} {o} are put in|{n} adds {k} {o}|{k} more {o} come in|it gets {k} more|someone brings {k}
-: {k} {o} are taken out|{n} takes {k} {o} away|{k} {o} go out|it loses {k}|{k} of them are sold
*: the number of {o} is multiplied by {k}|the {o} become {k} times as many
/: only one of every {k} {o} stays|the {o} are divided by {k} and one part stays
""")
_TIMES: Final = ("twice", "two times", "once and then once more"), ("three times", "3 times", "3x")


def _said_op(rng: Random, op: Op, forms: dict[str, tuple[str, ...]], words: dict[str, str]) -> str:
    if forms is _DO and op in _SPECIAL and rng.random() < 0.7:
        return pick(rng, _SPECIAL[op])
    k = in_words(op[1]) if rng.random() < 0.1 else str(op[1])
    return pick(rng, forms[op[0]]).format(k=k, **words)


def _said(rng: Random, step: Step, forms: dict[str, tuple[str, ...]], words: dict[str, str]) -> str:
    kind, *rest = step
    if kind == "do":
        return _said_op(rng, rest[0], forms, words)
    if kind == "times":
        text, often = _said_op(rng, rest[1], forms, words), pick(rng, _TIMES[rest[0] - 2])
        return pick(rng, ("{t}, {o}", "{o}: {t}", "{t}. Do that {o}", "{t} ({o})")).format(t=text, o=often)
    if kind == "until":
        text = _said_op(rng, rest[1], forms, words)
        return pick(
            rng,
            (
                "as long as it is below {b}, {t}",
                "{t} again and again until it is at least {b}",
                "repeat: {t}, until there are {b} or more",
                "while it is less than {b}, {t}",
            ),
        ).format(b=rest[0], t=text)
    sign, bound, then, other = rest
    sizes = ("over", "more than", "larger than", "above") if sign == ">" else ("under", "less than", "below")
    forms_of_if = ("if it is {s} {b}, {t}", "if it is now {s} {b}, {t}", "{t}, but only if it is {s} {b}",
        "when it is {s} {b}: {t}")  # fmt: skip
    text = pick(rng, forms_of_if).format(s=pick(rng, sizes), b=bound, t=_said_op(rng, then, forms, words))
    if other:
        text += pick(rng, ("; otherwise {t}", ", else {t}", "; if not, {t}")).format(
            t=_said_op(rng, other, forms, words)
        )
    return text


_RULES: Final = lined("""
begin: start with {x}|think of {x}|take the number {x}|begin at {x}|you have {x}|the number is {x}|write down {x}|let \
n be {x}|we start from {x}|there is a {x} on the paper|set the counter to {x}
end: what <is> it<now>?|what number comes out?|which number do you have<now>?|what is the result?|what do you get?|\
result?|the last number?|tell me the result|give the final number|which number is left?|what does the counter \
show<now>?|final value?|what comes out at the end?
is: is|will be
now: | now| at the end| then| in the end
print: what does this print?|what is printed?|output?|what is the output<of>?|what do I see<of>?|what does <it> print?|\
result?|tell me what is printed|what will <it> show?|give the output|which value is printed?|what comes out?|run this \
in your head<please>|trace <it> and give the output|whats printed|--> ?|and the answer is?|what will python say?|what \
is on the screen afterwards?|i dont understand what <it> prints|what gets printed <at>?|the output, please|I get what?
of: | of this| of the program| if I run it| of this code
please: | please|, thanks
it: it|this code|the program|this script|the code below|the following|this snippet
at: here|at the end|by this
""")


def _recipe(rng: Random, start: int, steps: list[Step]) -> str:
    """The steps in sentences or numbered lines."""
    words: dict[str, str] = {}
    said = [_said(rng, step, _DO, words) for step in steps]
    begin, end = expand(rng, _RULES, "<begin>").format(x=start), expand(rng, _RULES, "<end>")
    roll = rng.random()
    if roll < 0.25:
        mark = pick(rng, ("{i}. ", "{i}) ", "Step {i}: ", "- ", "{i}: "))
        rows = [mark.format(i=i) + capital(t) for i, t in enumerate([begin, *said], 1)]
        return "\n".join(rows) + "\n" + capital(end)
    if roll < 0.6:
        text = ". ".join([capital(t) for t in (begin, *said)]) + ". " + capital(end)
    else:
        join = pick(rng, (", then ", ", ", " and then ", "; ", " -> ", ". Then ", ", after that ", ", next "))
        text = capital(begin) + join + join.join(said) + ". " + capital(end)
    return phrase(rng, text, asking=0.0) if rng.random() < 0.3 else text


_HOLDERS: Final = ("a box", "the jar", "a shelf", "the bus", "a counter", "the basket", "the store", "a drawer",
    "the pond", "a list", "the till", "our cellar")  # fmt: skip


def _event(rng: Random, start: int, steps: list[Step]) -> str:
    """The steps as what happens to a thing that holds others."""
    words = {"o": pick(rng, OBJECTS), "n": pick(rng, NAMES)}
    holder = pick(rng, _HOLDERS)
    begin = pick(rng, ("{h} holds {x} {o}", "there are {x} {o} in {h}", "in {h} are {x} {o}", "{h} has {x} {o}"))
    text = capital(begin.format(h=holder, x=start, **words)) + ". "
    for step in steps:
        text += capital(pick(rng, ("", "", "then ", "later ", "next, ")) + _said(rng, step, _HAPPENS, words)) + ". "
    the = "the " + holder.split(" ", 1)[1]
    return text + pick(rng, ("How many {o} are in {h} now?", "How many {o} does {h} hold at the end?",
    "How many {o} now?",
        "What is the number of {o} in the end?")).format(h=the, **words)  # fmt: skip


_VARIABLES: Final = ("x", "x", "n", "a", "k", "y", "count", "total", "value", "num", "i", "score", "m", "t", "result")


def _coded_op(rng: Random, name: str, op: Op) -> str:
    sign = "//" if op[0] == "/" else op[0]
    return f"{name} {sign}= {op[1]}" if rng.random() < 0.5 else f"{name} = {name} {sign} {op[1]}"


def _coded(rng: Random, start: int, steps: list[Step]) -> str:
    name = pick(rng, _VARIABLES)
    lines = [f"{name} = {start}"]
    for kind, *rest in steps:
        if kind == "do":
            lines.append(_coded_op(rng, name, rest[0]))
        elif kind == "times":
            counter = pick(rng, ("_", "j", "step"))
            lines += [f"for {counter} in range({rest[0]}):", "    " + _coded_op(rng, name, rest[1])]
        elif kind == "until":
            lines += [f"while {name} < {rest[0]}:", "    " + _coded_op(rng, name, rest[1])]
        else:
            sign, bound, then, other = rest
            lines += [f"if {name} {sign} {bound}:", "    " + _coded_op(rng, name, then)]
            lines += ["else:", "    " + _coded_op(rng, name, other)] if other else []
    return "\n".join([*lines, f"print({name})"])


def _number(rng: Random) -> Made:
    start, steps = _steps(rng)
    value, lines = _run(start, steps)
    roll = rng.random()
    if roll < 0.4:
        question = _shown(rng, _coded(rng, start, steps))
    elif roll < 0.7 or any(step[0] in ("until", "if") for step in steps):
        question = _recipe(rng, start, steps)
    else:
        question = _event(rng, start, steps)
    return ("procedure", start, *map(str, steps)), question, "\n".join(lines), str(value)


# ---- other code ----------------------------------------------------------------------------------------------------

Snippet = tuple[list[str], list[str], Any]  # lines of code, trace, what is printed


def _numbers(rng: Random, top: int = 30) -> list[int]:
    return [int(rng.random() * top) for _ in range(3 + int(rng.random() * 3))]


def _ranged(rng: Random) -> Snippet:
    low, count = pick(rng, (0, 0, 1, 2)), 3 + int(rng.random() * 3)
    name, i = pick(rng, ("total", "s", "x", "acc")), pick(rng, "ijkn")
    k, sign = 2 + int(rng.random() * 4), pick(rng, ("", "", "*", "+"))
    shown = f"range({low + count})" if not low else f"range({low}, {low + count})"
    value, trace = 0, []
    for n in range(low, low + count):
        plus = n * k if sign == "*" else n + k if sign else n
        trace.append(f"{n}:{value}+{plus}={value + plus}")
        value += plus
    added = f"{i} {sign} {k}" if sign else i
    return [f"{name} = 0", f"for {i} in {shown}:", f"    {name} += {added}", f"print({name})"], trace, value


def _letters(rng: Random) -> Snippet:
    w = word(rng)
    c = pick(rng, w)
    lines = ["count = 0", f"for c in '{w}':", f"    if c == '{c}':", "        count += 1", "print(count)"]
    return lines, [counted(w, c)], w.count(c)


def _listed(rng: Random) -> Snippet:
    items, name = _numbers(rng), pick(rng, ("xs", "a", "items", "nums", "data", "values"))
    lines, trace = [f"{name} = {items}"], [str(items)]
    now = list(items)
    for _ in range(1 + int(rng.random() * 2)):
        k = int(rng.random() * 30)
        at = int(rng.random() * len(now))
        choice = int(rng.random() * 6)
        line = (f"{name}.append({k})", f"{name}.pop()", f"{name}.sort()", f"{name}[{at}] = {k}", f"{name}.reverse()",
            f"{name}.insert(0, {k})")[choice]  # fmt: skip
        if choice == 0:
            now = [*now, k]
        elif choice == 1:
            now = now[:-1]
        elif choice == 2:
            now = sorted(now)
        elif choice == 3:
            now = [*now[:at], k, *now[at + 1 :]]
        else:
            now = now[::-1] if choice == 4 else [k, *now]
        lines.append(line)
        trace.append(str(now))
    at = int(rng.random() * len(now))
    ends: tuple[tuple[str, Any], ...] = (
        (name, now), (f"len({name})", len(now)), (f"max({name})", max(now)), (f"min({name})", min(now)),
        (f"{name}[{at}]", now[at]), (f"{name}[-1]", now[-1]), (f"sum({name})", sum(now)), (f"{name}[0]", now[0]),
    )  # fmt: skip
    shown, value = pick(rng, ends)
    if shown.startswith("sum"):
        total = now[0]
        for n in now[1:]:
            trace.append(f"{total}+{n}={total + n}")
            total += n
    return [*lines, f"print({shown})"], trace, value


def _words(rng: Random) -> Snippet:
    found = list(dict.fromkeys(pick(rng, PLAIN) for _ in range(3 + int(rng.random() * 2))))
    name, at = pick(rng, ("words", "names", "w", "parts", "fruits")), int(rng.random() * len(found))
    ends = ((f"{name}[{at}]", found[at]), (f"{name}[-1]", found[-1]), (f"len({name})", len(found)),
        (f"'{pick(rng, '-_+')}'.join({name})", None), (f"{name}[{at}].upper()", found[at].upper()),
        (f"len({name}[{at}])", len(found[at])))  # fmt: skip
    shown, value = pick(rng, ends)
    if value is None:
        value = shown[1].join(found)
    trace = [",".join([f"{i}:{w}" for i, w in enumerate(found)])]
    if shown.startswith("len(") and "[" in shown:
        trace.append(indexed(found[at]))
    return [f"{name} = {found}", f"print({shown})"], trace, value


def _texts(rng: Random) -> Snippet:
    w, name, k = word(rng), pick(rng, ("s", "w", "name", "t", "text")), 1 + int(rng.random() * 2)
    other = any_word(rng)[:5]
    changes = ((f"{name} = {name} + '{other}'", w + other), (f"{name} = '{other}' + {name}", other + w),
        (f"{name} = {name}.upper()", w.upper()), (f"{name} = {name} * 2", w * 2), (f"{name} = {name}[{k}:]", w[k:]),
        (f"{name} = {name}[::-1]", w[::-1]))  # fmt: skip
    line, now = pick(rng, changes)
    at = int(rng.random() * min(4, len(now)))
    ends = ((name, now), (name, now), (f"len({name})", len(now)), (f"{name}[{at}]", now[at]), (f"{name}[-1]", now[-1]))
    shown, value = pick(rng, ends)
    trace = [indexed(w), indexed(now)]
    return [f"{name} = '{w}'", line, f"print({shown})"], trace, value


def _dictionary(rng: Random) -> Snippet:
    keys = list(dict.fromkeys(pick(rng, PLAIN) for _ in range(2 + int(rng.random() * 2))))
    held = {key: 1 + int(rng.random() * 40) for key in keys}
    name, key = pick(rng, ("d", "prices", "ages", "stock", "m")), pick(rng, keys)
    lines, trace = [f"{name} = {held}"], []
    if rng.random() < 0.5:
        k = 1 + int(rng.random() * 9)
        lines.append(f"{name}['{key}'] += {k}")
        trace.append(f"{key}:{held[key]}+{k}={held[key] + k}")
        held[key] += k
    if rng.random() < 0.25:
        return [*lines, f"print(len({name}))"], [*trace, ",".join(keys)], len(held)
    key = pick(rng, keys)
    return [*lines, f"print({name}['{key}'])"], [*trace, f"{key}:{held[key]}"], held[key]


def _function(rng: Random) -> Snippet:
    name, n = pick(rng, ("f", "g", "calc", "change", "step")), pick(rng, "nxab")
    m, k, x = 2 + int(rng.random() * 4), 1 + int(rng.random() * 9), 1 + int(rng.random() * 12)
    sign = pick(rng, "+-")
    trace, value, square = [], x, rng.random() < 0.25
    twice = not square and rng.random() < 0.3
    for _ in range(2 if twice else 1):
        first = value * (value if square else m)
        trace.append(f"{value}*{value if square else m}={first}")
        value = first + k if sign == "+" else first - k
        trace.append(f"{first}{sign}{k}={value}")
    body = f"    return {n} * {n if square else m} {sign} {k}"
    call = f"{name}({name}({x}))" if twice else f"{name}({x})"
    return [f"def {name}({n}):", body, "", f"print({call})"], trace, value


def _pair(rng: Random) -> Snippet:
    a, b = 1 + int(rng.random() * 40), 1 + int(rng.random() * 40)
    p, q = pick(rng, (("a", "b"), ("x", "y"), ("p", "q"), ("left", "right"), ("m", "n")))
    lines, trace = [f"{p} = {a}", f"{q} = {b}"], [f"{p}={a},{q}={b}"]
    if rng.random() < 0.4:
        lines += pick(rng, ([f"{p}, {q} = {q}, {p}"], [f"tmp = {p}", f"{p} = {q}", f"{q} = tmp"]))
        a, b = b, a
        trace.append(f"{p}={a},{q}={b}")
    roll = rng.random()
    if roll < 0.3:
        return [*lines, f"print({p})"], [*trace, f"{p}={a}"], a
    if roll < 0.6:
        sign = pick(rng, "+-")
        value = a + b if sign == "+" else a - b
        return [*lines, f"print({p} {sign} {q})"], [*trace, f"{a}{sign}{b}={value}"], value
    sign = ">" if a > b else "<" if a < b else "="
    if roll < 0.8:
        held = pick(rng, "<>")
        return [*lines, f"print({p} {held} {q})"], [*trace, f"{a}{sign}{b}"], str(a > b if held == ">" else a < b)
    yes, no = pick(rng, (("yes", "no"), ("big", "small"), ("up", "down"), ("first", "second")))
    lines += [f"if {p} > {q}:", f"    print('{yes}')", "else:", f"    print('{no}')"]
    return lines, [*trace, f"{a}{sign}{b}"], yes if a > b else no


_SNIPPETS: Final[tuple[Callable[[Random], Snippet], ...]] = (
    _ranged, _letters, _listed, _listed, _words, _texts, _dictionary, _function, _pair,
)  # fmt: skip


def _shown(rng: Random, code: str) -> str:
    """Code with what is asked of it, before or after."""
    ask = expand(rng, _RULES, "<print>")
    ask = capital(ask) if rng.random() < 0.6 else ask
    roll = rng.random()
    if roll < 0.25:
        code = f"```{pick(rng, ('', 'python', 'py'))}\n{code}\n```"
    elif roll < 0.35:
        code = pick(rng, ("Code:\n{}", "Program:\n\n{}", ">>>\n{}", "I have this Python:\n\n{}", "Here:\n{}")).format(
            code
        )
    ask = phrase(rng, ask, asking=0.0) if rng.random() < 0.4 else ask
    return f"{ask}\n\n{code}" if rng.random() < 0.5 else code + pick(rng, ("\n\n", "\n")) + ask


def _bare(rng: Random) -> Made:
    """An expression and nothing else."""
    items, largest = _numbers(rng, 100), rng.random() < 0.5
    best, lines = items[0], []
    for x in items:
        best = max(x, best) if largest else min(x, best)
        lines.append(f"{x}:{best}")
    code = f"{'max' if largest else 'min'}({items})"
    return ("code", code), code, "\n".join(lines), str(best)


def procedure(rng: Random) -> Made:
    """The key, the question, the trace and the answer of a procedure or of a short program."""
    roll = rng.random()
    if roll < 0.58:
        return (_bare if roll < 0.04 else _number)(rng)
    lines, trace, value = pick(rng, _SNIPPETS)(rng)
    return ("code", *lines), _shown(rng, "\n".join(lines)), "\n".join(trace), str(value)
