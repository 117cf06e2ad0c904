"""Procedures of several steps for `programs`: one number that is changed step by step, and short Python programs.

The same steps are put as sentences, as numbered lines, as what happens to a thing that is counted, or as code with
loops, conditions and functions. The trace has a line per step that is carried out: `7+5=12`, `12>9:12-9=3`, `4<9:no`.
"""

from random import Random
from typing import Any, Final

from perilune.tasks.composed.snippets import snippet
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, expand, in_words, lined, phrase
from perilune.tasks.words import NAMES, OBJECTS

Made = tuple[tuple[Any, ...], str, str, str]  # key, question, trace, answer
Op = tuple[str, int]  # one of + - * /, and by how much
# ("do", op), ("times", how often, op), ("if", < or >, bound, op, op or None), ("until", bound, op: + or *)
Step = tuple[Any, ...]

# ---- one number ----------------------------------------------------------------------------------------------------


def apply(x: int, op: Op) -> int:
    sign, k = op
    return x + k if sign == "+" else x - k if sign == "-" else x * k if sign == "*" else x // k


def _op(rng: Random, x: int, signs: str = "+-*/") -> Op:
    """An operation with a small result; divisions have no remainder."""
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
is on the screen afterwards?|what does this<python> print?|what does the following<python> \
print?|please give me the output of this<python>|what is the result of running <it>?|predict the output|what would \
<it> output?|what gets printed to the console?|output of <it>?|i dont understand what <it> prints|what gets printed \
<at>?|the output, please|I get what?
of: | of this| of the program| if I run it| of this code
please: | please|, thanks
it: it|this code|the program|this script|the code below|the following|this snippet
at: here|at the end|by this
python:  code| program| Python program| Python code| little script
remark: I say {g}, my teacher says no.|i think {g} but i am not sure.|My friend got {g}.|someone told me it is {g}.|\
Not {g}, I suppose?|I worked it out by hand and got {g}.|First I thought of {g}.|It should be easy, but I doubt my {g}.
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


def _number(rng: Random) -> Made:
    start, steps = _steps(rng)
    value, lines = _run(start, steps)
    said = _recipe if rng.random() < 0.5 or any(step[0] in ("until", "if") for step in steps) else _event
    question = said(rng, start, steps)
    return ("procedure", start, *map(str, steps)), question, "\n".join(lines), str(value)


def _shown(rng: Random, code: str, printed: str = "") -> str:
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
    if printed.isdigit() and rng.random() < 0.1:  # names an expected value, right or wrong
        value = int(printed) + pick(rng, (0, 1, 2, 4, 10))
        ask = f"{expand(rng, _RULES, '<remark>').format(g=value)} {ask}"
    return f"{ask}\n\n{code}" if rng.random() < 0.5 else code + pick(rng, ("\n\n", "\n")) + ask


def coded(rng: Random) -> Made:
    """The same of a short program with loops, functions, lists or texts."""
    code, trace, printed = snippet(rng)
    bare = code.startswith("print(") and rng.random() < 0.6  # an expression and nothing else
    return ("code", code), code[6:-1] if bare else _shown(rng, code, printed), trace, printed


def procedure(rng: Random) -> Made:
    """The key, the question, the trace and the answer of a procedure or of a short program."""
    return _number(rng) if rng.random() < 0.36 else coded(rng)
