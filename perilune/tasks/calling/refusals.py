"""Messages that no call answers, for `tools_multi`: no declared tool fits, a value is missing, small talk."""

from random import Random
from typing import Final

from perilune.tasks.calling.requests import REFUSAL, asked_in, call_key, declare, siblings
from perilune.tasks.fields import value
from perilune.tasks.problem import Problem, Reply, belongs, pick, user, widely
from perilune.tasks.smalltalk import small_talk
from perilune.tasks.tools import how_many, kits, opening, others, shortly, shuffled, tool, worded
from perilune.tasks.wordings import enumerated
from perilune.tasks.words import CITIES, NAMES, any_word

_GENERAL: Final = (
    "Who wrote the song about the {w} and the {v}?", "Who built the old bridge of {c}?", "Why is a {w} so {v}?",
    "What did {n} say about {c}?", "Write me a poem about a {w}.", "When did {c} become a city?",
    "Is a {w} heavier than a {v}?", "What is the plural of {w}?", "Explain to {n} how a {w} works.",
)  # fmt: skip


def refusal(rng: Random, split: str, thinking: bool) -> Problem:
    """No declared tool fits, though some come close."""
    if widely(split) and rng.random() < 0.3:
        text = pick(rng, _GENERAL).format(n=pick(rng, NAMES), w=any_word(rng), v=any_word(rng), c=pick(rng, CITIES))
        if belongs(("chat", text), split):
            reply = Reply(f"{opening(text)}\nnone" if thinking else "", REFUSAL)
            declared = siblings(rng, pick(rng, kits()))
            return Problem("tools_multi", split, ("chat", text), (user(text),), reply, declared, thinking)
    asked = asked_in(rng, split)
    declared = shuffled(rng, others(rng, [asked.tool], how_many(rng, split), split))
    reply = Reply(f"{asked.opening}\nnone" if thinking else "", REFUSAL)
    key = ("call", *call_key(asked.call))
    return Problem("tools_multi", split, key, (user(asked.text),), reply, declared, thinking)


def missing(rng: Random, split: str, thinking: bool) -> Problem:
    """A request without a value that its tool needs: the reply asks for it."""
    while True:
        if rng.random() < 0.5:
            kit = pick(rng, kits())
            asked = shortly(rng, pick(rng, kit), {})
            declared = siblings(rng, kit)
        else:
            one = tool(rng, split)
            kept = one.required[: int(rng.random() * len(one.required))]
            asked = worded(rng, one, {f.name: value(rng, f) for f in kept}, split)
            declared = shuffled(rng, [one, *others(rng, [one], how_many(rng, split) - 1, split)])
        if asked and belongs(key := ("call", *call_key(asked.call)), split):
            break
    lacks = [f"the {f.label}" for f in asked.tool.required if f.name not in asked.call.arguments]
    reply = Reply(f"{asked.trace(asked.text)}\nnone" if thinking else "", f"Please tell me {enumerated(lacks)}.")
    return Problem("tools_multi", split, key, (user(asked.text),), reply, declared, thinking)


def talk(rng: Random, split: str, thinking: bool) -> Problem:
    """A greeting or thanks: tools are declared, and none is needed."""
    while True:
        thought, content, text = small_talk(rng)
        if belongs(key := ("chat", text), split):
            break
    reply = Reply(thought if thinking else "", content)
    return Problem("tools_multi", split, key, (user(text),), reply, declare(rng, [], split), thinking)
