"""Short Python programs for `programs`: made from a grammar, or a line that does what is asked of a phrase or of words.
They run on values that write down their steps. data/snippets.txt has the grammar, then the lines.

A variable is named where it gets a value: `x=4`, then `y=4*3=12`. A loop over a range or a text has a line of its
turns, then each turn has one: `2:5+2=7`, with a test `4 even:0+4=4` or `7 odd:4` (the value so far). A call begins
`f(3):3>1 True:3-1=2` and ends `f(3)=3*2=6`. `17=5*3r2` is a division with remainder.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import accumulate
from operator import add
from random import Random
from typing import Any, Final

from perilune.tasks.composed.exercises import picked, places
from perilune.tasks.more_programs import LETTERS, counted, indexed, lettered, ordinal, spelled, word
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, enumerated, expand, lined, phrase
from perilune.tasks.words import NAMES, PLAIN, any_word, lines

Does = Callable[..., Any]
_STEP: Final = re.compile(r"\d+[-+*]\d+=-?\d+")
# How a program is changed before it runs: its values are those that write down their steps.
_MEANT: Final = (
    (r"(for [\w, ]+ in )(\w+(?:\.\w+)?(?:\(.*?\))?|\[.*?\]|'\w+')", r"\1turns(\2)"),
    (r"(?<![f\w])'[^'\n]*'", r"S(\g<0>)"), (r"\b\d+\b(?!')", r"N(\g<0>)"), (r"(?m)^(\w+ = )(\{.*\})", r"\1M(\2)"),
    (r"= (\[[^]]*\])", r"= L(\1)"), ("(?m)^def ", "@called\ndef "),
    (r"(?<=\S )(for [\w, ]+ in )turns\(", r"\1each("), (r"(\w+) not in (S\(.*?\))", r"lacks(\1, \2)"),
)  # fmt: skip
_NAMING: Final = (
    (r"(?m)^( *)(\w+) ([-+*/%]+)= (.+)$", r"\1\2 = \2 \3 (\4)"),
    (r"(?m)^( *)(\w+(?:, \w+)*) = (?![\[{])(.+)$", r"\1\2 = named('\2', (\3))"),
)


def run(code: str, naming: bool = False) -> tuple[str, str]:
    """The trace, which names variables if `naming`, and the output."""
    rows, printed, around = [""], list[str](), list[str]()
    now = "[]" if "= []" in code else "0" if "= 0\n" in code else ""
    last: Any = None  # what the last step gave
    small = "\n" not in code

    def say(step: str, value: Any = None, once: bool = False) -> Any:
        nonlocal last
        row, last = rows[-1], value
        if row.endswith(":"):
            rows[-1] = ("" if re.match(re.escape(row[:-1]) + "[ :<=>]", step) else row) + step
        elif around:
            rows[-1] += f",{step}"
        elif not once or step not in rows:
            rows.append(step)
        return value

    def named(name: str, value: Any) -> Any:
        nonlocal now, last
        made, value = value is last and not around, kept(N(value) if isinstance(value, R) else value)
        shown, (before, colon, step) = str(value) or "''", rows[-1].rpartition(":")
        if isinstance(value, tuple):
            say(",".join(map("{}={}".format, str.split(name, ", "), value)))
        elif made and (step == shown or step.endswith(f"={shown}")):
            rows[-1] = f"{before}{colon}{name}={step}"
        elif not around:
            say(f"{name}={shown}")
        now, last = (now if isinstance(value, list) else str(value)), None
        return value

    def kept(value: Any) -> Any:
        kind = {int: N, str: S, list: L}.get(type(value))
        return kind(value) if kind else tuple(map(kept, value)) if isinstance(value, tuple) else value

    def turns(items: Iterable[Any], untaken: bool = True) -> Iterator[Any]:
        depth = len(around)
        if naming and not around and isinstance(items, (range, str)):
            say(indexed(items) if isinstance(items, str) else ",".join(map(str, items)))
        try:
            for x in map(kept, items):
                if rows[-1] == f"{','.join(around)}:":
                    rows.pop()
                around[depth:] = [" ".join(map(str, x)) if isinstance(x, tuple) else str(x)]
                rows.append(f"{','.join(around)}:")
                yield x
                if rows[-1].endswith(":"):
                    rows[-1] = f"{rows[-1]}{now}" if now and untaken else rows[-1][:-1]
        finally:
            del around[depth:]

    def called(function: Does) -> Does:
        def call(*args: Any) -> Any:
            nonlocal last
            shown = f"{function.__name__}({','.join(map(str, args))})"
            names = function.__code__.co_varnames
            begin = f"{function.__name__}({','.join(map('{}={}'.format, names, args))})" if args[1:] else shown
            say(f"{begin}:")
            value = function(*args)
            if _STEP.fullmatch(rows[-1]):
                rows[-1] = f"{shown}={rows[-1]}"
            elif not (rows[-1].startswith(f"{begin}:") and rows[-1].endswith(f"={value}")):
                say(f"{shown}={value}")
            last = None
            return value

        return call

    def work(sign: str, name: str) -> Does:
        def worked(a: int, b: int) -> Any:
            nonlocal now
            value = getattr(int, name)(int(a), int(b))
            if sign == "%":
                rest = f" {'odd' if value else 'even'}:" if b == 2 else f"={b}*{int(a) // int(b)}r{value}"
                return say(f"{a}{rest}{':' * (b != 2 and around != [])}", R(value), not around)
            now = f"{value}"
            if sign == "/":
                return say(f"{a}={b}*{value}r{int(a) % int(b)}", N(value), True)
            return say(f"{a}{sign}{a if 'pow' in name else b}={value}", N(value))

        return worked

    def test(name: str) -> Does:
        def tested(a: int, b: int) -> Any:
            found = getattr(int, name)(a, b)
            if rows[-1].endswith("False:") and not around:  # the next test has a line of its own
                rows[-1] = rows[-1][:-1]
            if type(a) is type(b):
                say(f"{a}{'<' if int(a) < int(b) else '>' if int(a) > int(b) else '='}{b} {found}:")
            return found

        return tested

    def change(name: str) -> Does:
        def changed(text: str, *args: str) -> Any:
            new = getattr(str, name)(text, *args)
            say(spelled(str(text)), once=True)
            return say(spelled(str(text).replace(args[0], "-") if args[1:] == ("",) else new), S(new))

        return changed

    def part(whole: Any, at: Any) -> Any:
        letters = isinstance(whole, str)
        mark, items = ("", str(whole)) if letters else (",", list(whole))
        shown = [f"{i}{c}" for i, c in enumerate(items, 1)] if letters else [f"{i}:{x}" for i, x in enumerate(items)]
        say(mark.join(shown), once=True)
        say(mark.join(shown[at]) if isinstance(at, slice) else shown[at])
        return kept(items[at])

    def grow(name: str) -> Does:
        def grown(items: list[Any], *args: Any) -> Any:
            nonlocal now
            if not around and rows[-1] != str(items):
                say(str(items))
            value = getattr(list, name)(items, *args)
            now = str(items)
            return say(now, value)

        return grown

    def best(of: Does) -> Does:
        def found(*given: Any, key: Any = None) -> Any:
            items, by = list(given[0] if len(given) == 1 else given), len if key else int
            steps = [
                f"{indexed(x)} {len(x)}:{b}" if key else f"{x}:{b}"
                for x, b in zip(items, accumulate(items, lambda a, b: of(a, b, key=by)))
            ]
            say("\n".join(steps) if key or small else f"{of.__name__} {','.join(steps)}")
            return of(items, key=by)

        return found

    def ordered(given: Any, reverse: bool = False) -> Any:
        items, texts = list(map(str, given)), any(isinstance(x, str) for x in given)
        made = sorted(items, key=str if texts else int, reverse=reverse)
        return say(
            lettered(items, reverse) if texts else picked(items, made), L([S(x) if texts else N(x) for x in made])
        )

    def size(x: Any) -> Any:
        return say(indexed(x) if isinstance(x, str) else places(list(map(str, x))), N(len(x)), True)

    def show(*given: Any) -> None:
        printed.append(" ".join(map(str, given)))
        if around and rows[-1].endswith(":"):
            rows[-1] += printed[-1]

    def holds(text: str, part: str, no: bool = False) -> Any:
        found = (part in str(text)) != no
        return say(f"{part} {found}:" if around else f"{indexed(str(text))} {'yes' if found else 'no'}", found)

    def put(held: dict[Any, Any], key: Any, value: Any) -> None:
        dict.__setitem__(held, key, named(str(key), value))

    def among(items: Any, x: Any) -> Any:
        return say(",".join([f"{y}{'=' if str(y) == str(x) else '!='}{x}" for y in items]), str(x) in map(str, items))

    def times(text: str, n: int) -> Any:
        return say("\n".join([f"{i + 1}:{text}" for i in range(int(n))]), S(str(text) * n))

    compared = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__hash__")
    signs = {"add": "+", "sub": "-", "mul": "*", "pow": "*", "floordiv": "/", "mod": "%"}.items()
    N: Any = type("N", (int,), {f"__{n}__": work(sign, f"__{n}__") for n, sign in signs}
        | {n: test(n) for n in compared[:-1]} | {"__hash__": int.__hash__}
        | {"__truediv__": lambda a, b: say(f"{a}/{b}={int(a) / int(b)}", int(a) / int(b))})  # fmt: skip
    R: Any = type("R", (N,), {n: getattr(int, n) for n in compared})  # a remainder: compared without a line
    S: Any = type("S", (str,), {n: change(n) for n in ("upper", "lower", "title", "capitalize", "replace")} | {
        "__getitem__": part, "__mul__": times, "__add__": lambda s, t: say(f"{s}{t}", S(f"{s}{t}")),
        "count": lambda s, c: say(counted(str(s), str(c)), N(sum(x in str(c) for x in str(s)))),
        "split": lambda s: L(map(S, str.split(s))),
        "__contains__": holds,
        "join": lambda s, t: say(str.join(s, t), S(str.join(s, t)))})  # fmt: skip
    grows = ("append", "pop", "insert", "reverse", "extend", "__setitem__")
    L: Any = type("L", (list,), {n: grow(n) for n in grows} | {
        "__getitem__": part, "sort": lambda x: list.__init__(x, ordered(x)), "__contains__": among})  # fmt: skip
    get = dict[Any, Any].__getitem__
    look = {"__getitem__": lambda d, k: (say(f"{k}:{get(d, k)}"), get(d, k))[1]}
    M: Any = type("M", (dict,), {**look, "__setitem__": put, "__contains__": among})
    for shown, meant in (*(_NAMING if naming else ()), *_MEANT):
        code = re.sub(shown, meant, code)
    exec(code, {"N": N, "S": S, "L": L, "M": M, "print": show, "len": size, "sorted": ordered, "max": best(max),
        "min": best(min), "sum": lambda x: reduce(add, x) if x else 0, "turns": turns, "called": called, "str": S,
        "int": N, "abs": lambda x: N(abs(int(x))), "named": named, "each": lambda x: turns(x, False),
        "lacks": lambda c, s: holds(s, c, True), "reversed": lambda x: x[::-1]})  # fmt: skip
    return "\n".join([row.rstrip(":") for row in rows if row]) or printed[-1], "\n".join(printed)


# Programs, as a grammar: `~` is a new line, `^` an indent, a capital letter a variable, <part> one of the part's forms.
_PROGRAMS, _PHRASES = lines("snippets.txt").split("\n\n")
_RULES: Final = lined(_PROGRAMS)
_NAMED: Final = re.compile(r"(?<!')\b[A-Z]\b")


def snippet(rng: Random, begin: str = "<program>") -> tuple[str, str, str]:
    """A program, its trace and its output."""
    w, n = word(rng), [f"{1 + int(rng.random() * 39)}" for _ in range(3)]
    v, u, *more = list(dict.fromkeys([any_word(rng) for _ in range(9)]))[: 3 + int(rng.random() * 3)]
    numbers = [int(rng.random() * pick(rng, (12, 30))) for _ in range(3 + int(rng.random() * 3))]
    if fresh := begin == "<fresh>":  # names of one letter at times, and small numbers
        v, u, *more = rng.sample(LETTERS, 2 + len(more)) if rng.random() < 0.35 else (v, u, *more)
        numbers = [1 + int(rng.random() * 9) for _ in numbers] if rng.random() < 0.5 else numbers
    held = {k: 1 + int(rng.random() * 30) for k in rng.sample([u, v, more[0]], 3)}
    rules = {
        **_RULES, "w": [w], "v": [v], "u": [u], "n": n, "b": [f"{8 + int(rng.random() * 22)}"], "list": [f"{numbers}"],
        "words": [f"{[v, u, *more]}"], "held": [f"{held}"], "c": w, "e": LETTERS, "d": "2345", "k": "123456789",
        "p": NAMES, "o": PLAIN, "t3": more[:1],
    }  # fmt: skip
    if fresh:
        rules |= {
            "sl": [f"{[1 + int(rng.random() * 9) for _ in numbers[: pick(rng, (2, 3, 4))]]}"],
            "n1": [f"{10 + int(rng.random() * pick(rng, (20, 40, 90)))}"],
            "q1": [f"{2 + int(rng.random() * 9)}"],
        }
    code = expand(rng, rules, begin).replace("~", "\n").replace("^", "    ")
    names: dict[str, str] = {}
    for k in dict.fromkeys(_NAMED.findall(code)):  # no name twice
        names[k] = pick(rng, [name for name in _RULES[k] if name not in names.values()])
    code = _NAMED.sub(lambda m: names[m[0]], code)
    try:
        trace, printed = run(code, naming=True)
    except (IndexError, KeyError, ValueError):  # of a list that has become too short
        printed = ""
    if not printed or (begin != "<program>" and len(trace) > 450):
        return snippet(rng, begin)
    return code if rng.random() < 0.4 else code.replace("'", '"'), trace, printed


def listing(rng: Random, begin: str = "<quick>") -> tuple[tuple[str, str], str, str, str]:
    """A key, a question, a trace and an answer: a program of a few lines as tutorials have it; `<tiny>`, `<fresh>`."""
    code, trace, printed = snippet(rng, begin)
    shown, gap = code, pick(rng, ("\n\n", "\n\n", "\n"))
    if "\n " not in code and rng.random() < 0.08:
        shown = code.replace("\n", "; ")
    if rng.random() < 0.55:
        shown = f"```{pick(rng, ('python', 'python', 'python', 'py', ''))}\n{shown}\n```"
    first = rng.random() < 0.65
    ask = expand(rng, _RULES, "<ask>" if first or rng.random() < 0.4 else "<after>")
    if begin == "<tiny>" and rng.random() < 0.6:
        ask = capital(expand(rng, _RULES, "<ask2>")) if rng.random() < 0.6 else expand(rng, _RULES, "<ask2>")
    if begin == "<fresh>" and rng.random() < 0.75:
        ask, behind = _chatted(rng, code, printed)
        if behind:
            return ("code", code), f"{ask}{gap}{shown}{gap}{behind}", trace, printed
    if first and rng.random() < 0.3:
        ask = phrase(rng, ask, asking=0.0)
    return ("code", code), f"{ask}{gap}{shown}" if first else f"{shown}{gap}{ask}", trace, printed


def _chatted(rng: Random, code: str, printed: str) -> tuple[str, str]:
    """What is asked of a program with a remark, and what follows the program if both sides have words."""
    number = re.fullmatch(r"-?\d+", printed) is not None
    rules = {**_RULES, "res": ("number", "number", "value", "result") if number else ("output", "result", "text")}
    last, roll = re.search(r"^print\(([a-z]\w*)\)$", code, re.MULTILINE), rng.random()
    ask = expand(rng, rules, "<ask3>")
    if last and rng.random() < 0.3:
        ask = pick(rng, _RULES["var"]).format(v=last[1])
    if roll < 0.3:
        return capital(expand(rng, rules, "<lead>")), ask if roll < 0.15 else capital(ask)
    if roll < 0.42:
        return capital(ask), expand(rng, rules, "<tail3>")
    return capital(ask) if roll < 0.75 else ask, ""


# What is done, over a phrase s, a word t, words w and the alphabet a; and the forms that ask for it.
_TASKS: Final = [row.split(" = ", 1) for row in _PHRASES.splitlines()]
_ENDS: Final = ("", "", "", " What do you get?", " What is the result?", " Tell me the result.")


def task(rng: Random) -> tuple[tuple[Any, ...], str, str, str]:
    """The key, the question, the trace and the answer."""
    code, forms = pick(rng, _TASKS)
    w = rng.sample(PLAIN, 3 + int(rng.random() * 3))
    h = pick(rng, w)[0]
    w[1:2] = dict.fromkeys([*[x for x in rng.sample(PLAIN, 60) if x[0] == h and x not in w][:1], any_word(rng)])
    s, t = " ".join([any_word(rng) for _ in range(2 + int(rng.random() * 3))]), word(rng)
    s = s.upper() if "lower" in code else s
    c = pick(rng, s.replace(" ", ""))
    e = pick(rng, [x for x in LETTERS if x not in t + c.lower()])
    n, p = 1 + int(rng.random() * 3), 4 + int(rng.random() * 16)
    z = t[-2:] if rng.random() < 0.5 else pick(rng, w)[-2:]
    given: dict[str, Any] = {
        "c": c, "d": pick(rng, t if "t" in code[:2] else w[0]), "e": e, "h": h, "z": z,
        "b": LETTERS[p - 1], "k": pick(rng, "-_+/"), "i": n - 1, "n": n, "m": 4 + n, "p": p, "y": p + 1,
    }  # fmt: skip
    trace, answer = run(f"s = '{s}'\nt = '{t}'\nw = {w}\na = '{LETTERS}'\nprint({code.format(**given)})")
    if not answer:
        return task(rng)
    q, mark = pick(rng, ("", "'", '"')), pick(rng, '\'""')
    shown = {k: f"{q}{x}{q}" if isinstance(x, str) else x for k, x in given.items()}
    shown |= {"x": f"{mark}{s}{mark}", "t": f"{q}{t}{q}", "z": f'"{z}"', "o": ordinal(rng, n)}
    shown["l"] = pick(rng, (", ".join(w), ", ".join(w), enumerated(w)))
    form = capital(pick(rng, forms.split("|")))
    if "{x}" in form and rng.random() < 0.15:
        form = form.replace("{x}", "this phrase") + "\n{x}"
    elif form[-1] not in "?}" or ": {" not in form:
        form += "" if form[-1] == "?" else "." + pick(rng, _ENDS)
    question = phrase(rng, form).format(**shown)
    return ("task", code.format(**given), s, t, *w), question, trace, answer
