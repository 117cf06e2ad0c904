"""`perilune bench convert`: INT4 to NVFP4, beside the usual recipe."""

import json
from pathlib import Path

import click

from perilune.bench import conversion, ledger
from perilune.model.hub import resolve_model

DB_MARKS = {"gaussian": 22.6, "lognormal": 23.0, "student5": 23.1}  # what this project promises
SECONDS_MARK, KL_MARK = 0.15, 0.6


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--tokens", type=click.IntRange(min=64), default=20_480, show_default=True, help="Compared at least.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Per matrix; medians count.")
@click.option(
    "--ledger",
    "directory",
    type=click.Path(path_type=Path),
    default=None,
    help=f"Also append the row to DIRECTORY/convert.jsonl (the project's is {ledger.DEFAULT}).",
)
def command(model: str, tokens: int, rounds: int, directory: Path | None) -> None:
    """Error and time of the exact search for NVFP4 scales, and the KL it leaves in MODEL, whose experts are INT4."""
    row = conversion.measure(
        resolve_model(model), tokens=tokens, rounds=rounds, report=lambda line: click.echo(line, err=True)
    )
    marks = ", ".join(f"{name} {row[f'{name}_db']:.2f} (mark: {mark})" for name, mark in DB_MARKS.items())
    click.echo(f"SQNR in dB: {marks}", err=True)
    click.echo(
        f"{row['seconds_per_matrix']:.3f} s per matrix (mark: {SECONDS_MARK}); KL {row['kl_ratio']:.2f} of the usual "
        f"recipe's (mark: {KL_MARK})",
        err=True,
    )
    if directory is not None:
        click.echo(f"written to {ledger.append([row], directory)}", err=True)
    click.echo(json.dumps(row))
