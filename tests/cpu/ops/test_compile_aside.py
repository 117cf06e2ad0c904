"""Kernels that are compiled while slower implementations serve."""

import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from perilune.ops.harness import build, registry
from perilune.ops.pointwise import rmsnorm


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Waits until threads have said so many lines, and gives them. capfd loses what is written while it reads."""
    lines: list[str] = []
    monkeypatch.setattr(build, "_say", lines.append)

    def wait(count: int) -> list[str]:
        deadline = time.monotonic() + 60
        while len(lines) < count:
            assert time.monotonic() < deadline, lines
            time.sleep(0.005)
        return lines

    return wait


def test_a_kernel_is_refused_until_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[int], list[str]]
) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    go, compile_, done = threading.Event(), build._compile, threading.Event()

    def slowly(*args: object) -> None:
        assert go.wait(60)
        compile_(*args)  # type: ignore[arg-type]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_paths", lambda: {"seven": source})
    monkeypatch.setattr(build, "_compile", slowly)
    assert build.compile_aside(done.set) == 1 and build.compiling()
    assert build.library("seven") == "it is being compiled"
    assert build.on_cpu("seven", torch.device("cpu")) == "it is being compiled"
    go.set()
    assert done.wait(60) and not build.compiling()
    found = build.library("seven")
    assert isinstance(found, ctypes.CDLL) and found.seven() == 7
    first, each, last = said(3)
    assert first.startswith("compiling 1 kernels") and last.startswith("1 kernels were compiled")
    assert re.fullmatch(r"kernel 1 of 1: seven, after \d+\.\d s", each)
    build._loaded.pop("seven")
    assert build.compile_aside(done.set) == 0  # it is in the cache
    assert isinstance(build.library("seven"), ctypes.CDLL)
    build._loaded.pop("seven")


def test_each_kernel_is_a_line_and_a_failed_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[int], list[str]]
) -> None:
    texts = {"one": "int one;", "two": "int two", "three": "int three;"}
    for name, text in texts.items():
        (tmp_path / f"{name}.cpp").write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_paths", lambda: {name: tmp_path / f"{name}.cpp" for name in texts})
    build.compile_aside(lambda: None)
    each = sorted(line for line in said(5) if line.startswith("kernel "))
    assert [line[: len("kernel 1 of 3")] for line in each] == [f"kernel {i} of 3" for i in (1, 2, 3)]
    (failed,) = (line for line in each if ": two" in line)
    assert "two.cpp does not compile here: " in failed and "error" in failed
    for name in texts:
        build._loaded.pop(name)


def test_a_first_start_compiles_all_kernels_of_the_gpu_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[int], list[str]]
) -> None:
    nvcc, paths, together = tmp_path / "nvcc", {n: tmp_path / n for n in ("a.cu", "b.cu")}, threading.Barrier(2)
    text = "int seven() { return 7; }"  # the last argument is the library's path
    nvcc.write_text(f'#!/bin/sh\nfor to; do :; done\n[ $to = --version ] || echo "{text}" | g++ -shared -xc - -o $to\n')
    nvcc.chmod(0o755)
    compile_ = build._compile
    for path in paths.values():
        path.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(build, "_paths", lambda: paths)
    monkeypatch.setattr(build, "_nvcc", lambda: str(nvcc))
    monkeypatch.setattr(build, "_compile", lambda *args: (together.wait(60), compile_(*args)))
    assert build.compile_ahead(torch.device("cpu")) == 0
    monkeypatch.setattr(build, "is_hopper", lambda device: True)
    assert build.compile_ahead(torch.device("cuda")) == 2
    for name in paths:
        found = build.library(name)
        assert isinstance(found, ctypes.CDLL) and found.seven() == 7
    assert said(4)[0] == "compiling 2 kernels for this GPU, once" and build.compile_ahead(torch.device("cuda")) == 0
    for name in paths:
        build._loaded.pop(name)


def test_a_build_that_was_killed_is_swept_and_one_that_lives_is_not(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\nfrom perilune.ops.harness import build\n"
        "with build._scratch(pathlib.Path(sys.argv[1])) as scratch:\n"
        "    pathlib.Path(scratch, 'out.o').write_text('half')\n    print(scratch, flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        build.sweep(tmp_path)
        assert (folder / "out.o").exists(), "its process lives"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert (folder / "out.o").exists()
    build.sweep(tmp_path)
    assert not folder.exists()
    with build._scratch(tmp_path) as scratch:
        assert Path(scratch).is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_swept_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, swept = fcntl.flock, list[int]()

    def late(held: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:  # between the folder and its lock, another build sweeps
            swept.append(held)
            build.sweep(tmp_path)
        lock(held, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with build._scratch(tmp_path) as scratch:
        build.sweep(tmp_path)
        assert swept and Path(scratch).is_dir(), "the compiler's output has no folder"
    assert list(tmp_path.iterdir()) == []


def test_ops_decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x, w = rmsnorm.op, torch.ones(2, 8), torch.ones(8)
    monkeypatch.setattr(build, "_aside", set(build.sources()))
    registry.forget()
    op(x, w, 1e-6)
    assert op.explain((x, w, 1e-6))[0].name == "torch"  # type: ignore[union-attr]
    slow = set(op._decisions.values())
    monkeypatch.setattr(build, "_aside", set())
    registry.forget()
    assert not op._decisions
    op(x, w, 1e-6)
    assert op.explain((x, w, 1e-6))[0].name == "cpp" and set(op._decisions.values()) != slow  # type: ignore[union-attr]
    registry.forget()


def test_of_several_processes_that_start_together_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    compile_, runs = build._compile, 0

    def counted(*args: object) -> None:
        nonlocal runs
        runs += 1
        compile_(*args)  # type: ignore[arg-type]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", counted)
    # Threads stand in for processes: each opens the file of the lock itself.
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(build._build, [source] * 4))
    assert all(isinstance(library, ctypes.CDLL) for library in found) and runs == 1


def test_a_process_that_compiles_for_ever_does_not_keep_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "TURN_SECONDS", 0.2)
    with build._turn(build.cache_directory("ops"), source.name):
        assert isinstance(build._build(source), ctypes.CDLL)
