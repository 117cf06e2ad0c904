"""What verbs show in a terminal besides lines of text: a progress bar, a table."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def progress() -> Progress:
    """A bar that counts on standard error; hidden if that is no terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def show(table: Table, width: int = 120) -> None:
    """Prints a table, `width` characters wide if there is no terminal."""
    Console(width=None if sys.stdout.isatty() else width).print(table)
