"""`perilune draft evaluate`: acceptance length on held-out problems."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from perilune.cli import options
from perilune.core.config import EngineConfig
from perilune.draft import report
from perilune.engine.llm import LLM
from perilune.formats.jsonfile import write_object
from perilune.model.hub import resolve_model
from perilune.tasks.problem import SEED

WIDTH = 140  # of the table where there is no terminal


@click.command()
@click.argument("draft", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--model", default="kimi-nano", show_default=True, help="The target.")
@click.option("--count", type=click.IntRange(min=2), default=64, show_default=True, help="Problems per family.")
@click.option(
    "--lengths", default="3", show_default=True, help="Chain lengths to measure, separated by commas, up to 8."
)
@click.option("--max-tokens", type=click.IntRange(min=4), default=1024, show_default=True, help="Of an answer.")
@click.option("--seed", type=int, default=SEED, show_default=True, help="Which problems are drawn.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the records here.")
@options.field_option(EngineConfig, "device")
@options.field_option(EngineConfig, "max_num_seqs")
@options.set_option
def command(
    draft: Path,
    model: str,
    count: int,
    lengths: str,
    max_tokens: int,
    seed: int,
    file: Path | None,
    assignments: tuple[str, ...],
    **engine: Any,
) -> None:
    """How many tokens a verify step brings with the drafter in DRAFT, by family and position, at T = 0 and 1.

    Problems are held out from training. "lookup" beside it copies what followed the same tokens before, and needs no
    model. The last line of output is JSON.
    """
    wanted = sorted({int(n) for n in lengths.split(",")}) if lengths.replace(",", "").isdigit() else [0]
    if not 1 <= wanted[0] <= wanted[-1] <= 8:
        raise click.BadParameter("must be numbers from 1 to 8", param_hint="--lengths")
    path = resolve_model(model)
    # The texts are the same with and without; a large batch is faster without.
    with LLM(path, **options.engine_values(engine, assignments, {"draft": "off"})) as llm:
        rows = report.answers(llm, count, seed=seed, max_tokens=max_tokens)
        dtype = getattr(torch, llm.config.dtype)
        chosen = {key: value for key, value, _ in llm.info.choices}.get("device", llm.config.device)
    records = report.measure(path, draft, rows, lengths=wanted, device=torch.device(chosen), dtype=dtype)
    for table in report.tables(records):
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    result = {
        "draft": "evaluate", "model": path.name, "split": report.SPLIT, "seed": seed, "count": count,
        "max_tokens": max_tokens, "records": records,
    }  # fmt: skip
    if file is not None:
        write_object(file, result)
    click.echo(json.dumps(result))
