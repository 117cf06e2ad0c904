"""`perilune bench loading`: from disk to memory, beside the disk's own speed."""

import sys
import tempfile
from pathlib import Path

import click
import torch

from perilune.bench import loading
from perilune.cli.shared.options import FOLDER, FloatRange, device_option
from perilune.cli.shared.rows import finish, ledger_option, say
from perilune.core.errors import ConfigError

MARK = 0.8  # goal: this share of the disk's sequential bandwidth


@click.command()
@click.option(
    "--directory",
    "parent",
    type=FOLDER,
    default=Path(tempfile.gettempdir()),
    help="Where to write the checkpoint, on the disk to measure. It is removed afterwards.",
)
@click.option("--gigabytes", type=FloatRange(2), default=12.0, help="Size of the checkpoint in GB.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Rounds of cold and warm loads; medians count.")
@click.option("--threads", type=click.IntRange(1), help="Threads that read.  [default: the loader's choice]")
@device_option
@ledger_option("loading")
def command(
    parent: Path, gigabytes: float, rounds: int, threads: int | None, device: str, directory: Path | None
) -> None:
    """Load a synthetic INT4 checkpoint of Kimi K2's shapes, with the page cache cold and warm."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("the page cache can be emptied and watched on Linux only: run this bench there")
    row = loading.measure(
        parent,
        gigabytes=gigabytes,
        rounds=rounds,
        threads=threads,
        device=("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device,
        report=say,
    )
    click.echo(
        f"disk {row['disk_gb_per_s']:.2f} GB/s; cold load {row['cold_gb_per_s']:.2f} GB/s, "
        f"{100 * row['fraction']:.1f} % of it (mark: {100 * MARK:.0f} %); from the page cache "
        f"{row['warm_gb_per_s']:.2f} GB/s",
        err=True,
    )
    finish([row], directory)
