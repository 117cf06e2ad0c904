"""What the server says about its requests: ids, headers, logs, the audit log, and a dashboard of metrics that exist."""

import asyncio
import dataclasses
import io
import json
import logging
import os
import re
import resource
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from perilune.server import audit, logs
from perilune.server.audit import AuditLog
from perilune.server.listener import Listener
from perilune.server.service import Service
from tests.serving import BYTES, CHAT, HANG_SECONDS, HELLO, INFO, FakeEngine, Served, serve, served

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "perilune.json"
KEY = "plk-Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MA"


@pytest.fixture(autouse=True)
def logs_are_written_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server gives its log a second at its end; a busy machine's disk may need more."""
    monkeypatch.setattr(audit, "CLOSE_SECONDS", HANG_SECONDS)


def logger(directory: Path, **more: Any) -> Callable[[Service], AuditLog]:
    def make(service: Service) -> AuditLog:
        return AuditLog(directory, service.model, BYTES.decode, service.metrics.audit_lost.inc, **more)

    return make


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(directory.glob("*.jsonl")) for line in file.open()]


# ---- ids and headers


class Broken(FakeEngine):
    def generate(self, *args: Any) -> Any:
        raise ZeroDivisionError


def test_every_answer_has_the_id_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        for given, kept in (("req-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)):
            s.client.headers = {"x-request-id": given}
            for reply in (
                await s.client.get("/v1/models"),
                await s.client.get("/nowhere"),
                await s.client.post(CHAT, b"{"),
                await s.client.post("/v1/messages", b"{"),
            ):
                id = reply.headers["x-request-id"]
                assert (id == given) == kept and re.fullmatch("[!-~]{1,128}", id)
            assert reply.headers["request-id"] == id  # Anthropic's clients read it
        s.client.headers = {"x-request-id": "req-2"}
        with pytest.raises(ZeroDivisionError):
            await s.client.post(CHAT, {"messages": HELLO, "stream": False})

    with caplog.at_level(logging.INFO):
        serve(test, engine=Broken)
    said = [r.getMessage() for r in caplog.records if r.name == "perilune.access"]
    assert "id=req-1" in said[0] and said[-1].startswith(f"POST {CHAT} 500 ") and "id=req-2" in said[-1]


def test_what_is_no_request_is_answered_logged_and_counted_as_every_request(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    class Observer:
        def __init__(self, service: Any) -> None: ...

        def record(self, call: Any) -> None:
            seen.append((call.client, call.route, call.status))

        def close(self) -> None: ...

    async def test(s: Served) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            listener = Listener(s.client.app, refuse=s.client.app.state.refuse)
            await listener.start(sock)
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            await listener.close(1.0)
        lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        assert lines[0] == "HTTP/1.1 400 Bad Request" and json.loads(body)["error"]["code"] == "invalid_http"
        assert headers["x-content-type-options"] == "nosniff" and headers["connection"] == "close" and headers["date"]
        said = [r.getMessage() for r in caplog.records if r.name == "perilune.access"]
        assert said[-1].startswith("- other 400 ") and f"id={headers['x-request-id']} " in said[-1]
        page = (await s.client.get("/metrics")).text
        assert 'perilune_request_errors_total{code="invalid_http",kind="invalid_request_error"} 1.0' in page
        assert 'perilune_http_requests_total{route="other",status="400"} 1.0' in page

    with caplog.at_level(logging.INFO):
        serve(test, observers=[Observer])
    assert seen[0] == ("127.0.0.1", "other", 400)


@served(engine=Broken)
async def test_an_unexpected_failure_has_an_id_and_counts_as_a_kind(s: Served) -> None:
    got: list[Any] = []

    async def send(message: Any) -> None:
        got.append(message)

    body = json.dumps({"messages": HELLO}).encode()
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"x-request-id", b"req-3")]}
    scope |= {"scheme": "http", "query_string": b"", "root_path": "", "http_version": "1.1"}
    parts: asyncio.Queue[Any] = asyncio.Queue()
    parts.put_nowait({"type": "http.request", "body": body, "more_body": False})

    with pytest.raises(ZeroDivisionError):
        await s.client.app(scope, parts.get, send)
    assert got[0]["status"] == 500 and (b"x-request-id", b"req-3") in got[0]["headers"]
    await s.client.post(CHAT, b"{")
    page = (await s.client.get("/metrics")).text
    assert 'perilune_request_errors_total{code="",kind="server_error"} 1.0' in page
    assert 'perilune_request_errors_total{code="invalid_json",kind="invalid_request_error"} 1.0' in page


@served(fail_at=2)
async def test_an_error_within_a_stream_is_counted(s: Served) -> None:
    reply = await s.client.post(CHAT, {"messages": HELLO, "stream": True})
    assert reply.status == 200 and "not finite" in reply.text
    page = (await s.client.get("/metrics")).text
    assert 'perilune_request_errors_total{code="generation_failed",kind="server_error"} 1.0' in page
    assert 'perilune_request_success_total{finished_reason="error"} 1.0' in page


@served()
async def test_answers_carry_headers_for_browsers(s: Served) -> None:
    for reply in (await s.client.get("/v1/models"), await s.client.get("/nowhere"), await s.client.get("/")):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY" and reply.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "strict-transport-security" not in reply.headers, "only over TLS"
    assert (await s.client.get("/v1/models")).headers["cache-control"] == "no-store"
    assert (await s.client.get("/")).headers["cache-control"] == "no-cache", "an answer's own header stays"
    stream = await s.client.post(CHAT, {"messages": HELLO, "stream": True})
    assert stream.headers["x-content-type-options"] == "nosniff" and stream.headers["x-request-id"]


# ---- logs


def captured(form: str, level: str, work: Callable[[], None]) -> str:
    """What the server's log, set up as its options say, has of `work`."""
    root = logging.getLogger()
    before, old = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("httpx", "httpcore", "urllib3", "asyncio")}
    try:
        logs.configure(form, level)
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(text := io.StringIO())
        work()
        return text.getvalue()
    finally:
        root.handlers[:], root.level = before, old
        for name, was in levels.items():
            logging.getLogger(name).setLevel(was)


def test_json_lines_name_the_request() -> None:
    async def test(s: Served) -> None:
        s.client.headers = {"authorization": "Bearer k", "x-request-id": "req-5"}
        await s.client.post(CHAT, {"messages": HELLO})
        s.engine.fail_at = 1
        await s.client.post(CHAT, {"messages": HELLO})

    def work() -> None:
        serve(test, api_key="k", answer="Hello\nyou")
        try:
            raise ValueError("out of range")
        except ValueError:
            logging.getLogger("x").exception("it broke\nin two lines")

    entries = [json.loads(line) for line in captured("json", "info", work).splitlines()]
    first, warned, last, broke = entries
    assert first["message"].startswith(f"POST {CHAT} 200") and first["level"] == "info"
    assert first["request_id"] == "req-5" == warned["request_id"] and first["key"] == "default"
    assert first["status"] == 200 and first["route"] == CHAT and first["output_tokens"] == 10 and first["seconds"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", first["time"])
    assert warned["level"] == "warning" and "not finite" in warned["message"] and last["status"] == 500
    assert broke["message"] == "it broke\nin two lines" and "ValueError: out of range" in broke["exception"]
    assert "request_id" not in broke
    assert captured("json", "error", lambda: serve(test, api_key="k")) == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_ever_logged(form: str, tmp_path: Path) -> None:
    """Keys in every place where a client may put one, right and wrong, with failures of every kind, at every level."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    pages: list[str] = []

    async def test(s: Served) -> None:
        places: Sequence[tuple[dict[str, str], str]] = (
            ({"authorization": f"Bearer {KEY}"}, CHAT),
            ({"x-api-key": KEY}, "/v1/messages"),
            ({"authorization": f"Bearer {KEY}x"}, CHAT),
            ({"authorization": f"Basic {KEY}"}, CHAT),
            ({"authorization": KEY}, CHAT),
            ({"authorization": f"Bearer {KEY}", "cookie": KEY, "x-custom": KEY}, f"/v1/{KEY}"),
            ({"authorization": f"Bearer {KEY}"}, f"/v1/responses/{KEY}"),
        )
        bodies: Sequence[Any] = (
            {"messages": [{"role": "user", "content": KEY}], "max_tokens": 9},
            {"messages": HELLO, "max_tokens": 9, "temperature": 99, KEY: 1},
            {"messages": HELLO, "max_tokens": 9, "stream": True},
            f'{{"messages": "{KEY}", '.encode(),
        )
        for headers, path in places:
            s.client.headers = headers
            for body in bodies:
                await s.client.post(path, body)
            await s.client.get(path)
        s.engine.fail_at = 1
        for stream in (False, True):
            s.client.headers = {"authorization": f"Bearer {KEY}"}
            await s.client.post(CHAT, {"messages": [{"role": "user", "content": KEY}], "stream": stream})
        s.service.observers.append(broken)
        with pytest.raises(ZeroDivisionError):
            await s.client.post(CHAT, {"messages": HELLO})
        s.service.observers.remove(broken)
        pages.append((await s.client.get("/metrics")).text)

    def broken(call: Any) -> None:
        raise ZeroDivisionError

    directory = tmp_path / "audit"
    setup = {"api_key_file": str(keys), "audit_log": str(directory), "audit_text": True}
    said = captured(form, "debug", lambda: serve(test, **setup, observers=[logger(directory)]))
    written = "".join(file.read_text() for file in directory.iterdir())
    assert said.count("\n") > 20 and len(lines(directory)) > 20
    for text in (said, written, *pages):
        assert text and KEY not in text and KEY[:20] not in text


def test_no_text_makes_a_line_of_its_own_or_commands_a_terminal() -> None:
    forged = "resp_\n12:00:00 INFO GET /v1/models 200 \x1b[2J\u2028\x85\ud800 \u00e9"

    def work() -> None:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            logging.getLogger("perilune.server").error("%s failed", forged, exc_info=True)

    first, *rest = captured("text", "info", work).split("\n")
    assert "\\n12:00:00 INFO" in first and "\\x1b[2J" in first and first.endswith("é failed") and first.isprintable()
    assert rest[0].startswith("Traceback") and rest[-2] == "ZeroDivisionError", "a traceback keeps its lines"
    assert captured("json", "info", work).count("\n") == 1


def test_probes_are_lines_where_their_answer_changes() -> None:
    async def test(s: Served) -> None:
        for path in ("/health", "/health/ready", "/health/live", "/metrics", "/", "/v1/models"):
            assert (await s.client.get(path)).status == 200
        for alive in (False, False, False, True, True, False):
            s.engine.alive = alive
            assert (await s.client.get("/health/ready")).status == (200 if alive else 503)
            assert (await s.client.get("/health/live")).status == 200
        assert (await s.client.get("/health")).status == 503, "the same probe by another name"

    said = captured("text", "info", lambda: serve(test)).splitlines()
    asked = [found[1] for line in said if (found := re.search(r"GET (\S+ \d+)", line))]
    changes = ["/health/ready 503", "/health/ready 200", "/health/ready 503"]
    assert asked == ["/ 200", "/v1/models 200", *changes]
    assert len([line for line in said if "/health" in line]) == len(changes), said
    assert captured("text", "debug", lambda: serve(test)).count("GET /health/ready ") == 9


# ---- the dashboard


def test_the_processes_of_the_engine_are_measured() -> None:
    """Against what this process knows of itself; a process that has ended has no metrics."""

    async def test(s: Served) -> None:
        with subprocess.Popen(["sleep", "60"]) as other:
            try:
                s.engine.info = dataclasses.replace(INFO, pids=(os.getpid(), other.pid))
                pages.append((await s.client.get("/metrics")).text)
            finally:
                other.kill()
        pages.append((await s.client.get("/metrics")).text)
        s.engine.alive = False
        pages.append((await s.client.get("/metrics")).text)

    pages: list[str] = []
    serve(test)

    def value(name: str, process: str) -> float | None:
        found = re.search(rf'^perilune_process_{name}{{process="{process}"}} (\S+)$', page, re.MULTILINE)
        return None if found is None else float(found[1])

    page = pages[0]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    assert 0 < (value("resident_memory_bytes", "engine") or 0) < 1.5 * usage.ru_maxrss * 1024
    assert abs((value("cpu_seconds_total", "engine") or 0) - usage.ru_utime - usage.ru_stime) < 1
    assert abs((value("open_fds", "engine") or 0) - len(os.listdir("/proc/self/fd"))) < 20
    assert 0 < (value("resident_memory_bytes", "rank1") or 0) < 64 << 20
    page = pages[1]
    assert value("open_fds", "engine") and value("open_fds", "rank1") is None
    page = pages[2]
    assert value("open_fds", "engine") is None


def families_after_two_requests() -> Iterable[Metric]:
    """What /metrics has after an answer and a refusal."""

    async def test(s: Served) -> None:
        await s.client.post(CHAT, {"messages": HELLO})
        await s.client.post(CHAT, b"{")
        page.append((await s.client.get("/metrics")).text)

    page: list[str] = []
    serve(test)
    return text_string_to_metric_families(page[0])


def test_the_dashboard_shows_metrics_that_exist() -> None:
    labels: dict[str, set[str]] = {}
    for family in families_after_two_requests():
        assert family.documentation, family.name
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels, {"instance", "job"})
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
    assert len(expressions) > 30
    used: set[str] = set()
    for expression in expressions:
        names = set(re.findall(r"\b(?:perilune|process)_\w+", expression))
        assert names and names <= labels.keys(), expression
        asked = re.findall(r"by \(([^)]*)\)", expression) + re.findall(r"(\w+)=~?\"", expression)
        for label in ", ".join(asked).split(", "):
            assert not label or all(label in labels[name] for name in names), (label, expression)
        used |= names
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert all(label in labels[n] for n in re.findall(r"\b(?:perilune|process)_\w+", target["expr"])), label
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in used}
    for topic in ("time_to_first_token", "inter_token", "queue_time", "prompt_tokens", "kv_cache_usage", "running",
                  "waiting", "errors", "accepted", "closed_by_grammar", "prefix_cache_hits",
                  "perilune_process_resident", "perilune_process_cpu", "perilune_process_open"):  # fmt: skip
        assert any(topic in name for name in families), topic
    spots = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(spots)) == len(spots) and len({p["id"] for p in dashboard["panels"]}) == len(spots)


def test_the_names_in_the_docs_are_right() -> None:
    """docs/operations.md and docs/kv.md have all metrics, and no others."""
    families = list(families_after_two_requests())
    known = {f.name + "_total" * (f.type == "counter") for f in families}
    pages = [(ROOT / "docs" / name).read_text() for name in ("operations.md", "kv.md")]
    named = set(re.findall(r"perilune_\w+", "".join(pages)))
    assert named == {name for name in known if not name.startswith("process_")}


def test_the_table_of_names_is_right() -> None:
    """docs/operations.md says which metric of vLLM's is which of ours."""
    known = {sample.name for family in families_after_two_requests() for sample in family.samples}
    known |= {name.removesuffix("_bucket") for name in known}
    rows = re.findall(r"^\| `(vllm:\w+)` \| `(\w+)`", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert len(rows) >= 20
    for theirs, ours in rows:
        assert ours in known, (theirs, ours)
