"""Compiles a CUDA source for the emulator: g++ -E, translation, g++ to a shared library in the user's cache."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from perilune.ops.harness import build
from tests.cuda_emulator.translate import translate

HERE = Path(__file__).parent
# Frame pointers and no tail calls, so that a report can name the line at which a thread waits.
COMMON = ("-std=c++17", "-g1", "-fPIC", "-march=native", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
FLAGS = (*COMMON, "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
RUNTIME_FLAGS = (*COMMON, "-O3")


class Unbuilt(Exception):
    """A source that does not compile, with the compiler's message."""


def missing() -> str | None:
    """Why nothing can be compiled here."""
    return None if shutil.which("g++") else "no g++"


needed = pytest.mark.skipif(missing() is not None, reason=f"the emulator needs a compiler: {missing()}")


@functools.cache
def _signature() -> str:
    files = sorted([*HERE.glob("include/*"), *HERE.glob("runtime/*"), *HERE.glob("*.py")])
    texts = [f.read_text() for f in files if f.is_file()]
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    return hashlib.sha256("\0".join([*texts, compiler, build.processor()]).encode()).hexdigest()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise Unbuilt("\n".join(errors[:20]))
    return done.stdout


def _made(stem: str, digest: str, make: Callable[[Path], None]) -> Path:
    """The library of that name in the cache; `make` writes it into a folder, in one process at a time."""
    target = build.cache_directory("emulator") / f"{stem}-{digest[:24]}.so"
    if not target.exists():
        with build._turn(target.parent, stem):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    make(Path(folder))
                    os.replace(Path(folder) / "out.so", target)
                build._prune(target.parent, stem)
    return target


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator itself, loaded so that kernels find its functions."""

    def make(folder: Path) -> None:
        objects = []
        for source in sorted(HERE.glob("runtime/*.cpp")):
            objects.append(f"{folder}/{source.stem}.o")
            _run(["g++", *RUNTIME_FLAGS, "-c", str(source), "-o", objects[-1]])
        _run(["g++", "-shared", *objects, "-o", f"{folder}/out.so", "-ldl"])

    loaded = ctypes.CDLL(str(_made("runtime", _signature(), make)), mode=ctypes.RTLD_GLOBAL)
    loaded.emu_drain.restype = ctypes.c_char_p
    loaded.emu_configure.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64, *[ctypes.c_int] * 3]
    return loaded


def translated(source: Path) -> str:
    """C++ of a CUDA source."""
    command = ["g++", "-E", "-std=c++17", "-x", "c++", f"-I{HERE / 'include'}", f"-I{build.SOURCES}", str(source)]
    return translate(_run(command))


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The library of a CUDA source (a path). Unbuilt or Untranslated if that fails."""
    runtime()
    text = translated(source)

    def make(folder: Path) -> None:
        (folder / "kernel.cpp").write_text(text)
        _run(["g++", *FLAGS, "-fpreprocessed", "-shared", f"{folder}/kernel.cpp", "-o", f"{folder}/out.so"])

    digest = hashlib.sha256("\0".join([text, *FLAGS, _signature()]).encode()).hexdigest()
    return ctypes.CDLL(str(_made(source.stem, digest, make)))


def resolved(message: str) -> str:
    """The runtime's message with places in libraries as files and lines."""

    def line(m: re.Match[str]) -> str:
        tool = shutil.which("addr2line")
        if tool is None or "runtime-" in m[1]:
            return ""
        out = subprocess.run([tool, "-i", "-s", "-e", m[1], m[2]], capture_output=True, text=True, timeout=60).stdout
        places = [
            p.split(" ")[0]
            for p in out.splitlines()
            if "?" not in p and not p.startswith(("tuple", "std_", "invoke", "cuda_"))
        ]
        return "".join(f" {p}" for p in places)

    return re.sub(r" @([^@+]+)\+(0x[0-9a-f]+)@", line, message)
