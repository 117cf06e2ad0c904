"""`perilune draft train`: an EAGLE-3 draft from a corpus."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from perilune.cli.shared.options import FOLDER, OUT_FOLDER, F, FloatRange, device_option, require_effect
from perilune.core.errors import ConfigError
from perilune.core.files import make_writable
from perilune.core.jsonfile import read_object
from perilune.draft import ranks
from perilune.draft.corpus import Corpus
from perilune.draft.export import export
from perilune.draft.losses import LOSSES
from perilune.draft.shards import alone
from perilune.draft.states import States, load_ends
from perilune.draft.train import Options, options_of, train
from perilune.formats.hub import resolve_model
from perilune.formats.writer import held
from perilune.loading.eagle3 import read_tensors
from perilune.loading.load import load
from perilune.model.draft_config import config_for
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of every process of a run. `shape`: keywords of `config_for`; empty if `begin` has a shape."""

    model: Path
    corpora: tuple[Path, ...]
    windows: tuple[Path, ...]
    states: Path | None
    begin: Path | None
    run: Path
    out: Path
    shape: dict[str, Any]
    own_head: bool
    options: Options
    device: str


def _tuned(name: str, kind: Any, text: str) -> Callable[[F], F]:
    """The option for a field of Options."""
    default = getattr(Options(), name)
    shown = f"{default:g}" if isinstance(default, float) else default
    return click.option(f"--{name.replace('_', '-')}", type=kind, help=f"{text}  [default: {shown}]")


def layer_numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(n) for n in text.split(",")]
    except ValueError as e:
        raise click.BadParameter("must be whole numbers separated by commas", param_hint="--aux-layers") from e


@click.command()
@click.argument("model", default="kimi-nano")
@click.option(
    "--corpus", "corpora", type=FOLDER, required=True, multiple=True, help="Directory of `draft collect`; repeatable."
)
@click.option(
    "--windows", type=FOLDER, multiple=True, help="Directory of `draft mine`, taught besides the corpora; repeatable."
)
@click.option(
    "--states",
    type=FOLDER,
    help="Directory of `draft capture` for these corpora and windows: MODEL itself is then not run.",
)
@_tuned("window_share", FloatRange(0, 1, min_open=True, max_open=True), "Share of a batch that comes from --windows.")
@click.option("--from", "begin", type=FOLDER, help="Directory of a draft to begin with.  [default: random weights]")
@click.option("--run", type=OUT_FOLDER, required=True, help="Directory of the run's log and saves.")
@click.option("--out", type=OUT_FOLDER, required=True, help="Directory of the finished draft.")
@click.option("--steps", type=click.IntRange(1), help="Training steps, instead of --minutes.")
@_tuned("minutes", FloatRange(0, min_open=True), "Minutes of training.")
@_tuned("loss", click.Choice(tuple(LOSSES)), "Loss; all but kl aim at the acceptance of drafts.")
@_tuned("unroll", click.IntRange(1, 8), "Drafts of a chain that are trained.")
@_tuned("chains", click.IntRange(1), "Chains per batch, about; one begins at each token of an answer.")
@_tuned("rate", FloatRange(0), "Peak learning rate.")
@_tuned("seed", int, "Seed of initial weights and order.")
@_tuned("keep_gb", FloatRange(0), "GB of hidden states kept on the device for later epochs.")
@click.option(
    "--recompute",
    is_flag=True,
    default=None,
    help="Recompute attention and logits in the backward pass: slower, far less memory, for long rows.",
)
@_tuned("save_every", FloatRange(0), "Seconds between saves, at least.")
@click.option(
    "--form",
    type=click.Choice(["mla", "mha"]),
    help="Attention: mla, as the target's; mha, plain EAGLE-3, which every engine reads.  [default: mla]",
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(1),
    help="Tokens in the draft's vocabulary, the most frequent of the corpora.  [default: all]",
)
@click.option(
    "--own-head", is_flag=True, help="Train an output head, initially the target's; implied by a smaller --draft-vocab."
)
@click.option(
    "--aux-layers", help="Layers whose outputs the draft reads, first 1, e.g. 1,29,57.  [default: three, spread]"
)
@click.option("--intermediate-size", type=click.IntRange(8), help="Width of the draft's MLP.  [default: the target's]")
@device_option
@click.option("--gpus", type=click.IntRange(1), default=1, help="GPUs of this machine that share the work.")
def command(
    model: str,
    corpora: tuple[Path, ...],
    windows: tuple[Path, ...],
    states: Path | None,
    begin: Path | None,
    run: Path,
    out: Path,
    form: str | None,
    draft_vocab: int | None,
    own_head: bool,
    aux_layers: str | None,
    intermediate_size: int | None,
    device: str,
    gpus: int,
    **given: Any,
) -> None:
    """Train an EAGLE-3 draft for MODEL on its own answers and write it as a checkpoint.

    By default it has latent attention of the target's shape and the target's embedding and head. Repeat the same
    command to go on where it stopped. Several GPUs: --gpus, or torchrun for several machines; they need --steps. The
    last line of output is JSON.
    """
    require_effect(("window_share", windows, "without --windows"), ("minutes", not given["steps"], "with --steps"))
    shape = {
        "form": form,
        "draft_vocab": draft_vocab,
        "aux_ids": layer_numbers(aux_layers),
        "intermediate_size": intermediate_size,
    }
    shape = {key: value for key, value in shape.items() if value is not None}
    if held(out):
        raise ConfigError(f"{out} already holds a checkpoint: choose an empty directory")
    if out.resolve() == run.resolve():
        raise ConfigError(f"--run and --out are both {out}: give the finished draft a directory of its own")
    if begin is not None and (shape or own_head):
        raise ConfigError(
            "--from brings its own shape: leave out --form, --draft-vocab, --own-head, --aux-layers and "
            "--intermediate-size"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and gpus > torch.cuda.device_count():
        raise ConfigError(f"--gpus {gpus}: this machine has {torch.cuda.device_count()}")
    options = options_of(given)
    job = Job(resolve_model(model), corpora, windows, states, begin, run, out, shape, own_head, options, device)
    if ranks.launched():
        make_writable(run, "--run")
        make_writable(out, "--out")
        with ranks.group():
            _train(job)
        return
    for directory, option in ((run, "--run"), (out, "--out")):
        click.get_current_context().with_resource(alone(directory, option))
    if gpus > 1:
        if not options.steps:
            raise ConfigError("several GPUs need --steps: the clocks of their processes differ")
        ranks.spawn(gpus, _train, job)
    else:
        _train(job)


def _train(job: Job) -> None:
    device = torch.device(job.device, torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    if job.states is None:
        progress = ranks.rank() == 0 and sys.stderr.isatty()
        target, weights = load(job.model, dtype=dtype, device=device, progress=progress)
    else:
        target, weights = load_ends(job.model, dtype=dtype, device=device)
    if job.begin is not None:
        raw, start = read_object(job.begin / "config.json"), read_tensors(job.begin)
    else:
        raw, start = config_for(target, **job.shape), None
    trainee = train(
        KimiK2(target, weights, max_positions=target.max_position_embeddings),
        Eagle3Config.from_dict(raw, where="the draft's config.json"),
        [Corpus(directory) for directory in job.corpora],
        job.run,
        job.options,
        windows=[Corpus(directory) for directory in job.windows],
        start=start,
        own_head=job.own_head,
        states=None if job.states is None else States(job.states),
        on_record=lambda record: click.echo(json.dumps(record), err=True),
    )
    tensors = trainee.checkpoint()
    if ranks.rank() == 0:
        export(job.out, raw, tensors)
        size = sum(f.stat().st_size for f in job.out.iterdir())
        click.echo(json.dumps({"draft": "train", "model": job.model.name, "out": str(job.out), "bytes": size}))
