"""Tool use: the families `tool_call` (one call) and `tools_multi` (several calls, results, refusals, longer history).

Structure: structural problems ask for tools with a noun, and so a name, that never occurs in training; half of
their parameters are new as well, and half of the requests are worded anew.
"""

import json
from dataclasses import replace
from random import Random
from typing import Any, Final

from perilune.tasks.composed.findings import finding
from perilune.tasks.fields import Field, fields, said, value, written
from perilune.tasks.problem import Answer, Problem, Reply, ToolCall, assistant, belongs, pick, plain, user, widely
from perilune.tasks.smalltalk import small_talk
from perilune.tasks.tools import (
    Request,
    Tool,
    catalog_tool,
    confusable,
    going_on,
    how_many,
    in_rows,
    listed,
    opening,
    others,
    request,
    shuffled,
    together,
    tool,
    wishes,
    worded,
)
from perilune.tasks.wordings import small

REFUSAL: Final = "None of the declared tools can do that."

Message = dict[str, Any]


def call_key(call: ToolCall) -> tuple[str, str]:
    return call.name, json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)


def _any_tool(rng: Random, split: str) -> Tool:
    return catalog_tool(rng) if widely(split) and rng.random() < 0.58 else tool(rng, split)


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


def sample_tool_call(rng: Random, split: str, thinking: bool) -> Problem:
    asked = _request(rng, split)
    declared = [asked.tool, *others(rng, [asked.tool], how_many(rng, split) - 1, split)]
    reply = Reply(asked.trace(asked.text) if thinking else "", "", (asked.call,))
    key = ("call", *call_key(asked.call))
    return Problem("tool_call", split, key, (user(asked.text),), reply, shuffled(rng, declared), thinking)


# ---- tools_multi -------------------------------------------------------------------------------------------------

_JOINS: Final = (" Also ", " And ", " Then ", " After that ", "\n")
_SMALL_JOINS: Final = (" and ", " and then ", ", and also ", " and ", ", then ", ", plus ", " and after that ",
    ", also ", ", and ", ". Oh, and ", ", oh and ", ". While you're at it, ", ", and while you are at it ", " & ", "; ",
    ". Next, ",
    ", and please also ", ". One more: ", " and can you also ", ". When that's done, ", " and besides ", ", ",
    ". And another thing: ", ", and once you have that, ", ". Finally ", " + ", ". PS: ", ". Before I forget: ",
    " - and ", ". Wait, also: ", ", then after that ", ". Second thing: ", ". On top of that, ")  # fmt: skip


def sample_tools_multi(rng: Random, split: str, thinking: bool) -> Problem:
    if widely(split) and rng.random() < 0.25:
        return pick(rng, (_again, _again, _contrast, _contrast, _talk))(rng, split, thinking)
    if widely(split) and rng.random() < 0.16:
        return _found(rng, split, thinking)
    roll = rng.random()
    # In training fewer refusals: who refuses often also refuses what is asked for in other words.
    parallel, result = (0.52, 0.76) if widely(split) else (0.36, 0.68)
    kind = _parallel if roll < parallel else _result if roll < result else _refusal if roll < 0.88 else _follow_up
    return kind(rng, split, thinking)


_HEADS: Final = (
    "",
    "",
    "Two things:",
    "My list:",
    "Please do these:",
    "To do:",
    "I need:",
    "Today:",
    "Hi, I have some wishes:",
)
_TAILS: Final = ("", "", "", "\nThat's all.", "\nDo them all please.", "\nThanks", "\nadd them", "\nIn any order.")


def _rows(rng: Random, texts: list[str]) -> str:
    """The requests as a list."""
    mark = pick(rng, ("- ", "* ", "{i}. ", "{i}) ", "({i}) "))
    rows = [mark.format(i=i) + (text if rng.random() < 0.5 else small(text)) for i, text in enumerate(texts, 1)]
    head = pick(rng, _HEADS)
    return (
        (f"{head}\n" if head and (len(texts) == 2 or "Two" not in head) else "") + "\n".join(rows) + pick(rng, _TAILS)
    )


def joined(rng: Random, texts: list[str], split: str) -> str:
    """Several requests as one message."""
    if widely(split) and len(texts) > 1 and rng.random() < 0.14:
        return _rows(rng, texts)
    out = texts[0]
    for text in texts[1:]:
        if widely(split) and rng.random() < 0.65 and "\n" not in out[-12:]:
            out = out.rstrip(".!?") + pick(rng, _SMALL_JOINS) + small(text)
            continue
        join = pick(rng, _JOINS)
        out += join + (text if join == "\n" or text.startswith("I ") else text[0].lower() + text[1:])
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
    text = ""
    if widely(split) and (roll := rng.random()) < 0.1:
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
    text = text or joined(rng, [a.text for a in asked], split)
    # No numbers: who writes "1." or nothing says how many calls there will be before the second request is read.
    trace = "\n".join([a.trace(text) for a in asked])
    reply = Reply(trace if thinking else "", "", tuple(a.call for a in asked))
    key = ("call", *call_key(asked[0].call))
    return Problem("tools_multi", split, key, (user(text),), reply, _declared(rng, asked, split), thinking)


def _returned(rng: Random, calls: tuple[ToolCall, ...], contents: list[str], thought: str) -> tuple[Message, ...]:
    """The assistant's calls and the tools' messages; clients often send the calls back without the thought."""
    turn = assistant(Reply(thought if rng.random() < 0.6 else "", "", calls))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(turn["tool_calls"], contents)
    ]
    return turn, *results


def _result(rng: Random, split: str, thinking: bool) -> Problem:
    """Results are there: the reply says what was asked for, from each of them; or that the tool failed."""
    asked = _several(rng, split, 1 if rng.random() < 0.6 else 2)
    if asked[-1].tool is not asked[0].tool:
        asked = asked[:1]  # one question cannot be put to two kinds of results
    new = split == "structural"
    keys = fields(rng, 1 + int(rng.random() * 4), 0.5 if new else 0.0)
    wanted = pick(rng, keys)
    contents, facts = [], []
    for _ in asked:
        if rng.random() < 0.08:
            why = f"{said(value(rng, wanted))} not found"
            contents.append(json.dumps({"error": why}, ensure_ascii=False))
            facts.append(("error", why, f"The tool failed: {why}."))
            continue
        values = {f.name: value(rng, f) for f in keys}
        shown = values[wanted.name]
        if len(keys) == 1 and rng.random() < 0.5:
            contents.append(said(shown))
        else:
            contents.append(json.dumps(values, ensure_ascii=False))
        facts.append((wanted.name, shown, f"The {wanted.label} is {said(shown)}."))
    question = pick(rng, _WHAT).format(l=wanted.label)
    text = f"{joined(rng, [a.text for a in asked], split)} {question}"
    thought = "\n".join([a.trace(text) for a in asked])
    messages = (user(text), *_returned(rng, tuple(a.call for a in asked), contents, thought))
    lines = [f"{name}: {written(shown)}" for name, shown, _ in facts]
    reply = Reply("\n".join(lines) if thinking else "", " ".join([sentence for _, _, sentence in facts]))
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
        messages = (*messages, *_returned(rng, (call,), [made.result], thought))
        content = f"The {made.key.replace('_', ' ')} is {said(made.value)}."
        reply = Reply(f"{made.key}: {written(made.value)}" if thinking else "", content)
    return Problem("tools_multi", split, key, messages, reply, tuple(declared), thinking)


_WHAT: Final = (
    "What is the {l}?", "Tell me the {l}.", "I want to know the {l}.", "Which {l} is it?", "Then tell me the {l}.",
    "What {l} does it say?",
)  # fmt: skip


def _refusal(rng: Random, split: str, thinking: bool) -> Problem:
    """No declared tool fits, though some come close."""
    asked = _request(rng, split)
    declared = others(rng, [asked.tool], how_many(rng, split), split)
    reply = Reply(f"{asked.opening}\nnone" if thinking else "", REFUSAL)
    key = ("call", *call_key(asked.call))
    return Problem("tools_multi", split, key, (user(asked.text),), reply, shuffled(rng, declared), thinking)


def _finished(rng: Random, text: str, asked: Request, values: dict[str, Any], answer: str) -> tuple[Message, ...]:
    """A finished exchange: the request, its call, a result of these values, the answer. The thought copies the first
    value."""
    name, first = next(iter(values.items()))
    returned = _returned(rng, (asked.call,), [json.dumps(values, ensure_ascii=False)], asked.trace(text))
    return user(text), *returned, assistant(Reply(f"{name}: {written(first)}", answer))


def _follow_up(rng: Random, split: str, thinking: bool) -> Problem:
    """A finished exchange with a tool, then another request: the next call, numbered on."""
    last = _request(rng, split)
    while True:
        first = request(rng, last.tool if rng.random() < 0.5 else _any_tool(rng, split), split)
        if first.tool is last.tool or not confusable(first.tool, last.tool):
            break
    known = fields(rng, 2, 0.0)
    values = {f.name: value(rng, f) for f in known}
    asked = f"{first.text} {pick(rng, _WHAT).format(l=known[0].label)}"
    answered = f"The {known[0].label} is {said(values[known[0].name])}."
    messages = (*_finished(rng, asked, first, values, answered), user(last.text))
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
    text = pick(rng, _CONTRASTS).format(r=asked.text, s=small(asked.text), n=other.noun)
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
    messages = (*_finished(rng, text, first, values, "Done."), user(more))
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


# ---- judging -----------------------------------------------------------------------------------------------------


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
