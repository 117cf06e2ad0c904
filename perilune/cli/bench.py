"""`perilune bench`: how fast, and how far from the ceiling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from perilune.bench import cycle as cycle_bench
from perilune.bench import decode as decode_bench
from perilune.bench import drafts as drafts_bench
from perilune.bench import ledger, microscope
from perilune.bench import prefill as prefill_bench
from perilune.bench.shapes import SHAPES
from perilune.cli import bench_aa, bench_convert, bench_loading, bench_rivals, bench_schemas, options
from perilune.core.config import EngineConfig, build
from perilune.core.plan import MAX_DRAFTS
from perilune.model.hub import resolve_model


@click.group()
def command() -> None:
    """Measure speed, with the ceiling beside it. The last line of output is JSON."""


command.add_command(bench_aa.command, "aa")
command.add_command(bench_convert.command, "convert")
command.add_command(bench_loading.command, "loading")
command.add_command(bench_rivals.command, "rivals")
command.add_command(bench_schemas.command, "schemas")


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError as e:
        raise click.BadParameter("must be whole numbers separated by commas", param_hint=option) from e
    if min(found) < 1:
        raise click.BadParameter("must be at least 1", param_hint=option)
    return found


def finish(rows: list[dict[str, Any]], directory: Path | None) -> None:
    if directory is not None:
        click.echo(f"written to {ledger.append(rows, directory)}", err=True)
    for row in rows:
        click.echo(json.dumps(row))


def say(line: str) -> None:
    click.echo(line, err=True)


def ledger_option(bench: str) -> Callable[[Any], Any]:
    return click.option(
        "--ledger", "directory", type=click.Path(path_type=Path), default=None,
        help=f"Also append the rows to DIRECTORY/{bench}.jsonl (the project's is {ledger.DEFAULT}).",
    )  # fmt: skip


shape_option = click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="Instead of MODEL: exactly this model's shapes with random weights, on a GPU, time per layer.",
)
layers_option = click.option("--layers", default=9, show_default=True, help="With --shape: layers of the larger slice.")


@command.command()
@click.argument("model", default="kimi-nano")
@shape_option
@layers_option
@click.option("--batch", default="1,4,16", show_default=True, help="Requests decoding together, separated by commas.")
@click.option("--context", default="128", show_default=True, help="Tokens each request has in its cache, likewise.")
@click.option(
    "--draft",
    type=click.IntRange(0, MAX_DRAFTS),
    default=0,
    show_default=True,
    help="Drafts per step, at most: suffix matches; with --shape random ones, and a draft model of real shape.",
)
@click.option(
    "--accepted",
    type=float,
    help="With --shape and --draft: tokens per cycle (verify, accept, draft) to declare.",
)
@click.option(
    "--rest-dtype",
    type=click.Choice(["dtype", "fp8"]),
    default="dtype",
    show_default=True,
    help="With --shape: weights besides the routed experts in bfloat16, or in FP8.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    show_default=True,
    help="With --shape: the KV cache in bfloat16, or in FP8.",
)
@click.option("--kernels", is_flag=True, help="With --shape: what each kernel of a layer adds.")
@click.option("--tokens", default=256, show_default=True, help="Tokens each request decodes.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32 or bfloat16.")
@click.option("--threads", type=int, default=None, help="CPU threads. [default: torch's choice]")
@ledger_option("decode")
def decode(
    model: str,
    shape: str | None,
    layers: int,
    batch: str,
    context: str,
    draft: int,
    accepted: float | None,
    rest_dtype: str,
    kv_dtype: str,
    kernels: bool,
    tokens: int,
    device: str,
    dtype: str,
    threads: int | None,
    directory: Path | None,
) -> None:
    """Decode speed of the real engine: on MODEL's real weights, or per layer on a SHAPE too large for one GPU.

    Prompts are random and decoding is greedy. With --shape the time of one MoE layer is the difference between two
    slices of the model, so that what the ends cost cancels.
    """
    batches, contexts = numbers(batch, "--batch"), numbers(context, "--context")
    if tokens < 2:
        raise click.BadParameter("must be at least 2", param_hint="--tokens")
    if accepted is not None and not (draft and shape and 1 <= accepted <= draft + 1):
        raise click.BadParameter("goes with --shape and --draft K, from 1 to K + 1", param_hint="--accepted")
    if draft and shape is not None and accepted is None:
        raise click.BadParameter("random weights accept nothing: declare --accepted", param_hint="--draft")
    if shape is not None:
        bench = microscope.Bench(shape, layers)
        form: dict[str, Any] = {"kernels": kernels, "rest_dtype": rest_dtype, "kv_dtype": kv_dtype}
        rows = []
        for c in contexts:
            for b in batches:
                if accepted is None:
                    rows.append(bench.decode(b, c, say, **form))
                else:
                    rows.append(cycle_bench.measure(bench, b, c, say, draft=draft, accepted=accepted, **form))
        finish(rows, directory)
        return
    rows = []
    for length in contexts:
        config = build(
            EngineConfig,
            {
                "device": device,
                "dtype": dtype,
                "threads": threads,
                "max_num_seqs": max(batches),
                "max_model_len": length + tokens + 1,
                "prefix_cache": False,  # every prompt must be computed
                "draft": "suffix" if draft else "off",
                "draft_tokens": draft or None,
            },
        )
        rows += decode_bench.measure(resolve_model(model), config, batches, length, tokens, say)
    finish(rows, directory)


@command.command()
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
@click.option("--experts", type=click.Choice(prefill_bench.FORMATS), default="int4-g32", show_default=True)
@click.option("--kernels", is_flag=True, help="What each kernel of a layer adds.")
@ledger_option("prefill")
def prefill(
    shape: str | None, layers: int, tokens: str, cached: int, experts: str, kernels: bool, directory: Path | None
) -> None:
    """Time per layer of a prompt computed in one step, on a SHAPE with random weights (needs a GPU)."""
    lengths = numbers(tokens, "--tokens")
    bench = microscope.Bench(shape or next(iter(SHAPES)), layers)
    cached -= cached % prefill_bench.BLOCK
    finish(
        [prefill_bench.measure(bench, n, say, cached=cached, expert_format=experts, kernels=kernels) for n in lengths],
        directory,
    )


@command.command("drafts")
@click.argument("model", default="kimi-nano")
@options.draft_options
@options.field_option(EngineConfig, "device")
@options.field_option(EngineConfig, "threads")
@options.field_option(EngineConfig, "max_model_len")
@click.option("--requests", default=48, show_default=True, help="Requests of the trace.")
@click.option("--users", default="1,4,16", show_default=True, help="Requests at a time, separated by commas.")
@click.option("--rounds", default=3, show_default=True, help="Times that every setting plays the trace.")
@click.option(
    "--settings",
    help="What to compare with no speculation, separated by commas: suffix, eagle3 or hybrid, as many as pay, or with "
    ":K drafts. [default: a grid and the policy]",
)
@ledger_option("drafts")
def drafts(
    model: str,
    requests: int,
    users: str,
    rounds: int,
    settings: str | None,
    directory: Path | None,
    draft_tokens: int | None,
    **engine: Any,
) -> None:
    """Speculation on a mixed trace: fixed sources and lengths, the policy, and none, in one run on MODEL."""
    if draft_tokens is not None:
        raise click.BadParameter("say which drafts to compare with --settings", param_hint="--draft-tokens")
    config = options.engine_values(engine, (), {})
    build(EngineConfig, config)
    config.setdefault("max_model_len", drafts_bench.CONTEXT)
    wanted = [] if settings is None else drafts_bench.settings_of(settings)
    found = drafts_bench.measure(resolve_model(model), config, requests, numbers(users, "--users"), rounds, say, wanted)
    finish([found], directory)
