"""What problems with tools share: requests with calls of a split, the tools that are declared, remarks."""

import functools
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from perilune.tasks.composed.errands import around
from perilune.tasks.fields import Field
from perilune.tasks.problem import Problem, ToolCall, belongs, pick, widely
from perilune.tasks.tools import Request, Tool, catalog_tool, how_many, others, request, shuffled, tool
from perilune.tasks.wordings import small

REFUSAL: Final = "None of the declared tools can do that."

Message = dict[str, Any]


def call_key(call: ToolCall) -> tuple[str, str]:
    """What makes two calls the same: the name and the arguments, in any order."""
    return call.name, json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)


def any_tool(rng: Random, split: str) -> Tool:
    """A tool of the catalog or an invented one."""
    return catalog_tool(rng) if widely(split) and rng.random() < 0.58 else tool(rng, split)


def asked_in(rng: Random, split: str) -> Request:
    """A request with a call that belongs to the split."""
    target = any_tool(rng, split)
    for attempt in range(1, 10_000):
        made = request(rng, target, split)
        if belongs(("call", *call_key(made.call)), split):
            return made
        if attempt % 40 == 0:  # a tool with one boolean has too few calls to belong everywhere
            target = any_tool(rng, split)
    raise AssertionError(f"no call found for {split}")


def distinct(problem: Problem) -> bool:
    """Whether no two of its tools have one name: chat templates refuse those."""
    return len({t["function"]["name"] for t in problem.tools}) == len(problem.tools)


def distinctly(sample: Callable[[Random, str, bool], Problem]) -> Callable[[Random, str, bool], Problem]:
    """The sampler, drawing again until its problem's tools have names of their own."""

    @functools.wraps(sample)
    def drawn(rng: Random, split: str, thinking: bool) -> Problem:
        while not distinct(made := sample(rng, split, thinking)):
            pass
        return made

    return drawn


def given_fields(asked: Request) -> list[Field]:
    """The parameters that the call has a value for, in the order of its tool."""
    return [f for f in (*asked.tool.required, *asked.tool.optional) if f.name in asked.call.arguments]


def declare(rng: Random, asked: list[Request], split: str) -> tuple[dict[str, Any], ...]:
    """The tools of these requests among others."""
    targets = list({id(a.tool): a.tool for a in asked}.values())
    more = max(0, how_many(rng, split) - len(targets))
    return shuffled(rng, [*targets, *others(rng, targets, more, split)])


_REMARKS: Final = (
    "Use the tool.", "Don't guess, call the function.", "The tool takes one at a time.", "You have a function for it.",
    "There must be a tool for that.", "Not in your head please.", "Don't ask me back.",
    "Read the descriptions first.", "It did not work before.", "The function knows.",
)  # fmt: skip


def remarked(rng: Random, text: str, split: str) -> str:
    """Now and then with a sentence about the tools, or with one that does not matter."""
    if split == "train" and rng.random() < 0.15:
        return around(rng, text)
    if not widely(split) or rng.random() > 0.08:
        return text
    remark = pick(rng, _REMARKS)
    return f"{remark} {text}" if rng.random() < 0.4 else f"{text}{'.' * text[-1].isalnum()} {remark}"


def siblings(rng: Random, kit: tuple[Tool, ...]) -> tuple[dict[str, Any], ...]:
    """A kit's tools and others without its noun."""
    more = others(rng, [], max(0, how_many(rng, "train") - len(kit)), "heldout")
    noun = kit[0].noun
    return shuffled(rng, [*kit, *[t for t in more if noun not in t.noun]])


def lowered(text: str, calls: Sequence[ToolCall]) -> str:
    """The first letter made small, unless a value begins there ("Oslo weather please")."""
    values = [v for call in calls for v in call.arguments.values()]
    heads = [str(v[0] if isinstance(v, list) else v) for v in values]
    return text if text.startswith(tuple(heads)) else small(text)


def alike(one: Request, other: Request) -> bool:
    """Whether the calls are the same, or the thoughts would have the same words."""
    new, old = one.opening.lower(), other.opening.lower()
    return one.call == other.call or new in old or old in new
