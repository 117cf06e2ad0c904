"""`perilune draft capture`: the hidden states of a corpus, to disk."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from perilune.cli.draft.train import layer_numbers
from perilune.cli.shared import display, options
from perilune.draft.by_layer import ByLayer
from perilune.draft.capture import Capture
from perilune.draft.collect import fingerprint
from perilune.draft.corpus import Corpus, require_tokens
from perilune.draft.shards import alone
from perilune.draft.states import Shard, States, about, capture, load_ends, token_bytes
from perilune.engine.resolve import Choices, resolve_device, resolve_dtypes
from perilune.formats.hub import resolve_model
from perilune.loading.load import load
from perilune.model.draft_config import config_for
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2

CAPTURED = 65536  # tokens in a step, and roughly in a file


@click.command()
@click.argument("model", default="kimi-nano")
@click.option(
    "--corpus",
    "corpora",
    type=options.FOLDER,
    required=True,
    multiple=True,
    help="Directory of `draft collect` or `draft mine`; repeatable, in the order that `draft train` will name them.",
)
@click.option("--out", type=options.OUT_FOLDER, required=True, help="Directory of the states.")
@click.option("--gb", type=options.FloatRange(0, min_open=True), default=50.0, help="GB of states in --out, at most.")
@click.option("--aux-layers", help="Layers whose outputs are kept, as for `draft train`.  [default: three, spread]")
@click.option("--by-layer", is_flag=True, help="Hold one layer of MODEL in memory at a time, if no device holds all.")
@click.option(
    "--at-once",
    type=click.IntRange(CAPTURED),
    default=8 * CAPTURED,
    help="Tokens for which --by-layer reads MODEL once; in Kimi K2 each takes 57 kB of host memory.",
)
@options.engine_options("device")
def command(
    model: str,
    corpora: tuple[Path, ...],
    out: Path,
    gb: float,
    aux_layers: str | None,
    by_layer: bool,
    at_once: int,
    assignments: tuple[str, ...],
    **engine: Any,
) -> None:
    """Run MODEL over the rows of corpora and keep its hidden states, for `draft train --states`.

    What does not fit --gb is left out. Repeat the same command to go on where it stopped. The last line of output is
    JSON.
    """
    path = resolve_model(model)
    click.get_current_context().with_resource(alone(out))
    config = options.engine_config(engine, assignments, {})
    choices = Choices([])
    device = resolve_device(config, choices)
    _, dtype, _ = resolve_dtypes(config, device, choices)
    if by_layer:
        target, weights = load_ends(path, dtype=dtype, device=device)
    else:
        target, weights = load(path, dtype=dtype, device=device, progress=sys.stderr.isatty())
    raw = config_for(target, aux_ids=layer_numbers(aux_layers))
    layers = Eagle3Config.from_dict(raw, where="the draft's config.json").aux_layers(target.num_hidden_layers)
    found = [Corpus(corpus) for corpus in corpora]
    rows = [row for corpus in found for row in corpus.rows()]
    require_tokens(rows, target.vocab_size)
    states = States(out, about(found, layers, fingerprint(path)))
    wanted, free = token_bytes(rows, len(layers), target.hidden_size), shutil.disk_usage(out).free
    limit = min(gb * 1e9, states.nbytes + free * 0.95)
    click.echo(
        f"{len(rows):,} rows: {wanted / 1e9:.2f} GB, at most {limit / 1e9:.2f} are kept, {free / 1e9:.1f} GB free; "
        f"{states.rows:,} rows are there",
        err=True,
    )
    began = time.monotonic()
    longest = max((len(row.ids) for row in rows), default=1)
    run, tokens = KimiK2(target, weights, max_positions=longest), max(CAPTURED, longest)
    reading = ByLayer(run, path, layers, tokens=tokens) if by_layer else Capture(run, layers, tokens=tokens)
    with display.progress() as bar:
        task = bar.add_task("rows", total=len(rows), completed=states.rows)

        def done(shard: Shard) -> None:
            bar.advance(task, shard.rows)
            click.echo(f"{shard.file}: {shard.rows} rows, {time.monotonic() - began:.1f} s", err=True)

        capture(rows, reading, states, most_bytes=limit, at_once=at_once // CAPTURED if by_layer else 1, done=done)
    record = {"rows": states.rows, "of": len(rows), "bytes": states.nbytes}
    click.echo(json.dumps({"draft": "capture", "model": path.name, "out": str(out), **record}))
