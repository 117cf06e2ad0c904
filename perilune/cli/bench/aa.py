"""`perilune bench aa`: the Artificial-Analysis protocol through HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import click

from perilune.bench import aa
from perilune.bench.ledger import origin
from perilune.cli.shared import options, targets
from perilune.cli.shared.rows import finish, ledger_option, say

POSITIVE = click.IntRange(1)


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--prompt-tokens", type=POSITIVE, default=10_000, help="Prompt length; less where the context is short.")
@click.option("--output-tokens", type=click.IntRange(2), default=1_500, help="Output length, at most.")
@click.option("--runs", type=POSITIVE, default=8, help="Rounds of --parallel requests; medians of all count.")
@click.option("--parallel", type=POSITIVE, default=1, help="Requests at once; the protocol has 1 and 10.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=None,
    help="Ask for the full output length whatever the model says.  [default: if the server is known to understand it]",
)
@click.option("--thinking/--no-thinking", default=None, help="Think before answering.  [default: the server's]")
@targets.target_options
@options.engine_options(*options.COMMON)
@ledger_option("aa")
def command(
    model: str,
    prompt_tokens: int,
    output_tokens: int,
    runs: int,
    parallel: int,
    ignore_eos: bool | None,
    thinking: bool | None,
    access: targets.Access,
    assignments: tuple[str, ...],
    directory: Path | None,
    **engine: Any,
) -> None:
    """TTFT, output speed, time to first answer token and end-to-end time of MODEL, as Artificial Analysis takes them.

    MODEL is served on a free port meanwhile, or is the http(s) address of any OpenAI-compatible endpoint.
    """

    async def measure() -> dict[str, Any]:
        async with access.target(model, engine, assignments) as endpoint:
            return await aa.measure(
                endpoint,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                runs=runs,
                parallel=parallel,
                ignore_eos=ignore_eos,
                thinking=thinking,
                report=say,
            )

    row = asyncio.run(measure()) | origin(model, assignments)
    click.echo(f"median of {row['samples']}: {aa.describe(row)}", err=True)
    finish([row], directory)
