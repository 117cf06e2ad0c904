"""Whole conversions of checkpoints with Kimi K2's matrices: time, memory over time, and continuing after a kill.

The source has a few layers and as many experts as the size needs, of random INT4. One conversion runs through; another
is killed with SIGKILL three times and repeated, and must give the same bytes. A second source has all of Kimi K2's
layers and experts as sparse files without data, enough for a dry run.
"""

import hashlib
import itertools
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench import ledger
from perilune.bench.shapes import SHAPES
from perilune.convert.job import Job, Out
from perilune.convert.shards import arrange
from perilune.core.errors import ConfigError, EngineError
from perilune.core.files import free_bytes
from perilune.core.jsonfile import write_object
from perilune.formats import int4
from perilune.formats.writer import with_quantization
from perilune.model.config import KimiConfig
from perilune.model.names import EXPERT, expected

SHARD_BYTES = 1_000_000_000
KILLS = (0.2, 0.5, 0.8)  # shares of the result's bytes at which a run is killed
ROOM = 2.1  # bytes of disk for each byte of the source: the source and one result
LARGEST_GB = 480  # of the source, which has at most 10,000 experts in a layer
SAMPLE_SECONDS = 0.2
TENTHS = 10
SMALL = {"num_hidden_layers": 3, "vocab_size": 4096, "intermediate_size": 2048}  # all but the experts is reduced
_RSS = re.compile(r"^Vm(RSS|HWM):\s+(\d+) kB$", re.MULTILINE)


def measure(scratch: Path, gb: float, report: Callable[[str], None]) -> dict[str, Any]:
    """One ledger row. `scratch` needs room for about ROOM times `gb`; what is made there is removed."""
    _require_room(scratch, gb)
    folder = scratch / "perilune-stream"
    try:
        folder.mkdir(parents=True)
    except FileExistsError as e:
        raise ConfigError(f"{folder} exists, perhaps left by a run that was killed: remove it") from e
    try:
        source, result = folder / "source", folder / "result"
        size = make(source, _sized(gb))
        report(f"source: {size / 1e9:.2f} GB")
        seconds, peak, curve = _watched(source, result)
        report(f"{seconds:.1f} s, {size / seconds / 1e9:.3f} GB/s, at most {peak / 1e6:.0f} MB; by tenths: {curve}")
        whole = digests(result)
        wanted = sum(f.stat().st_size for f in result.rglob("*"))
        shutil.rmtree(result)
        killed = [_killed(source, result, share * wanted) for share in KILLS]
        _watched(source, result)
        same = digests(result) == whole
        report(f"killed at {', '.join(f'{k / 1e9:.2f}' for k in killed)} GB; then the same bytes: {same}")
        shutil.rmtree(result)
        return (
            {
                "bench": "convert",
                "what": "streaming, INT4 to NVFP4",
                "source_gb": round(size / 1e9, 3),
                "seconds": round(seconds, 1),
                "gb_per_s": round(size / seconds / 1e9, 4),
                "peak_mb": round(peak / 1e6, 1),
                "peak_mb_by_tenth": curve,
                "killed_at_gb": [round(k / 1e9, 2) for k in killed],
                "same_bytes_after_kills": same,
            }
            | _dry(folder / "whole", report)
            | ledger.circumstances()
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_room(scratch: Path, gb: float) -> None:
    free = free_bytes(scratch) / 1e9
    fit = math.floor(min(free / ROOM, LARGEST_GB))
    if gb > fit:
        raise ConfigError(
            f"--stream-gb {gb:g}: at most {fit} fit, because {ROOM} times as much is written, {scratch} has {free:.1f} "
            f"GB free, and a made-up source has at most {LARGEST_GB}: lower it, or name another disk with --scratch"
        )


def make(path: Path, config: dict[str, Any], *, holes: bool = False) -> int:
    """A checkpoint with INT4 experts and random values, or holes; its size in bytes."""
    path.mkdir(parents=True)
    model = KimiConfig.from_dict(config, where="made up")
    files, shapes = arrange(map(_job, _tensors(model)), SHARD_BYTES), expected(model)
    for seed, shard in enumerate(files.shards):
        with (path / shard.file).open("wb") as f:
            f.write(header := shard.header())
            if holes:
                f.truncate(len(header) + shard.nbytes)
                continue
            generator = torch.Generator().manual_seed(seed)
            for out in (out for job in shard.jobs for out in job.outs):
                f.write(_values(out, shapes, generator).reshape(-1).view(torch.uint8).numpy().data)
    if (index := files.index()) is not None:
        write_object(path / index[0], index[1])
    write_object(path / "config.json", with_quantization(config, int4.quantization_config()))
    return files.nbytes


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of every file, by its name."""
    found = {}
    for file in sorted(f for f in path.rglob("*") if f.is_file()):
        with file.open("rb") as f:
            found[str(file.relative_to(path))] = hashlib.file_digest(f, "sha256").hexdigest()
    return found


def _sized(gb: float) -> dict[str, Any]:
    config = SHAPES["kimi-k2.5"] | SMALL
    one, two = (_bytes(config | {"n_routed_experts": n}) for n in (8, 9))
    return config | {"n_routed_experts": max(round((gb * 1e9 - one) / (two - one)) + 8, 8)}


def _bytes(config: dict[str, Any]) -> int:
    return sum(out.nbytes for out in _tensors(KimiConfig.from_dict(config, where="made up")))


def _tensors(config: KimiConfig) -> Iterator[Out]:
    for name, shape in expected(config).items():
        if EXPERT.fullmatch(name):
            for suffix, part in int4.parts((shape[0], shape[1])).items():
                yield Out(name.removesuffix(".weight") + suffix, part.dtypes[0], part.shape)
        else:
            yield Out(name, torch.float32 if name.endswith("correction_bias") else torch.bfloat16, shape)


def _job(out: Out) -> Job:
    return Job(at=("", 0), reads=0, outs=(out,), pieces=())


def _values(out: Out, shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> Tensor:
    if out.dtype == torch.int32:  # any bits are levels
        return torch.randint(-(2**31), 2**31, out.shape, generator=generator, dtype=torch.int32)
    if out.name.endswith(".weight_scale"):
        return (1 + torch.rand(out.shape, generator=generator)).to(out.dtype) / 512
    if out.name.endswith(".weight_shape"):
        return torch.tensor(shapes[out.name.removesuffix("_shape")])
    return (0.02 * torch.randn(out.shape, generator=generator)).to(out.dtype)


def _start(source: Path, result: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perilune.cli.main", "convert", source, result, "--to", "nvfp4", "--shard-gb", "1"]
    return subprocess.Popen(
        [*map(str, command), *more],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _watched(source: Path, result: Path) -> tuple[float, int, list[float]]:
    """(seconds, peak memory in bytes, peak memory in MB in each tenth of the time) of a conversion."""
    begin, seen, peak = time.perf_counter(), [], 0
    process = _start(source, result, "--device", "cpu")
    while process.poll() is None:
        try:
            about = dict(_RSS.findall(Path(f"/proc/{process.pid}/status").read_text()))
        except OSError:  # it has just ended
            break
        if "RSS" in about:
            seen.append(1024 * int(about["RSS"]))
            peak = max(peak, 1024 * int(about["HWM"]))
        time.sleep(SAMPLE_SECONDS)
    _, said = process.communicate()
    if process.returncode:
        raise EngineError(f"the conversion failed: {said.strip().splitlines()[-1]}")
    edges = [len(seen) * k // TENTHS for k in range(TENTHS + 1)]
    curve = [round(max(seen[a:b]) / 1e6, 1) for a, b in itertools.pairwise(edges) if b > a]
    return time.perf_counter() - begin, peak, curve


def _killed(source: Path, result: Path, size: float) -> int:
    """Kills a conversion once its result has `size` bytes; returns the bytes it had. EngineError if it ended before."""
    process = _start(source, result, "--device", "cpu")
    while (there := _written(result)) < size:
        if process.poll() is not None:
            raise EngineError(f"the conversion ended at {there} bytes, before it was killed")
        time.sleep(SAMPLE_SECONDS / 10)
    process.kill()
    process.communicate()
    return there


def _written(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # renamed meanwhile
            continue
    return total


def _dry(path: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Keys of the row for a dry run over all of Kimi K2: what it prints, and how long it takes."""
    size = make(path, SHAPES["kimi-k2.5"], holes=True)
    begin = time.perf_counter()
    process = _start(path, path.parent / "nowhere", "--dry-run")
    _, said = process.communicate()
    seconds = time.perf_counter() - begin
    lines = said.strip().splitlines()
    for line in lines:
        report(f"  dry run: {line}")
    refused = process.returncode == 1 and "are free" in lines[-1]  # this machine's disk may be too small
    if process.returncode and not refused:
        raise EngineError(f"the dry run failed: {lines[-1]}")
    return {
        "dry_run_gb": round(size / 1e9, 1),
        "dry_run_seconds": round(seconds, 1),
        "dry_run": lines[0],
        "disk_refused": refused,
    }
