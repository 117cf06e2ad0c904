"""`perilune bench serve`: a server under the load of more and more users."""

import asyncio
from pathlib import Path
from typing import Any

import click

from perilune.bench import serve
from perilune.bench.ledger import origin
from perilune.bench.load import Client
from perilune.bench.serve_plot import plot
from perilune.cli.shared import options, targets
from perilune.cli.shared.rows import finish, ledger_option, numbers, say
from perilune.core.errors import ConfigError
from perilune.core.jsonfile import write_output

POSITIVE = click.IntRange(1)
MILLISECONDS = options.FloatRange(0, min_open=True)


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--streams", default="1,2,4,8,16,32,64", help="Users at once, separated by commas.")
@click.option("--rounds", type=POSITIVE, default=2, help="Requests of each user, one after the other.")
@click.option("--prompt-tokens", type=POSITIVE, default=128, help="Prompt length, about.")
@click.option("--output-tokens", type=click.IntRange(2), default=256, help="Output length.")
@click.option("--ttft-ms", type=MILLISECONDS, default=1000.0, help="Goodput: ms to the first text, at most.")
@click.option("--gap-ms", type=MILLISECONDS, default=50.0, help="Goodput: mean ms between tokens, at most.")
@click.option("--plot", "picture", type=options.OUT_FILE, help="Also draw the rows as SVG.")
@click.option("--server-pid", type=POSITIVE, help="Process id of a local server, for its CPU time per token.")
@click.option("--engine-name", help="Engine name in the rows.  [default: what the server calls itself]")
@targets.target_options
@options.engine_options(*options.COMMON)
@ledger_option("serve")
def command(
    model: str,
    streams: str,
    rounds: int,
    prompt_tokens: int,
    output_tokens: int,
    ttft_ms: float,
    gap_ms: float,
    picture: Path | None,
    server_pid: int | None,
    engine_name: str | None,
    access: targets.Access,
    assignments: tuple[str, ...],
    directory: Path | None,
    **engine: Any,
) -> None:
    """Tokens/s per user against tokens/s of all, and goodput, with more and more users of MODEL at once.

    MODEL is served on a free port meanwhile, or is the http(s) address of any OpenAI-compatible endpoint.
    """
    counts = numbers(streams, "--streams")
    load = serve.Load(prompt_tokens, output_tokens, rounds, ttft_ms / 1e3, gap_ms / 1e3)
    serve.cpu_seconds(server_pid)  # a wrong number must not cost a measurement

    async def measure() -> list[dict[str, Any]]:
        async with access.target(model, engine, assignments) as endpoint:
            client = Client(endpoint.base, api_key=access.key, timeout=access.timeout)
            rows = await serve.sweep(endpoint, client, counts, load, server_pid=server_pid, report=say)
            name = engine_name or endpoint.owner or "unknown"
            return [{**row, "engine": name} for row in rows]

    rows = [row | origin(model, assignments) for row in asyncio.run(measure())]
    finish(rows, directory)
    if picture is not None:
        try:
            write_output(picture, plot(rows))
        except OSError as e:
            raise ConfigError(f"cannot write {picture}: {e.strerror}; choose another file with --plot") from e
        say(f"picture written to {picture}")
