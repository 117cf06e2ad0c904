"""Tool use: the families `tool_call` (one call) and `tools_multi` (several calls, results, refusals, longer history).

Structure: structural problems ask for tools with a noun, and so a name, that never occurs in training; half of
their parameters are new as well, and half of the requests are worded anew.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

from perilune.tasks.composed.chores import PLAIN, chore, counted, handed, sought, there
from perilune.tasks.composed.errands import around, context, errand, framed, puzzle, thanks
from perilune.tasks.composed.findings import finding
from perilune.tasks.fields import BASES, Field, fields, said, value, written
from perilune.tasks.problem import Answer, Problem, Reply, ToolCall, belongs, pick, plain, user, widely
from perilune.tasks.results import OKS, WHAT, asked_about, finished, returned, shown, unasked
from perilune.tasks.smalltalk import TALK, small_talk
from perilune.tasks.tools import (
    Request,
    Tool,
    catalog_tool,
    confusable,
    going_on,
    how_many,
    in_rows,
    kits,
    listed,
    opening,
    others,
    request,
    shortly,
    shuffled,
    together,
    tool,
    wishes,
    worded,
)
from perilune.tasks.wordings import capital, enumerated, small
from perilune.tasks.words import CITIES, NAMES, any_word

REFUSAL: Final = "None of the declared tools can do that."

Message = dict[str, Any]


def call_key(call: ToolCall) -> tuple[str, str]:
    return call.name, json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)


def _any_tool(rng: Random, split: str) -> Tool:
    return catalog_tool(rng) if widely(split) and rng.random() < 0.5 else tool(rng, split)


def _request(rng: Random, split: str) -> Request:
    """A request with a call that belongs to the split."""
    target = _any_tool(rng, split)
    for attempt in range(1, 10_000):
        made = request(rng, target, split)
        if belongs(("call", *call_key(made.call)), split):
            return made
        if attempt % 40 == 0:  # a tool with one boolean has too few calls to belong everywhere
            target = _any_tool(rng, split)
    raise AssertionError(f"no call found for {split}")


def distinct(problem: Problem) -> bool:
    """Whether no two of its tools have one name: chat templates refuse those."""
    return len({t["function"]["name"] for t in problem.tools}) == len(problem.tools)


def _distinctly(sample: Callable[[Random, str, bool], Problem]) -> Callable[[Random, str, bool], Problem]:
    """The sampler, drawing again until its problem's tools have names of their own."""

    @functools.wraps(sample)
    def drawn(rng: Random, split: str, thinking: bool) -> Problem:
        while not distinct(made := sample(rng, split, thinking)):
            pass
        return made

    return drawn


@_distinctly
def sample_tool_call(rng: Random, split: str, thinking: bool) -> Problem:
    made = None
    if split == "train" and rng.random() < 0.35:
        return _errand(rng, split, thinking, "tool_call", 1)
    if widely(split):
        made = (
            _of_common(rng, split) if rng.random() < 0.35 else _of_kit(rng, split, 1) if rng.random() < 0.36 else None
        )
    if made:
        text, (asked,), declared = made
    else:
        asked = _request(rng, split)
        text = asked.text
        declared = shuffled(rng, [asked.tool, *others(rng, [asked.tool], how_many(rng, split) - 1, split)])
    if asked.tool.spec in declared:
        text = _remarked(rng, text, split)
        reply = Reply(asked.trace(text) if thinking else "", "", (asked.call,))
    else:
        reply = Reply(f"{asked.quoted(text)}\nnone" if thinking else "", REFUSAL)
    key = ("call", *call_key(asked.call))
    return Problem("tool_call", split, key, (user(text),), reply, declared, thinking)


def _errand(rng: Random, split: str, thinking: bool, family: str, count: int) -> Problem:
    """Requests as colleagues write them. Some messages ask for no call, for a meaning, or for an undeclared tool."""
    while True:
        roll, question = rng.random(), ""
        if roll < 0.1 and count > 1:
            text, beside = thanks(rng)
            text = f"{context(rng, (), 'hello')}." if roll < 0.04 else text
            asked, key = list[Request](), tuple[str, ...](("chat", text))
        elif 0.1 < roll < 0.15:
            text, question, beside = puzzle(rng)
            asked, key = [], ("chat", text)
        else:
            text, asked, beside = errand(rng, count)
            key = ("call", *call_key(asked[0].call))
        if belongs(key, split):
            break
    targets = list({id(a.tool): a.tool for a in asked}.values())
    refused = roll < 0.04 and count == 1 and "a" not in asked[0].call.arguments
    messages: tuple[Message, ...] = (user(text),)
    known = [] if refused else list(targets)
    known += [t for t in beside if all(t is not one for one in targets)]
    more = others(rng, [*targets, *beside], pick(rng, (0, 0, 0, 1, 2, 5)) + (not known), split)
    known += [t for t in more if not question or not re.search("define|dict|mean|word|search|explain", str(t.spec))]
    if roll > 0.8 and count > 1:
        before, (first,), _ = errand(rng, 1)
        if all(first.tool.noun != t.noun for t in known):  # another tool's finished exchange comes first
            known.append(first.tool)
            messages = (*finished(rng, before, first, {"status": "ok"}, "Done.", split), *messages)
    if question:
        reply = Reply(f"{question}\nnone" if thinking else "", REFUSAL)
    elif not asked:
        thought, content, *_ = TALK[4 * (roll >= 0.04)]
        reply = Reply(thought if thinking else "", content)
    elif refused:
        reply = Reply(f"{asked[0].quoted(text)}\nnone" if thinking else "", REFUSAL)
    else:
        trace = "\n".join([a.trace(text) for a in asked])
        reply = Reply(trace if thinking else "", "", tuple([a.call for a in asked]))
    return Problem(family, split, key, messages, reply, shuffled(rng, known), thinking)


_CLOSE: Final = ("alarm", "currency", "weather")


def _of_common(rng: Random, split: str) -> tuple[str, list[Request], tuple[dict[str, Any], ...]] | None:
    """An everyday request, and similar tools to declare; now and then without the requested one."""
    kit, other = pick(rng, kits(common=True)), pick(rng, kits(common=True))
    asked = request(rng, kit[int(rng.random() ** 2 * len(kit))], split)
    if kit[0].noun == other[0].noun or not belongs(("call", *call_key(asked.call)), split):
        return None
    refused = rng.random() < 0.12 and kit[0].noun not in _CLOSE
    declared = [t for t in kit if (rng.random() < 0.7 if t is not asked.tool else not refused)]
    declared += other[: int(rng.random() * 3) + refused]
    return asked.text, [asked], shuffled(rng, declared)


_REMARKS: Final = (
    "Use the tool.", "Don't guess, call the function.", "The tool takes one at a time.", "You have a function for it.",
    "There must be a tool for that.", "Not in your head please.", "Don't ask me back.",
    "Read the descriptions first.", "It did not work before.", "The function knows.",
)  # fmt: skip


def _remarked(rng: Random, text: str, split: str) -> str:
    """Now and then with a sentence about the tools, or with one that does not matter."""
    if split == "train" and rng.random() < 0.15:
        return around(rng, text)
    if not widely(split) or rng.random() > 0.08:
        return text
    remark = pick(rng, _REMARKS)
    return f"{remark} {text}" if rng.random() < 0.4 else f"{text}{'.' * text[-1].isalnum()} {remark}"


def _siblings(rng: Random, kit: tuple[Tool, ...]) -> tuple[dict[str, Any], ...]:
    """A kit's tools and others without its noun."""
    more = others(rng, [], max(0, how_many(rng, "train") - len(kit)), "heldout")
    noun = kit[0].noun
    return shuffled(rng, [*kit, *[t for t in more if noun not in t.noun]])


def _of_kit(rng: Random, split: str, count: int) -> tuple[str, list[Request], tuple[dict[str, Any], ...]] | None:
    """Requests for a kit's tools, each with its own values or with "it" for the last one's; and the declared tools."""
    kit = pick(rng, kits())
    asked = [request(rng, pick(rng, kit), split)]
    texts = [asked[0].text]
    made = together(rng, pick(rng, kit), 2) if count > 2 and rng.random() < 0.6 else None
    if made and f", {made[1][1].opening}" not in made[0]:  # "now Ann, Tom leaves" may address Ann
        texts, asked = [made[0]], made[1]
    for _ in range(20):
        if len(asked) == count:
            break
        one = pick(rng, kit)
        short = len(texts) == len(asked) and rng.random() < 0.3
        more = shortly(rng, one, asked[-1].call.arguments) if short else request(rng, one, split)
        if more and not any(_alike(more, a) for a in asked):
            asked.append(more)
            texts.append(more.text)
    if len(asked) < count or not belongs(("call", *call_key(asked[0].call)), split):
        return None
    calls = [a.call for a in asked]
    text = joined(rng, texts, calls, split)
    if count > 1 and rng.random() < 0.15 and "\n" not in text:
        counted = ("Two", "Three")[count - 2]
        text = f"{counted} {pick(rng, ('things', 'jobs', 'requests', 'wishes'))}: {_lowered(text, calls)}"
    return text, asked, _siblings(rng, kit)


def _alike(one: Request, other: Request) -> bool:
    """Whether the calls are the same, or the thoughts would have the same words."""
    new, old = one.opening.lower(), other.opening.lower()
    return one.call == other.call or new in old or old in new


# ---- tools_multi ----------

_JOINS: Final = (" Also ", " And ", " Then ", " After that ", "\n")
_SMALL_JOINS: Final = (" and ", " and then ", ", and also ", " and ", ", then ", ", plus ", " and after that ",
    ", also ", ", and ", ". Oh, and ", ", oh and ", ". While you're at it, ", ", and while you are at it ", " & ", "; ",
    ". Next, ",
    ", and this, please: ", ". One more: ", " and can you also do: ", ". When that's done, ", " and besides ", ", ",
    ". And another thing: ", ", and once you have that, ", ". Finally ", " + ", ". PS: ", ". Before I forget: ",
    " - and ", ". Wait, also: ", ", then after that ", ". Second thing: ", ". On top of that, ")  # fmt: skip


@_distinctly
def sample_tools_multi(rng: Random, split: str, thinking: bool) -> Problem:
    if split == "train" and (roll := rng.random()) < 0.31:
        if roll < 0.014:
            return _sought_before(rng, split, thinking)
        return _errand(rng, split, thinking, "tools_multi", pick(rng, (2, 2, 2, 2, 2, 3, 3, 4)))
    if widely(split) and (roll := rng.random()) < 0.31:
        return (_stepwise if roll < 0.2 else _at_once)(rng, split, thinking)
    if widely(split) and rng.random() < 0.2:
        return pick(rng, (_again, _again, _contrast, _contrast, _talk))(rng, split, thinking)
    if widely(split) and (roll := rng.random()) < 0.36:
        ways = (_found, _found, _found, _found, _missing, _missing, _compared, _later, _later)
        return pick(rng, ways)(rng, split, thinking)
    roll = rng.random()
    # With wide wordings fewer refusals: a model that learns many refuses requests in unusual words too.
    parallel, result = (0.46, 0.74) if widely(split) else (0.36, 0.68)
    kind = _parallel if roll < parallel else _result if roll < result else _refusal if roll < 0.88 else _follow_up
    return kind(rng, split, thinking)


_HEADS: Final = ("", "", "Two things:", "My list:", "Please do these:", "To do:", "I need:", "Today:",
    "Hi, I have some wishes:")  # fmt: skip
_TAILS: Final = ("", "", "", "\nThat's all.", "\nDo them all please.", "\nThanks", "\nadd them", "\nIn any order.")


def _lowered(text: str, calls: Sequence[ToolCall]) -> str:
    """The first letter made small, unless a value begins there ("Oslo weather please")."""
    values = [v for call in calls for v in call.arguments.values()]
    heads = [str(v[0] if isinstance(v, list) else v) for v in values]
    return text if text.startswith(tuple(heads)) else small(text)


def _rows(rng: Random, texts: list[str], calls: Sequence[ToolCall]) -> str:
    mark = pick(rng, ("- ", "* ", "{i}. ", "{i}) ", "({i}) "))
    shown = [text if rng.random() < 0.5 else _lowered(text, calls) for text in texts]
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
            out = out.rstrip(".!?") + pick(rng, _SMALL_JOINS) + _lowered(text, calls)
            continue
        join = pick(rng, _JOINS)
        out += join + (text if join == "\n" else _lowered(text, calls))
    return out


def _several(rng: Random, split: str, count: int) -> list[Request]:
    """Requests for one tool with different values, or for different tools. The first one decides the split."""
    first = _request(rng, split)
    made, one_tool = [first], rng.random() < 0.5
    while len(made) < count:
        if one_tool and first.tool.entry:
            more = request(rng, first.tool, split)
        elif one_tool:
            more = worded(rng, first.tool, {f.name: value(rng, f) for f in _given(first)}, split)
        else:
            more = request(rng, _any_tool(rng, split), split)
        clash = any(m.call == more.call or (m.tool is not more.tool and confusable(m.tool, more.tool)) for m in made)
        # Two thoughts with the same words look like one.
        new = more.opening.lower()
        clash = clash or (widely(split) and any(m.opening.lower() in new or new in m.opening.lower() for m in made))
        if clash:  # a tool with few values may have only one call
            one_tool = one_tool and rng.random() < 0.8
        else:
            made.append(more)
    return made


def _given(asked: Request) -> list[Field]:
    return [f for f in (*asked.tool.required, *asked.tool.optional) if f.name in asked.call.arguments]


def _declared(rng: Random, asked: list[Request], split: str) -> tuple[dict[str, Any], ...]:
    targets = list({id(a.tool): a.tool for a in asked}.values())
    more = max(0, how_many(rng, split) - len(targets))
    return shuffled(rng, [*targets, *others(rng, targets, more, split)])


def _parallel(rng: Random, split: str, thinking: bool) -> Problem:
    count = 2 if rng.random() < 0.65 else 3
    asked: list[Request] = []
    text, declared = "", tuple[dict[str, Any], ...]()
    if widely(split) and rng.random() < 0.36 and (of_kit := _of_kit(rng, split, count)):
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
    asked = asked or _several(rng, split, count)
    text = _remarked(rng, text or joined(rng, [a.text for a in asked], [a.call for a in asked], split), split)
    return _calling(rng, text, asked, split, thinking, declared)


def _calling(
    rng: Random, text: str, asked: list[Request], split: str, thinking: bool, declared: tuple[dict[str, Any], ...] = ()
) -> Problem:
    # Not numbered: by writing "1." or not, a model would fix the number of calls before it reads the second request.
    trace = "\n".join([a.trace(text) for a in asked])
    reply = Reply(trace if thinking else "", "", tuple(a.call for a in asked))
    key = ("call", *call_key(asked[0].call))
    declared = declared or _declared(rng, asked, split)
    return Problem("tools_multi", split, key, (user(text),), reply, declared, thinking)


def _at_once(rng: Random, split: str, thinking: bool) -> Problem:
    """Everyday tools (chores.PLAIN): one for several values, or two for one place."""
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
            return _calling(rng, text, asked, split, thinking)


def _stepwise(rng: Random, split: str, thinking: bool) -> Problem:
    """A wish of several steps (chores.py), before, between or after its calls."""
    while True:
        roll = rng.random() if split == "train" else 1.0
        text, past, thought, due, answer, asked = (counted if roll < 0.12 else handed if roll < 0.4 else chore)(rng)
        if belongs(key := ("call", *call_key(asked[0].call)), split):
            break
    messages: tuple[Message, ...] = (user(text),)
    for step, (calls, results) in enumerate(past):  # no step but the last has several calls
        made, contents = tuple([a.call for a in calls]), [json.dumps(r, ensure_ascii=False) for r in results]
        messages += returned(rng, made, contents, "\n".join([a.trace(text) for a in calls]), step)
    lines = [thought] * bool(past) + [a.trace(text) for a in due]
    reply = Reply("\n".join(lines) if thinking else "", answer, tuple([a.call for a in due]))
    return Problem("tools_multi", split, key, messages, reply, _declared(rng, asked, split), thinking)


def _result(rng: Random, split: str, thinking: bool) -> Problem:
    """Results are there: the reply says what was asked for, from each of them; or that the tool failed."""
    asked = _several(rng, split, 1 if rng.random() < 0.6 else 2)
    if asked[-1].tool is not asked[0].tool:
        asked = asked[:1]  # one question cannot fit two kinds of results
    new = split == "structural"
    keys = fields(rng, 1 + int(rng.random() * 4), 0.5 if new else 0.0)
    if split == "train" and rng.random() < 0.4:
        question, (contents, lines, sentences) = "", unasked(rng, asked, keys)
    else:
        question, (contents, lines, sentences) = asked_about(rng, len(asked), keys, split)
    text = f"{joined(rng, [a.text for a in asked], [a.call for a in asked], split)}{question}"
    thought = "\n".join([a.trace(text) for a in asked])
    messages = (user(text), *returned(rng, tuple(a.call for a in asked), contents, thought))
    reply = Reply("\n".join(lines) if thinking else "", " ".join(sentences))
    key = ("call", *call_key(asked[0].call))
    return Problem("tools_multi", split, key, messages, reply, _declared(rng, asked, split), thinking)


def _found(rng: Random, split: str, thinking: bool) -> Problem:
    """A lookup asked for in everyday words (findings.py): its result is there, or the call is to be made."""
    while True:
        made = finding(rng)
        call = ToolCall(made.name, made.arguments)
        if belongs(key := ("call", *call_key(call)), split):
            break
    ((name, given),) = made.arguments.items()
    kind = "number" if isinstance(given, int) else "string"
    thought = f"{opening(made.text)}\n{made.name}\n{name}: {kind} {written(given)}"
    more = [t.spec for t in others(rng, [], how_many(rng, split) - 1, split)]
    words = made.name.split("_")
    declared = [made.spec, *[s for s in more if not any(word in s["function"]["name"].lower() for word in words)]]
    rng.shuffle(declared)
    messages: tuple[Message, ...] = (user(made.text),)
    if rng.random() < 0.3:
        reply = Reply(thought if thinking else "", "", (call,))
    else:
        messages = (*messages, *returned(rng, (call,), [made.result], thought))
        content = f"The {made.key.replace('_', ' ')} is {said(made.value)}."
        reply = Reply(f"{made.key}: {written(made.value)}" if thinking else "", content)
    return Problem("tools_multi", split, key, messages, reply, tuple(declared), thinking)


def _refusal(rng: Random, split: str, thinking: bool) -> Problem:
    """No declared tool fits, though some come close."""
    if widely(split) and rng.random() < 0.3:
        text = pick(rng, _GENERAL).format(n=pick(rng, NAMES), w=any_word(rng), v=any_word(rng), c=pick(rng, CITIES))
        if belongs(("chat", text), split):
            reply = Reply(f"{opening(text)}\nnone" if thinking else "", REFUSAL)
            declared = _siblings(rng, pick(rng, kits()))
            return Problem("tools_multi", split, ("chat", text), (user(text),), reply, declared, thinking)
    asked = _request(rng, split)
    declared = shuffled(rng, others(rng, [asked.tool], how_many(rng, split), split))
    reply = Reply(f"{asked.opening}\nnone" if thinking else "", REFUSAL)
    key = ("call", *call_key(asked.call))
    return Problem("tools_multi", split, key, (user(asked.text),), reply, declared, thinking)


_GENERAL: Final = (
    "Who wrote the song about the {w} and the {v}?", "Who built the old bridge of {c}?", "Why is a {w} so {v}?",
    "What did {n} say about {c}?", "Write me a poem about a {w}.", "When did {c} become a city?",
    "Is a {w} heavier than a {v}?", "What is the plural of {w}?", "Explain to {n} how a {w} works.",
)  # fmt: skip


def _missing(rng: Random, split: str, thinking: bool) -> Problem:
    """A request without a value that its tool needs: the reply asks for it."""
    while True:
        if rng.random() < 0.5:
            kit = pick(rng, kits())
            asked = shortly(rng, pick(rng, kit), {})
            declared = _siblings(rng, kit)
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


_WHICH: Final = (
    "Which of the two has the {m} {l}?", "I want the one with the {m} {l}.", "Where is the {l} {m}?",
    "Which {l} is {m}?", "Tell me which one has the {m} {l}.", "{l}: which one is {m}?",
)  # fmt: skip


def _compared(rng: Random, split: str, thinking: bool) -> Problem:
    """Two results of one tool: which is the greater or the smaller one."""
    while True:
        made = together(rng, catalog_tool(rng), 2)
        if made and belongs(made_key := ("call", *call_key(made[1][0].call)), split):
            break
    text, asked = made
    first, second = [a.call.arguments for a in asked]
    (name,) = [k for k, v in first.items() if v != second[k]]
    ones = first[name], second[name]
    kind = pick(rng, ("small", "big", "decimal"))
    key = pick(rng, BASES[kind])
    wanted = Field(key, key.replace("_", " "), kind)
    low, high = 0, 0
    while low == high:
        low, high = value(rng, wanted), value(rng, wanted)
    more = {f.name: value(rng, f) for f in fields(rng, 1 + int(rng.random() * 2), 0.0)}
    asked_for = {name: 0} if rng.random() < 0.6 else {}
    contents = [shown(rng, more | dict.fromkeys(asked_for, o) | {key: n}, split) for o, n in zip(ones, (low, high))]
    greater = rng.random() < 0.6
    most = pick(rng, ("higher", "bigger", "larger", "greater") if greater else ("lower", "smaller"))
    text = f"{text} {pick(rng, _WHICH).format(l=wanted.label, m=most)}"
    thought = "\n".join([a.trace(text) for a in asked])
    messages = (user(text), *returned(rng, tuple(a.call for a in asked), contents, thought))
    lines = [*[f"{o}: {n}" for o, n in zip(ones, (low, high))], f"{low}{'<' if low < high else '>'}{high}"]
    reply = Reply("\n".join(lines) if thinking else "", str(ones[(low < high) == greater]))
    return Problem("tools_multi", split, made_key, messages, reply, _declared(rng, asked, split), thinking)


_NOW: Final = ("", "Now ", "Good. Now ", "Great, ", "ok. ", "And then ", "Thanks! Now ", "Right, ", "Next ")


def _later(rng: Random, split: str, thinking: bool) -> Problem:
    """After a call of a kit's tool, one of its tools is asked for with a value of that call ("now drain it")."""
    while True:
        kit = pick(rng, kits())
        first = request(rng, pick(rng, kit), split)
        last = shortly(rng, pick(rng, kit), first.call.arguments)
        if last and last.call != first.call and belongs(key := ("call", *call_key(last.call)), split):
            break
    values = pick(rng, OKS[:4])
    text = pick(rng, _NOW) + _lowered(last.text, [last.call])
    messages = (*finished(rng, first.text, first, values, "Done.", split), user(text))
    reply = Reply(last.trace(text) if thinking else "", "", (last.call,))
    return Problem("tools_multi", split, key, messages, reply, _siblings(rng, kit), thinking)


_FOUND: Final = ("The {0} is {1}.", "I found {1}.", "There is one: {1}.", "{1}", "Yes, {1}.")
_IS_THERE: Final = ("is there a ", "do we have a ", "which is the ", "what about the ", "was there a ", "have I got a ")


def _sought_before(rng: Random, split: str, thinking: bool) -> Problem:
    """After a search for a thing and an answer about it, a request calls that thing "it"."""
    while True:
        (text, first, key, data), (wish, last), known = sought(rng)
        if belongs(made := ("call", *call_key(last.call)), split):
            break
    one = pick(rng, (key, key, next(iter(data))))
    answer = pick(rng, _FOUND).format(one.replace("_", " "), said(data[one]))
    values = {one: data[one]} | data if rng.random() < 0.7 else data
    text = framed(rng, text) if rng.random() < 0.6 else capital(f"{pick(rng, _IS_THERE)}{text.split(' the ', 1)[1]}?")
    asking, result, *rest = finished(rng, text, replace(first, opening=opening(text)), values, answer, split)[1:]
    result |= {
        "content": f"[{result['content']}]" if rng.random() < 0.3 and result["content"][0] == "{" else result["content"]
    }
    before = (user(text), asking, result, *rest)
    wished = framed(rng, wish)
    text = (
        pick(rng, _NOW) + small(wished) if rng.random() < 0.4 else around(rng, wished, ("list", "day", "mail", "week"))
    )
    reply = Reply(last.trace(text) if thinking else "", "", (last.call,))
    return Problem("tools_multi", split, made, (*before, user(text)), reply, _declared(rng, known, split), thinking)


def _follow_up(rng: Random, split: str, thinking: bool) -> Problem:
    """A finished exchange with a tool, then another request: the next call, numbered on."""
    last = _request(rng, split)
    while True:
        first = request(rng, last.tool if rng.random() < 0.5 else _any_tool(rng, split), split)
        if first.tool is last.tool or not confusable(first.tool, last.tool):
            break
    known = fields(rng, 2, 0.0)
    values = {f.name: value(rng, f) for f in known}
    asked = f"{first.text} {pick(rng, WHAT).format(l=known[0].label)}"
    answered = f"The {known[0].label} is {said(values[known[0].name])}."
    messages = (*finished(rng, asked, first, values, answered, split), user(last.text))
    reply = Reply(last.trace(last.text) if thinking else "", "", (last.call,))
    key = ("call", *call_key(last.call))
    return Problem("tools_multi", split, key, messages, reply, _declared(rng, [first, last], split), thinking)


_CONTRASTS: Final = (
    "{r} No {n}, please.", "I don't need the {n}. {r}", "Forget the {n}. {r}", "{r} Not the {n}.",
    "Leave the {n}; {s}",
    "Never mind the {n}: {s}", "{r} The {n} can wait.", "Nothing with the {n}, but {s}",
    "{r} I do not care about the {n}.",
    "{r} The {n} is done already.", "First I wanted the {n}, but no. {r}", "Only this: {s} No {n}.",
)  # fmt: skip
_AGAIN: Final = ("And {v}?", "What about {v}?", "And now {v}?", "Same for {v}, please.", "Now {v}.",
    "{v} too, please.",
    "ok and {v}", "Now the same with {v}", "Then {v} as well.", "thanks. and {v}?", "How about {v}?",
    "No, I meant {v}.")  # fmt: skip


def _contrast(rng: Random, split: str, thinking: bool) -> Problem:
    """One thing is asked for and another one, for which there is a tool as well, is not."""
    asked = _request(rng, split)
    while True:
        other = _any_tool(rng, split)
        if other.noun != asked.tool.noun and other.name != asked.tool.name and other.verbs != asked.tool.verbs:
            break
    text = pick(rng, _CONTRASTS).format(r=asked.text, s=_lowered(asked.text, [asked.call]), n=other.noun)
    more = others(rng, [asked.tool, other], max(0, how_many(rng, split) - 2), split)
    declared = shuffled(rng, [asked.tool, other, *more])
    reply = Reply(asked.trace(text) if thinking else "", "", (asked.call,))
    key = ("call", *call_key(asked.call))
    return Problem("tools_multi", split, key, (user(text),), reply, declared, thinking)


def _again(rng: Random, split: str, thinking: bool) -> Problem:
    """After a call and its result, the same is asked for with one other value: "And in Oslo?"."""
    while True:
        made = together(rng, catalog_tool(rng), 2, joined=False)
        if made and belongs(("call", *call_key(made[1][1].call)), split):
            break
    text, (first, last) = made
    (changed,) = [v for k, v in last.call.arguments.items() if v != first.call.arguments[k]]
    values = {f.name: value(rng, f) for f in fields(rng, 1 + int(rng.random() * 2), 0.0)}
    more = pick(rng, _AGAIN).format(v=changed)
    messages = (*finished(rng, text, first, values, "Done.", split), user(more))
    trace = replace(last, opening=opening(more)).trace(more)
    reply = Reply(trace if thinking else "", "", (last.call,))
    key = ("call", *call_key(last.call))
    return Problem("tools_multi", split, key, messages, reply, _declared(rng, [first, last], split), thinking)


def _talk(rng: Random, split: str, thinking: bool) -> Problem:
    """A greeting or thanks: tools are declared, and none is needed."""
    while True:
        thought, content, text = small_talk(rng)
        if belongs(key := ("chat", text), split):
            break
    reply = Reply(thought if thinking else "", content)
    return Problem("tools_multi", split, key, (user(text),), reply, _declared(rng, [], split), thinking)


# ---- judging ----------


def same_calls(problem: Problem, answer: Answer) -> bool:
    """The same multiset of (name, parsed arguments); if no call is expected, no call and the same content."""
    if not problem.reply.tool_calls:
        return not answer.tool_calls and plain(answer.content) == plain(problem.reply.content)
    got = []
    for name, arguments in answer.tool_calls:
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
        if not isinstance(parsed, dict):
            return False
        got.append(call_key(ToolCall(name, parsed)))
    return sorted(got) == sorted(call_key(call) for call in problem.reply.tool_calls)
