"""Results of tools, for `tools_multi`: as tools write them, and what a reply says of them."""

import json
from dataclasses import replace
from random import Random
from typing import Any, Final

from perilune.tasks.fields import Field, said, value, written
from perilune.tasks.problem import Reply, ToolCall, assistant, pick, user, widely
from perilune.tasks.tools import Request

Message = dict[str, Any]
Said = tuple[list[str], list[str], list[str]]  # the results' texts, lines of the thought, sentences of the reply

# Questions about one value, and results that say only that it is done.
WHAT: Final = (
    "What is the {l}?", "Tell me the {l}.", "I want to know the {l}.", "Which {l} is it?", "Then tell me the {l}.",
    "What {l} does it say?",
)  # fmt: skip
OKS: Final[tuple[dict[str, Any], ...]] = ({"ok": True}, {"status": "done"}, {"result": "success"}, {"changed": 1},
    {"status": "ok"}, {"success": True}, {"status": "success"}, {"done": True})  # fmt: skip


def shown(rng: Random, values: dict[str, Any], split: str) -> str:
    """A result as tools write it: JSON mostly."""
    if not widely(split) or rng.random() < 0.75:
        return json.dumps(values, ensure_ascii=False)
    mark = pick(rng, (": ", "=", " = "))
    return pick(rng, ("\n", " | ", "; ", ", ")).join([f"{k}{mark}{said(v)}" for k, v in values.items()])


def returned(
    rng: Random, calls: tuple[ToolCall, ...], contents: list[str], thought: str, before: int = 0
) -> tuple[Message, ...]:
    """The assistant's calls, often without the thought, as clients send them back, and the tools' messages."""
    turn = assistant(Reply(thought if rng.random() < 0.6 else "", "", calls), before)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(turn["tool_calls"], contents)
    ]
    return turn, *results


def asked_about(rng: Random, count: int, keys: list[Field], split: str) -> tuple[str, Said]:
    """A question about one of the keys, and `count` results; each has them all, or says that the tool failed."""
    wanted = pick(rng, keys)
    found: Said = [], [], []
    contents, lines, sentences = found
    for _ in range(count):
        if rng.random() < 0.08:
            _fail(rng, wanted, found)
            continue
        values = {f.name: value(rng, f) for f in keys}
        one = values[wanted.name]
        if len(keys) == 1 and rng.random() < 0.5:
            contents.append(said(one))
        else:
            contents.append(shown(rng, values, split))
        lines.append(f"{wanted.name}: {written(one)}")
        sentences.append(f"The {wanted.label} is {said(one)}.")
    return " " + pick(rng, WHAT).format(l=wanted.label), found


def unasked(rng: Random, asked: list[Request], keys: list[Field]) -> Said:
    """Results of requests without a question ("Get the weather."). The reply says all values, one mostly, often under
    the name of what was asked for; repeats a text; or says that it is done."""
    noun, kind = asked[0].tool.noun.split()[-1], rng.random()
    named = replace(keys[0], name=noun, label=noun) if keys[0].kind != "choice" else keys[0]
    keys = [pick(rng, (keys[0], named)), *keys[1:]][: 1 if rng.random() < 0.7 else 3]
    found: Said = [], [], []
    contents, lines, sentences = found
    for _ in asked:
        values = {f.name: value(rng, f) for f in keys}
        if rng.random() < 0.08:
            _fail(rng, keys[0], found)
        elif kind < 0.25:
            values = pick(rng, OKS)
            contents.append(shown(rng, values, "train"))
            ((name, one),) = values.items()
            lines.append(f"{name}: {written(one)}")
            sentences += ["Done."] * ("Done." not in sentences)
        elif kind < 0.35:
            contents.append(text := ", ".join([said(v) for v in values.values()]))
            lines.append(f"result: {written(text)}")
            sentences.append(f"The result is {text}.")
        else:
            contents.append(shown(rng, values, "train"))
            lines += [f"{f.name}: {written(values[f.name])}" for f in keys]
            sentences += [f"The {f.label} is {said(values[f.name])}." for f in keys]
    return found


def _fail(rng: Random, wanted: Field, found: Said) -> None:
    why = f"{said(value(rng, wanted))} not found"
    contents, lines, sentences = found
    contents.append(json.dumps({"error": why}, ensure_ascii=False))
    lines.append(f"error: {written(why)}")
    sentences.append(f"The tool failed: {why}.")


def finished(
    rng: Random, text: str, asked: Request, values: dict[str, Any], answer: str, split: str
) -> tuple[Message, ...]:
    """A finished exchange: the request, its call, a result of these values, the answer. The thought copies the first
    value."""
    name, first = next(iter(values.items()))
    calls = returned(rng, (asked.call,), [shown(rng, values, split)], asked.trace(text))
    return user(text), *calls, assistant(Reply(f"{name}: {written(first)}", answer))
