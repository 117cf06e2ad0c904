"""Large bodies: refused by what they must hold before they cost memory, and counted against one budget."""

import asyncio
import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from perilune.core.config import ServerConfig
from perilune.core.errors import ConfigError, RequestError
from perilune.core.messages import Order
from perilune.server import body as bodies
from perilune.server.body import Context, parse
from perilune.server.limits import SMALL_BYTES, BodyBudget, BodyShare
from perilune.server.openai.protocol import ChatBody, CompletionBody
from perilune.server.service import Service
from tests.serving import BYTES, CHAT, HELLO, TEXT, Served, serve, served

CONTEXT = Context(tokens=4096, token_bytes=32)
MB = 1 << 20


def chat(content: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


HUGE = {
    "one text": (ChatBody, chat("long " * 4_000_000), "context_length_exceeded"),
    "parts": (ChatBody, chat([{"type": "text", "text": "long " * 4_000_000}]), "context_length_exceeded"),
    "escapes": (ChatBody, chat("é" * 3_500_000), "context_length_exceeded"),
    "many messages": (
        ChatBody,
        b'{"messages":[' + b'{"role":"user","content":"a"},' * 600_000 + b"{}]}",
        "too_many_values",
    ),
    "empty objects": (ChatBody, b'{"messages":[' + b"{}," * 6_000_000 + b"{}]}", "too_many_values"),
    "lists": (ChatBody, b'{"metadata":' + b"[" + b"[]," * 6_000_000 + b"[]]}", "too_many_values"),
    "token ids": (CompletionBody, b'{"prompt":[' + b"1," * 10_000_000 + b"1]}", "too_many_values"),
    "a prompt": (CompletionBody, b'{"prompt":"' + b"a" * 20_000_000 + b'"}', "context_length_exceeded"),
    "an open string": (ChatBody, b'{"a":[' + b"{}," * 600_000 + b'"' + b'\\"' * 6_000_000, "too_many_values"),
}


@pytest.mark.parametrize(("kind", "raw", "code"), HUGE.values(), ids=HUGE)
def test_what_cannot_be_a_request_is_refused_before_it_is_decoded(
    kind: Any, raw: bytes, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded")

    for owner, name in ((kind, "model_validate_json"), (bodies, "_decoded"), (bodies, "from_json")):
        monkeypatch.setattr(owner, name, decode)
    with pytest.raises(RequestError) as refused:
        parse(kind, raw, context=CONTEXT)
    assert refused.value.code == code and refused.value.status == 400


def test_counting_values_takes_no_longer_for_escapes_in_an_open_string() -> None:
    """A search for strings that began again inside of one took quadratic time: days for 12 MB."""
    raw = b'{"messages":"' + b'\\",' * 1_500_000 + b"\\"
    begun = time.thread_time()
    with pytest.raises(RequestError) as refused:
        parse(ChatBody, raw, context=CONTEXT)
    assert refused.value.code == "invalid_json" and time.thread_time() - begun < 10


def test_values_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of any size find the same number, wherever they cut strings and escapes."""
    texts = ["", "a, [b] {c}", '"', "\\", '\\"', ',"', "\\\\,", "\\\\\\[", "\n,"]
    raw = json.dumps({"messages": [{text: [text, 1, {text: text}]} for text in texts]}).encode()
    values = 2 + 6 * len(texts) - 1  # the body, the list; of each text two objects, a list, two commas, one between
    for size in range(1, 40):
        monkeypatch.setattr(bodies, "_WINDOW_BYTES", size)
        bodies._check_values(raw, values)
        with pytest.raises(RequestError, match=f"more than {values - 1} values"):
            bodies._check_values(raw, values - 1)


def test_what_can_fit_is_decoded() -> None:
    code = 'if (x) { f(a, "b"); }\n' * 100_000  # many braces and commas, all of them in one string
    wide = Context(tokens=262_144, token_bytes=128)
    assert parse(ChatBody, chat(code), context=wide).messages[0]["content"] == code
    assert len(parse(ChatBody, chat("é" * 400_000), context=Context(8192, 128)).messages[0]["content"]) == 400_000
    short = [f"{'x' * 100} {i}" for i in range(20_000)]  # each prompt fits by itself
    assert parse(CompletionBody, json.dumps({"prompt": short}).encode(), context=CONTEXT).prompt == short
    cut = json.dumps({"prompt": "a " * 2_000_000, "truncate_prompt_tokens": 5}).encode()
    assert parse(CompletionBody, cut, context=CONTEXT).truncate_prompt_tokens == 5


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (TEXT, "prompt")])
@served()
async def test_a_prompt_that_cannot_fit_is_refused_by_its_characters(
    s: Served, path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(s.service.text.tokenizer), "encode", encode)
    text = "a" * (s.service.text.context(s.engine.info).text_bytes + 1)
    reply = await s.client.post(
        path, {"messages": [{"role": "user", "content": text}]} if path == CHAT else {field: text}
    )
    assert reply.status == 400 and reply.error["param"] == field
    assert reply.error["code"] == "context_length_exceeded" and "512 tokens" in reply.error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@served()
async def test_a_prompt_is_not_tokenized_much_beyond_the_context(
    s: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long token of the vocabulary lets texts pass that hold thousands of times the context."""
    monkeypatch.setattr(BYTES, "longest_bytes", 1 << 20)
    for words, counted in ((1_000_000, 400_000), (300, 600)):
        text = "a " * words
        reply = await s.client.post(
            path, {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        )
        assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
        found = re.search(r"too long: (at least )?(\d+) tokens", reply.error["message"])
        assert found and bool(found[1]) == (words > 1000) and counted <= int(found[2]) < 1.1 * counted
    cut = {"prompt": "a " * 1_000_000, "truncate_prompt_tokens": 5, "max_tokens": 1}
    assert path == CHAT or (await s.client.post(path, cut)).status == 200


def test_the_budget_leaves_room_for_small_bodies() -> None:
    budget = BodyBudget(10 * MB, 4 * MB)
    shares = [BodyShare(budget, 4 * MB) for _ in range(3)]
    shares[0].hold(4 * MB)
    shares[1].hold(4 * MB)
    with pytest.raises(RequestError) as refused:
        shares[2].hold(4 * MB)
    assert refused.value.status == 503 and refused.value.retry_seconds == 2
    ordinary = BodyShare(budget, 4 * MB)
    ordinary.hold(SMALL_BYTES)
    ordinary.release()
    shares[0].release()
    shares[2].hold(4 * MB)
    for share in shares:
        share.release()
        share.release()
    assert budget.held == 0
    with pytest.raises(RequestError):
        while budget.held < 2 * MB:
            budget.take(SMALL_BYTES)
    assert budget.held == 10 * MB // 8


BODIES_AT_ONCE = """
from pathlib import Path
from perilune.server.limits import keep_bodies_apart

def megabytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) >> 10

keep_bodies_apart()
del [bytearray(30 << 20)][:]  # after which glibc would put the next ones on its heap
before = megabytes("VmRSS")
for _ in range(3):
    bodies = [bytearray(), bytearray(), bytearray()]
    for _ in range(120):
        for body in bodies:
            body += bytes(256 << 10)
    del bodies, body
print(megabytes("VmHWM") - before, megabytes("VmRSS") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bodies_that_grow_at_once_take_their_own_bytes_of_memory_and_give_them_back() -> None:
    done = subprocess.run([sys.executable, "-c", BODIES_AT_ONCE], capture_output=True, text=True, check=True)
    most, left = map(int, done.stdout.split())
    assert most <= 3 * 30 + 15 and left <= 15, done.stdout


def test_a_body_of_unknown_length_is_counted_as_it_comes() -> None:
    budget = BodyBudget(4 * MB, 4 * MB)
    share = BodyShare(budget, 4 * MB)
    for size in range(100_000, 4 * MB, 100_000):
        share.grow(size)
        assert size <= budget.held <= 4 * MB
    with pytest.raises(RequestError, match="larger than 4 MiB"):
        share.grow(4 * MB + 1)
    share.release()
    assert budget.held == 0


@served(max_body_mb=40, body_memory_mb=100)
async def test_a_full_budget_answers_503_before_reading_and_recovers(s: Served) -> None:
    gate, read = asyncio.Event(), 0
    large = b'{"messages":' + b" " * (39 * MB)

    async def send_slowly() -> Any:
        nonlocal read

        async def receive() -> dict[str, Any]:
            nonlocal read
            read += 1
            await gate.wait()
            return {"type": "http.disconnect"}

        statuses: list[Any] = []

        async def send(message: Any) -> None:
            statuses.append(message)

        headers = [(b"content-length", str(len(large)).encode())]
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "headers": headers,
            "query_string": b"",
            "client": ("a", 1),
        }
        await s.client.app(scope, receive, send)
        return statuses

    holding = [asyncio.create_task(send_slowly()) for _ in range(2)]
    while read < 2:
        await asyncio.sleep(0.001)
    refused = await send_slowly()
    assert refused[0]["status"] == 503 and (b"retry-after", b"2") in refused[0]["headers"] and read == 2
    assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200
    gate.set()
    await asyncio.gather(*holding)
    assert (await s.client.post(CHAT, b" " * (39 * MB))).status == 400  # read again


@served()
async def test_one_large_body_is_decoded_at_a_time(s: Served) -> None:
    service: Service = s.service
    running = most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    await asyncio.gather(*(service.offload(bodies.WHOLE_BYTES, work) for _ in range(4)))
    assert most == 1


def test_options_are_checked() -> None:
    ServerConfig(port=65535, max_body_mb=64, body_memory_mb=64)
    for wrong in ({"max_body_mb": 0}, {"max_body_mb": 64, "body_memory_mb": 63}, {"drain_seconds": -1.0}):
        with pytest.raises(ConfigError):
            ServerConfig(**wrong)  # type: ignore[arg-type]  # one of them at a time


@served(client_concurrency=2, hold=0)
async def test_requests_of_one_address_are_bounded(s: Served) -> None:
    calls = [asyncio.create_task(s.client.post(CHAT, {"messages": HELLO})) for _ in range(2)]
    await s.hangs(2)
    refused = await s.client.post(CHAT, {"messages": HELLO})
    assert refused.status == 429 and refused.error["code"] == "rate_limit_exceeded"
    assert (await s.client.get("/health")).status == 200
    s.engine.release.set()
    assert [r.status for r in await asyncio.gather(*calls)] == [200, 200]
    assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200


@served()
async def test_health_says_whether_requests_are_taken(s: Served) -> None:
    for path in ("/health", "/health/ready", "/health/live"):
        assert (await s.client.get(path)).status == 200
    s.engine.alive, s.engine.retry_seconds = False, 7
    for reply in (await s.client.get("/health/ready"), await s.client.post(CHAT, {"messages": HELLO})):
        assert reply.error["code"] == "engine_unavailable" and reply.headers["retry-after"] == "7"
    assert (await s.client.get("/health/live")).status == 200
    s.engine.alive = True
    s.service.drain()
    reply = await s.client.get("/health")
    assert reply.status == 503 and "shutting down" in reply.error["message"]
    assert (await s.client.get("/health/live")).status == 200
    refused = await s.client.post(CHAT, {"messages": HELLO})
    assert refused.status == 503 and refused.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/v1/responses"])
def test_priorities_and_deadlines_reach_the_engine(path: str) -> None:
    bodies = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    body: dict[str, Any] = bodies.get(path, {"messages": HELLO, "max_tokens": 9})

    async def test(s: Served) -> None:
        assert (await s.client.post(path, {**body, "priority": 7, "deadline_seconds": 2.5})).status == 200
        assert (await s.client.post(path, body)).status == 200
        assert s.engine.orders == [Order(7, 2.5), Order()]
        for wrong in ({"priority": -1}, {"priority": 101}, {"priority": "high"}, {"deadline_seconds": 0}):
            reply = await s.client.post(path, {**body, **wrong})
            assert reply.status == 400 and next(iter(wrong)) in reply.text

    async def late(s: Served) -> None:
        reply = await s.client.post(path, {**body, "deadline_seconds": 2.5})
        assert reply.status == 504 and "2.5 s" in reply.text
        stream = await s.client.post(path, {**body, "deadline_seconds": 2.5, "stream": True})
        assert stream.status == 200 and "its own deadline" in stream.text.replace("the request's own", "its own")

    serve(test)
    serve(late, late_at=2)
