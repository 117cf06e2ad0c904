"""Pictures of a window with one or two buttons, and of plain words.

Structure: labels that training lacks, pairs of colours that it lacks, questions worded anew.
"""

from random import Random
from typing import Final

from perilune.tasks.pictures import wider
from perilune.tasks.pictures.canvas import (
    BUILT_IN,
    SMALLEST_TEXT,
    Canvas,
    Frame,
    any_font,
    colours,
    largest,
    luminance,
    mixed,
    width_of,
)
from perilune.tasks.pictures.charts import ITEMS, KEPT, NEW_ITEMS, some_words
from perilune.tasks.pictures.scene import Scene
from perilune.tasks.pictures.shapes import COLOURS
from perilune.tasks.pictures.sums import line
from perilune.tasks.problem import pick

BUTTONS: Final = (
    "OK", "Cancel", "Save", "Send", "Next", "Back", "Close", "Open", "Delete", "Edit", "Apply", "Retry", "Yes", "No",
    "Print", "Copy", "Paste", "Search", "Login", "Logout", "Submit", "Reset", "Start", "Stop", "Pause", "Play", "Help",
    "Accept", "Reject", "Update", "Upload", "Add", "Remove", "Finish", "Share", "Reply", "Buy now", "Log in", "Sign up",
    "Try again", "Save all", "Go back", "Not now", "Skip", "Done", "More", "Less", "Order", "Pay", "Join",
)  # fmt: skip
NEW_BUTTONS: Final = (
    "Continue",
    "Undo",
    "Download",
    "Exit",
    "Confirm",
    "Redo",
    "Insert",
    "Refresh",
    "Ignore",
    "Import",
)
NEW_LABELS: Final = (*KEPT, *map(str.lower, NEW_BUTTONS))
TITLES: Final = ("Settings", "Error", "Files", "Mail", "Notes", "Login", "Photos", "Update", "Print", "About", "Music")
ONE: Final = (
    "Which button does the screenshot show?", "Which button is shown?", "What does the button say?",
    "What is on the button?", "Which button is there?", "What is the label of the button?", "Read the button.",
    "which button is it", "What is written on the button?", "Name the button.", "Which button do you see?",
    "What can I click?", "What is the button called?", "Where do I click?", "Tell me the text of the button.",
    "Which button does this window have?", "What does it offer to press?", "button?", "Which action is offered?",
)  # fmt: skip
NEW_ONE: Final = ("Which button can be clicked here?", "What would I have to press?")
SIDE_OF: Final = (
    "Which button is on the {side}?", "What does the {side} button say?", "What is the label of the {side} button?",
    "Read the button on the {side}.", "Name the {side} button.", "What is on the {side}?", "{side} button?",
    "Which one is at the {side}?", "Tell me what the button on the {side} says.", "What do I click on the {side}?",
)  # fmt: skip
NEW_SIDE_OF: Final = ("What could I press on the {side}?",)
READ: Final = (
    "What does the picture say?", "Read the text.", "What is written here?", "What does it say?", "Transcribe this.",
    "Write down the text in the picture.", "What is the text?", "Read it.",
)  # fmt: skip
NEW_READ: Final = ("Type out what you see.", "Please copy the text in the image.")


def button_scene(rng: Random, split: str, size: Frame) -> Scene:
    wide, new = split == "train", split == "structural"
    count = 2 if size.slots >= 24 and rng.random() < 0.4 else 1
    if wide:
        count = 3 if count == 2 and size.width > 160 * size.unit and rng.random() < 0.3 else count
        labels = list(dict.fromkeys(_label(rng, size, count) for _ in range(count)))
    elif new:
        labels = rng.sample(NEW_BUTTONS, count)
    else:
        labels = [w[0].upper() + w[1:] for w in some_words(rng, BUTTONS, NEW_BUTTONS, count)]
    title = pick(rng, TITLES) if rng.random() < 0.6 else ""
    heads = [title] if title else []
    if wide:
        if title and rng.random() < 0.6:
            heads = [_label(rng, size, 1)]
        if size.height > 5 * SMALLEST_TEXT * size.unit and rng.random() < 0.3:
            heads.append(_label(rng, size, 1))
    if len(labels) == 1:
        question, content = wider.asked(rng, split, ONE, NEW_ONE, wider.ONE), labels[0]
    else:
        place = int(rng.random() * len(labels))
        side = ("left", *["middle"] * (len(labels) - 2), "right")[place]
        question = wider.asked(rng, split, SIDE_OF, NEW_SIDE_OF, wider.SIDE_OF).format(side=side)
        content = labels[place]
    caption = "".join(f"[{label}]" for label in labels)
    return Scene(
        ("picture_buttons", title, tuple(labels), content, int(rng.random() * 10**6)),
        question,
        "\n".join(map(" ".join, content.split(" "))),  # letter by letter
        content,
        "\n".join([caption, *heads]),
        lambda: _window(rng, new, size, title, heads, labels),
    )


def _label(rng: Random, size: Frame, count: int) -> str:
    """A word, at times two, that fits `count` times beside each other."""
    while True:
        text = wider.cased(rng, wider.label(rng, BUTTONS, NEW_LABELS, 12))
        if " " not in text and rng.random() < 0.15:
            text = f"{text} {wider.label(rng, ITEMS, NEW_LABELS, 6)}"
        if width_of(text, BUILT_IN, SMALLEST_TEXT) * size.unit < 0.75 * size.width / count:
            return text


def _window(rng: Random, new: bool, size: Frame, title: str, heads: list[str], labels: list[str]) -> Canvas:
    fore, back = colours(rng, new)
    canvas, face, u = Canvas(size, back), any_font(rng, new), size.unit
    width, height = size.width, size.height
    bar = 0.0
    for i, head in enumerate(heads):
        points = min(int(rng.uniform(1.0, 1.3) * SMALLEST_TEXT * u), largest(head, face, 0.9 * width, 0.45 * height))
        if title and not i:
            canvas.draw.rectangle((0, 0, width, 1.4 * points), mixed(back, fore, 0.15))
        canvas.text(rng.uniform(1, 6) * u, bar + 0.1 * points, head, face, points, fore)
        bar += 1.4 * points
    room = width / len(labels)
    most = min(largest(label, face, 0.8 * room, 0.75 * (height - bar)) for label in labels)
    least = min(most, int(SMALLEST_TEXT * u))
    points = least + int((min(most, int(34 * u)) - least + 1) * rng.random())
    fill = mixed(back, fore, 0.12) if rng.random() < 0.5 else pick(rng, tuple(COLOURS.values()))
    ink = (255, 255, 255) if luminance(fill) < 128 else (0, 0, 0)
    y = bar + rng.random() * max(0.0, height - bar - 1.5 * points - 2)
    if len(labels) == 1 and rng.random() < 0.3 and y - bar > 12 * u:  # lines of text too small to read
        for i in range(int((y - bar) / (6 * u)) - 1):
            top = bar + (i + 0.7) * 6 * u
            canvas.draw.line((6 * u, top, rng.uniform(0.4, 0.95) * width, top), mixed(back, fore, 0.4), max(1, int(u)))
    for i, label in enumerate(labels):
        wide = width_of(label, face, points) + 0.8 * points
        x = i * room + rng.random() * max(0.0, room - wide - 2)
        box = (x, y, min(x + wide, width - 1), y + 1.5 * points)
        canvas.draw.rounded_rectangle(box, int(rng.random() * 0.6 * points), fill, mixed(back, fore, 0.6))
        canvas.text(x + 0.4 * points, y + 0.1 * points, label, face, points, ink)
    return canvas


def text_scene(rng: Random, split: str, size: Frame) -> Scene:
    """A picture of words and numbers, the elements of the other kinds."""
    new = split == "structural"
    words = NEW_ITEMS + NEW_BUTTONS if new else ITEMS + BUTTONS
    parts = []
    for _ in range(pick(rng, (1, 2, 2, 3))):
        roll = rng.random()
        if roll < (0.2 if split == "train" else 0.4):
            parts.append(str(int(rng.random() * 10 ** pick(rng, (1, 2, 3)))))
        elif split == "train":
            parts.append(wider.cased(rng, wider.label(rng, words, NEW_LABELS, 7 + 5 * (size.width > 150 * size.unit))))
        elif roll < 0.7:
            parts.append(pick(rng, words) if new else some_words(rng, words, NEW_ITEMS + NEW_BUTTONS, 1)[0])
        else:
            parts.append("".join(chr(97 + int(rng.random() * 26)) for _ in range(1 + int(rng.random() * 3))))
    text = " ".join(parts)
    if width_of(text, "", int(SMALLEST_TEXT * size.unit)) > 0.8 * size.width:
        text = parts[0]
    asked = wider.asked(rng, split, READ, NEW_READ, wider.READ)
    return Scene(("picture_text", text), asked, text, text, text, lambda: line(rng, text, size, new))
