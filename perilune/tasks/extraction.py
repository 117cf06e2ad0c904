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

from perilune.tasks.composed.entries import Wanted, entry, request
from perilune.tasks.fields import Field, bare, fields, said, value, written
from perilune.tasks.problem import Answer, Problem, Reply, belongs, pick, user, widely
from perilune.tasks.records import iso_of, record
from perilune.tasks.wordings import agreeing, phrase
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
# {keys}: names in a line; {schema}: any layout of them.
_ASKS: Final = (
    "Give me {keys} as JSON.\n\n{text}", "give me {keys} as json: {text}",
    "Extract {keys} from this text as JSON: {text}",
    "I need the fields {keys} from the text below as a JSON object.\n\n{text}",
    "{text}\n\nTurn this into JSON with {keys}.", "Return only a JSON object with the keys {keys}.\n\n{text}",
    "json with {keys} pls: {text}", "Pull out {keys} and answer in JSON only.\n---\n{text}\n---",
    "Parse this into JSON ({keys}): {text}", "What are {keys} here? JSON please.\n{text}",
    "\"{text}\" -> JSON with the fields {keys}", "Make a JSON object with {keys} from: {text}",
    "Text: {text}\n\nJSON keys: {keys}",
    "{text}\n\nGive {keys} as JSON.", "{text}\nExtract: {keys}. Format: JSON.",
    "Read this message and give me back {keys} in JSON format:\n\n{text}",
    "I got this e-mail:\n\n{text}\n\nPut {keys} into a JSON object.",
    "Create JSON from the sentence: {text} Keys: {keys}",
    "Convert the following to a JSON object that has {keys}: {text}", "From this note: {text} I want {keys} as JSON.",
    "{text} Answer as JSON with {keys}.",
    "Fill a JSON object. Fields: {keys}. Source: {text}",
    "Our system needs {keys} as JSON. Here is what the customer wrote: {text}",
    "Please find {keys} in the text and output JSON.\n\nText:\n{text}", "Output JSON only: {keys}.\n{text}",
    "Here is a message.\n\n{text}\n\nWhich {keys} does it state? Answer with a JSON object.",
    "Take the text \"{text}\" and return {keys} in JSON.",
    "Can you read {keys} out of this and give them to me as JSON? {text}",
    "Summarise as JSON with exactly these keys: {keys}\n\n{text}", "JSON, fields {keys}:\n{text}",
    "Structured data please ({keys}), as JSON: {text}", "The object should have {keys}. Text: {text}",
    "Extract the following as JSON: {keys}. {text}",
    "Only JSON. Keys are {keys}. {text}", "{keys} as JSON from \"{text}\"",
    "Write a JSON object. It must contain {keys}. Use this text: {text}",
    "Get {keys} out of the following lines and reply with JSON.\n{text}", "{text}\n\n=> JSON: {keys}",
    "I'd like a JSON with {keys} from this: {text}",
    "Could you give me a JSON object with {keys}? The text is: {text}", "Record this as JSON, with {keys}: {text}",
    "Use {keys} as keys. Text to convert to JSON: {text}", "Message: {text}\nTask: return {keys} as JSON.",
    "We store {keys}. Make the JSON entry for: {text}",
    "Turn the text into a JSON object having {keys}, nothing else. {text}", "Tell me {keys} in JSON. {text}",
    "Here's the text: {text}\n\nAnd the keys: {keys}\n\nJSON:", "Make me JSON of this, keys {keys}. {text}",
    "I want an object with {keys} from: {text} (JSON)", "fields: {keys}. \"{text}\" JSON only",
    "What does this say about {keys}? Answer in JSON. '{text}'", "For our list: {keys}. {text} Reply in JSON",
    "As JSON, {keys}: {text}", "{text} Output JSON ({keys}).", "{text} -- json, {keys}", "{keys}?? json!! {text}",
    "{text}\n\n^ {keys}, json", "JSON({keys}) <- {text}", "“{text}” Put that in JSON: {keys}", "«{text}» JSON: {keys}",
    "'{text}' - keys {keys}, as JSON", "```\n{text}\n```\n{keys} -> JSON", "„{text}“ json object please: {keys}",
    "My nephew typed this: {text}\nI need {keys} out of it, JSON", "gimme json {keys} from dis: {text}",
    "Would be lovely to have {keys} as a little JSON object. It's about this: {text}", "{text}\n{keys}\njson",
    "Don't explain, don't chat. JSON with {keys}. {text}", "stop talking, just the json: {keys}\n{text}",
    "Kindly do the needful and convert to JSON having {keys}: {text}", "Abeg turn am to JSON, {keys}: {text}",
    "Please to make JSON out of it, I must have {keys}. {text}", "JSON wanted: {keys}\n\nGiven: {text}",
    "The undersigned requests {keys} in JSON form.\n\n{text}", "entry: {text} | wanted: {keys} | format: JSON",
    "Q: {keys} in JSON?\nD: {text}", "<doc>{text}</doc>\n<keys>{keys}</keys>\nJSON.", "[{text}] => JSON [{keys}]",
    "# Task\nJSON with {keys}\n# Text\n{text}", "{text}\n\nso: {keys}. one json object, no prose",
    "Data entry\n\n{text}\n\nWe require {keys}, in JSON please.\nRegards, J. Obi", "JSON - {keys} - {text}",
    "My parser dies on prose. Feed it JSON: {keys}. The prose: {text}", "read: {text}\nwrite: JSON ({keys})",
    "{keys} go in, JSON comes out. Here you are: {text}", "Boil this down to {keys}, JSON: {text}",
    "Reply with nothing but JSON. In it: {keys}. The line reads: {text}", "I only care about {keys}. JSON. {text}",
    "No idea how JSON works, but I need {keys} in it. {text}", "Tell my script {keys} (it eats JSON), given: {text}",
    "Under the names {keys}, put what this says into JSON: {text}", "{text}\nThat's all he said. {keys} as JSON?",
    "{keys}: what are they in the following? One JSON object. {text}", "Transcript: {text}\nJSON record, {keys}:",
    "Mum's note says: \"{text}\" For the app, {keys} in JSON", "I'm filing this -> {text} <- as JSON, with {keys}",
    "{text}\n\nThe above, as JSON. Keys, in this order: {keys}.", "How would {keys} look as JSON here? {text}",
    "Deliver {keys}, JSON, raw, no code block, for: {text}", "{text}\n\n-- \nplease extract {keys}, json. Sam",
)  # fmt: skip
# {about}: what a record is about.
_ABOUT_ASKS: Final = (
    "For our {about} list: {keys}. {text} JSON please", "{about} as JSON, {keys}: {text}",
    "Make a {about} object ({keys}) of \"{text}\" in JSON", "{text}\n\nOne JSON object per {about}: {keys}",
    "We file every {about} under {keys}. JSON for this one: {text}", "new {about}! {text} save as json w/ {keys}",
    "The {about} sheet has the columns {keys}. As JSON: {text}", "{about}: {text}\nkeys: {keys}\noutput: json",
)  # fmt: skip
_BLOCK_ASKS: Final = (
    "Extract this as JSON.\n\n{text}\n\nFields:\n{schema}", "{text}\n\nI need JSON like this:\n{schema}",
    "Use this schema:\n{schema}\n\nInput: {text}",
    "Give me a JSON object for this text.\n\n{text}\n\nSchema: {schema}",
    "Follow the schema {schema} and extract: {text}",
    "The JSON must have the form {schema}. The text: {text}", "Output format:\n{schema}\n\nInput:\n{text}",
    "Fields I need:\n{schema}\n\nHere is the e-mail:\n{text}", "{schema}\nFill this in as JSON with: {text}",
    "Extract structured data.\n\nSchema: {schema}\nInput: {text}\nOutput:",
    "Answer in JSON that fits this schema: {schema}\n\n{text}",
    "Please answer in this format:\n{schema}\n\nThe message was:\n{text}",
    "Turn the message into JSON as described.\n{schema}\n\nMessage: {text}",
    "\"{text}\"\n\nReturn the JSON for it. Keys:\n{schema}",
    "{text}\n{schema}\nFill it, JSON only.", "Complete this: {schema} according to \"{text}\" (JSON)",
    "{schema} <- put in the values, JSON, from: {text}", "JSON. Template {schema}\nSource «{text}»",
    "My form wants\n{schema}\nand the letter says\n{text}\nJSON please",
    "hey, json?\n{text}\nkeys r\n{schema}",
    "```\n{text}\n```\nJSON, these keys:\n{schema}", "JSON of this shape, no more keys:\n{schema}\n\n>>> {text}",
    "Dear Sir,\nkindly return JSON with\n{schema}\nfor the following:\n{text}", "'{text}' ... as JSON?\n{schema}",
    "What goes into {schema} if I tell you \"{text}\"? JSON.", "text = '''{text}'''\njson = {schema}",
)  # fmt: skip
_KEEP_ISO: Final = (" Write dates as YYYY-MM-DD.", " Dates in ISO format (YYYY-MM-DD), please.",
    " Use YYYY-MM-DD for dates.", " (date as YYYY-MM-DD)", " The date must be in the format YYYY-MM-DD.")  # fmt: skip
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
    new, wide = split == "structural", widely(split)
    while True:
        roll = rng.random() if wide else 1.0
        if roll < 0.6:
            messages, reasoning, expected = entry(rng)
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


def prompt_messages(prompt: str) -> tuple[dict[str, Any], ...]:
    """The messages of a prompt of `wide_prompt`: one, or a system message before the user's text."""
    asks, _, text = prompt.rpartition(_THEN)
    return ({"role": "system", "content": asks}, user(text)) if asks else (user(prompt),)


def _labelled(rng: Random, new: bool) -> tuple[Facts, list[Field], dict[str, Any], bool]:
    """What a text is to state, the keys in order, the object, and whether values may be missing."""
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
        return pick(rng, _NEW_PROMPTS if how == 3 else _PROMPTS).format(text=text, schema=schema)
    # A list of keys does not say which numbers are texts.
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
            note = note or pick(rng, _KEEP_ISO)
            v = iso
        expected[f.name] = bare(v)
        wanted.append(f)
    if note:  # then every date must be one that can be so written
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
        prompt = pick(rng, _PROMPTS if rng.random() < 0.5 else _BLOCK_ASKS).format(text=stated.text, schema=schema)
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
    return f"{prompt}\n{pick(rng, _OR_NULL)}" if after else f"{pick(rng, _OR_NULL)} {prompt}"


_TYPE_WORDS: Final = {
    "string": ("string", "string", "text"), "integer": ("integer", "number", "int", "whole number"),
    "number": ("number", "float", "decimal number"),
    "boolean": ("boolean", "true/false", "bool"), "array": ("array of strings", "list", "list of strings"),
}  # fmt: skip
_KEY_FORMS: Final = ("{n}", "{n}", "{n}", "{n}", '"{n}"', "`{n}`", "the {n}", "'{n}'", "*{n}*", "its {n}", "{l}",
    "the {l}")  # fmt: skip
_TYPED_FORMS: Final = ("{n} ({t})", "{n} ({t})", "{n}: {t}", '"{n}" ({t})', "a {t} {n}", "{n} as {t}", "`{n}` ({t})",
    "{n} which is a {t}", "{n}, a {t},")  # fmt: skip


def _key_list(rng: Random, wanted: list[Field], typed: bool) -> str:
    """Keys in a line of prose."""
    form = pick(rng, _TYPED_FORMS if typed else _KEY_FORMS)
    types = [pick(rng, _TYPE_WORDS[f.json_type]) for f in wanted]
    shown = [agreeing(form, {"t": t}).format(n=f.name, l=f.label, t=t) for f, t in zip(wanted, types)]
    if typed and rng.random() < 0.3 and all(f.kind != "code" for f in wanted):  # types of what is no string only
        shown = [f.name if f.json_type == "string" else s for f, s in zip(wanted, shown)]
    roll = rng.random()
    if len(shown) == 1 or roll < 0.2:
        return ", ".join(shown)
    if roll < 0.25:
        return pick(rng, (" / ", "; ", " + ", " | ", "/", ",", " and ", " & ", " ... ", "\n")).join(shown)
    if roll < 0.3:
        return "(" + ", ".join(shown) + ")" if roll < 0.275 else "{" + ", ".join(shown) + "}"
    return (
        ", ".join(shown[:-1]) + pick(rng, (" and ", " and ", " and ", ", and ", " plus ", " as well as ")) + shown[-1]
    )


_THEN: Final = "\0"  # between what the system message asks and the user's text
_SYSTEM_ASKS: Final = (
    "Extract {keys} from the user's message as JSON.", "You turn messages into JSON objects with {keys}.",
    "Answer with a JSON object. Keys: {keys}.", "Read the user's text and return {keys} as JSON, nothing else.",
    "For every message give {keys} in JSON.", "You are a parser. Output JSON with the fields {keys}.",
    "The user sends a text. Reply only with JSON: {keys}.", "Convert each message to JSON with the keys {keys}.",
    "Incoming notes become JSON: {keys}.", "JSON bot, fields {keys}", "Whatever you are told, reply in JSON ({keys}).",
)  # fmt: skip


def wide_prompt(rng: Random, text: str, wanted: list[Field], typed: bool, about: str = "") -> str:
    """A text and what is asked of it, in wide wordings; `typed`: the keys with their types; `about`: the kind."""
    if rng.random() < 0.1:
        return pick(rng, _SYSTEM_ASKS).format(keys=_key_list(rng, wanted, typed)) + _THEN + text
    if not typed and rng.random() < 0.15:
        schema = pick(rng, (_blank, _listed, _listed))(rng, wanted)
        return phrase(rng, pick(rng, _BLOCK_ASKS)).format(text=text, schema=schema)
    if not typed and rng.random() < 0.25:
        before = rng.random() < 0.5
        asked = [Wanted(f.name, f.label, f.json_type, ()) for f in wanted]
        ask = request(rng, asked, "", explained=False, place="below" if before else "above")
        return f"{ask}\n\n{text}" if before else f"{text}\n\n{ask}"
    if about and rng.random() < 0.1:
        form = agreeing(phrase(rng, pick(rng, _ABOUT_ASKS)), {"about": about})
        return form.format(text=text, keys=_key_list(rng, wanted, typed), about=about)
    return phrase(rng, pick(rng, _ASKS)).format(text=text, keys=_key_list(rng, wanted, typed))


_EMPTY: Final = {"integer": "0", "number": "0.0", "boolean": "false", "array": "[]"}


def _blank(rng: Random, wanted: list[Field]) -> str:
    """An object to fill in."""
    empty = pick(rng, ('"..."', '"?"', '"<{n}>"', '""', "...", "...", "null", "_", "(typed)"))
    key = "{n}: " if rng.random() < 0.15 else '"{n}": '
    parts = [(key + (empty if empty != "(typed)" else _EMPTY.get(f.json_type, '""'))).format(n=f.name) for f in wanted]
    return "{\n  " + ",\n  ".join(parts) + "\n}" if rng.random() < 0.2 else "{" + ", ".join(parts) + "}"


def _listed(rng: Random, wanted: list[Field]) -> str:
    form = pick(rng, ("- {n}", "* {n}", "{n}", "{i}. {n}", "- `{n}`", "{i}) {n}", "• {n}", "-{n}", "{n}:", "> {n}"))
    return "\n".join([form.format(n=f.name, i=i) for i, f in enumerate(wanted, 1)])


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
