"""Drawing pictures for problems: fonts, colours, backgrounds, and a record of what was drawn where.

Pictures are small: what the smallest model reads is about 200 patches of 14 x 14 pixels. `unit` is the number of pixels
that one pixel of that size has in a picture drawn larger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from perilune.tasks.problem import SEED, pick

Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

SMALLEST_TEXT: Final = 14  # height of a line of text: pixels times `unit`
CONTRAST: Final = 80  # least difference of luminance, 0 to 255
BUILT_IN: Final = ""  # Pillow's own scalable font
BITMAP: Final = "bitmap"  # Pillow's own font of 11 pixels, enlarged
BITMAP_HEIGHT: Final = 11
NEW_FONT_SHARE: Final = 5  # one font file in five is never in training
OWN_SHARE: Final = 0.35  # share of texts in Pillow's own fonts, even if there are font files

# By whether the font is kept from training.
OWN_FONTS: Final = {False: (BUILT_IN, BUILT_IN, BITMAP), True: (BUILT_IN,)}
_files: dict[bool, list[str]] = {False: [], True: []}


class Mark(NamedTuple):
    """A glyph or a shape, and the box of pixels that it covers."""

    name: str
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a picture to be drawn. `slots`: tokens that a model of patches of 14 pixels gets of it, at least."""

    width: int
    height: int
    unit: float
    slots: int


def add_fonts(directory: Path) -> int:
    """Adds the TrueType fonts below `directory` that draw ASCII to this process's fonts; returns their number. The same
    seeds then give other pictures."""
    files = [str(f) for f in sorted(directory.rglob("*.ttf")) if _draws_ascii(f)]
    for file in files:
        digest = blake2b(f"{SEED}:{Path(file).name}".encode(), digest_size=4).digest()
        known = _files[digest[0] % NEW_FONT_SHARE == 0]
        if file not in known:
            known.append(file)
    return len(files)


def _draws_ascii(file: Path) -> bool:
    font = ImageFont.truetype(str(file), 20)
    boxes = [font.getbbox(c) for c in "0189AMegx+=?"]
    masks = {bytes(font.getmask(c)) for c in "0189AMegx+=?"}
    return len(masks) == len(boxes) and all(box[2] > box[0] for box in boxes)


@lru_cache(maxsize=2048)
def font(name: str, size: int) -> Font:
    if name == BITMAP:
        return ImageFont.load_default_imagefont()
    if name == BUILT_IN:
        return ImageFont.load_default(size)
    return ImageFont.truetype(name, size, layout_engine=ImageFont.Layout.BASIC)


def luminance(colour: Colour) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def new_pair(fore: Colour, back: Colour) -> bool:
    """Whether training never shows these two kinds of colours together: one in six, by each channel's half."""
    code = 0
    for value in (*fore, *back):
        code = 2 * code + (value >= 128)
    return code * 11 % 6 == 0


def colours(rng: Random, new: bool) -> tuple[Colour, Colour]:
    """(foreground, background) that differ in luminance, of a pair that is new or not."""
    while True:
        plain = rng.random()
        back = (255, 255, 255) if plain < 0.25 else (0, 0, 0) if plain < 0.3 else any_colour(rng)
        fore = (0, 0, 0) if 0.15 < plain < 0.25 else any_colour(rng)
        if abs(luminance(fore) - luminance(back)) >= CONTRAST and new_pair(fore, back) == new:
            return fore, back


def any_colour(rng: Random) -> Colour:
    return int(rng.random() * 256), int(rng.random() * 256), int(rng.random() * 256)


class Canvas:
    """A picture in the making. Marks are in its pixels."""

    def __init__(self, frame: Frame, back: Colour) -> None:
        self.frame, self.back = frame, back
        self.image = Image.new("RGB", (frame.width, frame.height), back)
        self.draw = ImageDraw.Draw(self.image)
        self.marks: list[Mark] = []

    def texture(self, rng: Random, fore: Colour) -> None:
        """A background that is not plain: a slope of brightness, or faint lines."""
        kind = rng.random()
        if kind < 0.5:
            ramp = np.linspace(-1, 1, self.frame.width)[None] * (rng.random() * 2 - 1)
            ramp = ramp + np.linspace(-1, 1, self.frame.height)[:, None] * (rng.random() * 2 - 1)
            shaded = np.clip(np.array(self.back) + 18 * ramp[..., None], 0, 255).astype(np.uint8)
            self.image.paste(Image.fromarray(shaded))
        else:
            faint = mixed(self.back, fore, 0.15)
            step = max(4, int(self.frame.unit * rng.uniform(9, 30)))
            for y in range(int(rng.random() * step), self.frame.height, step):
                self.draw.line((0, y, self.frame.width, y), faint)
            if kind > 0.8:
                for x in range(int(rng.random() * step), self.frame.width, step):
                    self.draw.line((x, 0, x, self.frame.height), faint)

    def text(self, x: float, y: float, text: str, name: str, size: int, colour: Colour, stroke: int = 0) -> float:
        """Writes a line with its upper left corner at (x, y); returns its width."""
        one, scale = font(name, size), size / BITMAP_HEIGHT if name == BITMAP else 1.0
        if name == BITMAP:
            mask = Image.new("L", (max(1, int(one.getlength(text))), BITMAP_HEIGHT))
            ImageDraw.Draw(mask).text((0, 0), text, 255, one)
            large = (max(1, int(mask.width * scale)), max(1, int(mask.height * scale)))
            self.image.paste(colour, (int(x), int(y)), mask.resize(large, Image.Resampling.BILINEAR))
        else:
            self.draw.text((x, y), text, colour, one, stroke_width=stroke)
        at, glyph = x, 0.0
        for c in text:
            glyph = one.getlength(c) * scale
            if c != " ":
                self.marks.append(Mark(c, at, y + 0.15 * size, at + glyph, y + size))
            at += glyph
        return at - x

    def turn(self, degrees: float) -> None:
        """Turns what was drawn about the middle; corners get the background's colour."""
        self.image = self.image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=self.back)
        self.draw = ImageDraw.Draw(self.image)
        cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        middle_x, middle_y = self.frame.width / 2, self.frame.height / 2
        turned = []
        for name, left, top, right, bottom in self.marks:
            x, y = (left + right) / 2 - middle_x, (top + bottom) / 2 - middle_y
            dx = cosine * x + sine * y + middle_x - (left + right) / 2
            dy = -sine * x + cosine * y + middle_y - (top + bottom) / 2
            turned.append(Mark(name, left + dx, top + dy, right + dx, bottom + dy))
        self.marks = turned

    def finished(self, rng: Random) -> Image.Image:
        """The picture, in some cases a little blurred or with noise, as photographs and JPEG files are."""
        roll = rng.random()
        if roll < 0.08:
            return self.image.filter(ImageFilter.GaussianBlur(self.frame.unit * rng.uniform(0.3, 0.7)))
        if roll < 0.18:
            noise = np.random.default_rng(int(rng.random() * 2**32)).integers(-16, 17, (*self.image.size[::-1], 1))
            return Image.fromarray(np.clip(np.asarray(self.image) + noise, 0, 255).astype(np.uint8))
        return self.image


def mixed(a: Colour, b: Colour, share: float) -> Colour:
    x, y, z = (int(p + (q - p) * share) for p, q in zip(a, b))
    return x, y, z


def any_font(rng: Random, new: bool) -> str:
    """New fonts are those that training never shows, if there are any (add_fonts)."""
    files = _files[new]
    return pick(rng, files if files and rng.random() >= OWN_SHARE else OWN_FONTS[new])


def width_of(text: str, name: str, size: int) -> float:
    one = font(name, size)
    return one.getlength(text) * (size / BITMAP_HEIGHT if name == BITMAP else 1.0)


def largest(text: str | Sequence[str], name: str, width: float, height: float) -> int:
    """The text size, in pixels, at which every line fits into width x height; by the width at one size."""
    lines = [text] if isinstance(text, str) else text
    widest = max(width_of(line, name, 40) for line in lines) / 40
    return int(min(width / (widest + 0.05), height / (1.25 * len(lines))))
