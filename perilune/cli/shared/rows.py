"""Prints the rows of verbs that measure as JSON, and appends them to the ledger if asked to."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from perilune.bench import ledger
from perilune.core.files import make_writable

F = TypeVar("F", bound=Callable[..., Any])


def ledger_option(bench: str) -> Callable[[F], F]:
    """`--ledger DIRECTORY`, which a command takes as `directory`."""
    return click.option(
        "--ledger",
        "directory",
        type=click.Path(path_type=Path),
        callback=_writable,
        help=f"Also append what is measured to DIRECTORY/{bench}.jsonl (the project's is bench/results); DIRECTORY is "
        "made if it does not exist.",
    )


def _writable(_: click.Context, __: click.Parameter, directory: Path | None) -> Path | None:
    """The directory; checked now, so that an error does not come after the measurement."""
    if directory is not None:
        make_writable(directory, "--ledger")
    return directory


def keep(rows: Sequence[dict[str, Any]], directory: Path | None) -> None:
    """Appends the rows to the ledger in `directory`. ConfigError with the remedy if it cannot be written."""
    if directory is not None:
        say(f"written to {ledger.append(list(rows), directory)}")


def finish(rows: Sequence[dict[str, Any]], directory: Path | None) -> None:
    """Keeps the rows and prints each on a line, the last row last."""
    try:
        keep(rows, directory)
    finally:  # rows are shown even if the disk is full
        for row in rows:
            click.echo(json.dumps(row))


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError as e:
        raise click.BadParameter("must be whole numbers separated by commas", param_hint=option) from e
    if min(found) < 1:
        raise click.BadParameter("must be at least 1", param_hint=option)
    return found


def say(line: str) -> None:
    click.echo(line, err=True)
