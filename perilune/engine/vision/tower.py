"""The vision tower of one rank: computes the slices that plans of rank 0 contain, and holds unfinished encodings and
finished embeddings."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.core.step import Slice, Work
from perilune.dist.group import ALONE, Group
from perilune.engine.vision.cells import Cells, Run, Sizes
from perilune.media.limits import Limits
from perilune.model.moonvit import Grid, MoonVit, Pass, normalised

WARM_SIDES, WARM_CELLS = (64, 32), 8  # patches of the picture that warms up; cells of its slices


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of the slices of one step: floating-point operations, number of runs of cells, seconds."""

    flops: float
    runs: int
    seconds: float


class Tower:
    """Encodes pictures slice by slice. Call it in the order of plans, on the thread and the stream that run steps."""

    def __init__(self, model: MoonVit, limits: Limits, group: Group = ALONE) -> None:
        self.model, self.limits, self.group = model, limits, group
        self._sizes = sizes_of(model)
        self._passes: dict[bytes, Pass] = {}
        self._merged: dict[bytes, tuple[Tensor, list[Tensor]]] = {}  # merged patches; embeddings computed so far
        self._rows: dict[bytes, Tensor] = {}
        self._patches: dict[bytes, memoryview] = {}  # patches of pictures before their first slice
        self._dropped: tuple[bytes, ...] = ()
        self._measuring: list[tuple[float, int, Callable[[], float | None]]] = []

    def warm(self, patches: int) -> None:
        """Encodes a small picture twice, the second time measured, and runs slices in all shapes up to `patches`
        patches. On a GPU the first pictures would delay steps by seconds otherwise. Call it where `run` is called."""
        self.model.warm(patches)
        grid = (1, *WARM_SIDES)
        total = self._cells(grid).total
        pixels = memoryview(bytes(math.prod(grid) * self._sizes.patch))
        for _ in range(2):
            self._measuring.clear()
            for start in (0, *range(1, total, WARM_CELLS)):
                stop = min(start + WARM_CELLS, total) if start else 1
                self._advance(Slice(self.group.slicing.rank, b"", grid, start, stop, None if start else pixels))
            del self._rows[b""]

    def provide(self, digest: bytes, patches: memoryview) -> None:
        """Takes the pixels of a picture that this rank begins in the next plan; only on ranks other than 0."""
        self._patches[digest] = patches

    def run(self, slices: Sequence[Slice], dropped: Sequence[bytes]) -> None:
        """Computes the slices of a plan. Embeddings in `dropped` are freed by the next call, because this plan's work
        may still read them."""
        for digest in self._dropped:
            for held in (self._rows, self._passes, self._merged):
                held.pop(digest, None)
        self._dropped = tuple(dropped)
        for own in slices:
            if own.rank == self.group.slicing.rank:
                self._advance(own)
        for own in slices:
            cells = self._cells(own.grid)
            if own.stop == cells.total and self.group.ranks > 1:
                rows = self._rows.get(own.digest)
                if rows is None:
                    weight = self.model.weights.linear1
                    rows = weight.new_empty(own.grid[1] * own.grid[2] // 4, len(weight))
                self._rows[own.digest] = self.group.broadcast(rows.contiguous(), own.rank)

    def replaced(self, work: Sequence[Work], starts: Sequence[int], *, ahead: int = 0) -> tuple[Tensor, Tensor] | None:
        """(rows of the step [M] int64, their embeddings [M, D]); None if no work has a picture. `ahead` 1: those
        of the next positions."""
        places, values = [], []
        for w, start in zip(work, starts):
            for digest, first, at, count in w.media:
                skipped = max(0, ahead - at)  # the row before belongs to other work
                places.append(np.arange(start + at + skipped, start + at + count) - ahead)
                values.append(self._rows[digest][first + skipped : first + count])
        if not values:
            return None
        where = torch.from_numpy(np.concatenate(places)).to(values[0].device, non_blocking=True)
        return where, torch.cat(values)

    def measured(self) -> list[Cost]:
        """Costs of the slices that the device has ended; each is returned once."""
        found = []
        while self._measuring:
            flops, runs, read = self._measuring[0]
            seconds = read()
            if seconds is None:
                break
            found.append(Cost(flops, runs, seconds))
            del self._measuring[0]
        return found

    def _cells(self, grid: Grid) -> Cells:
        return Cells(self._sizes, grid[0] * grid[1] * grid[2])

    def _advance(self, own: Slice) -> None:
        cells = self._cells(own.grid)
        runs = list(cells.runs(own.start, own.stop))
        elapsed = _stopwatch(self.model.weights.norm.device)
        for run in runs:
            self._run(own, run)
        if own.start:  # not the first slice, in which the host also copies pixels
            self._measuring.append((cells.flops(own.start, own.stop), len(runs), elapsed()))

    def _run(self, own: Slice, run: Run) -> None:
        digest, rows = own.digest, slice(run.first, run.end)
        if run.kind == "begin":
            patches = own.patches if own.patches is not None else self._patches.pop(digest)
            self._passes[digest] = self.model.begin(self._pixels(patches), [own.grid])
        elif run.kind == "project":
            self.model.project(self._passes[digest], run.layer, rows)
        elif run.kind == "mix":
            self.model.mix(self._passes[digest], run.layer, rows)
        else:
            self._finish(digest, run, math.prod(own.grid))

    def _finish(self, digest: bytes, run: Run, patches: int) -> None:
        """Computes the embeddings of the tokens that lie in the run's patches."""
        if run.first == 0:
            self._merged[digest] = self.model.merge(self._passes.pop(digest)), []
        merged, rows = self._merged[digest]
        first, end = (n * len(merged) // patches for n in (run.first, run.end))
        rows.append(self.model.head(merged[first:end]))
        if run.end == patches:
            self._rows[digest] = torch.cat(rows)
            del self._merged[digest]

    def _pixels(self, patches: memoryview) -> Tensor:
        """The patches as normalised [N, 3, P, P] on the device."""
        weight, side = self.model.weights.patch, self.limits.patch_size
        host = torch.empty(patches.nbytes, dtype=torch.uint8, pin_memory=weight.device.type == "cuda")
        host.numpy()[:] = np.frombuffer(patches, np.uint8)
        there = host.to(weight.device, non_blocking=True).view(-1, 3, side, side)
        return normalised(there, self.limits.image_mean, self.limits.image_std, weight.dtype)


def sizes_of(model: MoonVit) -> Sizes:
    c = model.config
    values = 3 * c.patch_size * c.patch_size
    return Sizes(c.num_hidden_layers, values, c.hidden_size, c.intermediate_size, c.text_hidden_size, model.pad)


def _stopwatch(device: torch.device) -> Callable[[], Callable[[], float | None]]:
    """Starts a timer. Calling the result stops it and returns a function that gives the seconds, None while the device
    has not reached the stop."""
    if device.type != "cuda":
        begin = time.perf_counter()

        def stop() -> Callable[[], float | None]:
            seconds = time.perf_counter() - begin
            return lambda: seconds

        return stop
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def stop_events() -> Callable[[], float | None]:
        last.record()
        return lambda: first.elapsed_time(last) / 1e3 if last.query() else None

    return stop_events
