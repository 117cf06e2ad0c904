"""Training rows of a drafter: prompts and the target's own answers as token ids, in checksummed shards.

A directory holds `corpus.json` (what was asked for, written with the first shard; a second `collect` must ask for the
same), `shards.jsonl` (a line per finished shard, appended when the shard has its final name) and
`rows-NNNNN.safetensors`: ids int32 [tokens], ends int64 [rows] (where each row ends in `ids`), given int32 [rows]
(length of its prompt), family int16 [rows], greedy bool [rows]; weight float32 [rows] where not all of them are 1.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.jsonfile import read_object, write_object
from perilune.draft import shards
from perilune.draft.storage import load_file, save_file

ABOUT = "corpus.json"
_TYPES = {
    "ids": torch.int32, "ends": torch.int64, "given": torch.int32, "family": torch.int16, "greedy": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """`ids[given:]` is the target's answer to `ids[:given]`, greedy or at temperature 1. In a mined window,
    `ids[:given]` includes the beginning of the answer. `weight` is that of each of its chains in the loss."""

    ids: tuple[int, ...]
    given: int
    family: int
    greedy: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Shard:
    file: str
    sha256: str
    rows: int
    tokens: int
    answers: int  # tokens of answers
    prompts: int = 0  # number of prompts, also of those that gave no row; 0: not known


class Corpus:
    """A corpus in a directory: opened for writing if `about`, which identifies it, is given; else for reading."""

    def __init__(self, directory: Path, about: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        self.shards = shards.listed(directory, lambda line: Shard(*line), "collect")
        if about is None:
            self.about = read_object(directory / ABOUT)
            names = self.about.get("families")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CheckpointError(f"{directory / ABOUT} does not list families: remove {directory}, collect again")
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.about = json.loads(json.dumps(about))
        if self.shards and (found := read_object(directory / ABOUT)) != self.about:
            keys = sorted(k for k in {*found, *self.about} if found.get(k) != self.about.get(k))
            raise ConfigError(
                f"{directory} holds another corpus (it differs in {', '.join(keys)}): repeat that one, or choose an "
                "empty directory"
            )

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(self.about["families"])

    def add(self, rows: Sequence[Row], prompts: int = 0) -> Shard:
        """Writes a shard, made of so many prompts; lists it once the file is complete."""
        name = f"rows-{len(self.shards):05d}.safetensors"
        partial = self.directory / f".{name}"
        tensors = {
            "ids": torch.tensor([i for row in rows for i in row.ids], dtype=torch.int32),
            "ends": torch.tensor([len(row.ids) for row in rows]).cumsum(0),
            "given": torch.tensor([row.given for row in rows], dtype=torch.int32),
            "family": torch.tensor([row.family for row in rows], dtype=torch.int16),
            "greedy": torch.tensor([row.greedy for row in rows]),
        }
        if any(row.weight != 1.0 for row in rows):
            tensors["weight"] = torch.tensor([row.weight for row in rows])
        save_file(tensors, partial)
        tokens = sum(len(row.ids) for row in rows)
        answers = tokens - sum(row.given for row in rows)
        shard = Shard(name, shards.sha256(partial), len(rows), tokens, answers, prompts)
        os.replace(partial, self.directory / name)
        if not self.shards:
            write_object(self.directory / ABOUT, self.about)
        shards.append(self.directory, list(astuple(shard)))
        self.shards.append(shard)
        return shard

    def rows(self) -> list[Row]:
        """All rows, in order. CheckpointError if a shard's checksum is wrong."""
        found: list[Row] = []
        for shard in self.shards:
            path = self.directory / shard.file
            shards.check(path, shard.sha256, "collect")
            tensors = load_file(path)
            if not shard.rows:
                continue
            if not _sound(tensors, len(self.families)):
                raise CheckpointError(f"{path} holds no rows of a corpus: remove {path.parent} and collect again")
            t = {name: tensor.tolist() for name, tensor in tensors.items()}
            begin = 0
            weights = t.get("weight", [1.0] * len(t["ends"]))
            for end, given, family, greedy, weight in zip(t["ends"], t["given"], t["family"], t["greedy"], weights):
                found.append(Row(tuple(t["ids"][begin:end]), given, family, greedy, weight))
                begin = end
        return found

    def fingerprint(self) -> str:
        return hashlib.sha256("".join(s.sha256 for s in self.shards).encode()).hexdigest()


def _sound(t: Mapping[str, torch.Tensor], families: int) -> bool:
    """Whether rows can be made of these tensors."""
    if any(name not in t or t[name].dtype != dtype for name, dtype in _TYPES.items()):
        return False
    weight = t.get("weight", torch.ones(len(t["ends"])))
    each = (t["ends"], t["given"], t["family"], t["greedy"], weight)
    if t["ids"].dim() != 1 or any(x.shape != (t["ends"].numel(),) for x in each) or not t["ends"].numel():
        return False
    lengths = t["ends"].diff(prepend=t["ends"].new_zeros(1))
    return bool(
        (lengths >= 0).all()
        and t["ends"][-1] == len(t["ids"])
        and ((t["given"] >= 0) & (t["given"] <= lengths)).all()
        and ((t["family"] >= 0) & (t["family"] < families)).all()
        and (t["ids"] >= 0).all()
        and (weight.isfinite() & (weight >= 0)).all()
    )


def require_tokens(rows: Sequence[Row], vocabulary: int) -> None:
    """ConfigError if a row has a token that the model's vocabulary does not have."""
    highest = max((max(row.ids) for row in rows if row.ids), default=0)
    if highest >= vocabulary:
        raise ConfigError(
            f"the corpus has token {highest}, but the model's vocabulary has {vocabulary} tokens: name the model that "
            "wrote the answers"
        )
