"""Hidden states of a corpus on disk, for targets that cannot run where a draft is trained: checksummed shards of a
bounded size.

A directory holds `states.json` (the corpora, layers and target), `shards.jsonl` (a line per finished shard,
appended when it has its final name) and `states-NNNNN.safetensors`: aux bfloat16 [tokens, A D] and hidden bfloat16
[tokens of answers, D] of some rows one after the other, tokens and answers int64 [rows] of each.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.jsonfile import read_object, write_object
from perilune.draft import shards
from perilune.draft.capture import Capture, Captured
from perilune.draft.corpus import Corpus, Row
from perilune.draft.storage import safe_open, save_file
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.dense import FLOATS
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.weights import Matrix, Weights

ABOUT = "states.json"
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Shard:
    file: str
    sha256: str
    rows: int
    bytes: int


def token_bytes(rows: Sequence[Row], aux: int, width: int) -> int:
    """Bytes of the states of `rows`: `aux` states of `width` for each token, and one more for tokens of answers."""
    return sum((aux * len(row.ids) + len(row.ids) - row.given) * width * DTYPE.itemsize for row in rows)


class States:
    """Opened for writing if `about`, which identifies it, is given; else for reading. Has the corpora's first rows."""

    def __init__(self, directory: Path, about: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        if about is not None:
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / ABOUT).exists():
                write_object(directory / ABOUT, dict(about))
        self.about = read_object(directory / ABOUT)
        if about is not None and self.about != json.loads(json.dumps(about)):
            raise ConfigError(f"{directory} holds other states: repeat that capture, or choose an empty directory")
        self.shards = shards.listed(self.directory, lambda line: Shard(**line), "capture")
        self._places: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
        self._like = torch.empty(0)
        self._widths: Sequence[int] = ()
        self._open: dict[int, _Reader] = {}

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def fingerprint(self) -> str:
        return hashlib.sha256("".join(s.sha256 for s in self.shards).encode()).hexdigest()

    def add(self, rows: Sequence[Row], states: Captured) -> Shard:
        """Writes a shard; lists it once the file is complete."""
        name = f"states-{len(self.shards):05d}.safetensors"
        partial = self.directory / f".{name}"
        tensors = {
            "aux": states.aux.to("cpu", DTYPE).contiguous(),
            "hidden": states.hidden.to("cpu", DTYPE).contiguous(),
            "tokens": torch.tensor([len(row.ids) for row in rows]),
            "answers": torch.tensor([len(row.ids) - row.given for row in rows]),
        }
        save_file(tensors, partial)
        shard = Shard(name, shards.sha256(partial), len(rows), partial.stat().st_size)
        os.replace(partial, self.directory / name)
        shards.append(self.directory, asdict(shard))
        self.shards.append(shard)
        return shard

    def serve(self, rows: Sequence[Row], like: Tensor, widths: Sequence[int] = ()) -> list[Row]:
        """Prepares `taught`: `rows` are those of the corpora; its results get the dtype and device of `like`, and it
        checks that aux and hidden have these `widths`. Returns the rows that have states."""
        found = list(rows[: self.rows])
        # A generator: a list of shards that claims 10^9 rows must not take 100 GB.
        places = ((s, r) for s, shard in enumerate(self.shards) for r in range(shard.rows))
        self._places = {(row.ids, row.given): place for row, place in zip(found, places)}
        self._like, self._widths = like, widths
        return found

    def taught(self, rows: Sequence[Row]) -> Captured:
        """As Capture.taught, of rows that `serve` returned."""
        pieces = []
        for row in rows:
            shard, place = self._places[row.ids, row.given]
            if shard not in self._open:
                path = self.directory / self.shards[shard].file
                shards.check(path, self.shards[shard].sha256, "capture")
                self._open[shard] = _Reader(path, self._widths)
            pieces.append(self._open[shard].row(place))
        aux, hidden = (torch.cat(piece).to(self._like) for piece in zip(*pieces))
        return Captured(aux, hidden)


class _Reader:
    """Rows of a shard, each read from the file when it is needed."""

    def __init__(self, path: Path, widths: Sequence[int]) -> None:
        self._file = safe_open(path, "pt")
        load: Callable[[str], Tensor] = self._file.get_tensor
        found = set(self._file.keys()) >= {"aux", "hidden", "tokens", "answers"}
        self._ends = [load(name).cumsum(0).tolist() for name in ("tokens", "answers")] if found else []
        for name, ends in zip(("aux", "hidden"), self._ends):
            found = found and bool(ends) and self._file.get_slice(name).get_shape()[:1] == ends[-1:]
        if not found:
            raise CheckpointError(f"{path} holds no states of rows: remove {path.parent} and capture again")
        own = [self._file.get_slice(name).get_shape()[-1] for name in ("aux", "hidden")]
        if widths and own != list(widths):
            said, wanted = (" and ".join(map(str, w)) for w in (own, widths))
            raise ConfigError(f"states in {path} have widths {said}, this model's {wanted}: capture again with it")

    def row(self, place: int) -> list[Tensor]:
        found = []
        for name, ends in zip(("aux", "hidden"), self._ends):
            begin = ends[place - 1] if place else 0
            found.append(self._file.get_slice(name)[begin : ends[place]])
        return found


def about(corpora: Sequence[Corpus], layers: Sequence[int], model: str) -> dict[str, Any]:
    """Identifies states. `model` identifies the target."""
    return {"corpora": [c.fingerprint() for c in corpora], "layers": list(layers), "model": model}


def capture(
    rows: Sequence[Row],
    target: Capture,
    states: States,
    *,
    most_bytes: float,
    shard_tokens: int = 65536,
    at_once: int = 1,
    done: Callable[[Shard], None] = lambda shard: None,
) -> None:
    """Adds states of the rows that `states` lacks, until they would exceed `most_bytes` in all; the target computes
    `at_once` shards at a time."""
    width = target.model.config.hidden_size
    waiting = _shards(rows[states.rows :], shard_tokens)
    while some := list(itertools.islice(waiting, at_once)):
        sizes = [token_bytes(own, len(target.aux_layers), width) for own in some]
        fit = [own for own, after in zip(some, itertools.accumulate(sizes)) if states.nbytes + after <= most_bytes]
        for own, size, found in zip(fit, sizes, target.each(fit)):
            if states.nbytes + size > most_bytes:  # `fit` did not count the files' headers
                return
            done(states.add(own, found))
        if len(fit) < len(some):
            return


def _shards(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """The rows in order, in shards that end when they have `tokens` tokens."""
    some: list[Row] = []
    count = 0
    for row in rows:
        some.append(row)
        count += len(row.ids)
        if count >= tokens:
            yield some
            some, count = [], 0
    if some:
        yield some


def load_ends(path: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[KimiConfig, Weights]:
    """The target's embedding, last norm and head, and no layers: training from states needs no more."""
    config = KimiConfig.from_directory(path)
    with Checkpoint.open(path) as checkpoint:

        def read(name: str) -> Tensor:
            full = next((p + name for p in (names.NESTED, "") if p + name in checkpoint.tensors), None)
            if full is None or checkpoint.info(full).dtype not in FLOATS:
                raise CheckpointError(f"{path} has no {name} of floating-point numbers")
            return checkpoint.read(full).to(device, dtype)

        embed, norm, head = (read(tensor.name) for tensor in names.ends(config))
        return config, Weights(embed, [], norm, Matrix(head))
