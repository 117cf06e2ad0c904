"""Decode speed of ranks with replicated KV and with KV sharded along the sequence, and the context from which sharded
KV is faster."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.bench import decode
from perilune.core.config import EngineConfig, build

LAYOUTS = ("replicated", "sequence")


def measure(
    model: Path,
    values: Mapping[str, Any],
    turns: Sequence[int],
    cells: tuple[list[int], list[int]],
    tokens: int,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Rows of decode.measure, from one engine for each kv_shards of `turns`, in this order: 1,2,1,2 shows whether the
    machine changed meanwhile. values: keys of EngineConfig; cells: (batch sizes, contexts). At the end, reports for
    each batch size the context from which sharded KV is faster."""
    batches, contexts = cells
    common = {
        **values,
        "max_num_seqs": max(batches),
        "max_model_len": max(contexts) + tokens + 1,
        "prefix_cache": False,  # every prompt must be computed
    }
    configs = [build(EngineConfig, {**common, "kv_shards": shards}) for shards in turns]
    rows = [row for config in configs for row in decode.measure(model, config, batches, contexts, tokens, report)]
    for line in summary(rows):
        report(line)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each batch size: step times of both layouts by context, and where they cross."""
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        steps: dict[int, dict[str, float]] = {}
        for context in sorted({row["context"] for row in rows}):
            for layout in LAYOUTS:
                found = [
                    r["step_ms"] for r in rows if (r["batch"], r["context"], r["kv_layout"]) == (batch, context, layout)
                ]
                if found:
                    steps.setdefault(context, {})[layout] = statistics.median(found)
        both = {context: times for context, times in steps.items() if len(times) == len(LAYOUTS)}
        if not both:
            continue
        times = ", ".join(f"{c:,}: {t['replicated']:.3f} / {t['sequence']:.3f}" for c, t in both.items())
        lines.append(f"batch {batch}, ms a step with whole / sharded KV at context {times}: {_crossing(both)}")
    return lines


def _crossing(steps: Mapping[int, Mapping[str, float]]) -> str:
    """The context from which sharded KV is faster, interpolated between the measured ones."""
    lost = [(context, times["sequence"] - times["replicated"]) for context, times in steps.items()]
    if all(ms >= 0 for _, ms in lost):
        return f"sharded KV is not faster up to {lost[-1][0]:,} tokens"
    if all(ms < 0 for _, ms in lost):
        return f"sharded KV is faster from {lost[0][0]:,} tokens on, the shortest measured"
    for (low, before), (high, after) in itertools.pairwise(lost):
        if before >= 0 > after:
            at = low + (high - low) * before / (before - after)
            return f"sharded KV is faster from about {round(at, -2):,.0f} tokens on"
    return "sharded KV is faster at some contexts and slower at longer ones: measure again"
