"""Prometheus metrics: what clients saw (histograms kept here) and what the engine counts (read at scrape time)."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perilune.core.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 60)
BETWEEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
WHOLE = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """One per application, with its own registry, so that several servers can live in one process."""

    def __init__(self, stats: Callable[[], EngineStats], alive: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "perilune_http_requests", "HTTP requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.finished = Counter(
            "perilune_generations", "Generations by how they ended.", ("reason",), registry=self.registry
        )
        self.closed_by_grammar = Counter(
            "perilune_answers_closed_by_grammar",
            "Structured answers and tool calls that the grammar completed because max_tokens ran out.",
            registry=self.registry,
        )
        self.in_flight = Gauge("perilune_generations_in_flight", "Generations not ended yet.", registry=self.registry)
        self.first_token = Histogram(
            "perilune_time_to_first_token_seconds",
            "From the admitted request to its first token.",
            buckets=FIRST,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "perilune_inter_token_seconds",
            "Between consecutive tokens of a request (deltas of several tokens count once, divided).",
            buckets=BETWEEN,
            registry=self.registry,
        )
        self.whole = Histogram(
            "perilune_generation_seconds",
            "From the admitted request to its last token.",
            buckets=WHOLE,
            registry=self.registry,
        )
        self.registry.register(EngineCollector(stats, alive))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The engine's own counters, current as of its latest EngineStats (at most half a second old)."""

    def __init__(self, stats: Callable[[], EngineStats], alive: Callable[[], bool]) -> None:
        self.stats = stats
        self.alive = alive

    def collect(self) -> Iterable[Metric]:
        s = self.stats()
        yield GaugeMetricFamily("perilune_engine_up", "1 while the engine lives.", value=float(self.alive()))
        yield GaugeMetricFamily("perilune_requests_running", "Requests the engine computes.", value=s.running)
        yield GaugeMetricFamily("perilune_requests_waiting", "Requests the engine queues.", value=s.waiting)
        blocks = GaugeMetricFamily("perilune_kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["owned"], s.blocks_owned)
        blocks.add_metric(["cached"], s.blocks_cached)
        blocks.add_metric(["free"], s.blocks_total - s.blocks_owned - s.blocks_cached)
        yield blocks
        yield GaugeMetricFamily("perilune_cuda_graphs", "CUDA graphs of steps.", value=s.graphs)
        yield GaugeMetricFamily("perilune_cuda_graph_bytes", "Device memory they hold.", value=s.graph_bytes)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of accepted requests.", s.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens taken from the prefix cache.", s.cached_tokens),
            ("generated_tokens", "Tokens generated.", s.generated_tokens),
            ("preemptions", "Requests put back to make room in the KV cache.", s.preemptions),
            ("engine_steps", "Steps computed.", s.steps),
            ("engine_step_seconds", "Time spent in steps.", s.step_seconds),
        ):
            yield CounterMetricFamily(f"perilune_{name}", text, value=value)
        yield from self._tiers(s)
        yield from self._drafts(s)

    @staticmethod
    def _tiers(s: EngineStats) -> Iterable[Metric]:
        hits = CounterMetricFamily("perilune_kv_tier_hit_tokens", "Prompt tokens taken from a tier.", labels=["tier"])
        held = GaugeMetricFamily("perilune_kv_tier_blocks", "KV blocks that a tier holds.", labels=["tier"])
        for name, tokens, blocks, _ in s.tiers:
            hits.add_metric([name], tokens)
            held.add_metric([name], blocks)
        yield hits
        yield held
        for name, text, value in (
            ("kv_restore_seconds", "Time that restores from KV tiers took.", s.restore_seconds),
            ("kv_blocks_dropped", "Evicted KV blocks for which no tier had room.", s.blocks_dropped),
            ("kv_blocks_damaged", "Stored KV blocks found damaged or missing.", s.blocks_damaged),
        ):
            yield CounterMetricFamily(f"perilune_{name}", text, value=value)
        text = "Time saved by restoring KV instead of computing it, as estimated."
        yield GaugeMetricFamily("perilune_kv_saved_seconds", text, value=s.saved_seconds)

    @staticmethod
    def _drafts(s: EngineStats) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "perilune_verified_steps", "Shares of steps that had drafts: one request in one step.", value=s.verified
        )
        drafted = CounterMetricFamily(
            "perilune_drafted_tokens", "Tokens guessed ahead, by source and position.", labels=["source", "position"]
        )
        accepted = CounterMetricFamily(
            "perilune_accepted_tokens", "Of these, the ones that were right.", labels=["source", "position"]
        )
        right = 0
        for source, position, count, hits in s.drafts:
            drafted.add_metric([source, str(position + 1)], count)
            accepted.add_metric([source, str(position + 1)], hits)
            right += hits
        yield drafted
        yield accepted
        length = 1 + right / s.verified if s.verified else 1.0
        yield GaugeMetricFamily(
            "perilune_acceptance_length", "Tokens per share of a step that had drafts, since the start.", value=length
        )
