"""Responses in the background, and the items of a request: polled, followed, cancelled, kept apart by key, bounded."""

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from perilune.server.responses import background
from perilune.server.responses.background import Jobs
from perilune.server.responses.items import as_items
from tests.cpu.server.test_description import check, operation
from tests.serving import Reply, Served, serve, served

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def sdk(s: Served, key: str = "none") -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(s.client.app)
    http = httpx.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, http_client=http)


async def ended(s: Served, id: str) -> dict[str, Any]:
    while (response := (await s.client.get(f"{PATH}/{id}")).json)["status"] in ("queued", "in_progress"):
        Response.model_validate(response)
        await asyncio.sleep(0.001)
    return dict(response)


async def begun(s: Served, **more: Any) -> dict[str, Any]:
    reply = await s.client.post(PATH, {"input": "Hi", "background": True, **more})
    assert reply.status == 200, reply.text
    check(reply.json, operation("POST", PATH))
    return dict(reply.json)


@served(answer="Hm</think>Hello", hold=5)
async def test_a_response_is_polled_until_it_is_complete(s: Served) -> None:
    client = sdk(s)
    made = await client.responses.create(model="m", input="Hi", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    await s.hangs()
    polled = await client.responses.retrieve(made.id)
    assert polled.status == "in_progress" and [i.type for i in polled.output] == ["reasoning"]
    check(polled.model_dump(exclude_unset=True), operation("GET", PATH + "/{id}"))
    s.engine.release.set()
    while (polled := await client.responses.retrieve(made.id)).status == "in_progress":
        await asyncio.sleep(0.001)
    assert polled.status == "completed" and polled.output_text == "Hello" and polled.usage is not None
    assert (await s.client.post(PATH, {"input": "More", "previous_response_id": made.id})).status == 200
    assert "Hello<|im_end|>" in s.prompt()


@served(answer="</think>Hello", hold=4)
async def test_the_request_that_began_it_may_be_closed(s: Served) -> None:
    leave = asyncio.Event()
    body = [json.dumps({"input": "Hi", "background": True, "stream": True}).encode()]
    got = lambda piece: leave.set() if b"output_text.delta" in piece else None  # noqa: E731
    reply = await s.client.request("POST", PATH, body, leave=leave, got=got)
    events = reply.events
    id = events[0]["response"]["id"]
    s.engine.release.set()
    assert (await ended(s, id))["output"][-1]["content"][0]["text"] == "Hello" and s.engine.cancelled == []
    rest = (await s.client.get(f"{PATH}/{id}?stream=true&starting_after={len(events) - 1}")).events
    assert [e["sequence_number"] for e in events + rest] == list(range(len(events) + len(rest)))
    assert rest[-1]["type"] == "response.completed" and len(events) > 4
    for event in events + rest:
        EVENT.validate_python(event)
    assert (await s.client.get(f"{PATH}/{id}?stream=true")).events == events + rest
    assert (await s.client.get(f"{PATH}/{id}?stream=true&starting_after={rest[-2]['sequence_number']}")).events == [
        rest[-1]
    ]
    stream = await sdk(s).responses.retrieve(id, stream=True, starting_after=rest[0]["sequence_number"])
    assert [e.sequence_number async for e in stream] == [e["sequence_number"] for e in rest[1:]]
    for wrong in ("starting_after=99", "starting_after=x", "starting_after=-2", "stream=yes"):
        refused = await s.client.get(f"{PATH}/{id}?stream=true&{wrong}".replace("stream=true&stream", "stream"))
        assert refused.status == 400 and refused.error["param"] == wrong.partition("=")[0]


@served(answer="</think>Hello", hold=2)
async def test_a_follower_gets_what_comes_later(s: Served) -> None:
    made = await begun(s, stream=False)
    refused = await s.client.get(f"{PATH}/{made['id']}?stream=true")
    assert refused.error["code"] == "events_gone", "only a request that streams has its events kept"
    reply = asyncio.create_task(s.client.post(PATH, {"input": "Hi", "background": True, "stream": True}))
    await s.hangs(2)
    jobs: Jobs = s.client.app.state.jobs
    (id,) = [id for (_, id), job in jobs._jobs.items() if job.keeps_events]
    followers = [asyncio.create_task(s.client.get(f"{PATH}/{id}?stream=true")) for _ in range(2)]
    await asyncio.sleep(0.01)
    s.engine.release.set()
    first, *others = [(await r).events for r in (reply, *followers)]
    assert all(other == first for other in others) and first[-1]["type"] == "response.completed"
    await ended(s, made["id"])


@pytest.mark.parametrize("stream", [False, True])
@served(answer="</think>Hello", hold=4)
async def test_it_can_be_cancelled(s: Served, stream: bool) -> None:
    client = sdk(s)
    reply = asyncio.create_task(s.client.post(PATH, {"input": "Hi", "background": True, "stream": stream}))
    await s.hangs()
    (id,) = [id for _, id in s.client.app.state.jobs._jobs]
    cancelled = await client.responses.cancel(id)
    assert cancelled.status == "cancelled" and cancelled.output_text == "Hel"
    assert s.engine.live == 0 and len(s.engine.cancelled) == 1 and s.service.admission.in_flight == 0
    assert (await client.responses.cancel(id)).status == "cancelled"
    assert (await ended(s, id))["status"] == "cancelled"
    if stream:
        assert (await reply).events[-1]["type"] == "response.cancelled"
    refused = await s.client.post(PATH, {"input": "Hi", "previous_response_id": id})
    assert refused.error["code"] == "response_not_complete"
    await reply


@served()
async def test_one_that_has_not_begun_can_be_cancelled(s: Served) -> None:
    made = await begun(s)
    assert (await s.client.request("POST", f"{PATH}/{made['id']}/cancel", [b""])).json["status"] == "cancelled"
    assert s.service.admission.in_flight == 0


@served()
async def test_one_that_is_complete_is_not_cancelled(s: Served) -> None:
    id = (await begun(s))["id"]
    while not len(s.client.app.state.responses):
        await asyncio.sleep(0)
    late = await s.client.request("POST", f"{PATH}/{id}/cancel", [b""])
    assert late.json["status"] == "completed"


@served()
async def test_only_background_responses_can_be_cancelled(s: Served) -> None:
    made = (await s.client.post(PATH, {"input": "Hi"})).json
    refused = await s.client.request("POST", f"{PATH}/{made['id']}/cancel", [b""])
    assert (refused.status, refused.error["code"]) == (400, "not_in_background")
    assert (await s.client.request("POST", f"{PATH}/resp_0/cancel", [b""])).status == 404
    kept = await s.client.post(PATH, {"input": "Hi", "background": True, "store": False})
    assert (kept.status, kept.error["param"]) == (400, "store")
    running = await begun(s)
    unfinished = await s.client.post(PATH, {"input": "Hi", "previous_response_id": running["id"]})
    assert unfinished.status == 400 and "still being made" in unfinished.error["message"]
    await ended(s, running["id"])


@served(hold=0)
async def test_deleting_one_that_runs_cancels_it(s: Served) -> None:
    made = await begun(s)
    await s.hangs()
    assert (await s.client.request("DELETE", f"{PATH}/{made['id']}", [b""])).json["deleted"] is True
    assert s.engine.live == 0 and (await s.client.get(f"{PATH}/{made['id']}")).status == 404


@served(answer="</think>Hello", fail_at=2)
async def test_what_fails_says_so(s: Served) -> None:
    made = await begun(s, stream=False)
    failed = await ended(s, made["id"])
    assert failed["status"] == "failed" and failed["error"]["message"] == "the generation failed: logits are not finite"
    Response.model_validate(failed)


@served(hold=0)
async def test_a_server_that_stops_ends_it(s: Served) -> None:
    made = await begun(s)
    await s.hangs()
    s.service.stop()
    assert (await ended(s, made["id"]))["error"]["message"] == "the server is shutting down"


@served(hold=0, max_waiting=1)
async def test_they_count_among_the_requests_in_flight(s: Served) -> None:
    made = [await begun(s) for _ in range(s.service.admission.limit)]
    full = await s.client.post(PATH, {"input": "Hi", "background": True})
    assert full.status == 429 and full.headers["retry-after"]
    s.engine.release.set()
    for one in made:
        await ended(s, one["id"])


def test_they_are_reported_when_they_end(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    async def test(s: Served) -> None:
        s.service.observers.append(seen.append)
        made = await begun(s)
        assert len(seen) == 1 and seen[0].runs == []
        s.engine.release.set()
        await ended(s, made["id"])
        (job,) = [call for call in seen if call.runs]
        assert (job.route, job.id, job.status) == (PATH, seen[0].id, 200) and job.total("output_tokens") == 6

    caplog.set_level(logging.ERROR)
    serve(test, hold=0)
    assert not caplog.records


KEYS = '[[key]]\nname = "{0}"\nsha256 = "{1}"\n'


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text("".join(KEYS.format(n, hashlib.sha256(n.encode()).hexdigest()) for n in ("ann", "bob")))
    return str(file)


def test_other_keys_see_nothing_of_it(key_file: str) -> None:
    async def test(s: Served) -> None:
        s.client.headers["authorization"] = "Bearer ann"
        made = await begun(s)
        path = f"{PATH}/{made['id']}"
        s.client.headers["authorization"] = "Bearer bob"
        for method, at in (("GET", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel"), ("DELETE", path)):
            assert (await s.client.request(method, at, [b""])).status == 404
        assert (await s.client.get(f"{path}?stream=true")).status == 404
        s.client.headers["authorization"] = "Bearer ann"
        s.engine.release.set()
        assert (await ended(s, made["id"]))["status"] == "completed"

    serve(test, hold=0, api_key_file=key_file)


@pytest.mark.parametrize("bound", ["jobs", "bytes"])
def test_a_key_keeps_its_share_of_events(bound: str, key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(s: Served) -> None:
        jobs: Jobs = s.client.app.state.jobs
        made = []
        for name in ("ann", *6 * ["bob"]):
            s.client.headers["authorization"] = f"Bearer {name}"
            reply = await s.client.post(PATH, {"input": "Hi", "background": True, "stream": True})
            made.append((name, reply.events[0]["response"]["id"]))
            if bound == "bytes" and name == "ann":
                jobs.event_bytes = 3 * jobs._jobs[made[0]].bytes
        assert jobs._jobs[made[0]].first == 0
        if bound == "jobs":
            assert list(jobs._jobs) == [made[0], *made[-3:]]

    if bound == "jobs":
        monkeypatch.setattr(background, "MAX_ENDED_JOBS", 4)
    serve(test, answer="</think>Hello", api_key_file=key_file)


@served(answer="</think>Hello")
async def test_the_events_of_all_are_bounded(s: Served) -> None:
    jobs: Jobs = s.client.app.state.jobs
    jobs.event_bytes = 8000
    made = [(await s.client.post(PATH, {"input": "Hi", "background": True, "stream": True})).events for _ in "abc"]
    assert jobs._bytes <= 8000 and jobs._bytes == sum(j.bytes for j in jobs._jobs.values())
    id = made[0][0]["response"]["id"]
    gone = await s.client.get(f"{PATH}/{id}?stream=true")
    assert gone.error["code"] == "events_gone" and "get the response whole" in gone.error["message"]
    assert (await s.client.get(f"{PATH}/{id}")).json["status"] == "completed"


# ---- the items of a request


async def listed(s: Served, id: str, query: str = "") -> Reply:
    return await s.client.get(f"{PATH}/{id}/input_items{query}")


@served()
async def test_items_come_in_pages(s: Served) -> None:
    given = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i}"} for i in range(25)]
    made = (await s.client.post(PATH, {"input": given})).json
    page = (await listed(s, made["id"])).json
    check(page, operation("GET", PATH + "/{id}/input_items"))
    assert [i["content"][0]["text"] for i in page["data"]] == [str(i) for i in range(24, 4, -1)] and page["has_more"]
    rest = (await listed(s, made["id"], f"?after={page['last_id']}")).json
    assert [i["content"][0]["text"] for i in rest["data"]] == ["4", "3", "2", "1", "0"] and not rest["has_more"]
    async with sdk(s) as client:
        found = [i async for i in client.responses.input_items.list(made["id"], order="asc", limit=7)]
    assert [i.content[0].text for i in found] == [str(i) for i in range(25)]
    assert len({i.id for i in found}) == 25 and found[1].content[0].type == "output_text"
    empty = (await listed(s, made["id"], f"?order=asc&after={found[-1].id}")).json
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "param"),
    [("?limit=0", "limit"), ("?limit=101", "limit"), ("?limit=x", "limit"), ("?order=up", "order"),
     ("?after=y", "after"), ("?limit=", "limit"), ("?limit=٣", "limit"), ("?limit=" + "9" * 5000, "limit")],
)  # fmt: skip
@served()
async def test_a_page_that_cannot_be_is_refused(s: Served, query: str, param: str) -> None:
    made = (await s.client.post(PATH, {"input": "Hi"})).json
    refused = await listed(s, made["id"], query)
    assert refused.status == 400 and refused.error["param"] == param and len(refused.error["message"]) < 200
    assert (await listed(s, "resp_0")).status == 404


def test_items_are_kept_as_they_were_sent() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_own"}
    output = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    first, second, third = (json.loads(bytes(i)) for i in as_items([call, output, {"role": "user", "content": "a"}]))
    assert first == call and {**second, "id": 0} == {**output, "id": 0} and second["id"].startswith("fco_")
    assert third["content"] == [{"type": "input_text", "text": "a"}] and third["status"] == "completed"
    (text,) = (json.loads(bytes(i)) for i in as_items("Hi"))
    assert text["role"] == "user" and text["content"][0]["text"] == "Hi"


@served(hold=0)
async def test_items_of_a_running_response(s: Served) -> None:
    made = await begun(s)
    assert (await listed(s, made["id"])).json["data"][0]["content"][0]["text"] == "Hi"
    s.engine.release.set()
    await ended(s, made["id"])
