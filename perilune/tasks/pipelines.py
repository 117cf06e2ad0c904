"""Small programs of several steps, in prose or as lines of Python: the trace is what each step gives."""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from perilune.tasks.more_programs import indexed, word
from perilune.tasks.problem import pick

# A step: in prose, as a line of Python over `a`, and what it does.
Step = tuple[str, str, Callable[[Any], Any]]

_LIST_STEPS: Final[tuple[Step, ...]] = (
    ("sort it", "a = sorted(a)", sorted), ("put it in ascending order", "a.sort()", sorted),
    ("reverse it", "a = a[::-1]", lambda a: a[::-1]), ("turn it around", "a.reverse()", lambda a: a[::-1]),
    ("double every number", "a = [2 * n for n in a]", lambda a: [2 * n for n in a]),
    ("add 1 to every number", "a = [n + 1 for n in a]", lambda a: [n + 1 for n in a]),
    ("keep only the even numbers", "a = [n for n in a if n % 2 == 0]", lambda a: [n for n in a if n % 2 == 0]),
    ("keep only the odd numbers", "a = [n for n in a if n % 2 == 1]", lambda a: [n for n in a if n % 2]),
    ("drop the first item", "a = a[1:]", lambda a: a[1:]), ("drop the last item", "a = a[:-1]", lambda a: a[:-1]),
    ("take the first two items", "a = a[:2]", lambda a: a[:2]), ("append 5", "a.append(5)", lambda a: [*a, 5]),
    ("remove the smallest number", "a.remove(min(a))", lambda a: [n for i, n in enumerate(a) if i != a.index(min(a))]),
)  # fmt: skip
_LIST_ENDS: Final[tuple[Step, ...]] = (
    ("give the sum", "print(sum(a))", sum), ("give the largest number", "print(max(a))", max),
    ("give the smallest number", "print(min(a))", min), ("count the items", "print(len(a))", len),
    ("give the first item", "print(a[0])", lambda a: a[0]), ("give the last item", "print(a[-1])", lambda a: a[-1]),
)  # fmt: skip
_WORD_STEPS: Final[tuple[Step, ...]] = (
    ("reverse it", "a = a[::-1]", lambda a: a[::-1]), ("write it backwards", "a = a[::-1]", lambda a: a[::-1]),
    ("put it in capitals", "a = a.upper()", str.upper), ("drop the first letter", "a = a[1:]", lambda a: a[1:]),
    ("drop the last letter", "a = a[:-1]", lambda a: a[:-1]),
    ("take the first three letters", "a = a[:3]", lambda a: a[:3]),
    ("double it", "a = a + a", lambda a: a + a), ("add an s at the end", 'a = a + "s"', lambda a: a + "s"),
    ("take every second letter", "a = a[::2]", lambda a: a[::2]),
)  # fmt: skip
_WORD_ENDS: Final[tuple[Step, ...]] = (
    ("count the letters", "print(len(a))", len), ("give the first letter", "print(a[0])", lambda a: a[0]),
    ("give the last letter", "print(a[-1])", lambda a: a[-1]),
)  # fmt: skip
_BEGINS: Final = ("Take {x}", "Start with {x}", "Given {x}", "You have {x}", "Here is {x}", "Use {x}", "I have {x}")
_JOINS: Final = (", then ", " and then ", ", and ", ". Then ", " and ", "; next ", ". After that ")
_ASKS: Final = ("", "", " What do you get?", " What is the result?", " What comes out?", " Tell me the result.")
_CODE_ASKS: Final = (
    "What does this print?\n{c}", "What is the output of this program?\n{c}", "{c}\n\nWhat is printed?", "{c}\nOutput?",
    "Run this in your head:\n{c}", "What will this Python code print?\n\n{c}",
    "```python\n{c}\n```\nWhat does it print?",
    "I ran\n{c}\nWhat did I see?", "Result of this code:\n{c}", "Python:\n{c}\nWhat is shown on the screen?",
)  # fmt: skip


def _traced(value: Any) -> str:
    return indexed(value) if isinstance(value, str) and len(value) > 1 else str(value)


def _steps(rng: Random) -> tuple[Any, list[Step]]:
    """A list or a word and one to three steps, the last of which may give one value."""
    if listed := rng.random() < 0.6:
        start: Any = [int(rng.random() * pick(rng, (10, 50))) for _ in range(3 + int(rng.random() * 3))]
    else:
        start = word(rng)
    steps = [pick(rng, _LIST_STEPS if listed else _WORD_STEPS) for _ in range(1 + int(rng.random() * 2))]
    if len(steps) == 1 or rng.random() < 0.6:
        steps.append(pick(rng, _LIST_ENDS if listed else _WORD_ENDS))
    return start, steps


def pipeline(rng: Random) -> tuple[tuple[Any, ...], str, str, str]:
    """The key, the question, the trace and the answer of such a program; each step gives a result."""
    while True:
        start, steps = _steps(rng)
        values = [start]
        for _, _, does in steps:
            if values[-1] in ([], ""):
                break
            values.append(does(values[-1]))
        if len(values) > len(steps) and values[-1] not in ([], "") and len(str(values[-1])) < 40:
            break
    lines = [code for _, code, _ in steps]
    if rng.random() < 0.45:
        written = f'a = "{start}"' if isinstance(start, str) else f"a = {start}"
        if not lines[-1].startswith("print"):
            lines.append("print(a)")
        question = pick(rng, _CODE_ASKS).format(c="\n".join([written, *lines]))
    else:
        what = f"the word {start}" if isinstance(start, str) else f"the list {start}"
        text = pick(rng, _BEGINS).format(x=what)
        for i, (said, _, _) in enumerate(steps):
            join = pick(rng, (", ", ". ", ": ") if i == 0 else _JOINS)
            text += join + (said.capitalize() if join == ". " else said)
        question = f"{text}.{pick(rng, _ASKS)}"
    trace = "\n".join([_traced(v) for v in values])
    return ("pipeline", str(start), *lines), question, trace, str(values[-1])


def loop(rng: Random) -> tuple[tuple[Any, ...], str, str, str]:
    """A loop over a few numbers that adds up, counts or finds; the trace has the running value."""
    items = [int(rng.random() * 30) for _ in range(3 + int(rng.random() * 3))]
    k, roll = 5 + int(rng.random() * 20), int(rng.random() * 5)
    test = ("", f"n > {k}", f"n < {k}", "n % 2 == 0", "n % 2 == 1")[roll]
    count = rng.random() < 0.4
    name = pick(rng, ("total", "s", "result", "x", "count" if count else "sum_"))
    body = f"{name} += {'1' if count else 'n'}"
    inner = f"    if {test}:\n        {body}" if test else f"    {body}"
    code = f"{name} = 0\nfor n in {items}:\n{inner}\nprint({name})"
    value, lines = 0, []
    for n in items:
        if (not roll) or (n > k, n < k, n % 2 == 0, n % 2 == 1)[roll - 1]:
            lines.append(f"{n}:{value}+{1 if count else n}={value + (1 if count else n)}")
            value += 1 if count else n
        else:
            lines.append(f"{n}:{value}")
    return ("loop", roll, k, count, *items), pick(rng, _CODE_ASKS).format(c=code), "\n".join(lines), str(value)
