"""`perilune draft mine`: training windows from what a draft gets wrong."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import torch
from rich.markup import escape
from rich.table import Table

from perilune.cli.shared import display, options
from perilune.cli.shared.options import FOLDER, OUT_FOLDER, device_option, require_effect
from perilune.core.errors import CheckpointError, ConfigError
from perilune.draft.capture import Capture
from perilune.draft.corpus import ABOUT, Corpus, Row, require_tokens
from perilune.draft.mine import Domain, Rule, Scored, mine, of_records
from perilune.draft.mine_group import group, names
from perilune.draft.mine_score import reopen, score
from perilune.draft.shards import alone
from perilune.formats.hub import resolve_model
from perilune.loading.load import load
from perilune.model.eagle3_config import DRAFTER
from perilune.model.kimi_k2 import KimiK2
from perilune.speculation.rejection_log import records
from perilune.text.tokenizer import Tokenizer

DEFAULTS = Rule(tokens=1_000_000)
CAPTURED = 65536  # tokens per forward pass; a longer text has a pass of its own
SHARD_ROWS = 16384


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--out", type=OUT_FOLDER, required=True, help="Directory of the windows.")
@click.option(
    "--corpus",
    "corpora",
    type=FOLDER,
    multiple=True,
    help="Directory of `draft collect` whose answers test --drafter; repeatable.",
)
@click.option(
    "--drafter", type=FOLDER, help="Draft to evaluate on --corpus.  [default: drafter/ in the model's directory]"
)
@click.option("--rejected", "logs", type=FOLDER, multiple=True, help="Directory of `serve --log-rejected`; repeatable.")
@click.option(
    "--tokens", type=click.IntRange(1), default=DEFAULTS.tokens, help="Tokens to train on in all windows, about."
)
@click.option("--length", type=click.IntRange(1, 8), default=3, help="Drafts per chain when --drafter is evaluated.")
@click.option(
    "--unroll", type=click.IntRange(1, 8), default=DEFAULTS.after, help="The --unroll of the later `draft train`."
)
@click.option(
    "--focus",
    type=options.FloatRange(0),
    default=DEFAULTS.focus,
    help="A domain's share of the tokens grows with this power of its loss per chain.",
)
@click.option(
    "--balance",
    type=options.FloatRange(0, 1),
    default=DEFAULTS.balance,
    help="0: a domain's share also grows with its part of the text; 1: rare domains get as much.",
)
@click.option(
    "--guard",
    type=options.FloatRange(0, 1),
    default=DEFAULTS.guard,
    help="Share of the tokens divided among domains by their part of the text alone, against forgetting.",
)
@click.option(
    "--groups", type=click.IntRange(1, 64), default=8, help="Domains into which texts of --rejected are grouped."
)
@click.option("--seed", type=int, default=0, help="Seed of the choice of windows.")
@device_option
def command(
    model: str,
    out: Path,
    corpora: tuple[Path, ...],
    drafter: Path | None,
    logs: tuple[Path, ...],
    tokens: int,
    length: int,
    unroll: int,
    focus: float,
    balance: float,
    guard: float,
    groups: int,
    seed: int,
    device: str,
) -> None:
    """Find where a draft loses tokens and write these windows, weighted, for `draft train --windows`.

    They come from answers that the draft is evaluated on (--corpus; domains are their families), from what a server
    logged (--rejected; domains are groups of like texts), or both. The last line of output is JSON.
    """
    if not corpora and not logs:
        raise ConfigError("nothing to mine from: give --corpus DIR or --rejected DIR")
    require_effect(("groups", logs, "without --rejected"), ("drafter length", corpora, "without --corpus"))
    if (out / ABOUT).exists():
        raise ConfigError(f"{out} already holds windows: choose an empty directory")
    rule = Rule(tokens, after=unroll, focus=focus, balance=balance, guard=guard, seed=seed)
    path = resolve_model(model)
    click.get_current_context().with_resource(alone(out))
    found: list[Scored] = []
    domains: list[str] = []
    if corpora:
        draft = drafter if drafter is not None else path / DRAFTER
        if not draft.is_dir():
            raise ConfigError(f"{path} has no {DRAFTER}/: name the draft with --drafter")
        found, domains = _evaluated([Corpus(c) for c in corpora], path, draft, length, device)
    if logs:
        found += _logged(logs, path, groups, domains)
    windows, summary = mine(found, domains, rule)
    display.show(table(summary), width=140)
    if not windows:
        raise CheckpointError("no draft was wrong anywhere: there is nothing to learn")
    written = Corpus(out, {"source": "mined", "families": domains, "rule": asdict(rule)})
    for begin in range(0, len(windows), SHARD_ROWS):
        written.add([w.row for w in windows[begin : begin + SHARD_ROWS]])
    record = {
        "windows": len(windows),
        "taught_tokens": sum(w.taught for w in windows),
        "domains": [{**asdict(d), "rate": round(d.rate, 4)} for d in summary],
    }
    click.echo(json.dumps({"draft": "mine", "model": path.name, "out": str(out), **record}))


def _evaluated(
    corpora: Sequence[Corpus], path: Path, draft: Path, length: int, device: str
) -> tuple[list[Scored], list[str]]:
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    config, weights = load(path, dtype=dtype, device=where, progress=sys.stderr.isatty())
    model = KimiK2(config, weights, max_positions=config.max_position_embeddings)
    trainee = reopen(draft, model)
    domains = list(dict.fromkeys(name for corpus in corpora for name in corpus.families))
    rows: list[Row] = []
    numbers: list[int] = []
    for corpus in corpora:
        rows += (own := corpus.rows())
        numbers += [domains.index(corpus.families[row.family]) for row in own]
    require_tokens(rows, config.vocab_size)
    longest = max((len(row.ids) for row in rows), default=0)
    capture = Capture(model, trainee.config.aux_layers(config.num_hidden_layers), tokens=max(CAPTURED, longest))
    with display.progress() as bar:
        task = bar.add_task("answers", total=len(rows))
        lost = score(trainee, capture, rows, length, advance=lambda count: bar.advance(task, count))
    return [Scored(row, some, number) for row, some, number in zip(rows, lost, numbers) if some], domains


def _logged(logs: Sequence[Path], path: Path, groups: int, domains: list[str]) -> list[Scored]:
    """What drafts lost in the logs, grouped by text; appends the groups' names to `domains`."""
    found = of_records([record for log in logs for record in records(log)])
    tokenizer = Tokenizer.from_directory(path)
    texts = [scored.row.ids for scored in found]
    if any(max(ids) >= tokenizer.vocab_size for ids in texts):
        raise CheckpointError("the log has tokens that this model does not have: mine with the model that was served")
    numbers = group(texts, groups)
    first = len(domains)
    domains += names(texts, numbers, lambda token: tokenizer.decode([token]))
    return [Scored(s.row, s.lost, first + number) for s, number in zip(found, numbers)]


def table(summary: Sequence[Domain]) -> Table:
    lost = sum(d.lost for d in summary) or 1.0
    shown = Table(title="what the draft loses, by domain")
    shown.add_column("domain")
    for heading in ("answers", "chains", "lost per chain", "of all lost", "windows", "kept", "taught", "weight"):
        shown.add_column(heading, justify="right")
    for d in sorted(summary, key=lambda d: -d.rate):  # names of groups have tokens such as "[/"
        shown.add_row(
            escape(d.name), f"{d.answers:,}", f"{d.chains:,}", f"{d.rate:.3f}", f"{d.lost / lost:.0%}",
            f"{d.windows:,}", f"{d.kept:,}", f"{d.taught:,}", f"{d.weight:.2f}",
        )  # fmt: skip
    return shown
