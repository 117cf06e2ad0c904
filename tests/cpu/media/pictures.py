"""Image files of every awkward kind, made with Pillow or by hand."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def scene(width: int, height: int) -> Image.Image:
    """A smooth picture with four different corners, so that turning or cutting it wrongly shows."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray((np.stack([x, y, (1 - x) * y], -1) * 255).round().astype(np.uint8))


def file(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes, *more: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file by hand: `pixels` is what its compressed data unpacks to, whatever the header says."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header), *more, chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def gray_tiff(width: int, height: int, bits: int, photometric: int, data: bytes) -> bytes:
    """A TIFF file of one strip by hand; photometric 0: 0 is white, 1: 0 is black."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 0, 277: 1, 278: height, 279: len(data)}
    tags[273] = 8 + 2 + 12 * len(tags) + 4  # where the pixels begin
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data
