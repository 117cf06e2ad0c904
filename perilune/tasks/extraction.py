"""JSON from text: the family `json_extract`.

A text states facts in one of several layouts; the prompt asks for some of them as a JSON object. The trace copies key
by key, in the schema's order: key, type, value.

Structure: structural problems have new keys, at least half of them, and half of them are set out in a new layout.
"""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, Final

from perilune.tasks.composed.entries import RULES, Wanted, entry, in_line, request, rows, template
from perilune.tasks.composed.notices import notice
from perilune.tasks.composed.slips import NOTICES, SLIPS, Found, slip
from perilune.tasks.composed.unnamed import loose, nested, related, table, unnamed, worked
from perilune.tasks.fields import Field, bare, fields, said, value, written
from perilune.tasks.problem import Answer, Problem, Reply, belongs, pick, user, widely
from perilune.tasks.records import iso_of, record
from perilune.tasks.wordings import agreeing, enumerated, phrase
from perilune.tasks.words import CITIES, NAMES, PLAIN, SURNAMES, made_up

Facts = list[tuple[Field, Any]]

# ---- how a text states its facts -----------------------------------------------------------------------------------

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
    forms = _NEW_SENTENCES if new else RULES["sentences"]
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
_NEW_PROMPTS: Final = (
    "Schema: {schema}\n\nExtract a JSON object from this text:\n{text}",
    "Text:\n{text}\n\nReturn the data as a JSON object with {schema}.",
    "Read this and return JSON.\nKeys: {schema}\n---\n{text}",
)


# For half of training's problems, makers with cumulative probabilities.
_TRAINED: Final = ((0.18, unnamed), (0.27, loose), (0.32, worked), (0.43, related), (0.465, table), (0.5, nested))


def sample_json_extract(rng: Random, split: str, thinking: bool) -> Problem:
    new, wide = split == "structural", widely(split)
    while True:
        roll, noted = rng.random() if wide else 1.0, wide and rng.random() < 0.33
        train = rng.random() if split == "train" else 1.0
        if train < 0.5 or noted or roll < 0.6:
            if train < 0.5:
                make = next(make for most, make in _TRAINED if train < most)
                messages, reasoning, expected = make(rng)
            else:
                messages, reasoning, expected = notice(rng, *_stated(rng)) if noted else entry(rng)
            content = json.dumps(expected, ensure_ascii=False)
            if belongs(key := ("json", content), split):
                reply = Reply(reasoning if thinking else "", content)
                return Problem("json_extract", split, key, messages, reply, thinking=thinking)
            continue
        from_record = roll < 0.86
        if from_record:
            prompt, wanted, expected = _record_prompt(rng, split == "wide" and rng.random() < 0.3)
        else:
            stated, wanted, expected, optional = _labelled(rng, new)
        content = json.dumps(expected, ensure_ascii=False)
        key = ("json", content)
        if belongs(key, split):
            break
    if not from_record:
        prompt = or_null(rng, _labelled_prompt(rng, stated, wanted, split), optional)
    reasoning = "\n".join(copied(f, expected[f.name]) for f in wanted) if thinking else ""
    return Problem("json_extract", split, key, prompt_messages(prompt), Reply(reasoning, content), thinking=thinking)


def _stated(rng: Random) -> tuple[str, Found]:
    """A text of any kind and what it states."""
    roll = rng.random()
    if roll < 0.65:
        return slip(rng, pick(rng, NOTICES if roll < 0.5 else SLIPS), rng)
    if roll < 0.85:
        made = record(rng, False)
        return made.text, [((f.label,), bare(v), True, made.kind.slots[s].kind) for s, (f, v, _) in made.found.items()]
    facts = _labelled(rng, False)[0]
    return pick(rng, _TEXTS)(rng, facts, False), [((f.label,), v, True, f.kind) for f, v in facts]


def prompt_messages(prompt: str) -> tuple[dict[str, Any], ...]:
    """The messages of a prompt of `wide_prompt`: one, or a system message before the user's text."""
    asks, _, text = prompt.rpartition(_THEN)
    return ({"role": "system", "content": asks}, user(text)) if asks else (user(prompt),)


def _labelled(rng: Random, new: bool) -> tuple[Facts, list[Field], dict[str, Any], bool]:
    """The facts for a text, the keys in order, the expected object, and whether values may be missing."""
    stated = fields(rng, 2 + int(rng.random() * 5), 0.6 if new else 0.0, camel=rng.random() < 0.15)
    wanted = stated if rng.random() < 0.6 else stated[: 1 + int(rng.random() * len(stated))]
    optional = rng.random() < 0.15
    values = {f.name: value(rng, f) for f in stated}
    absent = {f.name for f in wanted if optional and rng.random() < 0.3}
    expected = {f.name: None if f.name in absent else values[f.name] for f in wanted}
    return [(f, values[f.name]) for f in stated if f.name not in absent], wanted, expected, optional


def _labelled_prompt(rng: Random, facts: Facts, wanted: list[Field], split: str) -> str:
    """A text that names its values, as in the layouts above."""
    new = split == "structural"
    rng.shuffle(facts)
    how = 1 + int(rng.random() * 3) if new and rng.random() < 0.5 else 0  # 1: the text, 2: the schema, 3: the prompt
    text = pick(rng, _TEXTS)(rng, facts, how == 1) if facts else pick(rng, _FILLERS)(rng)
    if not widely(split) or rng.random() < 0.5:
        schema = _numbered(rng, wanted) if how == 2 else pick(rng, _SCHEMAS)(rng, wanted)
        return pick(rng, _NEW_PROMPTS if how == 3 else RULES["prompts"]).format(text=text, schema=schema)
    # A bare list of keys would not say that "12" is a string.
    plain = not any(isinstance(v, str) and v.isdigit() for _, v in facts)
    return wide_prompt(rng, text, wanted, typed=not plain)


def _record_prompt(rng: Random, new: bool) -> tuple[str, list[Field], dict[str, Any]]:
    """The prompt with a text of records.py, which does not name its values; the keys in order; the object."""
    while True:
        stated = record(rng, new)
        if stated.found:
            break
    known = list(stated.found.values())
    if rng.random() < 0.3:
        rng.shuffle(known)
    if len(known) > 1 and rng.random() < 0.35:
        known = known[: 1 + int(rng.random() * len(known))]
    optional = rng.random() < 0.12
    note, expected, wanted = "", {}, []
    for f, v, shown in known:
        iso = iso_of(shown)
        if iso and (note or rng.random() < 0.5):
            note = note or pick(rng, RULES["keep_iso"])
            v = iso
        expected[f.name] = bare(v)
        wanted.append(f)
    if note:  # Then every date must be one that can be written as YYYY-MM-DD.
        wanted = [
            f
            for f in wanted
            if f.kind != "title" or not _DAY.search(str(expected[f.name])) or _ISO.fullmatch(expected[f.name])
        ]
        expected = {f.name: expected[f.name] for f in wanted}
    if optional:
        missing = [s for s in stated.kind.slots if s not in stated.found and stated.kind.slots[s].kind != "flag"]
        taken = {k for s in stated.found for k in stated.kind.slots[s].keys}
        keys = [k for s in missing for k in stated.kind.slots[s].keys if k not in taken]
        if keys:
            extra = Field((key := pick(rng, keys)), key.replace("_", " "), "title")
            wanted.insert(int(rng.random() * (len(wanted) + 1)), extra)
            expected = {f.name: expected.get(f.name) for f in wanted}
    if rng.random() < 0.35:
        schema = pick(rng, _SCHEMAS)(rng, wanted)
        prompt = pick(rng, RULES["prompts"] if rng.random() < 0.5 else RULES["block_asks"]).format(
            text=stated.text, schema=schema
        )
    else:
        prompt = wide_prompt(rng, stated.text, wanted, rng.random() < 0.25, stated.kind.name.replace("_", " "))
    prompt = note.strip() + " " + prompt if note and _THEN in prompt else prompt + note
    return or_null(rng, prompt, optional), wanted, expected


_DAY: Final = re.compile(r"\d[./-]\d|Jan|Feb|March|April|May|June|July|Aug|Sept|Oct|Nov|Dec")
_ISO: Final = re.compile(r"\d{4}-\d\d-\d\d")


def or_null(rng: Random, prompt: str, optional: bool) -> str:
    """The prompt; if values may be missing, with a sentence that asks for null then."""
    if not optional:
        return prompt
    after = rng.random() < 0.5 and _THEN not in prompt
    form = pick(rng, RULES["or_null"])
    return f"{prompt}\n{form}" if after else f"{form} {prompt}"


_THEN: Final = "\0"  # between what the system message asks and the user's text


def wide_prompt(rng: Random, text: str, wanted: list[Field], typed: bool, about: str = "") -> str:
    """A text and what is asked of it, in wide wordings; `typed`: the keys with their types; `about`: the kind."""
    asked = [Wanted(f.name, f.label, f.json_type, ()) for f in wanted]
    keys, roll = in_line(rng, asked, False, typed), rng.random()
    if not typed and rng.random() < 0.15:
        keys = enumerated([f"the {f.label}" for f in wanted])
    if roll < 0.1:
        return pick(rng, RULES["system_asks"]).format(keys=keys) + _THEN + text
    if not typed and roll < 0.4:
        if roll < 0.22:
            schema = pick(rng, (template, rows, rows))(rng, asked)
            return phrase(rng, pick(rng, RULES["block_asks"])).format(text=text, schema=schema)
        before = rng.random() < 0.5
        ask = request(rng, asked, "", explained=False, place="below" if before else "above")
        return f"{ask}\n\n{text}" if before else f"{text}\n\n{ask}"
    if about and 0.4 < roll < 0.5:
        form = agreeing(phrase(rng, pick(rng, RULES["about_asks"])), {"about": about})
        return form.format(text=text, keys=keys, about=about)
    return phrase(rng, pick(rng, RULES["asks"])).format(text=text, keys=keys)


def copied(field: Field, value: Any) -> str:
    """The line of a trace for a key and its value."""
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
