"""OpenTelemetry: a span per request, with queue, prefill and decode below it. Needs the extra `otel`."""

import logging
import threading
from urllib.parse import urlsplit

import perilune
from perilune.core.errors import ConfigError
from perilune.server.audit import UNSEEN
from perilune.server.call import Call, Run

EXPORT_SECONDS = 5.0  # time limit of an export to the collector; meanwhile at most 2048 spans wait, more are dropped
CLOSE_SECONDS = 1.0
SERVER_ERRORS = 500  # a status below is the client's mistake


class Traces:
    """Makes spans after a request has ended, from the times in its Call, so that tracing does not delay answers.

    The request's `traceparent` is the parent; a caller that does not sample its trace gets no spans here either.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: where a collector takes OTLP over HTTP. ConfigError for one that is no URL, or without the
        packages."""
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
            raise ConfigError(f"otlp_traces_endpoint: {endpoint!r} is not a URL: write http://HOST:4318/v1/traces")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as e:
            raise ConfigError(
                "otlp_traces_endpoint needs OpenTelemetry, which is not installed: pip install 'perilune[otel]'"
            ) from e
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_short)
        self.model = model
        self._kinds, self._error, self._within = SpanKind, StatusCode.ERROR, set_span_in_context
        self._propagator = TraceContextTextMapPropagator()
        about = {"service.name": "perilune", "service.version": perilune.__version__}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)))
        self._tracer = self._provider.get_tracer("perilune", perilune.__version__)

    def record(self, call: Call) -> None:
        if call.route in UNSEEN:
            return
        span = self._tracer.start_span(
            f"{call.method} {call.route}",
            self._propagator.extract(call.trace),
            self._kinds.SERVER,
            {
                "http.request.method": call.method,
                "http.route": call.route,
                "http.response.status_code": call.status,
                "gen_ai.system": "perilune",
                "gen_ai.request.model": self.model,
                "gen_ai.usage.input_tokens": call.total("prompt_tokens"),
                "gen_ai.usage.output_tokens": call.total("output_tokens"),
                "gen_ai.response.finish_reasons": [run.finish_reason or "" for run in call.runs],
                "perilune.request_id": call.id,
                "perilune.cached_tokens": call.total("cached_tokens"),
                "perilune.reasoning_tokens": call.total("reasoning_tokens"),
                **({"perilune.key": call.account.name} if call.account.name else {}),
            },
            start_time=call.started_ns,
        )
        if call.status >= SERVER_ERRORS or (call.error is not None and call.status < 400):
            span.set_status(self._error, type(call.error).__name__)
        inside = self._within(span)
        for index, run in enumerate(call.runs):
            for name, start, end in phases(run):
                child = self._tracer.start_span(
                    name, inside, attributes={"perilune.answer": index}, start_time=_clock(call, start)
                )
                child.end(_clock(call, end))
        span.end(_clock(call, call.ended))

    def close(self) -> None:
        """Sends the spans that are left, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _short(record: logging.LogRecord) -> bool:
    """Cuts the exporter's lines: a URL may have a key, an answer 64 KB."""
    record.msg, record.args = record.getMessage().partition("?")[0][:300], ()
    return True


def phases(run: Run) -> list[tuple[str, float, float]]:
    """The phases of a generation: (name, start, end), times of time.perf_counter()."""
    if not run.started:
        return []
    begun = run.started + run.queue_seconds
    if not run.first:
        return [("queue", run.started, run.last)]
    begun = min(begun, run.first)
    return [("queue", run.started, begun), ("prefill", begun, run.first), ("decode", run.first, run.last)]


def _clock(call: Call, moment: float) -> int:
    """Nanoseconds of the system's clock at a time.perf_counter() during the call."""
    return call.started_ns + int((moment - call.started) * 1e9)
