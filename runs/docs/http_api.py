"""docs/http-api.md, from the document that /openapi.json serves."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from perilune.server.description.document import ERRORS, HEADERS, document
from perilune.server.description.operation import EVENTS, JSON, OPERATIONS, Operation

BASE = "http://127.0.0.1:8000"
REFUSED, IGNORED = "refused: ", "accepted, without effect: "
TITLES = {IGNORED: "Fields accepted without effect", REFUSED: "Fields refused by name"}
MAX_UNFOLDED = 5  # most fields that the page does not fold
Lists = dict[str, dict[str, dict[str, str]]]  # kind ("": with an effect) -> endpoint -> field -> row or reason


def endpoints() -> str:
    """Every endpoint: the fields of its request, an example to try, and its answer."""
    made = document()
    shown: dict[str, str] = {}  # answers by name, with the endpoint that has their table
    lists: Lists = {kind: {} for kind in ("", *TITLES)}  # of the endpoints before
    return "\n".join(line for o in OPERATIONS for line in _endpoint(o, made, shown, lists)).rstrip()


def index() -> str:
    rows = []
    for o in OPERATIONS:
        rows.append(f"| {_link(f'{o.method} {o.path}')} | {o.summary} |")
    return "\n".join(["| endpoint | |", "|---|---|", *rows])


def _link(title: str) -> str:
    """A link to an endpoint's heading."""
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{title}](#{anchor})"


def errors() -> str:
    rows = [f"| {status} | {meaning} |" for status, meaning in ERRORS.items()]
    return "\n".join(["| status | meaning |", "|---|---|", *rows])


def headers() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in HEADERS.items()]
    return "\n".join(["| header of answers | meaning |", "|---|---|", *rows])


def objects() -> str:
    """The objects in bodies and answers that are not explained with their endpoint."""
    made = document()
    whole = {o.body.__name__ for o in OPERATIONS if o.body} | {
        o.answer.__name__ for o in OPERATIONS if isinstance(o.answer, type)
    }
    lines = []
    for name, schema in made["components"]["schemas"].items():
        if name not in whole:
            lines += [f"### {name}", "", *_description(schema), *_fields(schema)]
            lines += [*_without_effect(name, schema, {kind: {} for kind in TITLES}), ""]
    return "\n".join(lines).rstrip()


def curl(o: Operation) -> str:
    """A command that sends the operation's example."""
    implied = "GET" if o.example is None and not o.form_example else "POST"
    parts = ["curl", *([] if o.method == implied else ["-X", o.method]), BASE + o.example_path]
    if o.example is not None:
        parts += ["-H", f"Content-Type: {JSON}", "-d", json.dumps(o.example)]
    for field in o.form_example:
        parts += ["-F", field]
    return shlex.join(parts)


def _endpoint(o: Operation, made: Mapping[str, Any], shown: dict[str, str], lists: Lists) -> Iterator[str]:
    described = made["paths"][o.path][o.method.lower()]
    yield f"### {o.method} {o.path}"
    yield ""
    yield " ".join(filter(None, (f"{o.summary}.", o.meaning)))
    yield ""
    yield from ("```sh", curl(o), "```", "")
    for p in o.parameters:
        yield f"- `{p.name}` ({p.place}): {p.meaning}"
    if o.parameters:
        yield ""
    for name, meaning in (o.form or {}).items():
        yield f"- `{name}`: {meaning}"
    if o.form:
        yield ""
    schemas = made["components"]["schemas"]
    if o.body is not None:
        reference = described["requestBody"]["content"][JSON]["schema"]["$ref"]
        yield from _fields(schemas[reference.rpartition("/")[2]], f"{o.method} {o.path}", lists)
        yield from _without_effect(f"{o.method} {o.path}", schemas[reference.rpartition("/")[2]], lists)
        yield ""
    yield from _answer(f"{o.method} {o.path}", described["responses"], schemas, shown)
    yield ""


def _answer(
    title: str, responses: Mapping[str, Any], schemas: Mapping[str, Any], shown: dict[str, str]
) -> Iterator[str]:
    content = responses["200"]["content"]
    for kind, about in content.items():
        if kind == JSON and "type" not in about["schema"]:
            yield f"Answer: {_type(about['schema'])}"
            yield ""
            for reference in about["schema"].get("anyOf", [about["schema"]]):
                name = reference["$ref"].rpartition("/")[2]
                if shown.setdefault(name, title) != title:
                    yield f"{name} has its fields at {_link(shown[name])}."
                else:
                    yield from _fields(schemas[name])
                yield ""
        elif kind == EVENTS:
            events = about["schema"]["description"]
            first = shown.setdefault(events, title)
            yield events if first == title else f"With stream: true. Events: those of {_link(first)}."
            yield ""
        else:
            yield f"Answer: {kind}"
            yield ""
    if wrong := [s for s in responses if s != "200"]:
        yield f"Errors: {', '.join(wrong)}"


def _description(schema: Mapping[str, Any]) -> list[str]:
    return [schema["description"].replace("\n", " "), ""] if "description" in schema else []


def _fields(schema: Mapping[str, Any], title: str = "", lists: Lists | None = None) -> Iterator[str]:
    """A table of the fields with an effect, or a line that there are none. Fields that an earlier endpoint has are only
    named."""
    required, rows = schema.get("required", ()), {}
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        said = field.get("description", "")
        if not said.startswith((REFUSED, IGNORED)):
            must = " (required)" if name in required and said else ""
            rows[name] = f"| `{name}` | {_type(field)} | {said.replace('|', chr(92) + '|')}{must} |"
    before = lists[""] if lists else {}
    same = {t: [n for n, row in rows.items() if other.get(n) == row] for t, other in before.items()}
    near = max(same, key=lambda t: len(same[t]), default="")
    before[title] = rows
    named = same[near] if near and len(rows) > 4 and 3 * len(same[near]) >= 2 * len(rows) else []
    if table := [row for name, row in rows.items() if name not in named]:
        if all(row.endswith("|  |") for row in table):
            yield "; ".join(row.removeprefix("| ").removesuffix(" |  |").replace("` | ", "`: ") for row in table)
        else:
            yield from ("| field | type | |", "|---|---|---|", *table)
        yield from ([""] if named else [])
    if named:
        yield f"As {_link(near)} has them: {', '.join(f'`{n}`' for n in named)}."


def _without_effect(title: str, schema: Mapping[str, Any], lists: Lists) -> Iterator[str]:
    """The fields without effect, a line for each kind; if an earlier endpoint has nearly the same, the difference."""
    for kind, heading in TITLES.items():
        said = {n: f.get("description", "") for n, f in schema["properties"].items()}
        own = {n: what.removeprefix(kind) for n, what in said.items() if what.startswith(kind)}
        if not own:
            continue
        differences = {t: dict(own.items() ^ other.items()) for t, other in lists[kind].items()}
        near = min(differences, key=lambda t: len(differences[t]), default="")
        if near and 6 * len(differences[near]) < len(own):
            other = lists[kind][near]
            without = ", ".join(f"`{n}`" for n in other if n not in own)
            rest = {n: why for n, why in own.items() if other.get(n) != why}
            groups = [f"Those of {_link(near)}" + (f" without {without}" if without else "")]
        else:
            rest, groups = own, []
        by: dict[str, list[str]] = {}
        for name, why in rest.items():
            by.setdefault(why if kind == REFUSED else "", []).append(f"`{name}`")
        groups += [", ".join(names) + (f" ({why})" if why else "") for why, names in by.items()]
        lists[kind][title] = own
        text = f"{'; '.join(groups)}."
        if len(own) <= MAX_UNFOLDED:
            yield from ("", f"{heading}: {text}")
        else:
            yield from ("", f"<details><summary>{heading}: {len(own)}</summary>", "", text, "", "</details>")


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        found = [_type(s) for s in schema["anyOf"]]
        return " or ".join(dict.fromkeys(f for f in found if f != "null")) or "null"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return ", ".join(json.dumps(v) for v in schema["enum"] if v is not None)
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(k for k in kind if k != "null")
    if kind == "array":
        items = _type(schema.get("items", {}))
        return f"list of {items}"
    if kind == "object" and "properties" in schema:
        return f"{{{', '.join(schema['properties'])}}}"
    return str(kind)
