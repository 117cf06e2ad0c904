"""Programs of snippets.py print what Python prints, and their traces name variables."""

import contextlib
import io
import random
import re

import pytest

from perilune.tasks.composed import school
from perilune.tasks.composed.snippets import listing, run, task
from perilune.tasks.more_programs import LETTERS


@pytest.mark.parametrize("begin", ["<quick>", "<fresh>"])
def test_listings_print_what_python_prints(begin: str) -> None:
    rng, shapes = random.Random(3), set()
    for _ in range(1200):
        (_, code), question, trace, printed = listing(rng, begin)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        assert out.getvalue().rstrip("\n") == printed, code
        assert trace and not re.search(r"<[a-z]\w*>|~|named", question + trace), question
        for a, sign, b, value in re.findall(r"(?<![\d.-])(\d+)([-+*])(\d+)=(-?\d+)", trace):
            assert eval(a + sign + b) == int(value), trace
        shapes.add(re.sub(r"\d+|'\w*'|\"\w*\"", "#", code))
    assert len(shapes) > 600


@pytest.mark.parametrize(("code", "trace"), [
    ("x = 5\ny = x * 4\nprint(y - 1)", "x=5 y=5*4=20 20-1=19"),
    ("p = 3\nq = 8\np, q = q, p\nprint(q - p)", "p=3 q=8 p=8,q=3 3-8=-5"),
    ("x = 9\nif x > 9:\n    x += 1\nelse:\n    x -= 2\nprint(x)", "x=9 9=9_False:x=9-2=7"),
    ("t = 0\nfor i in range(3):\n    if i % 2 == 0:\n        t += 1\nprint(t)",
        "t=0 0,1,2 0_even:0+1=1 1_odd:1 2_even:1+1=2"),
    ("def f(a, b):\n    return a * b - 2\n\nprint(f(3, 5))", "f(a=3,b=5):3*5=15 f(3,5)=15-2=13"),
    ("d = {'ink': 4, 'pen': 2}\nd['ink'] += 3\nprint(d['ink'] + d['pen'])", "ink:4 ink=4+3=7 ink:7 pen:2 7+2=9"),
    ("t = ''\nfor c in 'cat':\n    t = c + t\nprint(t)", "t='' 1c2a3t c:c a:ac t:tac"),
    ("n = [6, 2]\nprint(max(n) - min(n))", "max_6:6,2:6 min_6:6,2:2 6-2=4"),
])  # fmt: skip
def test_traces_name_variables_and_list_turns(code: str, trace: str) -> None:
    assert run(code, naming=True)[0] == trace.replace(" ", "\n").replace("_", " ")


def test_numbers_of_stories_stay_in_range() -> None:
    rng = random.Random(5)
    for i in range(3000):
        pattern, text, unit = school.lesson(rng, "fresh" if i % 2 else "story")
        value = eval(re.sub(r"[\^/]", "//", pattern)) if "_" not in pattern and "^" not in pattern else 1
        assert value >= 0 and (unit != "percent" or value < 100), (pattern, text)


def test_tasks_give_what_python_gives() -> None:
    rng = random.Random(5)
    for _ in range(500):
        (_, code, s, t, *w), question, trace, answer = task(rng)
        if "aeiou" in code:
            assert sum(c in "aeiou" for c in s) == int(answer)
        else:
            assert str(eval(code, {"s": s, "t": t, "w": w, "a": LETTERS})) == answer
        assert trace and "{" not in question
