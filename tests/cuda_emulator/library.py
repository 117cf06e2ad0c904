"""Compiles a CUDA source for the emulator: g++ -E, translation, g++ to a shared library in the user's cache."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from perilune.ops.harness import build
from tests.cuda_emulator.translate import translate

HERE = Path(__file__).parent
# Frame pointers, and calls that stay calls, so that a report can name the line at which a thread waits.
COMMON = ("-std=c++17", "-g1", "-fPIC", "-march=native", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
FLAGS = (*COMMON, "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
RUNTIME_FLAGS = (*COMMON, "-O3")


class Unbuilt(Exception):
    """A source that does not compile, with the compiler's message."""


def missing() -> str | None:
    """Why nothing can be compiled here."""
    return None if shutil.which("g++") else "no g++"


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


def _install(make: Path, target: Path) -> None:
    os.replace(make, target)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator itself, loaded so that kernels find its functions."""
    target = build.cache_directory("emulator") / f"runtime-{_signature()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            objects = []
            for source in sorted(HERE.glob("runtime/*.cpp")):
                objects.append(f"{folder}/{source.stem}.o")
                _run(["g++", *RUNTIME_FLAGS, "-c", str(source), "-o", objects[-1]])
            _run(["g++", "-shared", *objects, "-o", f"{folder}/out.so", "-ldl"])
            _install(Path(f"{folder}/out.so"), target)
    loaded = ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)
    loaded.emu_drain.restype = ctypes.c_char_p
    loaded.emu_configure.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    ]
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
    digest = hashlib.sha256("\0".join([text, *FLAGS, _signature()]).encode()).hexdigest()[:24]
    target = build.cache_directory("emulator") / f"{source.stem}-{digest}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made, out = Path(folder) / "kernel.cpp", Path(folder) / "out.so"
            made.write_text(text)
            _run(["g++", *FLAGS, "-fpreprocessed", "-shared", str(made), "-o", str(out)])
            _install(out, target)
            _prune(target.parent, source.stem)
    return ctypes.CDLL(str(target))


def _prune(folder: Path, stem: str) -> None:
    named = re.compile(rf"{re.escape(stem)}-[0-9a-f]{{24}}\.so")
    found = sorted((p for p in folder.glob("*.so") if named.fullmatch(p.name)), key=lambda p: p.stat().st_mtime)
    for old in found[:-4]:
        old.unlink(missing_ok=True)


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
