"""`perilune bench prefill`: a prompt in one step, per layer, on shapes too large for one GPU."""

from pathlib import Path

import click

from perilune.bench import microscope
from perilune.bench import prefill as bench
from perilune.bench.shapes import SHAPES
from perilune.cli.bench.decode import layers_option, shape_option
from perilune.cli.shared.rows import finish, ledger_option, numbers, say


@click.command()
@shape_option
@layers_option
@click.option("--tokens", default="1000,4000,10000", show_default=True, help="Prompt lengths, separated by commas.")
@click.option(
    "--cached",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Tokens before the prompt whose KV is cached, in whole blocks of 64.",
)
@click.option("--experts", type=click.Choice(bench.FORMATS), default="int4-g32", show_default=True)
@click.option("--kernels", is_flag=True, help="What each kernel of a layer adds.")
@ledger_option("prefill")
def command(
    shape: str | None, layers: int, tokens: str, cached: int, experts: str, kernels: bool, directory: Path | None
) -> None:
    """Time per layer of a prompt computed in one step, on a SHAPE with random weights (needs a GPU)."""
    lengths = numbers(tokens, "--tokens")
    slices = microscope.Bench(shape or next(iter(SHAPES)), layers)
    cached -= cached % bench.BLOCK
    finish(
        [bench.measure(slices, n, say, cached=cached, expert_format=experts, kernels=kernels) for n in lengths],
        directory,
    )
