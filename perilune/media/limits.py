"""Sizes of pictures: how the checkpoint's preprocessor shrinks them, and how many tokens they are (docs/formats.md
section 4.2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from perilune.core.errors import CheckpointError, quoted
from perilune.core.files import exists
from perilune.core.jsonfile import read_object

FILE = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class Fit:
    """A picture's size in pixels after shrinking, and its grid of patches, which padding fills."""

    width: int
    height: int
    rows: int
    columns: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`media_proc_cfg` of a checkpoint; the defaults are those of Kimi K2.5 and K2.6, for one without the file."""

    patch_size: int = 14  # pixels
    merge_kernel_size: int = 2  # patches on a token's side
    in_patch_limit: int = 16384  # patches of an image
    in_patch_limit_each_frame: int = 4096  # patches of a video frame
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Reads preprocessor_config.json if there is one. CheckpointError names the key that is wrong."""
        file = path / FILE
        if not exists(file):
            return cls()
        held = read_object(file)
        inner = held.get("media_proc_cfg", held)
        if not isinstance(inner, dict):
            raise CheckpointError(f"{file}: media_proc_cfg must be an object, not {quoted(inner)}")
        return cls.from_dict(inner, where=str(file))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = FILE) -> Self:
        if data.get("fixed_output_tokens") is not None:
            raise CheckpointError(f"{where}: fixed_output_tokens={quoted(data['fixed_output_tokens'])} is not served")
        found: dict[str, Any] = {}
        for key in _COUNTS:
            if (value := data.get(key)) is None:
                continue
            if type(value) is not int or not 1 <= value <= 1 << 20:
                raise CheckpointError(f"{where}: {key} must be a whole number from 1 to {1 << 20}, not {quoted(value)}")
            found[key] = value
        for key in ("image_mean", "image_std"):
            if (value := data.get(key)) is None:
                continue
            if not isinstance(value, list) or len(value) != 3 or not all(_is_share(x) for x in value):
                raise CheckpointError(f"{where}: {key} must be three numbers above 0 up to 1, not {quoted(value)}")
            found[key] = tuple(map(float, value))
        return cls(**found)

    def fit(self, width: int, height: int, *, frame: bool = False) -> Fit:
        """Where a picture of width x height pixels ends up; it is never enlarged. `frame`: one of a video.

        ValueError for a side below 1 pixel.
        """
        if min(width, height) < 1:
            raise ValueError(f"a picture of {width} x {height} pixels")
        side = self.patch_limit_on_one_side * self.patch_size
        limit = self.in_patch_limit_each_frame if frame else self.in_patch_limit
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        scale = min(1.0, math.sqrt(limit / patches), side / width, side / height)
        new_width, new_height = (min(max(1, int(n * scale)), side) for n in (width, height))
        token = self.patch_size * self.merge_kernel_size
        down, across = math.ceil(new_height / token), math.ceil(new_width / token)
        merged = self.merge_kernel_size
        return Fit(new_width, new_height, down * merged, across * merged, down * across)


_COUNTS = (
    "patch_size", "merge_kernel_size", "in_patch_limit", "in_patch_limit_each_frame", "patch_limit_on_one_side",
)  # fmt: skip


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
