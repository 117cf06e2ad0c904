"""`perilune draft`: make a drafter for a model, from its own answers."""

import click

from perilune.cli.shared.verbs import Verbs

VERBS = {
    "collect": "have a model answer prompts, for a corpus",
    "capture": "keep what a draft learns of a model's states, on disk",
    "train": "train an EAGLE-3 draft on a model's own answers",
    "evaluate": "tokens per verify step, and measured speed",
    "mine": "find where a draft loses tokens, and train on that",
}


@click.group(cls=Verbs, verbs=VERBS, package="perilune.cli.draft")
def command() -> None:
    """Make a drafter for a model: collect its answers, train on them, evaluate, mine what is still wrong."""
