"""The wheel in an environment of its own, away from the checkout: it serves, with a compiler and without one."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.server import QUESTION, Server, needs_nano

pytestmark = needs_nano
ROOT = Path(__file__).parents[2]
DEPENDENCIES = Path(torch.__file__).parents[1]


def run(*command: str | Path, **where: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200, **where)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools would reuse what an earlier build left in the checkout."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "perilune", source / "perilune", ignore=shutil.ignore_patterns("__pycache__"))
    build = ("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", made)
    stored = "--config-settings=--build-option=--compression=stored"  # deflating the weights takes 3 s
    run(sys.executable, *build, stored, source)
    (found,) = made.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its bin/: a fresh environment with the wheel, which borrows the dependencies of the one that runs the tests."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    run(sys.executable, "-m", "pip", "-q", "--python", home / "bin/python", "install", "--no-deps", "--no-index", wheel)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # A line of a .pth file adds the directory without running its .pth files: the checkout stays out of sight.
    (packages / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    yield home / "bin"
    shutil.rmtree(home)  # 90 MB


def surroundings(compiler: bool) -> dict[str, str]:
    """The variables of a process that runs the wheel. Without a compiler PATH has nothing at all."""
    kept = {k: v for k, v in os.environ.items() if k in ("HOME", "XDG_CACHE_HOME", "LANG", "OMP_NUM_THREADS", "TMPDIR")}
    return {**kept, "PATH": os.environ["PATH"] if compiler else "/nowhere"}


def test_everything_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = (p for p in (ROOT / "perilune").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert {str(p.relative_to(ROOT)) for p in files} - packed == set()
    assert not [name for name in packed if not name.startswith("perilune")]


@pytest.mark.parametrize("compiler", [True, False])
def test_it_serves(environment: Path, compiler: bool, tmp_path: Path) -> None:
    env = surroundings(compiler)
    where = run(environment / "python", "-c", "import perilune; print(perilune.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(environment.parent)
    swiglu = ("ops", "swiglu", "--impl", "cpp", "--check-only", "--dtype", "float32", "--device", "cpu")
    checked = run(environment / "perilune", *swiglu, cwd=tmp_path, env=env)
    assert checked.startswith("swiglu: 0 checks passed") != compiler, "the kernel's source: " + checked
    command = (str(environment / "perilune"), "serve", "kimi-nano", "--port", "0", "--device", "cpu")
    running = Server("--set", "threads=1", command=command, cwd=tmp_path, env=env)
    try:
        ask = {"messages": QUESTION, "temperature": 0}
        answer = running.post("/v1/chat/completions", json=ask).json()
        assert "936" in answer["choices"][0]["message"]["content"], answer
        assert "<title>Perilune</title>" in running.get("/").text
        running.stop(signal.SIGTERM)
    finally:
        running.kill()
