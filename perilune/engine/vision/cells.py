"""Divides the encoding of one picture into cells, numbered from 0, so that decode steps can run between them.

    0                      the patches are embedded
    then, layer by layer   for each group of rows (Sizes.group) a cell that projects queries, keys and values;
                           after these, for each group a cell of attention and MLP
    the last               for each group, its tokens are merged and projected to the text model's width

Neighbouring cells of one kind and layer are computed in one run.
"""

from collections.abc import Iterator
from dataclasses import dataclass

RUN_SECONDS = 1e-4  # Assumed time of a run's kernel launches, besides that of its FLOPs.


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a vision tower: number of layers, values in a patch, widths; `out` is the text model's hidden width.

    `group`: rows of a cell; 0: Cells.GROUP_PATCHES.
    """

    layers: int
    patch: int
    width: int
    inner: int
    out: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Cells that run together, for patches first .. end - 1. `kind`: "begin", "project", "mix" or "finish"."""

    kind: str
    layer: int
    first: int
    end: int


class Cells:
    """The cells of a picture of `patches` patches."""

    GROUP_PATCHES = 64  # More: longer gaps between decode steps on a slow device. Fewer: more cells, smaller matmuls.

    def __init__(self, sizes: Sizes, patches: int) -> None:
        self._sizes, self._patches, self._group = sizes, patches, sizes.group or self.GROUP_PATCHES
        self._groups = -(-patches // self._group)
        self.total = 1 + (2 * sizes.layers + 1) * self._groups

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """The runs of the cells from `start` up to `stop`, in order."""
        while start < stop:
            if start == 0:
                yield Run("begin", 0, 0, self._patches)
                start = 1
                continue
            phase, group = divmod(start - 1, self._groups)
            count = min(self._groups - group, stop - start)
            first = group * self._group
            kind = "finish" if phase == 2 * self._sizes.layers else "mix" if phase % 2 else "project"
            yield Run(kind, phase // 2, first, min(first + count * self._group, self._patches))
            start += count

    def flops(self, start: int, stop: int) -> float:
        return sum(map(self._flops, self.runs(start, stop)))

    def seconds(self, start: int, stop: int, flop_seconds: float) -> float:
        """Seconds of these cells on a device that takes `flop_seconds` per operation."""
        return sum(RUN_SECONDS + self._flops(run) * flop_seconds for run in self.runs(start, stop))

    def within(self, start: int, budget_seconds: float, flop_seconds: float) -> int:
        """The end of the cells from `start` on that fit into the budget; at least one cell. Cell 0 is alone: pixels are
        copied then, by the host."""
        if start == 0:
            return 1
        low, high = start + 1, min(start + 2, self.total)
        while high < self.total and self.seconds(start, high, flop_seconds) <= budget_seconds:
            low, high = high, min(2 * high - start, self.total)
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(start, middle, flop_seconds) <= budget_seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _flops(self, run: Run) -> float:
        s, rows = self._sizes, run.end - run.first
        if run.kind == "begin":
            return 2.0 * rows * s.patch * s.width
        if run.kind == "project":
            return 6.0 * rows * s.width * s.width
        if run.kind == "mix":
            linear = 2.0 * rows * s.width * (s.width + 2 * s.inner)
            return linear + 4.0 * rows * self._patches * s.width
        return 2.0 * rows * s.width * (4 * s.width + s.out)
