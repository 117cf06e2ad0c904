"""Short Python programs for `programs`: made from a grammar, and run on values that write down their steps.

Each turn of a loop has a line: `2:5+2=7`, with a test `4 even:0+4=4` or `7 odd:4` (the value so far). A call begins
`f(3):3>1:3-1=2` and ends `f(3)=3*2=6`. `17=5*3r2` is a division with a rest.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import accumulate
from operator import add
from random import Random
from typing import Any, Final

from perilune.tasks.composed.exercises import picked, places
from perilune.tasks.more_programs import LETTERS, counted, indexed, lettered, spelled, word
from perilune.tasks.problem import pick
from perilune.tasks.records import lines
from perilune.tasks.wordings import expand, lined
from perilune.tasks.words import any_word

Does = Callable[..., Any]
_STEP: Final = re.compile(r"\d+[-+*]\d+=-?\d+")
# How a program is changed before it runs: its values are those that write down their steps.
_MEANT: Final = (
    (r"(for [\w, ]+ in )(\w+(?:\.\w+)?(?:\(.*?\))?|\[.*?\]|'\w+')", r"\1turns(\2)"),
    (r"(?<![f\w])'[^'\n]*'", r"S(\g<0>)"), (r"\b\d+\b", r"N(\g<0>)"), (r"(?m)^(\w+ = )(\{.*\})", r"\1M(\2)"),
    (r"= (\[[^]]*\])", r"= L(\1)"), ("(?m)^def ", "@called\ndef "),
)  # fmt: skip


def run(code: str) -> tuple[str, str]:
    """The trace and the output."""
    rows, printed, around = [""], list[str](), list[str]()
    now = "[]" if "= []" in code else "0" if "= 0\n" in code else ""

    def say(step: str, value: Any = None) -> Any:
        row = rows[-1]
        if row.endswith(":"):
            rows[-1] = ("" if re.match(re.escape(row[:-1]) + "[ :<=>]", step) else row) + step
        elif around:
            rows[-1] += f",{step}"
        elif step not in rows or _STEP.fullmatch(step):
            rows.append(step)
        return value

    def kept(value: Any) -> Any:
        kind = {int: N, str: S, list: L}.get(type(value))
        return kind(value) if kind else tuple(map(kept, value)) if isinstance(value, tuple) else value

    def turns(items: Iterable[Any]) -> Iterator[Any]:
        depth = len(around)
        try:
            for x in map(kept, items):
                if rows[-1] == f"{','.join(around)}:":
                    rows.pop()
                around[depth:] = [" ".join(map(str, x)) if isinstance(x, tuple) else str(x)]
                rows.append(f"{','.join(around)}:")
                yield x
                if rows[-1].endswith(":"):
                    rows[-1] = f"{rows[-1]}{now}" if now else rows[-1][:-1]
        finally:
            del around[depth:]

    def called(function: Does) -> Does:
        def call(*args: Any) -> Any:
            shown = f"{function.__name__}({','.join(map(str, args))})"
            say(f"{shown}:")
            value = function(*args)
            if _STEP.fullmatch(rows[-1]):
                rows[-1] = f"{shown}={rows[-1]}"
            elif not (rows[-1].startswith(f"{shown}:") and rows[-1].endswith(f"={value}")):
                say(f"{shown}={value}")
            return value

        return call

    def work(sign: str, name: str) -> Does:
        def worked(a: int, b: int) -> Any:
            nonlocal now
            value = getattr(int, name)(int(a), int(b))
            if sign == "%":
                rest = f" {'odd' if value else 'even'}:" if b == 2 else f"={b}*{int(a) // int(b)}r{value}:"
                return say(f"{a}{rest}", value)  # a plain number: it is compared without a line
            now = f"{value}"
            if sign == "/":
                return say(f"{a}={b}*{value}r{int(a) % int(b)}", N(value))
            return say(f"{a}{sign}{a if 'pow' in name else b}={value}", N(value))

        return worked

    def test(name: str) -> Does:
        def tested(a: int, b: int) -> Any:
            if type(a) is type(b):
                say(f"{a}{'<' if int(a) < int(b) else '>' if int(a) > int(b) else '='}{b}:")
            return getattr(int, name)(a, b)

        return tested

    def change(name: str) -> Does:
        def changed(text: str, *args: str) -> Any:
            new = getattr(str, name)(text, *args)
            say(spelled(str(text)))
            return say(spelled(str(text).replace(args[0], "-") if args[1:] == ("",) else new), S(new))

        return changed

    def part(whole: Any, at: Any) -> Any:
        letters = isinstance(whole, str)
        mark, items = ("", str(whole)) if letters else (",", list(whole))
        shown = [f"{i}{c}" for i, c in enumerate(items, 1)] if letters else [f"{i}:{x}" for i, x in enumerate(items)]
        say(mark.join(shown))
        say(mark.join(shown[at]) if isinstance(at, slice) else shown[at])
        return kept(items[at])

    def grow(name: str) -> Does:
        def grown(items: list[Any], *args: Any) -> Any:
            nonlocal now
            if not around:
                say(str(items))
            value = getattr(list, name)(items, *args)
            now = str(items)
            return say(now, value)

        return grown

    def best(of: Does) -> Does:
        def found(*given: Any, key: Any = None) -> Any:
            items, by = list(given[0] if len(given) == 1 else given), len if key else int
            for x, b in zip(items, accumulate(items, lambda a, b: of(a, b, key=by))):
                say(f"{indexed(x)} {len(x)}:{b}" if key else f"{x}:{b}")
            return of(items, key=by)

        return found

    def ordered(given: Any, reverse: bool = False) -> Any:
        items, texts = list(map(str, given)), any(isinstance(x, str) for x in given)
        made = sorted(items, key=str if texts else int, reverse=reverse)
        return say(
            lettered(items, reverse) if texts else picked(items, made), L([S(x) if texts else N(x) for x in made])
        )

    def size(x: Any) -> Any:
        return say(indexed(x) if isinstance(x, str) else places(list(map(str, x))), N(len(x)))

    def show(*given: Any) -> None:
        printed.append(" ".join(map(str, given)))
        if around and rows[-1].endswith(":"):
            rows[-1] += printed[-1]

    def among(items: Any, x: Any) -> Any:
        return say(",".join([f"{y}{'=' if str(y) == str(x) else '!='}{x}" for y in items]), str(x) in map(str, items))

    def times(text: str, n: int) -> Any:
        return say("\n".join([f"{i + 1}:{text}" for i in range(int(n))]), S(str(text) * n))

    signs = {"add": "+", "sub": "-", "mul": "*", "pow": "*", "floordiv": "/", "mod": "%"}.items()
    N: Any = type("N", (int,), {f"__{n}__": work(sign, f"__{n}__") for n, sign in signs}
        | {n: test(n) for n in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")}
        | {"__hash__": int.__hash__})  # fmt: skip
    S: Any = type("S", (str,), {n: change(n) for n in ("upper", "lower", "title", "capitalize", "replace")} | {
        "__getitem__": part, "__mul__": times, "__add__": lambda s, t: say(f"{s}{t}", S(f"{s}{t}")),
        "count": lambda s, c: say(counted(str(s), str(c)), N(sum(x in str(c) for x in str(s)))),
        "split": lambda s: L(map(S, str.split(s))),
        "__contains__": lambda s, c: say(f"{indexed(str(s))} {'yes' if c in str(s) else 'no'}", c in str(s)),
        "join": lambda s, t: say(str.join(s, t), S(str.join(s, t)))})  # fmt: skip
    L: Any = type("L", (list,), {n: grow(n) for n in ("append", "pop", "insert", "reverse", "__setitem__")} | {
        "__getitem__": part, "sort": lambda x: list.__init__(x, ordered(x)), "__contains__": among})  # fmt: skip
    get = dict[Any, Any].__getitem__
    M: Any = type("M", (dict,), {"__getitem__": lambda d, k: say(f"{k}:{get(d, k)}", get(d, k))})
    for shown, meant in _MEANT:
        code = re.sub(shown, meant, code)
    exec(code, {"N": N, "S": S, "L": L, "M": M, "print": show, "len": size, "sorted": ordered, "max": best(max),
        "min": best(min), "sum": lambda x: reduce(add, x) if x else 0, "turns": turns, "called": called, "str": S,
        "reversed": lambda x: x[::-1]})  # fmt: skip
    return "\n".join([row.rstrip(":") for row in rows if row]) or printed[-1], "\n".join(printed)


# Programs, as a grammar: `~` is a new line, `^` an indent, a capital letter a variable, <part> one of the part's forms.
_RULES: Final = lined(lines("snippets.txt"))
_NAMED: Final = re.compile(r"(?<!')\b[A-Z]\b")


def snippet(rng: Random) -> tuple[str, str, str]:
    """A program, its trace and its output."""
    w, n = word(rng), [f"{1 + int(rng.random() * 39)}" for _ in range(3)]
    v, u, *more = list(dict.fromkeys([any_word(rng) for _ in range(9)]))[: 3 + int(rng.random() * 3)]
    numbers = [int(rng.random() * pick(rng, (12, 30))) for _ in range(3 + int(rng.random() * 3))]
    held = {k: 1 + int(rng.random() * 30) for k in rng.sample([u, v, more[0]], 3)}
    rules = {
        **_RULES, "w": [w], "v": [v], "u": [u], "n": n, "b": [f"{8 + int(rng.random() * 22)}"], "list": [f"{numbers}"],
        "words": [f"{[v, u, *more]}"], "held": [f"{held}"], "c": w, "e": LETTERS, "d": "2345", "k": "123456789",
    }  # fmt: skip
    code = expand(rng, rules, "<program>").replace("~", "\n").replace("^", "    ")
    names = {k: pick(rng, forms) for k, forms in _RULES.items() if k.isupper()}
    code = _NAMED.sub(lambda m: names[m[0]], code)
    try:
        trace, printed = run(code)
    except IndexError:  # of a list that has become too short
        printed = ""
    if not printed:
        return snippet(rng)
    return code if rng.random() < 0.4 else code.replace("'", '"'), trace, printed
