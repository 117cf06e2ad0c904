"""Kernels that are compiled while slower implementations serve."""

import ctypes
import threading
import time
from pathlib import Path

import pytest
import torch

from perilune.ops.harness import build, registry
from perilune.ops.pointwise import rmsnorm


def test_a_kernel_is_refused_until_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    go, compile_, done = threading.Event(), build._compile, threading.Event()

    def slowly(*args: object) -> None:
        go.wait(20)
        compile_(*args)  # type: ignore[arg-type]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_paths", lambda: {"seven": source})
    monkeypatch.setattr(build, "_compile", slowly)
    assert build.compile_aside(done.set) == 1 and build.compiling()
    assert build.library("seven") == "it is being compiled"
    assert build.on_cpu("seven", torch.device("cpu")) == "it is being compiled"
    go.set()
    assert done.wait(30) and not build.compiling()
    found = build.library("seven")
    assert isinstance(found, ctypes.CDLL) and found.seven() == 7
    time.sleep(0.05)
    assert "compiling 1 kernels" in (said := capfd.readouterr().err) and "1 kernels were compiled" in said
    build._loaded.pop("seven")
    assert build.compile_aside(done.set) == 0  # it is in the cache
    assert isinstance(build.library("seven"), ctypes.CDLL)
    build._loaded.pop("seven")


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
