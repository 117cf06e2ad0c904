"""Tool use: the families `tool_call` (one call) and `tools_multi` (several calls, results, refusals, longer history).

Structure: structural problems ask for tools with a noun, and so a name, that never occurs in training; half of
their parameters are new as well, and half of the requests are worded anew.
"""

import json
from random import Random
from typing import Any, Final

from perilune.tasks.calling.refusals import missing, refusal, talk
from perilune.tasks.calling.requests import REFUSAL, Message, asked_in, call_key, distinctly, remarked
from perilune.tasks.calling.several import at_once, contrast, in_parallel, kit_requests
from perilune.tasks.calling.turns import (
    compared,
    finished_exchange,
    follow_up,
    from_result,
    later,
    lookup,
    once_more,
    stepwise,
)
from perilune.tasks.composed.errands import context, errand, thanks
from perilune.tasks.problem import Answer, Problem, Reply, ToolCall, belongs, pick, plain, user, widely
from perilune.tasks.smalltalk import TALK
from perilune.tasks.tools import Request, how_many, kits, others, request, shuffled


@distinctly
def sample_tool_call(rng: Random, split: str, thinking: bool) -> Problem:
    made = None
    if split == "train" and rng.random() < 0.26:
        return _errand(rng, split, thinking, "tool_call", 1)
    if widely(split):
        roll = rng.random()
        if roll < 0.35:
            made = _of_common(rng, split)
        elif rng.random() < 0.36:
            made = kit_requests(rng, split, 1)
    if made:
        text, (asked,), declared = made
    else:
        asked = asked_in(rng, split)
        text = asked.text
        declared = shuffled(rng, [asked.tool, *others(rng, [asked.tool], how_many(rng, split) - 1, split)])
    if asked.tool.spec in declared:
        text = remarked(rng, text, split)
        reply = Reply(asked.trace(text) if thinking else "", "", (asked.call,))
    else:
        reply = Reply(f"{asked.quoted(text)}\nnone" if thinking else "", REFUSAL)
    key = ("call", *call_key(asked.call))
    return Problem("tool_call", split, key, (user(text),), reply, declared, thinking)


_CLOSE: Final = ("alarm", "currency", "weather")


def _of_common(rng: Random, split: str) -> tuple[str, list[Request], tuple[dict[str, Any], ...]] | None:
    """An everyday request and tools like the one that it asks for, which now and then is not declared."""
    kit, other = pick(rng, kits(common=True)), pick(rng, kits(common=True))
    asked = request(rng, kit[int(rng.random() ** 2 * len(kit))], split)
    if kit[0].noun == other[0].noun or not belongs(("call", *call_key(asked.call)), split):
        return None
    refused = rng.random() < 0.12 and kit[0].noun not in _CLOSE
    declared = [t for t in kit if (rng.random() < 0.7 if t is not asked.tool else not refused)]
    declared += other[: int(rng.random() * 3) + refused]
    return asked.text, [asked], shuffled(rng, declared)


def _errand(rng: Random, split: str, thinking: bool, family: str, count: int) -> Problem:
    """Requests as colleagues write them; now and then none at all, or one without a declared tool."""
    while True:
        roll = rng.random()
        if roll < 0.1 and count > 1:
            text, beside = thanks(rng)
            text = f"{context(rng, (), 'hello')}." if roll < 0.04 else text
            asked, key = list[Request](), tuple[str, ...](("chat", text))
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
    known += others(rng, [*targets, *beside], pick(rng, (0, 0, 0, 1, 2, 5)) + (not known), split)
    if roll > 0.8 and count > 1:
        before, (first,), _ = errand(rng, 1)
        if all(first.tool.noun != t.noun for t in known):  # its finished exchange goes before
            known.append(first.tool)
            messages = (*finished_exchange(rng, before, first, {"status": "ok"}, "Done.", split), *messages)
    if not asked:
        thought, content, *_ = TALK[4 * (roll >= 0.04)]
        reply = Reply(thought if thinking else "", content)
    elif refused:
        reply = Reply(f"{asked[0].quoted(text)}\nnone" if thinking else "", REFUSAL)
    else:
        trace = "\n".join([a.trace(text) for a in asked])
        reply = Reply(trace if thinking else "", "", tuple([a.call for a in asked]))
    return Problem(family, split, key, messages, reply, shuffled(rng, known), thinking)


@distinctly
def sample_tools_multi(rng: Random, split: str, thinking: bool) -> Problem:
    if split == "train" and rng.random() < 0.28:
        return _errand(rng, split, thinking, "tools_multi", pick(rng, (2, 2, 2, 2, 2, 3, 3, 4)))
    if widely(split) and (roll := rng.random()) < 0.35:
        return (stepwise if roll < 0.22 else at_once)(rng, split, thinking)
    if widely(split) and rng.random() < 0.2:
        return pick(rng, (once_more, once_more, contrast, contrast, talk))(rng, split, thinking)
    if widely(split) and (roll := rng.random()) < 0.36:
        ways = (lookup, lookup, lookup, lookup, missing, missing, compared, later, later)
        return pick(rng, ways)(rng, split, thinking)
    roll = rng.random()
    # In training fewer refusals: who refuses often also refuses what is asked for in other words.
    parallel, result = (0.52, 0.76) if widely(split) else (0.36, 0.68)
    kind = in_parallel if roll < parallel else from_result if roll < result else refusal if roll < 0.88 else follow_up
    return kind(rng, split, thinking)


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
