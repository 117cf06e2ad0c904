"""`perilune bench peers`: this project beside others, on the same weights: experts on a GPU, or decoding on a CPU."""

from pathlib import Path
from typing import Any

import click
import torch

from perilune.bench import peers, rivals
from perilune.bench.shapes import shape
from perilune.cli.shared.options import require_effect
from perilune.cli.shared.rows import finish, ledger_option, numbers, say
from perilune.core.errors import ConfigError
from perilune.formats.hub import resolve_model
from perilune.ops.harness import registry, workspace

MARK, BATCH_MARK = 3.0, 4.0  # goals on two CPU cores: times transformers; 16 users times one


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--cpu", is_flag=True, help="Decode MODEL on the CPU, beside transformers and llama.cpp.")
@click.option(
    "--tokens",
    default="1,4,16,64,128,256,512,1000,2000,4000,10000",
    help="Tokens to compute experts for, separated by commas. Without --cpu.",
)
@click.option("--width", type=click.IntRange(1), help="Columns of each expert, a slice. Without --cpu.  [default: all]")
@click.option("--compact", is_flag=True, help="Experts with compact scales, which have no peer. Without --cpu.")
@click.option("--no-peer", is_flag=True, help="Time only this project's implementations. Without --cpu.")
@click.option(
    "--impl", "impls", multiple=True, help="Time this implementation of moe_int4 too; repeatable. Without --cpu."
)
@click.option("--threads", type=click.IntRange(1), help="With --cpu: threads of each.  [default: torch's choice]")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, help="With --cpu: prompt length.")
@click.option("--output-tokens", type=click.IntRange(8), default=256, help="With --cpu: tokens to decode.")
@click.option("--batch", type=click.IntRange(2), default=16, help="With --cpu: users at once in the batched run.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Timings of each side, in turns; medians count.")
@click.option(
    "--llama-cpp",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --cpu: time llama.cpp too, in the directory that runs/llama-cpp.sh made.",
)
@ledger_option("experts")
def command(
    model: str, cpu: bool, tokens: str, width: int | None, threads: int | None, directory: Path | None, **other: Any
) -> None:
    """Routed experts of one Kimi K2 layer on a GPU, beside an installed peer's kernels (humming-kernels). With --cpu:
    decode speed of MODEL, the engine alone and with several users, and transformers' best of two types."""
    require_effect(
        ("tokens width compact no_peer impls", not cpu, "with --cpu"),
        ("threads prompt_tokens output_tokens batch llama_cpp", cpu, "without --cpu"),
    )
    if not cpu:
        config = shape(peers.SHAPE, 1)
        width = width or config.moe_intermediate_size
        if config.moe_intermediate_size % width:
            raise ConfigError(f"--width {width} is no even slice of an expert: {config.moe_intermediate_size} wide")
        for impl in other["impls"]:
            registry.check_overrides({"moe_int4": impl})
        sizes = peers.Sizes(width, config.n_routed_experts, other["compact"])
        counts = numbers(tokens, "--tokens")
        settings = {"rounds": other["rounds"], "impls": other["impls"], "beside": not other["no_peer"]}
        with workspace.owned():
            rows = peers.measure(counts, sizes, **settings, report=say)
        finish(rows, directory)
        return
    rivals.require_transformers()
    row = rivals.measure(
        resolve_model(model),
        threads=threads or torch.get_num_threads(),
        report=say,
        **{name: value for name, value in other.items() if name not in ("impls", "compact", "no_peer")},
    )
    for line in table(row):
        click.echo(line, err=True)
    finish([row], directory)


def table(row: dict[str, Any]) -> list[str]:
    """The row in words: ceiling first, then speeds, then the two ratios against their marks."""
    return [
        f"{row['model']}, {row['threads']} threads, {row['prompt_tokens']} in, {row['output_tokens']} out",
        f"ceiling             {row['ceiling_tokens_per_s']:>9,.1f} tok/s alone, "
        f"{row['batch_ceiling_tokens_per_s']:,.1f} with {row['batch']} ({row['read_gb_per_s']} GB/s read)",
        *(f"transformers {kind:<8}{row[f'transformers_{kind}_tokens_per_s']:>8,.1f} tok/s" for kind in rivals.DTYPES),
        *(
            f"llama.cpp {kind:<11}{row[f'llama_cpp_{kind}_tokens_per_s']:>8,.1f} tok/s"
            for kind in rivals.LLAMA_FILES
            if row["llama_cpp_ratio"] is not None
        ),
        f"perilune {row['dtype']:<11}{row['tokens_per_s']:>9,.1f} tok/s, {100 * row['fraction']:.1f} % of the ceiling; "
        f"{row['transformers_ratio']} times transformers (mark: {MARK:g})",
        f"perilune, {row['batch']:>3} users {row['batch_tokens_per_s']:>9,.1f} tok/s, "
        f"{100 * row['batch_fraction']:.1f} % of the ceiling; {row['batch_ratio']} times alone (mark: {BATCH_MARK:g})",
    ]
