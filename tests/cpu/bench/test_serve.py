"""`perilune bench serve`: the client's times, the sweep's rows, the picture."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from starlette.responses import StreamingResponse

from perilune.bench import load, serve
from perilune.bench.load import Client, Timing
from perilune.bench.planning import Mode, planning_us
from perilune.bench.serve_plot import plot
from perilune.cli.bench.serve import command
from perilune.client.endpoint import Endpoint, EndpointError
from perilune.core.errors import PeriluneError
from tests import fake_endpoint
from tests.fake_endpoint import FakeEndpoint, chunk, refusal, serving, usage

ROW_KEYS = {"streams", "tokens_per_s", "server_us_per_token", "first_byte_ms", "p99_gap_ms"}  # CONTRACTS.md's


def slow(pieces: int, pause: float) -> list[Any]:
    """A stream of so many tokens, `pause` seconds apart; the first event has no text."""
    texts = [(pause, chunk(content=f"t{i}")) for i in range(pieces)]
    return [(0.0, chunk(role="assistant", content="")), *texts, (0.0, chunk(finish="stop")), (0.0, usage(5, pieces)),
            (0.0, "[DONE]")]  # fmt: skip


def ask(fake: FakeEndpoint, *, timeout: float = 100.0) -> Timing:
    client = Client(f"{fake.url}/v1", api_key="secret", timeout=timeout)
    return asyncio.run(client.ask(client.encode({"model": "fake", "messages": []})))


def run(fake: FakeEndpoint, streams: list[int], **load: Any) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        async with Endpoint(fake.url) as endpoint:
            client = Client(endpoint.base, api_key=None, timeout=100)
            return await serve.sweep(
                endpoint, client, streams, serve.Load(32, 6, **load), server_pid=os.getpid(), report=lambda line: None
            )

    return asyncio.run(main())


def answer(stream: Any) -> Any:
    """For FakeEndpoint: `stream` to what is streamed, or what it returns; a count of its prompt's words to the rest."""

    def made(body: dict[str, Any]) -> Any:
        if body.get("stream"):
            return stream() if isinstance(stream, Together) else stream
        message = {"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
        return usage(len(body["messages"][0]["content"].split()), 1) | {"choices": [message]}

    return made


class Together:
    """Streams of which the first `alone` begin at once, and the others in groups: when all `count` of one are open."""

    def __init__(self, alone: int, count: int, frames: list[Any]) -> None:
        self._alone, self._count, self._frames = alone, count, frames
        self._asked, self.met = 0, 0

    def __call__(self) -> StreamingResponse:
        number, self._asked = self._asked - self._alone, self._asked + 1
        return StreamingResponse(self._send(number), media_type="text/event-stream")

    async def _send(self, number: int) -> AsyncIterator[bytes]:
        if number >= 0:
            if number % self._count == 0:
                self._open = asyncio.Barrier(self._count)
            place = await asyncio.wait_for(self._open.wait(), 60)
            self.met += place == 0
        async for piece in fake_endpoint._send(self._frames):
            yield piece


class Sink(asyncio.Transport):
    def write(self, data: Any) -> None:
        pass


# ---- client


def test_times_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: on a busy machine pieces come late and together."""
    now = 10.0
    monkeypatch.setattr(load.time, "perf_counter", lambda: now)
    stream = load.Stream()
    stream.connection_made(Sink())
    stream.send(b"")
    texts = [b"data: %s\n\n" % json.dumps(chunk(content=f"t{i}")).encode() for i in range(5)]
    for seconds, piece in (
        (0.5, b"HTTP/1.1 200 OK\r\n\r\n"),
        (0.25, b"data: %s\n\n" % json.dumps(chunk(role="assistant", content="")).encode()),
        (0.25, texts[0]),
        (0.125, texts[1] + texts[2]),
        (0.5, texts[3]),
        (0.25, texts[4][:9]),  # a piece may end anywhere
        (0.25, texts[4][9:]),
        (0.125, b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(usage(5, 6)).encode()),
    ):
        now += seconds
        stream.data_received(piece)
    t = stream.timing
    assert stream.ended.is_set() and not t.error and t.tokens == 6
    assert (t.first_byte, t.first_text, t.last) == (0.5, 1.0, 2.25)
    assert list(t.gaps) == [0.125, 0.5, 0.25, 0.125] and t.per_token == 0.25


def test_a_stream_is_read_over_http() -> None:
    with serving() as fake:
        fake.answer = lambda body: slow(6, 0.01)
        t = ask(fake)
    assert not t.error and t.tokens == 6 and 0 < t.first_byte <= t.first_text <= t.last
    assert t.first_text >= 0.01 and t.last >= 0.06 and sum(t.gaps) == pytest.approx(t.last - t.first_text)


FAILED = {"error": {"message": "the engine stopped", "type": "server_error", "param": None, "code": None}}


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (refusal(429, "too many"), "429: too many"),
        ([(0.0, chunk(content="a"))], "closed before the answer was complete"),
        ([(0.0, "[DONE]")], "without any text"),
        ([(0.0, chunk(content="a")), (0.0, FAILED), (0.0, "[DONE]")], "the stream failed: the engine stopped"),
        ([(0.0, FAILED), (0.0, "[DONE]")], "the stream failed: the engine stopped"),
        ([(0.0, chunk(content="a")), (0.0, {"object": "error", "message": "no"})], "the stream failed: no"),
        ([(0.0, chunk(content="a")), (0.0, '{"error":' + "[" * 2000), (0.0, "[DONE]")], 'failed: {"error":[['),
        ([(0.0, chunk(content="a")), (100.0, "[DONE]")], "silent for 0.2 s"),
    ],
)
def test_what_went_wrong_is_said(found: Any, error: str) -> None:
    with serving() as fake:
        fake.answer = lambda body: found
        assert error in ask(fake, timeout=0.2 if "silent" in error else 100.0).error


def test_a_server_that_is_not_there() -> None:
    client = Client("http://127.0.0.1:9/v1", api_key=None, timeout=1)
    with pytest.raises(EndpointError, match=r"cannot connect to 127\.0\.0\.1:9"):
        asyncio.run(client.ask(b""))


# ---- sweep


def test_rows() -> None:
    with serving() as fake:
        streams = Together(1 + 2, 4, slow(6, 0.01))  # after the first request, and two of one user
        fake.answer = answer(streams)
        rows = run(fake, [4, 1], rounds=2, ttft_seconds=1e3, gap_seconds=1e3)
        assert streams.met == 2, "four at once, twice"
        assert fake.bodies[-1]["ignore_eos"] is True and fake.bodies[-1]["max_tokens"] == 6
        prompts = [b["messages"][0]["content"] for b in fake.bodies if b.get("stream")]
        assert len(set(prompts)) == len(prompts) == 1 + 10
    assert [r["streams"] for r in rows] == [1, 4] and [r["requests"] for r in rows] == [2, 8]
    assert all(r.keys() > ROW_KEYS and r["tokens"] == 6 * r["requests"] and r["failed"] == 0 for r in rows)
    assert all(r["good_share"] == 1.0 and r["server_us_per_token"] > 0 for r in rows)
    assert all(r["tokens_per_s"] > 0 for r in rows)


def test_goodput_counts_requests_within_both_limits() -> None:
    with serving() as fake:
        fake.answer = answer(slow(4, 0.02))
        (row,) = run(fake, [1], ttft_seconds=0.005, gap_seconds=1e3)
    assert row["goodput_requests_per_s"] == 0 and row["good_share"] == 0 and row["failed"] == 0
    first, slow_gaps = Timing(0.1, 0.25, 1.25, tokens=5), Timing(0.1, 0.25, 2.25, tokens=5)
    found = load.Level(2, [first, slow_gaps, Timing(error="x")], seconds=4.0, cpu_seconds=0.1)
    for limits, kept in (((1.0, 0.3), 1), ((1.0, 1.0), 2), ((0.2, 1.0), 0)):
        row = serve.summary(found, serve.Load(32, 6, 1, *limits), None)
        assert (row["goodput_requests_per_s"], row["good_share"]) == (kept / 4, round(kept / 3, 4))
        assert row["tokens_per_s"] == 2.5, "of all users together"


def test_failures_are_counted_and_never_good() -> None:
    with serving() as fake:
        streams = iter([slow(3, 0.0)] * 2 + [refusal(503, "busy")] * 3)
        fake.answer = lambda body: answer(next(streams) if body.get("stream") else None)(body)
        (row,) = run(fake, [2], rounds=2, ttft_seconds=1e3, gap_seconds=1e3)
        assert (row["requests"], row["failed"], row["good_share"]) == (4, 3, 0.25)
        assert row["errors"] == ["503: busy"]


def test_an_answer_of_one_event_without_a_count_is_one_token() -> None:
    with serving() as fake:
        fake.answer = answer([(0.0, chunk(content="a", finish="stop")), (0.0, "[DONE]")])
        (row,) = run(fake, [1], rounds=1)
    assert row["tokens"] == 1 and row["server_us_per_token"] > 0


def test_a_server_that_fails_every_request_is_one_error() -> None:
    with serving() as fake:
        fake.answer = answer(refusal(500, "broken"))
        with pytest.raises(EndpointError, match="failed a first request: 500: broken"):
            run(fake, [2])


def test_the_command_writes_rows_and_a_picture(tmp_path: Path) -> None:
    with serving() as fake:
        fake.answer = answer(slow(5, 0.002))
        args = [fake.url, "--streams", "1,2", "--output-tokens", "5", "--plot", str(tmp_path / "a.svg")]
        result = CliRunner().invoke(command, [*args, "--ledger", str(tmp_path), "--engine-name", "scripted"])
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
        assert json.loads(result.stdout.splitlines()[-1]) == rows[-1]
        assert [(r["bench"], r["engine"], r["streams"]) for r in rows] == [("serve", "scripted", n) for n in (1, 2)]
        tree = ElementTree.fromstring((tmp_path / "a.svg").read_text())
        assert len(tree.findall("{http://www.w3.org/2000/svg}circle")) == 2
        result = CliRunner().invoke(command, [*args, "--server-pid", str(2**22 + 1)])
        assert isinstance(result.exception, PeriluneError) and "\n" not in str(result.exception)
        result = CliRunner().invoke(command, [*args, "--plot", str(tmp_path / "none" / "a.svg")])
        assert result.exit_code == 2 and "--plot" in result.output


def test_a_point_outside_the_limits_is_hollow() -> None:
    row = {"model": "m <b>", "max_ttft_ms": 1000.0, "max_gap_ms": 50.0, "streams": 1, "tokens_per_s": 90.0}
    rows = [
        row | {"tokens_per_s_user": 90.0, "good_share": 1.0},
        row | {"streams": 8, "tokens_per_s": 400.0, "tokens_per_s_user": 50.0, "good_share": 0.5},
        row | {"streams": 16, "tokens_per_s_user": None, "good_share": 0.0},
    ]
    circles = ElementTree.fromstring(plot(rows)).findall("{http://www.w3.org/2000/svg}circle")
    assert [c.attrib["class"] for c in circles] == ["good", "missed"]
    assert float(circles[0].attrib["cx"]) < float(circles[1].attrib["cx"])


@pytest.mark.parametrize("mode", ["plain", "drafts", "chained"])
def test_what_planning_costs(mode: Mode) -> None:
    """A mode that did not plan what it says would fail the scheduler's own assertions."""
    assert 1 < planning_us(4, mode) < 5000
