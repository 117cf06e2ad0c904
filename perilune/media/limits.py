"""Sizes of pictures and videos: how the checkpoint's preprocessor shrinks them, which frames it takes, and how many
tokens they are (docs/formats.md sections 4.2 and 4.3)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from perilune.core.errors import CheckpointError, quoted
from perilune.core.files import exists
from perilune.core.jsonfile import read_object

FILE = "preprocessor_config.json"
TIMES = "hh:mm:ss.fff"  # how the prompt writes the time of a chunk
MAX_FPS = 240


@dataclass(frozen=True, slots=True)
class Fit:
    """A picture's size in pixels after shrinking, and its grid of patches after padding."""

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
    in_patch_limit_video: int | None = None  # patches of a chunk of frames
    sample_fps: float = 2.0  # frames taken of a second of video
    max_num_frames_each_video: int | None = None
    temporal_merge_kernel_size: int = 4  # frames of a chunk
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
        if data.get("timestamp_mode", TIMES) != TIMES:
            raise CheckpointError(
                f"{where}: timestamp_mode={quoted(data['timestamp_mode'])} is not served, only {TIMES}"
            )
        found: dict[str, Any] = {}
        if (fps := data.get("sample_fps")) is not None:
            if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
                raise CheckpointError(f"{where}: sample_fps must be above 0 and at most {MAX_FPS}, not {quoted(fps)}")
            found["sample_fps"] = float(fps)
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

    @property
    def max_patches(self) -> int:
        """Most patches of a picture, or of all frames of a chunk, before padding."""
        return max(self.in_patch_limit, self.temporal_merge_kernel_size * self._frame_limit)

    @property
    def _frame_limit(self) -> int:
        """Most patches of a frame; at most a picture's, because the engine's cache is only sure to hold one picture."""
        return min(self.in_patch_limit_each_frame, self.in_patch_limit)

    def fit(self, width: int, height: int, *, frames: int = 0) -> Fit:
        """The size of a picture of width x height pixels after shrinking; it is never enlarged. `frames`: frames of its
        video chunk, 0 for a picture.

        ValueError for a side below 1 pixel.
        """
        if min(width, height) < 1:
            raise ValueError(f"a picture of {width} x {height} pixels")
        side = self.patch_limit_on_one_side * self.patch_size
        limit = self._frame_limit if frames else self.in_patch_limit
        if frames and self.in_patch_limit_video is not None:
            limit = max(1, min(round(self.in_patch_limit_video / frames), limit))
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        scale = min(1.0, math.sqrt(limit / patches), side / width, side / height)
        new_width, new_height = (min(max(1, int(n * scale)), side) for n in (width, height))
        token = self.patch_size * self.merge_kernel_size
        down, across = math.ceil(new_height / token), math.ceil(new_width / token)
        merged = self.merge_kernel_size
        return Fit(new_width, new_height, down * merged, across * merged, down * across)

    def frames(self, count: int, fps: float) -> list[int]:
        """Which of a video's `count` frames are taken: evenly from the first to the last."""
        wanted = max(round(count * min(self.sample_fps, fps) / fps), 1)
        if self.max_num_frames_each_video is not None:
            wanted = min(wanted, self.max_num_frames_each_video)
        return [int(i) for i in np.linspace(0, count - 1, wanted).round()]


_COUNTS = (
    "patch_size", "merge_kernel_size", "in_patch_limit", "in_patch_limit_each_frame", "patch_limit_on_one_side",
    "in_patch_limit_video", "max_num_frames_each_video", "temporal_merge_kernel_size",
)  # fmt: skip


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
