"""Kinds of image files by their first bytes."""

_BEGINNINGS = (
    (b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
)  # fmt: skip


def kind_of(data: bytes | bytearray) -> str | None:
    """ "png", "jpeg", "webp", "gif", "bmp" or "tiff", as in image/png; None for any other file."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for beginning, kind in _BEGINNINGS if data.startswith(beginning)), None)
