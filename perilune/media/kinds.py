"""Kinds of image and video files by their first bytes."""

from importlib.util import find_spec

_BEGINNINGS = (
    (b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
)  # fmt: skip


_UNREAD = (
    (b"%PDF", "PDF"), (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"), (b"\0\0\0\x0cjP", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"), (b"\0\0\1\0", "ICO"), (b"8BPS", "Photoshop"), (b"%!PS", "PostScript"),
)  # fmt: skip
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "HEIC"
)


def kind_of(data: bytes | bytearray) -> str | None:
    """ "png", "jpeg", "webp", "gif", "bmp" or "tiff", as in image/png; None for any other file."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for beginning, kind in _BEGINNINGS if data.startswith(beginning)), None)


def unread_kind_of(data: bytes | bytearray) -> str | None:
    """The usual name of an image kind that is not read, such as "HEIC" or "PDF"; None for any other file."""
    if data[4:8] == b"ftyp":
        return _BRANDS.get(bytes(data[8:12]))
    return next((kind for beginning, kind in _UNREAD if data.startswith(beginning)), None)


def video_kind_of(data: bytes | bytearray) -> str | None:
    """ "mp4" (also QuickTime), "webm" (also Matroska), "avi" or "gif"; None for any other file."""
    if unread_kind_of(data):  # AVIF and HEIC begin as MP4 does
        return None
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
