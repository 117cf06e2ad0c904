"""Options of verbs that work on any OpenAI endpoint, or on a model that they serve meanwhile."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from perilune.client.endpoint import READ_SECONDS
from perilune.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def target_options(function: F) -> F:
    """--model-name, --api-key-file and --timeout, for a MODEL that is an address."""
    for option in (
        click.option(
            "--timeout",
            type=click.FloatRange(0, min_open=True),
            default=READ_SECONDS,
            help="Seconds without a byte from the server after which to give up.",
        ),
        click.option(
            "--api-key-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="File with the endpoint's key as its only line.",
        ),
        click.option("--model-name", help="The model's name at the endpoint.  [default: the only one it lists]"),
    ):
        function = option(function)
    return function


def key(file: Path | None) -> str | None:
    """The key in a file; ConfigError unless the file holds exactly one."""
    if file is None:
        return None
    try:
        with file.open() as opened:
            others = os.fstat(opened.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH)
            found = opened.read().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the API key file {file}: {e}") from e
    if not found or any(c.isspace() for c in found):
        raise ConfigError(f"the API key file {file} must hold one key without spaces")
    if others:
        click.echo(f"warning: the API key file {file} is readable by others: chmod 600 {file}", err=True)
    return found


def serve_options(given: dict[str, Any], assignments: Sequence[str]) -> list[str]:
    """Arguments of `perilune serve` from engine options that were given and --set."""
    named = []
    for key, value in given.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            named.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            named += [f"--{flag}", str(value)]
    return named + [text for assignment in assignments for text in ("--set", assignment)]
