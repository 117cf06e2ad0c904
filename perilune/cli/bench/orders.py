"""`perilune bench orders`: what it costs to send steps to other ranks."""

import click

from perilune.bench.ranks import orders
from perilune.cli.shared.rows import finish, numbers, say
from perilune.core.errors import ConfigError


@click.command()
@click.option("--tp", type=int, default=2, help="Ranks, this process included.")
@click.option("--batch", default="1,8,64", help="Requests of a step, separated by commas.")
@click.option("--polling/--sleeping", default=True, help="Ranks wait by polling, as on GPUs, or asleep, as on CPUs.")
def command(tp: int, batch: str, polling: bool) -> None:
    """What it costs to send a decode step to other ranks: microseconds, medians; no model, no GPU."""
    if not 2 <= tp <= 64:
        raise ConfigError(f"--tp must be from 2 to 64, not {tp}")
    finish(orders.measure(tp, numbers(batch, "--batch"), say, polling=polling), None)
