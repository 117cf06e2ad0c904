"""Image and video files that a user names on the command line."""

import base64
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from perilune.core.errors import ConfigError
from perilune.core.files import exists
from perilune.media.decoder import MAX_FILE_BYTES
from perilune.media.kinds import kind_of, unread_kind_of, video_kind_of

F = TypeVar("F", bound=Callable[..., Any])
READ = {
    "picture": "PNG, JPEG, WebP, GIF, BMP and TIFF",
    "video": "MP4, QuickTime, WebM, Matroska, AVI and GIF",
}


def _option(name: str, what: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}",
        f"{name}s",
        type=click.Path(dir_okay=False, path_type=Path),
        multiple=True,
        metavar="FILE",
        help=f"A {what} that the (first) question is about: {READ[what].replace(' and ', ' or ')}; repeatable.",
    )


image_option = _option("image", "picture")
video_option = _option("video", "video")


def read_media(path: Path, *, is_video: bool = False) -> tuple[bytes, str]:
    """(bytes, KIND as in image/KIND or video/KIND) of an image or video file. ConfigError if the file is of another
    kind, cannot be read or has more than MAX_FILE_BYTES. A pipe is read to its end, or to that bound."""
    what = "video" if is_video else "picture"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        why = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(f"cannot read the {what} {path}: {why}") from e
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MB: make it smaller")
    if not data:
        raise ConfigError(f"{path} is empty")
    image, video = kind_of(data), video_kind_of(data)
    found, others = (video, image) if is_video else (image, video)
    if found is None:
        hint = f"{READ[what]} are read"
        if others is not None:
            hint = "it is a picture, for --image or /image" if is_video else "it is a video, for --video or /video"
        elif (other := unread_kind_of(data)) is not None:
            hint = f"it is {other}, and {hint}"
        raise ConfigError(f"{path} is no {what}: {hint}")
    return data, found


def media_part(path: Path, *, is_video: bool = False) -> dict[str, Any]:
    """The file as a part of a message of OpenAI's API. ConfigError as read_media."""
    data, kind = read_media(path, is_video=is_video)
    name = "video" if is_video else "image"
    return {
        f"{name}_url": {"url": f"data:{name}/{kind};base64,{base64.b64encode(data).decode()}"},
        "type": f"{name}_url",
    }


def typed_path(text: str) -> Path:
    """The path in a line that a user typed, or that a terminal wrote for a dropped file: quoted, with escaped spaces,
    or plain."""
    plain = expanded(text)
    if exists(plain):
        return plain
    try:
        words = shlex.split(text)
    except ValueError:  # a quote without its partner
        return plain
    return expanded(words[0]) if len(words) == 1 else plain


def expanded(text: str) -> Path:
    """The path `text`, a leading ~ or ~USER replaced; it stays if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)
