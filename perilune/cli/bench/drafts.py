"""`perilune bench drafts`: what speculation gains on a mixed trace."""

from pathlib import Path
from typing import Any

import click

from perilune.bench import drafts as bench
from perilune.cli.shared import options
from perilune.cli.shared.rows import finish, ledger_option, numbers, say
from perilune.core.config import EngineConfig, build
from perilune.formats.hub import resolve_model


@click.command()
@click.argument("model", default="kimi-nano")
@options.field_options(EngineConfig, "draft", "drafter", "draft_dtype", "device", "threads", "max_model_len")
@click.option("--requests", type=click.IntRange(1), default=48, help="Requests of the trace.")
@click.option("--users", default="1,4,16", help="Requests at a time, separated by commas.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Times each setting plays the trace; medians count.")
@click.option(
    "--settings",
    help="Compared with no speculation, separated by commas: suffix, eagle3 or hybrid, alone (the policy chooses how "
    "many drafts) or with :K drafts. [default: a grid and the policy]",
)
@ledger_option("drafts")
def command(
    model: str,
    requests: int,
    users: str,
    rounds: int,
    settings: str | None,
    directory: Path | None,
    **engine: Any,
) -> None:
    """Speculation on a mixed trace: fixed sources and lengths, the policy, and none, in one run on MODEL."""
    config = options.engine_values(engine, (), {})
    build(EngineConfig, config)
    config.setdefault("max_model_len", bench.CONTEXT)
    wanted = [] if settings is None else bench.settings_of(settings)
    found = bench.measure(resolve_model(model), config, requests, numbers(users, "--users"), rounds, say, wanted)
    finish([found], directory)
