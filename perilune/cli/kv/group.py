"""`perilune kv`: KV that `serve --kv-disk` has left in a directory."""

import click

from perilune.cli.shared.verbs import Verbs

VERBS = {"clear": "delete all KV in a directory"}


@click.group(cls=Verbs, verbs=VERBS, package="perilune.cli.kv")
def command() -> None:
    """Look after KV stored on disk (serve --kv-disk): it is users' text in another form."""
