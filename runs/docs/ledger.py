"""Rows of bench/results for the pages: for each configuration, the median row of its newest commit."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench/results"
Row = dict[str, Any]

# vLLM 0.26.0 on the same GPU, the same shapes and precision (INT4 experts by Marlin, bf16 rest, CUDA graphs), measured
# once by the same method: microseconds per MoE layer by (batch, context), milliseconds per layer by prompt length.
PEER = "vLLM 0.26.0"
PEER_DECODE = {(1, 1024): 213, (1, 10240): 220, (1, 102400): 292, (2, 1024): 267, (4, 1024): 389, (8, 1024): 624,
               (16, 1024): 1027, (64, 1024): 2543}  # fmt: skip
PEER_PREFILL = {1000: 5.9, 4000: 17.5, 10000: 40.4}


def rows(bench: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{bench}.jsonl").read_text().splitlines()]


def latest(bench: str, *, shapes: bool = False) -> list[Row]:
    """Measurements on one GPU or CPU: of a slice of exact shapes (`shapes`), or of a model's real weights. Rows of runs
    that forced an op's implementation are left out."""
    keys = ("model", "shape", "batch", "context", "tokens", "gpu", "rest_dtype", "kv_dtype", "draft", "expert_format")
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows(bench):
        alone = row.get("tp", 1) == 1 and "slice" not in row and "ops" not in row
        if ("shape" in row) == shapes and row.get("balanced", True) and alone:
            prefill = (row.get("cached") or 0,) if bench == "prefill" else ()
            found.setdefault((*(row.get(k) for k in keys), *prefill), []).append(row)
    return [median(some) for some in found.values()]


def median(some: list[Row]) -> Row:
    """The median of those rows that have the last row's commit; of two in the middle, the slower one."""
    newest = [r for r in some if r["commit"] == some[-1]["commit"]]
    measure = next(k for k in ("us_per_layer", "ms_per_layer", "step_ms") if k in newest[0])
    return sorted(newest, key=lambda r: r[measure])[len(newest) // 2]


def plain(row: Row) -> bool:
    """Whether PEER was measured in this setting: bf16 rest and cache, INT4 experts, no drafts, nothing cached."""
    settings = row["rest_dtype"] == row["kv_dtype"] == "bf16" and row["expert_format"] == "int4-g32"
    return settings and not row.get("draft") and not row.get("cached")
