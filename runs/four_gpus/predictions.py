"""What each figure should be, computed from rows that are in the ledger before the run."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perilune.bench.forecast import Forecast
from perilune.bench.shapes import shape
from perilune.core.errors import ConfigError
from perilune.ops.layouts import latent_cache
from runs.four_gpus.setting import ACCEPTED, CACHED_SHARE, DECODING, DRAFTS, Setting


def predictions(setting: Setting, ledger: Path) -> dict[str, float | str]:
    """The predicted value of each figure, or which row is missing. Empty for a checkpoint, and without GPUs."""
    if setting.shape is None or setting.device != "cuda":
        return {}
    forecast = Forecast(read(ledger, "decode"), read(ledger, "prefill"), setting.tp, setting.depth, setting.shape)
    sizes, kv = setting.sizes, _kv_bytes(setting)

    def step(tokens: int, context: int) -> float:
        return forecast.step(tokens, context, kv).ms

    def verify(context: int) -> float:
        return forecast.step(DRAFTS + 1, context, kv).graph_ms

    def cached() -> float:
        before = round(CACHED_SHARE * sizes.prompt)
        return forecast.prompt_ms(sizes.prompt - before, before) / 1e3

    def longest() -> float:
        return forecast.prompt_ms(sizes.context - sizes.decoded) / 1e3

    def cycle() -> float:
        return verify(sizes.prompt) + forecast.draft_ms(DRAFTS)

    def beside() -> float:
        """Seconds to the first token of a short prompt: it waits for half a step on average, and then shares one with
        other requests. Their steps have up to 32 tokens; 16 are assumed, for which there are rows."""
        return (forecast.prompt_ms(sizes.short) + step(16, sizes.short) / 2) / 1e3

    found: dict[str, Callable[[], float]] = {
        "tokens_per_s": lambda: 1e3 / step(1, sizes.prompt),
        f"tokens_per_s at {sizes.short}": lambda: 1e3 / step(1, sizes.short),
        "prefill ms a layer": lambda: forecast.prompt_ms(sizes.prompt) / setting.depth,
        "ttft_s cold": lambda: forecast.prompt_ms(sizes.prompt) / 1e3,
        "ttft_s cached": cached,
        f"ttft_s beside {DECODING}": beside,
        "output_tokens_per_s": lambda: 1e3 * ACCEPTED / cycle(),
        "output_tokens_per_s plain": lambda: 1e3 / step(1, sizes.prompt),
        "ttft_s of the longest": longest,
        "draft ms": lambda: forecast.draft_ms(DRAFTS),
    }
    found |= {f"verify ms at {c}": partial(verify, c) for c in (sizes.short, sizes.prompt)}
    for n in sizes.batches:
        found[f"tokens_per_s of {n}"] = partial(lambda n: 1e3 * n / step(n, sizes.short), n)
    made: dict[str, float | str] = {}
    for figure, value in found.items():
        try:
            made[figure] = round(value(), 4)
        except ConfigError as e:
            made[figure] = str(e)
    return made


def _kv_bytes(setting: Setting) -> float:
    """Bytes of one token's KV in one layer."""
    c = shape(setting.shape or "", setting.depth)
    dtype = latent_cache.PACKED if setting.kv_dtype == "fp8" else torch.bfloat16
    return float(latent_cache.width(c.kv_lora_rank, c.qk_rope_head_dim, dtype) * dtype.itemsize)


def read(ledger: Path, bench: str) -> list[dict[str, Any]]:
    """The rows of a bench; none if it has no file."""
    file = ledger / f"{bench}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
