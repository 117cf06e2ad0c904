"""Speed of loading a checkpoint from disk to memory, beside that of plain sequential reads.

The checkpoint has Kimi K2's own expert shapes and random bytes, so that no storage layer can compress it.
Every round reads the same files five times: three times plainly (around the page cache with one and with several
requests in flight, and through it), once by `load` with the page cache emptied of them, once by `load` again. Rounds
are interleaved because the speed of a rented machine's disk changes.
"""

import gc
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perilune.bench import ledger, shapes
from perilune.core.errors import ConfigError, sized
from perilune.core.jsonfile import write_object
from perilune.formats import int4
from perilune.formats.scheme import INT4_GROUP
from perilune.formats.writer import Writer, with_quantization
from perilune.loading.load import default_threads, load
from perilune.model.config import KimiConfig
from perilune.model.names import EXPERT, expected

GB = 1e9
VOCABULARY = 32_768  # instead of the real 163,840, so that most of the checkpoint is experts
BLOCK = 1 << 25
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only, as the bench is; importing this file must work anywhere
PLAIN = {"direct": (_DIRECT, 1), "direct_4": (_DIRECT, 4), "buffered": (0, 1)}  # flag of open, threads


def measure(
    parent: Path, *, gigabytes: float, rounds: int, threads: int | None, device: str, report: Callable[[str], None]
) -> dict[str, Any]:
    """Writes a checkpoint of about `gigabytes` GB below `parent`, loads it, removes it. Returns the ledger's row.

    ConfigError if the disk or the memory is too small for it.
    """
    config = _config(gigabytes)
    size = _bytes(config)
    _require_room(parent, size)
    with tempfile.TemporaryDirectory(dir=parent, prefix="perilune-loading-") as name:
        path = Path(name)
        began = time.perf_counter()
        _write(path, config)
        report(f"wrote {size / GB:.1f} GB in {time.perf_counter() - began:.0f} s to {parent}")
        files = sorted(path.glob("*.safetensors"))
        runs: dict[str, list[float]] = {kind: [] for kind in (*PLAIN, "cold", "warm")}
        from_disk: dict[str, list[float]] = {"cold": [], "warm": []}
        for number in range(1, rounds + 1):
            for kind, (flag, readers) in PLAIN.items():
                _evict(files)
                runs[kind].append(_read(files, flag, readers))
            _evict(files)
            for kind in ("cold", "warm"):
                before = _storage_bytes()
                began = time.perf_counter()
                weights = load(path, dtype=torch.bfloat16, device=device, threads=threads)
                if device != "cpu":
                    torch.cuda.synchronize()
                runs[kind].append(size / GB / (time.perf_counter() - began))
                from_disk[kind].append((_storage_bytes() - before) / size)
                del weights
                gc.collect()
            line = ", ".join(f"{kind} {speeds[-1]:.2f}" for kind, speeds in runs.items())
            report(f"round {number} of {rounds}, GB/s: {line}")
    middle = {kind: statistics.median(speeds) for kind, speeds in runs.items()}
    disk = max(middle[kind] for kind in PLAIN)
    return {
        "bench": "loading",
        "gigabytes": round(size / GB, 2),
        "format": "int4",
        "device": device,
        "load_threads": threads or default_threads(),
        "rounds": rounds,
        "disk_gb_per_s": round(disk, 3),
        "cold_gb_per_s": round(middle["cold"], 3),
        "fraction": round(middle["cold"] / disk, 4),
        "warm_gb_per_s": round(middle["warm"], 3),
        **{f"{kind}_gb_per_s_all": [round(s, 3) for s in speeds] for kind, speeds in runs.items()},
        "cold_read_from_disk": round(statistics.median(from_disk["cold"]), 4),
        "warm_read_from_disk": round(statistics.median(from_disk["warm"]), 4),
        "method": "medians of interleaved rounds on the same files; disk: the fastest of sequential reads of 32 MiB, "
        "by one thread and by four with O_DIRECT, by one buffered; page cache emptied of the files",
    } | ledger.circumstances()


def _config(gigabytes: float) -> KimiConfig:
    """One dense layer, then as many MoE layers and experts as the size takes, of the real shapes."""
    real = shapes.SHAPES["kimi-k2.5"] | {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "n_routed_experts": 8}

    def size(layers: int, experts: int) -> int:
        return _bytes(KimiConfig.from_dict(real | {"num_hidden_layers": 1 + layers, "n_routed_experts": experts}))

    layers = 1
    while size(layers, 384) < gigabytes * GB:
        layers += 1
    expert = (size(layers, 16) - size(layers, 8)) // 8
    experts = 8 + int(gigabytes * GB - size(layers, 8)) // expert
    if experts < 8:
        raise ConfigError(f"the smallest checkpoint of these shapes has {size(1, 8) / GB:.1f} GB: ask for more")
    return KimiConfig.from_dict(real | {"num_hidden_layers": 1 + layers, "n_routed_experts": experts})


def _bytes(config: KimiConfig) -> int:
    routed = config.parameters().routed
    return routed // 2 + routed // INT4_GROUP * 2 + config.parameters().other * 2


def _require_room(parent: Path, size: int) -> None:
    try:
        free = shutil.disk_usage(parent).free
    except OSError as e:
        raise ConfigError(f"cannot write below {parent}: {e.strerror}") from e
    if free < size * 1.1:
        raise ConfigError(f"{parent} has {sized(free)} free, {sized(size * 1.1)} are needed: choose another")


def _write(path: Path, config: KimiConfig) -> None:
    with Writer(path) as out:
        for name, shape in expected(config).items():
            for part, tensor in _tensors(name, shape):
                out.add(part, tensor)
    real = shapes.SHAPES["kimi-k2.5"] | {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_hidden_layers,
        "n_routed_experts": config.n_routed_experts,
    }
    write_object(path / "config.json", with_quantization(real, int4.quantization_config()))
    for file in path.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)  # pages that are not yet written cannot be evicted
        os.close(handle)


def _tensors(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if not EXPERT.fullmatch(name):
        yield name, _noise(shape)
        return
    linear, (rows, inputs) = name.removesuffix(".weight"), shape
    yield f"{linear}.weight_packed", _noise((rows, inputs // 4)).view(torch.int32)
    yield f"{linear}.weight_scale", _noise((rows, inputs // INT4_GROUP))
    yield f"{linear}.weight_shape", torch.tensor(shape)


_RANDOM = np.random.default_rng(0)


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    """bfloat16 of random bits with the highest exponent bit cleared: no infinities, no nan."""
    bits = np.frombuffer(bytearray(_RANDOM.bytes(2 * int(np.prod(shape)))), dtype=np.int16)
    bits &= ~0x4000
    return torch.from_numpy(bits).view(torch.bfloat16).reshape(shape)


def _evict(files: list[Path]) -> None:
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _read(files: list[Path], flag: int, threads: int) -> float:
    """GB/s of threads that read the files block by block from end to end."""
    handles = [os.open(file, os.O_RDONLY | flag) for file in files]
    sizes = [os.fstat(handle).st_size for handle in handles]
    blocks = iter([(h, at) for h, size in zip(handles, sizes) for at in range(0, size, BLOCK)])
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT wants it
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            os.preadv(block[0], [buffer], block[1])

    began = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as pool:
            for reader in [pool.submit(work) for _ in range(threads)]:
                reader.result()
        return sum(sizes) / GB / (time.perf_counter() - began)
    finally:
        for handle in handles:
            os.close(handle)


def _storage_bytes() -> int:
    """Bytes that this process has read from storage so far; reads from the page cache do not count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise ConfigError("this kernel does not count what a process reads from storage (/proc/self/io)")
