"""From the bytes of an image file to patches of pixels. Runs in the worker process (worker.py), never in a server:
files come from anyone, and a decoder may need any time and memory for them.

Colours are those of the reference's plain `convert("RGB")`: transparency is dropped, not blended. The picture is turned
upright as its EXIF orientation says; of an animation the first frame counts.
"""

import hashlib
import io
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from perilune.core.errors import RequestError
from perilune.media.kinds import kind_of, unread_kind_of, video_kind_of
from perilune.media.limits import Limits
from perilune.media.refusal import refused

FORMATS = {"PNG": "PNG", "JPEG": "JPEG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP", "TIFF": "TIFF"}
KINDS = ", ".join(FORMATS.values())
MAX_PIXELS = 100_000_000  # of the file, before shrinking: 400 MB as RGB, and once more where it is turned or converted
GRAY_16_BIT = ("I;16", "I;16L", "I;16B")
UNSCALED = ("I", "F")  # 32-bit whole numbers and floats: no range says which value is white
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF files
STRIP_PIXELS = 1 << 20  # reduced from 16 to 8 bits at a time: 2 MB, and as much for each intermediate array

Patches = NDArray[np.uint8]  # [rows * columns, 3, P, P], by row and then column

Image.MAX_IMAGE_PIXELS = None  # MAX_PIXELS is checked instead, with an error of our own
warnings.simplefilter("ignore")  # Pillow's, about damaged metadata


def patches_of(data: bytes, limits: Limits) -> tuple[Patches, tuple[int, int, int]]:
    """The patches of an image file, and their grid (1, rows, columns).

    RequestError, in one line, if the file is no image of a known kind, damaged, truncated or too large.
    """
    try:
        return cut(_decoded(data), limits)
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise refused(_unread(data)) from None
    except MemoryError:
        raise refused("decoding it takes too much memory: send a smaller one") from None
    except Exception as e:  # Pillow raises a dozen types for damaged files, SyntaxError and struct.error among them
        raise refused(f"it is damaged or truncated ({type(e).__name__})") from None


def digest(patches: Patches, grid: tuple[int, int, int]) -> bytes:
    """32 bytes that identify what the model sees of a picture: its resized pixels and its grid. Files that differ in
    compression or metadata alone have the same one."""
    found = hashlib.sha256(np.array(grid, dtype="<i8").tobytes())
    found.update(np.ascontiguousarray(patches).data)
    return found.digest()


def _unread(data: bytes) -> str:
    """Why a file is no picture of a known kind, and what to send instead."""
    start = data[:256].lstrip().lower()
    if b"<svg" in start or start.startswith(b"<?xml"):
        return "SVG is not read: send it rendered, as PNG"
    if kind := unread_kind_of(data):
        return f"it is {kind}, none of {KINDS}: send it as PNG or JPEG"
    if start.startswith((b"<!doctype html", b"<html")):
        return "it is a web page (HTML): send the image itself"
    if kind := kind_of(data):
        return f"its header is damaged; it begins as {kind.upper()}"
    if video_kind_of(data):
        return f"it is a video, none of {KINDS}: send it as a video part"
    return f"it is none of {KINDS}, or its header is damaged"


def _decoded(data: bytes) -> Image.Image:
    """The file's picture, upright, as RGB.

    A copy takes up to 400 MB: steps that change nothing must not copy, and no `with` may keep a step's input alive.
    """
    # Opening reads the header alone. Formats that would start other programs (EPS) are not among these.
    image: Image.Image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    if math.prod(image.size) > MAX_PIXELS:
        raise refused(
            f"it has {image.width:,} x {image.height:,} pixels, and at most {MAX_PIXELS:,} are decoded: "
            "send a smaller one"
        )
    if image.mode in UNSCALED:
        raise refused(f"its pixels are 32-bit ({image.format}, mode {image.mode}): send 8 or 16 bits a colour")
    image.load()
    _turn_upright(image)
    if image.mode in GRAY_16_BIT:
        image = high_bytes(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _turn_upright(image: Image.Image) -> None:
    """Turns the image in place by its EXIF orientation. If that cannot be read, the image is used as it is."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        pass


def high_bytes(image: Image.Image) -> Image.Image:
    """Gray of 8 bits from gray of 16, as Pillow itself reads 16-bit colours; its conversion of gray clips at 255.

    Pillow gives pixels of TIFF files as they are stored: of 12 bits, or with 0 for white.
    """
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    shift, zero_is_white = (4 if tags.get(BITS) == (12,) else 8), tags.get(PHOTOMETRIC) == 0
    made, rows = Image.new("L", image.size), max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        high = (np.asarray(strip) >> shift).astype(np.uint8)
        made.paste(Image.fromarray(np.invert(high, out=high) if zero_is_white else high), (0, top))
    return made


def cut(
    image: Image.Image, limits: Limits, *, frames: int = 0, size: tuple[int, int] | None = None
) -> tuple[Patches, tuple[int, int, int]]:
    """Resized, padded with black on the right and below, and cut into patches.

    frames  number of frames of its video chunk; 0: a picture
    size    that of the chunk's first frame, in pixels; others are stretched to it
    """
    fit, side = limits.fit(*(size or image.size), frames=frames), limits.patch_size
    resized = image.resize((fit.width, fit.height), Image.Resampling.BICUBIC)
    padded = np.zeros((fit.rows * side, fit.columns * side, 3), np.uint8)
    padded[: fit.height, : fit.width] = np.asarray(resized)
    squares = padded.reshape(fit.rows, side, fit.columns, side, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(squares).reshape(-1, 3, side, side), (1, fit.rows, fit.columns)
