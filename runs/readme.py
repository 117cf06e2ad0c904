"""Writes the generated parts of README.md: the measured table from the ledger, the file map from the files.

python runs/readme.py           rewrite them
python runs/readme.py --check   exit 1 if the table is stale or a line count is more than a third off
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

FILES = [
    ("engine/engine.py", "the loop: plan step N+1 while step N runs; **start here**"),
    ("engine/scheduler.py", "which request advances by how many tokens (pure Python)"),
    ("engine/batch.py", "a plan becomes tensors"),
    ("engine/graphs.py", "a decode step as one CUDA graph"),
    ("model/kimi_k2.py", "the model, as in the paper"),
    ("ops/mla_absorbed.py", "one op, one file: contract, cases, reference, implementations"),
    ("ops/experts.cpp", "the routed experts on CPU, straight from packed INT4"),
    ("ops/linear.cu", "a stream of weights at the memory's rate: the shortest CUDA kernel to read"),
    ("ops/moe_int4_few.cu", "the MoE block of a decode step on INT4 experts"),
    ("kv/prefix.py", "prefix tree over KV blocks"),
    ("model/load.py", "checkpoints: checked, parallel, bounded memory"),
    ("formats/int4.py", "INT4 pack-quantized"),
    ("text/chat.py", "messages to prompt, the family's templates"),
    ("text/enforcer.py", "tool calls and structured answers, enforced token by token"),
    ("text/stream.py", "tokens to reasoning, content and tool calls"),
    ("server/turn.py", "from a request body to an assistant turn, for every API"),
]


# vLLM 0.26.0 on the same card, the same shapes and precision (INT4 experts by Marlin, bf16 rest, CUDA graphs), measured
# once by the same method: microseconds per MoE layer by (batch, context), milliseconds per layer by prompt length.
PEER_DECODE = {(1, 1024): 213, (1, 10240): 220, (1, 102400): 292, (2, 1024): 267, (4, 1024): 389, (8, 1024): 624,
               (16, 1024): 1027, (64, 1024): 2543}  # fmt: skip
PEER_PREFILL = {1000: 5.9, 4000: 17.5, 10000: 40.4}


def latest(bench: str, *, shapes: bool = False) -> list[dict]:
    """Of each configuration, of a model's real weights or of a slice of exact shapes, the newest commit's row: where it
    was measured several times, the median."""
    keys = ("model", "shape", "batch", "context", "tokens", "gpu", "rest_dtype", "kv_dtype", "draft")
    rows: dict[tuple, list[dict]] = {}
    for line in (ROOT / "bench/results" / f"{bench}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if ("shape" in row) == shapes and row.get("balanced", True):
            prefill = (row.get("expert_format"), row.get("cached") or 0) if bench == "prefill" else ()
            rows.setdefault((*(row.get(k) for k in keys), *prefill), []).append(row)
    return [median(some) for some in rows.values()]


def median(rows: list[dict]) -> dict:
    """Of the rows of the last one's commit; of two in the middle the slower one."""
    newest = [r for r in rows if r["commit"] == rows[-1]["commit"]]
    measure = next(k for k in ("us_per_layer", "ms_per_layer", "step_ms") if k in newest[0])
    return sorted(newest, key=lambda r: r[measure])[len(newest) // 2]


def table() -> str:
    lines = [
        "| decode, whole engine step | tok/s per user | tok/s together | step | of ceiling | measured on | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(latest("decode"), key=lambda r: (r["model"], str(r["gpu"]), r["batch"], r["context"])):
        where = r["gpu"] or f"{r['cpu']}, torch {r['torch']}"
        lines.append(
            f"| {r['model']} ({r['expert_format']} experts, {r['rest_dtype']} rest), {r['batch']} at once, "
            f"context {r['context']} | {r['tokens_per_s'] / r['batch']:,.0f} | {r['tokens_per_s']:,.0f} | "
            f"{r['step_ms']:.2f} ms | {100 * r['fraction']:.0f} % | {where} | {r['commit']} |"
        )
    return "\n".join(lines)


def layers() -> str:
    """One MoE layer of full shapes on one GPU, beside the peer's."""
    lines = [
        "| one MoE layer, Kimi K2.5 shapes | Perilune | floor | of floor | vLLM 0.26.0 | ratio | on | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def line(what: str, r: dict, ours: float, floor: float, peer: float | None, unit: str) -> str:
        beside = f"{peer:g} {unit} | {peer / ours:.2f}" if peer else "- | -"
        return (
            f"| {what}, {r['rest_dtype']} rest | {ours:g} {unit} | {floor:g} {unit} | {100 * r['fraction']:.0f} % | "
            f"{beside} | {r['gpu']} | {r['commit']} |"
        )

    shapes = latest("decode", shapes=True)
    for r in sorted(shapes, key=lambda r: (r["rest_dtype"], r["kv_dtype"], r["draft"], r["batch"], r["context"])):
        plain = r["rest_dtype"] == r["kv_dtype"] == "bf16" and not r["draft"]
        peer = PEER_DECODE.get((r["batch"], r["context"])) if plain else None
        what = f"decode, {r['batch']} at once, context {r['context']:,}"
        what += f", verifying {r['draft']} drafts" if r["draft"] else ""
        what += ", FP8 cache" if r["kv_dtype"] == "fp8" else ""
        lines.append(line(what, r, r["us_per_layer"], r["floor_us_per_layer"], peer, "us"))
    prompts = latest("prefill", shapes=True)
    for r in sorted(prompts, key=lambda r: (r.get("cached") or 0, r["expert_format"] != "int4-g32", r["tokens"])):
        cached, compact = r.get("cached") or 0, r["expert_format"] == "int4-compact"
        peer = None if cached or compact else PEER_PREFILL.get(r["tokens"])
        what = f"prefill, {r['tokens']:,} tokens"
        what += f" behind {cached:,} cached" if cached else ""
        what += ", compact scales" if compact else ""
        lines.append(line(what, r, r["ms_per_layer"], r["floor_ms_per_layer"], peer, "ms"))
    return "\n".join(lines)


def cycles() -> str:
    """Whole cycles of speculation at full shapes, the newest of each kind of draft model."""
    rows: dict[tuple, dict] = {}
    for line in (ROOT / "bench/results/decode.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "whole_over_plain" in row and row["balanced"]:
            rows[row["batch"], row["context"], row["rest_dtype"], row["draft"], row["drafter"]] = row
    lines = [
        "| Kimi K2.5 shapes, 61 layers, one user | draft model | plain step | cycle | drafting | tokens a cycle "
        "| over plain | on | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(rows):
        r = rows[key]
        lines.append(
            f"| {r['draft']} drafts a cycle, context {r['context']:,}, {r['rest_dtype']} rest | EAGLE-3 in "
            f"{r['drafter'].rsplit(', ', 1)[1]} | {r['whole_plain_ms']:.2f} ms | {r['whole_step_ms']:.2f} ms | "
            f"{100 * r['draft_share']:.1f} % | {r['acceptance_length']:g} ({r['acceptance']}) | "
            f"{r['whole_over_plain']:.2f} | {r['gpu']} | {r['commit']} |"
        )
    return "\n".join(lines)


def file_map() -> str:
    rows = ["| file under `perilune/` | lines | what |", "|---|---|---|"]
    for name, what in FILES:
        lines = len((ROOT / "perilune" / name).read_text().splitlines())
        rows.append(f"| `{name}` | {lines} | {what} |")
    return "\n".join(rows)


MEASURED = {"layers": layers, "cycles": cycles, "table": table}


def block(text: str, name: str) -> re.Match[str]:
    found = re.search(f"(<!-- generated: {name} -->\n)(.*?)(\n<!-- end -->)", text, re.S)
    assert found, f"README.md has lost its generated block {name!r}"
    return found


def replaced(text: str, name: str, content: str) -> str:
    found = block(text, name)
    return text[: found.start(2)] + content + text[found.end(2) :]


def stale(text: str) -> str | None:
    """What is out of date, or None. Line counts may drift by a third before they count as stale."""
    if any(block(text, name)[2] != made() for name, made in MEASURED.items()):
        return "the measured tables differ from bench/results"
    written = dict(re.findall(r"\| `(\S+)` \| (\d+) \|", block(text, "files")[2]))
    real = dict(re.findall(r"\| `(\S+)` \| (\d+) \|", file_map()))
    if written.keys() != real.keys():
        return "the file map lists other files than runs/readme.py"
    for name, lines in real.items():
        if abs(int(written[name]) - int(lines)) > int(lines) / 3:
            return f"{name} has {lines} lines, not {written[name]}"
    return None


def main() -> None:
    text = README.read_text()
    if "--check" in sys.argv[1:]:
        if why := stale(text):
            sys.exit(f"README.md is stale ({why}): run python runs/readme.py")
        return
    for name, made in {**MEASURED, "files": file_map}.items():
        text = replaced(text, name, made())
    README.write_text(text)


if __name__ == "__main__":
    main()
