"""Requests that decode while prompts arrive: intervals between their tokens, with and without decode_stretch's bound.

python -m runs.prompt_arrivals [--layers 9 --decoding 8,64 --prompt 10000 --every 3 --seconds 20 --ledger DIR]
python -m runs.prompt_arrivals --picture 4000x3000 --stretch 2   prompts of such a picture each, and a few tokens

On a GPU at Kimi K2.5's shapes with random weights, those of the vision tower too; elsewhere kimi-nano, with smaller
numbers to try the script. Prompts arrive at random, the same times for both settings; no two pictures are equal. Each
line is JSON. Intervals are counted from one second before the first prompt may arrive. `quiet_median_ms` is the median
of that second, `busy_p99_ms` counts intervals that end while a prompt waits for its first token.
"""

import argparse
import dataclasses
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from perilune.bench import ledger, vision
from perilune.bench.microscope import Bench
from perilune.core.config import EngineConfig, build
from perilune.core.messages import Media, Pixels, Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.engine.resolve import Choices
from perilune.engine.vision.open import PADDED_RATIO, open_encoder
from perilune.engine.vision.tower import Tower
from perilune.formats.hub import resolve_model
from perilune.media.limits import Fit, Limits
from perilune.model.moonvit import MoonVit

CONTEXT_TOKENS = 1024
SETTLE_SECONDS = 1.0  # of decoding before the first prompt arrives
BESIDE_TOKENS = 16  # of text before a picture
LONG_MEDIANS = 2.0  # Intervals above this many medians count in `long_share`; above 0.01, they decide the p99.


def see(engine: Engine) -> None:
    """Gives the engine a vision tower of Kimi K2.5's size with random weights."""
    tower = Tower(MoonVit(vision.K25, vision.random_weights(vision.K25, torch.device("cuda"))), Limits())
    with torch.inference_mode():
        tower.warm(int(PADDED_RATIO * tower.limits.max_patches))
    engine.runner.tower = tower
    engine._encoder = engine.scheduler.encoder = encoder = open_encoder(tower, engine.config, Choices([]))
    engine.info = engine._admission._info = dataclasses.replace(engine.info, media_pad=encoder.pad)


def played(
    engine: Engine, decoding: int, prompt: int, every: float, seconds: float, vocab: int, fit: Fit | None = None
) -> dict[str, Any]:
    """Figures of `decoding` requests while prompts of `prompt` tokens arrive; with `fit`, of such a picture each."""
    rng = random.Random(7)
    context = min(CONTEXT_TOKENS, prompt)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    def submit(rid: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        if fit is None:
            engine.submit(Submit(rid, tokens(prompt), params))
            return
        encoder = engine.scheduler.encoder
        assert encoder is not None
        media = Media((rid + decoding * 10**9).to_bytes(32, "big"), (1, fit.rows, fit.columns), fit.tokens)
        engine.submit(Submit(rid, (*tokens(BESIDE_TOKENS), *[encoder.pad] * fit.tokens), params, pictures=(media,)))

    pixels = memoryview(os.urandom(0 if fit is None else 3 * fit.rows * fit.columns * Limits().patch_size ** 2))
    most = engine.info.max_model_len - context
    for rid in range(decoding):
        engine.submit(Submit(rid, tokens(context), SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)))
    seen: dict[int, float] = {}
    while len(seen) < decoding:
        seen |= {delta.rid: time.perf_counter() for delta in engine.step() if delta.tokens}
    begin = time.perf_counter()
    end, coming = begin + SETTLE_SECONDS + seconds, begin + SETTLE_SECONDS + rng.expovariate(1 / every)
    arrived: dict[int, float] = {}
    intervals, quiet, busy, first_tokens = list[float](), list[float](), list[float](), list[float]()
    ended = False
    while (now := time.perf_counter()) < end and not ended:
        while coming <= now:
            rid = 1_000_000 + len(arrived) + len(first_tokens)
            submit(rid)
            arrived[rid], coming = coming, coming + rng.expovariate(1 / every)
        for want in engine.wants() if fit is not None else ():
            engine.provide(Pixels(want.rid, want.item, pixels))
        for delta in engine.step():
            at = time.perf_counter()
            if delta.rid in arrived:
                first_tokens.append(at - arrived.pop(delta.rid))
            elif delta.tokens and delta.rid in seen:
                intervals.append(at - seen[delta.rid])
                if arrived:
                    busy.append(intervals[-1])
                elif at < begin + SETTLE_SECONDS:
                    quiet.append(intervals[-1])
                seen[delta.rid] = at
                ended |= delta.finish_reason is not None
    took = time.perf_counter() - begin
    for rid in (*range(decoding), *arrived):
        engine.cancel(rid)
    while engine.busy:
        engine.step()
    median, p99 = statistics.median(intervals), ledger.percentile(intervals, 0.99)
    long = sum(interval > LONG_MEDIANS * median for interval in intervals)
    return {
        "intervals": len(intervals), "long_share": long / len(intervals),
        "interval_median_ms": 1e3 * median, "interval_p99_ms": 1e3 * p99, "p99_over_median": p99 / median,
        "interval_max_ms": 1e3 * max(intervals), "busy_p99_ms": 1e3 * ledger.percentile(busy, 0.99) if busy else None,
        "quiet_median_ms": 1e3 * statistics.median(quiet) if quiet else None,
        "ttft_p50_s": statistics.median(first_tokens) if first_tokens else None,
        "prompts": len(first_tokens), "prompts_left": len(arrived), "tokens_per_s": len(intervals) / took,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--decoding", default="8,64")
    parser.add_argument("--prompt", type=int, default=10_000)
    parser.add_argument("--picture", metavar="WIDTHxHEIGHT", help="pixels of a picture, instead of --prompt")
    parser.add_argument("--stretch", default="0,2,0,2", help="decode_stretch of the engines, one by one (0: no bound)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between prompts, on average")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ledger", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    prompt = args.prompt if cuda else min(args.prompt, 1000)
    fit = None
    if args.picture:
        width, height = map(int, args.picture.split("x"))
        nano = resolve_model("kimi-nano")
        fit = (Limits() if cuda else Limits.from_directory(nano)).fit(width, height)
        prompt = fit.tokens + BESIDE_TOKENS
    batches = [int(n) for n in args.decoding.split(",")]
    limits = {"max_num_seqs": max(batches) + 16, "seed": 1, "prefix_cache": False}
    limits["max_model_len"] = max(4 * prompt, 32_768) if cuda else 4096
    if cuda:
        limits |= {"kv_blocks": 16 * (-(-prompt // 64) + 2) + max(batches) * 512, "block_size": 64}
    bench = Bench("kimi-k2.5", args.layers) if cuda else None
    for stretch in map(float, args.stretch.split(",")):
        config: dict[str, Any] = {**limits, "decode_stretch": stretch}
        if bench is not None:
            engine, vocab = bench.engine(args.layers, **config), 160_000
        else:
            engine = Engine(resolve_model("kimi-nano"), build(EngineConfig, {"draft": "off", **config}))
            vocab = 1000
        if fit is not None and cuda:
            engine.runner.call(see, engine)
        try:
            for decoding in batches:
                row: dict[str, Any] = {"bench": "arrivals", "layers": args.layers, "decode_stretch": stretch}
                row |= {"decoding": decoding, "prompt_tokens": prompt, "every_s": args.every}
                row |= {"shape": "kimi-k2.5"} if cuda else {}
                row |= {"picture": args.picture} if args.picture else {}
                row |= played(engine, decoding, prompt, args.every, args.seconds, vocab, fit)
                row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                print(json.dumps(row), flush=True)
                if args.ledger is not None:
                    ledger.append([row | ledger.circumstances()], args.ledger)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
