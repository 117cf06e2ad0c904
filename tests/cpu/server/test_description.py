"""/openapi.json and docs/http-api.md: complete, true for every command of the page, and served to anyone."""

import asyncio
import dataclasses
import gzip
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from perilune.core.config import ServerConfig
from perilune.server.app import build_app
from perilune.server.description import meanings
from perilune.server.description.document import ERRORS, bodies, document, meaning, names
from perilune.server.description.operation import OPERATIONS, Operation
from perilune.server.service import Service
from runs.docs import http_api
from tests.serving import BYTES, CALL, INFO, TEMPLATE, WEATHER, FakeEngine, Reply, Served, serve, served

PAGE = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()
COMMANDS = re.findall(r"^curl .*$", PAGE, re.M)
DOCUMENT = document()


def closed(schema: Any) -> Any:
    """The same schema, which takes no field that it does not have."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return made | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else made


def check(reply: Any, o: Operation, status: int = 200) -> None:
    """An answer is as the document says, with no field left over."""
    described = DOCUMENT["paths"][o.path][o.method.lower()]["responses"][str(status)]
    if "$ref" in described:
        described = DOCUMENT["components"]["responses"][described["$ref"].rpartition("/")[2]]
    schema = described["content"]["application/json"]["schema"]
    whole = {**schema, "components": {"schemas": closed(DOCUMENT["components"]["schemas"])}}
    jsonschema.Draft202012Validator(whole).validate(reply)


BATCH_LINE = json.dumps(
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Hi"}]},
    }
)


def operation(method: str, path: str) -> Operation:
    return next(o for o in OPERATIONS if (o.method, o.path) == (method, path))


def routes() -> list[Route]:
    app = build_app(Service(FakeEngine(), BYTES, TEMPLATE, ServerConfig()))
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_route_is_described_and_nothing_else() -> None:
    served = {(m, re.sub(r":\w+", "", r.path)) for r in routes() for m in (r.methods or set()) - {"HEAD"}}
    assert served == {(o.method, o.path) for o in OPERATIONS} and len(OPERATIONS) == len(served)


def test_every_field_has_a_meaning_and_every_meaning_a_field() -> None:
    used = set()
    for kind in bodies():
        for field in kind.model_fields:
            own = f"{names()[kind]}.{field}"
            assert meaning(names()[kind], field)
            used |= {own if own in meanings.MEANINGS else field}
    assert used == set(meanings.MEANINGS)
    fields = {f"{names()[kind]}.{f}" for kind in bodies() for f in kind.model_fields}
    assert {s for s in meanings.SHAPES if "." in s} <= fields


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (v for k, v in value.items() if k == "$ref")
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_document_is_whole() -> None:
    for reference in references(DOCUMENT):
        at: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            at = at[step]
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [o["operationId"] for path in DOCUMENT["paths"].values() for o in path.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)
    forms = [s for kind in (o.answer for o in OPERATIONS) if isinstance(kind, type) for s in [kind.__name__]]
    assert not set(names().values()) & set(forms), "a body and an answer share a name"


@pytest.mark.parametrize("choice", ["auto", {"type": "any"}])
@served(answer="Hm</think>Hello")
async def test_a_choice_of_tools_is_taken_as_described(s: Served, choice: Any) -> None:
    schema = DOCUMENT["components"]["schemas"]["MessagesBody"]["properties"]["tool_choice"]
    right = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).is_valid(choice)
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {**(operation("POST", "/v1/messages").example or {}), "tools": tools, "tool_choice": choice}
    assert ((await s.client.post("/v1/messages", body)).status == 200) == right


@served(api_key="sesame")
async def test_anyone_may_read_it(s: Served) -> None:
    reply = await s.client.get("/openapi.json")
    assert reply.status == 200 and reply.json == json.loads(json.dumps(DOCUMENT))
    assert "sesame" not in reply.text
    assert (await s.client.get("/v1/models")).status == 401


async def sent(s: Served, command: str) -> tuple[Operation, Reply]:
    """The reply to a command of the page. Ids in it stand for those of objects that exist."""
    words = shlex.split(command)
    assert words[0] == "curl"
    method, path, data = "GET", "", b""
    at = 1
    while at < len(words):
        if words[at] == "-X":
            method, at = words[at + 1], at + 2
        elif words[at] == "-H":
            name, _, value = words[at + 1].partition(": ")
            s.client.headers[name] = value
            at += 2
        elif words[at] == "-F":
            name, _, value = words[at + 1].partition("=")
            method, at = "POST", at + 2
            given = f'name="{name}"; filename="requests.jsonl"' if value.startswith("@") else f'name="{name}"'
            value = BATCH_LINE if value.startswith("@") else value
            end = b"--XX--\r\n" if at == len(words) else b""
            data += f"--XX\r\nContent-Disposition: form-data; {given}\r\n\r\n{value}\r\n".encode() + end
            s.client.headers["content-type"] = "multipart/form-data; boundary=XX"
        elif words[at] == "-d":
            method, data, at = "POST", words[at + 1].encode(), at + 2
        else:
            path, at = words[at].removeprefix(http_api.BASE) or "/", at + 1
    o = next(o for o in OPERATIONS if http_api.curl(o) == command)
    if "resp_1" in path:
        made = await s.client.post("/v1/responses", {"input": "Hi", "background": True})
        path = path.replace("resp_1", made.json["id"])
        while (await s.client.get(f"/v1/responses/{made.json['id']}")).json["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0)
    if "file-1" in command or "batch_1" in command:
        batches = s.client.app.state.batches
        source = batches.store.write("", "file-" + "0" * 32, BATCH_LINE.encode())
        file = batches.store.keep("", "file-" + "0" * 32, source, {"filename": "a.jsonl", "purpose": "batch"})
        path, data = path.replace("file-1", file["id"]), data.replace(b"file-1", file["id"].encode())
        if "batch_1" in path:
            about = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            path = path.replace("batch_1", (await s.client.post("/v1/batches", about)).json["id"])
    path, _, query = path.partition("?")
    return o, await s.client.request(method, path, [data], query=query)


def test_the_page_has_a_command_for_each_endpoint() -> None:
    assert COMMANDS == [http_api.curl(o) for o in OPERATIONS]


def test_every_field_of_a_request_is_on_the_page() -> None:
    """In the section of the endpoint, or in that of an endpoint linked from there."""
    parts = dict(re.findall(r"^### ([A-Z]+ /\S*)\n(.*?)(?=^##)", PAGE, re.M | re.S))
    for title, text in parts.items():
        method, path = title.split()
        if body := DOCUMENT["paths"][path][method.lower()].get("requestBody", {}).get("content", {}).get(http_api.JSON):
            said = "".join([text, *(parts[t] for t in re.findall(r"\[([A-Z]+ /\S+)\]\(", text))])
            fields = DOCUMENT["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]["properties"]
            assert not [f for f in fields if f"`{f}`" not in said], title


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.removeprefix("curl ").split(" -H")[0])
def test_a_command_of_the_page_works(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    received: list[type] = []
    receive = Service.receive

    async def spy(self: Service, request: Any, kind: Any) -> Any:
        received.append(kind)
        return await receive(self, request, kind)

    monkeypatch.setattr(Service, "receive", spy)

    async def test(s: Served) -> None:
        o, reply = await sent(s, command)
        assert reply.status == 200, reply.text
        content = DOCUMENT["paths"][o.path][o.method.lower()]["responses"]["200"]["content"]
        assert reply.headers["content-type"].partition(";")[0] in content
        assert received[-1:] == ([o.body] if o.body else []) or "resp_1" in command or "batch_1" in command
        if isinstance(o.answer, type):
            check(reply.json, o)
        await s.client.app.state.batches.close()

    serve(test, answer="Let me see.</think>Hello", served_model_name="kimi-nano", files_dir=str(tmp_path / "files"))


@pytest.mark.parametrize(
    ("path", "change", "answer"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}, "</think>Hi"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "n": 2}, "a</think>Hi"),
        ("/v1/chat/completions", {"tools": [WEATHER]}, "Hm</think>" + CALL.format(0)),
        ("/v1/completions", {"logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True}, "Hi"),
        ("/v1/responses", {"max_output_tokens": 3, "metadata": {"a": "b"}}, "Hello"),
        (
            "/v1/responses",
            {"tools": [{"type": "function", **WEATHER["function"]}], "reasoning": {"effort": "low"}},
            "Hm</think>" + CALL.format(0),
        ),
        ("/v1/messages", {"tools": [{"name": "get_weather", "input_schema": {}}]}, CALL.format(0)),
        ("/v1/messages", {"stop_sequences": ["l"]}, "Hello"),
    ],
)  # fmt: skip
def test_rich_answers_and_their_events_are_described(path: str, change: dict[str, Any], answer: str) -> None:
    async def test(s: Served) -> None:
        o = operation("POST", path)
        body = {**(o.example or {}), **change}
        reply = await s.client.post(path, body)
        assert reply.status == 200, reply.text
        check(reply.json, o)
        if o.event is not None:
            assert not isinstance(o.answer, str)
            body.pop("prompt_logprobs", None)
            schema = {"$ref": f"#/components/schemas/{o.event.__name__}"}
            whole = {**schema, "components": {"schemas": closed(DOCUMENT["components"]["schemas"])}}
            streamed = await s.client.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
            for chunk in streamed.chunks:
                jsonschema.Draft202012Validator(whole).validate(chunk)
        else:
            streamed = await s.client.post(path, {**body, "stream": True})
            assert set(re.findall(r"^event: (.+)$", streamed.text, re.M)) <= set(o.events)

    serve(test, answer=answer)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/chat/completions", {"messages": 5}, {}, 400),
        ("/v1/messages", {"messages": []}, {}, 400),
        ("/v1/chat/completions", {"messages": [], "model": "other"}, {}, 404),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_0"}, {}, 404),
        ("/v1/messages", {}, {"content-type": "text/plain"}, 415),
        ("/tokenize", {"prompt": "a"}, {"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
@served()
async def test_errors_are_described(s: Served, path: str, body: Any, headers: dict[str, str], status: int) -> None:
    s.client.headers.update(headers)
    reply = await s.client.post(path, body)
    assert reply.status == status and status in ERRORS and reply.headers["x-request-id"]
    check(reply.json, operation("POST", path), status)


@pytest.mark.parametrize("declared", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"])
@served()
async def test_json_may_be_declared_as_such(s: Served, declared: str) -> None:
    s.client.headers["content-type"] = declared
    assert (await s.client.post("/tokenize", {"prompt": "a"})).status == 200


@served()
async def test_a_body_of_another_type_is_refused_before_it_is_read(s: Served) -> None:
    """A web page may send text/plain to any address without asking the server: it must not cost a generation."""
    s.client.headers["content-type"] = "text/plain"
    reply = await s.client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert reply.status == 415 and s.engine.seen == []
    assert reply.error["message"] == (
        "the body is declared as 'text/plain': send JSON with 'Content-Type: application/json'"
    )
    s.client.headers |= {"content-type": "application/json", "content-encoding": "gzip"}
    reply = await s.client.post("/v1/chat/completions", gzip.compress(b'{"messages": []}'))
    assert reply.status == 415
    assert reply.error["message"] == "the body is declared as coded ('gzip'): send it without Content-Encoding"


BOUNDED = {
    "/v1/chat/completions": {"logprobs": True, "max_tokens": None},
    "/v1/completions": {"max_tokens": 50, "echo": True},
    "/v1/responses": {},
    "/v1/messages": {},
}


def bounds(schema: dict[str, Any]) -> dict[str, Any] | None:
    forms = schema.get("anyOf", [schema])
    return next((f for f in forms if f.get("type") in ("integer", "number")), None)


@pytest.mark.parametrize("path", BOUNDED)
def test_numbers_have_the_bounds_that_are_described(path: str) -> None:
    o = operation("POST", path)
    assert o.body is not None
    described = DOCUMENT["components"]["schemas"][names()[o.body]]["properties"]

    async def test(s: Served) -> None:
        tried = 0
        for name, schema in described.items():
            number = bounds(schema)
            if number is None or name == "max_tool_calls":  # which counts nothing
                continue
            step = 1 if number["type"] == "integer" else 1e-6
            inside = [number[b] for b in ("minimum", "maximum") if b in number]
            outside = [number[b] + d * step for b, d in (("minimum", -1), ("maximum", 1)) if b in number]
            if "exclusiveMinimum" in number:
                inside, outside = [*inside, number["exclusiveMinimum"] + 1e-3], [*outside, number["exclusiveMinimum"]]
            for value in (*inside, *outside):
                reply = await s.client.post(path, {**(o.example or {}), **BOUNDED[path], name: value})
                right = 200 if value in inside else 400
                assert reply.status == right, (name, value, reply.text[:300])
                tried += 1
            assert outside or name in ("max_thinking_tokens", "thinking_token_budget"), f"{name} has no bound"
        assert tried > 5

    info = dataclasses.replace(INFO, max_num_seqs=256)
    serve(test, answer="Hm</think>Hello", info=info)
