"""`perilune draft`: make a drafter for a model, from its own answers."""

import click

from perilune.cli import draft_capture, draft_collect, draft_evaluate, draft_mine, draft_train


@click.group()
def command() -> None:
    """Make a drafter for a model: collect its answers, train on them, evaluate, mine what is still wrong."""


command.add_command(draft_collect.command, "collect")
command.add_command(draft_capture.command, "capture")
command.add_command(draft_train.command, "train")
command.add_command(draft_evaluate.command, "evaluate")
command.add_command(draft_mine.command, "mine")
