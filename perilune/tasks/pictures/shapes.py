"""Pictures of coloured shapes: how many of a kind, which kind is more, which colour one has.

Structure: shapes in colours that training never shows together, questions worded anew.
"""

import math
from random import Random
from typing import Final

from PIL import ImageDraw

from perilune.tasks.pictures import wider
from perilune.tasks.pictures.canvas import Canvas, Colour, Frame, Mark
from perilune.tasks.pictures.scene import Scene
from perilune.tasks.problem import pick

COLOURS: Final[dict[str, Colour]] = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 220), "yellow": (240, 215, 30),
    "orange": (245, 135, 20), "purple": (135, 45, 170), "pink": (250, 140, 185), "black": (20, 20, 20),
}  # fmt: skip
SHAPES: Final = ("circle", "square", "triangle", "star", "diamond", "cross")
NEW_EACH: Final = 7  # one pair of colour and shape in so many is never in training
BACKS: Final[tuple[Colour, ...]] = ((255, 255, 255), (255, 255, 255), (225, 225, 225), (200, 210, 220), (245, 240, 225))
MOST_SHAPES, MOST_KINDS = 9, 5
SIDE: Final = 16  # pixels of the smallest shape's cell
NONE_SHARE: Final = 0.08  # of questions after a kind that is not there

COUNT: Final = (
    "How many {what} are there?", "How many {what} are in the picture?", "Count the {what}.", "how many {what}",
    "How many {what} do you see?", "What is the number of {what}?", "How many {what} can you see?",
    "Please count the {what}.", "How many {what} does the image show?", "Number of {what}?", "Any {what}? How many?",
    "How often is there a shape of the kind: {what}?", "I need the number of {what}.", "{what}: how many?",
)  # fmt: skip
NEW_COUNT: Final = ("Tell me how many {what} you can find.", "Could you count the {what} for me?")
MORE: Final = (
    "Are there more {a} or {b}?", "Which are more, {a} or {b}?", "Are there more {a} or more {b}?",
    "What is there more of, {a} or {b}?", "More {a} or more {b}?", "{a} or {b}: which are more?",
    "Compare {a} and {b}: which are more?", "Which is the larger group, {a} or {b}?",
)  # fmt: skip
NEW_MORE: Final = ("Do you see more {a} or {b}?",)
COLOUR: Final = (
    "What colour is the {shape}?", "Which colour does the {shape} have?", "What color is the {shape}?",
    "Name the colour of the {shape}.", "The {shape} has which colour?",
)  # fmt: skip
NEW_COLOUR: Final = ("Tell me the {shape}'s colour.",)

Kind = tuple[str, str]  # colour and shape


def new_kind(kind: Kind) -> bool:
    return (3 * tuple(COLOURS).index(kind[0]) + SHAPES.index(kind[1])) % NEW_EACH == 0


ALL_KINDS: Final = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
KINDS: Final = {new: tuple(k for k in ALL_KINDS if new_kind(k) == new) for new in (False, True)}


def several(shape: str) -> str:
    return "crosses" if shape == "cross" else f"{shape}s"


def counted(n: int, kind: Kind) -> str:
    return f"{n} {kind[0]} {kind[1] if n == 1 else several(kind[1])}"


def shape_scene(rng: Random, split: str, size: Frame) -> Scene:
    new = split == "structural"
    across, down = (max(1, int(n / (SIDE * size.unit))) for n in (size.width, size.height))
    most = min(MOST_SHAPES, across * down)
    kinds = list(
        dict.fromkeys(_kind(rng, new) for _ in range(1 + int(rng.random() * min(MOST_KINDS, size.slots // 6))))
    )
    if new and not any(map(new_kind, kinds)):
        kinds[0] = pick(rng, KINDS[True])
    counts = dict.fromkeys(kinds, 1)
    for _ in range(int(rng.random() * (most - len(counts) + 1))):
        counts[pick(rng, kinds)] += 1
    # In a fixed order, so that a picture has one caption.
    counts = {kind: counts[kind] for kind in ALL_KINDS if kind in counts}
    question, reasoning, content = _asked(rng, split, counts)
    things = [kind for kind, n in counts.items() for _ in range(n)]
    return Scene(
        ("picture_shapes", tuple(counts.items()), reasoning),
        question,
        reasoning,
        content,
        "\n".join(counted(n, kind) for kind, n in counts.items()),
        lambda: _painted(rng, things, size),
    )


def _kind(rng: Random, new: bool) -> Kind:
    return pick(rng, ALL_KINDS if new else KINDS[False])


def _asked(rng: Random, split: str, counts: dict[Kind, int]) -> tuple[str, str, str]:
    """(question, reasoning, content)."""
    roll = rng.random()
    by_shape, by_colour = _totals(counts, 1), _totals(counts, 0)
    once = [(colour, shape) for (colour, shape) in counts if by_shape[shape] == 1]
    if roll < 0.2 and once:
        kind = pick(rng, once)
        return (
            wider.asked(rng, split, COLOUR, NEW_COLOUR, wider.COLOUR).format(shape=kind[1]),
            counted(1, kind),
            kind[0],
        )
    if roll < 0.35:
        if rng.random() < 0.5:
            totals = {several(shape): n for shape, n in by_shape.items()}
        else:
            totals = {f"{colour} shapes": n for colour, n in by_colour.items()}
        pairs = [(a, b) for a in totals for b in totals if totals[a] > totals[b]]
        if pairs:
            a, b = pick(rng, pairs)
            first, second = (a, b) if rng.random() < 0.5 else (b, a)
            asked = wider.asked(rng, split, MORE, NEW_MORE, wider.MORE).format(a=first, b=second)
            return asked, f"{first}={totals[first]}\n{second}={totals[second]}", a
    asked = wider.asked(rng, split, COUNT, NEW_COUNT, wider.COUNT)
    if roll < 0.35 + NONE_SHARE:
        kind = _kind(rng, split == "structural")
        n = counts.get(kind, 0)
        return asked.format(what=f"{kind[0]} {several(kind[1])}"), counted(n, kind), str(n)
    if roll < 0.7:
        kind = pick(rng, list(counts))
        return asked.format(what=f"{kind[0]} {several(kind[1])}"), counted(counts[kind], kind), str(counts[kind])
    if roll < 0.8:
        parts, what = list(counts.items()), "shapes"
    elif roll < 0.9:
        shape = pick(rng, list(by_shape))
        parts, what = [(kind, n) for kind, n in counts.items() if kind[1] == shape], several(shape)
    else:
        colour = pick(rng, list(by_colour))
        parts, what = [(kind, n) for kind, n in counts.items() if kind[0] == colour], f"{colour} shapes"
    total = sum(n for _, n in parts)
    return asked.format(what=what), "\n".join([*(counted(n, k) for k, n in parts), f"={total}"]), str(total)


def _totals(counts: dict[Kind, int], part: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind, n in counts.items():
        found[kind[part]] = found.get(kind[part], 0) + n
    return found


def _painted(rng: Random, things: list[Kind], size: Frame) -> Canvas:
    """Every shape in a cell of a grid of its own, so that none touches another."""
    canvas = Canvas(size, pick(rng, BACKS))
    if rng.random() < 0.15:
        canvas.texture(rng, (90, 90, 90))
    smallest = SIDE * size.unit
    down_most, across_most = max(1, int(size.height / smallest)), max(1, int(size.width / smallest))
    while True:
        down, across = 1 + int(rng.random() * down_most), 1 + int(rng.random() * across_most)
        if down * across >= len(things):
            break
    cell_width, cell_height = size.width / across, size.height / down
    places = rng.sample(range(down * across), len(things))
    for (colour, shape), place in zip(things, places):
        fits = min(cell_width, cell_height)
        side = min(rng.uniform(0.6, 0.92) * fits, 70 * size.unit)
        side = max(side, min(0.92 * fits, 12 * size.unit))
        x = place % across * cell_width + 0.04 * fits + rng.random() * (cell_width - 0.08 * fits - side)
        y = place // across * cell_height + 0.04 * fits + rng.random() * (cell_height - 0.08 * fits - side)
        red, green, blue = (min(255, max(0, n + int(rng.uniform(-18, 19)))) for n in COLOURS[colour])
        drawn(canvas.draw, shape, (red, green, blue), x, y, side, rng)
        canvas.marks.append(Mark(f"{colour} {shape}", x, y, x + side, y + side))
    return canvas


def drawn(draw: ImageDraw.ImageDraw, shape: str, fill: Colour, x: float, y: float, side: float, rng: Random) -> None:
    """A shape in the square of this side with its upper left corner at (x, y)."""
    right, bottom, half = x + side, y + side, side / 2
    if shape == "circle":
        draw.ellipse((x, y, right, bottom), fill)
    elif shape == "square":
        draw.rectangle((x + 0.06 * side, y + 0.06 * side, right - 0.06 * side, bottom - 0.06 * side), fill)
    elif shape == "diamond":
        draw.polygon(((x + half, y), (right, y + half), (x + half, bottom), (x, y + half)), fill)
    elif shape == "triangle":
        if rng.random() < 0.75:
            draw.polygon(((x + half, y), (right, bottom), (x, bottom)), fill)
        else:
            draw.polygon(((x, y), (right, y), (x + half, bottom)), fill)
    elif shape == "cross":
        third = side / 3
        draw.rectangle((x + third, y, right - third, bottom), fill)
        draw.rectangle((x, y + third, right, bottom - third), fill)
    else:
        points = []
        for i in range(10):
            radius, angle = half * (1 if i % 2 == 0 else 0.4), math.pi * (i / 5 - 0.5)
            points.append((x + half + radius * math.cos(angle), y + half + radius * math.sin(angle)))
        draw.polygon(points, fill)
