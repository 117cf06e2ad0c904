"""Pictures of a sum or difference of two whole numbers of two or three digits.

Structure: fonts that training lacks where font files are given, pairs of colours that it lacks, questions worded anew.
"""

from random import Random
from typing import Final

from perilune.tasks.arithmetic import number
from perilune.tasks.pictures.canvas import SMALLEST_TEXT, Canvas, Frame, any_font, colours, largest, width_of
from perilune.tasks.pictures.scene import Scene
from perilune.tasks.pictures.wider import asked
from perilune.tasks.problem import pick
from perilune.tasks.working import add_trace, subtract_trace

ASKED: Final = (
    "What is the result?", "What is the answer?", "Calculate what the picture shows.", "Work it out.", "Solve this.",
    "What does this come to?", "How much is that?", "Compute the result.", "What is the result of the calculation?",
    "Calculate.", "Solve the problem in the picture.", "what is the result", "Please work out the result.",
    "What is the value of the expression in the picture?", "How much is it?", "Evaluate this.", "Please solve it.",
    "What do you get?", "Give me the result.", "What is the solution?", "can you calculate this?", "= ?",
)  # fmt: skip
NEW_ASKED: Final = (
    "What number comes out?", "Please tell me the answer to this calculation.", "Can you do this sum for me?",
    "What is shown here, worked out?", "Look at the picture and calculate.",
)  # fmt: skip
SHOWN: Final = ("{a} {op} {b}", "{a} {op} {b}", "{a}{op}{b}", "{a} {op} {b} =", "{a} {op} {b} = ?", "{a}{op}{b}=")


def sum_scene(rng: Random, split: str, size: Frame) -> Scene:
    a, b = number(rng, pick(rng, (2, 3, 3))), number(rng, pick(rng, (2, 3, 3)))
    add = rng.random() < 0.5
    op = "+" if add else "-"
    shown = pick(rng, SHOWN).format(a=a, op=op, b=b)
    return Scene(
        ("picture_sums", a, op, b),
        asked(rng, split, ASKED, NEW_ASKED),
        add_trace(a, b) if add else subtract_trace(a, b),
        f"{a} {op} {b} = {a + b if add else a - b}",
        f"{a}{op}{b}",
        lambda: line(rng, shown, size, split == "structural"),
    )


def line(rng: Random, text: str, size: Frame, new: bool) -> Canvas:
    """One line of text in any font, size, colour and place, at times turned a little."""
    fore, back = colours(rng, new)
    canvas, face = Canvas(size, back), any_font(rng, new)
    if rng.random() < 0.25:
        canvas.texture(rng, fore)
    turned = rng.random() < 0.2
    most = largest(text, face, 0.96 * size.width, (0.6 if turned else 0.95) * size.height)
    least = min(most, int(SMALLEST_TEXT * size.unit))
    points = least + int((most - least + 1) * rng.random())
    x = rng.random() * max(0.0, size.width - width_of(text, face, points) - 2)
    y = rng.random() * max(0.0, size.height - 1.25 * points)
    stroke = 1 if points > 20 * size.unit and rng.random() < 0.15 else 0
    if turned:
        y = (size.height - 1.25 * points) / 2
    canvas.text(x, y, text, face, points, fore, stroke)
    if turned:
        canvas.turn(rng.uniform(-7, 7))
    return canvas
