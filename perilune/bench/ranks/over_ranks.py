"""Time per layer of a large shape on real tensor-parallel ranks, exchanges included, with random weights.

The engine runs twice, with n layers and with a few less, each rank a process on a GPU of its own. One MoE layer is the
difference of the two decode graphs' replay times, or of the times of a prompt in one step, divided by the difference of
layers (microscope.py: one GPU). All ranks replay at once, because their graphs wait for each other. Tokens are random,
so routing is near uniform.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from perilune.bench import ledger
from perilune.bench.decode import described, footprint
from perilune.bench.microscope import CEILING_TB_S, CEILING_TFLOP_S, STEP, STEPS, WARM_UP, breakdown, slice_of
from perilune.bench.prefill import PROMPTS, layer_flops, random_prompt, step_kernels
from perilune.bench.shapes import shape
from perilune.cli.shared.synthetic import directory
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError, EngineError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.engine.graphs.replays import replays

ROUNDS = 24  # rounds of replays, each with new tokens

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one engine at one batch size: seconds of a replay on the device (None: no graphs), seconds of a step,
    and the bytes that rank 0 must read in a step."""

    device: float | None
    step: float
    nbytes: float


def measure(
    name: str,
    layers: int,
    config: Mapping[str, Any],
    batches: list[int],
    context: int,
    report: Report,
    *,
    kernels: bool = False,
) -> list[dict[str, Any]]:
    """One row for each batch size. `config`: keys of EngineConfig, with tp or ep. `kernels`: what each kernel of a
    layer adds on rank 0, its waits for other ranks included, is reported too."""
    _check(kernels)
    settings = {"max_num_seqs": max(batches), "max_model_len": context + WARM_UP + STEPS + 64, **config}
    found: list[dict[int, Timed]] = []
    common: dict[str, Any] = {}
    apart = _layer_difference(layers)
    for engine in _engines(name, layers, settings, report):
        engine.runner.zero(engine.info.num_blocks)  # KV of the prompts that are treated as cached
        own = dict[int, Timed]()
        for batch in batches:
            own[batch] = timed(engine, batch, context)
            if kernels and not common:
                report(f"batch {batch}:")
                for line in breakdown(partial(_replayed, engine), []):
                    report(line)
        found.append(own)
        common = common or common_keys(engine, name, layers)
    return [_row(common, found[0][b], found[1][b], (b, context, apart), report) for b in batches]


def prefill(
    name: str, layers: int, config: Mapping[str, Any], lengths: list[int], report: Report, *, kernels: bool = False
) -> list[dict[str, Any]]:
    """As `measure`: one row for each length of a prompt, which is computed in one step. `kernels`: what each kernel of
    a layer adds on rank 0, exchanges included, is reported too."""
    _check(kernels)
    longest = max(lengths)
    settings = {
        "max_num_seqs": 1,
        "max_model_len": longest + 64,
        "max_step_tokens": longest,
        "prefix_cache": False,
        **config,
    }
    found: list[dict[int, float]] = []
    common: dict[str, Any] = {}
    for engine in _engines(name, layers, settings, report):
        times = {n: [prompt_seconds(engine, n, turn) for turn in range(PROMPTS)] for n in lengths}
        found.append({n: statistics.median(taken[1:]) for n, taken in times.items()})
        if kernels and not common:
            for n in lengths:
                for line in step_kernels(engine, [random_prompt(engine, n, PROMPTS + 1)]):
                    report(line)
        common = common or common_keys(engine, name, layers)
    rows, apart = [], _layer_difference(layers)
    for n in lengths:
        ms = (found[0][n] - found[1][n]) / apart * 1e3
        flops = layer_flops(slice_of(shape(name, layers), common["tp"]), n)
        row = common | {
            "bench": "prefill",
            "tokens": n,
            "cached": 0,
            "ms_per_layer": round(ms, 3),
            "tflops": round(flops / ms / 1e9, 1),
            "fraction": round(flops / CEILING_TFLOP_S / 1e9 / ms, 4),
            "step_ms": round(found[0][n] * 1e3, 3),
            "tokens_per_s": round(n / found[0][n], 1),
            "ceiling_tflops": CEILING_TFLOP_S,
            "method": f"(step of {layers} layers - step of {layers - apart}) / {apart}, medians of {PROMPTS - 1} "
            "prompts; tflops of one rank; random weights",
            **ledger.circumstances(common["tp"]),
        }
        report(
            f"tp {row['tp']} ep {row['ep']} ({row['exchange']}), prefill {n}: {ms:.2f} ms per layer, {row['tflops']} "
            f"TFLOP/s on each rank ({100 * row['fraction']:.0f} % of {CEILING_TFLOP_S:.0f})"
        )
        rows.append(row)
    return rows


def _check(kernels: bool) -> None:
    if kernels and not torch.cuda.is_available():
        raise ConfigError("--kernels shows what runs on a GPU, and there is none here: leave it out")


def _replayed(engine: Engine) -> int:
    """Replays the last decode graph on all ranks, on rank 0 from the calling thread; returns the number of replays."""
    engine.runner.time_graph(1, on_caller=True)
    return replays(1)


def _layer_difference(layers: int) -> int:
    """How many fewer layers the second engine has."""
    if layers < 3:
        raise ConfigError(f"layers must be at least 3, not {layers}: the difference of two engines is measured")
    return min(STEP, (layers - 1) // 2)


def _engines(name: str, layers: int, config: Mapping[str, Any], report: Report) -> Iterator[Engine]:
    """An engine with all the layers, then one with fewer; each is closed when the next is asked for."""
    for count in (layers, layers - _layer_difference(layers)):
        with directory(name, count) as path:
            begin = time.perf_counter()
            engine = Engine(path, build(EngineConfig, {"seed": 1, "draft": "off", **config}))
            try:
                seconds, exchange = time.perf_counter() - begin, engine.runner.group.name
                report(f"{count} layers: started in {seconds:.1f} s, exchange {exchange}")
                yield engine
            finally:
                engine.close()


def prompt_seconds(engine: Engine, tokens: int, turn: int) -> float:
    """Seconds from submitting a prompt of `tokens` tokens to its first output token."""
    rng = random.Random(turn)
    prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(tokens))
    engine.submit(Submit(turn, prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
    begin = time.perf_counter()
    while engine.busy:
        if errors := [d.error for d in engine.step() if d.error]:
            raise EngineError(f"the measured prompt fails: {errors[0]}")
    return time.perf_counter() - begin


def common_keys(engine: Engine, name: str, layers: int) -> dict[str, Any]:
    return {
        "bench": "decode",
        "shape": name,
        **described(engine),
        "layers": layers,
        "draft": 0,
        "draft_ms": 0.0,
        "acceptance_length": 1.0,
        "acceptance": "measured",
        "ceiling_tb_s": CEILING_TB_S,
        "method": f"(graph of {layers} layers - graph of fewer) per layer, replayed on all ranks at once, medians of "
        f"{ROUNDS} rounds of random tokens; step: median of {STEPS} engine steps that sample with top_k 50; random "
        "weights; distinct_experts: expected",
    }


def _row(common: dict[str, Any], more: Timed, less: Timed, at: tuple[int, int, int], report: Report) -> dict[str, Any]:
    batch, context, apart = at
    on_device = more.device is not None and less.device is not None
    taken = [run.device if on_device and run.device is not None else run.step for run in (more, less)]
    us = (taken[0] - taken[1]) / apart * 1e6
    floor = (more.nbytes - less.nbytes) / apart / CEILING_TB_S / 1e6
    row = common | {
        "batch": batch,
        "context": context,
        "us_per_layer": round(us, 1),
        "floor_us_per_layer": round(floor, 1),
        "fraction": round(floor / us, 4),
        "outside_us": round(taken[0] * 1e6 - us * (common["layers"] - 1), 1),
        "graph_ms": round(taken[0] * 1e3, 4) if on_device else None,
        "step_ms": round(more.step * 1e3, 4),
        "tokens_per_s": round(batch / more.step, 1),
        **ledger.circumstances(common["tp"]),
    }
    report(
        f"tp {row['tp']} ep {row['ep']} ({row['exchange']}), batch {batch:>3}, context {context:>6}: {us:8.1f} us per "
        f"layer, floor {floor:7.1f} ({100 * floor / us:.0f} %), outside the layers {row['outside_us']} us, "
        f"step {row['step_ms']} ms"
    )
    return row


def timed(engine: Engine, batch: int, context: int, *, drafts: int = 0) -> Timed:
    """`batch` requests decode after `context` tokens, which are treated as cached; a step gives each up to 1 + `drafts`
    tokens."""
    rng, model = random.Random(batch), engine.runner.model
    vocabulary = model.config.vocab_size
    for rid in range(batch):
        prompt = tuple(rng.randrange(vocabulary) for _ in range(context))
        most = (WARM_UP + STEPS + 16) * (1 + drafts)
        params = SamplingParams(temperature=1.0, top_k=50, seed=rid, max_tokens=most, ignore_eos=True)
        engine.scheduler.adopt(prompt[:-1])
        engine.submit(Submit(rid, prompt, params))
    waiting, ends = set(range(batch)), list[float]()
    while len(ends) <= WARM_UP + STEPS:
        deltas = engine.step()
        if errors := [d.error for d in deltas if d.error]:
            raise EngineError(f"the measured requests fail: {errors[0]}")
        if waiting:
            waiting -= {d.rid for d in deltas if d.tokens}
        elif any(d.tokens for d in deltas):
            ends.append(time.perf_counter())
    step = statistics.median(after - before for before, after in itertools.pairwise(ends[WARM_UP:]))
    device = engine.runner.time_graph(ROUNDS)
    for rid in range(batch):
        engine.cancel(rid)
    while engine.busy:
        engine.step()
    nbytes = footprint(model, engine.runner.pages.data).step_bytes(batch, context)
    return Timed(device, step, nbytes)
