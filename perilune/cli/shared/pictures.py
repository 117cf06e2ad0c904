"""Image files that a user names on the command line."""

import base64
from pathlib import Path

import click

from perilune.core.errors import ConfigError
from perilune.media.decoder import MAX_FILE_BYTES
from perilune.media.kinds import kind_of

image_option = click.option(
    "--image",
    "images",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A picture that the (first) question is about: PNG, JPEG, WebP, GIF, BMP or TIFF; repeatable.",
)


def read_picture(path: Path) -> tuple[bytes, str]:
    """(bytes, kind as in image/KIND) of an image file; ConfigError, in one line, if it is none or cannot be read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MB: make it smaller")
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read the picture {path}: {e.strerror}") from e
    if (kind := kind_of(data)) is None:
        raise ConfigError(f"{path} is no picture: PNG, JPEG, WebP, GIF, BMP and TIFF are read")
    return data, kind


def data_url(path: Path) -> str:
    """The file as OpenAI's API takes it. ConfigError as read_picture."""
    data, kind = read_picture(path)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
