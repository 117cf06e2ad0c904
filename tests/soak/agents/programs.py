"""Agent programs from the package registries, each installed into a folder of its own and run against a server here.

A program sees a new home folder and no variable of this process, and every address but this machine's goes to a proxy
that does not exist: what a program needs besides the server is found out by its failing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

INSTALL_SECONDS = 900
RUN_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Program:
    """`packages`: with versions, of npm or else of PyPI. `newer`: needs Python 3.12."""

    name: str
    packages: Sequence[str]
    npm: bool = False
    newer: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def install(self, cache: Path) -> Path:
        """The folder with the program's commands; a test that cannot have it is skipped with the reason."""
        folder = cache / self.name
        done, wanted = folder / "installed.json", json.dumps([*self.packages])
        if not (done.is_file() and done.read_text() == wanted):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for command in self._install_commands(folder):
                run = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
                )
                if run.returncode:
                    last = [line for line in (run.stderr + run.stdout).splitlines() if line.strip()][-1:]
                    pytest.skip(f"{self.name} cannot be installed: {' '.join(last)[:300]}")
            done.write_text(wanted)
        return folder / ("node_modules/.bin" if self.npm else "bin")

    def _install_commands(self, folder: Path) -> list[list[str]]:
        if self.npm:
            if shutil.which("npm") is None:
                pytest.skip(f"{self.name} needs npm")
            (folder / "package.json").write_text("{}")
            return [["npm", "install", "--no-audit", "--no-fund", *self.packages]]
        python = sys.executable
        if self.newer and sys.version_info < (3, 12):
            python = _newer_python() or pytest.skip(f"{self.name} needs Python 3.12")
        return [
            [python, "-m", "venv", str(folder)],
            [str(folder / "bin/python"), "-m", "pip", "install", "-q", *self.packages],
        ]

    def run(self, bin: Path, arguments: Sequence[str], cwd: Path, home: Path, **more: str) -> str:
        """What it printed; the test fails if it fails. The first argument names a file of the program's folder."""
        nowhere = "http://127.0.0.1:9"
        env = {
            "PATH": os.pathsep.join([str(bin), str(Path(sys.base_prefix) / "bin"), "/usr/local/bin:/usr/bin:/bin"]),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HTTPS_PROXY": nowhere,
            "HTTP_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            **self.variables,
            **more,
        }
        command = [str(bin / arguments[0]), *arguments[1:]]
        with subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=RUN_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                out, err = process.communicate()
                pytest.fail(f"{self.name} did not end in {RUN_SECONDS} s:\n{out[-3000:]}\n{err[-3000:]}")
        assert process.returncode == 0, f"{self.name} ended with {process.returncode}:\n{out[-4000:]}\n{err[-4000:]}"
        return out


def _newer_python() -> str | None:
    """3.13 or 3.12 (kimi-cli fails with 3.12.1), on the path or beside this Python, as version managers keep them."""
    beside = sorted(Path(sys.base_prefix).parent.glob("3.1[23].*/bin/python3"), reverse=True)
    for path in (shutil.which("python3.13"), *map(str, beside), shutil.which("python3.12")):
        # A version manager may have a stub of that name without the version behind it.
        if path and not subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode:
            return path
    return None
