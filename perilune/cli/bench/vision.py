"""`perilune bench vision`: a picture through a vision tower of Kimi K2.5's size."""

from pathlib import Path

import click

from perilune.bench import vision
from perilune.cli.shared.rows import finish, ledger_option, numbers, say


@click.command()
@click.option(
    "--patches", default="128,64,32", help="Sides of the pictures in patches of 14 pixels, separated by commas."
)
@ledger_option("vision")
def command(patches: str, directory: Path | None) -> None:
    """Time and TFLOP/s of square pictures through Kimi K2.5's vision tower, with random weights."""
    finish(vision.measure(numbers(patches, "--patches"), say), directory)
