"""Compiles a kernel source of this package on first use and loads it: plain C functions called through ctypes.

The library is cached per user under a hash of the source, the package's headers, the compiler, its flags and this
processor, so that a shared home directory serves unlike machines. It is written to a temporary name and renamed:
several processes may build at once, and each loads a whole file.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wall")
KEPT = 64  # built libraries kept in the cache; the least recently built ones go first

_lock = threading.Lock()
_loaded: dict[str, "ctypes.CDLL | str"] = {}


def library(stem: str) -> "ctypes.CDLL | str":
    """The loaded library of `ops/<stem>.cpp`, or the reason (one line) why it cannot be had on this machine."""
    found = _loaded.get(stem)
    if found is None:
        with _lock:
            found = _loaded.get(stem)
            if found is None:
                found = _loaded[stem] = _build(SOURCES / f"{stem}.cpp")
    return found


def on_cpu(stem: str, device: torch.device, *needs: tuple[bool, str]) -> bool | str:
    """`when` of an implementation in `ops/<stem>.cpp`: True, or the first reason against it. A need is (met, text)."""
    if device.type != "cpu":
        return "for CPU"
    for met, text in needs:
        if not met:
            return f"needs {text}"
    found = library(stem)
    return found if isinstance(found, str) else True


def function(stem: str, name: str, signature: str) -> ctypes._CFuncPtr:
    """C function `name` of a library that `on_cpu` said yes to, returning int.

    One letter per argument: p pointer, l int64, f float.
    """
    found = library(stem)
    assert not isinstance(found, str), found
    launcher = found[name]
    launcher.argtypes = [{"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float}[c] for c in signature]
    launcher.restype = ctypes.c_int
    return launcher


def _build(source: Path) -> "ctypes.CDLL | str":
    compiler = shutil.which("g++")
    if compiler is None:
        return "no C++ compiler (install g++)"
    openmp = _torch_openmp()
    if openmp is None:
        return "torch's OpenMP library was not found in this process"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
        name = f"{source.stem}-{_digest(source, compiler, version, openmp)}.so"
        directory = _cache_directory()
        target = directory / name
        if not target.exists():
            _compile(compiler, source, openmp, target)
            _prune(directory)
        return ctypes.CDLL(str(target))
    except subprocess.CalledProcessError as e:
        lines = [line for line in (e.stderr or "").splitlines() if "error" in line] or ["no message"]
        return f"{source.name} does not compile here: {lines[0]}"
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{source.name} cannot be built or loaded: {e}"


def _compile(compiler: str, source: Path, openmp: str, target: Path) -> None:
    # Two steps: with -fopenmp at link time the compiler's own libgomp would be named, and two OpenMP runtimes in a
    # process keep two sets of spinning threads. Linking the library torch has loaded shares torch's threads.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        made, linked = f"{scratch}/out.o", f"{scratch}/out.so"
        for command in (
            [compiler, *FLAGS, "-c", str(source), "-o", made],
            [compiler, "-shared", made, openmp, "-o", linked],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        os.replace(linked, target)


def _digest(source: Path, compiler: str, version: str, openmp: str) -> str:
    parts = [source.read_text(), *(h.read_text() for h in sorted(source.parent.glob("*.h")))]
    parts += [compiler, version, openmp, *FLAGS, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _torch_openmp() -> str | None:
    torch.get_num_threads()  # torch, and with it its OpenMP runtime, is loaded
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    found = sorted(p for p in mapped if Path(p).name.startswith("libgomp"))
    beside_torch = [p for p in found if Path(p).is_relative_to(Path(torch.__file__).parents[1])]
    return next(iter(beside_torch or found), None)


@functools.cache
def _private_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="perilune-ops-")  # removed when the process ends


def _cache_directory() -> Path:
    """Ours alone: a library that others can write is code they can run as us."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    directory = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "perilune" / "ops"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.stat()
        ours = info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if ours and os.access(directory, os.W_OK):
            return directory
    except (OSError, RuntimeError):  # no home, or a read-only one
        return Path(_private_directory().name)
    return Path(_private_directory().name)


def _prune(directory: Path) -> None:
    def built(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process pruned it
            return 0.0

    for old in sorted(directory.glob("*.so"), key=built)[:-KEPT]:
        old.unlink(missing_ok=True)
