"""`perilune draft train`: an EAGLE-3 draft from a corpus."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import torch

from perilune.core.errors import ConfigError
from perilune.draft.corpus import Corpus
from perilune.draft.export import config_for, export
from perilune.draft.train import Options, options_of, train
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.hub import resolve_model
from perilune.model.kimi_k2 import KimiK2
from perilune.model.load import load

DEFAULTS = Options()


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(n) for n in text.split(",")]
    except ValueError as e:
        raise click.BadParameter("must be whole numbers separated by commas", param_hint="--aux-layers") from e


@click.command()
@click.argument("model", default="kimi-nano")
@click.option(
    "--corpus",
    "corpora",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    multiple=True,
    help="Directory of `draft collect`; repeatable.",
)
@click.option("--run", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory of the run.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Checkpoint to write at the end."
)
@click.option("--steps", type=click.IntRange(min=1), help="Length of the schedule, instead of --minutes.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Length of the schedule.  [default: 2]")
@click.option(
    "--unroll", type=click.IntRange(1, 8), help=f"Chain steps that are trained.  [default: {DEFAULTS.unroll}]"
)
@click.option("--chains", type=click.IntRange(min=1), help=f"Of a batch.  [default: {DEFAULTS.chains}]")
@click.option("--rate", type=click.FloatRange(min=0), help=f"Peak learning rate.  [default: {DEFAULTS.rate}]")
@click.option("--seed", type=int, help=f"Of weights and order.  [default: {DEFAULTS.seed}]")
@click.option(
    "--keep-gb",
    type=click.FloatRange(min=0),
    help=f"Hidden states kept for later epochs.  [default: {DEFAULTS.keep_gb}]",
)
@click.option("--aux-layers", help="Layers whose output is read, from 1 on, e.g. 1,29,57.  [default: spread]")
@click.option("--intermediate-size", type=click.IntRange(min=8), help="Of the draft's MLP.  [default: the target's]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    model: str,
    corpora: tuple[Path, ...],
    run: Path,
    out: Path,
    aux_layers: str | None,
    intermediate_size: int | None,
    device: str,
    **given: Any,
) -> None:
    """Train an EAGLE-3.1 draft for MODEL on its own answers and write it as a checkpoint.

    The draft has latent attention of the target's shape and shares its embedding and head. Repeat the same command to
    go on where it stopped. The last line of output is JSON.
    """
    path = resolve_model(model)
    if any(out.glob("*.safetensors")):
        raise ConfigError(f"{out} already holds a checkpoint: choose an empty directory")
    options = options_of(given)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    target, weights = load(
        path,
        dtype=torch.bfloat16 if where.type == "cuda" else torch.float32,
        device=where,
        progress=sys.stderr.isatty(),
    )
    raw = config_for(target, aux_ids=_numbers(aux_layers), intermediate_size=intermediate_size)
    config = Eagle3Config.from_dict(raw, where="the draft's config.json")
    found = [Corpus(corpus) for corpus in corpora]
    trainee = train(
        KimiK2(target, weights, max_positions=target.max_position_embeddings),
        config,
        found,
        run,
        options,
        tell=lambda record: click.echo(json.dumps(record), err=True),
    )
    export(out, raw, trainee.checkpoint())
    size = sum(f.stat().st_size for f in out.iterdir())
    click.echo(json.dumps({"draft": "train", "model": path.name, "out": str(out), "bytes": size}))
