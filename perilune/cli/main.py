"""The `perilune` command: one verb per file of this package, imported only when it is used."""

from perilune.cli.shared import interrupt

with interrupt.Importing():
    import errno
    import sys

    import click

    from perilune.cli.shared.verbs import Verbs
    from perilune.core.errors import PeriluneError

# Errors of a path that the user named; a file that is missing (ENOENT) may be the program's fault.
PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
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
    "kv": "look after KV stored on disk",
    "bench": "measure speed, with its ceiling beside it",
}


@click.group(
    cls=Verbs,
    verbs=VERBS,
    package="perilune.cli",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(package_name="perilune")
def cli() -> None:
    """Serve the Kimi K2 family close to what the memory allows.

    MODEL is a directory, a Hugging Face repository id such as moonshotai/Kimi-K2.5, or kimi-nano (bundled, the
    default).
    """


def main() -> None:
    """Runs a verb and ends the process: 0, 2 after wrong usage, 128 + N after signal N, 1 after any other failure."""
    try:
        interrupt.keep()
        # Without standalone mode click returns the code of click.exceptions.Exit instead of ending with it.
        code = cli.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt) as e:
        interrupt.leave(*e.args)  # the signal, if it was another
    except click.ClickException as e:
        (_with_key(e) if isinstance(e, click.NoSuchOption) else e).show()
        sys.exit(e.exit_code)
    except PeriluneError as e:
        click.echo(f"error: {e}", err=True)
        sys.exit(1)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            click.echo(f"error: {e.strerror} for the output: free some, or write to another disk", err=True)
        elif e.errno in PATH_ERRORS and e.filename is not None:
            click.echo(f"error: cannot use {e.filename}: {e.strerror}; choose another path", err=True)
        else:
            raise
        sys.exit(1)
    sys.exit(code or 0)


def _with_key(e: click.NoSuchOption) -> click.UsageError:
    """The error; if the option's name is an engine key and the verb has --set, it proposes `--set KEY=VALUE`."""
    from perilune.core.config import EngineConfig

    key = e.option_name.lstrip("-").replace("-", "_")
    takes_keys = e.ctx is not None and any(p.name == "assignments" for p in e.ctx.command.params)
    if not takes_keys or key not in EngineConfig.__dataclass_fields__:
        return e
    # Not as a possibility of NoSuchOption, which leaves out those that are not like the option: --kv-disk.
    return click.UsageError(f"{e.message} Did you mean '--set {key}=VALUE'?", ctx=e.ctx)


if __name__ == "__main__":
    main()
