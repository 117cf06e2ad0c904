"""OpenTelemetry: spans of a request, and one clear line without the packages."""

import http.server
import importlib.util
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from perilune.core.errors import ConfigError
from perilune.server.call import Run
from perilune.server.service import Service
from perilune.server.tracing import Traces, phases
from tests.serving import CHAT, HELLO, Served, serve

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


@pytest.fixture
def collector() -> Iterator[Any]:
    """An HTTP server that keeps the bodies it gets."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.bodies.append(self.rfile.read(int(self.headers["content-length"])))  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@needs_packages
def test_spans_reach_the_collector(collector: Any) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def traces(service: Service) -> Traces:
        return Traces(f"http://127.0.0.1:{collector.server_port}/v1/traces", service.model)

    async def test(s: Served) -> None:
        s.client.headers = {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-01", "x-request-id": "req-7"}
        assert (await s.client.post(CHAT, {"messages": HELLO, "n": 2})).status == 200
        s.client.headers = {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-00"}  # its caller does not sample it
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200
        s.client.headers = {"traceparent": "garbage"}
        assert (await s.client.post(CHAT, {"messages": []})).status == 400
        await s.client.get("/metrics")

    serve(test, observers=[traces])
    spans: list[Any] = []
    for body in collector.bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
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

    serve(test, observers=[lambda service: Traces("http://127.0.0.1:9/v1/traces", "m")])
    assert not any(r.exc_info for r in caplog.records), caplog.text
