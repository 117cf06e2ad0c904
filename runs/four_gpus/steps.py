"""Parts that run on an engine in this process: whole steps, prompts, the longest request."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from perilune.bench import ledger
from perilune.bench.cycle import RandomDrafts
from perilune.bench.microscope import CEILING_TB_S
from perilune.bench.ranks import over_ranks
from perilune.core.errors import EngineError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from runs import prompt_arrivals
from runs.four_gpus.setting import DRAFTS, Setting

PROMPTS = 4  # the first warms up, the others are timed
UNSEEN = 1000  # first number of these parts' random prompts, so that none is in the cache from other parts
ARRIVAL_EVERY_SECONDS = 3.0

Row = dict[str, Any]


def rows(engine: Engine, setting: Setting, part: str) -> Iterator[Row]:
    """The rows of one part, each as soon as it is measured."""
    found: dict[str, Callable[[Engine, Setting], Iterator[Row]]] = {
        "a": _longest, "b": _one, "c": _verifying, "d": _many, "p": _prompts, "v": _drafting
    }  # fmt: skip
    common = over_ranks.common_keys(engine, setting.shape or engine.info.model, _layers(engine)) | setting.keys()
    if setting.shape is None:
        common["model"] = common.pop("shape")
    for row in found[part](engine, setting):
        row = common | {"part": part} | row | ledger.circumstances()
        yield row | {"gpus": row["tp"] if row["gpus"] else 0}


def _layers(engine: Engine) -> int:
    return len(engine.runner.model.weights.layers)


def _decode(engine: Engine, batch: int, context: int, name: str, **more: Any) -> Row:
    engine.runner.zero(engine.info.num_blocks)  # KV that is treated as cached: uninitialised memory may hold NaN
    timed = over_ranks.timed(engine, batch, context)
    least = timed.nbytes / CEILING_TB_S / 1e9
    return {
        "batch": batch,
        "context": context,
        "step_ms": round(timed.step * 1e3, 4),
        "graph_ms": None if timed.device is None else round(timed.device * 1e3, 4),
        "floor_ms": round(least, 4),
        "tokens_per_s": round(batch / timed.step, 1),
        "figure": name,
        "measured": round(batch / timed.step, 1),
        "method": "median of engine steps that sample with top_k 50, without a second depth; graph: replayed on all "
        "ranks at once",
        **more,
    }


def _one(engine: Engine, setting: Setting) -> Iterator[Row]:
    yield _decode(engine, 1, setting.sizes.prompt, "tokens_per_s")
    yield _decode(engine, 1, setting.sizes.short, f"tokens_per_s at {setting.sizes.short}")


def _verifying(engine: Engine, setting: Setting) -> Iterator[Row]:
    """Device time of verify steps. The host's time does not count, because steps with a draft model's drafts are
    chained."""
    engine.speculator = RandomDrafts(DRAFTS, engine.info.vocab_size)
    try:
        for context in (setting.sizes.short, setting.sizes.prompt):
            row = _decode(engine, 1, context, f"verify ms at {context}", draft=DRAFTS, draft_source="random")
            row["measured"] = row["graph_ms"] or row["step_ms"]
            yield row
    finally:
        engine.speculator = None


def _drafting(engine: Engine, setting: Setting) -> Iterator[Row]:
    """Times of a cycle, which verifies drafts and then drafts anew, and of its verification, which is one graph."""
    engine.runner.zero(engine.info.num_blocks)
    timed = over_ranks.timed(engine, 1, setting.sizes.prompt, drafts=DRAFTS)
    cycle, verify = 1e3 * timed.step, None if timed.device is None else 1e3 * timed.device
    spent = None if verify is None else round(cycle - verify, 4)
    yield {
        "batch": 1, "context": setting.sizes.prompt, "draft": DRAFTS, "draft_source": "eagle3",
        "acceptance_length": engine.config.declared_acceptance, "acceptance": "declared", "step_ms": round(cycle, 4),
        "verify_graph_ms": None if verify is None else round(verify, 4), "draft_ms": spent,
        "figure": "draft ms", "measured": round(cycle, 4) if spent is None else spent,
        "method": "median of cycles of the engine less the graph of a verification, replayed on all ranks at once; "
        "without graphs the whole cycle",
    }  # fmt: skip


def _many(engine: Engine, setting: Setting) -> Iterator[Row]:
    for batch in setting.sizes.batches:
        yield _decode(engine, batch, setting.sizes.short, f"tokens_per_s of {batch}")
    for batch in setting.sizes.batches:
        seconds = setting.sizes.arrival_seconds
        found = prompt_arrivals.played(
            engine, batch, setting.sizes.prompt, ARRIVAL_EVERY_SECONDS, seconds, engine.info.vocab_size
        )
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
        yield {
            "bench": "arrivals", "decoding": batch, "prompt_tokens": setting.sizes.prompt,
            "every_s": ARRIVAL_EVERY_SECONDS, "decode_stretch": engine.config.decode_stretch,
            "prompt_patience": engine.config.prompt_patience, **rounded,
            "figure": f"p99 over median of {batch}", "measured": rounded["p99_over_median"],
            "method": "prompts arrive at random while requests decode",
        }  # fmt: skip


def _prompts(engine: Engine, setting: Setting) -> Iterator[Row]:
    tokens, layers = setting.sizes.prompt, _layers(engine)
    times = [over_ranks.prompt_seconds(engine, tokens, UNSEEN + turn) for turn in range(PROMPTS)]
    ms = statistics.median(times[1:]) * 1e3
    yield {
        "bench": "prefill", "tokens": tokens, "cached": 0, "step_ms": round(ms, 3),
        "ms_per_layer": round(ms / layers, 3), "tokens_per_s": round(tokens / ms * 1e3, 1),
        "figure": "prefill ms a layer", "measured": round(ms / layers, 3),
        "method": f"medians of {PROMPTS - 1} prompts until the first token, divided by all {layers} layers",
    }  # fmt: skip


def _longest(engine: Engine, setting: Setting) -> Iterator[Row]:
    sizes, rng = setting.sizes, random.Random(5)
    prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(sizes.context - sizes.decoded))
    params = SamplingParams(temperature=0.0, max_tokens=sizes.decoded, ignore_eos=True)
    begin = time.perf_counter()
    engine.submit(Submit(1, prompt, params))
    at = list[float]()
    while engine.busy:
        for delta in engine.step():
            if delta.error:
                raise EngineError(f"the longest request fails: {delta.error}")
            at += [time.perf_counter()] * len(delta.tokens)
    if len(at) != sizes.decoded:
        raise EngineError(f"the longest request brought {len(at)} tokens, not {sizes.decoded}")
    first = at[0] - begin
    step = statistics.median(after - before for before, after in itertools.pairwise(at))
    yield {
        "batch": 1, "context": sizes.context, "step_ms": round(step * 1e3, 4), "tokens_per_s": round(1 / step, 1),
        "ttft_s": round(first, 3), "decoded_tokens": sizes.decoded, "figure": "ttft_s of the longest",
        "measured": round(first, 3), "method": "one request alone; step_ms: median of steps after the first token",
    }  # fmt: skip
