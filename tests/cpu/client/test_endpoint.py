"""The client of OpenAI endpoints: what it reads out of answers, and its one line for each thing that goes wrong."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from perilune.bench.ledger import origin
from perilune.client import endpoint as module
from perilune.client import target
from perilune.client.endpoint import Chunk, Endpoint, EndpointError, Usage
from perilune.client.target import open_target, serving
from perilune.core.errors import ConfigError, EngineError
from perilune.core.messages import EngineInfo
from perilune.text.stream import Content, Reasoning, ToolArguments, ToolStart
from tests.fake_endpoint import FakeEndpoint, chunk, refusal, usage, whole

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def stream(url: str, body: dict[str, Any] = ASK, **options: Any) -> list[Chunk]:
    async def work() -> list[Chunk]:
        async with Endpoint(url, **options) as endpoint, contextlib.aclosing(endpoint.stream(body)) as chunks:
            return [c async for c in chunks]

    return asyncio.run(work())


def complete(url: str, **options: Any) -> Any:
    async def work() -> Any:
        async with Endpoint(url, **options) as endpoint:
            return await endpoint.complete(ASK)

    return asyncio.run(work())


def error(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises((EndpointError, ConfigError)) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 700
    return message


@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
def test_events_do_not_depend_on_how_bytes_are_cut(cut: int) -> None:
    text = ': comment\r\n\r\ndata: {"a": "é"}\r\n\r\nevent: x\ndata:one\ndata: two\n\n\ndata: [DONE]\n\n'.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(text), cut):
            yield text[at : at + cut]

    async def collect() -> list[str]:
        return [data async for _, data in module.events(pieces())]

    assert asyncio.run(collect()) == ['{"a": "é"}', "one\ntwo", "[DONE]"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENT", 100)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"data: " + b"x" * 50

    async def collect() -> None:
        async for _ in module.events(pieces()):
            pass

    assert "an event of more than" in error(lambda: asyncio.run(collect()))


def test_a_stream_gives_events_times_and_usage(fake: FakeEndpoint) -> None:
    call = {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": ""}}
    fake.answer = lambda body: [
        (0.0, chunk(role="assistant", content="")),
        (0.0, chunk(reasoning_content="hm")),
        (0.05, chunk(reasoning="m", content=None)),
        (0.05, chunk(content="Ja")),
        (0.0, chunk(tool_calls=[call])),
        (0.0, chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}])),
        (0.0, chunk(tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}])),
        (0.0, chunk(finish="tool_calls")),
        (0.0, usage(11, 6, 2)),
        (0.0, "[DONE]"),
    ]
    began = time.perf_counter()
    chunks = stream(fake.url, ASK | {"max_tokens": 9})
    assert [e for c in chunks for e in c.events] == [
        Reasoning("hm"),
        Reasoning("m"),
        Content("Ja"),
        ToolStart(0, "functions.f:0", "f"),
        ToolArguments(0, '{"a":'),
        ToolArguments(0, " 1}"),
    ]
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]
    assert [c.usage for c in chunks if c.usage] == [Usage(11, 6, 2)]
    at = {e: c.at - began for c in chunks for e in c.events}
    # A busy machine may read late, never early.
    assert at[Reasoning("m")] >= 0.05 and at[Content("Ja")] >= 0.1 and at[Reasoning("hm")] <= at[Reasoning("m")]
    (body,) = fake.bodies
    assert body["model"] == "fake" and body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 9 and body["messages"] == ASK["messages"]


def test_whole_answers(fake: FakeEndpoint) -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": n, "arguments": a}} for n, a in (("f", "{}"), ("g", "x"))
    ]
    fake.answer = lambda body: whole("", reasoning="why", tool_calls=calls, finish="tool_calls")
    reply = complete(fake.url + "/v1/")
    assert (reply.content, reply.reasoning, reply.tool_calls) == ("", "why", (("f", "{}"), ("g", "x")))
    assert reply.finish_reason == "tool_calls" and reply.usage == Usage(5, 7, None)
    fake.answer = lambda body: {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    reply = complete(fake.url)
    assert (reply.content, reply.usage, reply.finish_reason) == ("", None, "length")


def test_text_that_is_not_unicode_is_sent_with_replacements(fake: FakeEndpoint) -> None:
    """As Python reads a byte 0xff of a terminal."""
    fake.answer = lambda body: [(0.0, chunk(content="a")), (0.0, chunk(finish="stop")), (0.0, "[DONE]")]
    asked = {"messages": [{"role": "user", "content": "2 + \udcff \u2028\U0001f600"}]}
    assert stream(fake.url, asked)
    assert fake.bodies[0]["messages"][0]["content"] == "2 + \ufffd \u2028\U0001f600"


def test_counting_is_the_servers_or_nobodys(fake: FakeEndpoint) -> None:
    async def work() -> list[int | None]:
        async with Endpoint(fake.url) as endpoint:
            return [await endpoint.count(ASK["messages"]) for _ in range(2)]

    assert asyncio.run(work()) == [None, None]
    fake.count = lambda body: 100 + len(body["messages"])
    assert asyncio.run(work()) == [101, 101]


def test_the_model_is_the_only_one_or_the_one_named(fake: FakeEndpoint) -> None:
    fake.models = [{"id": "a"}, {"id": "b", "max_model_len": 77, "owned_by": "vllm"}]
    assert "serves a, b: choose one with --model-name" in error(complete, fake.url)
    assert "does not serve 'c' but a, b" in error(complete, fake.url, model="c")
    fake.models[0]["id"] *= 9000
    assert "aaa ...: choose one" in error(complete, fake.url)

    async def work() -> tuple[str, int | None, str]:
        async with Endpoint(fake.url, model="b") as e:
            return e.model, e.max_model_len, e.owner

    assert asyncio.run(work()) == ("b", 77, "vllm")

    async def marks() -> dict[str, Any]:
        async with Endpoint(fake.url) as e:
            return e.marks

    info = EngineInfo("a", 64, 9, (), 4, 16, 2)
    assert info.marks == {}
    several = replace(info, tp=4, exchange="peer", synthetic="random weights")
    fake.models = [{"id": "a", **several.marks}]
    several_marks = {"tp": 4, "ep": 1, "exchange": "peer", "synthetic": "random weights"}
    assert asyncio.run(marks()) == several_marks
    fake.models = [{"id": "a", "tp": "many", "exchange": 3}]
    assert asyncio.run(marks()) == {}
    fake.models = []
    assert "serves nothing" in error(complete, fake.url)


def test_keys(fake: FakeEndpoint) -> None:
    fake.key = "s3cret"
    message = error(complete, fake.url, api_key="wr0ng")
    assert "answered 401: wrong key; give the right key with --api-key-file" in message and "wr0ng" not in message
    assert complete(fake.url, api_key="s3cret").content == "Hello"


def test_refusals_carry_the_servers_words_and_status(fake: FakeEndpoint) -> None:
    page = "<!DOCTYPE html>\n<head><style>\na {}</style><title>Not &amp; found</title></head><h1>Sorry</h1>"
    for call in (complete, stream):
        fake.answer = lambda body: refusal(404, "the model 'x'\nis not served here")
        with pytest.raises(EndpointError, match=r"answered 404: the model 'x' is not served here$") as caught:
            call(fake.url)
        assert caught.value.status == 404
        fake.answer = lambda body: PlainTextResponse("Bad\n<b>Gateway</b> " + "x" * 9999, 502)
        assert "answered 502: Bad <b>Gateway</b> xxx" in error(call, fake.url)
        fake.answer = lambda body: PlainTextResponse(page, 404)
        assert error(call, fake.url).endswith("answered 404: Not & found")
        fake.answer = lambda body: PlainTextResponse("<html><body class='", 500)
        assert "answered 500: no reason given" in error(call, fake.url)
        fake.answer = lambda body: PlainTextResponse("", 500)
        assert "answered 500: no reason given" in error(call, fake.url)


def test_nobody_there() -> None:
    with socket.socket() as sock:  # bound and not listening: while this is open no other process gets the port
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        message = error(complete, f"http://127.0.0.1:{port}")
    assert f"cannot connect to http://127.0.0.1:{port}/v1" in message and "is the server running?" in message


def test_silence_ends_at_the_timeout(fake: FakeEndpoint) -> None:
    fake.answer = lambda body: [(0.0, chunk(content="a")), (60.0, chunk(content="b"))]
    assert "silent for 0.2 s: raise --timeout" in error(stream, fake.url, timeout=0.2)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([(0.0, "{not json")], "no OpenAI-compatible answer"),
        ([(0.0, '{"choices": [{"delta": {"content": 5}}]}')], "no OpenAI-compatible answer"),
        ([(0.0, "[]")], "no OpenAI-compatible answer"),
        ([(0.0, chunk(content="a")), (0.0, '{"error": {"message": "engine\\ngone"}}')], "failed: engine gone"),
        ([(0.0, chunk(content="a"))], "ended a stream before the answer was complete"),
        ([(0.0, b"data: {}")], "ended a stream before the answer was complete"),
        ([], "ended a stream before the answer was complete"),
    ],
)
def test_malformed_streams(fake: FakeEndpoint, frames: Any, words: str) -> None:
    fake.answer = lambda body: frames
    assert words in error(stream, fake.url)


def test_malformed_answers(fake: FakeEndpoint) -> None:
    for answer in ({}, {"choices": []}, {"choices": [{}]}):
        fake.answer = lambda body, answer=answer: answer
        assert "without a message" in error(complete, fake.url)
    fake.answer = lambda body: {"error": "no"}
    assert "failed: no" in error(complete, fake.url)
    fake.models = [{"name": "x"}]
    assert "is no list of models" in error(complete, fake.url)


DEEP = "[" * 100_000 + "]" * 100_000
EDGES = [f'{{"error": {"[" * n + "]" * n}}}' for n in range(900, 990, 10)]


@pytest.mark.parametrize("deep", [DEEP, *EDGES])
def test_answers_nested_too_deep(fake: FakeEndpoint, deep: str) -> None:
    for call in (complete, stream):
        fake.answer = lambda body: PlainTextResponse(deep, 500)
        assert "answered 500: " in error(call, fake.url)
    fake.answer = lambda body: [(0.0, deep)] if "stream" in body else PlainTextResponse(deep)
    for call in (complete, stream):
        message = error(call, fake.url)
        assert "no OpenAI-compatible answer" in message or "failed: " in message


def test_what_is_nested_too_deep_is_no_list_of_models(fake: FakeEndpoint) -> None:
    fake.models_text = DEEP
    assert "is no list of models" in error(complete, fake.url)


def test_an_answer_without_end_is_refused(fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 5000)
    for status, calls in ((200, [complete]), (500, [complete, stream])):
        fake.answer = lambda body, status=status: PlainTextResponse("x" * 5001, status)
        for call in calls:
            assert "sent an answer of more than" in error(call, fake.url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:pw@host/v1", "--api-key-file"),
        ("http://", "no address"),
        ("ftp://host", "no address"),
        ("http://host:99999999/", "no address"),
        ("http://host:port/", "no valid address"),
        ("http://host/v1?x=1", "base address"),
        ("http://xn--/v1", "no valid address"),
    ],
)
def test_bad_addresses(url: str, words: str) -> None:
    message = error(Endpoint, url)
    assert words in message and "pw" not in message


def test_addresses() -> None:
    async def bases() -> list[tuple[str, str]]:
        return [
            (e.base, e.root) for e in map(Endpoint, ("http://h:1", "http://h:1/", "http://h/v1/", "https://h/api/v4"))
        ]

    assert asyncio.run(bases()) == [
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h/v1", "http://h"),
        ("https://h/api/v4", "https://h/api/v4"),
    ]


def test_options_that_do_not_belong_together(fake: FakeEndpoint) -> None:
    async def work(model: str, **options: Any) -> None:
        async with open_target(model, **options):
            pass

    assert "configures a model served here" in error(
        lambda: asyncio.run(work(fake.url, serve_options=["--dtype", "float32"]))
    )
    assert "running server" in error(lambda: asyncio.run(work("kimi-nano", model_name="x")))


def test_a_private_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(str(tmp_path / "absent")):
            raise AssertionError("it started")

    with pytest.raises(EngineError, match=r"^model '.*absent' does not exist: MODEL is"):
        asyncio.run(work())


def test_a_private_server_ends_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for `perilune serve`: it logs more than a pipe holds, and notes that it was asked to end."""
    script = tmp_path / "fake.sh"
    script.write_text(
        f"#!/bin/sh\ntrap 'echo ended > {tmp_path}/ended; exit 0' TERM\n"
        "echo 'curl http://127.0.0.1:7/v1/chat/completions -d x' >&2\n"
        "i=0; while [ $i -lt 4000 ]; do echo 'a line of the log, fifty characters long or so' >&2; i=$((i+1)); done\n"
        f"touch {tmp_path}/logged\nwhile :; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    async def work() -> str:
        async with serving("m") as url:
            while not (tmp_path / "logged").exists():  # it never is if the log is not read
                await asyncio.sleep(0.01)
            return url

    monkeypatch.setattr(target, "STOP_SECONDS", 60.0)
    assert asyncio.run(asyncio.wait_for(work(), 120)) == "http://127.0.0.1:7"
    assert (tmp_path / "ended").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_private_server_ends_with_a_killed_run() -> None:
    code = """
import asyncio, os
from perilune.client.target import serving
async def run():
    async with serving("kimi-nano") as url:
        print(url, flush=True)
        os.kill(os.getpid(), 9)
asyncio.run(run())"""
    address = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
    with pytest.raises(ConnectionRefusedError):
        for _ in range(600):
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))).close()
            time.sleep(0.1)


def test_a_private_server_that_dies_at_work_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake.sh"
    script.write_text(
        "#!/bin/sh\necho 'curl http://127.0.0.1:7/v1/chat/completions -d x' >&2\n"
        "echo 'error: out of memory' >&2\necho 'and more' >&2\nexit 3\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    async def work(status: int | None) -> None:
        async with serving("m"):
            raise EndpointError("the connection broke", status=status)

    monkeypatch.setattr(target, "DEATH_SECONDS", 60.0)  # a busy machine's processes end later than after 2 s
    with pytest.raises(EngineError, match=r"^the private server ended with exit code 3: out of memory$"):
        asyncio.run(work(None))
    with pytest.raises(EndpointError, match=r"^the connection broke$"):  # an answer, whatever it says, is no death
        asyncio.run(work(429))


def test_a_row_about_a_server_elsewhere_does_not_claim_this_hardware() -> None:
    row = origin("https://host/v1")
    assert row["server"] == "endpoint" and row["cpu"] is None and row["torch"] is None and row["date"]
    row = origin("kimi-nano", ["dtype=float32", "threads=2"])
    assert row["server"] == "private" and row["cpu"] and row["threads"] == 2
