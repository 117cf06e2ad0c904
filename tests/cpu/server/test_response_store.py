"""Stored responses: chains of them, fetched, deleted, bounded."""

import json

import pytest

from perilune.core.errors import RequestError
from perilune.server.responses.store import ResponseStore, decoded, found
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


@served(answer="Hm</think>Wait" + CALL.format(0))
async def test_a_reference_stands_for_the_item_of_a_stored_response(s: Served) -> None:
    user = {"id": "msg_own", "role": "user", "content": "Weather?"}
    first = (await s.client.post(PATH, {"input": [user], "tools": [TOOL]})).json
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "rain"}
    references = [{"type": "item_reference", "id": item["id"]} for item in (user, *first["output"])]
    second = (await s.client.post(PATH, {"input": [*references, result], "tools": [TOOL]})).json
    by_reference = s.prompt()
    await s.client.post(PATH, {"input": [user, *first["output"], result], "tools": [TOOL], "store": False})
    assert s.prompt() == by_reference and "<think>Hm</think>Wait" in by_reference
    counted = await s.client.post(f"{PATH}/input_tokens", {"input": [*references, result], "tools": [TOOL]})
    assert counted.json["input_tokens"] == second["usage"]["input_tokens"]
    untyped = [{"id": references[0]["id"]}, *({**r, "type": None} for r in references[1:]), result]
    await s.client.post(PATH, {"input": untyped, "tools": [TOOL], "store": False})
    assert len(s.engine.seen) == 4 and s.prompt() == by_reference
    await s.client.request("DELETE", f"{PATH}/{first['id']}", [b""])
    # The second response has the items, too.
    assert (await s.client.post(PATH, {"input": [*references, result], "tools": [TOOL], "store": False})).status == 200
    await s.client.request("DELETE", f"{PATH}/{second['id']}", [b""])
    refused = await s.client.post(PATH, {"input": [user, references[1]], "tools": [TOOL]})
    assert refused.status == 404 and refused.error["param"] == "input[1].id"
    assert f"Item with id '{references[1]['id']}' not found" in refused.error["message"]
    twice = await s.client.post(PATH, {"input": [references[0], user, references[0]]})
    assert twice.status == 400 and twice.error["param"] == "input[2].id"


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
    store.put("other", "large", {}, [{"content": "x" * 2000}], None)
    filled(store, ("h1", None))
    store.get("other", "large")


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


def test_items_are_found_until_the_last_response_that_has_them_is_gone() -> None:
    store = ResponseStore(max_responses=3)
    for id, previous in (("a", None), ("b", "a"), ("c", None)):
        store.put("", id, {"output": [{"id": f"{id}1"}, {"id": f"{id}2"}]}, [], previous)
    places = {"b1": "input[0].id", "a2": "input[1].id"}
    assert found(store.holding("", places), places) == {"b1": {"id": "b1"}, "a2": {"id": "a2"}}
    with pytest.raises(RequestError, match="Item with id 'b1' not found"):
        store.holding("other", places)
    store.put("", "d", {}, [], None)
    store.put("", "e", {}, [], None)  # c was used least recently, then b: it goes before a, which it continues
    assert len(store.holding("", {"a1": ""})) == 1
    store.delete("", "a")
    for gone in ("a1", "b1", "c1"):
        with pytest.raises(RequestError, match=f"'{gone}' not found"):
            store.holding("", {gone: ""})
