"""GET /openapi.json: the description of every endpoint, made from the types that requests are checked with."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import perilune
from perilune.server.body import Body
from perilune.server.description import answers
from perilune.server.description.meanings import MEANINGS, SHAPES
from perilune.server.description.operation import (
    ANTHROPIC_VERSION,
    BYTES,
    EVENTS,
    FORM,
    JSON,
    OPERATIONS,
    Operation,
    Parameter,
)
from perilune.server.fields import Refused
from perilune.server.middleware import OPEN

_REF = "#/components/schemas/"
BODY_ERRORS = (400, 404, 408, 413, 415, 503)  # errors of every endpoint that reads a body
ERRORS: Mapping[int, str] = {
    400: "A field is wrong; `param` names it, the message says what to send instead.",
    401: "The API key is missing, wrong or expired.",
    403: "The API key may not do this. Without keys: a browser sent this for a web page of another host name.",
    404: "There is no such path, model or stored object.",
    405: "The path has other methods: see the header allow.",
    408: "The body came too slowly.",
    413: "The body is larger than serve --max-body-mb allows.",
    415: "The body is declared as something else than JSON, or as compressed.",
    429: "The server, the API key or the client's address has no room for the request now: wait retry-after seconds.",
    431: "The headers are too long.",
    500: "The generation failed, or the server has a fault, which its log describes.",
    503: "The server is starting its engine again, shutting down, or busy with other bodies or grammars: try again.",
    504: "The answer was not complete by deadline_seconds.",
    507: "The disk for files is full: the server's operator must free some of it.",
}
HEADERS: Mapping[str, str] = {
    "x-request-id": "the id of the request in logs, metrics and traces: the client's own x-request-id, or a new one",
    "retry-after": "with 429 and 503: seconds after which to try again",
    "x-ratelimit-limit-requests": "of a key with such a limit: requests per minute; -tokens: tokens per minute",
    "x-ratelimit-remaining-requests": "what is left of it; -tokens likewise",
    "x-ratelimit-reset-requests": "until it is whole again, e.g. 12s; -tokens likewise",
}


async def openapi(request: Request) -> Response:
    return Response(_encoded(), media_type=JSON)


@functools.cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document. It does not depend on the served model or on keys."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Perilune",
            "version": perilune.__version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "The APIs of `perilune serve`: OpenAI's chat, completions and responses, Anthropic's "
            "messages, and what the server says of itself.",
        },
        "paths": paths,
        "components": {
            "schemas": {**_bodies(), **_answers()},
            "responses": {
                _name(status, forms): _error(status, forms)
                for status in ERRORS
                for forms in (_FORMS[:1], _FORMS[1:], _FORMS)
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


Forms = tuple[type[BaseModel], ...]
_FORMS: Forms = (answers.Error, answers.MessagesError)


def _operation(o: Operation) -> dict[str, Any]:
    forms = (answers.MessagesError,) if o.path.startswith("/v1/messages") else _FORMS if o.other else _FORMS[:1]
    is_open = o.path in OPEN
    statuses = {*o.errors, *(BODY_ERRORS if o.body else ()), 403, *(() if is_open else (401, 429))}
    made: dict[str, Any] = {
        "tags": [o.tag],
        "summary": o.summary,
        "operationId": _operation_id(o),
        "responses": {
            "200": {"description": "The answer.", "headers": _headers("x-request-id"), "content": _content(o)},
            **{str(s): {"$ref": f"#/components/responses/{_name(s, forms)}"} for s in sorted(statuses)},
        },
        "security": [{}] if is_open else [{"bearer": []}, {"x-api-key": []}, {}],
    }
    if links := _links(o):
        made["responses"]["200"]["links"] = links
    if o.meaning:
        made["description"] = o.meaning
    in_path = [Parameter(n, {"type": "string"}, "", "path") for n in re.findall(r"\{(\w+)\}", o.path)]
    versioned = (ANTHROPIC_VERSION,) if o.other else ()
    if parameters := [*in_path, *o.parameters, *versioned]:
        made["parameters"] = [
            {"name": p.name, "in": p.place, "schema": p.schema, "description": p.meaning}
            | ({"required": True} if p.place == "path" else {})
            for p in parameters
        ]
    if o.body is not None:
        content = {"schema": {"$ref": _REF + names()[o.body]}} | ({"example": o.example} if o.example else {})
        made["requestBody"] = {"required": True, "content": {JSON: content}}
    if o.form is not None:
        fields: dict[str, dict[str, Any]] = {
            name: {"type": "string", "description": said} for name, said in o.form.items()
        }
        fields["file"] = {"contentMediaType": BYTES, "description": o.form["file"]}  # bytes have no JSON type
        fields["purpose"]["enum"] = ["batch"]
        fields["expires_after[anchor]"]["enum"] = ["created_at"]
        fields["expires_after[seconds]"]["pattern"] = "^[0-9]+$"
        form = {"type": "object", "properties": fields, "required": ["file", "purpose"], "additionalProperties": False}
        made["requestBody"] = {"required": True, "content": {FORM: {"schema": form}}}
    return made


def _operation_id(o: Operation) -> str:
    return re.sub(r"\W+", "_", f"{o.method.lower()}{o.path}").strip("_")


def _links(o: Operation) -> dict[str, Any]:
    """OpenAPI links from a POST to the operations on the object it creates; the answer's `id` fills the path."""
    later = [other for other in OPERATIONS if o.method == "POST" and other.path.startswith(f"{o.path}/{{id}}")]
    return {
        _operation_id(other): {"operationId": _operation_id(other), "parameters": {"id": "$response.body#/id"}}
        for other in later
    }


def _content(o: Operation) -> dict[str, Any]:
    if isinstance(o.answer, str):
        return {o.answer: {"schema": {"type": "object" if o.answer == JSON else "string"}}}
    forms = [{"$ref": _REF + kind.__name__} for kind in (o.answer, o.other) if kind is not None]
    content: dict[str, Any] = {JSON: {"schema": {"anyOf": forms} if len(forms) > 1 else forms[0]}}
    if o.event is not None:
        about = f"With stream: true. The data of an event is a {o.event.__name__}, of the last one [DONE]."
        content[EVENTS] = {"schema": _event(about, o.event)}
    elif o.events:
        about = f"With stream: true. Events: {', '.join(o.events)}."
        content[EVENTS] = {"schema": {**_event(about), "required": ["event", "data"]}}
        content[EVENTS]["schema"]["properties"]["event"] = {"enum": [*o.events]}
    return content


def _event(about: str, kind: type[BaseModel] | None = None) -> dict[str, Any]:
    """The schema of one event of a stream. With `kind`, its data is JSON of that type, or [DONE]."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON}
    if kind is not None:
        data = {"anyOf": [{"const": "[DONE]"}, {**data, "contentSchema": {"$ref": _REF + kind.__name__}}]}
    return {"type": "object", "description": about, "properties": {"data": data}, "required": ["data"]}


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"description": HEADERS[name], "schema": {"type": "string"}} for name in names}


def _name(status: int, forms: Forms) -> str:
    return f"{'Or'.join(form.__name__ for form in forms)}{status}"


def _error(status: int, forms: Forms) -> dict[str, Any]:
    headers = _headers("x-request-id", *(("retry-after",) if status in (429, 503) else ()))
    found = [{"$ref": _REF + form.__name__} for form in forms]
    content = {JSON: {"schema": {"anyOf": found} if len(found) > 1 else found[0]}}
    return {"description": ERRORS[status], "headers": headers, "content": content}


# ---- schemas


def bodies() -> Iterator[type[Body]]:
    """The types of all bodies, and of the objects in them."""
    pending = [o.body for o in OPERATIONS if o.body is not None]
    seen: dict[type[Body], None] = {}
    while pending:
        kind = pending.pop(0)
        if kind not in seen:
            seen[kind] = None
            pending += _inner(kind)  # type: ignore[arg-type]  # objects in a body are no whole bodies
    yield from seen


def _inner(kind: type[Body]) -> Iterator[type[Body]]:
    for field in kind.model_fields.values():
        for part in getattr(field.annotation, "__args__", ()):
            if isinstance(part, type) and issubclass(part, Body):
                yield part


@functools.cache
def names() -> Mapping[type[Body], str]:
    """Each body's schema name: its class name, prefixed with the API where an earlier class has that name."""
    found: dict[type[Body], str] = {}
    for kind in bodies():
        api = kind.__module__.split(".")[-2].replace("anthropic", "messages").capitalize()
        found[kind] = f"{api}{kind.__name__}" if kind.__name__ in found.values() else kind.__name__
    return found


def _bodies() -> dict[str, Any]:
    return {name: _body(kind, name) for kind, name in names().items()}


def _body(kind: type[Body], name: str) -> dict[str, Any]:
    """The schema of a body: declared fields, those accepted without effect, and refused ones with the values that ask
    for nothing."""
    properties: dict[str, Any] = {}
    for field, info in kind.model_fields.items():
        schema: Mapping[str, Any] | None = SHAPES.get(f"{name}.{field}") or SHAPES.get(field)
        if schema is None:
            schema = _renamed(TypeAdapter(info.rebuild_annotation()).json_schema(ref_template=_REF + "{model}"), kind)
        properties[field] = {**schema, "description": meaning(name, field)}
    for field, entry in kind.FIELDS.items():
        if field in properties:
            continue
        if isinstance(entry, Refused):
            properties[field] = {"enum": [None, *entry.idle], "description": f"refused: {entry.use}"}
        else:
            properties[field] = {"description": f"accepted, without effect: {entry}"}
    required = [field for field, info in kind.model_fields.items() if info.is_required()]
    made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": required} if required else {})


def meaning(body: str, field: str) -> str:
    return MEANINGS.get(f"{body}.{field}") or MEANINGS[field]


def _renamed(schema: Any, within: type[Body]) -> Any:
    """A schema of pydantic's without titles and definitions; references are to the names of this document."""
    if isinstance(schema, list):
        return [_renamed(value, within) for value in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str):
        own = schema["$ref"].removeprefix(_REF)
        return {"$ref": _REF + next(names()[kind] for kind in _inner(within) if kind.__name__ == own)}
    return {key: _renamed(value, within) for key, value in schema.items() if key not in ("title", "$defs", "default")}


def _answers() -> dict[str, Any]:
    kinds = [kind for o in OPERATIONS for kind in (o.answer, o.other, o.event) if isinstance(kind, type)]
    kinds = [*dict.fromkeys([*kinds, *_FORMS])]
    _, made = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF + "{model}")
    return {name: _untitled(schema) for name, schema in made["$defs"].items()}


def _untitled(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_untitled(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _untitled(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str)) and k != "default"}
