"""Pictures of bar charts and of tables of two columns.

Structure: names of rows that training lacks, labels of bars in new pairs of colours, questions worded anew.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from perilune.tasks.pictures import wider
from perilune.tasks.pictures.canvas import (
    SMALLEST_TEXT,
    Canvas,
    Frame,
    Mark,
    any_font,
    colours,
    largest,
    mixed,
    width_of,
)
from perilune.tasks.pictures.scene import Scene
from perilune.tasks.pictures.shapes import COLOURS
from perilune.tasks.problem import pick
from perilune.tasks.words import any_word

BAR: Final = "bar"
LABELS: Final = "ABCDEFGHKLMNPRSTUVWXYZ"
ITEMS: Final = (
    "apples", "pens", "books", "cups", "keys", "hats", "shoes", "lamps", "boxes", "coins", "plates", "rings", "bags",
    "stamps", "maps", "eggs", "pears", "plums", "ducks", "cats", "dogs", "cars", "bikes", "trains", "forks", "spoons",
    "knives", "chairs", "tables", "beds", "desks", "bowls", "jars", "cans", "nails", "ropes", "tents", "flags", "drums",
    "bells", "socks", "shirts", "coats", "scarves", "gloves", "roses", "trees", "stones", "shells", "clocks", "radios",
    "cards", "dice", "kites", "balls", "dolls", "trucks", "ships", "planes", "boats", "north", "south", "east", "west",
    "Anna", "Ben", "Carla", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jan", "Kim", "Leo", "Mia", "Nina", "Otto",
)  # fmt: skip
NEW_ITEMS: Final = (
    "melons", "pins", "rugs", "vases", "belts", "crates", "tiles", "towels", "mugs", "goats", "horses", "sleds", "Rosa",
    "Paul", "Tess", "Sven",
)  # fmt: skip
KEPT: Final = tuple(item.lower().rstrip("s") for item in NEW_ITEMS)
VALUE: Final = (
    "What is the value of {name}?", "What value does {name} have?", "How much is {name}?", "value of {name}?",
    "Which number belongs to {name}?", "What is the number for {name}?", "Read the value of {name}.",
    "What number is beside {name}?", "Give me the number of {name}.", "{name}?", "Say how much {name} has.",
    "I need the value for {name}", "Look up {name}.", "What is written for {name}?",
    "According to the image, how much is {name}?", "Find {name} and read its number.", "Please read off {name}.",
    "What do we have for {name}?", "Can you see the value of {name}?", "{name} is how much?",
)  # fmt: skip
NEW_VALUE: Final = ("Tell me the figure shown for {name}.", "What does the picture say for {name}?")
HIGHEST: Final = (
    "Which bar is the highest?", "Which bar is the tallest?", "What is the highest bar?", "Which one is the largest?",
    "Which has the highest value?", "Name the tallest bar.", "Which bar is on top?", "Who is ahead?",
    "What is the label of the tallest bar?", "Which bar has most?", "Where is the maximum?", "which bar is the longest",
    "Tell me which bar is the greatest.", "Which letter has the highest bar?",
)  # fmt: skip
NEW_HIGHEST: Final = ("Which bar reaches up the furthest?",)
LOWEST: Final = (
    "Which bar is the lowest?", "Which bar is the shortest?", "What is the lowest bar?", "Which one is the smallest?",
    "Which has the lowest value?", "Name the shortest bar.", "Which bar is at the bottom?", "Who is last?",
    "The smallest bar?", "What is the label of the shortest bar?", "Which bar has least?", "Where is the minimum?",
    "which bar is the smallest", "Tell me which bar is the littlest.", "Which letter has the lowest bar?",
)  # fmt: skip
NEW_LOWEST: Final = ("Which bar is the least tall?",)
HOW_MANY: Final = (
    "How many {what} are there?", "How many {what} does it have?", "Count the {what}.", "how many {what}",
    "What is the count of {what}?", "How many {what} do you see?", "Please count all {what}.", "{what}: how many?",
)  # fmt: skip
NEW_HOW_MANY: Final = ("Tell me the number of {what}.",)


def some_words(rng: Random, known: Sequence[str], kept: Sequence[str], count: int) -> list[str]:
    """`count` different words, half of them `known`, the others any words of at most 8 letters that are none of `kept`
    from training: a model that sees few words learns to distinguish these instead of reading letters."""
    found: list[str] = []
    while len(found) < count:
        word = pick(rng, known) if rng.random() < 0.5 else any_word(rng)
        if len(word) <= 8 and word.isascii() and word not in found and word.lower() not in map(str.lower, kept):
            found.append(word)
    return found


def chart_scene(rng: Random, split: str, size: Frame) -> Scene:
    return (bar_scene if rng.random() < 0.5 else table_scene)(rng, split, size)


def bar_scene(rng: Random, split: str, size: Frame) -> Scene:
    count = 2 + int(rng.random() * (min(6, size.slots // 5, int(size.width / (20 * size.unit))) - 1))
    values = rng.sample(range(1, 11), count)  # tenths of the highest possible bar
    printed = rng.random() < 0.6
    if printed:
        step = pick(rng, (1, 2, 5, 9))
        values = [max(1, v * step - (int(rng.random() * step) if step > 1 else 0)) for v in values]
    names = rng.sample(LABELS, count)
    if rng.random() < 0.5:
        names.sort()
    held = dict(zip(names, values))
    order = sorted(held, key=lambda name: -held[name])
    lines = [f"{name} {value}" for name, value in held.items()] if printed else [">".join(order)]
    roll = rng.random()
    if printed and roll < 0.5:
        name = pick(rng, names)
        question = wider.asked(rng, split, VALUE, NEW_VALUE, wider.VALUE).format(name=name)
        reasoning, content = _up_to(lines, name), str(held[name])
    elif roll < 0.6:
        question = wider.asked(rng, split, HOW_MANY, NEW_HOW_MANY, wider.COUNT).format(what="bars")
        reasoning, content = "\n".join(names), str(count)
    else:
        highest = rng.random() < 0.5
        forms = (HIGHEST, NEW_HIGHEST, wider.HIGHEST) if highest else (LOWEST, NEW_LOWEST, wider.LOWEST)
        question, content = wider.asked(rng, split, *forms), order[0 if highest else -1]
        if printed:
            reasoning = "\n".join([*lines, f"{'max' if highest else 'min'} {content}"])
        else:
            reasoning = ">".join(order) if highest else "<".join(order[::-1])
    return Scene(
        ("picture_charts", "bars", tuple(held.items()), printed, content),
        question,
        reasoning,
        content,
        "\n".join(lines),
        lambda: _bars(rng, split == "structural", size, held, printed),
    )


def _up_to(lines: Sequence[str], name: str) -> str:
    """The lines in reading order, up to that of `name`."""
    return "\n".join(lines[: [line.split(" ")[0] for line in lines].index(name) + 1])


def _bars(rng: Random, new: bool, size: Frame, held: dict[str, int], printed: bool) -> Canvas:
    fore, back = colours(rng, new)
    canvas, face, u = Canvas(size, back), any_font(rng, new), size.unit
    points = min(
        max(int(SMALLEST_TEXT * u), int(rng.uniform(0.1, 0.16) * size.height)), int(0.8 * size.width / len(held))
    )
    floor = size.height - 1.3 * points - 1
    ceiling = (1.35 * points if printed else 2 * u) + 1
    left = rng.uniform(0.01, 0.08) * size.width
    cell = (size.width - left - 2) / len(held)
    thick = cell * rng.uniform(0.4, 0.8)
    highest = max(held.values()) * rng.uniform(1.0, 1.2)
    if rng.random() < 0.4:
        for i in range(1, 5):
            y = floor - (floor - ceiling) * i / 5
            canvas.draw.line((left, y, size.width, y), mixed(back, fore, 0.25))
    same = mixed(fore, back, rng.uniform(0.0, 0.4)) if rng.random() < 0.6 else None
    for i, (name, value) in enumerate(held.items()):
        x = left + i * cell + (cell - thick) / 2
        top = floor - (floor - ceiling) * value / highest
        canvas.draw.rectangle((x, top, x + thick, floor), same or pick(rng, tuple(COLOURS.values())))
        canvas.marks.append(Mark(BAR, x, top, x + thick, floor))
        middle = x + thick / 2
        canvas.text(middle - width_of(name, face, points) / 2, floor + 1, name, face, points, fore)
        if printed:
            shown = str(value)
            canvas.text(middle - width_of(shown, face, points) / 2, top - 1.25 * points, shown, face, points, fore)
    canvas.draw.line((left, floor, size.width - 1, floor), fore, max(1, int(u)))
    if rng.random() < 0.5:
        canvas.draw.line((left, ceiling, left, floor), fore, max(1, int(u)))
    return canvas


def table_scene(rng: Random, split: str, size: Frame) -> Scene:
    most = min(5, size.slots // 8, int(size.height / (1.3 * SMALLEST_TEXT * size.unit)))
    count = min(most, 2 + int(rng.random() * (most - 1)))
    if split == "train":
        names: list[str] = []
        while len(names) < count:
            name = wider.label(rng, ITEMS, KEPT)
            names += [] if name in names else [name if rng.random() < 0.8 else name.capitalize()]
    else:
        new = split == "structural"
        names = rng.sample(NEW_ITEMS, count) if new else some_words(rng, ITEMS, NEW_ITEMS, count)
    held = {name: int(rng.random() * 10 ** pick(rng, (1, 2, 2, 3))) for name in names}
    lines = [f"{name} {value}" for name, value in held.items()]
    roll = rng.random()
    if roll < 0.1:
        question = wider.asked(rng, split, HOW_MANY, NEW_HOW_MANY, wider.COUNT).format(what="rows")
        reasoning, content = "\n".join(names), str(count)
    else:
        name = pick(rng, names)
        question = wider.asked(rng, split, VALUE, NEW_VALUE, wider.VALUE).format(name=name)
        reasoning, content = _up_to(lines, name), str(held[name])
    return Scene(
        ("picture_charts", "table", tuple(held.items()), content),
        question,
        reasoning,
        content,
        "\n".join(lines),
        lambda: _table(rng, split == "structural", size, lines),
    )


def _table(rng: Random, new: bool, size: Frame, lines: list[str]) -> Canvas:
    fore, back = colours(rng, new)
    canvas, face, u = Canvas(size, back), any_font(rng, new), size.unit
    most = min(largest([line + "  " for line in lines], face, 0.92 * size.width, 0.96 * size.height), int(32 * u))
    least = min(most, int(SMALLEST_TEXT * u))
    points = least + int((most - least + 1) * rng.random())
    height = min((size.height - 2) / len(lines), points * rng.uniform(1.3, 1.9))
    names, values = zip(*(line.rsplit(" ", 1) for line in lines))
    name_width = max(width_of(name, face, points) for name in names) + 0.7 * points
    value_width = max(width_of(value, face, points) for value in values) + 0.4 * points
    left = 1 + rng.random() * max(0.0, size.width - name_width - value_width - 3)
    top = rng.random() * max(0.0, size.height - height * len(lines) - 2)
    split = left + name_width
    right = split + value_width
    ruled, striped, aligned = rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.5
    for i, (name, value) in enumerate(zip(names, values)):
        y = top + i * height
        if striped and i % 2:
            canvas.draw.rectangle((left, y, right, y + height), mixed(back, fore, 0.12))
        if ruled:
            canvas.draw.rectangle((left, y, right, y + height), None, mixed(back, fore, 0.6))
        inside = y + (height - 1.2 * points) / 2
        canvas.text(left + 0.2 * points, inside, name, face, points, fore)
        x = right - 0.2 * points - width_of(value, face, points) if aligned else split + 0.2 * points
        canvas.text(x, inside, value, face, points, fore)
    if ruled:
        canvas.draw.line((split, top, split, top + height * len(lines)), mixed(back, fore, 0.6))
    return canvas
