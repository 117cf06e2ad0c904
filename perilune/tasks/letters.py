"""Adds characters beyond ASCII to training problems, because users' texts have them: accents in names, currency signs,
typographic apostrophes, emoji. The generators' words are ASCII.

The same word is changed everywhere in a problem, so that copying stays right. Programs ask for letters one by one and
are left out.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Final

from perilune.tasks.problem import Problem, ToolCall, pick, user
from perilune.tasks.words import CITIES, NAMES, SURNAMES

_ACCENTED: Final = {
    "a": "áàäâåãă", "c": "çćč", "e": "éèëêęě", "g": "ğ", "i": "íïîı", "l": "ł", "n": "ñńň", "o": "óöôøõő", "r": "ř",
    "s": "şšśß", "t": "ț", "u": "üúûů", "y": "ý", "z": "žżź", "A": "ÁÄÅ", "C": "ÇČ", "E": "ÉÈ", "I": "İÍ", "L": "Ł",
    "O": "ÓÖØ", "S": "ŞŠŚ", "U": "ÜÚ", "Z": "ŽŻ",
}  # fmt: skip
_SIGNS: Final = "€£₹¥₺₩₽"
_EMOJI: Final = ("🙂", "😀", "😅", "🙏", "👍", "❤️", "🎉", "🤔", "…", "😂")
_WORD: Final = re.compile(r"\b[A-Z][a-z]{2,}\b")
_MONEY: Final = re.compile(r"\$(?=\d)")
_APOSTROPHE: Final = re.compile(r"(?<=[a-z])'(?=[a-z])")
_KNOWN: Final = frozenset((*NAMES, *SURNAMES, *CITIES))
_MOST_WORDS: Final = 3

Change = Callable[[str], str]


def _everywhere(value: Any, change: Change) -> Any:
    """`value`, JSON without keys to change, with `change` applied to each of its strings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_everywhere(v, change) for v in value]
    if isinstance(value, dict):
        return {k: _everywhere(v, change) for k, v in value.items()}
    return value


def _changed(problem: Problem, change: Change) -> Problem:
    reply = problem.reply
    calls = tuple(ToolCall(c.name, _everywhere(c.arguments, change)) for c in reply.tool_calls)
    return replace(
        problem,
        messages=tuple(_everywhere(m, change) for m in problem.messages),
        reply=replace(reply, reasoning=change(reply.reasoning), content=change(reply.content), tool_calls=calls),
    )


def accented(rng: Random, word: str) -> str:
    """The word with one or two letters accented; as it is if none can be."""
    places = [i for i, c in enumerate(word) if c in _ACCENTED]
    letters = list(word)
    for i in rng.sample(places, min(len(places), 1 + int(rng.random() * 2))):
        letters[i] = pick(rng, _ACCENTED[letters[i]])
    return "".join(letters)


def _names(rng: Random, problem: Problem) -> Problem:
    prompt = " ".join([m["content"] for m in problem.messages if isinstance(m.get("content"), str)])
    declared = json.dumps(problem.tools)
    answered = " ".join(
        [problem.reply.content, *(v for c in problem.reply.tool_calls for v in c.arguments.values() if type(v) is str)]
    )
    copied = set(_WORD.findall(answered))
    words = [w for w in dict.fromkeys(_WORD.findall(prompt)) if (w in copied or w in _KNOWN) and w not in declared]
    chosen = {w: accented(rng, w) for w in rng.sample(words, min(len(words), _MOST_WORDS))}
    if not chosen:
        return problem
    found = re.compile(rf"\b(?:{'|'.join(chosen)})\b")
    return _changed(problem, lambda text: found.sub(lambda m: chosen[m[0]], text))


def beyond_ascii(rng: Random, problem: Problem) -> Problem:
    """The problem with accents on some of its names, and at times other signs. Its key stays."""
    if problem.family == "programs":
        return problem
    made = _names(rng, problem)
    if rng.random() < 0.5:
        sign = pick(rng, _SIGNS)
        made = _changed(made, lambda text: _MONEY.sub(sign, text))
    if rng.random() < 0.3:
        made = _changed(made, lambda text: _APOSTROPHE.sub("’", text))
    last = made.messages[-1]
    if rng.random() < 0.15 and last["role"] == "user" and isinstance(last["content"], str):
        made = replace(made, messages=(*made.messages[:-1], user(f"{last['content']} {pick(rng, _EMOJI)}")))
    return made
