"""`perilune evaluate`: scores on checked tasks, as one table."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import click

from perilune.bench.ledger import origin
from perilune.cli.shared import display, options, targets
from perilune.cli.shared.rows import keep, ledger_option
from perilune.core.errors import ConfigError
from perilune.core.jsonfile import spelled, write_output
from perilune.evals import evaluate
from perilune.evals.given import digest
from perilune.tasks.pictures.problems import SHOWN
from perilune.tasks.problem import SEED

MODES = {"on": [True], "off": [False], "both": [True, False]}


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--families", help="Task families, separated by commas.  [default: all]")
@click.option(
    "--count",
    type=click.IntRange(2),
    default=500,
    help="Problems per family and mode: half held out by hash, half by structure.",
)
@click.option(
    "--problems",
    type=options.FILE,
    help="Problems of this JSONL file instead, which may be an .xz; bench/problems/README.md has its format.",
)
@click.option("--thinking", type=click.Choice(list(MODES)), default="both", help="Modes to measure.")
@click.option(
    "--pictures",
    type=click.Choice(SHOWN),
    default="real",
    help="What families with pictures show: blank or none measure what a model gets without looking.",
)
@click.option("--concurrency", type=click.IntRange(1, 256), default=16, help="Requests at once.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=1024,
    help="Tokens of an answer, at most; large models think longer.",
)
@click.option("--seed", type=int, default=SEED, help="Which problems are sampled.")
@click.option("--failures", type=options.FILE, help="Write every wrong answer to this JSON file.")
@targets.target_options
@options.engine_options(*options.COMMON)
@ledger_option("evaluate")
def command(
    model: str,
    families: str | None,
    count: int,
    problems: Path | None,
    thinking: str,
    pictures: str,
    concurrency: int,
    max_tokens: int,
    seed: int,
    failures: Path | None,
    access: targets.Access,
    assignments: tuple[str, ...],
    directory: Path | None,
    **engine: Any,
) -> None:
    """Exact match of MODEL on problems with one checkable answer each, greedy, baselines beside it.

    MODEL is served on a free port meanwhile, or is the http(s) address of any OpenAI-compatible endpoint. The last line
    of output is JSON.
    """
    if failures is not None and not ((into := failures.absolute().parent).is_dir() and os.access(into, os.W_OK)):
        why = "its directory is not writable" if into.is_dir() else "no such directory"
        raise ConfigError(f"cannot write {failures}: {why}; choose another file with --failures")
    settings: dict[str, Any] = {"max_tokens": max_tokens, "concurrency": concurrency, "temperature": 0.0}
    if problems is not None:
        if given := options.given_of("count", "seed", "pictures"):
            raise ConfigError(
                f"{given[0]} does not apply to --problems, which asks every problem of its file: leave it out"
            )
        cells = evaluate.plan_of_file(problems, families, MODES[thinking])
        settings |= {"problems": problems.name, "problems_sha256": digest(problems)}
    else:
        cells = evaluate.plan(evaluate.chosen(families), MODES[thinking], count, seed, pictures)
        settings |= {"seed": seed} | ({} if pictures == "real" else {"pictures": pictures})

    async def ask() -> tuple[str, list[evaluate.Tally], list[evaluate.Failure]]:
        async with access.target(model, engine, assignments) as endpoint:
            with display.progress() as bar:
                task = bar.add_task(endpoint.model, total=sum(len(c.problems) for c in cells))
                tallies, wrong = await evaluate.evaluate(
                    endpoint, cells, concurrency=concurrency, max_tokens=max_tokens, advance=lambda: bar.advance(task)
                )
            return endpoint.model, tallies, wrong

    name, tallies, wrong = asyncio.run(ask())
    settings |= origin(model, assignments)
    rows = [evaluate.row(name, cell, tally, **settings) for cell, tally in zip(cells, tallies)]
    display.show(evaluate.table(rows))
    for remark in evaluate.remarks(rows):
        click.echo(remark)
    try:
        keep(rows, directory)
    finally:  # rows are shown even if the disk is full
        click.echo(json.dumps({"bench": "evaluate", "model": name, "rows": rows}))
    if failures is not None:
        try:
            write_output(failures, spelled({"model": name, "failures": [f.record() for f in wrong]}))
        except OSError as e:
            raise ConfigError(f"cannot write {failures}: {e.strerror}; choose another file with --failures") from e
        click.echo(f"{len(wrong)} wrong answers written to {failures}", err=True)
