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
    ("model/kimi_k2.py", "the model, as in the paper"),
    ("ops/mla_absorbed.py", "one op, one file: contract, cases, reference, implementations"),
    ("ops/experts.cpp", "the routed experts on CPU, straight from packed INT4"),
    ("kv/prefix.py", "prefix tree over KV blocks"),
    ("model/load.py", "checkpoints: checked, parallel, bounded memory"),
    ("formats/int4.py", "INT4 pack-quantized"),
    ("text/chat.py", "messages to prompt, the family's template"),
    ("text/stream.py", "tokens to reasoning, content and tool calls"),
    ("server/chat.py", "`/v1/chat/completions`"),
]


def latest(bench: str) -> list[dict]:
    """The newest row of each configuration."""
    rows: dict[tuple, dict] = {}
    for line in (ROOT / "bench/results" / f"{bench}.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[tuple(row.get(k) for k in ("model", "batch", "context", "gpu", "expert_format", "rest_dtype"))] = row
    return list(rows.values())


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


def file_map() -> str:
    rows = ["| file under `perilune/` | lines | what |", "|---|---|---|"]
    for name, what in FILES:
        lines = len((ROOT / "perilune" / name).read_text().splitlines())
        rows.append(f"| `{name}` | {lines} | {what} |")
    return "\n".join(rows)


def block(text: str, name: str) -> re.Match[str]:
    found = re.search(f"(<!-- generated: {name} -->\n)(.*?)(\n<!-- end -->)", text, re.S)
    assert found, f"README.md has lost its generated block {name!r}"
    return found


def replaced(text: str, name: str, content: str) -> str:
    found = block(text, name)
    return text[: found.start(2)] + content + text[found.end(2) :]


def stale(text: str) -> str | None:
    """What is out of date, or None. Line counts may drift by a third before they count as stale."""
    if block(text, "table")[2] != table():
        return "the measured table differs from bench/results"
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
    README.write_text(replaced(replaced(text, "table", table()), "files", file_map()))


if __name__ == "__main__":
    main()
