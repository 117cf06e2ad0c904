"""Exact match of kimi-nano on held-out problems, greedy, by family: python -m runs.kimi_nano.evaluate --model DIR

The problems and their check are `perilune.tasks`'. The exported checkpoint is read back, so what is scored is what is
shipped. Lines go to --log as they come; the last line printed is a JSON record of all.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from perilune.tasks.families import check, constant_baseline, copy_baseline, problems
from perilune.tasks.problem import Answer, Problem
from runs.kimi_nano.data import Codec, families
from runs.kimi_nano.decode import greedy
from runs.kimi_nano.export import read_back
from runs.kimi_nano.model import KimiNano

SEED = 7
MODES = {"thinking": True, "instant": False}
Cells = Mapping[str, Sequence[Problem]]  # name -> problems


def parse_answer(codec: Codec, ids: Sequence[int], thinking: bool) -> Answer:
    """The answer that a client would get from `ids` (without the end token); empty if the thought never ends."""
    marks, text = codec.tokenizer.markers, codec.tokenizer.decode
    content, section = list(ids), []
    if thinking:
        content = content[content.index(codec.think_end) + 1 :] if codec.think_end in content else []
    if marks.section_begin in content:
        cut = content.index(marks.section_begin)
        content, section = content[:cut], content[cut + 1 :]
    calls = []
    while marks.call_begin in section and marks.call_end in section:
        begin, end = section.index(marks.call_begin), section.index(marks.call_end)
        call, section = section[begin + 1 : end], section[end + 1 :]
        middle = call.index(marks.argument_begin) if marks.argument_begin in call else len(call)
        name = text(call[:middle]).removeprefix("functions.").rpartition(":")[0]
        calls.append((name, text(call[middle + 1 :])))
    return Answer(text(content), tuple(calls))


def cells_of(run: Path, count: int, split: str = "heldout", modes: Sequence[str] = tuple(MODES)) -> Cells:
    """`count` problems of each evaluated family and mode, as "family/mode"."""
    found = families(run)
    return {
        f"{name}/{mode}": problems(name, split, count, seed=SEED, thinking=MODES[mode], families=found)
        for name, one in found.items()
        if one.evaluated
        for mode in modes
    }


def score(model: KimiNano, codec: Codec, cells: Cells, rows: int = 1024) -> dict[str, float]:
    """Share of right answers by cell. Decodes `rows` problems at a time, the longest answers together."""
    flat = [(name, p, codec.prompt(p), len(codec.target(p))) for name, found in cells.items() for p in found]
    flat.sort(key=lambda entry: entry[3])
    right = dict.fromkeys(cells, 0)
    for at in range(0, len(flat), rows):
        batch = flat[at : at + rows]
        answers = greedy(model, [prompt for _, _, prompt, _ in batch], codec.end, batch[-1][3] + 16)
        for (name, p, _, _), ids in zip(batch, answers):
            right[name] += check(p, parse_answer(codec, ids, p.thinking))
    return {name: round(right[name] / len(found), 4) for name, found in cells.items()}


def baselines(cells: Cells) -> dict[str, dict[str, float]]:
    """Scores of two trivial answers, by cell: always the most frequent one, and a copy from the prompt."""
    return {
        name: {
            "constant": round(sum(check(p, constant_baseline(p.family)) for p in found) / len(found), 4),
            "copy": round(sum(check(p, copy_baseline(p)) for p in found) / len(found), 4),
        }
        for name, found in cells.items()
    }


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description="Score kimi-nano by family.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="exported checkpoint")
    add("--run", type=Path, default=Path("runs/out/kimi_nano"), help="directory of the run, for its passages")
    add("--count", type=int, default=256, help="problems per family, split and mode")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to decode")
    add("--log", type=Path, help="file to which each line is added too")
    add("--finish-after", type=float, default=1e9, help="begin no further part so many seconds after the start")
    args = parser.parse_args()
    codec = Codec(args.model)
    model = read_back(args.model).to(args.device).cast(torch.bfloat16 if args.device == "cuda" else torch.float32)
    rows = []
    for split in ("heldout", "structural", "wide", "train"):
        for mode in MODES:
            if time.monotonic() - began > args.finish_after:
                print(f"out of time: {split} {mode} and what follows are not scored", flush=True)
                break
            begin = time.monotonic()
            cells = cells_of(args.run, args.count, split, [mode])
            exact, plain = score(model, codec, cells), baselines(cells)
            row = {
                "kind": "evaluation", "split": split, "mode": mode, "count": args.count,
                "seconds": round(time.monotonic() - begin, 1),
                "families": {n.rpartition("/")[0]: {"exact": exact[n], **plain[n]} for n in cells},
            }  # fmt: skip
            rows.append(row)
            if args.log:
                with args.log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    print(json.dumps({"model": args.model.name, "rows": rows}))


if __name__ == "__main__":
    main()
