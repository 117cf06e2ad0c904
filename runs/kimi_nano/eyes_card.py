"""The model card's part about pictures: how the eyes were trained, what they are right about, and what a model without
them would get."""

import hashlib
import json
from pathlib import Path
from typing import Any

from perilune.evals.evaluate import HELD_OUT, STRUCTURAL
from perilune.tasks.families import PICTURES
from runs.kimi_nano.state import EYES_FILE
from runs.kimi_nano.tower import VISION

Row = dict[str, Any]

SPLITS = {HELD_OUT: "in-distribution", STRUCTURAL: "structural"}
SKILLS = {
    "picture_sums": "a sum or difference of two numbers of 2 or 3 digits, in any font, size, colour and place",
    "picture_shapes": "counting up to 9 coloured shapes, comparing counts, naming a colour",
    "picture_charts": "bar charts (a value, the highest or lowest bar, how many) and tables of two columns",
    "picture_buttons": "which button a window shows",
}
PART = """
## Pictures

{parameters:,} parameters of MoonViT with its projector: {layers} layers, {width} wide, patches of 14 pixels. They were
trained in {minutes:.1f} minutes on one {device}, {steps:,} steps of {pictures:,} pictures in all, each used {times}
times.{before} {how}
Pictures are shrunk to about 200 patches: text that then has fewer than 14 pixels cannot be read.

{table}

Problems as above: held out by a hash of what is in the picture, and by structure: {structure}.
"constant" is what the most frequent answer of training would get, "blank" what the model gets with a white picture,
"no picture" with the question alone (both with thinking off); n is the number of problems behind each score.
{skills}

Those pictures are written in Pillow's own fonts, which are the same everywhere. Training had others
too: of {fonts} font files one in five was kept apart. In those, structural otherwise too, thinking on:
{in_new_fonts}.
"""
FROZEN = "The text model was frozen: what it does with text is what it did before."
LEARNT = """In the last {through:,} steps the text model learnt too, at a peak rate of {words_rate:g},
from pictures and from its own text{kept}."""
STRUCTURE = "wordings, words\nand pairs of colours that training never shows"


def weights_hash(model: Path) -> str | None:
    """sha256 of the tower's shard; None without one."""
    shard = model / EYES_FILE
    return hashlib.sha256(shard.read_bytes()).hexdigest() if shard.is_file() else None


def trained(log: Path, model: Path) -> Row:
    """What a log of runs.kimi_nano.eyes says of the tower in `model`."""
    try:
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        kinds = {row["kind"]: row for row in rows}
        start, stop = kinds["start"], kinds["stop"]
        scores = [row for row in rows if row["kind"] == "score" and row["mode"] == "thinking"]
        finished = stop["finished"]
        begun = max((i for i, row in enumerate(rows) if row["kind"] == "start" and not row["step"]), default=0)
        stops = [row for row in rows[begun:] if row["kind"] == "stop"]  # one per process; each counts blocks from 0
        fresh, again = sum(row["fresh"] for row in stops), sum(row["again"] for row in stops)
    except OSError as e:
        raise SystemExit(f"cannot read the eyes' log {log}: {e.strerror}") from e
    except (ValueError, KeyError) as e:
        raise SystemExit(f"{log} is not the log of a training of eyes: {e}") from e
    if not finished or not scores or not fresh:
        raise SystemExit(f"{log} is of an unfinished training: go on with --resume")
    score = scores[-1]  # structural ones come last
    return {
        "weights_sha256": weights_hash(model),
        **{key: start[key] for key in ("parameters", "device", "torch", "seed", "fonts")},
        "minutes": round(stop["seconds"] / 60, 1),
        "steps": stop["step"],
        "pictures": stop["pictures"],
        "times": round((fresh + again) / fresh, 1),
        "through": stop["through"],
        "words_rate": start["words_rate"],
        "words_kept": start["words_kept"],
        "before": " They began with the tower of an earlier training." if start.get("tower") else "",
        "structural": score["exact"],
        "structural_count": score["count"],
    }


def newest(ledger: Path, model: str = "kimi-nano") -> dict[tuple[str, str, bool, str], Row]:
    """The newest row of each kind of picture, split, mode and `pictures`; SystemExit names a missing one."""
    found: dict[tuple[str, str, bool, str], Row] = {}
    for row in map(json.loads, ledger.read_text().splitlines()):
        if row["model"] == model and row["server"] == "private" and row["family"] in PICTURES:
            found[row["family"], row["split"], row["thinking"], row.get("pictures", "real")] = row
    for name in SKILLS:
        for split in SPLITS:
            for thinking, how in ((True, "real"), (False, "real"), (False, "blank"), (False, "none")):
                if (name, split, thinking, how) not in found:
                    raise SystemExit(
                        f"{ledger} has no row of {model} for {name}, {split}, thinking {thinking}, pictures {how}: run "
                        f"perilune evaluate --families {name} --pictures {how} --ledger"
                    )
    return found


def table(rows: dict[tuple[str, str, bool, str], Row]) -> str:
    lines = [
        "| pictures | problems | thinking on | thinking off | constant | blank | no picture | n |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SKILLS:
        for split, said in SPLITS.items():
            on, off = (rows[name, split, thinking, "real"] for thinking in (True, False))
            blank, none = (rows[name, split, False, how]["exact_match"] for how in ("blank", "none"))
            cells = [f"{r['exact_match']:.1f} ({r['low']:.0f}-{r['high']:.0f})" for r in (on, off)]
            found = [*cells, f"{on['constant']:.1f}", f"{blank:.1f}", f"{none:.1f}", str(on["n"])]
            lines.append(f"| {name} | {said} | {' | '.join(found)} |")
    return "\n".join(lines)


def part(facts: Row | None, ledger: Path) -> str:
    """Empty for weights without eyes."""
    if facts is None:
        return ""
    kept = f"; {facts['words_kept']:.0%} of its weights are those of before" if facts["words_kept"] else ""
    return PART.format(
        **{"before": ""} | facts,
        how=LEARNT.format(**facts, kept=kept) if facts["words_rate"] else FROZEN,
        layers=VISION["vt_num_hidden_layers"],
        width=VISION["vt_hidden_size"],
        table=table(newest(ledger)),
        structure=STRUCTURE,
        skills="\n".join(f"- {name}: {text}" for name, text in SKILLS.items()),
        in_new_fonts=", ".join(f"{name} {100 * share:.1f} %" for name, share in facts["structural"].items())
        + f" of {facts['structural_count']}",
    )
