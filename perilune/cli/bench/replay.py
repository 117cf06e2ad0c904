"""`perilune bench replay`: a trace of requests against an engine or an endpoint."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from perilune.bench import microscope, replay, replay_plot, trace_formats, traces
from perilune.bench.decode import described, footprint
from perilune.bench.ledger import circumstances, origin
from perilune.cli.shared import options, targets
from perilune.cli.shared.rows import finish, keep, ledger_option, say
from perilune.client.endpoint import Endpoint, is_url
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError, EngineError
from perilune.core.jsonfile import write_output
from perilune.engine.engine import Engine
from perilune.formats.hub import resolve_model
from perilune.kv.tiers import DISK, HOST
from perilune.text.tokenizer import Tokenizer

AGENTS = "agents"
TIERS = ("kv_host_gb", "kv_disk", "kv_disk_gb")
# Figures of the comparison run without KV tiers that the row keeps too: (key, suffix of the unit).
COMPARED = (("ttft_p50", "_s"), ("tokens_per_s", ""), ("hit_share", ""), ("wall", "_s"), ("requests", ""), ("cut", ""))
Measured = tuple[dict[str, Any], list[replay.Call]]


@click.command()
@click.argument("trace")
@click.argument("model", default="kimi-nano")
@click.option("--sessions", type=click.IntRange(1), help="Sessions, at most.  [default: all; agents: 8]")
@click.option("--turns", type=click.IntRange(1), help="Turns of a session, at most.  [default: all]")
@click.option("--seed", type=int, default=0, help="Seed of generated sessions (TRACE `agents`).")
@click.option(
    "--scale",
    type=options.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Factor on lengths of prompts and answers: 0.02 fits a session of 80k tokens into 2k.",
)
@click.option("--concurrency", type=click.IntRange(1), help="Sessions at once.  [default: as the trace has]")
@click.option(
    "--speed",
    type=options.FloatRange(0),
    default=1.0,
    help="Speed of the trace's clock: 2 halves all waiting, 0 waits for nothing.",
)
@click.option("--ttft-limit", type=float, default=5.0, help="Goodput: seconds to the first token, at most.")
@click.option("--inter-token-limit", type=float, default=0.1, help="Goodput: mean seconds per later token, at most.")
@click.option(
    "--begin-after",
    type=click.IntRange(1),
    help="First turns of each session that are joined to a prompt, which is cached before the clock starts.",
)
@click.option("--seconds", type=options.FloatRange(0, min_open=True), help="Seconds after which no turn begins.")
@click.option(
    "--end-after",
    type=options.FloatRange(0, min_open=True),
    help="Seconds after which answers are cut; they count with the tokens that they have.",
)
@click.option(
    "--compare", is_flag=True, help="Replay once more without KV tiers. They help only if sessions outgrow the cache."
)
@click.option("--shape", help="Random weights of a large model (kimi-k2.5) instead of MODEL; needs a GPU.")
@click.option("--layers", type=click.IntRange(1), default=9, help="With --shape: layers to run.")
@click.option("--plot", type=options.OUT_FILE, help="Write TTFT by prompt length as SVG.")
@click.option("--write", type=options.OUT_FILE, help="Write the trace's lines that are played as JSONL.")
@targets.target_options
@options.engine_options(*options.COMMON, "max_num_seqs", *TIERS)
@ledger_option("replay")
def command(
    trace: str,
    model: str,
    sessions: int | None,
    turns: int | None,
    seed: int,
    scale: float,
    concurrency: int | None,
    speed: float,
    ttft_limit: float,
    inter_token_limit: float,
    begin_after: int | None,
    seconds: float | None,
    end_after: float | None,
    compare: bool,
    shape: str | None,
    layers: int,
    plot: Path | None,
    write: Path | None,
    access: targets.Access,
    assignments: tuple[str, ...],
    directory: Path | None,
    **engine: Any,
) -> None:
    """Replay TRACE against MODEL: a file of JSON lines (Mooncake's, Bailian's, AIPerf's), a directory of Weka traces
    (AgentX), or `agents` for generated sessions.

    MODEL is run in this process, or is the http(s) address of any OpenAI-compatible endpoint.
    """
    lines = _lines(trace, sessions, turns, seed)
    made = _cut(trace_formats.sessions_of(lines, scale=scale), sessions, turns)
    if write is not None:
        played = sorted({turn.line for session in made for turn in session.turns})
        _write(write, "".join(json.dumps(lines[number]) + "\n" for number in played))
    if begin_after is not None:
        made = [traces.begun(session, begin_after) for session in made]
    forever = float("inf")
    limits = replay.Options(
        concurrency, speed, ttft_limit, inter_token_limit, seconds or forever, end_after or forever,
        begin_after is not None, shape is not None,
    )  # fmt: skip
    values = options.engine_values(engine, assignments, {})
    head = {"bench": "replay", "trace": trace, "sessions": len(made), "scale": scale, "speed": speed, "seed": seed}
    head |= {
        "concurrency": concurrency,
        "begin_after": begin_after,
        "tiers": [k for k in TIERS if values.get(k) is not None],
    }
    head["begun"] = None if begin_after is None else "computed" if shape is None else "taken as cached"
    if compare and not is_url(model) and all(values.get(k) is None for k in TIERS):
        raise ConfigError("--compare needs KV tiers to compare with: give --kv-host-gb or --kv-disk")
    if is_url(model):
        if values or shape or compare:
            raise ConfigError("engine options, --shape and --compare are for a model run here, not for an endpoint")
        row, calls = asyncio.run(_remote(access.endpoint(model), made, limits))
        _require_answers(row, calls)
        say(replay.describe(row))
        where = origin(model)
    else:
        where = (
            {"shape": shape, "layers": layers, **circumstances()}
            if shape
            else {"model": model} | origin(model, [f"{name}={value}" for name, value in values.items()])
        )
        weights = None if shape is None else microscope.Bench(shape, layers)
        row, calls = _local(partial(_engine, model, weights, values), made, limits)
        _require_answers(row, calls)
        say(replay.describe(row))
        if compare:
            keep([head | row | where], directory)  # the second run may fail
            say("once more without KV tiers")
            without = {k: v for k, v in values.items() if k not in TIERS}
            plain, _ = _local(partial(_engine, model, weights, without), made, limits)
            say(replay.describe(plain))
            row |= {f"{key}_no_tiers{unit}": plain.get(key + unit) for key, unit in COMPARED}
            if row.get("tokens_per_s") and plain.get("tokens_per_s"):
                say(f"with KV tiers {row['tokens_per_s'] / plain['tokens_per_s']:.2f} times the tokens/s of answers")
    finish([head | row | where], directory)
    if plot is not None:
        _write(plot, replay_plot.picture(calls, f"{trace}: {len(calls)} requests on {shape or model}"))


def _lines(trace: str, sessions: int | None, turns: int | None, seed: int) -> list[dict[str, Any]]:
    if trace != AGENTS:
        return traces.read(Path(trace))
    agents = traces.Agents(seed=seed)
    given = {"sessions": sessions, "turns": turns}
    return traces.generate(dataclasses.replace(agents, **{k: v for k, v in given.items() if v is not None}))


def _cut(made: Sequence[traces.Session], sessions: int | None, turns: int | None) -> list[traces.Session]:
    return [dataclasses.replace(session, turns=session.turns[:turns]) for session in made[:sessions]]


def _engine(model: str, weights: microscope.Bench | None, values: dict[str, Any]) -> tuple[Engine, Tokenizer | None]:
    if weights is not None:
        return weights.engine(weights.layers, **values), None
    path = resolve_model(model)
    tokenizer = Tokenizer.from_directory(path) if (path / "tiktoken.model").is_file() else None
    return Engine(path, build(EngineConfig, values)), tokenizer


def _local(
    make: Callable[[], tuple[Engine, Tokenizer | None]], made: Sequence[traces.Session], limits: replay.Options
) -> Measured:
    engine, tokenizer = make()
    try:

        async def work() -> Measured:
            async with replay.Local(engine, tokenizer.encode if tokenizer is not None else None) as target:
                return await replay.measure(target, made, limits, say)

        row, calls = asyncio.run(work())
        if row.get("restore_s"):
            shares = row["hit_share_by_tier"]
            restored = row["prompt_tokens"] * sum(shares[tier] for tier in shares.keys() & {HOST, DISK})
            per_token = footprint(engine.runner.model, engine.runner.pages.data).kv_per_token
            row["restore_gb_s"] = round(restored * per_token / row["restore_s"] / 1e9, 4)
        return described(engine) | row, calls
    finally:
        engine.close()


def _require_answers(row: dict[str, Any], calls: Sequence[replay.Call]) -> None:
    if not row["requests"]:
        none = "it ended before the first token" if row["cut"] else "no turn began"
        why = next((call.error for call in calls if call.error), none)
        raise EngineError(f"no request was answered, {row['failed']} failed; the first: {why}")


async def _remote(opened: Endpoint, made: Sequence[traces.Session], limits: replay.Options) -> Measured:
    async with opened as endpoint:
        return await replay.measure(replay.Remote(endpoint), made, limits, say)


def _write(path: Path, text: str) -> None:
    try:
        write_output(path, text)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from e
    say(f"written to {path}")
