"""The `perilune` command: one verb per file of this package, imported only when it is used."""

import sys

import click

from perilune.cli.shared.verbs import Verbs
from perilune.core.errors import PeriluneError

VERBS = {
    "serve": "start the OpenAI-compatible server",
    "generate": "answer one prompt in the terminal",
    "chat": "talk with a model in the terminal",
    "evaluate": "score a model or an endpoint on checked tasks",
    "key": "make an API key for the server",
    "ops": "list, check and time the operations",
    "doctor": "check a checkpoint without loading it, and show what runs it",
    "convert": "write a checkpoint in another format",
    "draft": "make a drafter for a model from its own answers",
    "bench": "measure speed, with its ceiling beside it",
}


@click.group(
    cls=Verbs,
    verbs=VERBS,
    package="perilune.cli",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="perilune")
def cli() -> None:
    """Serve the Kimi K2 family close to what the memory allows.

    MODEL is a directory, a Hugging Face repository id such as moonshotai/Kimi-K2.5, or kimi-nano (bundled, the
    default).
    """


def main() -> None:
    """Runs a verb and ends the process: 0, 2 after wrong usage, 130 after an interrupt, 1 after any other failure."""
    try:
        # Without standalone mode click returns the code of click.exceptions.Exit instead of ending with it.
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except PeriluneError as e:
        click.echo(f"error: {e}", err=True)
        sys.exit(1)
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
