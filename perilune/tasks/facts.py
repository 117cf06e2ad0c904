"""The first lines of a thought about a word problem: every number with the words beside it, and the question. A model
that has copied all numbers leaves none out of the expression that follows.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from random import Random
from typing import Final

from perilune.tasks.problem import Problem

_NUMBER: Final = re.compile(
    r"[^\w]*\d|(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|dozen|half|halves|twice|thrice|double|"
    r"triple|quarter|third|\w+teen|(twen|thir|for|fif|six|seven|eigh|nine)ty(-\w+)?|hundred|thousand)\b",
    re.IGNORECASE,
)
_ENDS: Final = re.compile(r"[.,;:!?)]+[\"']*$")
_ASKING: Final = re.compile(
    r"\b(?:how|what|which|who|when|find|calculate|compute|work out|tell|give|determine)\b[^.?!\n]*", re.IGNORECASE
)
BEFORE, AFTER, ASKED = 1, 2, 9  # words before and after a number; words of the question


def facts(text: str) -> str:
    """ "holds 12 eggs; uses 37 eggs", and the beginning of the question on a line of its own if there is one."""
    words = text.split()
    ends = [bool(_ENDS.search(word)) for word in words]
    pieces: list[list[int]] = []  # first and last word of each
    for i, word in enumerate(words):
        if not _NUMBER.match(word):
            continue
        first, last = i, i
        while first > max(i - BEFORE, 0) and not ends[first - 1]:
            first -= 1
        while last < min(i + AFTER, len(words) - 1) and not ends[last]:
            last += 1
        if pieces and first <= pieces[-1][1]:
            pieces[-1][1] = max(last, pieces[-1][1])
        else:
            pieces.append([first, last])
    lines = ["; ".join([" ".join(words[first : last + 1]).rstrip(".,;:!?") for first, last in pieces])]
    asked = list(_ASKING.finditer(text))
    questions = [m for m in asked if text[m.end() : m.end() + 1] == "?"] or asked
    if questions:
        lines.append(" ".join(questions[-1][0].split()[:ASKED]))
    return "\n".join(lines)


def with_facts(sample: Callable[[Random, str, bool], Problem]) -> Callable[[Random, str, bool], Problem]:
    """The sampler, with `facts` of the last message at the beginning of thoughts."""

    @wraps(sample)
    def sampled(rng: Random, split: str, thinking: bool) -> Problem:
        return noted(sample(rng, split, thinking))

    return sampled


def noted(problem: Problem) -> Problem:
    """The problem; if it has a thought, this begins with `facts` of the last message."""
    reply, said = problem.reply, problem.messages[-1]["content"]
    if not reply.reasoning:
        return problem
    return replace(problem, reply=replace(reply, reasoning=f"{facts(said)}\n{reply.reasoning}"))
