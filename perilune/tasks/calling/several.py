"""Several requests in one message, for `tools_multi`: joined, in rows, of one kit, for one tool."""

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from perilune.tasks.calling.requests import (
    alike,
    any_tool,
    asked_in,
    call_key,
    declare,
    given_fields,
    lowered,
    remarked,
    siblings,
)
from perilune.tasks.composed.chores import PLAIN, there
from perilune.tasks.fields import value
from perilune.tasks.problem import Problem, Reply, ToolCall, belongs, pick, user, widely
from perilune.tasks.tools import (
    Request,
    catalog_tool,
    confusable,
    going_on,
    how_many,
    in_rows,
    kits,
    listed,
    others,
    request,
    shortly,
    shuffled,
    together,
    wishes,
    worded,
)

_JOINS: Final = (" Also ", " And ", " Then ", " After that ", "\n")


_SMALL_JOINS: Final = (" and ", " and then ", ", and also ", " and ", ", then ", ", plus ", " and after that ",
    ", also ", ", and ", ". Oh, and ", ", oh and ", ". While you're at it, ", ", and while you are at it ", " & ", "; ",
    ". Next, ",
    ", and this, please: ", ". One more: ", " and can you also do: ", ". When that's done, ", " and besides ", ", ",
    ". And another thing: ", ", and once you have that, ", ". Finally ", " + ", ". PS: ", ". Before I forget: ",
    " - and ", ". Wait, also: ", ", then after that ", ". Second thing: ", ". On top of that, ")  # fmt: skip


_HEADS: Final = ("", "", "Two things:", "My list:", "Please do these:", "To do:", "I need:", "Today:",
    "Hi, I have some wishes:")  # fmt: skip


_TAILS: Final = ("", "", "", "\nThat's all.", "\nDo them all please.", "\nThanks", "\nadd them", "\nIn any order.")


def _rows(rng: Random, texts: list[str], calls: Sequence[ToolCall]) -> str:
    """The requests as a list."""
    mark = pick(rng, ("- ", "* ", "{i}. ", "{i}) ", "({i}) "))
    shown = [text if rng.random() < 0.5 else lowered(text, calls) for text in texts]
    rows = [mark.format(i=i) + text for i, text in enumerate(shown, 1)]
    head = pick(rng, _HEADS)
    return (
        (f"{head}\n" if head and (len(texts) == 2 or "Two" not in head) else "") + "\n".join(rows) + pick(rng, _TAILS)
    )


def joined(rng: Random, texts: list[str], calls: Sequence[ToolCall], split: str) -> str:
    """Several requests, each for one of the calls, as one message."""
    if widely(split) and len(texts) > 1 and rng.random() < 0.14:
        return _rows(rng, texts, calls)
    out = texts[0]
    for text in texts[1:]:
        if widely(split) and rng.random() < 0.65 and "\n" not in out[-12:]:
            out = out.rstrip(".!?") + pick(rng, _SMALL_JOINS) + lowered(text, calls)
            continue
        join = pick(rng, _JOINS)
        out += join + (text if join == "\n" else lowered(text, calls))
    return out


def several_requests(rng: Random, split: str, count: int) -> list[Request]:
    """Requests for one tool with different values, or for different tools. The first one decides the split."""
    first = asked_in(rng, split)
    made, one_tool = [first], rng.random() < 0.5
    while len(made) < count:
        if one_tool and first.tool.entry:
            more = request(rng, first.tool, split)
        elif one_tool:
            more = worded(rng, first.tool, {f.name: value(rng, f) for f in given_fields(first)}, split)
        else:
            more = request(rng, any_tool(rng, split), split)
        clash = any(m.call == more.call or (m.tool is not more.tool and confusable(m.tool, more.tool)) for m in made)
        # Two thoughts with the same words look like one.
        new = more.opening.lower()
        clash = clash or (widely(split) and any(m.opening.lower() in new or new in m.opening.lower() for m in made))
        if clash:  # a tool with few values may have only one call
            one_tool = one_tool and rng.random() < 0.8
        else:
            made.append(more)
    return made


def kit_requests(rng: Random, split: str, count: int) -> tuple[str, list[Request], tuple[dict[str, Any], ...]] | None:
    """Requests for a kit's tools, each with its own values or with "it" for the last one's, and what is declared."""
    kit = pick(rng, kits())
    asked = [request(rng, pick(rng, kit), split)]
    texts = [asked[0].text]
    made = together(rng, pick(rng, kit), 2) if count > 2 and rng.random() < 0.6 else None
    if made and f", {made[1][1].opening}" not in made[0]:  # "now Ann, Tom leaves" may speak to Ann
        texts, asked = [made[0]], made[1]
    for _ in range(20):
        if len(asked) == count:
            break
        one = pick(rng, kit)
        short = len(texts) == len(asked) and rng.random() < 0.3
        more = shortly(rng, one, asked[-1].call.arguments) if short else request(rng, one, split)
        if more and not any(alike(more, a) for a in asked):
            asked.append(more)
            texts.append(more.text)
    if len(asked) < count or not belongs(("call", *call_key(asked[0].call)), split):
        return None
    calls = [a.call for a in asked]
    text = joined(rng, texts, calls, split)
    if count > 1 and rng.random() < 0.15 and "\n" not in text:
        counted = ("Two", "Three")[count - 2]
        text = f"{counted} {pick(rng, ('things', 'jobs', 'requests', 'wishes'))}: {lowered(text, calls)}"
    return text, asked, siblings(rng, kit)


def in_parallel(rng: Random, split: str, thinking: bool) -> Problem:
    count = 2 if rng.random() < 0.65 else 3
    asked: list[Request] = []
    text, declared = "", tuple[dict[str, Any], ...]()
    if widely(split) and rng.random() < 0.36 and (of_kit := kit_requests(rng, split, count)):
        text, asked, declared = of_kit
    elif widely(split) and (roll := rng.random()) < 0.1:
        text, asked = wishes(rng, count)
        asked = asked if belongs(("call", *call_key(asked[0].call)), split) else []
        text = text if asked else ""
    elif widely(split) and roll < 0.68:
        if roll < 0.22:
            made: tuple[str, list[Request]] | None = listed(rng, count)
        else:
            way = together if roll < 0.37 else in_rows if roll < 0.47 else going_on
            made = way(rng, catalog_tool(rng), count)
        if made and belongs(("call", *call_key(made[1][0].call)), split):
            text, asked = made
    asked = asked or several_requests(rng, split, count)
    text = remarked(rng, text or joined(rng, [a.text for a in asked], [a.call for a in asked], split), split)
    return problem_of(rng, text, asked, split, thinking, declared)


def problem_of(
    rng: Random, text: str, asked: list[Request], split: str, thinking: bool, declared: tuple[dict[str, Any], ...] = ()
) -> Problem:
    # No numbers: who writes "1." or nothing says how many calls there will be before the second request is read.
    trace = "\n".join([a.trace(text) for a in asked])
    reply = Reply(trace if thinking else "", "", tuple(a.call for a in asked))
    key = ("call", *call_key(asked[0].call))
    declared = declared or declare(rng, asked, split)
    return Problem("tools_multi", split, key, (user(text),), reply, declared, thinking)


def at_once(rng: Random, split: str, thinking: bool) -> Problem:
    """Plain tools for several values each, or two of them for one place."""
    while True:
        if rng.random() < 0.25:
            asked = there(rng)
            texts = [a.text for a in asked]
        else:
            one = catalog_tool(rng, pick(rng, PLAIN))
            if not (made := pick(rng, (together, going_on))(rng, one, pick(rng, (2, 2, 3)))):
                continue
            more = request(rng, catalog_tool(rng, pick(rng, PLAIN)), split)
            both = more.tool.noun != one.noun and rng.random() < 0.5
            texts, asked = [made[0], *[more.text] * both], [*made[1], *[more] * both]
        text = joined(rng, texts, [a.call for a in asked], split)
        places = [text.find(a.quoted(text)) for a in asked]
        if places == sorted(set(places)) and belongs(("call", *call_key(asked[0].call)), split):
            return problem_of(rng, text, asked, split, thinking)


_CONTRASTS: Final = (
    "{r} No {n}, please.", "I don't need the {n}. {r}", "Forget the {n}. {r}", "{r} Not the {n}.",
    "Leave the {n}; {s}",
    "Never mind the {n}: {s}", "{r} The {n} can wait.", "Nothing with the {n}, but {s}",
    "{r} I do not care about the {n}.",
    "{r} The {n} is done already.", "First I wanted the {n}, but no. {r}", "Only this: {s} No {n}.",
)  # fmt: skip


def contrast(rng: Random, split: str, thinking: bool) -> Problem:
    """One thing is asked for and another one, for which there is a tool as well, is not."""
    asked = asked_in(rng, split)
    while True:
        other = any_tool(rng, split)
        if other.noun != asked.tool.noun and other.name != asked.tool.name and other.verbs != asked.tool.verbs:
            break
    text = pick(rng, _CONTRASTS).format(r=asked.text, s=lowered(asked.text, [asked.call]), n=other.noun)
    more = others(rng, [asked.tool, other], max(0, how_many(rng, split) - 2), split)
    declared = shuffled(rng, [asked.tool, other, *more])
    reply = Reply(asked.trace(text) if thinking else "", "", (asked.call,))
    key = ("call", *call_key(asked.call))
    return Problem("tools_multi", split, key, (user(text),), reply, declared, thinking)
