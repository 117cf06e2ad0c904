"""Conversations with calls and their results, for `tools_multi`: answers from results, next steps, next requests."""

import json
from dataclasses import replace
from random import Random
from typing import Any, Final

from perilune.tasks.calling.requests import Message, any_tool, asked_in, call_key, declare, lowered, siblings
from perilune.tasks.calling.several import joined, several_requests
from perilune.tasks.composed.chores import chore, counted
from perilune.tasks.composed.findings import finding
from perilune.tasks.fields import BASES, Field, fields, said, value, written
from perilune.tasks.problem import Problem, Reply, ToolCall, assistant, belongs, pick, user, widely
from perilune.tasks.tools import (
    Request,
    catalog_tool,
    confusable,
    how_many,
    kits,
    opening,
    others,
    request,
    shortly,
    together,
)


def stepwise(rng: Random, split: str, thinking: bool) -> Problem:
    """Something is to be done with a result, or all has been done (chores.py)."""
    while True:
        text, past, thought, due, answer, asked = (counted if split == "train" and rng.random() < 0.14 else chore)(rng)
        if belongs(key := ("call", *call_key(asked[0].call)), split):
            break
    messages: tuple[Message, ...] = (user(text),)
    for step, (calls, results) in enumerate(past):  # no step but the last has several calls
        made, contents = tuple([a.call for a in calls]), [json.dumps(r, ensure_ascii=False) for r in results]
        messages += with_results(rng, made, contents, "\n".join([a.trace(text) for a in calls]), step)
    lines = [thought] * bool(past) + [a.trace(text) for a in due]
    reply = Reply("\n".join(lines) if thinking else "", answer, tuple([a.call for a in due]))
    return Problem("tools_multi", split, key, messages, reply, declare(rng, asked, split), thinking)


def _shown(rng: Random, values: dict[str, Any], split: str) -> str:
    """A result as tools write it: JSON mostly."""
    if not widely(split) or rng.random() < 0.75:
        return json.dumps(values, ensure_ascii=False)
    mark = pick(rng, (": ", "=", " = "))
    return pick(rng, ("\n", " | ", "; ", ", ")).join([f"{k}{mark}{said(v)}" for k, v in values.items()])


def with_results(
    rng: Random, calls: tuple[ToolCall, ...], contents: list[str], thought: str, before: int = 0
) -> tuple[Message, ...]:
    """The assistant's calls and the tools' messages; clients often send the calls back without the thought."""
    turn = assistant(Reply(thought if rng.random() < 0.6 else "", "", calls), before)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(turn["tool_calls"], contents)
    ]
    return turn, *results


_WHAT: Final = (
    "What is the {l}?", "Tell me the {l}.", "I want to know the {l}.", "Which {l} is it?", "Then tell me the {l}.",
    "What {l} does it say?",
)  # fmt: skip


def from_result(rng: Random, split: str, thinking: bool) -> Problem:
    """Results are there: the reply says what was asked for, from each of them; or that the tool failed."""
    asked = several_requests(rng, split, 1 if rng.random() < 0.6 else 2)
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
            contents.append(_shown(rng, values, split))
        facts.append((wanted.name, shown, f"The {wanted.label} is {said(shown)}."))
    question = pick(rng, _WHAT).format(l=wanted.label)
    text = f"{joined(rng, [a.text for a in asked], [a.call for a in asked], split)} {question}"
    thought = "\n".join([a.trace(text) for a in asked])
    messages = (user(text), *with_results(rng, tuple(a.call for a in asked), contents, thought))
    lines = [f"{name}: {written(shown)}" for name, shown, _ in facts]
    reply = Reply("\n".join(lines) if thinking else "", " ".join([sentence for _, _, sentence in facts]))
    key = ("call", *call_key(asked[0].call))
    return Problem("tools_multi", split, key, messages, reply, declare(rng, asked, split), thinking)


def lookup(rng: Random, split: str, thinking: bool) -> Problem:
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
        messages = (*messages, *with_results(rng, (call,), [made.result], thought))
        content = f"The {made.key.replace('_', ' ')} is {said(made.value)}."
        reply = Reply(f"{made.key}: {written(made.value)}" if thinking else "", content)
    return Problem("tools_multi", split, key, messages, reply, tuple(declared), thinking)


_WHICH: Final = (
    "Which of the two has the {m} {l}?", "I want the one with the {m} {l}.", "Where is the {l} {m}?",
    "Which {l} is {m}?", "Tell me which one has the {m} {l}.", "{l}: which one is {m}?",
)  # fmt: skip


def compared(rng: Random, split: str, thinking: bool) -> Problem:
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
    contents = [_shown(rng, more | dict.fromkeys(asked_for, o) | {key: n}, split) for o, n in zip(ones, (low, high))]
    greater = rng.random() < 0.6
    most = pick(rng, ("higher", "bigger", "larger", "greater") if greater else ("lower", "smaller"))
    text = f"{text} {pick(rng, _WHICH).format(l=wanted.label, m=most)}"
    thought = "\n".join([a.trace(text) for a in asked])
    messages = (user(text), *with_results(rng, tuple(a.call for a in asked), contents, thought))
    lines = [*[f"{o}: {n}" for o, n in zip(ones, (low, high))], f"{low}{'<' if low < high else '>'}{high}"]
    reply = Reply("\n".join(lines) if thinking else "", str(ones[(low < high) == greater]))
    return Problem("tools_multi", split, made_key, messages, reply, declare(rng, asked, split), thinking)


_NOW: Final = ("", "Now ", "Good. Now ", "Great, ", "ok. ", "And then ", "Thanks! Now ", "Right, ", "Next ")


def later(rng: Random, split: str, thinking: bool) -> Problem:
    """After a call of a kit's tool, one of its tools is asked for with a value of that call ("now drain it")."""
    while True:
        kit = pick(rng, kits())
        first = request(rng, pick(rng, kit), split)
        last = shortly(rng, pick(rng, kit), first.call.arguments)
        if last and last.call != first.call and belongs(key := ("call", *call_key(last.call)), split):
            break
    values: dict[str, Any] = pick(rng, ({"ok": True}, {"status": "done"}, {"result": "success"}, {"changed": 1}))
    text = pick(rng, _NOW) + lowered(last.text, [last.call])
    messages = (*finished_exchange(rng, first.text, first, values, "Done.", split), user(text))
    reply = Reply(last.trace(text) if thinking else "", "", (last.call,))
    return Problem("tools_multi", split, key, messages, reply, siblings(rng, kit), thinking)


def finished_exchange(
    rng: Random, text: str, asked: Request, values: dict[str, Any], answer: str, split: str
) -> tuple[Message, ...]:
    """A finished exchange: the request, its call, a result of these values, the answer. The thought copies the first
    value."""
    name, first = next(iter(values.items()))
    returned = with_results(rng, (asked.call,), [_shown(rng, values, split)], asked.trace(text))
    return user(text), *returned, assistant(Reply(f"{name}: {written(first)}", answer))


def follow_up(rng: Random, split: str, thinking: bool) -> Problem:
    """A finished exchange with a tool, then another request: the next call, numbered on."""
    last = asked_in(rng, split)
    while True:
        first = request(rng, last.tool if rng.random() < 0.5 else any_tool(rng, split), split)
        if first.tool is last.tool or not confusable(first.tool, last.tool):
            break
    known = fields(rng, 2, 0.0)
    values = {f.name: value(rng, f) for f in known}
    asked = f"{first.text} {pick(rng, _WHAT).format(l=known[0].label)}"
    answered = f"The {known[0].label} is {said(values[known[0].name])}."
    messages = (*finished_exchange(rng, asked, first, values, answered, split), user(last.text))
    reply = Reply(last.trace(last.text) if thinking else "", "", (last.call,))
    key = ("call", *call_key(last.call))
    return Problem("tools_multi", split, key, messages, reply, declare(rng, [first, last], split), thinking)


_AGAIN: Final = ("And {v}?", "What about {v}?", "And now {v}?", "Same for {v}, please.", "Now {v}.",
    "{v} too, please.",
    "ok and {v}", "Now the same with {v}", "Then {v} as well.", "thanks. and {v}?", "How about {v}?",
    "No, I meant {v}.")  # fmt: skip


def once_more(rng: Random, split: str, thinking: bool) -> Problem:
    """After a call and its result, the same is asked for with one other value: "And in Oslo?"."""
    while True:
        made = together(rng, catalog_tool(rng), 2, joined=False)
        if made and belongs(("call", *call_key(made[1][1].call)), split):
            break
    text, (first, last) = made
    (changed,) = [v for k, v in last.call.arguments.items() if v != first.call.arguments[k]]
    values = {f.name: value(rng, f) for f in fields(rng, 1 + int(rng.random() * 2), 0.0)}
    more = pick(rng, _AGAIN).format(v=changed)
    messages = (*finished_exchange(rng, text, first, values, "Done.", split), user(more))
    trace = replace(last, opening=opening(more)).trace(more)
    reply = Reply(trace if thinking else "", "", (last.call,))
    key = ("call", *call_key(last.call))
    return Problem("tools_multi", split, key, messages, reply, declare(rng, [first, last], split), thinking)
