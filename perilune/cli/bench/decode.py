"""`perilune bench decode`: steps of the real engine, on real weights or per layer on shapes of a larger model."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from perilune.bench import cycle, decode, microscope
from perilune.bench.ranks import kv_layouts, over_ranks
from perilune.bench.shapes import SHAPES
from perilune.cli.shared import synthetic
from perilune.cli.shared.options import given_of
from perilune.cli.shared.rows import finish, ledger_option, numbers, say
from perilune.core.config import EngineConfig, build
from perilune.core.step import MAX_DRAFTS
from perilune.formats.hub import resolve_model
from perilune.ops.harness import registry

shape_option = click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="Time a layer of exactly this model's shapes, with random weights, on a GPU.",
)
layers_option = click.option(
    "--layers", default=9, help="Layers of --shape to run; the difference to fewer is a layer's time."
)
ONLY_SHAPE = ("layers", "rest_dtype", "kv_dtype", "draft_dtype", "expert_format", "kernels")
ep_option = click.option("--ep", default=1, help="As --tp; routed experts lie whole on ranks.")
gpus_option = click.option("--gpus", help="GPUs of the ranks, numbers separated by commas. [default: the first ones]")


@click.command()
@click.argument("model", default="kimi-nano")
@shape_option
@layers_option
@click.option("--batch", default="1,4,16", help="Requests decoding together, separated by commas.")
@click.option("--context", default="128", help="Tokens in each request's cache at first, separated by commas.")
@click.option(
    "--draft",
    type=click.IntRange(0, MAX_DRAFTS),
    default=0,
    help="Drafts per step, at most, from matches with earlier text; with --shape from a random draft model.",
)
@click.option(
    "--accepted",
    type=float,
    help="With --shape and --draft: declared tokens per cycle (verify, accept, draft).",
)
@click.option(
    "--rest-dtype",
    type=click.Choice(["dtype", "fp8"]),
    default="dtype",
    help="With --shape: weights besides the routed experts in bfloat16, or in FP8.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    help="With --shape: the KV cache in bfloat16, or in FP8.",
)
@click.option(
    "--draft-dtype",
    type=click.Choice(["dtype", "fp8"]),
    default="fp8",
    help="With --shape and --draft: the draft model's weights in bfloat16, or in FP8.",
)
@click.option(
    "--slice",
    "ranks",
    type=click.Choice(["2", "4", "8"]),
    help="With --shape: time one of so many tensor-parallel ranks; its exchanges stay on this GPU.",
)
@click.option(
    "--expert-format",
    type=click.Choice(["int4-g32", "int4-compact"]),
    default="int4-g32",
    help="With --shape: format of routed experts.",
)
@click.option("--kernels", is_flag=True, help="With --shape: print each kernel's time.")
@click.option(
    "--try",
    "tried",
    multiple=True,
    help="With --shape: OP/NAME of an implementation marked unmeasured; each row is repeated with it. Repeatable.",
)
@click.option(
    "--kv-shards", help="With --tp N: KV layouts to compare, separated by commas: 1 (whole on each rank), N (sharded)."
)
@click.option("--tokens", default=256, help="Tokens each request decodes; not with --shape alone.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", default="auto", help="auto, float32 or bfloat16.")
@click.option("--tp", default=1, help="Ranks that share the model, a process and a GPU each.")
@ep_option
@gpus_option
@click.option("--threads", type=int, help="CPU threads. [default: torch's choice]")
@ledger_option("decode")
def command(
    model: str,
    shape: str | None,
    layers: int,
    batch: str,
    context: str,
    draft: int,
    accepted: float | None,
    rest_dtype: str,
    kv_dtype: str,
    draft_dtype: str,
    ranks: str | None,
    expert_format: str,
    kernels: bool,
    tried: tuple[str, ...],
    kv_shards: str | None,
    tokens: int,
    device: str,
    dtype: str,
    tp: int,
    ep: int,
    gpus: str | None,
    threads: int | None,
    directory: Path | None,
) -> None:
    """Decode speed of the real engine: on MODEL's real weights, or per layer on a SHAPE too large for one GPU.

    Prompts are random and decoding is greedy. With --shape the time of one MoE layer comes from the difference between
    two numbers of layers, so that the time of embedding and head cancels.
    """
    batches, contexts = numbers(batch, "--batch"), numbers(context, "--context")
    if shape is None and (given := given_of(*ONLY_SHAPE)):
        raise click.BadParameter("goes with --shape: leave it out, or name a shape", param_hint=given[0])
    if tokens < 2:
        raise click.BadParameter("must be at least 2", param_hint="--tokens")
    # Random prompts may hold the placeholder token of pictures, which an engine that sees pictures refuses.
    where: dict[str, Any] = {"device": device, "dtype": dtype, "threads": threads, "tp": tp, "vision": "off"}
    shared = {**where, "ep": ep, "gpus": gpus}
    scales = "compact" if expert_format == "int4-compact" else "checkpoint"
    form: dict[str, Any] = {"rest_dtype": rest_dtype, "kv_dtype": kv_dtype}
    if kv_shards is not None:
        if tp < 2 or draft or kernels or ranks is not None:
            raise click.BadParameter("goes with --tp, without --draft, --kernels and --slice", param_hint="--kv-shards")
        values = {**where, "draft": "off"}
        if shape is not None:
            values |= {**form, "expert_scales": scales}
        turns, cells = numbers(kv_shards, "--kv-shards"), (batches, contexts)
        with synthetic.directory(shape, layers) if shape else nullcontext(resolve_model(model)) as path:
            rows = kv_layouts.measure(path, values, turns, cells, tokens, say)
        common = {"shape": shape, **({"rest_dtype": "fp8"} if rest_dtype == "fp8" else {})} if shape else {}
        finish([row | common for row in rows], directory)
        return
    if accepted is not None and not (draft and shape and 1 <= accepted <= draft + 1):
        raise click.BadParameter("goes with --shape and --draft K, from 1 to K + 1", param_hint="--accepted")
    if draft and shape is not None and accepted is None:
        raise click.BadParameter("random weights accept nothing: declare --accepted", param_hint="--draft")
    several = max(tp, ep) > 1
    if shape is not None and several and (draft or ranks is not None):
        raise click.BadParameter("with --shape goes without --draft and --slice", param_hint="--tp, --ep")
    if ranks is not None and (shape is None or draft):
        raise click.BadParameter("goes with --shape, and without --draft", param_hint="--slice")
    if tried and (shape is None or several):
        raise click.BadParameter("goes with --shape, without --tp and --ep", param_hint="--try")
    if shape is not None and several:
        settings = {**shared, **form, "expert_scales": scales}
        measured = (over_ranks.measure(shape, layers, settings, batches, c, say, kernels=kernels) for c in contexts)
        finish([row for found in measured for row in found], directory)
        return
    if shape is not None:
        bench = microscope.Bench(shape, layers, ranks=int(ranks or 1), expert_format=expert_format)
        form["kernels"] = kernels
        rows = []
        for c in contexts:
            for b in batches:
                for names in ((), tried) if tried else ((),):
                    with registry.trying(names):
                        if accepted is None:
                            row = bench.decode(b, c, say, **form)
                        else:
                            parts: dict[str, Any] = {"draft": draft, "accepted": accepted, "draft_dtype": draft_dtype}
                            row = cycle.measure(bench, b, c, say, **parts, **form)
                    rows.append(row | ({"tried": ", ".join(names)} if names else {}))
        finish(rows, directory)
        return
    rows = []
    for length in contexts:
        config = build(
            EngineConfig,
            {
                **shared,
                "max_num_seqs": max(batches),
                "max_model_len": length + tokens + 1,
                "prefix_cache": False,  # every prompt must be computed
                "draft": "suffix" if draft else "off",
                "draft_tokens": draft or None,
            },
        )
        rows += decode.measure(resolve_model(model), config, batches, [length], tokens, say)
    finish(rows, directory)
