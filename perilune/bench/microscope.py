"""Time per layer of the engine's own decode step, on the exact shapes of a large model with random weights.

A whole Kimi K2 does not fit one GPU; a slice of its layers does. The engine is built twice on the same weights, with n
and with n - 4 layers, and decodes from a context already in its cache. The difference of the two decode graphs' replay
times, divided by four, is one MoE layer: the cost of embedding and head cancels. Weights, activations and KV are
random and zero-mean, so routing is near uniform; the distinct experts a step really touches are counted and reported.
"""

import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from perilune.bench import ledger
from perilune.bench.shapes import shape
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError, EngineError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.dist.slicing import Slicing
from perilune.engine import exclusive_kernels
from perilune.engine.engine import Engine
from perilune.formats import int4_compact
from perilune.loading import fp8_latents
from perilune.loading.synthetic import random_weights
from perilune.model import kimi_k2
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import Step
from perilune.model.weights import Int4CompactExperts, Int4Experts, Moe, Weights
from perilune.ops.attention import mla_decode_output, mla_pre_attention, mla_project_query
from perilune.ops.exchange import peers
from perilune.ops.harness import power
from perilune.ops.harness.timing import measure_roof
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Attention
from perilune.ops.moe import router

STEP = 4  # layers between the two engines
CEILING_TB_S = 4.3  # of one H200, read only: the floor of every row is bytes / CEILING_TB_S
CEILING_TFLOP_S = 790.0
BALANCED = 0.97  # share of the distinct experts of uniform routing below which a row is marked as not balanced
DRAWS, REPLAYS = 24, 2  # rounds with new tokens; timed replays of a graph in a round
STEPS = 24
WARM_UP = 6
LAYER = "the last MoE layer"
TRACED = 12  # replays under the profiler

SHARED_OUT = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")

Report = Callable[[str], None]


class Replayable(Protocol):
    """A CUDA graph."""

    @property
    def replay(self) -> Callable[[], None]: ...


class Timed(Replayable, Protocol):
    """A CUDA graph of a decode step."""

    @property
    def step(self) -> Step: ...


class Bench:
    """Weights of `layers` layers, generated once; engines on all of them or on fewer."""

    def __init__(self, name: str, layers: int, *, ranks: int = 1, expert_format: str = "int4-g32") -> None:
        """`ranks`: measure the slice of one of so many tensor-parallel ranks; its exchanges are with memory of this GPU
        instead of with other ranks. ConfigError if it cannot be measured."""
        if not torch.cuda.is_available():
            raise ConfigError(
                "measuring a model's full shapes needs a CUDA device: bench decode without --shape runs on CPU"
            )
        if layers <= STEP + 1:
            raise ConfigError(f"layers must be above {STEP + 1}: the difference to {STEP} fewer is what is measured")
        self.name, self.layers, self.ranks, self.expert_format = name, layers, ranks, expert_format
        self.device = torch.device("cuda")
        self.weights = random_weights(self.config(layers), dtype=torch.bfloat16, device=self.device)
        if expert_format == "int4-compact":
            for layer in self.weights.layers:
                if isinstance(layer.ffn, Moe) and isinstance(layer.ffn.experts, Int4Experts):
                    layer.ffn.experts = _compact(layer.ffn.experts)
        self.peers = peers.loopback(ranks, self.device) if ranks > 1 else None
        roof = measure_roof(self.device, torch.bfloat16)
        self.read_tb_s, self.product_tflop_s = roof.bandwidth / 1e12, roof.flop_rate / 1e12
        self.power: power.Roof | None = None

    def config(self, layers: int) -> KimiConfig:
        return slice_of(shape(self.name, layers), self.ranks)

    def engine(self, layers: int, **config: Any) -> Engine:
        cut = dataclasses.replace(self.weights, layers=self.weights.layers[:layers])

        def source(path: Path, **_: Any) -> tuple[KimiConfig, Weights]:
            return self.config(layers), cut

        engine = Engine(
            Path(self.name), build(EngineConfig, {"device": "cuda", "seed": 1, "draft": "off", **config}), source=source
        )
        if self.peers is not None:
            engine.runner.model.peers = self.peers
            assert engine.runner.graphs is not None
            engine.runner.call(engine.runner.graphs.close)  # captured at the start, without peers
        exclusive_kernels.release(engine.runner)  # several engines exist, but only one runs at a time
        engine.runner.call(_fill, engine.runner.pages.data, self.config(layers).kv_lora_rank)
        return engine

    def layer_bytes(self, distinct: float, batch: int, context: int, kv_dtype: torch.dtype = torch.bfloat16) -> float:
        """Bytes that one MoE layer must read in a decode step."""
        layer = self.weights.layers[-1]
        assert isinstance(layer.ffn, Moe)
        a = layer.attention
        unread = sum(t.nbytes for t in _tensors(a.w_uv if _reads_uv_fp8(a, batch) else a.uv_fp8))
        experts = sum(t.nbytes for t in _tensors(layer.ffn.experts))
        c = self.config(self.layers)
        kv = batch * context * latent_cache.width(c.kv_lora_rank, c.qk_rope_head_dim, kv_dtype) * kv_dtype.itemsize
        return sum(t.nbytes for t in _tensors(layer)) - unread - experts * (1 - distinct / c.n_routed_experts) + kv

    def layer_reads(
        self, distinct: float, batch: int, context: int, kv_dtype: torch.dtype = torch.bfloat16
    ) -> list[tuple[str, float]]:
        """(operation, bytes it must read) of one MoE layer's kernels in order, from the previous layer's experts on."""
        layer = self.weights.layers[-1]
        a, moe = layer.attention, layer.ffn
        assert isinstance(moe, Moe) and isinstance(moe.experts, Int4Experts | Int4CompactExperts)
        assert moe.shared is not None
        c, (gate_up, down) = self.config(self.layers), moe.experts.matrices
        hit = distinct / c.n_routed_experts
        kv = batch * context * latent_cache.width(c.kv_lora_rank, c.qk_rope_head_dim, kv_dtype) * kv_dtype.itemsize

        def size(*trees: object) -> float:
            return sum(t.nbytes for tree in trees for t in _tensors(tree))

        fp8 = _reads_uv_fp8(a, batch)
        w_uv = a.uv_fp8 if fp8 else a.w_uv
        many = batch > router.MAX_ROWS  # then the shared expert and the router's gate have kernels of their own
        return [
            *([("shared gate and up", size(moe.shared.gate_up))] if many else []),
            *([("silu", 0.0)] if many and moe.shared.gate_up.format == "dense" else []),
            *([("shared down", size(moe.shared.down))] if many else []),
            *(
                [("norm, qkv_a, q_b, W_UK", size(a.qkv_a, a.q_b, a.w_uk))]
                if batch <= mla_pre_attention.MOST_TOKENS
                else [
                    ("norm", 0.0),
                    ("qkv_a", size(a.qkv_a)),
                    *(
                        [("q_b, W_UK, KV write", size(a.q_b, a.w_uk))]
                        if batch <= mla_project_query.FEW_TOKENS
                        else [
                            *([("norm of q", 0.0)] if many else []),
                            ("q_b" if many else "q_b, with its norm", size(a.q_b)),
                            ("rope, KV write, W_UK", size(a.w_uk)),
                        ]
                    ),
                ]
            ),
            ("attention", float(kv)),
            *(
                [("combine, W_UV, o", size(w_uv, a.o))]
                if batch == 1 or fp8
                else [("combine, W_UV", size(w_uv)), ("o", size(a.o))]
            ),
            *(
                [("norm, router, choice", size(moe.gate))]
                if batch == 1
                else [
                    ("norm", 0.0),
                    *([("gate", size(moe.gate)), ("choice", 0.0)] if many else [("router, choice", size(moe.gate))]),
                ]
            ),
            ("gate and up", hit * gate_up.nbytes + (0 if many else size(moe.shared.gate_up))),
            ("down", hit * down.nbytes + (0 if many else size(moe.shared.down))),
        ]

    def decode(
        self,
        batch: int,
        context: int,
        report: Report,
        *,
        kernels: bool = False,
        rest_dtype: str = "dtype",
        kv_dtype: str = "auto",
    ) -> dict[str, Any]:
        """One row of the ledger. rest_dtype "fp8" converts the bench's weights in place."""
        whole_ms, distinct, test_ms = 0.0, 0.0, 0.0
        with contextlib.ExitStack() as opened:
            graphs = {}
            for layers in (self.layers, self.layers - STEP):
                engine = self.engine(
                    layers,
                    max_num_seqs=batch,
                    max_model_len=context + STEPS + 64,
                    kv_blocks=batch * (-(-(context + STEPS + 64) // 64) + 1),
                    block_size=64,
                    rest_dtype=rest_dtype,
                    kv_dtype=kv_dtype,
                )
                opened.callback(engine.close)
                start(engine, batch, context, STEPS + 48)
                taken = step_ms(engine)
                if layers == self.layers:
                    whole_ms = taken
                    distinct = distinct_experts(engine)
                    engine.step()  # back on the graph
                engine.runner.call(_scatter, engine)
                assert engine.runner.graphs is not None
                graphs[layers] = engine.runner.graphs.latest()
                test_ms = max(test_ms, engine.runner.graphs.recorder.longest_test_seconds * 1e3)
            # Alternate them: at the GPU's power limit, the clock depends on the kernels that ran before.
            times = engine.runner.call(replays_ms, list(graphs.values()), engine.info.vocab_size)
            graph_ms = dict(zip(graphs, times))
            if kernels:
                reads = self.layer_reads(distinct, batch, context, engine.runner.pages.data.dtype)
                for line in breakdown(replays_of(graphs[self.layers]), reads):
                    report(line)
        us = (graph_ms[self.layers] - graph_ms[self.layers - STEP]) / STEP * 1e3
        stored = latent_cache.PACKED if kv_dtype == "fp8" else torch.bfloat16
        floor = self.layer_bytes(distinct, batch, context, stored) / CEILING_TB_S / 1e6
        row = {
            "bench": "decode",
            "shape": self.name,
            "layers": self.layers,
            "tp": self.ranks,
            "ep": 1,
            **({"slice": self.ranks} if self.peers else {}),
            "exchange": "local-copy" if self.peers else "none",
            "batch": batch,
            "context": context,
            "draft": 0,
            "expert_format": self.expert_format,
            "rest_dtype": "bf16" if rest_dtype == "dtype" else rest_dtype,
            "kv_dtype": "fp8" if kv_dtype == "fp8" else "bf16",
            "us_per_layer": round(us, 1),
            "floor_us_per_layer": round(floor, 1),
            "fraction": round(floor / us, 4),
            "outside_us": round(graph_ms[self.layers] * 1e3 - us * (self.layers - 1), 1),
            "self_test_ms": round(test_ms, 2),
            "step_ms": round(whole_ms, 4),
            "tokens_per_s": round(batch / whole_ms * 1e3, 1),
            "acceptance_length": 1.0,
            "acceptance": "measured",
            "draft_ms": 0.0,
            "distinct_experts": round(distinct, 2),
            "balanced": balanced(self.config(self.layers), distinct, batch),
            "ceiling_tb_s": CEILING_TB_S,
            "measured_read_tb_s": round(self.read_tb_s, 3),
            "method": f"(graph of {self.layers} layers - of {self.layers - STEP}) / {STEP}, medians of {DRAWS} draws, "
            f"{REPLAYS} replays on end, in turns; step: median of {STEPS} with {self.layers} layers; "
            "random weights, KV",
            **ledger.circumstances(),
        }
        report(
            f"batch {batch:>3}, context {context:>6}: {us:8.1f} us per layer, floor {floor:7.1f} "
            f"({100 * floor / us:.0f} %), {distinct:.1f} distinct experts, outside the layers "
            f"{row['outside_us']} us, step {whole_ms:.3f} ms"
            + ("" if row["balanced"] else "  NOT BALANCED: does not count")
        )
        return row


def slice_of(whole: KimiConfig, ranks: int) -> KimiConfig:
    """The model of one of `ranks` tensor-parallel ranks: a part of heads, widths and vocabulary, all else whole.
    ConfigError if they cannot be split evenly."""
    return dataclasses.replace(
        whole, **{name: Slicing(0, ranks).part(getattr(whole, name)).stop for name in SHARED_OUT}
    )


def _compact(e: Int4Experts) -> Int4CompactExperts:
    return Int4CompactExperts(
        e.gate_up_packed, *int4_compact.compact(e.gate_up_scale), e.down_packed, *int4_compact.compact(e.down_scale)
    )


def _fill(pages: Tensor, latent: int) -> None:
    """Random rows, with no NaN among them."""
    if pages.dtype != latent_cache.PACKED:
        pages.normal_()
        return
    for page in pages:
        values = torch.randn(*page.shape[:-1], latent + (page.shape[-1] - latent) // 2, device=page.device)
        page.copy_(
            latent_cache.pack(values[..., :latent] * fp8_latents.constant(latent), values[..., latent:], page.dtype)
        )


def start(engine: Engine, batch: int, context: int, tokens: int) -> None:
    """`batch` requests in the middle of decoding at `context`: all but the end of their prompts is in the cache. They
    have up to `tokens` to decode. EngineError if one fails."""
    rng = random.Random(7)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for rid in range(batch):
        prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(context))
        engine.scheduler.adopt(prompt[:-1])
        engine.submit(Submit(rid, prompt, params))
    waiting = set(range(batch))
    while waiting:
        deltas = engine.step()
        if errors := [d.error for d in deltas if d.error]:
            raise EngineError(f"the measured requests fail: {errors[0]}")
        waiting -= {d.rid for d in deltas if d.tokens}


def step_ms(engine: Engine, *, scattered: bool = True) -> float:
    """Median of STEPS engine steps, from the end of one to the end of the next, so that all time counts.

    `scattered`: the runner's buffers, from which a step takes tokens that the host does not know, get random tokens.
    """
    ends = []
    for turn in range(WARM_UP + STEPS):
        if scattered:
            engine.runner.call(_scatter, engine)
        engine.step()
        if turn >= WARM_UP - 1:
            ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(ends)) * 1e3


def _scatter(engine: Engine) -> None:
    """New random last tokens and drafts for every request: greedy requests of a random model, and drafts of a random
    draft model, would soon all be the same."""
    assert engine.runner.graphs is not None
    with torch.inference_mode():
        for tokens in (engine.runner.last_tokens, engine.runner.graphs.draft_buffer):
            tokens.random_(0, engine.info.vocab_size)


def _reads_uv_fp8(w: Attention, batch: int) -> bool:
    return w.uv_fp8 is not None and batch <= mla_decode_output.MMA_TOKENS


def balanced(c: KimiConfig, distinct: float, tokens: int) -> bool:
    """Whether a step of `tokens` tokens chose about as many distinct experts per layer as uniform routing would."""
    return distinct >= BALANCED * c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** tokens)


def distinct_experts(engine: Engine, *, scattered: bool = True) -> float:
    """Mean distinct experts per MoE layer of the next step, which runs without its graph; `scattered` as `step_ms`."""
    seen: list[Tensor] = []
    choosing = {name: getattr(kimi_k2, name) for name in ("router", "mla_decode_router", "mla_merge_router")}

    def recording(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            made = real(*args)
            seen.append((made[1] if isinstance(made, tuple) else made).ids)
            return made

        return run

    engine.step()
    if scattered:
        engine.runner.call(_scatter, engine)
    graphs = engine.runner.graphs
    assert graphs is not None
    graphs.broken = "counting experts"
    for name, real in choosing.items():
        setattr(kimi_k2, name, recording(real))
    try:
        engine.step()
        engine.runner.call(torch.cuda.synchronize)
    finally:
        for name, real in choosing.items():
            setattr(kimi_k2, name, real)
        graphs.broken = None
    return statistics.mean(len(set(ids.flatten().tolist())) for ids in seen)


def replays_ms(graphs: Sequence[Timed], vocab_size: int) -> list[float]:
    """Milliseconds per replay of each graph, medians over DRAWS rounds. A round replays each graph REPLAYS times in a
    row, as steps follow each other, all on the same new random tokens: the choice of experts changes a step's time by
    about 2 %."""
    most = max(len(graph.step.tokens) for graph in graphs)
    device = graphs[0].step.tokens.device
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(1 + DRAWS):
        with torch.inference_mode():
            tokens = torch.randint(vocab_size, (most,), device=device)
            for graph in graphs:
                graph.step.tokens.copy_(tokens[: len(graph.step.tokens)])
        events = []
        for graph in graphs:
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            events.append((begin, end))
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
        torch.cuda.synchronize(device)
        for own, (begin, end) in zip(times, events):
            own.append(begin.elapsed_time(end) / REPLAYS)
    return [statistics.median(own[1:]) for own in times]


def replays_of(graph: Replayable) -> Callable[[], int]:
    """A function that replays a graph TRACED times, and returns TRACED."""

    def replay() -> int:
        for _ in range(TRACED):
            graph.replay()
        return TRACED

    return replay


def breakdown(replay: Callable[[], int], reads: list[tuple[str, float]]) -> list[str]:
    """The time each kernel adds, from its predecessor's end to its own: before the MoE layers, in the last one, after
    it. `replay` replays a graph and returns how often.

    A kernel's own span would count its wait for its predecessor, during which it already loads weights. Runs on the
    main thread, because the profiler does; the compute thread is idle.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        traced = replay()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # a re-export
    events = [e for e in profile.events() if e.device_type == cuda]
    often = Counter(e.name for e in events)
    # Keep kernels that ran a multiple of `traced` times: those of the graph, not those between replays.
    spans = sorted((e.time_range.end, e.name) for e in events if often[e.name] % traced == 0)
    count, rest = divmod(len(spans), traced)
    names = [name for _, name in spans[:count]]
    if rest or not count or names != [name for _, name in spans[count : 2 * count]]:
        return [f"(no breakdown: {len(spans)} kernels in {traced} replays, not the same in each)"]
    ends = [end for end, _ in spans]
    gaps = [
        statistics.median(ends[turn * count + i] - ends[turn * count + i - 1] for turn in range(1, traced))
        for i in range(count)
    ]
    routers = [i for i, name in enumerate(names) if "router" in name]
    if len(routers) < 2:
        return ["(no breakdown: no router kernels in the trace)"]
    length = routers[-1] - routers[-2]
    experts = sum("moe_int4" in name for name in names[routers[-1] + 1 : routers[-1] + 3]) or 2  # kernels of a layer
    first, last = routers[0] + 1 + experts, routers[-1] + 1 + experts - length
    parts = (
        ("before the MoE layers", 0, first),
        (LAYER, last, last + length),
        ("after", last + length, count),
    )
    if experts == 1:
        reads = [*reads[:-2], ("gate, up and down", reads[-2][1] + reads[-1][1])]
    lines = []
    for title, begin, end in parts:
        lines.append(f"{title}: {sum(gaps[begin:end]):.1f} us, {end - begin} kernels")
        known = reads if title == LAYER and end - begin == len(reads) else [("", 0.0)] * (end - begin)
        lines += [described(gaps[i], names[i], *what) for i, what in zip(range(begin, end), known)]
    return lines


def described(us: float, kernel: str, what: str, nbytes: float) -> str:
    """A line of the breakdown; with the rate if the kernel reads more than 1 MB."""
    rate = f"{nbytes / us / 1e6:5.2f} TB/s" if nbytes > 1e6 else " " * 10
    return f"  {us:8.2f} us {rate}  {what:<22} {kernel[:70]}"


def _tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if hasattr(tree, "__dataclass_fields__"):
        return [t for name in tree.__dataclass_fields__ for t in _tensors(getattr(tree, name))]
    return []
