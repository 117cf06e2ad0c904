"""One picture with one question, before it is a problem: what was drawn, what is asked, and what a reader of the
picture would write down of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from perilune.tasks.pictures.canvas import Canvas, Frame

PATCH: Final = 14  # pixels on a side
MOST_PATCHES: Final = 192  # of a picture before padding; larger ones are shrunk to it
MOST_ON_ONE_SIDE: Final = 24
# Heights and widths in patches, even: wide lines, squares, screens, and large pictures shrunk and then padded.
GRIDS: Final = (
    (4, 12), (4, 20), (6, 16), (8, 8), (8, 16), (8, 24), (12, 12), (12, 16), (16, 12), (14, 18), (18, 14),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """`caption` is what is in the picture, in reading order; `paint` draws it. `reasoning` is for thinking on."""

    key: tuple[Any, ...]
    question: str
    reasoning: str
    content: str
    caption: str
    paint: Callable[[], Canvas]


Make = Callable[[Random, str, Frame], Scene]  # (rng, split, size) -> scene


def shrinking(width: int, height: int) -> float:
    """The factor, at most 1, by which the preprocessor of a model with these limits shrinks a picture."""
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    side = MOST_ON_ONE_SIDE * PATCH
    return min(1.0, math.sqrt(MOST_PATCHES / patches), side / width, side / height)


def frame(rng: Random, grid: tuple[int, int]) -> Frame:
    """A random size that the preprocessor turns into this grid; some are up to 2.5 times as large and are shrunk."""
    while True:
        large = 1.0 if rng.random() < 0.4 else 1.0 + 1.5 * rng.random()
        height, width = (int(large * (PATCH * n - rng.random() * (2 * PATCH - 1))) for n in grid)
        scale = shrinking(width, height)
        if all(math.ceil(int(m * scale) / (2 * PATCH)) * 2 == n for m, n in zip((height, width), grid)):
            return Frame(width, height, 1 / scale, grid[0] * grid[1] // 4)
