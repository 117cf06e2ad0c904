"""Kinds of image and video files by their first bytes."""

from importlib.util import find_spec

_BEGINNINGS = (
    (b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
)  # fmt: skip


def kind_of(data: bytes | bytearray) -> str | None:
    """ "png", "jpeg", "webp", "gif", "bmp" or "tiff", as in image/png; None for any other file."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for beginning, kind in _BEGINNINGS if data.startswith(beginning)), None)


def video_kind_of(data: bytes | bytearray) -> str | None:
    """ "mp4" (also QuickTime), "webm" (also Matroska), "avi" or "gif"; None for any other file."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "webm"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return "gif" if data[:4] == b"GIF8" else None


def reads_video() -> bool:
    """Whether PyAV, which reads videos, is installed."""
    return find_spec("av") is not None
