"""`perilune bench prefill`: a prompt in one step, per layer, on shapes too large for one GPU."""

from pathlib import Path

import click

from perilune.bench import microscope
from perilune.bench import prefill as bench
from perilune.bench.ranks import over_ranks
from perilune.bench.shapes import SHAPES
from perilune.cli.bench.decode import ep_option, gpus_option, layers_option, shape_option
from perilune.cli.shared.rows import finish, ledger_option, numbers, say
from perilune.ops.harness import registry
from perilune.ops.harness.power import measure_roof


@click.command()
@shape_option
@layers_option
@click.option("--tokens", default="1000,4000,10000", help="Prompt lengths, separated by commas.")
@click.option(
    "--cached",
    type=click.IntRange(0),
    default=0,
    help="Tokens already cached before the prompt, rounded down to blocks of 64; on one GPU.",
)
@click.option("--experts", type=click.Choice(bench.FORMATS), default="int4-g32", help="Format of routed experts.")
@click.option(
    "--rest-dtype",
    type=click.Choice(bench.RESTS),
    default="bf16",
    help="Weights besides the routed experts; w8a8: fp8, with fp8_activations of `serve`.",
)
@click.option("--tp", default=1, help="Ranks that share the model, one per GPU.")
@ep_option
@gpus_option
@click.option("--device", default="auto", help="Device of several ranks: auto, cpu or cuda.")
@click.option("--kernels", is_flag=True, help="Print each kernel's time.")
@click.option("--power", is_flag=True, help="Also measure energy, and the least time at the power limit; on one GPU.")
@click.option(
    "--op", "chosen", multiple=True, metavar="NAME=IMPL", help="Implementation of an operation, on one GPU; repeatable."
)
@ledger_option("prefill")
def command(
    shape: str | None,
    layers: int,
    tokens: str,
    cached: int,
    experts: str,
    rest_dtype: str,
    tp: int,
    ep: int,
    gpus: str | None,
    device: str,
    kernels: bool,
    power: bool,
    chosen: tuple[str, ...],
    directory: Path | None,
) -> None:
    """Time per layer of a prompt in one step, on a SHAPE (default: kimi-k2.5) with random weights; needs GPUs."""
    lengths, name = numbers(tokens, "--tokens"), shape or next(iter(SHAPES))
    if any("=" not in pair for pair in chosen):
        raise click.BadParameter("write NAME=IMPL", param_hint="--op")
    ops = dict(pair.split("=", 1) for pair in chosen)
    registry.check_overrides(ops)
    if max(tp, ep) > 1:
        if cached or ops or power:
            raise click.BadParameter("goes without --cached, --power and --op", param_hint="--tp, --ep")
        scales = "compact" if experts == "int4-compact" else "checkpoint"
        config = {"device": device, "tp": tp, "ep": ep, "gpus": gpus, "expert_scales": scales}
        config |= bench.rest_settings(rest_dtype)
        finish(over_ranks.prefill(name, layers, config, lengths, say, kernels=kernels), directory)
        return
    slices = microscope.Bench(name, layers)
    cached -= cached % bench.BLOCK
    if power:
        slices.power = measure_roof()
    finish(
        [
            bench.measure(
                slices, n, say, cached=cached, expert_format=experts, rest=rest_dtype, kernels=kernels, ops=ops
            )
            for n in lengths
        ],
        directory,
    )
