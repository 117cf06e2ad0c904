"""JSON from text: the family `json_extract`.

A text states facts in one of several layouts; the prompt asks for some of them as a JSON object. The trace copies key
by key, in the schema's order: key, type, value.

Structure: structural problems have new keys, at least half of them, and half of them are set out in a new layout.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

from perilune.tasks.fields import Field, fields, said, value, written
from perilune.tasks.problem import Answer, Problem, Reply, partition, pick, user
from perilune.tasks.words import CITIES, NAMES, PLAIN, SURNAMES, made_up

Facts = list[tuple[Field, Any]]

# ---- how a text states its facts -----------------------------------------------------------------------------------

_SENTENCES: Final = (
    "The {l} is {s}.", "The {l} is {s}.", "Its {l} is {s}.", "As {l}, {s} is given.", "{L}: {s}.", "The {l} was {s}.",
    "For the {l} we have {s}.", "{L} is {s}.", "We set the {l} to {s}.", "The {l} says {s}.", "{s} is the {l}.",
    "{s} is given as the {l}.", "We note {s} as its {l}.", "With {l} {s}.", "The {l} here: {s}.", "It has the {l} {s}.",
    "{L} was {s}.", "{s} ({l}).", "In the field {l} stands {s}.", "Someone entered {s} as {l}.", "{s} was set as {l}.",
)  # fmt: skip
_NEW_SENTENCES: Final = (
    "{s} was the {l}.", "As the {l} we have {s}.", "We have {s} for the {l}.", "The {l} is given as {s}.",
)  # fmt: skip
_LINES: Final = (
    "{l}: {s}", "{L}: {s}", "- {l}: {s}", "{l} = {s}", "* {L}: {s}", "{L} - {s}", "| {l} | {s} |", "{n}: {s}",
    "{n}={s}", "{l} => {s}", "{l} | {s}", "* {l} is {s}", "{L} is {s}", "> {l}: {s}", "{s} = {l}", "[{l}] {s}",
    "- {s} ({l})", "+ {L}: {s}", '"{l}": {s}', "{s} <- {l}", "{l} ... {s}",
)  # fmt: skip
_NEW_LINES: Final = ("- {L} is {s}", "{l} -> {s}", "* {s} ({l})")
_LISTS: Final = (
    ("{l} {s}", "; "), ("{l}: {s}", "; "), ("{l} = {s}", "; "), ("{l}: {s}", " / "), ("the {l} is {s}", "; "),
    ("{l} = {s}", ", "), ("{s} ({l})", "; "), ("{l}: {s}", ", "), ("{s} is the {l}", "; "), ("{l}={s}", " / "),
    ("with {l} {s}", ", "), ("{l} - {s}", " | "),
)  # fmt: skip
_NEW_LISTS: Final = (("{s} as {l}", "; "), ("{l} is {s}", "; "))
_FILLERS: Final[tuple[Callable[[Random], str], ...]] = (
    lambda rng: f"This was written by {pick(rng, NAMES)} {pick(rng, SURNAMES)}.",
    lambda rng: f"We met in {pick(rng, CITIES)}.",
    lambda rng: "Please read this with care.",
    lambda rng: f"There were {2 + int(rng.random() * 90)} others.",
    lambda rng: f"Nothing is known about the {pick(rng, PLAIN)}.",
    lambda rng: f"See also {made_up(rng).capitalize()}.",
    lambda rng: "All data are without guarantee.",
    lambda rng: f"Thanks to {pick(rng, NAMES)} for the help.",
)


def _prose(rng: Random, facts: Facts, new: bool) -> str:
    forms = _NEW_SENTENCES if new else _SENTENCES
    parts = []
    for f, v in facts:
        parts.append(pick(rng, forms).format(l=f.label, L=f.label.capitalize(), s=said(v)))
        if rng.random() < 0.15:
            parts.append(pick(rng, _FILLERS)(rng))
    if rng.random() < 0.3:
        parts.insert(0, pick(rng, _FILLERS)(rng))
    return " ".join(parts)


def _lines(rng: Random, facts: Facts, new: bool) -> str:
    form = pick(rng, _NEW_LINES if new else _LINES)
    return "\n".join([form.format(l=f.label, L=f.label.capitalize(), n=f.name, s=said(v)) for f, v in facts])


def _list(rng: Random, facts: Facts, new: bool) -> str:
    form, join = pick(rng, _NEW_LISTS if new else _LISTS)
    return join.join([form.format(l=f.label, s=said(v)) for f, v in facts]) + "."


_TEXTS: Final = (_prose, _prose, _prose, _lines, _lines, _list)

# ---- how the prompt asks ---------------------------------------------------------------------------------------------


def _json_schema(rng: Random, wanted: list[Field]) -> str:
    schema = {
        "type": "object",
        "properties": {f.name: f.schema(rng, 0.0) for f in wanted},
        "required": [f.name for f in wanted],
    }
    if rng.random() < 0.5:
        del schema["required"]
    return json.dumps(schema, indent=2 if rng.random() < 0.2 else None)


def _example(rng: Random, wanted: list[Field]) -> str:
    return json.dumps({f.name: f.json_type for f in wanted})


def _bullets(rng: Random, wanted: list[Field]) -> str:
    form = pick(rng, ("- {n} ({t})", "- {n}: {t}", "{n}: {t}", "* {n} ({t})", "{n} - {t}", "{n}, {t}", "[{n}] {t}"))
    return "\n".join([form.format(n=f.name, t=f.json_type) for f in wanted])


def _typescript(rng: Random, wanted: list[Field]) -> str:
    types = {"integer": "number", "array": "string[]"}
    return "{" + "; ".join([f"{f.name}: {types.get(f.json_type, f.json_type)}" for f in wanted]) + "}"


def _named(rng: Random, wanted: list[Field]) -> str:
    return ", ".join([f"{f.name} ({f.json_type})" for f in wanted])


def _counted(rng: Random, wanted: list[Field]) -> str:
    form = pick(
        rng, ("{i}) {n}, {t}", "{i}) {n}: {t}", "({i}) {n} - {t}", "{i}: {n} ({t})", "{i}. {n} ({t})", "{i} {n}")
    )
    return "\n".join([form.format(i=i, n=f.name, t=f.json_type) for i, f in enumerate(wanted, 1)])


def _numbered(rng: Random, wanted: list[Field]) -> str:
    return "\n".join([f"{i}. {f.name}, {f.json_type}" for i, f in enumerate(wanted, 1)])


_SCHEMAS: Final = (
    _json_schema, _json_schema, _example, _bullets, _bullets, _typescript, _named, _named, _counted, _counted,
)  # fmt: skip
_PROMPTS: Final = (
    "Extract the data as JSON.\nSchema:\n{schema}\n\nText:\n{text}",
    "{text}\n\nWrite this as a JSON object with these keys:\n{schema}",
    "Read the text and answer with a JSON object.\n{schema}\n\n{text}",
    "Extract JSON from the text.\n\nText: {text}\n\nKeys: {schema}",
    "Return a JSON object with {schema}.\n\n{text}",
    "{text}\n\nExtract {schema} as JSON.",
    "Fill in this schema from the text below.\n{schema}\n---\n{text}",
    "Text: {text}\nSchema: {schema}\nJSON:",
    "Which values does the text give? Answer in JSON.\n{schema}\n\n\"{text}\"",
    "Convert to JSON: {text}\nFormat: {schema}",
    "Return JSON for these keys.\n{schema}\n\n{text}",
    "Keys: {schema}\nText:\n{text}\nGive the JSON object.",
    "Schema:\n{schema}\nNow read this text and give the JSON object:\n{text}",
    "From the text below, make a JSON object.\n{schema}\n\nText: {text}",
    "Here is a text:\n{text}\n---\nAnswer with JSON. Keys:\n{schema}",
    "Give me {schema} as one JSON object.\nText: {text}",
    "{schema}\n\nFind these in the text and write JSON.\n\n{text}",
)  # fmt: skip
_NEW_PROMPTS: Final = (
    "Schema: {schema}\n\nExtract a JSON object from this text:\n{text}",
    "Text:\n{text}\n\nReturn the data as a JSON object with {schema}.",
    "Read this and return JSON.\nKeys: {schema}\n---\n{text}",
)
_OR_NULL: Final = (
    "Use null for what the text does not say.",
    "Missing values are null.",
    "If a value is missing, write null.",
)


def sample_json_extract(rng: Random, split: str, thinking: bool) -> Problem:
    new = split == "structural"
    while True:
        stated = fields(rng, 2 + int(rng.random() * 5), 0.6 if new else 0.0, camel=rng.random() < 0.15)
        wanted = stated if rng.random() < 0.6 else stated[: 1 + int(rng.random() * len(stated))]
        optional = rng.random() < 0.15
        values = {f.name: value(rng, f) for f in stated}
        absent = {f.name for f in wanted if optional and rng.random() < 0.3}
        expected = {f.name: None if f.name in absent else values[f.name] for f in wanted}
        content = json.dumps(expected, ensure_ascii=False)
        key = ("json", content)
        if partition(key) == split:
            break
    facts = [(f, values[f.name]) for f in stated if f.name not in absent]
    rng.shuffle(facts)
    how = 1 + int(rng.random() * 3) if new and rng.random() < 0.5 else 0  # 1: the text, 2: the schema, 3: the prompt
    text = pick(rng, _TEXTS)(rng, facts, how == 1) if facts else pick(rng, _FILLERS)(rng)
    schema = _numbered(rng, wanted) if how == 2 else pick(rng, _SCHEMAS)(rng, wanted)
    prompt = pick(rng, _NEW_PROMPTS if how == 3 else _PROMPTS).format(text=text, schema=schema)
    if optional:
        prompt = f"{prompt}\n{pick(rng, _OR_NULL)}" if rng.random() < 0.5 else f"{pick(rng, _OR_NULL)} {prompt}"
    reasoning = "\n".join(_copied(f, expected[f.name]) for f in wanted) if thinking else ""
    return Problem("json_extract", split, key, (user(prompt),), Reply(reasoning, content), thinking=thinking)


def _copied(field: Field, value: Any) -> str:
    if value is None:
        return f"{field.name}: null"
    # Most layouts of a schema do not say which strings are choices.
    return f"{field.name}: {'string' if field.choices else field.trace_type} {written(value)}"


def same_object(problem: Problem, answer: Answer) -> bool:
    """The content parses to the same JSON object; the order of keys and the spaces do not matter."""
    if answer.tool_calls:
        return False
    try:
        got = json.loads(answer.content)
    except (ValueError, RecursionError):
        return False
    # As text, because Python takes 1, 1.0 and true for equal.
    return isinstance(got, dict) and _canonical(got) == _canonical(json.loads(problem.reply.content))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
