"""Groups of verbs, each in a file of this package that is imported only when it is used."""

import difflib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import click

from perilune.cli.shared import interrupt


class Verbs(click.Group):
    """`verbs`: name -> help line; `package` has a module for each verb, with its `command`."""

    def __init__(self, *args: Any, verbs: Mapping[str, str], package: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self.verbs = verbs
        self.package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.verbs:
            return None
        module = f"{self.package}.{name}"
        with interrupt.Importing():
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.submodule_search_locations is not None:  # a package: a group of verbs
                module += ".group"
            command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.verbs and (near := difflib.get_close_matches(args[0], self.verbs, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The help page must not import torch just to show one line per verb.
        with formatter.section("Commands"):
            formatter.write_dl(list(self.verbs.items()))
