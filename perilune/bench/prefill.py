"""Time per layer of a prompt computed in one engine step, on the exact shapes of a large model with random weights.

As in microscope.py, two engines on the same weights, `STEP` layers apart, and the difference of their steps. A prompt
may continue a prefix with KV in the cache already. The floor is the larger of two times: the layer's products and
causal attention at the rate of the tensor cores, and the bytes of its weights at the memory bandwidth.

Both engines compute prompts without a pause for `WARM_SECONDS` before prompts are timed or kernels traced: an idle GPU
starts at a clock that its power limit does not allow for long. With pauses the shorter steps would have a higher clock,
and the difference would also count the time that the rest of the model loses at the lower clock.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perilune.bench import ledger
from perilune.bench.microscope import CEILING_TB_S, CEILING_TFLOP_S, STEP, Bench, Report
from perilune.bench.shapes import shape
from perilune.core import cost
from perilune.core.errors import EngineError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.model.config import KimiConfig
from perilune.model.weights import Int4CompactExperts, Int4Experts, Layer, Moe, Weights
from perilune.ops.harness import power

BLOCK = 64  # tokens of a cache block
PROMPTS = 5  # least number of prompts: the first warms up, the others are timed
WARM_SECONDS = 0.25  # of prompts in a row before timed ones: a GPU reaches its power limit after some 0.04 s
TIMED_SECONDS = 0.25  # time more than PROMPTS - 1 prompts if they take less than this
TRACED_SEED = 1 << 20  # of the traced prompts
MARK = "plan_kernel"  # the first kernel of a layer's experts
FORMATS = ("int4-g32", "int4-compact")
RESTS = ("bf16", "fp8", "w8a8")


def measure(
    bench: Bench,
    tokens: int,
    report: Report,
    *,
    cached: int = 0,
    expert_format: str = FORMATS[0],
    rest: str = RESTS[0],
    kernels: bool = False,
    ops: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One row of the ledger: a prompt of `tokens` in one step, after a prefix of `cached` tokens. `rest` "fp8", or
    "w8a8", which also rounds prompts' activations, converts the bench's weights in place. `ops`: {op: implementation}
    instead of the usual choice; the row names them. With `bench.power`, energy is measured too, and compared with the
    least at the power limit: with w8a8, all products but those of routed experts count as e4m3."""
    assert cached % BLOCK == 0 and expert_format in FORMATS and rest in RESTS, f"{cached=} {expert_format=} {rest=}"
    if expert_format == "int4-compact":
        bench = copy.copy(bench)
        bench.weights = compacted(bench.weights)
    ms, joules, roof = {}, {}, bench.power
    for layers in (bench.layers, bench.layers - STEP):
        engine = bench.engine(
            layers,
            max_num_seqs=1,
            max_model_len=cached + tokens + BLOCK,
            max_step_tokens=tokens,
            kv_blocks=(cached + 2 * tokens) // BLOCK + 4,
            block_size=BLOCK,
            prefix_cache=cached > 0,
            ops=dict(ops or {}),
            **rest_settings(rest),
        )
        try:
            prefix = random_prompt(engine, cached, 0)
            engine.scheduler.adopt(prefix)
            with power.Meter() if roof else contextlib.nullcontext() as meter:
                seconds, span = _sustained_seconds(
                    engine, prefix, tokens, power.TIMED_SECONDS if roof else TIMED_SECONDS
                )
            ms[layers] = seconds * 1e3
            joules[layers] = seconds * meter.watts(*span) if meter else 0.0
            if kernels and layers == bench.layers:
                others = range(TRACED_SEED, TRACED_SEED + 1 + math.ceil(WARM_SECONDS * 1e3 / ms[layers]))
                for line in step_kernels(engine, [prefix + random_prompt(engine, tokens, n) for n in others]):
                    report(line)
        finally:
            engine.close()
    per_layer = (ms[bench.layers] - ms[bench.layers - STEP]) / STEP
    c = shape(bench.name, bench.layers)
    touched = c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** tokens)
    read = bench.layer_bytes(touched, 1, cached + tokens) / CEILING_TB_S / 1e9
    flops = layer_flops(c, tokens, cached)
    floor = max(flops / CEILING_TFLOP_S / 1e9, read)
    flops8 = flops - routed_flops(c, tokens) if rest == "w8a8" else 0.0
    least = roof.seconds(flops - flops8, flops8, read * CEILING_TB_S * 1e9) * 1e3 if roof else 0.0
    row = {
        "bench": "prefill",
        "shape": bench.name,
        "layers": bench.layers,
        "tp": 1,
        "ep": 1,
        "tokens": tokens,
        "cached": cached,
        "expert_format": expert_format,
        "rest_dtype": rest,
        "kv_dtype": "bf16",
        **({"ops": dict(ops)} if ops else {}),
        "ms_per_layer": round(per_layer, 3),
        "floor_ms_per_layer": round(floor, 3),
        "fraction": round(floor / per_layer, 4),
        "tflops": round(flops / per_layer / 1e9, 1),
        "step_ms": round(ms[bench.layers], 3),
        "tokens_per_s": round(tokens / ms[bench.layers] * 1e3, 1),
        "ceiling_tflops": CEILING_TFLOP_S,
        "measured_tflops": round(bench.product_tflop_s, 1),
        **(_at_the_limit(roof, joules, per_layer, least) if roof else {}),
        "method": f"(step of {bench.layers} layers - step of {bench.layers - STEP}) / {STEP}, medians of prompts on "
        f"end after {WARM_SECONDS} s of them; random zero-mean weights and KV",
        **ledger.circumstances(),
    }
    behind = f" behind {cached}" if cached else ""
    report(
        f"prefill {tokens}{behind}, {expert_format}, rest {rest}: {per_layer:.2f} ms per layer, floor {floor:.2f} "
        f"({100 * floor / per_layer:.0f} %), {row['tflops']} TFLOP/s"
    )
    if roof:
        report(
            f"  {row['joules_per_layer']} J; at least {row['least_ms_at_limit']} ms at {roof.limit:.0f} W "
            f"({100 * row['fraction_at_limit']:.0f} %)"
        )
    return row


def _at_the_limit(roof: power.Roof, joules: Mapping[int, float], per_layer: float, least: float) -> dict[str, float]:
    """What a row says of energy. joules: of a step, by its number of layers; per_layer, least: ms of a layer."""
    many, few = max(joules), min(joules)
    return {
        "joules_per_layer": round((joules[many] - joules[few]) / (many - few), 3),
        "least_ms_at_limit": round(least, 3),
        "fraction_at_limit": round(least / per_layer, 4),
        "limit_watts": roof.limit,
        "idle_watts": round(roof.idle, 1),
        "joules_per_tera_flop": round(roof.tera_flop, 4),
        "joules_per_tera_flop8": round(roof.tera_flop8, 4),
        "joules_per_gigabyte": round(roof.gigabyte, 4),
    }


def layer_flops(c: KimiConfig, tokens: int, cached: int = 0) -> float:
    """FLOPs of one MoE layer: its matrix products, and causal attention in the plain (not absorbed) form."""
    d, h = c.hidden_size, c.num_attention_heads
    qkv = d * (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim) + c.q_lora_rank * h * c.qk_head_dim
    shared = 3 * d * c.moe_intermediate_size * c.n_shared_experts
    per_token = qkv + d * h * c.v_head_dim + d * c.n_routed_experts + shared
    sizes = (h, c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim)
    return (
        2.0 * tokens * per_token
        + routed_flops(c, tokens)
        + cost.mla_prefill([tokens], [cached + tokens], *sizes, size=2).flops
    )


def routed_flops(c: KimiConfig, tokens: int) -> float:
    return 2.0 * tokens * 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts_per_tok


def compacted(weights: Weights) -> Weights:
    """`weights` with random compact scales instead: 8 bits per group, and a bfloat16 scale per row."""

    def scales(wide: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = torch.empty(wide.shape, dtype=torch.uint8, device=wide.device).random_(85, 256)
        row = torch.empty(wide.shape[:-1], dtype=torch.bfloat16, device=wide.device)
        return narrow, row.uniform_(0.2 * width**-0.5, 0.4 * width**-0.5)

    def layer(old: Layer) -> Layer:
        if not isinstance(old.ffn, Moe):
            return old
        e = old.ffn.experts
        assert isinstance(e, Int4Experts)
        upper, lower = e.gate_up_packed.shape[-1] * 8, e.down_packed.shape[-1] * 8
        made = Int4CompactExperts(
            e.gate_up_packed, *scales(e.gate_up_scale, upper), e.down_packed, *scales(e.down_scale, lower)
        )
        return dataclasses.replace(old, ffn=dataclasses.replace(old.ffn, experts=made))

    return dataclasses.replace(weights, layers=[layer(old) for old in weights.layers])


def rest_settings(rest: str) -> dict[str, Any]:
    """Keys of EngineConfig for one of RESTS."""
    return {"rest_dtype": "dtype" if rest == "bf16" else "fp8", "fp8_activations": rest == "w8a8"}


def random_prompt(engine: Engine, tokens: int, seed: int) -> tuple[int, ...]:
    """`tokens` token ids, the same for a seed."""
    rng = random.Random(seed)
    return tuple(rng.randrange(engine.info.vocab_size) for _ in range(tokens))


def _sustained_seconds(
    engine: Engine, prefix: tuple[int, ...], tokens: int, timed_seconds: float
) -> tuple[float, tuple[float, float]]:
    """Median seconds of a prompt among consecutive ones; begin of the first, end of the last (time.perf_counter)."""

    def some(first: int, count: int) -> list[float]:
        return _seconds(engine, [prefix + random_prompt(engine, tokens, first + n) for n in range(count)])

    some(1, 1)  # compiles kernels
    (about,) = some(2, 1)
    warm, timed = (math.ceil(s / about) for s in (WARM_SECONDS, timed_seconds))
    seconds = some(3, warm + max(timed, PROMPTS - 1))[warm:]
    end = time.perf_counter()
    return statistics.median(seconds), (end - sum(seconds), end)


def _seconds(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[float]:
    """Submits all prompts, then computes them one after the other; for each, seconds from the end of the one before."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        engine.submit(Submit(rid, prompt, params))
    engine.runner.call(torch.cuda.synchronize)
    ends = [time.perf_counter()]
    while engine.busy:
        for delta in engine.step():
            if delta.error:
                raise EngineError(f"the measured prompt fails: {delta.error}")
            if delta.tokens:
                ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends)]


def step_kernels(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[str]:
    """The time that each kernel adds to the last prompt, from its predecessor's end to its own: each kernel after the
    experts of the last MoE layer but one, up to the experts of the last; and the sums of earlier layers. All prompts
    are traced, because the GPU pauses when a trace starts.

    "idle" is the part in which no kernel ran, because the host was late or a kernel was being started.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _seconds(engine, prompts)
        engine.runner.call(torch.cuda.synchronize)
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # a re-export
    events = [e for e in profile.events() if e.device_type == cuda]
    spans = sorted((e.time_range.end, e.time_range.start, e.name) for e in events)
    marks = [i for i, (*_, name) in enumerate(spans) if MARK in name]
    marks = marks[-(len(marks) // len(prompts)) :]  # of the last prompt
    if len(marks) < 2:
        return [f"(no breakdown: {MARK} is not among the {len(spans)} kernels of the trace)"]
    first, last = marks[-2], marks[-1]
    ends = [spans[i - 1][0] for i in marks]
    sums = ", ".join(f"{after - before:.0f}" for before, after in itertools.pairwise(ends))
    lines, idle = [], 0.0
    for i in range(first, last):
        end, start, name = spans[i]
        waited = max(0.0, start - spans[i - 1][0])
        idle += waited
        lines.append(f"  {end - spans[i - 1][0]:9.1f} us (idle {waited:6.1f})  {name[:110]}")
    title = (
        f"from one layer's experts to the next one's: {sums} us; the last: {last - first} kernels, idle {idle:.0f} us"
    )
    return [title, *lines]
