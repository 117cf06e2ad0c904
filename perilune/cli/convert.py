"""`perilune convert`: a checkpoint in another format, in bounded memory."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import click
import torch

from perilune.cli.shared.options import FILE, OUT_FOLDER, FloatRange, device_option, require_effect
from perilune.convert import report as quality
from perilune.convert.calibrate import calibrated, require_same
from perilune.convert.stream import Conversion, Loss, sizes
from perilune.convert.target import Layout, Recipe, Scales, Target, To
from perilune.convert.texts import gather
from perilune.core.errors import ConfigError
from perilune.evals import lm_eval
from perilune.formats import hub
from perilune.formats.writer import SHARD_BYTES
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import DRAFTER

GB = 1e9


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("directory", metavar="DST", type=OUT_FOLDER)
@click.option("--to", type=click.Choice(get_args(To)), required=True, help="Format of the result.")
@click.option("--layout", type=click.Choice(get_args(Layout)), default="modelopt", help="Tensor layout of nvfp4.")
@click.option(
    "--recipe",
    type=click.Choice(get_args(Recipe)),
    default="optimal",
    help="Block scales of nvfp4: with the least squared error, or the usual largest value / 6.",
)
@click.option(
    "--scales",
    type=click.Choice(get_args(Scales)),
    default="row",
    help="Scales of fp8-dense: one per output row, or per 128 x 128 block.",
)
@click.option(
    "--sidecar/--no-sidecar",
    default=True,
    help="With bf16: keep the INT4 scales beside the weights, so that int4 gives the same bits again.",
)
@click.option(
    "--shard-gb", type=FloatRange(0.001, 1e6), default=SHARD_BYTES / GB, help="GB per safetensors file, about."
)
@click.option("--threads", type=click.IntRange(1), help="Threads that convert.  [default: one per CPU, at most 16]")
@device_option
@click.option("--revision", help="Branch, tag or commit of a hub repository.  [default: its main branch]")
@click.option("--dry-run", is_flag=True, help="Only check SRC's headers, DST and the disk, and show sizes.")
@click.option(
    "--calibrate",
    is_flag=True,
    help="With nvfp4: first run SRC over text, which gives scales of activations and better block scales.",
)
@click.option(
    "--calibrate-tokens",
    type=click.IntRange(64),
    default=8192,
    help="Tokens of text over which --calibrate measures activations.",
)
@click.option(
    "--text",
    type=FILE,
    help="JSONL of chats (messages, tools) or texts (text) for --calibrate and --report.  [default: bundled problems]",
)
@click.option(
    "--report",
    "reporting",
    is_flag=True,
    help="Also compare weights and outputs of DST, new or finished before, with SRC.",
)
@click.option(
    "--report-tokens",
    type=click.IntRange(64),
    default=20_480,
    help="Tokens of text on which --report compares outputs.",
)
@click.option(
    "--problems",
    type=click.IntRange(0),
    default=16,
    help="Problems per task family that both answer for --report; 0: none.",
)
@click.option("--lm-eval", "tasks", help="With --report: lm-eval tasks to score, separated by commas (needs lm_eval).")
@click.option(
    "--lm-eval-args", default="", show_default=False, help="More arguments for lm_eval, such as '--limit 100'."
)
@click.option(
    "--min-sqnr", type=FloatRange(-1000), help="With --report: exit with 1 if a tensor's SQNR is below this many dB."
)
@click.option(
    "--max-kl", type=FloatRange(0), help="With --report: exit with 1 if the mean KL is above this many nats per token."
)
def command(
    source: str,
    directory: Path,
    to: Any,
    layout: Any,
    recipe: Any,
    scales: Any,
    sidecar: bool,
    shard_gb: float,
    threads: int | None,
    device: str,
    revision: str | None,
    dry_run: bool,
    calibrate: bool,
    calibrate_tokens: int,
    text: Path | None,
    reporting: bool,
    report_tokens: int,
    problems: int,
    tasks: str | None,
    lm_eval_args: str,
    min_sqnr: float | None,
    max_kl: float | None,
) -> None:
    """Write the checkpoint SRC (a directory or a hub repository) to DST in another format.

    A draft model in SRC/drafter is copied along. Repeat the same command to continue a conversion that was stopped, or
    to check the files of a finished one by their SHA-256s. INT4 stays the best source for serving on Hopper
    GPUs and CPUs, where NVFP4 weights are expanded anyway; NVFP4 is for GPUs that multiply in FP4.
    """
    require_effect(
        ("layout recipe", to == "nvfp4", "without --to nvfp4"),
        ("scales", to == "fp8-dense", "without --to fp8-dense"),
        ("sidecar", to == "bf16", "without --to bf16"),
        ("calibrate_tokens", calibrate, "without --calibrate"),
        ("report_tokens problems tasks min_sqnr max_kl", reporting, "without --report"),
        ("text", reporting or calibrate, "without --report or --calibrate (add one of them)"),
        ("lm_eval_args", tasks, "without --lm-eval"),
    )
    if tasks is not None:
        lm_eval.require()
    target = Target(to=to, layout=layout, recipe=recipe, scales=scales, sidecar=sidecar, calibrated=calibrate)
    path = hub.resolve_model(source, revision=revision, check=KimiConfig.from_directory)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    # Read before the conversion: an error must not come after hours.
    texts = gather(path, report_tokens, text) if reporting and not dry_run else None
    with Conversion(path, target, device=where, shard_bytes=int(shard_gb * GB)) as conversion:
        _show(conversion, directory)
        conversion.require_apart(directory)
        if dry_run:
            if conversion.finished(directory) is None:
                conversion.require_target(directory, dry=dry_run)
            else:
                _say(f"{directory} is finished: only its files would be checked")
            return
        key, run_over, inputs = conversion.fingerprint, None, None
        if calibrate:
            run_over = gather(path, calibrate_tokens, text, split="train")
        if conversion.completed(directory, show=True) is not None:
            if run_over is not None:
                require_same(directory, run_over, key)
            _say(f"{directory} is complete already: every file has the SHA-256 that it was written with")
        else:
            if run_over is not None:
                conversion.require_target(directory, dry=dry_run)  # before the run: it may take hours
                inputs = calibrated(path, directory, run_over, key=key, device=torch.device(where), say=_say)
            _report(conversion.run(directory, inputs=inputs, threads=threads, show=True), directory)
    if texts is not None:
        record = quality.measure(path, directory, texts=texts, problems=problems, device=torch.device(where), say=_say)
        if tasks is not None:
            for key, model in (("source_", path), ("", directory)):
                _say(f"scoring {tasks} with {model.name}")
                record[f"{key}lm_eval"] = lm_eval.scores(model, tasks, lm_eval_args, device=where)
        for line in quality.table(record):
            _say(line)
        quality.write(record, directory)
        click.echo(json.dumps(record))
        if faults := quality.faults(record, min_sqnr=min_sqnr, max_kl=max_kl):
            raise ConfigError(f"{directory} is below the bound: {'; '.join(faults)}")


def _say(line: str) -> None:
    click.echo(line, err=True)


def _show(conversion: Conversion, directory: Path) -> None:
    """Prints sizes. Error if the disk has no room for them."""
    before, parts = conversion.checkpoint.nbytes, sizes(conversion.files)
    click.echo(f"{conversion.source.name}: {before / GB:.3f} GB -> {conversion.nbytes / GB:.3f} GB", err=True)
    if conversion.drafter:
        parts["draft model, copied"] = conversion.drafter_nbytes
    elif (conversion.source / DRAFTER).is_dir():
        click.echo(f"  {conversion.source / DRAFTER} has no config.json: there is no draft model to copy", err=True)
    for what, nbytes in parts.items():
        click.echo(f"  {what}: {nbytes / GB:.3f} GB", err=True)
    written = [*(s.file for s in conversion.shards), *(f"{DRAFTER}/{file.name}" for file in conversion.drafter)]
    present = sum((directory / file).stat().st_size for file in written if (directory / file).is_file())
    needed, free = conversion.require_room(directory, present)
    count = len(conversion.shards)
    files = f"{count:,} file{'s' if count > 1 else ''}"
    click.echo(f"  in {files}; {max(needed, 0) / GB:.3f} GB to write, {free / GB:.1f} GB free", err=True)


def _report(loss: Loss, directory: Path) -> None:
    sqnr = "exact" if loss.sqnr_db == math.inf else f"SQNR {loss.sqnr_db:.2f} dB"
    click.echo(f"{directory}: {loss.layers:,} layers converted, {sqnr}", err=True)
    for name, db in loss.worst[:3]:
        if db < math.inf:
            click.echo(f"  {db:6.2f} dB  {name}", err=True)
