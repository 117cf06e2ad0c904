"""`perilune draft`: make a drafter for a model, from its own answers."""

import click

from perilune.cli.shared.verbs import Verbs

VERBS = {
    "collect": "have a model answer prompts, for a corpus",
    "capture": "run a model over a corpus and keep its hidden states",
    "train": "train an EAGLE-3 draft on a model's own answers",
    "evaluate": "measure a draft's tokens per verify step, and its speed",
    "mine": "find where a draft loses tokens, as windows to train on",
}


@click.group(cls=Verbs, verbs=VERBS, package="perilune.cli.draft")
def command() -> None:
    """Make a drafter for a model: collect its answers, train on them, evaluate, mine what is still wrong."""
