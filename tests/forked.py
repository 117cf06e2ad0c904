"""`perilune` commands in processes of their own, forked from one that has imported torch: 3 s of CPU less for each."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perilune.cli.main import main

LIMIT_SECONDS = 120.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["perilune.cli.main", "perilune.engine.engine"])


@dataclass(frozen=True)
class Done:
    returncode: int | None
    stdout: str
    stderr: str


def _run(args: tuple[str, ...], out: Path, err: Path, before: Callable[[], None] | None) -> None:
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    sys.argv = ["perilune", *args]
    if before is not None:
        before()
    main()


def perilune(where: Path, *args: object, before: Callable[[], None] | None = None) -> Done:
    """What a command ends with. `before` is called in its process first; `where` keeps its output meanwhile."""
    out, err = where / "stdout", where / "stderr"
    code = run(_run, tuple(map(str, args)), out, err, before)
    return Done(code, out.read_text(), err.read_text())


def run(target: Callable[..., object], *args: object) -> int | None:
    """The exit code of a process that calls a function of a module; that of a signal is negative."""
    process = _FORKS.Process(target=target, args=args)
    process.start()
    process.join(LIMIT_SECONDS)
    process.kill()
    process.join()
    return process.exitcode
