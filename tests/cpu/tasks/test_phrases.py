"""Tasks over phrases and words give what plain Python gives; test_subjects.py has programs."""

import random

from perilune.tasks.composed.phrases import task
from perilune.tasks.more_programs import LETTERS


def test_tasks_give_what_python_gives() -> None:
    rng = random.Random(5)
    for _ in range(500):
        (_, code, s, t, *w), question, trace, answer = task(rng)
        if "aeiou" in code:
            assert sum(c in "aeiou" for c in s) == int(answer)
        else:
            assert str(eval(code, {"s": s, "t": t, "w": w, "a": LETTERS})) == answer
        assert trace and "{" not in question
