"""`perilune bench exchange`: sum over ranks, residual and norm, between GPUs."""

from pathlib import Path

import click

from perilune.bench.ranks import exchange
from perilune.cli.shared.rows import finish, ledger_option, numbers, say
from perilune.core.errors import ConfigError
from perilune.dist.peer_memory import RANKS


@click.command()
@click.option("--tp", type=int, default=2, help="Ranks, one per GPU: 2, 4 or 8.")
@click.option("--tokens", default="1,2,4,8,16,64,256,2048,8192", help="Tokens of a step, separated by commas.")
@ledger_option("exchange")
def command(tp: int, tokens: str, directory: Path | None) -> None:
    """The exchange of tensor-parallel ranks at Kimi K2's width, over peer memory and over NCCL, in CUDA graphs."""
    sizes = numbers(tokens, "--tokens")
    if tp not in RANKS:
        raise ConfigError(f"--tp must be one of {', '.join(map(str, RANKS))}, not {tp}")
    finish(exchange.measure(tp, sizes, say), directory)
