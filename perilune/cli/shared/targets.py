"""Options of verbs that work on any OpenAI endpoint, or on a model that they serve meanwhile."""

import functools
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from perilune.cli.shared.options import FloatRange, given_of
from perilune.client.endpoint import READ_SECONDS, Endpoint
from perilune.client.target import open_target
from perilune.core.errors import ConfigError


@dataclass(frozen=True)
class Access:
    """What `target_options` say about an endpoint."""

    model_name: str | None
    key_file: Path | None
    timeout: float

    def require_server(self, named: bool, how: str) -> None:
        """ConfigError if an option of an endpoint is given and none is `named`."""
        if not named and given_of("model_name", "api_key_file", "timeout"):
            raise ConfigError(f"--model-name, --api-key-file and --timeout belong to a running server: give its {how}")

    @functools.cached_property
    def key(self) -> str | None:
        return key(self.key_file)

    def endpoint(self, url: str) -> Endpoint:
        return Endpoint(url, model=self.model_name, api_key=self.key, timeout=self.timeout)

    def target(
        self, model: str, engine: Mapping[str, Any], assignments: Sequence[str]
    ) -> AbstractAsyncContextManager[Endpoint]:
        """The endpoint at `model`, or `model` served meanwhile with the engine options that were given and --set."""
        return open_target(
            model,
            model_name=self.model_name,
            api_key=self.key,
            timeout=self.timeout,
            serve_options=serve_options(engine, assignments),
        )


def target_options(function: Callable[..., None]) -> Callable[..., None]:
    """--model-name, --api-key-file and --timeout, for a MODEL that is an address, taken as `access`."""

    @functools.wraps(function)
    def command(model_name: str | None, api_key_file: Path | None, timeout: float, **others: Any) -> None:
        function(access=Access(model_name, api_key_file, timeout), **others)

    for option in (
        click.option(
            "--timeout",
            type=FloatRange(0, min_open=True),
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
        command = option(command)
    return command


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
    if not found.isascii():
        raise ConfigError(f"the key in {file} has a character beyond ASCII, which no header can carry: copy it again")
    if others:
        click.echo(f"warning: the API key file {file} is readable by others: chmod 600 {file}", err=True)
    return found


def serve_options(given: Mapping[str, Any], assignments: Sequence[str]) -> list[str]:
    """Arguments of `perilune serve` from engine options that were given and --set."""
    named = []
    for key, value in given.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            named.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            named += [f"--{flag}", str(value)]
    return named + [text for assignment in assignments for text in ("--set", assignment)]
