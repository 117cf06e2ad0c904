"""A checkpoint in another format, written shard by shard in bounded memory, and resumable.

`Conversion` plans where all bytes go from headers alone. Threads then make pieces of about 16 M weights, a few of them
ahead of the writer; a shard is written under a temporary name, synced, renamed and entered in the journal.
Small files and the index follow, config.json comes last: until then no loader takes the directory for a checkpoint.
Every step is deterministic, so a conversion that was killed and repeated has the same bytes as one that was not.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from perilune.convert import journal
from perilune.convert.encode import Encoder, Inputs, kept_scales
from perilune.convert.job import Job, Piece, in_order
from perilune.convert.journal import Done, Journal
from perilune.convert.shards import Files, Shard, arrange
from perilune.convert.target import Target, configuration, hf_quant_config
from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.files import exists, free_bytes, make_writable, open_regular
from perilune.core.jsonfile import read_object, spelled, write_object
from perilune.formats import checksums
from perilune.formats.checkpoint import INDEX, Checkpoint
from perilune.formats.checksums import RECORD
from perilune.formats.progress import Advance, progress
from perilune.formats.safetensors_file import TensorInfo
from perilune.formats.served import require_served
from perilune.formats.writer import SHARD_BYTES
from perilune.loading.eagle3 import require_draft
from perilune.loading.survey import survey
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import DRAFTER
from perilune.model.names import ROUTED

CALIBRATION = ("calibration.json", "calibration.npz")  # written by calibrate.py before the conversion begins
MAX_THREADS = 16
AHEAD = 2  # pieces finished or queued, in addition to one in work per thread. Larger: more memory
VERSION = 5  # increased when the written bytes change: a conversion begun by another version is not continued
SAMPLE_BYTES = 32  # of each tensor, to know the source again; all would take as long as the conversion
WORST = 10
SMALL_FILE = 100_000_000
# Options that errors name for differing keys of a finished conversion; other keys have their option's name.
_OPTIONS = {"source": "SRC", "shard_bytes": "--shard-gb", "calibrated": "--calibrate"}
_OWN = {"config.json", "hf_quant_config.json", RECORD, INDEX}
_PIECE = 1 << 24
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class Loss:
    """`sqnr_db` is 10 log10 of the weights' sum of squares over the error's, over all converted layers; `worst` lists
    (layer, dB) of the worst ones."""

    layers: int
    sqnr_db: float
    worst: tuple[tuple[str, float], ...]


class Conversion:
    """An open source and the plan of its result. Use as a context manager. "cuda" means all GPUs.

    CheckpointError or ConfigError if the source is incomplete or cannot be converted to the target.
    """

    def __init__(
        self, source: Path, target: Target, *, device: torch.device | str = "cpu", shard_bytes: int = SHARD_BYTES
    ) -> None:
        if shard_bytes < 1:
            raise ConfigError(f"shards must have a positive size, not {shard_bytes} bytes")
        self.source, self.target = source, target
        self._devices, self._shard_bytes = _devices(torch.device(device)), shard_bytes
        self._open = contextlib.ExitStack()
        try:
            self._plan()
        except BaseException:
            self._open.close()
            raise

    def _plan(self) -> None:
        config = KimiConfig.from_directory(self.source)
        require_served(config.quantization, str(self.source))
        self.checkpoint = self._open.enter_context(Checkpoint.open(self.source))
        found = survey(self.checkpoint, config)
        kept = None
        if self.target.to == "int4" and kept_scales(self.source).is_dir():
            kept = self._open.enter_context(Checkpoint.open(kept_scales(self.source)))
        self._encoder = Encoder(self.checkpoint, found, self.target, self._devices, kept)
        self.files = [arrange(self._encoder.jobs(), self._shard_bytes)]
        if sidecar := self._encoder.sidecar():
            folder = kept_scales(Path()).name + "/"
            self.files.append(arrange(sidecar, self._shard_bytes, folder))
        self._raw = read_object(self.source / "config.json")
        self.config = configuration(self.target, self._raw, self._encoder.experts)
        self.drafter = self._drafter(config)
        # Refuse a target with a configuration that our own loader would not read.
        KimiConfig.from_dict(self.config, hf_quant=hf_quant_config(self.target), where="the result's config.json")

    def _drafter(self, config: KimiConfig) -> tuple[Path, ...]:
        """The files of the source's draft model, which belong to the result as they are; none if it has none."""
        folder = self.source / DRAFTER
        if not exists(folder / "config.json"):
            return ()
        try:
            require_draft(folder, config)
        except CheckpointError as e:
            raise CheckpointError(f"{e.text}; repair the draft model, or remove {folder}") from e
        # Only safetensors, because other formats of weights can contain code.
        weights = filter(Path.is_file, folder.glob("*.safetensors"))
        return tuple(sorted((*_texts(folder), *weights, *folder.glob(INDEX))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def shards(self) -> list[Shard]:
        return [shard for files in self.files for shard in files.shards]

    @property
    def nbytes(self) -> int:
        """Bytes of the result's tensors and its draft model."""
        return sum(files.nbytes for files in self.files) + self.drafter_nbytes

    @property
    def drafter_nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.drafter)

    def small_files(self) -> list[Path]:
        """Other files of the source that belong to the result: tokenizer, templates, licence, code."""
        return [file for file in _texts(self.source) if file.name not in {*_OWN, *CALIBRATION}]

    def require_apart(self, directory: Path) -> None:
        if directory.resolve() == self.source.resolve():
            raise ConfigError(f"{directory} is the source: choose another directory for the result")

    def require_empty(self, directory: Path) -> None:
        """CheckpointError if `directory` has weights, or a file that would be overwritten, but no journal."""
        if (directory / journal.NAME).exists():
            return
        held = directory.iterdir() if directory.exists() else ()
        written = {*_OWN, DRAFTER, *(file.name for file in self.small_files())}
        if strays := sorted(p.name for p in held if p.suffix == ".safetensors" or p.name in written):
            raise CheckpointError(f"{directory} already holds {strays[0]}: choose an empty directory")

    def require_target(self, directory: Path, *, dry: bool) -> None:
        """Makes `directory`, unless `dry`; an error if it cannot be written or holds anything else. Of an unfinished
        conversion there, measured inputs, which may not be known yet, are not compared."""
        self.require_empty(directory)
        make_writable(directory, "DST", dry=dry)
        if (directory / journal.NAME).is_file():
            journal.require_job(directory, {k: v for k, v in self._identity().items() if k != "inputs"})

    def require_room(self, directory: Path, present: int = 0) -> tuple[int, int]:
        """(bytes still to write, bytes free). ConfigError if they do not fit."""
        free, needed = free_bytes(directory), self.nbytes - present
        if needed > free:
            raise ConfigError(
                f"{directory} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: free some, or choose another "
                "directory"
            )
        return needed, free

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the source's configuration, the place and some bytes of each tensor, and all bytes of the draft model
        and the small files."""
        found = sorted(self.checkpoint.tensors.values(), key=lambda i: (i.file.name, i.offset, i.name))
        tensors = [(i.name, str(i.dtype), i.shape, i.file.name, i.offset, self._sample(i)) for i in found]
        draft, small = ([(f.name, checksums.sha256(f)) for f in files] for files in (self.drafter, self.small_files()))
        config = json.dumps(self._raw, sort_keys=True)
        return journal.fingerprint(part.encode() for part in (repr(tensors), config, repr(draft), repr(small)))

    def _sample(self, info: TensorInfo) -> bytes:
        """Bytes from the middle of a tensor: training again changes them, but not its name and size."""
        raw = torch.empty(min(SAMPLE_BYTES, info.nbytes), dtype=torch.uint8)
        self.checkpoint.read_into(info, raw, (info.nbytes - len(raw)) // 2)
        return raw.numpy().tobytes()

    def finished(self, directory: Path) -> dict[str, Any] | None:
        """The record of the finished conversion in `directory`. ConfigError if it is another one."""
        if not exists(directory / RECORD) or exists(directory / journal.NAME):
            return None
        record = read_object(directory / RECORD)
        made = record.get("target")
        theirs = {**(made if isinstance(made, dict) else {}), **{k: record.get(k) for k in ("source", "shard_bytes")}}
        wanted = {**dataclasses.asdict(self.target), "source": self.fingerprint, "shard_bytes": self._shard_bytes}
        if differing := [_OPTIONS.get(k, f"--{k}") for k in wanted if theirs.get(k) != wanted[k]]:
            raise ConfigError(
                f"{directory} was converted with other options or another source (it differs in "
                f"{', '.join(differing)}): give the same, or another directory"
            )
        return record

    def completed(self, directory: Path, *, show: bool = False) -> Loss | None:
        """The Loss if `directory` holds the finished result of this conversion; None if nothing is finished.

        show  the progress on stderr: all bytes of the result are read, and compared with the SHA-256s of its record

        ConfigError if it is the result of another conversion, CheckpointError if a file is not as it was written.
        """
        if (record := self.finished(directory)) is None:
            return None
        sums = checksums.kept(directory)
        with progress(f"checking {directory.name}", checksums.nbytes(directory, sums), show) as advance:
            faults = checksums.damage(directory, sums, advance)
        if faults or not sums:
            said = checksums.described(faults) if faults else f"{RECORD} keeps no SHA-256"
            raise CheckpointError(f"{directory}: {said}: remove the directory and convert again")
        try:
            lost, worst = record["sqnr_db"], tuple((str(name), float(db)) for name, db in record["worst"])
            return Loss(int(record["layers"]), math.inf if lost is None else float(lost), worst)
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{directory / RECORD} is damaged: remove the directory and convert again") from e

    def run(
        self, directory: Path, *, inputs: Inputs | None = None, threads: int | None = None, show: bool = False
    ) -> Loss:
        """Writes the result to `directory`, or the rest of it if an earlier run was stopped; nothing if it is finished.

        inputs   measured by calibrate.py, if the target is calibrated
        threads  default: one per CPU, at most 16
        show     the progress on stderr

        CheckpointError names the tensor or the file at fault; finished shards are kept for another run.
        """
        self.require_apart(directory)
        if (loss := self.completed(directory, show=show)) is not None:
            return loss
        if (inputs is not None) != self.target.calibrated:
            raise ConfigError("measured inputs are for a target with calibrated=True, which needs them")
        self._encoder.inputs = inputs or Inputs()
        try:
            return self._run(directory, threads or min(os.cpu_count() or 1, MAX_THREADS), show)
        except OSError as e:
            where = e.filename or directory
            raise CheckpointError(
                f"cannot write {where}: {e.strerror or e}; what is finished is kept: repeat the command to go on"
            ) from e

    def _run(self, directory: Path, threads: int, show: bool) -> Loss:
        directory.mkdir(parents=True, exist_ok=True)
        self.require_empty(directory)
        with Journal(directory, self._identity()) as done:
            for files in self.files:
                (directory / files.folder).mkdir(exist_ok=True)
            for name in self._written():
                _part(directory / name).unlink(missing_ok=True)
            total = sum(job.reads for shard in self.shards for job in shard.jobs) + self.drafter_nbytes
            with progress(f"converting {self.source.name}", total, show) as advance:
                missing, drafts = self._missing(directory, done, advance)
                needed = sum(shard.nbytes for shard in missing) + sum(file.stat().st_size for file in drafts)
                self.require_room(directory, self.nbytes - needed)
                self._write(directory, missing, done, threads, advance)
                for file in drafts:
                    (directory / DRAFTER).mkdir(exist_ok=True)
                    done.add(_copy(file, directory / DRAFTER / file.name, f"{DRAFTER}/{file.name}", advance))
            loss = self._complete(directory, done)
            done.remove()
        return loss

    def _written(self) -> list[str]:
        """The files that are written under a temporary name first, relative to the result's directory."""
        drafts = (f"{DRAFTER}/{file.name}" for file in self.drafter)
        return [*(shard.file for shard in self.shards), *drafts, *(file.name for file in self.small_files())]

    def _missing(self, directory: Path, done: Journal, advance: Advance) -> tuple[list[Shard], list[Path]]:
        """Shards and the draft model's files that are missing or differ from the journal."""

        def lacks(file: str, nbytes: int) -> bool:
            entry, found = done.done.get(file), None
            with contextlib.suppress(OSError):
                found = entry and checksums.sha256(directory / file)
            if entry is None or found != entry.sha256:
                return True
            advance(nbytes)
            return False

        shards = [shard for shard in self.shards if lacks(shard.file, sum(job.reads for job in shard.jobs))]
        return shards, [file for file in self.drafter if lacks(f"{DRAFTER}/{file.name}", file.stat().st_size)]

    def _write(self, directory: Path, shards: list[Shard], done: Journal, threads: int, advance: Advance) -> None:
        before = torch.get_num_threads()
        # `threads` pieces run at once; more torch threads in each would exceed the number of cores.
        torch.set_num_threads(max(before // threads, 1))
        pool = ThreadPoolExecutor(threads, "convert", torch.set_grad_enabled, (False,))
        makers = (make for shard in shards for job in shard.jobs for make in job.pieces)
        try:
            pieces = in_order(pool, makers, threads + AHEAD)
            for shard in shards:
                done.add(_write_shard(directory, shard, pieces, advance))
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)

    def _complete(self, directory: Path, done: Journal) -> Loss:
        losses = [loss for shard in self.shards for loss in done.done[shard.file].losses]
        loss = summary(losses)
        sums = {file: entry.sha256 for file, entry in done.done.items()}
        for file in self.small_files():
            sums[file.name] = _copy(file, directory / file.name, file.name).sha256
        made = [index for files in self.files if (index := files.index()) is not None]
        if (extra := hf_quant_config(self.target)) is not None:
            made.append(("hf_quant_config.json", extra))
        for name, data in made:
            write_object(directory / name, data)
        own = [name for name in CALIBRATION if self.target.calibrated and exists(directory / name)]
        sums |= {name: checksums.sha256(directory / name) for name in (*dict(made), *own)}
        sums["config.json"] = hashlib.sha256(spelled(self.config).encode()).hexdigest()
        write_object(
            directory / RECORD,
            {
                "producer": "perilune convert",
                "source": self.fingerprint,
                "shard_bytes": self._shard_bytes,
                "target": dataclasses.asdict(self.target),
                "sqnr_db": None if math.isinf(loss.sqnr_db) else round(loss.sqnr_db, 4),  # None: exact
                "worst": [[name, round(db, 4)] for name, db in loss.worst if not math.isinf(db)],
                "layers": loss.layers,
                "sha256": sums,
            },
        )
        write_object(directory / "config.json", self.config)
        journal.sync(directory)
        return loss

    def _identity(self) -> dict[str, Any]:
        """Values that must be equal for a conversion to be continued."""
        return {
            "version": VERSION,
            "source": self.fingerprint,
            "shard_bytes": self._shard_bytes,
            # CPU and GPU results may differ in last bits, though not from INT4 to NVFP4.
            "device": self._devices[0].type,
            "inputs": self._encoder.inputs.digest(),
            **dataclasses.asdict(self.target),
        }


def _texts(folder: Path) -> list[Path]:
    """The files of a directory that hold no weights."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and file.suffix not in _WEIGHTS
        and not file.name.endswith(".index.json")
        and file.stat().st_size <= SMALL_FILE
    )


def _part(final: Path) -> Path:
    """The temporary name of a file that is not complete yet."""
    return final.with_name(f".{final.name}.part")


def _copy(file: Path, to: Path, name: str, advance: Advance = lambda nbytes: None) -> Done:
    """Copies a file; `name`: that of the copy in the journal."""
    part = _part(to)
    digest = hashlib.sha256()
    try:
        with open_regular(file) as source, part.open("wb", buffering=0) as out:
            while piece := source.read(_PIECE):
                digest.update(piece)
                view = memoryview(piece)
                while len(view):
                    view = view[out.write(view) :]
                advance(len(piece))
            os.fsync(out.fileno())
            nbytes = out.tell()
        os.replace(part, to)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return Done(name, nbytes, digest.hexdigest(), ())


def _devices(device: torch.device) -> list[torch.device]:
    """All GPUs, unless one is named."""
    if device.type != "cuda" or device.index is not None:
        return [device]
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def summary(losses: list[tuple[str, float, float]]) -> Loss:
    """The Loss of layers (name, energy of its weights, energy of the error)."""
    each = sorted(((name, decibels(s, e)) for name, s, e in losses), key=lambda pair: pair[1])
    total = decibels(sum(s for _, s, _ in losses), sum(e for *_, e in losses))
    return Loss(len(losses), total, tuple(each[:WORST]))


def decibels(signal: float, error: float) -> float:
    if error == 0:
        return math.inf
    return 10 * math.log10(signal / error) if signal else -math.inf


def _write_shard(directory: Path, shard: Shard, pieces: Iterator[Piece], advance: Advance) -> Done:
    final = directory / shard.file
    part = _part(final)
    digest = hashlib.sha256()
    losses = []
    try:
        with part.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "hash") as beside:

            def write(data: Any) -> None:
                view = memoryview(data)
                hashing = beside.submit(digest.update, view)
                while len(view):
                    view = view[file.write(view) :]
                hashing.result()

            def tensor(values: torch.Tensor) -> None:
                # A view as bytes needs at least one dimension.
                write(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

            write(shard.header())
            for job in shard.jobs:
                signal, error = _write_job(job, pieces, tensor, advance)
                if job.linear is not None:
                    losses.append((job.linear, signal, error))
            os.fsync(file.fileno())
            nbytes = file.tell()
        os.replace(part, final)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror, str(final)) from e
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    journal.sync(final.parent)
    return Done(shard.file, nbytes, digest.hexdigest(), tuple(losses))


def _write_job(
    job: Job, pieces: Iterator[Piece], write: Callable[[torch.Tensor], None], advance: Advance
) -> tuple[float, float]:
    waiting: list[tuple[torch.Tensor, ...]] = []
    signal = error = 0.0
    written = reported = 0
    for number in range(len(job.pieces)):
        piece = next(pieces)
        write(piece.rows)
        written += piece.rows.nbytes
        waiting.append(piece.waiting)
        signal, error = signal + piece.signal, error + piece.error
        share = job.reads * (number + 1) // len(job.pieces)
        advance(share - reported)
        reported = share
    for column in (*(torch.cat(parts) for parts in zip(*waiting)), *job.tail()):
        write(column)
        written += column.nbytes
    assert written == job.nbytes, (job.linear, job.outs, written, job.nbytes)
    return signal, error


def sizes(files: list[Files]) -> dict[str, int]:
    """Bytes by kind, with labels for people: routed experts, everything else, and INT4 scales kept beside them."""
    main, *rest = files
    jobs = [job for shard in main.shards for job in shard.jobs]
    experts = sum(job.nbytes for job in jobs if any(ROUTED in out.name for out in job.outs))
    found = {"routed experts": experts, "everything else": main.nbytes - experts}
    return found | ({"INT4 scales kept beside them": sum(f.nbytes for f in rest)} if rest else {})
