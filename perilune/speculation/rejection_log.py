"""A log of rejected drafts, for `perilune draft mine`. Nothing is written unless the configuration asks for it.

It holds prompts and answers of users, as token ids: only the owner may read the directory and its files. A share of the
requests is chosen at random. If the files together exceed `limit_bytes`, the oldest are deleted. A file has JSON lines
and gets its final name when it is complete:

    {"ids": [...], "given": 812, "greedy": true, "rejected": [[815, [17, 4, 99], 1], ...]}

The target generated `ids[given:]` after `ids[:given]`, which may lack its beginning. At index 815 of `ids` three tokens
had been drafted, and one was accepted.
"""

import json
import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.messages import Delta
from perilune.core.step import MAX_DRAFTS, StepPlan

CONTEXT_TOKENS = 2048  # tokens before a record's answer
ANSWER_TOKENS = 1024  # tokens of answer in a record
AFTER = MAX_DRAFTS  # tokens of answer kept after the last rejection, if the answer has more
FILE_BYTES = 256 << 10  # a file is written when its lines have about this size
FILES = 16  # a file has at most about 1 / 16 of the limit, even if that is less than FILE_BYTES
PREFIX, SUFFIX = "rejected-", ".jsonl"
MAX_LINE_BYTES = 16 << 20
TOKEN_IDS = 2**31  # ids fit int32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rejection:
    """At index `at` of the record's ids `drafts` had been drafted; the first `accepted` of them were accepted."""

    at: int
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Record:
    ids: tuple[int, ...]
    given: int
    greedy: bool
    rejected: tuple[Rejection, ...]

    def line(self) -> str:
        rejected = [[r.at, list(r.drafts), r.accepted] for r in self.rejected]
        fields = {"ids": list(self.ids), "given": self.given, "greedy": self.greedy, "rejected": rejected}
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @classmethod
    def of(cls, line: str | bytes) -> "Record":
        """Parses one line of a file. ValueError saying what is wrong."""
        found = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        ids, given, greedy = found.get("ids"), found.get("given"), found.get("greedy")
        if not _ids(ids) or type(given) is not int or not 0 < given < len(ids) or not isinstance(greedy, bool):
            raise ValueError("ids must be token ids, given a place in them, greedy true or false")
        rejected = found.get("rejected")
        if not isinstance(rejected, list) or not all(isinstance(r, list) and len(r) == 3 for r in rejected):
            raise ValueError("rejected must be a list of [place, drafts, accepted]")
        for at, drafts, accepted in rejected:
            if type(at) is not int or not given <= at < len(ids):
                raise ValueError(f"a rejection at {at!r}, which is no place in the answer")
            if not _ids(drafts) or type(accepted) is not int or not 0 <= accepted < len(drafts):
                raise ValueError(f"the rejection at {at} must have drafts and say how many were accepted, not all")
        return cls(tuple(ids), given, greedy, tuple(Rejection(at, tuple(d), s) for at, d, s in rejected))


def _ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(i) is int and 0 <= i < TOKEN_IDS for i in value)


@dataclass(slots=True)
class _Follow:
    """A request chosen for the log. `ids`: the last tokens of its text; ids[given:] belong to its answer."""

    ids: list[int]
    given: int
    greedy: bool = False
    rejected: list[Rejection] = field(default_factory=list)


class RejectedLog:
    """An Observer that samples requests of one engine and logs their rejected drafts. Not thread-safe."""

    def __init__(self, directory: Path, *, share: float, limit_bytes: int, seed: int | None = None) -> None:
        assert 0 < share <= 1 and limit_bytes > 0
        self.directory = directory
        self._share, self._limit = share, limit_bytes
        self._random = random.Random(seed)
        self._followed: dict[int, _Follow] = {}
        self._lines: list[str] = []
        self._size = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for partial in directory.glob(f".{PREFIX}*"):  # left by an engine that was killed
                partial.unlink()
            self._next = max((int(f.name[len(PREFIX) : -len(SUFFIX)]) for f in files(directory)), default=0) + 1
            self._drop_oldest()
        except OSError as e:
            raise ConfigError(f"cannot log rejected drafts in {directory}: {e.strerror}; choose another") from e

    def open(self, rid: int, prompt: Sequence[int], root: bytes = b"") -> None:
        if self._random.random() < self._share:
            self._followed[rid] = _Follow(list(prompt[-CONTEXT_TOKENS:]), min(len(prompt), CONTEXT_TOKENS))

    def observe(self, plan: StepPlan, deltas: Sequence[Delta]) -> None:
        """Takes a step's results; the plan has the drafts."""
        if not self._followed:
            return
        drafted = {w.rid: w for w in plan.work if w.drafts}
        for delta in deltas:
            follow = self._followed.get(delta.rid)
            if follow is None:
                continue
            drafts: tuple[int, ...] = ()
            if (work := drafted.get(delta.rid)) is not None:
                drafts, follow.greedy = work.draft_tokens[: delta.drafted], work.params.greedy
            if delta.accepted < len(drafts) and delta.accepted < len(delta.tokens):
                follow.rejected.append(Rejection(len(follow.ids), drafts, delta.accepted))
            follow.ids += delta.tokens
            if delta.finish_reason is not None:
                self.drop(delta.rid)
            elif len(follow.ids) - follow.given >= ANSWER_TOKENS + AFTER:
                self._record(follow)

    def drop(self, rid: int) -> None:
        if (follow := self._followed.pop(rid, None)) is not None:
            self._record(follow)

    def maintain(self) -> None:
        """Writes a file if there is enough for one; best done while the device is busy."""
        if self._size >= min(FILE_BYTES, self._limit // FILES):
            self._write()

    def close(self) -> None:
        for rid in list(self._followed):
            self.drop(rid)
        self._write()

    def _record(self, follow: _Follow) -> None:
        """Adds a record of the answer so far; the end of the answer is the next record's context."""
        if follow.rejected:
            record = Record(tuple(follow.ids), follow.given, follow.greedy, tuple(follow.rejected))
            self._lines.append(record.line())
            self._size += len(self._lines[-1])
        del follow.ids[:-CONTEXT_TOKENS]
        follow.given = len(follow.ids)
        follow.rejected.clear()

    def _write(self) -> None:
        if not self._lines:
            return
        lines, self._lines, self._size = self._lines, [], 0
        name = f"{PREFIX}{self._next:08d}{SUFFIX}"
        partial = self.directory / f".{name}"
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.writelines(lines)
            os.replace(partial, self.directory / name)
            self._next += 1
            self._drop_oldest()
        except OSError as e:  # on a full disk the log stops; answers go on
            _log.warning("rejected drafts were not logged in %s: %s", self.directory, e.strerror)
            partial.unlink(missing_ok=True)

    def _drop_oldest(self) -> None:
        sizes = [(file, file.stat().st_size) for file in files(self.directory)]
        total = sum(size for _, size in sizes)
        for file, size in sizes:
            if total <= self._limit:
                break
            file.unlink()
            total -= size


def files(directory: Path) -> list[Path]:
    """The log's files, oldest first."""
    found = (f for f in directory.iterdir() if f.name.startswith(PREFIX) and f.name.endswith(SUFFIX))
    return sorted(f for f in found if f.name[len(PREFIX) : -len(SUFFIX)].isdecimal())


def records(directory: Path) -> Iterator[Record]:
    """All records in a directory. CheckpointError for a file that is not such a log."""
    found = files(directory)
    if not found:
        raise CheckpointError(f"{directory} has no log of rejected drafts: serve with --log-rejected {directory}")
    for file in found:
        with file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
                try:
                    yield Record.of(line)
                except (ValueError, RecursionError) as e:
                    raise CheckpointError(f"{file} line {number} is no record of rejected drafts: {e}") from e
