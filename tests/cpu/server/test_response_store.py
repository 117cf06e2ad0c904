"""Stored responses: chains of them, fetched, deleted, bounded."""

import json

import pytest

from perilune.core.errors import RequestError
from perilune.server.responses.store import ResponseStore, decoded
from tests.cpu.server.test_responses import PATH, TOOL, told
from tests.serving import CALL, Served, served


@served(answer="Hm</think>Wait" + CALL.format(0))
async def test_a_chain_of_responses_is_the_conversation_sent_whole(s: Served) -> None:
    first = (await s.client.post(PATH, {"input": "Weather?", "tools": [TOOL], "instructions": "Brief"})).json
    (item,) = [i for i in first["output"] if i["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
    chained = {"input": [result], "tools": [TOOL], "previous_response_id": first["id"]}
    second = (await s.client.post(PATH, chained)).json
    assert second["previous_response_id"] == first["id"]
    by_chain = s.prompt()
    assert "Brief" not in by_chain, "instructions belong to one request"
    user = {"role": "user", "content": "Weather?"}
    await s.client.post(PATH, {"input": [user, *first["output"], result], "tools": [TOOL]})
    assert s.prompt() == by_chain and "<think>Hm</think>Wait" in by_chain
    third = told(
        await s.client.post(
            PATH, {"input": "And now?", "tools": [TOOL], "previous_response_id": second["id"], "stream": True}
        )
    )[-1]["response"]
    history = [user, *first["output"], result, *second["output"], {"role": "user", "content": "And now?"}]
    by_chain = s.prompt()
    await s.client.post(PATH, {"input": history, "tools": [TOOL]})
    assert s.prompt() == by_chain
    calls = [i["call_id"] for r in (first, second, third) for i in r["output"] if i["type"] == "function_call"]
    assert calls == [f"functions.get_weather:{i}" for i in range(3)]


@served(answer="</think>Hello")
async def test_stored_responses_can_be_fetched_and_deleted(s: Served) -> None:
    for stream in (False, True):
        reply = await s.client.post(PATH, {"input": "Hi", "stream": stream, "metadata": {"a": "b"}})
        response = told(reply)[-1]["response"] if stream else reply.json
        assert response["store"] is True and response["metadata"] == {"a": "b"}
        path = f"{PATH}/{response['id']}"
        assert (await s.client.get(path)).json == response
        gone = await s.client.request("DELETE", path, [b""])
        assert gone.json == {"id": response["id"], "object": "response", "deleted": True}
        for refused in (await s.client.get(path), await s.client.request("DELETE", path, [b""])):
            assert refused.status == 404 and refused.error["code"] == "response_not_found"
        refused = await s.client.post(PATH, {"input": "Hi", "previous_response_id": response["id"]})
        assert refused.status == 404 and refused.error["param"] == "previous_response_id"
    kept = (await s.client.post(PATH, {"input": "Hi", "store": False})).json
    assert kept["store"] is False and (await s.client.get(f"{PATH}/{kept['id']}")).status == 404
    for unknown in ("resp_no", ""):
        assert (await s.client.post(PATH, {"input": "Hi", "previous_response_id": unknown})).status == 404


def filled(store: ResponseStore, *entries: tuple[str, str | None]) -> None:
    for id, previous in entries:
        store.put("", id, {"id": id}, [{"role": "user", "content": id}], previous)


def test_the_store_is_bounded_by_count_and_keeps_conversations_in_use() -> None:
    store = ResponseStore(max_responses=4)
    filled(store, ("a1", None), ("b1", None), ("a2", "a1"), ("c1", None))
    turns = store.conversation("", "a2")
    messages, size = decoded(turns), sum(map(len, turns))
    assert [m["content"] for m in messages] == ["a1", "a2"] and size > 0
    filled(store, ("d1", None))  # b1 was used least recently
    assert len(store) == 4
    with pytest.raises(RequestError, match="'b1' is not stored"):
        store.get("", "b1")
    assert json.loads(store.get("", "a1")) == {"id": "a1"}
    filled(store, ("e1", None), ("f1", None), ("g1", None))
    assert len(store) == 4
    with pytest.raises(RequestError, match="'a2'"):  # the end of a conversation goes before its beginning
        store.conversation("", "a2")
    store.conversation("", "a1")


def test_the_store_is_bounded_by_bytes() -> None:
    store = ResponseStore(max_bytes=1000)
    for i in range(20):
        store.put("", f"r{i}", {"id": i}, [{"content": "x" * 200}], None)
        assert store.size_bytes <= 1000
    assert 3 <= len(store) <= 4
    for i in range(20 - len(store), 20):
        store.delete("", f"r{i}")
    assert store.size_bytes == 0 == len(store)
    store.put("", "big", {}, [{"content": "x" * 2000}], None)
    assert store.size_bytes == 0 == len(store)


def test_a_deleted_link_breaks_the_chain_with_a_clear_error() -> None:
    store = ResponseStore()
    filled(store, ("a", None), ("b", "a"), ("c", "b"))
    store.delete("", "b")
    with pytest.raises(RequestError, match="'b' is not stored") as refused:
        store.conversation("", "c")
    assert refused.value.status == 404 and refused.value.param == "previous_response_id"
