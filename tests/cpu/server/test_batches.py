"""Files and batches: driven by the official SDK, over restarts, kept apart by key, bounded, behind other requests."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from perilune.core.errors import EngineUnavailable
from perilune.server import keys as key_module
from perilune.server.batches import batch as batch_module
from perilune.server.batches import files
from perilune.server.batches.batch import Batch, Batches
from perilune.server.batches.files import FileStore
from perilune.server.batches.protocol import read_line
from perilune.server.keys import Account
from tests.cpu.server.test_background import sdk
from tests.cpu.server.test_description import check, operation
from tests.serving import INFO, FakeEngine, Served, serve, served

CHAT = "/v1/chat/completions"
Test = Callable[[Served], Coroutine[Any, Any, None]]


def line(id: str, text: str = "Hi", url: str = CHAT, **body: Any) -> str:
    asked = {"prompt": text} if url == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    asked = {"input": text} if url == "/v1/responses" else asked
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": {**asked, **body}})


def run(test: Test, where: Path, keys: Mapping[str, str] | None = None, **setup: Any) -> None:
    """A test against a server with a directory for files. Batches that an earlier one left go on. `keys`: name and
    limits of each API key, which reads as its name."""
    if keys:
        (where / "keys").write_text(
            "".join(
                f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{limits}\n'
                for name, limits in keys.items()
            )
        )
        setup["api_key_file"] = str(where / "keys")

    async def within(s: Served) -> None:
        batches: Batches = s.client.app.state.batches
        batches.resume()
        try:
            await test(s)
        finally:
            await batches.close()

    serve(within, **{"files_dir": str(where / "files"), "answer": "</think>Hello", **setup})


batched = functools.partial(served, by=run, takes=["tmp_path"])


async def begun(client: openai.AsyncOpenAI, lines: list[str], endpoint: Any = CHAT, **more: Any) -> Any:
    file = await client.files.create(file=("asked.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert (file.filename, file.purpose, file.status) == ("asked.jsonl", "batch", "processed")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    while (batch := await client.batches.retrieve(id)).status not in batch_module.ENDED:
        await asyncio.sleep(0.002)
    return batch


async def answers(client: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    text = (await client.files.content(file)).text
    found = [json.loads(one) for one in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/completions", "/v1/responses"])
@batched()
async def test_the_official_sdk_carries_out_a_batch(s: Served, endpoint: Any) -> None:
    client, seen = sdk(s), list[Any]()
    s.service.observers.append(seen.append)
    lines = [line(f"q{i}", f"Number {i}", endpoint) for i in range(9)] + [line("bad", endpoint, endpoint, top_p=7)]
    made = await begun(client, lines, endpoint, metadata={"night": "1"})
    assert made.status == "validating" and made.metadata == {"night": "1"}
    check((await s.client.get(f"/v1/batches/{made.id}")).json, operation("GET", "/v1/batches/{id}"))
    done = await ended(client, made.id)
    assert done.status == "completed" and done.completed_at and done.errors is None
    assert done.request_counts.model_dump() == {"total": 10, "completed": 9, "failed": 1}
    found = await answers(client, done.output_file_id)
    assert set(found) == {f"q{i}" for i in range(9)}
    assert all(f["response"]["status_code"] == 200 and f["error"] is None for f in found.values())
    assert "Hello" in json.dumps(found["q3"]["response"]["body"])
    (wrong,) = (await answers(client, done.error_file_id)).values()
    assert wrong["response"]["status_code"] == 400 and "top_p" in wrong["response"]["body"]["error"]["message"]
    assert {order.priority for order in s.engine.orders} == {100}
    calls = [call for call in seen if call.route == endpoint]
    assert len(calls) == 10 and sum(call.total("output_tokens") > 0 for call in calls) == 9
    assert sorted(call.status for call in calls) == [200] * 9 + [400]
    assert {f["response"]["request_id"] for f in found.values()} < {call.id for call in calls}
    prompts = [bytes(t for t in ids if t < 256).decode() for ids, _ in s.engine.seen]
    assert sorted(f"Number {i}" in p for p in prompts for i in range(9)).count(True) == 9
    listed = [b.id async for b in client.batches.list(limit=1)]
    assert listed == [made.id]
    kinds = {f.id: f.purpose async for f in client.files.list()}
    assert kinds[done.output_file_id] == "batch_output" and len(kinds) == 3
    check((await s.client.get("/v1/files")).json, operation("GET", "/v1/files"))
    check((await s.client.get("/v1/batches")).json, operation("GET", "/v1/batches"))
    assert (await client.files.delete(done.output_file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(done.output_file_id)


def test_a_batch_goes_on_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server ends in the middle, with half a line written; the second answers what is left, once."""
    ids: dict[str, str] = {}

    async def first(s: Served) -> None:
        client = sdk(s)
        made = await begun(client, [line(f"q{i}", f"Number {i}") for i in range(40)])
        ids["batch"] = made.id
        while (await client.batches.retrieve(made.id)).request_counts.completed < 2:
            await asyncio.sleep(0.002)
        s.service.stop()

    class Held(FakeEngine):
        """Answers four requests and no further one."""

        async def generate(self, prompt: Any, *more: Any) -> Any:
            self.hold = 0 if len(self.seen) >= 4 else None
            async with contextlib.aclosing(super().generate(prompt, *more)) as deltas:
                async for delta in deltas:
                    yield delta

    run(first, tmp_path, engine=Held, info=_small(2))
    (output,) = (tmp_path / "files").glob("key-/*.output")
    before = output.read_bytes().count(b"\n")
    assert 2 <= before <= 4
    with open(output, "ab") as file:
        file.write(b'{"id": "half')

    async def second(s: Served) -> None:
        client = sdk(s)
        done = await ended(client, ids["batch"])
        assert done.status == "completed" and done.request_counts.completed == 40
        found = await answers(client, done.output_file_id)
        assert set(found) == {f"q{i}" for i in range(40)} and len(s.engine.seen) == 40 - before

    turn = list[bytes]()  # lines read in this turn of the loop

    def read(raw: bytes, endpoint: str) -> Any:
        turn.append(bytes(read_line(raw, endpoint).body["messages"]))  # not decoded
        asyncio.get_running_loop().call_soon(turn.clear)
        assert len(turn) == 1
        return read_line(raw, endpoint)

    monkeypatch.setattr(batch_module, "read_line", read)
    run(second, tmp_path)

    async def third(s: Served) -> None:
        assert (await sdk(s).batches.retrieve(ids["batch"])).status == "completed" and s.engine.seen == []

    run(third, tmp_path)


def _small(seqs: int) -> Any:
    return dataclasses.replace(INFO, max_num_seqs=seqs)


@pytest.mark.parametrize("moment", ["planned", "moved", "kept"])
def test_the_end_of_a_batch_survives_the_servers(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends between any two steps of making the answers a file."""
    ids: dict[str, str] = {}

    class Killed(BaseException):
        pass

    def killed(*given: Any) -> Any:
        raise Killed

    async def first(s: Served) -> None:
        client = sdk(s)
        made = await begun(client, [line("a"), line("b")])
        ids["batch"] = made.id
        store, move = s.client.app.state.batches.store, Batch.move
        if moment == "planned":
            monkeypatch.setattr(FileStore, "keep", killed)
        elif moment == "moved":
            rename = os.rename
            monkeypatch.setattr(
                files.os, "rename", lambda a, b: killed() if str(a).endswith(".output") else rename(a, b)
            )
        else:
            monkeypatch.setattr(Batch, "move", lambda b, status: killed() if status == "completed" else move(b, status))
        task = s.client.app.state.batches.get("", made.id).task
        try:
            await task
        except BaseException as e:
            assert isinstance(e, Killed), e
        assert store.directory.is_dir()
        monkeypatch.undo()

    try:
        run(first, tmp_path)
    except BaseException as e:
        assert type(e).__name__ == "Killed", e
    monkeypatch.undo()

    async def second(s: Served) -> None:
        client = sdk(s)
        done = await ended(client, ids["batch"])
        assert done.status == "completed" and set(await answers(client, done.output_file_id)) == {"a", "b"}
        assert s.engine.seen == [] and done.request_counts.completed == 2
        kept = [f async for f in client.files.list()]
        assert len(kept) == 2 and s.client.app.state.batches.store.size_bytes == sum(f.bytes for f in kept)

    run(second, tmp_path)


@batched(hold=0)
async def test_a_batch_can_be_cancelled(s: Served) -> None:
    client = sdk(s)
    made = await begun(client, [line(f"q{i}") for i in range(6)])
    await s.hangs(2)
    with pytest.raises(openai.BadRequestError) as used:
        await client.files.delete(made.input_file_id)
    assert used.value.code == "file_in_use"
    store = s.client.app.state.batches.store
    store.get("", made.input_file_id)["expires_at"] = 0
    assert store.list(""), "a file that is read does not expire"
    done = await client.batches.cancel(made.id)
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at and s.engine.live == 0
    assert store.list("") == []
    assert (await client.batches.cancel(made.id)).status == "cancelled"
    again = await begun(client, [line("a")])
    s.engine.release.set()
    assert (await ended(client, again.id)).status == "completed", "the seats of the first are free"


@batched()
async def test_one_can_be_cancelled_when_it_begins(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = asyncio.Event()

    async def work(_: Batches, batch: Batch) -> None:
        await checked.wait()
        batch.move("in_progress")
        await asyncio.Event().wait()

    monkeypatch.setattr(Batches, "_work", work)
    made, batches = await begun(sdk(s), [line("a")]), s.client.app.state.batches
    checked.set()
    await batches.cancel(batches.get("", made.id))
    assert batches.get("", made.id).record["status"] == "cancelled"


@batched(hold=0, info=_small(4))
async def test_other_requests_come_first(s: Served) -> None:
    """At most half of the engine's requests are batches', and none begins while the engine is full."""
    client = sdk(s)
    made = await begun(client, [line(f"q{i}") for i in range(20)])
    await s.hangs(2)
    await asyncio.sleep(0.12)
    assert s.engine.live == 2
    asked = [asyncio.create_task(s.client.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]})) for _ in "abc"]
    await s.hangs(5)
    s.engine.release.set()
    for one in asked:
        assert (await one).status == 200
    assert (await ended(client, made.id)).request_counts.completed == 20
    assert s.engine.orders[2].priority == 0


@batched(hold=0, info=_small(2))
async def test_a_full_engine_makes_a_batch_wait(s: Served) -> None:
    asked = [asyncio.create_task(s.client.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]})) for _ in "ab"]
    await s.hangs(2)
    made = await begun(sdk(s), [line("a")])
    await asyncio.sleep(0.15)
    assert s.engine.live == 2
    s.engine.release.set()
    assert (await ended(sdk(s), made.id)).request_counts.completed == 1
    await asyncio.gather(*asked)


@batched(hold=1)
async def test_an_engine_that_is_down_is_waited_for(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "RETRY_SECONDS", 0.01)
    made = await begun(sdk(s), [line("a")])
    await s.hangs()
    s.engine.alive = False
    s.engine.release.set()
    await asyncio.sleep(0.1)
    assert (await sdk(s).batches.retrieve(made.id)).status == "in_progress"
    s.engine.alive = True
    assert (await ended(sdk(s), made.id)).request_counts.completed == 1


@batched(hold=1)
async def test_a_batch_ends_when_a_full_disk_has_room_again(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "RETRY_SECONDS", 0.01)
    made, tries = await begun(sdk(s), [line("a")]), list[int]()
    await s.hangs()

    def fails(handle: int) -> None:
        tries.append(handle)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        s.engine.release.set()
        while len(tries) < 2:
            await asyncio.sleep(0.002)
        assert (await sdk(s).batches.retrieve(made.id)).status == "in_progress"
    done = await ended(sdk(s), made.id)
    assert (done.status, done.errors, [*await answers(sdk(s), done.output_file_id)]) == ("completed", None, ["a"])


def test_what_never_passes_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "RETRY_SECONDS", 0.01)

    class Crashing(FakeEngine):
        async def generate(self, prompt: Any, params: Any, *more: Any) -> Any:
            self.seen.append((list(prompt), params))
            raise EngineUnavailable("the engine process ended unexpectedly")
            yield

    async def crashes(s: Served) -> None:
        done = await ended(sdk(s), (await begun(sdk(s), [line("a")])).id)
        (lost,) = (await answers(sdk(s), done.error_file_id)).values()
        assert lost["response"]["status_code"] == 503 and len(s.engine.seen) == batch_module.MAX_LOST_RUNS

    run(crashes, tmp_path / "1", engine=Crashing)

    async def too_many(s: Served) -> None:
        done = await ended(sdk(s, "ann"), (await begun(sdk(s, "ann"), [line("a", n=3), line("b", n=2)])).id)
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        (refused,) = (await answers(sdk(s, "ann"), done.error_file_id)).values()
        assert refused["response"]["body"]["error"]["message"].endswith("asks for 3: split it")

    run(too_many, tmp_path, {"ann": "concurrent = 2"})


@batched(hold=1)
async def test_what_is_late_ends_with_the_batch(s: Served) -> None:
    client = sdk(s)
    made = await begun(client, [line("a"), line("b")])
    await s.hangs(2)
    s.client.app.state.batches.get("", made.id).record["expires_at"] = time.time()
    s.engine.alive = False
    s.engine.release.set()
    done = await ended(client, made.id)
    assert done.status == "expired" and done.request_counts.failed == 2
    found = await answers(client, done.error_file_id)
    assert {f["error"]["code"] for f in found.values()} == {"batch_expired"}
    s.engine.alive = True


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["{"], "invalid_json_line", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a"), line("b", url="/v1/completions")], "mismatched_endpoint", 2),
        ([line("a", stream=True)], "invalid_value", 1),
        ([line("")], "invalid_value", 1),
        (['{"custom_id": "a", "method": "GET", "url": "/v1/chat/completions", "body": {}}'], "invalid_json_line", 1),
        (['{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": []}'], "invalid_json_line", 1),
        (["", "  "], "empty_file", None),
        (["\udcff".encode("utf-8", "surrogateescape").decode("latin-1")], "invalid_json_line", 1),
    ],
)  # fmt: skip
@batched()
async def test_a_file_that_is_no_batch_fails_whole(s: Served, lines: list[str], code: str, number: int | None) -> None:
    done = await ended(sdk(s), (await begun(sdk(s), lines)).id)
    assert done.status == "failed" and done.output_file_id is None and s.engine.seen == []
    (error,) = done.errors.data
    assert (error.code, error.line) == (code, number) and "\n" not in error.message


@batched()
async def test_errors_of_a_file_are_bounded(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    done = await ended(sdk(s), (await begun(sdk(s), ["x"] * 1000)).id)
    assert len(done.errors.data) == batch_module.MAX_ERRORS
    monkeypatch.setattr(batch_module, "MAX_LINES", 3)
    done = await ended(sdk(s), (await begun(sdk(s), [line(str(i)) for i in range(9)])).id)
    assert [e.code for e in done.errors.data] == ["too_many_lines"]


@batched(keys={"ann": "tokens_per_minute = 100000", "bob": ""})
async def test_keys_do_not_see_each_others(s: Served) -> None:
    ann, bob = sdk(s, "ann"), sdk(s, "bob")
    made = await begun(ann, [line("a")])
    done = await ended(ann, made.id)
    for call in (
        bob.batches.retrieve(made.id),
        bob.batches.cancel(made.id),
        bob.files.retrieve(made.input_file_id),
        bob.files.content(done.output_file_id),
        bob.files.delete(made.input_file_id),
        bob.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert [b async for b in bob.batches.list()] == [] == [f async for f in bob.files.list()]
    usage = {a.name: a.usage for a in s.service.keys.accounts}
    assert usage["ann"].output_tokens > 0 and usage["bob"].output_tokens == 0
    assert s.engine.cache_keys == [("key:ann",)]
    made = await begun(ann, [line("a")])
    s.service.keys._accounts.pop("ann")
    batch = s.client.app.state.batches.get("ann", made.id)
    await batch.task
    assert batch.record["status"] == "failed" and "API key" in batch.record["errors"]["data"][0]["message"]


def test_a_keys_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "Account", functools.partial(Account, clock=lambda: 1000.0))  # no time passes

    async def test(s: Served) -> None:
        made = await begun(sdk(s, "ann"), [line(f"q{i}") for i in range(9)])  # 2 of the 5 are these requests
        while len(s.engine.seen) < 3:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.2)
        assert len(s.engine.seen) == 3
        batch = s.client.app.state.batches.get("ann", made.id)
        assert batch.record["request_counts"]["completed"] == 3 and not batch.ended
        assert (await sdk(s, "ann").batches.cancel(made.id)).cancelling_at

    run(test, tmp_path, {"ann": "requests_per_minute = 5"})


def test_a_key_at_its_limits_does_not_hold_up_batches_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_module, "Account", functools.partial(Account, clock=lambda: 1000.0))  # no time passes
    monkeypatch.setattr(batch_module, "RETRY_SECONDS", 0.01)
    limits = {"ann": "requests_per_minute = 3", "bob": "", "eve": "concurrent = 1"}

    async def test(s: Served) -> None:
        s.client.headers = {"authorization": "Bearer eve"}
        asked = asyncio.create_task(s.client.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}))
        await s.hangs()
        waiting = [await begun(sdk(s, name), [line(f"q{i}") for i in range(9)]) for name in ("ann", "eve")]
        while len(s.engine.seen) < 2:  # eve's request, and ann's last one of this minute
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.1)
        s.engine.hold = None
        assert (await ended(sdk(s, "bob"), (await begun(sdk(s, "bob"), [line("b")])).id)).status == "completed"
        assert len(s.engine.seen) == 3
        counts = {a.name: a.usage.requests for a in s.service.keys.accounts}
        assert counts["ann"] == 3 and counts["eve"] == 3, "what waits is not counted"
        s.engine.release.set()
        assert (await asked).status == 200
        assert (await ended(sdk(s, "eve"), waiting[1].id)).request_counts.completed == 9

    run(test, tmp_path, limits, info=_small(4), hold=0)


@served()
async def test_without_a_directory_there_are_none(s: Served) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/batch_1")):
        reply = await s.client.request(method, path, [b"{}"])
        assert reply.status == 404 and "--files-dir" in reply.error["message"]


@pytest.mark.parametrize(("query", "param"), [("?limit=0", "limit"), ("?after=x", "after"), ("?order=up", "order")])
@batched()
async def test_a_page_that_cannot_be_is_refused(s: Served, query: str, param: str) -> None:
    for path in ("/v1/files", "/v1/batches") if param != "order" else ("/v1/files",):
        reply = await s.client.get(path + query)
        assert reply.status == 400 and reply.error["param"] == param


@batched(hold=0)
async def test_too_many_batches_are_refused(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_BATCHES", 2)
    monkeypatch.setattr(batch_module, "MAX_RECORDS", 2)
    client = sdk(s)
    made = [await begun(client, [line("a")]) for _ in "ab"]
    with pytest.raises(openai.RateLimitError) as full:
        await begun(client, [line("a")])
    assert full.value.code == "too_many_batches"
    s.engine.release.set()
    for one in made:
        await ended(client, one.id)
    third = await begun(client, [line("a")])
    await ended(client, third.id)
    assert [b.id async for b in client.batches.list()] == [third.id, made[1].id], "the oldest was deleted"
