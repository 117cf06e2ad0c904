"""`perilune kv clear`: deletes stored KV."""

from pathlib import Path

import click

from perilune.core.files import expanded
from perilune.kv.disk import clear


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def command(directory: Path) -> None:
    """Delete the KV of all models in DIRECTORY, while no engine uses it."""
    files, size = clear(expanded(str(directory), "DIRECTORY"))
    click.echo(f"deleted {files} blocks, {size / 1e9:.2f} GB")
