"""Prometheus metrics: what clients saw (histograms kept here) and what the engine counts (read at scrape time).

Names are vLLM's after `perilune_` instead of `vllm:`, where both servers measure the same; docs/operations.md has the
table. deploy/grafana shows them.
"""

import platform
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.metrics import disable_created_metrics
from prometheus_client.registry import Collector

import perilune
from perilune.core.messages import EngineInfo, EngineStats
from perilune.server.call import Run
from perilune.server.keys import Keyring
from perilune.server.processes import ProcessesCollector

disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 60)
INTERVAL_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
WAITED_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120)
LENGTH_TOKENS = (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Counted(Protocol):
    """The part of engine.client.EngineClient that metrics read."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def alive(self) -> bool: ...
    @property
    def restarts(self) -> int: ...


class Metrics:
    """One per application, with its own registry, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("http_requests", "HTTP requests by route and status.", "route", "status")
        self.errors = self._counter(
            "request_errors", "Requests answered with an error, or streams ended by one.", "kind", "code"
        )
        self.finished = self._counter("request_success", "Generations by how they ended.", "finished_reason")
        self.closed_by_grammar = self._counter(
            "answers_closed_by_grammar",
            "Structured answers and tool calls that the grammar completed because max_tokens ran out.",
        )
        self.audit_lost = self._counter("audit_lost", "Lines of the audit log that could not be written.")
        self.in_flight = Gauge("perilune_generations_in_flight", "Generations not ended yet.", registry=self.registry)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the admitted request to its first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between consecutive tokens of a request (deltas of several tokens count once, divided).",
            INTERVAL_SECONDS,
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From the admitted request to its last token.", REQUEST_SECONDS
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "From the scheduler's queue to the first step.", WAITED_SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", FIRST_TOKEN_SECONDS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTH_TOKENS)
        self.answer_length = self._histogram("request_generation_tokens", "Tokens of an answer.", LENGTH_TOKENS)
        ProcessCollector(registry=self.registry)

    def watch(self, engine: Counted, keys: Keyring, model: str) -> None:
        """Adds collectors of the engine's counters, of its processes and of the usage of keys."""
        self.registry.register(EngineCollector(engine, model))
        self.registry.register(KeyCollector(keys))
        self.registry.register(ProcessesCollector(lambda: engine.info.pids if engine.alive else ()))

    def observe(self, run: Run, prompt_tokens: int, *, closed: bool) -> None:
        """Counts a generation that has ended. `closed`: the grammar ended its form because max_tokens ran out."""
        self.finished.labels(run.finish_reason).inc()
        self.closed_by_grammar.inc(closed)
        self.whole.observe(run.last - run.started)
        self.prompt_length.observe(prompt_tokens)
        self.answer_length.observe(run.output_tokens)
        if run.first:
            self.queue.observe(run.queue_seconds)
            self.prefill.observe(max(run.first - run.started - run.queue_seconds, 0.0))
            self.decode.observe(run.last - run.first)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"perilune_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"perilune_{name}", text, buckets=tuple(buckets), registry=self.registry)


class KeyCollector(Collector):
    """Usage by key; a server without keys has one, named "". At most MAX_KEYS label values."""

    def __init__(self, keys: Keyring) -> None:
        self.keys = keys

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("perilune_key_requests", "Requests by API key.", labels=["key"])
        tokens = CounterMetricFamily(
            "perilune_key_tokens",
            "Tokens by API key. Kind cached is part of input, reasoning of output.",
            labels=["key", "kind"],
        )
        for account in self.keys.accounts:
            used = account.usage
            requests.add_metric([account.name], used.requests)
            for kind in ("input", "cached", "output", "reasoning"):
                tokens.add_metric([account.name, kind], getattr(used, f"{kind}_tokens"))
        yield from (requests, tokens)


class EngineCollector(Collector):
    """The engine's own counters, current as of its latest EngineStats (at most half a second old)."""

    def __init__(self, engine: Counted, model: str) -> None:
        self.engine = engine
        self.model = model

    def collect(self) -> Iterable[Metric]:
        s, info = self.engine.stats, self.engine.info
        build = {"version": perilune.__version__, "python": platform.python_version()}
        yield InfoMetricFamily("perilune_build", "What is running.", value=build)
        sizes = ("max_model_len", "max_num_seqs", "block_size", "num_blocks", "kv_shards")
        served = {"model_name": self.model, **{name: str(getattr(info, name)) for name in sizes}}
        yield InfoMetricFamily("perilune_model", "What is served.", value=served)
        used = s.blocks_owned / s.blocks_total if s.blocks_total else 0.0
        for name, text, value in (
            ("engine_up", "1 while the engine lives.", float(self.engine.alive)),
            ("num_requests_running", "Requests the engine computes.", s.running),
            ("num_requests_waiting", "Requests the engine queues.", s.waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks that live requests hold; 1: all.", used),
            ("cuda_graphs", "CUDA graphs of steps.", s.graphs),
            ("cuda_graph_bytes", "Device memory they hold.", s.graph_bytes),
            ("kv_saved_seconds", "Time saved by restoring KV instead of computing it, as estimated.", s.saved_seconds),
        ):
            yield GaugeMetricFamily(f"perilune_{name}", text, value=value)
        blocks = GaugeMetricFamily("perilune_kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["owned"], s.blocks_owned)
        blocks.add_metric(["cached"], s.blocks_cached)
        blocks.add_metric(["free"], s.blocks_total - s.blocks_owned - s.blocks_cached)
        yield blocks
        again = "Engine processes, or groups of ranks, started after one had ended by itself."
        for name, text, value in (
            ("engine_restarts", again, self.engine.restarts),
            ("prompt_tokens", "Prompt tokens of accepted requests.", s.prompt_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens taken from the prefix cache.", s.cached_tokens),
            ("generation_tokens", "Tokens generated.", s.generated_tokens),
            ("num_preemptions", "Requests put back to make room in the KV cache.", s.preemptions),
            ("pictures_encoded", "Pictures encoded, without those found in a cache.", s.pictures),
            ("picture_seconds", "Time spent in encoding pictures.", s.picture_seconds),
            ("engine_steps", "Steps computed.", s.steps),
            ("engine_step_seconds", "Time spent in steps.", s.step_seconds),
            ("kv_restore_seconds", "Time that restores from KV tiers took.", s.restore_seconds),
            ("kv_blocks_dropped", "Evicted KV blocks for which no tier had room.", s.blocks_dropped),
            ("kv_blocks_damaged", "Stored KV blocks found damaged or missing.", s.blocks_damaged),
        ):
            yield CounterMetricFamily(f"perilune_{name}", text, value=value)
        hits = CounterMetricFamily("perilune_kv_tier_hit_tokens", "Prompt tokens taken from a tier.", labels=["tier"])
        held = GaugeMetricFamily("perilune_kv_tier_blocks", "KV blocks that a tier holds.", labels=["tier"])
        for name, tokens, count, _ in s.tiers:
            hits.add_metric([name], tokens)
            held.add_metric([name], count)
        yield from (hits, held)
        yield from self._drafts(s)

    @staticmethod
    def _drafts(s: EngineStats) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "perilune_spec_decode_num_drafts", "Requests in steps that verified drafts of theirs.", value=s.verified
        )
        by, of_these = ["source", "position"], "Of these, the ones that became part of an answer."
        drafted = CounterMetricFamily(
            "perilune_spec_decode_num_draft_tokens", "Drafted tokens by source and position.", labels=by
        )
        accepted = CounterMetricFamily("perilune_spec_decode_num_accepted_tokens", of_these, labels=by)
        right = 0
        for source, position, count, hits in s.drafts:
            drafted.add_metric([source, str(position + 1)], count)
            accepted.add_metric([source, str(position + 1)], hits)
            right += hits
        yield from (drafted, accepted)
        length = 1 + right / s.verified if s.verified else 1.0
        yield GaugeMetricFamily(
            "perilune_acceptance_length", "Tokens per request and step that had drafts, since the start.", value=length
        )
