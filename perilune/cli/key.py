"""`perilune key`: a new API key, and its entry for the key file of `perilune serve`."""

import hashlib
import secrets
from pathlib import Path

import click

from perilune.core.errors import ConfigError
from perilune.server.keys import NAME, readable_by_others


@click.command()
@click.argument("name")
def command(name: str) -> None:
    """Make an API key for NAME: the key, shown once, on standard error, and its entry on standard output.

    `perilune key alice >> keys.toml`, then `perilune serve --api-key-file keys.toml`. The entry holds the key's SHA-256
    only; limits are added to it by hand (docs/operations.md).
    """
    if not NAME.fullmatch(name):
        raise ConfigError("NAME must be 1 to 64 letters, digits, '.', '_' or '-'")
    key = f"plk-{secrets.token_urlsafe(32)}"
    click.echo(f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n')
    click.echo(f"The key of {name}, not stored anywhere: {key}", err=True)
    output = Path("/dev/stdout")  # By this name, the file is found even if its directory is closed to this user.
    if output.is_file() and readable_by_others(output):
        file = output.resolve()
        click.echo(f"warning: {file} is readable by others: chmod 600 {file}", err=True)
