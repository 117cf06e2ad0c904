"""Pictures and videos that a program gives to `LLM`: in content parts of messages, or beside raw prompts.

A program may name files of this machine; a client of the server must not, so the server does not use this module.
"""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from PIL.ExifTags import Base
from PIL.Image import Exif
from PIL.Image import Image as PilImage

from perilune.core.errors import RequestError
from perilune.core.files import exists, read_regular
from perilune.core.messages import EngineInfo, Picture, Video
from perilune.engine.client import blind
from perilune.media.data_url import of_data_url
from perilune.media.decoder import MAX_FILE_BYTES, Decoder
from perilune.media.limits import Limits
from perilune.media.patches import GRAY_16_BIT, UNSCALED, high_bytes
from perilune.text.history import shown
from perilune.text.tools import show

Medium = bytes | str | Path | PilImage | Picture | Video | Mapping[str, Any]
KINDS = {
    "image_url": "image_url", "image": "image", "input_image": "image_url",
    "video_url": "video_url", "video": "video", "input_video": "video_url",
}  # fmt: skip
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # others, such as CMYK, are converted to RGB


class Reader:
    """Decodes pictures for one model, in a process that starts at the first file and ends with `close`. Thread-safe."""

    def __init__(self, model_dir: Path, info: EngineInfo) -> None:
        self._info = info
        # Without a vision tower the checkpoint's limits are not read, because they may be missing.
        self._decoder = Decoder(Limits() if info.media_pad is None else Limits.from_directory(model_dir))

    def close(self) -> None:
        self._decoder.close()

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Picture | Video]]:
        """The messages as chat templates take them, with the pictures and videos of their parts, in order."""
        made, found = list(messages or ()), list[Picture | Video]()
        for i, message in enumerate(made):
            content = message.get("content") if isinstance(message, Mapping) else None
            for j, part in enumerate(content if isinstance(content, list) else ()):
                if (medium := self._part(part, f"messages[{i}].content[{j}]")) is not None:
                    found.append(medium)
                    parts = list(made[i]["content"])
                    parts[j] = shown(medium)
                    made[i] = {**message, "content": parts}
        return made, found

    def item(self, given: Any, where: str) -> Picture | Video:
        """Decodes a content part, or a picture in a form that `medium` takes."""
        part = self._part(given, where)
        return self.medium(given, False, where) if part is None else part

    def _part(self, part: Any, where: str) -> Picture | Video | None:
        """The picture or video of a content part; None for parts of other types."""
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or (field := KINDS.get(kind)) is None:
            return None
        given = part.get(field)
        if isinstance(given, Mapping):
            given = given.get("url")
        return self.medium(given, field.startswith("video"), where)

    def medium(self, given: Any, is_video: bool, where: str) -> Picture | Video:
        """One picture, or video: a file's bytes or path, a data: URL, a PIL image, or one that is decoded already.

        RequestError names the part: `where`.
        """
        if self._info.media_pad is None:
            raise blind(self._info)
        if isinstance(given, Video) or hasattr(given, "patches"):
            return cast(Picture | Video, given)
        try:
            data = _bytes(given, is_video)
            return self._decoder.decode_video(data) if is_video else self._decoder.decode(data)
        except RequestError as e:
            raise RequestError(f"{where}: {e}", param=where, code=e.code, status=e.status) from e


def _bytes(given: Any, is_video: bool) -> bytes:
    what = "video" if is_video else "picture"
    if isinstance(given, PilImage) and not is_video:
        return _png(given)
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str) and given[:5].lower() == "data:":
        return of_data_url(given, is_video)
    if isinstance(given, str) and given[:8].lower().startswith(("http://", "https://")):
        raise RequestError(f"LLM fetches no {what}: download it, and give its path or bytes", code="invalid_value")
    if not isinstance(given, str | Path):
        kinds = "bytes, a path or a data: URL" if is_video else "bytes, a path, a data: URL or a PIL image"
        raise RequestError(f"a {what} is given as {kinds}, not {show(type(given).__name__)}", code="invalid_value")
    path = Path(os.path.expanduser(str(given).removeprefix("file://")))
    if str(given).startswith("file://") and not exists(path):
        path = Path(unquote(str(path)))
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RequestError(f"{path} has more than {MAX_FILE_BYTES >> 20} MB: make it smaller")
        return read_regular(path)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        # Leave out the part after the colon: a remedy that holds only for a model's file.
        why = str(e.strerror).partition(":")[0] if isinstance(e, OSError) else str(e)
        shown = str(path) if str(path).isprintable() else repr(str(path))
        raise RequestError(f"cannot read the {what} {shown}: {why}", code="invalid_value") from e


def _png(image: PilImage) -> bytes:
    """The image as a PNG file, for the decoder: alpha, 16-bit gray and the EXIF orientation are kept."""
    if image.mode in UNSCALED:
        raise RequestError(
            f"the image's pixels are 32-bit (mode {image.mode}): convert it to RGB", code="invalid_image"
        )
    out = io.BytesIO()
    try:
        image.load()  # turns a TIFF file's pixels, and removes its orientation
        turn = _orientation(image)
        if image.mode in GRAY_16_BIT:
            image = high_bytes(image)
        image = image if image.mode in PNG_MODES else image.convert("RGB")
        image.save(out, "PNG", compress_level=1, exif=turn)
    except (OSError, ValueError) as e:
        raise RequestError(f"the image cannot be read: {e}", code="invalid_image") from e
    return out.getvalue()


def _orientation(image: PilImage) -> Exif:
    """The image's EXIF data without what does not matter here, and without anything if it is damaged."""
    found = Exif()
    try:
        turn = image.getexif().get(Base.Orientation)
    except MemoryError:
        raise
    except Exception:  # Pillow raises SyntaxError and struct.error among others
        return found
    if isinstance(turn, int) and 1 <= turn <= 8:
        found[Base.Orientation] = turn
    return found
