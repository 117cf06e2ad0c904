"""`perilune bench`: how fast, and how far from the ceiling."""

import json
from pathlib import Path

import click

from perilune.bench import decode as decode_bench
from perilune.bench import ledger
from perilune.cli import bench_aa, bench_rivals
from perilune.core.config import EngineConfig, build
from perilune.model.hub import resolve_model


@click.group()
def command() -> None:
    """Measure speed, with the ceiling beside it. The last line of output is JSON."""


command.add_command(bench_aa.command, "aa")
command.add_command(bench_rivals.command, "rivals")


@command.command()
@click.argument("model", default="kimi-nano")
@click.option("--batch", default="1,4,16", show_default=True, help="Requests decoding together, separated by commas.")
@click.option("--context", default=128, show_default=True, help="Prompt tokens of each request.")
@click.option("--tokens", default=256, show_default=True, help="Tokens each request decodes.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32 or bfloat16.")
@click.option("--threads", type=int, default=None, help="CPU threads. [default: torch's choice]")
@click.option(
    "--ledger", "directory", type=click.Path(path_type=Path), default=None,
    help=f"Also append the rows to DIRECTORY/decode.jsonl (the project's is {ledger.DEFAULT}).",
)  # fmt: skip
def decode(
    model: str,
    batch: str,
    context: int,
    tokens: int,
    device: str,
    dtype: str,
    threads: int | None,
    directory: Path | None,
) -> None:
    """Decode speed of the real engine on MODEL's real weights, random prompts, greedy."""
    try:
        batches = [int(b) for b in batch.split(",")]
    except ValueError as e:
        raise click.BadParameter("must be whole numbers separated by commas", param_hint="--batch") from e
    if min(batches) < 1 or context < 1 or tokens < 2:
        raise click.BadParameter("batch and context must be at least 1, tokens at least 2")
    config = build(
        EngineConfig,
        {
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "max_num_seqs": max(batches),
            "max_model_len": context + tokens + 1,
            "prefix_cache": False,  # every prompt must be computed
        },
    )
    rows = decode_bench.measure(
        resolve_model(model), config, batches, context, tokens, lambda line: click.echo(line, err=True)
    )
    if directory is not None:
        click.echo(f"written to {ledger.append(rows, directory)}", err=True)
    for row in rows:
        click.echo(json.dumps(row))
