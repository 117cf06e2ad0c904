"""Sizes and token counts of pictures against the published examples and transformers."""

import ast
import json
import math
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from perilune.core.errors import CheckpointError
from perilune.doctor.vocabulary import _PREPROCESSOR
from perilune.media.limits import FILE, Fit, Limits

GOLDEN = {
    (1, 1): 1, (10, 10): 1, (28, 28): 1, (29, 28): 2, (28, 29): 2, (1, 8000): 256, (8000, 1): 256, (224, 224): 64,
    (640, 480): 414, (1024, 768): 1036, (1920, 1080): 2691, (3000, 3000): 4225, (20000, 100): 512,
    (1792, 1792): 4096, (1793, 1793): 4225, (7168, 28): 256, (7169, 28): 256, (1_000_000, 3): 256,
}  # fmt: skip


@pytest.mark.parametrize("size", GOLDEN)
def test_golden_token_counts(size: tuple[int, int]) -> None:
    fit = Limits().fit(*size)
    assert fit.tokens == GOLDEN[size] == fit.rows * fit.columns // 4
    assert fit.width <= fit.columns * 14 < fit.width + 28 and fit.height <= fit.rows * 14 < fit.height + 28


def test_video_frames_are_smaller() -> None:
    assert Limits().fit(1920, 1080, frames=4).tokens == 1032
    assert Limits().fit(3000, 3000, frames=4).tokens == 1089
    assert Limits().fit(3000, 3000) == Fit(1794, 1794, 130, 130, 4225)  # padded to 1820


@pytest.mark.parametrize(("kind", "limit", "frames"), [("image", 16384, 0), ("video", 4096, 4)])
def test_random_sizes_are_those_of_transformers(kind: str, limit: int, frames: int) -> None:
    """Read from its source, which imports torchvision."""
    if (spec := find_spec("transformers")) is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    tree = ast.parse((Path(spec.origin).parent / f"models/kimi_k25/{kind}_processing_kimi_k25.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "navit_resize"]
    made: dict[str, Any] = {"math": math}
    exec(compile(tree, kind, "exec"), made)
    rng = random.Random(1)
    for i in range(20_000):
        w, h = (math.ceil(math.exp(rng.uniform(0, 11.5))) for _ in range(2))
        if i % 2:  # beside the borders of patches
            w, h = (max(1, n // 14 * 14 + rng.randint(-1, 1)) for n in (w, h))
        (new_h, new_w), (tall, wide) = made["navit_resize"](h, w, 14, 2, limit, 512)
        expected = Fit(new_w, new_h, tall // 14, wide // 14, tall * wide // 784)
        assert Limits().fit(w, h, frames=frames) == expected, (w, h)
        # Padding adds to the limit of 4,096 tokens.
        assert expected.rows <= 512 and expected.columns <= 512 and expected.tokens < 4700
    with pytest.raises(ValueError, match="0 x 5"):
        Limits().fit(0, 5)


def test_the_file_is_read_and_its_absence_means_the_published_values(tmp_path: Path) -> None:
    published = Limits.from_directory(tmp_path)
    assert published == Limits()
    for key in Limits.__dataclass_fields__:
        value = getattr(published, key)
        assert _PREPROCESSOR[key] == (list(value) if isinstance(value, tuple) else value)
    for held in ({"media_proc_cfg": dict(_PREPROCESSOR)}, dict(_PREPROCESSOR)):
        (tmp_path / FILE).write_text(json.dumps(held | {"image_processor_type": "x"}))
        assert Limits.from_directory(tmp_path) == published
    (tmp_path / FILE).write_text(json.dumps({"media_proc_cfg": dict(_PREPROCESSOR) | {"in_patch_limit": 64}}))
    assert Limits.from_directory(tmp_path).fit(1000, 1000).tokens == 16


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"media_proc_cfg": 3}, "media_proc_cfg must be an object, not 3"),
        ({"patch_size": 0}, "patch_size must be a whole number from 1"),
        ({"in_patch_limit": True}, "in_patch_limit must be"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std must be three numbers above 0"),
        ({"fixed_output_tokens": 64}, "fixed_output_tokens=64 is not served"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, held: dict[str, object], says: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(held))
    with pytest.raises(CheckpointError) as e:
        Limits.from_directory(tmp_path)
    assert says in str(e.value) and "\n" not in str(e.value)
