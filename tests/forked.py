"""`perilune` commands, functions and modules in processes of their own, forked from one that has imported torch: 2 to 3
s of CPU less for each."""

import multiprocessing
import multiprocessing.process
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

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


class Module:
    """What ranks use of a subprocess.Popen, for the command `python -m MODULE FD...`."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], start_new_session: bool
    ) -> None:
        self._process = _FORKS.Process(target=_module, args=(command[2], [_Fd(fd) for fd in pass_fds], dict(env)))
        self._process.start()
        # Its status can be read once: by the thread here, not by the start of another process as well.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        self.pid, self._ended = self._process.pid, threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._process.join()
        self._ended.set()

    def poll(self) -> int | None:
        return self._process.exitcode if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a module", timeout or 0.0)
        return self.poll()

    def kill(self) -> None:
        if not self._ended.is_set():
            self._process.kill()


class _Fd:
    """A file descriptor that arrives in the process as the number it has there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (DupFd(self._fd),)


def _detached(fd: Any) -> int:
    return int(fd.detach())


def _module(name: str, fds: Sequence[int], env: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [name, *map(str, fds)]
    runpy.run_module(name, run_name="__main__")
