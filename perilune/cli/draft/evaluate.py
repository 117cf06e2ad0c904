"""`perilune draft evaluate`: acceptance length on problems that were kept out of training, and speed."""

import json
from pathlib import Path
from typing import Any

import click
import torch

from perilune.cli.shared import display, options
from perilune.cli.shared.rows import numbers
from perilune.core.jsonfile import spelled, write_output
from perilune.draft import plot, report, speed
from perilune.engine.llm import LLM
from perilune.formats.hub import resolve_model
from perilune.loading.eagle3 import require_draft
from perilune.model.config import KimiConfig
from perilune.tasks.problem import SEED

SERVED = 3  # chain length that is timed and plotted, if it is among those measured


@click.command()
@click.argument("draft", type=options.FOLDER)
@click.option("--model", default="kimi-nano", help="Target model of DRAFT.")
@click.option("--count", type=click.IntRange(2), default=64, help="Problems per family.")
@click.option("--lengths", default="3", help="Drafts per verify step to measure, 1 to 8, separated by commas.")
@click.option(
    "--splits",
    default=",".join(report.SPLITS),
    help="Problem sets: heldout, drawn as in training; structural, with words and layouts that training never had.",
)
@click.option("--max-tokens", type=click.IntRange(4), default=1024, help="Tokens of an answer, at most.")
@click.option("--seed", type=int, default=SEED, help="Which problems are drawn.")
@click.option(
    "--speed",
    "timed",
    type=click.IntRange(0),
    default=8,
    help="Problems per family (of the first split) on which the engine is timed, with and without drafts; 0: none.",
)
@click.option("--users", default="1,8", help="Requests at once while --speed times, separated by commas.")
@click.option("--plot", "drawing", type=options.OUT_FILE, help="Also draw tokens per verify step as SVG.")
@click.option("--json", "file", type=options.OUT_FILE, help="Also write the records here.")
@options.engine_options("device", "max_num_seqs")
def command(
    draft: Path,
    model: str,
    count: int,
    lengths: str,
    splits: str,
    max_tokens: int,
    seed: int,
    timed: int,
    users: str,
    drawing: Path | None,
    file: Path | None,
    assignments: tuple[str, ...],
    **engine: Any,
) -> None:
    """How many tokens a verify step brings with the drafter in DRAFT, by family and position, at T = 0 and 1, and how
    many times as fast the engine answers with it.

    "lookup" beside it copies what followed the same tokens before, and needs no model; speed is that of the engine
    that serves, the same prompts with and without drafts in turns. The last line of output is JSON.
    """
    options.require_effect(("users", timed, "with --speed 0"))
    wanted, most = _numbers(lengths, "--lengths", 8), _numbers(users, "--users", 512)
    served = SERVED if SERVED in wanted else wanted[0]
    chosen = splits.split(",")
    if not set(chosen) <= set(report.SPLITS):
        raise click.BadParameter(f"choose from {', '.join(report.SPLITS)}", param_hint="--splits")
    path = resolve_model(model)
    require_draft(draft, KimiConfig.from_directory(path))  # checked now, because answering takes minutes
    # Texts do not depend on drafts; a large batch is faster without them.
    with LLM(path, **options.engine_values(engine, assignments, {"draft": "off"})) as llm:
        rows = {s: report.answers(llm, count, seed=seed, max_tokens=max_tokens, split=s) for s in chosen}
        ends = llm.tokenizer.stop_ids if llm.tokenizer is not None else frozenset()
        dtype = getattr(torch, llm.config.dtype)
        device = torch.device({key: value for key, value, _ in llm.info.choices}.get("device", llm.config.device))
    records = [
        {"split": split, **record}
        for split, some in rows.items()
        for record in report.measure(path, draft, some, lengths=wanted, device=device, dtype=dtype)
    ]
    speeds: list[dict[str, Any]] = []
    if timed:
        asked = report.questions(rows[chosen[0]][0.0], timed, max_tokens=max_tokens, ends=ends)
        values = options.engine_values(engine, assignments, {})
        speeds = speed.measure(path, draft, asked, report.evaluated(), length=served, users=most, engine=values)
    display.show(report.table(records, speeds), width=200)
    result = {
        "draft": "evaluate", "model": path.name, "seed": seed, "count": count, "max_tokens": max_tokens,
        "records": records, "speed": speeds,
    }  # fmt: skip
    click.echo(json.dumps(result))  # shown even if the file cannot be written
    if file is not None:
        write_output(file, spelled(result))
    if drawing is not None:
        title = f"Tokens per verify step, chains of {served}: {draft.name} for {path.name}"
        write_output(drawing, plot.picture(records, served, title))


def _numbers(text: str, option: str, most: int) -> list[int]:
    found = sorted(set(numbers(text, option)))
    if found[-1] > most:
        raise click.BadParameter(f"must be numbers from 1 to {most}", param_hint=option)
    return found
