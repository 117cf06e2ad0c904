"""Writes the card of kimi-nano's drafter: python -m runs.kimi_nano.drafter_card --drafter DIR --run DIR --corpus DIR...

From the evaluation beside the checkpoint (`perilune draft evaluate --json`), the training log and the corpus' record.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from perilune.draft.corpus import Corpus
from perilune.draft.train import LOG

EVALUATION = "evaluation.json"
LENGTH = 3  # tokens of the chains in the table

CARD = """---
license: apache-2.0
---
# kimi-nano's drafter

An EAGLE-3.1 draft of {parameters:,} parameters ({megabytes:.2f} MB) for speculative decoding of kimi-nano: one
decoder layer with latent attention of the target's shape, reading what leaves the target's layers {layers},
counted from 0. Embedding and head are the target's. Speculation never changes an answer; it only makes several tokens
of it at a time.

## Acceptance

Tokens per verify step, greedy chains of {length}, on {count} problems per family that were kept out of training, half
with thinking. 4 would be the most. "lookup" is what copying the continuation of the same last tokens gets. "held out"
are drawn as in training; "structural" have words, stories and layouts that training never had.

{table}

Right by position: of the drafts that follow accepted ones, the share that is accepted too, T = 0, held out.
{speed}
## Training

{rows:,} answers of kimi-nano itself ({answers:,} tokens) to generated problems of the training split:
{forced:,} greedy ones, read off the generators' answers as far as the model says the same{decoded}.
{steps:,} steps in {minutes:.1f} minutes on one {device}, chains of {unroll} unrolled
as in serving, cross entropy with the target's distributions. `runs/kimi-nano-drafter.sh` has the commands.
"""

SPEED = """
Times as fast as without drafts in the engine, the same held-out prompts in turns, on one {device}: {ways}.
"""


def table(records: list[dict[str, Any]], length: int) -> str:
    cells = {(r["split"], r["family"], r["drafter"], r["temperature"]): r for r in records if r["length"] == length}
    lines = [
        "| family | held out, T = 0 | T = 1 | lookup, T = 0 | right by position, % | structural, T = 0 |",
        "|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(r["family"] for r in records):
        own = cells["heldout", family, "eagle3", 0.0]
        lengths = [own, cells["heldout", family, "eagle3", 1.0], cells["heldout", family, "lookup", 0.0]]
        shares = " ".join(f"{100 * s:.0f}" for s in own.get("by_position", []))
        other = cells["structural", family, "eagle3", 0.0]["acceptance_length"]
        row = [*(f"{r['acceptance_length']:.2f}" for r in lengths), shares, f"{other:.2f}"]
        lines.append(f"| {family} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def speed(records: list[dict[str, Any]], device: str) -> str:
    ways = [f"{r['way']} {r['speed_up']:.2f} ({r['users']} at once)" for r in records if r["way"] != "off"]
    return SPEED.format(device=device, ways="; ".join(ways)) if ways else ""


def card(drafter: Path, log: list[dict[str, Any]], corpora: list[Corpus], device: str) -> str:
    evaluation = json.loads((drafter / EVALUATION).read_text())
    config = json.loads((drafter / "config.json").read_text())
    rows = {
        forced: sum(s.rows for c in corpora for s in c.shards if (c.about["answers"] == "forced") == forced)
        for forced in (True, False)
    }
    start, stop = log[0], log[-1]
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return CARD.format(
        parameters=start["parameters"],
        megabytes=sum(f.stat().st_size for f in drafter.glob("*.safetensors")) / 1e6,
        layers=", ".join(str(i) for i in ids),
        length=LENGTH,
        count=evaluation["count"],
        table=table(evaluation["records"], LENGTH),
        speed=speed(evaluation["speed"], device),
        rows=sum(rows.values()),
        forced=rows[True],
        decoded=f", and {rows[False]:,} decoded,\nhalf of these at temperature 1" if rows[False] else "",
        answers=sum(s.answers for c in corpora for s in c.shards),
        steps=stop["step"],
        minutes=stop["seconds"] / 60,
        device=device,
        unroll=start["options"]["unroll"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the card of kimi-nano's drafter.")
    parser.add_argument("--drafter", type=Path, required=True, help=f"checkpoint, with {EVALUATION}")
    parser.add_argument("--run", type=Path, required=True, help="directory of the training run")
    parser.add_argument("--corpus", type=Path, required=True, action="append", help="repeatable")
    parser.add_argument("--device", default="NVIDIA H200", help="what it was trained on")
    args = parser.parse_args()
    log = [json.loads(line) for line in (args.run / LOG).read_text().splitlines()]
    text = card(args.drafter, log, [Corpus(path) for path in args.corpus], args.device)
    (args.drafter / "README.md").write_text(text)


if __name__ == "__main__":
    main()
