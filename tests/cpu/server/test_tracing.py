"""OpenTelemetry: spans of a request, and one clear line without the packages."""

import asyncio
import gc
import http.server
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from perilune.core.errors import ConfigError
from perilune.server import tracing
from perilune.server.call import Call, Run
from perilune.server.keys import Account, Grant
from perilune.server.service import Service
from perilune.server.tracing import Traces, phases
from tests.serving import CHAT, HANG_SECONDS, HELLO, Served, serve

PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"


def installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


needs_packages = pytest.mark.skipif(not installed(), reason="the extra otel is not installed")


def test_without_the_packages_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'perilune\[otel\]'") as refused:
        Traces("http://127.0.0.1:4318/v1/traces", "m")
    assert "\n" not in str(refused.value)
    for wrong in ("localhost:4318", "ftp://x/", "http:///v1/traces"):
        with pytest.raises(ConfigError, match="not a URL"):
            Traces(wrong, "m")


def test_phases_follow_each_other() -> None:
    run = Run(started=10.0, queue_seconds=0.5, first=11.0, last=13.0)
    assert phases(run) == [("queue", 10.0, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 13.0)]
    assert phases(Run()) == []
    assert phases(Run(started=10.0, last=12.0)) == [("queue", 10.0, 12.0)]
    assert phases(Run(started=10.0, queue_seconds=9.0, first=11.0, last=13.0))[1] == ("prefill", 11.0, 11.0)


WAITED_SECONDS = 20.0  # longer than any pause of a busy machine, shorter than an export that does not end


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP: keeps the bodies, and answers with `statuses`, the last of which stays. 0: never."""

    daemon_threads = True

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: set[tuple[str, str]] = set()
        self.statuses = [200]
        self.ended = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def traces(self, service: Service) -> Traces:
        return Traces(self.endpoint, service.model)

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        batches = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        scopes = [scope for batch in batches for resource in batch.resource_spans for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.add((self.path, self.headers["content-type"]))
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.statuses.pop(0) if len(self.server.statuses) > 1 else self.server.statuses[0]
        if not status:
            self.server.ended.wait(60)
            return
        self.send_response(status)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


@needs_packages
def test_spans_reach_the_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(s: Served) -> None:
        s.client.headers = {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-01", "x-request-id": "req-7"}
        assert (await s.client.post(CHAT, {"messages": HELLO, "n": 2})).status == 200
        s.client.headers = {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-00"}  # its caller does not sample it
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200
        s.client.headers = {"traceparent": "garbage"}
        assert (await s.client.post(CHAT, {"messages": []})).status == 400
        await s.client.get("/metrics")

    monkeypatch.setattr(tracing, "CLOSE_SECONDS", HANG_SECONDS)
    serve(test, observers=[collector.traces])
    spans = collector.spans()
    assert collector.paths == {("/v1/traces", "application/x-protobuf")}
    (request,) = (s for s in spans if s.trace_id.hex() == PARENT and s.parent_span_id.hex() == "00f067aa0ba902b7")
    children = [s for s in spans if s.parent_span_id == request.span_id]
    assert request.name == f"POST {CHAT}" and sorted(c.name for c in children) == sorted(
        ["queue", "prefill", "decode"] * 2
    )
    for child in children:
        assert request.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= request.end_time_unix_nano
    values = {a.key: a.value for a in request.attributes}
    assert (
        values["perilune.request_id"].string_value == "req-7" and values["gen_ai.usage.output_tokens"].int_value == 12
    )
    (other,) = (s for s in spans if s.trace_id.hex() != PARENT)
    assert {a.key: a.value.int_value for a in other.attributes}["http.response.status_code"] == 400
    assert len(spans) == 1 + 6 + 1


@needs_packages
def test_a_collector_that_is_away_changes_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200

    serve(test, observers=[lambda service: Traces("http://127.0.0.1:9/v1/traces?key=t0ken", "m")])
    assert "t0ken" not in caplog.text
    assert not any(r.exc_info for r in caplog.records), caplog.text


@needs_packages
@pytest.mark.parametrize("statuses", [[0], [500], [429, 200], [302], [400]])
def test_a_collector_that_fails_changes_no_answer(
    collector: Collector, statuses: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that never answers, is overloaded, redirects, or refuses: answers and the end take no longer."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # ms between batches
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 60.0)  # what an answer or the end would take that waited for it
    if statuses[-1] == 200:  # the end waits until all are sent; a busy machine may need more than a second for that
        monkeypatch.setattr(tracing, "CLOSE_SECONDS", HANG_SECONDS)
    collector.statuses = statuses
    closed: list[float] = []

    def traces(service: Service) -> Traces:
        made = collector.traces(service)
        close = made.close

        def timed() -> None:
            begun = time.monotonic()
            close()
            closed.append(time.monotonic() - begun)

        monkeypatch.setattr(made, "close", timed)
        return made

    async def test(s: Served) -> None:
        for turn in range(20):
            begun = time.monotonic()
            s.client.headers = {"authorization": "Bearer plk-secret", "x-request-id": f"r{turn}"}
            assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200
            assert time.monotonic() - begun < WAITED_SECONDS
            await asyncio.sleep(0.01)

    serve(test, observers=[traces])
    assert collector.bodies and closed[0] < WAITED_SECONDS
    if statuses[-1] == 200:
        assert {"r0", "r19"} <= {a.value.string_value for span in collector.spans() for a in span.attributes}
    assert "plk-secret" not in caplog.text
    assert not any(r.exc_info for r in caplog.records), caplog.text


@needs_packages
def test_spans_that_no_collector_takes_are_bounded(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 requests with spans that wait: what is kept does not grow beyond the queue of 2,048 and a batch of 512,
    which the exporter's thread has taken by the first look or only by the second."""
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", HANG_SECONDS)  # no batch is given up while a busy machine counts
    collector.statuses = [0]
    traces = Traces(collector.endpoint, "m")
    call = Call(Account(Grant("")), method="POST", route=CHAT, status=200)
    kept = []
    for count in (3_000, 7_000):
        for _ in range(count):
            traces.record(call)
        gc.collect()
        kept.append(sum(type(o).__name__ in ("_Span", "ReadableSpan") for o in gc.get_objects()))
    assert all(2_048 <= count < 3_000 for count in kept), kept
    traces.close()
