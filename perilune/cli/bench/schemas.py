"""`perilune bench schemas`: tool calls and structured answers over awkward schemas, every one judged."""

import asyncio
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from perilune.bench.ledger import origin
from perilune.cli.shared import display, options, targets
from perilune.cli.shared.rows import keep, ledger_option
from perilune.core.errors import ConfigError
from perilune.core.jsonfile import spelled, write_output
from perilune.evals.schema_maker import schemas as draw

SEED = 20261121


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--schemas", "different", type=click.IntRange(1), default=400, help="Different schemas.")
@click.option("--calls", type=click.IntRange(1), default=2_000, help="Requests in all.")
@click.option("--concurrency", type=click.IntRange(1, 1024), default=64, help="Requests at once.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=320,
    help="Tokens of an answer; one that is cut off there counts as invalid.",
)
@click.option("--seed", type=int, default=SEED, help="Which schemas and requests are drawn.")
@click.option("--failures", type=options.FILE, help="Write every invalid answer to this JSON file.")
@targets.target_options
@options.engine_options(*options.COMMON)
@ledger_option("schemas")
def command(
    model: str,
    different: int,
    calls: int,
    concurrency: int,
    max_tokens: int,
    seed: int,
    failures: Path | None,
    access: targets.Access,
    assignments: tuple[str, ...],
    directory: Path | None,
    **engine: Any,
) -> None:
    """Validity of MODEL's tool calls and structured answers over awkward JSON schemas, at several temperatures.

    MODEL is served on a free port meanwhile, or is the http(s) address of any OpenAI-compatible endpoint. The last line
    of output is JSON.
    """
    from perilune.evals import schemas  # imports jsonschema, which is no dependency of the package

    if failures is not None and not failures.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {failures}: no such directory; choose another file with --failures")
    drawn = draw(different, seed)
    cases = schemas.plan(drawn, calls, seed)

    async def ask() -> tuple[str, schemas.Outcome, float]:
        async with access.target(model, engine, assignments) as endpoint:
            with display.progress() as bar:
                task = bar.add_task(endpoint.model, total=len(cases))
                begun = perf_counter()
                outcome = await schemas.run(
                    endpoint,
                    drawn,
                    cases,
                    concurrency=concurrency,
                    max_tokens=max_tokens,
                    advance=lambda: bar.advance(task),
                )
            return endpoint.model, outcome, perf_counter() - begun

    name, outcome, seconds = asyncio.run(ask())
    settings = {"seed": seed, "max_tokens": max_tokens, "concurrency": concurrency, "seconds": round(seconds, 1)}
    made = schemas.rows(name, outcome, different, **settings, **origin(model, assignments))
    display.show(schemas.table(made))
    for line in schemas.refusals(outcome, drawn):
        click.echo(f"refused: {line}")
    for failure in outcome.failures[:10]:
        click.echo(
            f"invalid: {failure['case']['kind']} of schemas {failure['case']['schemas']}: {failure['why'][:300]}"
        )
    try:
        keep(made, directory)
    finally:  # rows are shown even if the disk is full
        click.echo(json.dumps({"bench": "schemas", "model": name, "rows": made}))
    if failures is not None:
        try:
            write_output(failures, spelled({"model": name, "failures": outcome.failures}))
        except OSError as e:
            raise ConfigError(f"cannot write {failures}: {e.strerror}; choose another file with --failures") from e
        click.echo(f"{len(outcome.failures)} invalid answers written to {failures}", err=True)
