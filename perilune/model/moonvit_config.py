"""The vision tower and projector of a checkpoint's config.json: `vision_config`, in both of its published spellings.

Moonshot's files say `vt_hidden_size` and `init_pos_emb_height` where transformers' own say `hidden_size` and
`pos_emb_height`. A value that would need other code is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from perilune.core.errors import CheckpointError, quoted
from perilune.core.jsonfile import read_object
from perilune.model.config import Keys

MERGE_SIDE = 2  # a token is a square of 2 x 2 patches
MAX_SIDE_PATCHES = 512  # longest side of a grid: the preprocessor's limit, and the reference's table of rotations
MAX_PATCH_WIDTH = 256  # pixels
PLACEHOLDER = 163605  # <|media_pad|>, where the file does not say

# Keys with the values that are served; a key may be absent. A list in the file is compared as a tuple.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "merge_kernel_size": ((MERGE_SIDE, MERGE_SIDE), MERGE_SIDE),
    "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmerger",),
    "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",),
    "projector_hidden_act": ("gelu",),
    "hidden_act": ("gelu_pytorch_tanh",),
}
_ROPE = {"rope_type": ("axial",), "rope_theta": (10000, 10000.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonVitConfig:
    """Shapes and constants of MoonViT-3D. Field names are transformers', but for `text_hidden_size`."""

    patch_size: int  # pixels on a side
    pos_emb_height: int  # rows of the learned table, in patches
    pos_emb_width: int
    pos_emb_time: int  # frames of a chunk of video, at most
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    projector_eps: float
    text_hidden_size: int  # width of the projector's output; the file's mm_hidden_size is the tower's width
    placeholder: int  # id of the token that prompts have for each row of a picture

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Reads config.json. CheckpointError names the offending key, or that there is no vision tower."""
        file = path / "config.json"
        return cls.from_dict(read_object(file), where=str(file))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config.json") -> Self:
        vision, text = data.get("vision_config"), data.get("text_config")
        for key, level in (("vision_config", vision), ("text_config", text)):
            if not isinstance(level, Mapping):
                raise CheckpointError(f"{where}: {key} must be an object, not {quoted(level)}: it is no vision model's")
        assert isinstance(vision, Mapping) and isinstance(text, Mapping)
        rope = vision.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"{where}: vision_config.rope_parameters must be an object, not {quoted(rope)}")
        _check(vision, _ONLY, where, "vision_config.")
        _check(rope, _ROPE, where, "vision_config.rope_parameters.")
        get, outer = Keys(vision, where, "vision_config."), Keys(data, where, "")

        def either(*keys: str, high: int) -> int:
            """The value of the first key that is there."""
            return get.whole(next((k for k in keys if vision.get(k) is not None), keys[0]), high=high)

        config = cls(
            patch_size=get.whole("patch_size", high=MAX_PATCH_WIDTH),
            pos_emb_height=either("init_pos_emb_height", "pos_emb_height", high=MAX_SIDE_PATCHES),
            pos_emb_width=either("init_pos_emb_width", "pos_emb_width", high=MAX_SIDE_PATCHES),
            pos_emb_time=either("init_pos_emb_time", "pos_emb_time", high=64),
            hidden_size=either("vt_hidden_size", "hidden_size", high=1 << 16),
            intermediate_size=either("vt_intermediate_size", "intermediate_size", high=1 << 20),
            num_hidden_layers=either("vt_num_hidden_layers", "num_hidden_layers", high=1000),
            num_attention_heads=either("vt_num_attention_heads", "num_attention_heads", high=1 << 12),
            projector_eps=(
                get.real("projector_ln_eps")
                if vision.get("projector_ln_eps") is not None
                else outer.real("projection_layer_norm_eps", default=1e-5)
            ),
            text_hidden_size=Keys(text, where, "text_config.").whole("hidden_size"),
            placeholder=outer.whole(
                "image_token_id" if data.get("media_placeholder_token_id") is None else "media_placeholder_token_id",
                low=0,
                default=PLACEHOLDER,
            ),
        )
        config._check(vision, data, where)
        return config

    def _check(self, vision: Mapping[str, Any], data: Mapping[str, Any], where: str) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise CheckpointError(
                f"{where}: vision_config's hidden_size={self.hidden_size} over {self.num_attention_heads} heads must "
                "give a head width that is a multiple of 4: rotations of columns and rows alternate in it"
            )
        for key, value, wanted in (
            ("vision_config.mm_hidden_size", vision.get("mm_hidden_size"), self.hidden_size),
            ("vision_config.text_hidden_size", vision.get("text_hidden_size"), self.text_hidden_size),
            ("projection_hidden_size", data.get("projection_hidden_size"), self.hidden_size),
        ):
            if value is not None and value != wanted:
                raise CheckpointError(f"{where}: {key}={quoted(value)} must be {wanted}, as in the rest of the file")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def merged_size(self) -> int:
        """The width of a token before the projector: its patches' states, one after the other."""
        return MERGE_SIDE * MERGE_SIDE * self.hidden_size


def _check(level: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], where: str, prefix: str) -> None:
    for key, served in only.items():
        value = level.get(key)
        value = tuple(value) if isinstance(value, list) else value
        if value is not None and value not in served:
            raise CheckpointError(f"{where}: {prefix}{key}={quoted(value)} is not served; served: {served[0]!r}")
