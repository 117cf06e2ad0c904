"""Jobs of a conversion: each makes the tensors of one linear layer, or copies a tensor."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from perilune.formats.checkpoint import Checkpoint
from perilune.formats.safetensors_file import TensorInfo
from perilune.formats.stored import Part
from perilune.loading.survey import require_sound

T = TypeVar("T")
PIECE_WEIGHTS = 1 << 24  # one expert's matrix in Kimi K2, 67 MB in float32
PIECE_BYTES = 1 << 26
ROWS = 128  # pieces are multiples of it, because FP8 blocks are


@dataclass(frozen=True, slots=True)
class Out:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a job's outputs: `rows` of the first one, written immediately; `waiting`, of the others, written
    after the last piece. signal, error: sums of squares of the weights and of their error.
    """

    rows: Tensor
    waiting: tuple[Tensor, ...] = ()
    signal: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """`outs`, in order: the first output of pieces, their waiting outputs, then what `tail` returns after the last one.

    at      (file, offset) of what is read; in this order, files are read sequentially
    reads   bytes that are read
    linear  the converted layer; None for a copy
    """

    at: tuple[str, int]
    reads: int
    outs: tuple[Out, ...]
    pieces: tuple[Callable[[], Piece], ...]
    tail: Callable[[], Sequence[Tensor]] = tuple
    linear: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for out in self.outs)


def row_slices(rows: int, inputs: int) -> list[slice]:
    """Slices that cover all rows: at most PIECE_WEIGHTS weights each, but at least ROWS rows."""
    step = max(PIECE_WEIGHTS // max(inputs, 1) // ROWS, 1) * ROWS
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)] or [slice(0, 0)]


def copy(checkpoint: Checkpoint, info: TensorInfo, name: str | None = None, part: Part | None = None) -> Job:
    """The tensor as it is, under another name if given, and its values checked if it is a part of a linear layer."""

    def piece(begin: int) -> Piece:
        raw = torch.empty(min(PIECE_BYTES, info.nbytes - begin), dtype=torch.uint8)
        checkpoint.read_into(info, raw, begin)
        if part is not None:
            require_sound(checkpoint, info, part, raw.view(info.dtype))
        return Piece(raw)

    def at(begin: int) -> Callable[[], Piece]:
        return lambda: piece(begin)

    return Job(
        at=(info.file.name, info.offset),
        reads=info.nbytes,
        outs=(Out(name or info.name, info.dtype, info.shape),),
        pieces=tuple(at(begin) for begin in range(0, max(info.nbytes, 1), PIECE_BYTES)),
    )


def in_order(pool: ThreadPoolExecutor, makers: Iterable[Callable[[], T]], depth: int) -> Iterator[T]:
    """The makers' results, in order, with at most `depth` of them unfinished or not yet taken."""
    waiting: deque[Future[T]] = deque()
    for make in makers:
        waiting.append(pool.submit(make))
        if len(waiting) >= depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
