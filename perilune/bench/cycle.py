"""A whole cycle of speculation, on the exact shapes of a large model with random weights, in the engine's own graphs.

A cycle verifies K drafts, accepts, and drafts the next K with a draft model, as the engine with a fixed number of
drafts. Random weights accept no draft, so the accepted number is declared; a cycle computes the same for any number.
The verified tokens are random, because a random draft model would soon repeat one token. The draft model has the shape
of published ones with latent attention: one dense layer, three states of the target as input, and its own head over the
whole vocabulary.

Plain steps, verify steps and whole cycles are timed on one engine, one after the other. Times of the whole model add
the missing layers, each with the graph time of one layer (microscope.py).
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perilune.bench import ledger
from perilune.bench.microscope import (
    BALANCED,
    CEILING_TB_S,
    DRAWS,
    REPLAYS,
    STEP,
    STEPS,
    Bench,
    Report,
    balanced,
    breakdown,
    distinct_experts,
    replays_ms,
    replays_of,
    start,
    step_ms,
)
from perilune.bench.shapes import SHAPES, shape
from perilune.core.step import StepPlan
from perilune.engine.engine import Engine
from perilune.loading.eagle3 import to_fp8
from perilune.loading.synthetic import random_draft
from perilune.model.draft_config import config_for
from perilune.model.eagle3_config import Eagle3Config
from perilune.ops.layouts import latent_cache
from perilune.speculation.drafting import Speculator
from perilune.speculation.eagle3 import MAX_CHAIN_TOKENS, Eagle3Drafter

AUX = (1, 2, 3)  # the draft model reads the outputs of these layers; published ones read later layers
DRAFTER = "EAGLE-3.1, MLA, 1 layer, own head over the whole vocabulary"
TOKENS = 4 * STEPS + 64  # most tokens that a request decodes


def measure(
    bench: Bench,
    batch: int,
    context: int,
    report: Report,
    *,
    draft: int,
    accepted: float,
    kernels: bool = False,
    rest_dtype: str = "dtype",
    kv_dtype: str = "auto",
    draft_dtype: str = "fp8",
) -> dict[str, Any]:
    """One row of the ledger: `draft` tokens verified and drafted per request and cycle, `accepted` declared tokens of a
    request per cycle. rest_dtype "fp8" converts the bench's weights in place."""
    assert 1 <= draft <= MAX_CHAIN_TOKENS and 1 <= accepted <= draft + 1, f"{draft=} {accepted=}"
    room = context + TOKENS + MAX_CHAIN_TOKENS
    engines: list[Engine] = []
    try:
        graphs, steps = [], {}
        for layers in (bench.layers - STEP, bench.layers):
            engine = bench.engine(
                layers,
                max_num_seqs=batch,
                max_model_len=room,
                kv_blocks=batch * (-(-room // 64) + 1),
                block_size=64,
                rest_dtype=rest_dtype,
                kv_dtype=kv_dtype,
            )
            engines.append(engine)
            start(engine, batch, context, TOKENS)
            for name, speculator in (("plain", None), ("verify", RandomDrafts(draft, engine.info.vocab_size))):
                engine.speculator = speculator
                steps[name] = step_ms(engine, scattered=speculator is None)
                assert engine.runner.graphs is not None
                graphs.append(engine.runner.graphs.latest())
        plain_ms, verify_ms = steps["plain"], steps["verify"]
        plain5, verify5, plain9, verify9 = engine.runner.call(replays_ms, graphs, engine.info.vocab_size)
        distinct = distinct_experts(engine, scattered=False)
        if kernels:
            engine.step()  # back on the graph
            reads = bench.layer_reads(distinct, batch, context, engine.runner.pages.data.dtype)
            for line in breakdown(replays_of(graphs[-1]), reads):
                report(line)
        drafter = _drafter(bench, engine, fp8=draft_dtype == "fp8")
        engine.speculator = Speculator(suffix=False, longest=drafter.longest, fixed=draft, shared=False)
        for rid in range(batch):
            engine.speculator.open(rid, ())
        engine.runner.call(engine.runner.follow, drafter)
        cycle_ms = step_ms(engine)
        verified = engine.runner.call(_verified, engine)
        assert engine.runner.graphs is not None and engine.runner.graphs.broken is None, engine.runner.graphs
        test_ms = engine.runner.graphs.recorder.longest_test_seconds * 1e3
    finally:
        for engine in engines:
            engine.close()
    slope, plain_slope = (verify9 - verify5) / STEP, (plain9 - plain5) / STEP
    stored = latent_cache.PACKED if kv_dtype == "fp8" else torch.bfloat16
    floor = bench.layer_bytes(distinct, batch, context, stored) / CEILING_TB_S / 1e6
    model = SHAPES[bench.name]["num_hidden_layers"]
    missing = model - bench.layers
    whole, whole_plain = cycle_ms + missing * slope, plain_ms + missing * plain_slope
    draft_ms = cycle_ms - verify9
    row = {
        "bench": "decode",
        "shape": bench.name,
        "layers": bench.layers,
        "tp": 1,
        "ep": 1,
        "batch": batch,
        "context": context,
        "draft": draft,
        "draft_source": "eagle3",
        "drafter": f"{DRAFTER}, {'fp8' if draft_dtype == 'fp8' else 'bf16'}",
        "expert_format": "int4-g32",
        "rest_dtype": "bf16" if rest_dtype == "dtype" else rest_dtype,
        "kv_dtype": "fp8" if kv_dtype == "fp8" else "bf16",
        "us_per_layer": round(1e3 * slope, 1),
        "plain_us_per_layer": round(1e3 * plain_slope, 1),
        "floor_us_per_layer": round(floor, 1),
        "fraction": round(floor / (1e3 * slope), 4),
        "outside_us": round(1e3 * (verify9 - slope * (bench.layers - 1)), 1),
        "self_test_ms": round(test_ms, 2),
        "step_ms": round(cycle_ms, 4),
        "verify_ms": round(verify_ms, 4),
        "verify_graph_ms": round(verify9, 4),
        "draft_ms": round(draft_ms, 4),
        "plain_ms": round(plain_ms, 4),
        "plain_graph_ms": round(plain9, 4),
        "tokens_per_s": round(batch * accepted / cycle_ms * 1e3, 1),
        "acceptance_length": accepted,
        "acceptance": "declared",
        "whole_layers": model,
        "whole_step_ms": round(whole, 3),
        "whole_plain_ms": round(whole_plain, 3),
        "whole_tokens_per_s": round(batch * accepted / whole * 1e3, 1),
        "whole_over_plain": round(accepted * whole_plain / whole, 3),
        "draft_share": round(draft_ms / whole, 4),
        "distinct_experts": round(distinct, 2),
        "cycle_tokens": verified,
        "balanced": verified >= BALANCED * batch * (draft + 1)  # two of 256 random ids are equal in 18 % of runs
        and balanced(shape(bench.name, bench.layers), distinct, batch * (draft + 1)),
        "ceiling_tb_s": CEILING_TB_S,
        "measured_read_tb_s": round(bench.read_tb_s, 3),
        "method": f"step, verify, plain: medians of {STEPS} engine steps with {bench.layers} layers; draft_ms: step - "
        f"verify graph; us_per_layer: (graph of {bench.layers} layers - graph of {bench.layers - STEP}) / {STEP}, "
        f"medians of {DRAWS} draws of tokens, {REPLAYS} replays on end, in turns; whole: step + {missing} x "
        "us_per_layer; weights, KV and what verify steps verify random",
        **ledger.circumstances(),
    }
    report(
        f"batch {batch:>3}, context {context:>6}, {draft} drafts: {1e3 * slope:.1f} us per layer (plain "
        f"{1e3 * plain_slope:.1f}), {distinct:.1f} distinct experts; {bench.layers} layers: cycle {cycle_ms:.3f} ms, "
        f"drafting {draft_ms:.3f} of it, plain step {plain_ms:.3f}; {model} layers: cycle {whole:.2f} ms, plain "
        f"{whole_plain:.2f}; {accepted} tokens a cycle: {row['whole_over_plain']} x plain, drafting "
        f"{100 * row['draft_share']:.1f} %" + ("" if row["balanced"] else "  NOT BALANCED: does not count")
    )
    return row


class RandomDrafts(Speculator):
    """`count` random drafts for every request: random weights accept none of them."""

    def __init__(self, count: int, vocabulary: int) -> None:
        super().__init__(suffix=True, fixed=count, shared=False)
        self._count, self._vocabulary = count, vocabulary
        self._random = random.Random(0)

    def propose(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        return {w.rid: [self._random.randrange(self._vocabulary) for _ in range(self._count)] for w in plan.work}


def _verified(engine: Engine) -> int:
    """The number of distinct tokens that the last cycle verified."""
    assert engine.runner.graphs is not None
    torch.cuda.synchronize()
    return len(set(engine.runner.graphs.latest().step.tokens.tolist()))


def _drafter(bench: Bench, engine: Engine, *, fp8: bool) -> Eagle3Drafter:
    """A random draft model of the target's shape, with its embedding."""
    target, sizes = shape(bench.name, bench.layers), engine.config
    assert sizes.kv_blocks and sizes.block_size and sizes.max_model_len
    config = Eagle3Config.from_dict(config_for(target, aux_ids=AUX))
    weights = random_draft(config, bench.weights.embed)
    if fp8:
        to_fp8(weights, bench.weights)
    drafter = Eagle3Drafter(config, weights, config.aux_layers(target.num_hidden_layers))
    drafter.allocate(
        sizes.kv_blocks,
        sizes.block_size,
        bench.weights.embed.dtype,
        bench.device,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
    )
    return drafter
