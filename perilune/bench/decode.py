"""Decode speed of the engine that serves, and its ceiling.

The ceiling of a step is the time to read its bytes once: every weight a token needs (for the experts: the expected
number of distinct ones), and the KV of each request, at the read rate measured in the same run. On CPU that rate is
measured on a buffer as large as the model's weights, because a small model fits the processor's cache.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perilune.bench import ledger
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.engine.graphs.decode import Graph
from perilune.model.kimi_k2 import KimiK2
from perilune.model.weights import DenseExperts, Fp8Experts, Int4CompactExperts, Int4Experts, Moe, NvFp4Experts
from perilune.ops.harness.timing import measure_roof

REPLAYS = 20  # consecutive replays of a step's graph that are timed together


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes a decode step reads: `always` whatever the routing, `per_expert` for each distinct expert and layer."""

    always: int
    per_expert: int
    moe_layers: int
    routed: int
    top_k: int
    kv_per_token: int

    def distinct(self, tokens: int) -> float:
        """Expected distinct experts per layer when `tokens` route independently and uniformly."""
        return self.routed * (1 - (1 - self.top_k / self.routed) ** tokens)

    def step_bytes(self, batch: int, context: int) -> float:
        experts = self.moe_layers * self.distinct(batch) * self.per_expert
        return self.always + experts + batch * context * self.kv_per_token


def footprint(model: KimiK2, pages: torch.Tensor) -> Footprint:
    weights, config = model.weights, model.config
    moe = [layer.ffn for layer in weights.layers if isinstance(layer.ffn, Moe)]
    expert_bytes = sum(_bytes(m.experts) for m in moe)
    # A step reads one row of the embedding per token, which is negligible.
    return Footprint(
        always=_bytes(weights) - expert_bytes - weights.embed.nbytes,
        per_expert=expert_bytes // (len(moe) * config.n_routed_experts) if moe else 0,
        moe_layers=len(moe),
        routed=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        kv_per_token=pages.shape[0] * pages.shape[-1] * pages.element_size(),
    )


def read_rate(nbytes: int, device: torch.device) -> float:
    """Bytes per second of reading a buffer of `nbytes` over and over (a sum), the best of several tries; on a GPU the
    memory's rate, by the device's clock."""
    if device.type == "cuda":
        return measure_roof(device, torch.bfloat16).bandwidth
    buffer = torch.ones(max(nbytes // 4, 1 << 20), dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(30):
        begin = time.perf_counter()
        float(buffer.sum())
        best = max(best, buffer.nbytes / (time.perf_counter() - begin))
    return best


def measure(
    model_dir: Path,
    config: EngineConfig,
    batches: list[int],
    contexts: list[int],
    tokens: int,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row per context and batch size: `batch` requests decode together from `context` random prompt tokens on."""
    engine = Engine(model_dir, config)
    try:
        info, runner = engine.info, engine.runner
        if (longest := max(contexts) + tokens) > info.max_model_len:
            raise ConfigError(f"context + tokens is {longest}, but the model holds {info.max_model_len}")
        if max(batches) > info.max_num_seqs:
            raise ConfigError(f"batch {max(batches)} is above max_num_seqs={info.max_num_seqs}: raise it")
        data = runner.pages.data
        foot = footprint(runner.model, data)
        foot = replace(foot, kv_per_token=foot.kv_per_token // info.kv_shards)
        # On the engine's compute thread: a second computing thread would slow every step (runner.compute_thread).
        least = foot.step_bytes(1, min(contexts))
        rate = runner.call(read_rate, int(least), data.device)
        report(f"ceiling: {rate / 1e9:.1f} GB/s read rate on {least / 1e6:.1f} MB")
        rows, common = [], described(engine)
        _time_steps(engine, max(batches), min(contexts), 8)  # warm-up: compilation, page faults, clocks
        for context, batch in itertools.product(contexts, batches):
            timed = _time_steps(engine, batch, context, tokens)
            step = timed.step
            middle = context + tokens // 2
            floor = foot.step_bytes(batch, middle) / rate
            row = {
                "bench": "decode",
                "model": info.model,
                **common,
                "batch": batch,
                "context": middle,
                "draft": engine.config.draft_tokens or 0,
                "draft_source": engine.config.draft,
                "acceptance_length": round(timed.accepted, 3),
                "acceptance": "measured",
                "draft_ms": round(timed.drafting * 1e3, 4),
                "distinct_experts": round(foot.distinct(batch), 2),
                "step_ms": round(step * 1e3, 4),
                "p99_over_median": round(timed.p99 / step, 3),
                "tokens_per_s": round(timed.tokens / step, 1),
                "floor_ms": round(floor * 1e3, 4),
                "fraction": round(floor / step, 4),
                "read_gb_per_s": round(rate / 1e9, 2),
                "prefill_tokens_per_s": round(batch * context / timed.prefill, 1),
                "method": f"median of {timed.steps} engine steps, all requests decoding, whole step with sampling",
                **_orders(engine, report),
                **_self_test(engine),
                **ledger.circumstances(info.tp),
            }
            bound = ""
            if timed.device is not None:
                row |= {"device_ms": round(timed.device * 1e3, 4), "host_ms": round(timed.host * 1e3, 4)}
                bound = "device" if timed.device > timed.host else "host"
                bound = f"{bound}-bound (device {row['device_ms']} ms, host {row['host_ms']} ms), "
            rows.append(row)
            report(
                f"batch {batch:>3}, context {middle}: {row['tokens_per_s']:>8} tok/s, step {row['step_ms']} ms, {bound}"
                f"{row['acceptance_length']} tokens per verified step, "
                f"floor {row['floor_ms']} ms, {100 * row['fraction']:.1f} % of the ceiling; "
                f"prompts {row['prefill_tokens_per_s']} tok/s"
            )
        return rows
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class _Timed:
    """Times, in seconds, of the steps in which all requests decode.

    prefill         until every request has its first token
    steps           their number: fewer than the tokens of a request if prompts took several steps, or with drafts
    step, tokens    median of a step, and mean of its tokens
    p99             99th percentile of a step; of up to 100 steps the longest
    accepted        mean tokens per request in steps with drafts
    drafting        time of making suffix drafts, per step
    host            median, over steps, of the time in which the engine's thread did not wait for the device
    device          a replay of the step's graph; None where there is none
    """

    prefill: float
    steps: int
    step: float
    p99: float
    tokens: float
    accepted: float
    drafting: float
    host: float
    device: float | None


def _time_steps(engine: Engine, batch: int, context: int, tokens: int) -> _Timed:
    rng = random.Random(batch * 7919 + context)
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    begin = time.perf_counter()
    for rid in range(batch):
        prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(context))
        engine.submit(Submit(rid, prompt, params))
    waiting, first, last, spans, hosts, sizes = set(range(batch)), 0.0, 0.0, [], [], []
    before, spent, graph = engine.stats(), engine.drafting_seconds, None
    while engine.busy:
        waited = engine.waiting_seconds
        deltas = [d for d in engine.step() if d.tokens]
        now = time.perf_counter()
        if not waiting and len(deltas) == batch:
            spans.append(now - last)
            hosts.append(spans[-1] - (engine.waiting_seconds - waited))
            sizes.append(sum(len(d.tokens) for d in deltas))
            if (
                len(spans) == tokens // 2
                and (graphs := engine.runner.graphs) is not None
                and len(graphs)
                and engine.info.tp == 1  # a replay on one rank would wait for the others
            ):
                graph = engine.runner.call(graphs.latest)
        if waiting:
            waiting -= {d.rid for d in deltas}
            first = now - begin
        last = now
    if not spans:
        raise ConfigError(f"{batch} requests never decode all at once for {tokens} tokens: raise --tokens")
    after = engine.stats()
    accepted = sum(a for *_, a in after.drafts) - sum(a for *_, a in before.drafts)
    verified, steps = after.verified - before.verified, after.steps - before.steps
    return _Timed(
        prefill=first,
        steps=len(spans),
        step=statistics.median(spans),
        p99=ledger.percentile(spans, 0.99),
        tokens=statistics.mean(sizes),
        accepted=1 + accepted / verified if verified else 1.0,
        drafting=(engine.drafting_seconds - spent) / steps,
        host=statistics.median(hosts),
        device=_device_seconds(engine, graph),
    )


def _orders(engine: Engine, report: Callable[[str], None]) -> dict[str, float]:
    """What several ranks add to a step, in us, since the last call: rank 0 encodes and sends its plan; the slowest
    other rank decodes it and queues the step."""
    if (costs := engine.order_costs()) is None:
        return {}
    report(
        f"orders: {costs.send * 1e6:.1f} us a step to send its plan to other ranks, {costs.decode * 1e6:.1f} to read it"
    )
    return {"order_send_us": round(costs.send * 1e6, 1), "order_read_us": round(costs.decode * 1e6, 1)}


def _self_test(engine: Engine) -> dict[str, float]:
    """The longest self-test of a CUDA graph since the start, on this rank: the first replay and its comparison."""
    graphs = engine.runner.graphs
    if graphs is None or not graphs.recorder.longest_test_seconds:
        return {}
    return {"self_test_ms": round(graphs.recorder.longest_test_seconds * 1e3, 2)}


def _device_seconds(engine: Engine, graph: Graph | None) -> float | None:
    """Seconds of a replay of `graph`, the one that ran last in the middle of the run. With several ranks: of the
    engine's last graph, which all ranks replay at once; None with drafts, because the last step has none."""
    if engine.info.tp > 1:
        return engine.runner.time_graph(REPLAYS) if engine.config.draft == "off" else None
    return None if graph is None else engine.runner.call(_replay_seconds, graph)


def _replay_seconds(graph: Graph) -> float:
    """Mean seconds of REPLAYS consecutive replays of a step's graph, by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "01")
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS / 1e3


_FORMATS = {
    DenseExperts: "dense",
    Int4Experts: "int4-g32",
    Int4CompactExperts: "int4-compact",
    Fp8Experts: "fp8-block",
    NvFp4Experts: "nvfp4",
}


def described(engine: Engine) -> dict[str, Any]:
    """The keys of rows that say how an engine holds its model and cache."""
    info, config, model = engine.info, engine.config, engine.runner.model
    foot = footprint(model, engine.runner.pages.data)
    weights = foot.always + model.weights.embed.nbytes + foot.per_expert * foot.moe_layers * foot.routed
    return {
        "layers": len(model.weights.layers),
        "tp": info.tp,
        "ep": info.ep,
        "exchange": engine.runner.group.name,
        "kv_layout": "sequence" if info.kv_shards > 1 else "replicated",
        "kv_dtype": config.kv_dtype,
        "expert_format": expert_format(model),
        "rest_dtype": "w8a8" if config.fp8_activations else "fp8" if config.rest_dtype == "fp8" else config.dtype,
        "kv_capacity_tokens": info.num_blocks * info.block_size,
        "weights_gb_per_gpu": round(weights / 1e9, 2),
    }


def expert_format(model: KimiK2) -> str:
    """The experts' format as ledger rows name it."""
    kinds = {type(layer.ffn.experts) for layer in model.weights.layers if isinstance(layer.ffn, Moe)}
    return "+".join(sorted(_FORMATS[kind] for kind in kinds)) or "none"


def _bytes(tree: object) -> int:
    return sum(t.nbytes for t in _tensors(tree))


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    """All tensors of nested weight records."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            yield from _tensors(getattr(tree, name))
