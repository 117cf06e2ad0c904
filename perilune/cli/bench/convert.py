"""`perilune bench convert`: INT4 to NVFP4, beside the usual recipe."""

from pathlib import Path

import click

from perilune.bench import conversion, conversion_stream
from perilune.cli.shared.options import FloatRange
from perilune.cli.shared.rows import finish, ledger_option, say
from perilune.formats.hub import resolve_model

DB_MARKS = {"gaussian": 22.6, "lognormal": 23.0, "student5": 23.1}  # goals, dB of SQNR
SECONDS_MARK, KL_MARK = 0.15, 0.6


@click.command()
@click.argument("model", default="kimi-nano")
@click.option(
    "--tokens", type=click.IntRange(64), default=20_480, help="Tokens of text that compare MODEL's outputs, at least."
)
@click.option("--rounds", type=click.IntRange(1), default=5, help="Timings of each matrix; medians count.")
@click.option(
    "--stream-gb",
    type=FloatRange(1),
    help="Instead: time the conversion of a made-up checkpoint of so many GB.",
)
@click.option(
    "--scratch",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("."),
    show_default=False,
    help="With --stream-gb: directory with room for 2.1 times as much.  [default: here]",
)
@ledger_option("convert")
def command(
    model: str, tokens: int, rounds: int, stream_gb: float | None, scratch: Path, directory: Path | None
) -> None:
    """Error and time of the exact search for NVFP4 scales, and the KL it leaves in MODEL, a model with INT4 experts."""
    if stream_gb is not None:
        finish([conversion_stream.measure(scratch, stream_gb, say)], directory)
        return
    row = conversion.measure(resolve_model(model), tokens=tokens, rounds=rounds, report=say)
    marks = ", ".join(f"{name} {row[f'{name}_db']:.2f} (mark: {mark})" for name, mark in DB_MARKS.items())
    click.echo(f"SQNR in dB: {marks}", err=True)
    click.echo(
        f"{row['seconds_per_matrix']:.3f} s per matrix (mark: {SECONDS_MARK}); KL {row['kl_ratio']:.3f} of the usual "
        f"recipe's (mark: {KL_MARK}), {row['kl_ratio_calibrated']:.3f} calibrated",
        err=True,
    )
    finish([row], directory)
