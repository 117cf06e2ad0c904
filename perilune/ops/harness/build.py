"""Compiles a kernel source of this package on first use and loads it: plain C functions called through ctypes.

The library is cached per user under a hash of the source, the headers that it includes, the compiler, its flags and
this processor, so that different machines can share a home directory. It is written to a temporary name and renamed, so
that no process loads half a file. Of several processes that need a library, one builds it and the others wait.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("perilune.ops")

SOURCES = Path(__file__).parents[1]  # perilune/ops: kernel sources lie in <room>/sm90/*.cu and <room>/cpu/*.cpp
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wall")
# -gencode instead of -arch=sm_90a: with -arch some nvcc also compile for sm_90, which lacks wgmma and setmaxnreg.
CUDA_FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC", "-shared", "-lineinfo")
HOPPER = (9, 0)
BUILD_PREFIX = ".build-"  # names of folders in the cache into which a compiler writes
TURN_PREFIX = ".turn-"  # names of lock files in the cache, one per source: the process that has locked it compiles
TURN_SECONDS = 600.0  # Longest wait for another process that compiles. Larger: a hanging compiler blocks others longer.
RETRY_SECONDS = 0.05
KEPT_PER_SOURCE = 4  # built libraries of one source kept in the cache (checkouts, compilers); the oldest go first

NO_COMPILER = "no compiler"
_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float}
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)  # by its path below SOURCES

_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by source: different ones build at once
_loaded: dict[str, "ctypes.CDLL | str"] = {}
_aside: set[str] = set()  # stems of the kernels that compile_aside still has to compile


def library(source: str) -> "ctypes.CDLL | str":
    """The loaded library of a kernel source, or the reason (one line) why this machine cannot compile or load it.

    `source` is the name of a .cu file, or a stem, which means the .cpp file.
    """
    return "it is being compiled" if source in _aside else _library(source)


def compile_aside(done: Callable[[], None]) -> int:
    """Starts threads that compile the CPU kernels missing from the cache and call `done` after each; returns how many.
    Until a kernel is compiled, `library` returns a reason instead, so that slower implementations run."""
    absent = _absent(".cpp")
    _aside.update(absent)

    def ended(name: str) -> None:
        _aside.discard(name)
        done()

    _on_threads(absent, "for this processor, once; slower ones serve meanwhile, without drafts", ended)
    return len(absent)


def compile_ahead(device: torch.device) -> int:
    """Starts threads that compile the CUDA kernels missing from the cache if `device` can run them; returns how many.
    `library` waits for its kernel, so a first start takes as long as the slowest one, not as all."""
    absent = _absent(".cu") if is_hopper(device) else []
    _on_threads(absent, "for this GPU, once", lambda _: None)
    return len(absent)


def _on_threads(names: list[str], why: str, ended: Callable[[str], None]) -> None:
    begun, count = time.monotonic(), itertools.count(1)

    def build(name: str) -> None:
        found: ctypes.CDLL | str = "it failed"
        try:
            found = _library(name)
        finally:
            ended(name)
            said = f": {found}" if isinstance(found, str) else f", after {time.monotonic() - begun:.1f} s"
            # A line for each, none overwritten: the server writes to the same terminal.
            number = next(count)
            _say(f"kernel {number} of {len(names)}: {name}{said}")
        if number == len(names):
            _say(f"{len(names)} kernels were compiled in {time.monotonic() - begun:.0f} s")

    if names:
        _say(f"compiling {len(names)} kernels {why}")
        waiting = deque(names)

        def work() -> None:
            while waiting:
                with contextlib.suppress(IndexError):
                    build(waiting.popleft())

        for _ in range(min(os.cpu_count() or 1, len(names))):
            threading.Thread(target=work, daemon=True).start()  # the process may end before they do


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # one write: threads that end together must not write into each other's lines
    sys.stderr.flush()


def compiling() -> bool:
    """Whether `compile_aside` still has kernels to compile."""
    return bool(_aside)


def building() -> bool:
    """Whether this process compiles a kernel now."""
    return any(lock.locked() for lock in list(_locks.values()))


def _absent(suffix: str) -> list[str]:
    """The kernels in such sources that can be compiled here and are not in the cache, the largest source first."""
    on_gpu = suffix == ".cu"
    compiler, openmp = (_nvcc(), None) if on_gpu else (shutil.which("g++"), _torch_openmp())
    if compiler is None or (openmp is None and not on_gpu):
        return []
    try:
        absent = {n: p for n, p in _paths().items() if p.suffix == suffix and not _target(p, compiler, openmp).exists()}
        return sorted(absent, key=lambda name: -absent[name].stat().st_size)
    except (OSError, subprocess.SubprocessError):
        return []


def _target(source: Path, compiler: str, openmp: str | None) -> Path:
    """Path of the library of a source in the cache."""
    return cache_directory("ops") / f"{source.stem}-{_digest(source, compiler, _version(compiler), openmp or '')}.so"


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout


def _library(source: str) -> "ctypes.CDLL | str":
    found = _loaded.get(source)
    if found is None:
        with _locks[source]:
            found = _loaded.get(source)
            if found is None:
                found = _loaded[source] = _build(_paths()[source])
    return found


def sources() -> list[str]:
    """Every kernel source, as `library` takes it."""
    return sorted(_paths())


def _paths() -> dict[str, Path]:
    """The path of every kernel source by the name that `library` takes. Names are unique over all rooms."""
    found = [(p.stem, p) for p in SOURCES.glob("*/cpu/*.cpp")] + [(p.name, p) for p in SOURCES.glob("*/sm90/*.cu")]
    paths = dict(found)
    assert len(paths) == len(found), "two kernel sources share a name"
    return paths


def on_cpu(stem: str, device: torch.device, *needs: tuple[bool, str]) -> bool | str:
    """`when` of an implementation in `<room>/cpu/<stem>.cpp`: True, or the first reason against it. A need is
    (met, text)."""
    if device.type != "cpu":
        return "for CPU"
    for met, text in needs:
        if not met:
            return f"needs {text}"
    found = library(stem)
    return found if isinstance(found, str) else True


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


def on_hopper(source: str, device: torch.device, *needs: tuple[bool, str]) -> bool | str:
    """`when` of an implementation in the CUDA file `<room>/sm90/<source>`: True, or the first reason against it."""
    if device.type != "cuda":
        return "for CUDA"
    if not is_hopper(device):
        return "for Hopper GPUs (sm_90)"
    for met, text in needs:
        if not met:
            return f"needs {text}"
    found = library(source)
    if isinstance(found, str) and found.startswith(NO_COMPILER):
        _warn_without_nvcc()
    return found if isinstance(found, str) else True


@functools.cache
def sm_count(device: torch.device) -> int:
    """Number of SMs of a GPU; 0 for a CPU. Cached: the ops of a prompt's layer need it seven times."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def stream(device: torch.device | None = None) -> int:
    """The handle of the current stream of `device`, a GPU (None: of the current GPU), for a launch.
    torch.cuda.current_stream takes 10 us of host time, and a layer of a prompt has 19 launches."""
    index = torch._C._cuda_getDevice() if device is None or device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


def uuid(gpu: int) -> bytes:
    """The UUID of a GPU as NVML takes it."""
    return f"GPU-{torch.cuda.get_device_properties(gpu).uuid}".encode()


def check_nvcc(device: torch.device) -> None:
    """Call it before computing on `device`: warns, once per process, if its CUDA kernels cannot be compiled."""
    if is_hopper(device) and _nvcc() is None:
        _warn_without_nvcc()


@functools.cache
def _warn_without_nvcc() -> None:
    log.warning(
        "no nvcc: the CUDA kernels for this GPU cannot be compiled, and PyTorch's slower operators run instead; "
        "install the CUDA toolkit (torch was built for %s) or put its nvcc on the PATH, then start again",
        torch.version.cuda,
    )


def function(stem: str, name: str, signature: str) -> Callable[..., int]:
    """C function `name`, returning int, of a library for which `on_cpu` or `on_hopper` returned True.

    One letter per argument: p pointer, l int64, f float.
    """
    found = library(stem)
    assert not isinstance(found, str), found
    launcher = found[name]
    launcher.argtypes = [_KINDS[c] for c in signature]
    launcher.restype = ctypes.c_int
    return launcher


def launcher(stem: str, name: str, signature: str) -> Callable[[], Callable[..., int]]:
    """`function` from the first call on: importing an op compiles nothing."""
    return functools.cache(lambda: function(stem, name, signature))


def launcher_by_type(stem: str, name: str, signature: str) -> Callable[[torch.dtype], Callable[..., int]]:
    """As `launcher`, of two functions: `name`_f32 for float32 and `name`_bf16."""
    return functools.cache(
        lambda dtype: function(stem, f"{name}_{'f32' if dtype == torch.float32 else 'bf16'}", signature)
    )


def _build(source: Path) -> "ctypes.CDLL | str":
    on_gpu = source.suffix == ".cu"
    name = "nvcc" if on_gpu else "g++"
    compiler = _nvcc() if on_gpu else shutil.which(name)
    if compiler is None:
        return f"{NO_COMPILER} for {'CUDA' if on_gpu else 'C++'} (install {name})"
    openmp = None if on_gpu else _torch_openmp()
    if openmp is None and not on_gpu:
        return "torch's OpenMP library was not found in this process"
    try:
        target = _target(source, compiler, openmp)
        if not target.exists():
            with _turn(target.parent, source.name):
                if not target.exists():
                    _compile(compiler, source, openmp, target)
                    _prune(target.parent, source.stem)
        return ctypes.CDLL(str(target))
    except subprocess.CalledProcessError as e:
        found = (e.stderr or "").splitlines()
        lines = [line for line in found if "error" in line or "/ld: " in line] or ["no message"]
        return f"{source.name} does not compile here: {lines[0]}"
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{source.name} cannot be built or loaded: {e}"


def _nvcc() -> str | None:
    """nvcc of the PATH, else where CUDA's installer puts it."""
    usual = "/usr/local/cuda/bin/nvcc"
    return shutil.which("nvcc") or (usual if os.access(usual, os.X_OK) else None)


def _compile(compiler: str, source: Path, openmp: str | None, target: Path) -> None:
    sweep(target.parent)
    with _scratch(target.parent) as scratch:
        made, linked = f"{scratch}/out.o", f"{scratch}/out.so"
        if openmp is None:
            commands = [[compiler, *CUDA_FLAGS, f"-I{SOURCES}", str(source), "-o", linked]]
        else:
            # Compile and link separately: with -fopenmp at link time the library would load the compiler's own libgomp,
            # a second runtime with its own spinning threads. Link the one that torch has loaded instead.
            commands = [
                [compiler, *FLAGS, f"-I{SOURCES}", "-c", str(source), "-o", made],
                [compiler, "-shared", made, openmp, "-o", linked],
            ]
        for command in commands:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        os.replace(linked, target)


@contextlib.contextmanager
def _turn(directory: Path, source: str) -> Iterator[None]:
    """Locks a source while one process compiles it, so that ranks that start together compile each once. The lock ends
    with its process. A process that has waited for TURN_SECONDS compiles without the lock."""
    held = os.open(directory / f"{TURN_PREFIX}{source}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = time.monotonic() + TURN_SECONDS
        while time.monotonic() < end:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(RETRY_SECONDS)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[str]:
    """A folder for one build, locked for as long as this process works in it, however the process ends."""
    while True:
        scratch = tempfile.mkdtemp(dir=directory, prefix=BUILD_PREFIX)
        try:
            held = os.open(scratch, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks: `sweep` then deletes no folder
            fcntl.flock(held, fcntl.LOCK_EX)
        # Another thread or process may have swept the folder before it was locked. Then try with a new one.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), os.stat(scratch)):
                break
        os.close(held)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)


def sweep(directory: Path) -> None:
    """Removes folders of builds that were killed."""
    for folder in directory.glob(f"{BUILD_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _digest(source: Path, compiler: str, version: str, openmp: str) -> str:
    flags = CUDA_FLAGS if source.suffix == ".cu" else (openmp, *FLAGS, processor())
    parts = [*(path.read_text() for path in _with_headers(source)), compiler, version, *flags]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _with_headers(source: Path) -> list[Path]:
    """The source and every header of this package that it includes, directly or through another, in a fixed order."""
    found, waiting = [source], [source]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop().read_text()):
            header = SOURCES / name
            if header not in found:
                found.append(header)
                waiting.append(header)
    return [source, *sorted(found[1:])]


@functools.cache
def processor() -> str:
    """A string that identifies this CPU: all that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _torch_openmp() -> str | None:
    torch.get_num_threads()  # loads torch with its OpenMP runtime
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


def cache_directory(name: str) -> Path:
    """A directory in the user's cache that only this user can write: a library that others could write would let them
    run code as this user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one
        directory = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "perilune" / name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.stat()
        ours = info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if ours and os.access(directory, os.W_OK):
            return directory
    return Path(_private_directory().name)


def _prune(directory: Path, stem: str) -> None:
    def built(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process pruned it
            return 0.0

    named = re.compile(rf"{re.escape(stem)}-[0-9a-f]{{24}}\.so")
    for old in sorted((p for p in directory.glob("*.so") if named.fullmatch(p.name)), key=built)[:-KEPT_PER_SOURCE]:
        old.unlink(missing_ok=True)
