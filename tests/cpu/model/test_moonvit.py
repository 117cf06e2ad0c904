"""The vision tower against transformers' kimi_k25 on the same small random checkpoints, in float32."""

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from perilune.core.errors import CheckpointError
from perilune.loading.moonvit import load_moonvit
from perilune.media.decoder import Decoder
from perilune.media.limits import Limits
from perilune.model import names
from perilune.model.moonvit import Block, Grid, MoonVit, MoonVitWeights, normalised
from perilune.model.moonvit_config import MoonVitConfig
from tests import seeing
from tests.cpu.media.pictures import file, scene
from tests.oracle import BASE
from tests.seeing import VISION

TOL = 1e-5
TEXT = BASE | dict(num_hidden_layers=1, vocab_size=64, hidden_size=40, model_type="deepseek_v3")
SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "real head width": dict(vt_hidden_size=144, mm_hidden_size=144, vt_num_attention_heads=2, vt_num_hidden_layers=2),
    "odd widths": dict(
        vt_hidden_size=60, mm_hidden_size=60, vt_num_attention_heads=3, vt_intermediate_size=37, patch_size=5,
        init_pos_emb_height=7, init_pos_emb_width=7,
    ),
}  # fmt: skip
ITEMS: dict[str, list[Grid]] = {
    "one token": [(1, 2, 2)],
    "the table's own size": [(1, 8, 8)],
    "smaller, larger and long": [(1, 6, 4), (1, 12, 22), (1, 2, 40), (1, 34, 2)],
    "several of one size": [(1, 4, 6), (1, 4, 6), (1, 6, 4), (1, 8, 8)],
    "video chunks": [(4, 4, 6), (4, 4, 6), (3, 4, 6), (1, 10, 4), (2, 2, 2)],
}


def write(path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint with Moonshot's names and spellings, of a tower alone."""
    vision, tensors = seeing.tower(TEXT["hidden_size"], **changes)
    config = {
        "model_type": "kimi_k25", "text_config": TEXT, "vision_config": vision, "tie_word_embeddings": False,
        "architectures": ["KimiK25ForConditionalGeneration"],
    }  # fmt: skip
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.fixture(scope="module", params=SHAPES)
def towers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[MoonVit, Any]:
    """Ours, and transformers' model."""
    path = tmp_path_factory.mktemp("tower")
    write(path, **SHAPES[request.param])
    reference = seeing.reference_tower(path, VISION | SHAPES[request.param], TEXT)
    return MoonVit(*load_moonvit(path, dtype=torch.float32, device="cpu")), reference


def pixels_of(tower: MoonVit, grids: list[Grid], seed: int = 0) -> torch.Tensor:
    """Random uint8 patches."""
    side = tower.config.patch_size
    shape = (sum(map(math.prod, grids)), 3, side, side)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("items", ITEMS)
@torch.no_grad()
def test_rows_equal_transformers(towers: tuple[MoonVit, Any], items: str) -> None:
    tower, reference = towers
    grids = ITEMS[items]
    patches = pixels_of(tower, grids)
    half = (0.5,) * 3
    got = tower(normalised(patches, half, half, torch.float32), grids)
    parts = (patches.double() / 127.5 - 1).float().split([math.prod(g) for g in grids])
    rows = []
    for _, some in groupby(zip(grids, parts, strict=True), key=lambda item: item[0][0]):
        sizes, chosen = zip(*some, strict=True)  # transformers merges items only of as many frames each
        seen = reference.vision_tower(torch.cat(chosen), grid_thw=torch.tensor(sizes))
        rows.append(reference.mm_projector(seen.pooler_output).squeeze(1))
    expected = torch.cat(rows)
    assert got.shape == (sum(h * w // 4 for _, h, w in grids), TEXT["hidden_size"])
    assert expected.abs().mean() > 0.1, "too small for the tolerance to mean anything"
    torch.testing.assert_close(got, expected, rtol=0, atol=TOL)


@torch.no_grad()
def test_items_do_not_see_each_other(towers: tuple[MoonVit, Any]) -> None:
    """A picture's rows do not depend on which others are in the call, so they may be cached by its digest."""
    tower, _ = towers
    grids = [g for some in ITEMS.values() for g in some]
    pixels = normalised(pixels_of(tower, grids, 1), (0.5,) * 3, (0.5,) * 3, torch.float32)
    alone = [tower(part, [grid]) for part, grid in zip(pixels.split([math.prod(g) for g in grids]), grids, strict=True)]
    torch.testing.assert_close(tower(pixels, grids), torch.cat(alone), rtol=0, atol=TOL)


@torch.no_grad()
def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    write(tmp_path)
    grids = ITEMS["video chunks"]
    exact, rounded = (MoonVit(*load_moonvit(tmp_path, dtype=d, device="cpu")) for d in (torch.float32, torch.bfloat16))
    patches = pixels_of(exact, grids)
    want, got = (t(normalised(patches, (0.5,) * 3, (0.5,) * 3, t.weights.norm.dtype), grids) for t in (exact, rounded))
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize(
    ("count", "grids"),
    [(4, [(1, 2, 4)]), (6, [(1, 3, 2)]), (20, [(5, 2, 2)]), (1028, [(1, 514, 2)]), (0, [(0, 2, 2)])],
    ids=["too few patches", "odd side", "five frames", "514 rows", "no frame"],
)
def test_impossible_grids_are_refused(tmp_path: Path, count: int, grids: list[Grid]) -> None:
    write(tmp_path)
    tower = MoonVit(*load_moonvit(tmp_path, dtype=torch.float32, device="cpu"))
    with pytest.raises(ValueError, match="patches"):
        tower(torch.zeros(count, 3, 14, 14), grids)


@torch.no_grad()
def test_an_image_file_becomes_rows(tmp_path: Path) -> None:
    """From the file's bytes through the worker: as many rows as its tokens, and those of its pixels."""
    write(tmp_path)
    tower = MoonVit(*load_moonvit(tmp_path, dtype=torch.float32, device="cpu"))
    limits, image = Limits.from_directory(tmp_path), scene(130, 50)
    with Decoder(limits) as decoder:
        picture = decoder.decode(file(image))
    patches = torch.tensor(picture.patches)
    rows = tower(normalised(patches, limits.image_mean, limits.image_std, torch.float32), [picture.grid])
    assert rows.shape == (picture.tokens, 40) and picture.tokens == 10
    padded = torch.full((3, 56, 140), -1.0)  # black
    padded[:, :50, :130] = torch.tensor(np.asarray(image)).permute(2, 0, 1) / 127.5 - 1
    by_hand = padded.unfold(1, 14, 14).unfold(2, 14, 14).permute(1, 2, 0, 3, 4).flatten(0, 1)
    torch.testing.assert_close(rows, tower(by_hand, [(1, 4, 10)]), rtol=0, atol=TOL)


def test_every_field_is_in_the_table_of_names() -> None:
    block, ends = ({e.field for e in entries} for entries in (names.VISION_BLOCK, names.VISION_ENDS))
    assert block == set(Block.__dataclass_fields__)
    assert ends == set(MoonVitWeights.__dataclass_fields__) - {"blocks"}


def test_both_spellings_of_a_configuration_are_one(tmp_path: Path) -> None:
    write(tmp_path)
    read = MoonVitConfig.from_directory(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    other = {"projection_hidden_size": 48, "projection_layer_norm_eps": 1e-5, "text_config": TEXT}
    other["vision_config"] = {
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 48, "intermediate_size": 56, "merge_kernel_size": [2, 2],
        "num_attention_heads": 4, "num_hidden_layers": 3, "patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8,
        "pos_emb_time": 4, "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }  # fmt: skip
    assert MoonVitConfig.from_dict(other) == read
    for key, value, says in (
        ("merge_type", "none", "merge_type='none' is not served; served: 'sd2_tpool'"),
        ("merge_kernel_size", [3, 3], "served: (2, 2)"),
        ("vt_hidden_size", None, "vt_hidden_size is missing"),
        ("vt_hidden_size", 46, "multiple of 4"),
        ("mm_hidden_size", 50, "mm_hidden_size=50 must be 48"),
        ("text_hidden_size", 41, "text_hidden_size=41 must be 40"),
        ("rope_parameters", {"rope_theta": 5.0}, "rope_theta=5.0 is not served"),
        ("rope_parameters", 3, "must be an object"),
    ):
        broken = data | {"vision_config": data["vision_config"] | {key: value}}
        with pytest.raises(CheckpointError) as e:
            MoonVitConfig.from_dict(broken)
        assert says in str(e.value) and "\n" not in str(e.value), e.value
    with pytest.raises(CheckpointError, match="no vision model's"):
        MoonVitConfig.from_dict({"text_config": TEXT})


def test_a_wrong_tower_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    name = "vision_tower.encoder.blocks.1.wo.bias"
    for change, says in (
        ({name: None}, f"lacks 1 tensor ({name})"),
        ({name: torch.zeros(47)}, f"has {name} of shape [47], not [48]"),
        ({name: torch.zeros(48, dtype=torch.int32)}, f"has {name} as int32"),
        ({"vision_tower.encoder.blocks.3.wo.bias": torch.zeros(48)}, "no part of the tower in config.json"),
        ({"mm_projector.linear_1.bias": torch.zeros(192)}, "two names of the same tensor"),
    ):
        changed = {k: v for k, v in (tensors | change).items() if v is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as e:
            load_moonvit(tmp_path, dtype=torch.float32, device="cpu")
        assert says in str(e.value), e.value


def test_spellings_and_leftovers_of_other_converters_are_read(tmp_path: Path) -> None:
    """linear_1 and linear_2 of the projector; the time table, which its formula replaces."""
    tensors = write(tmp_path)
    _, plain = load_moonvit(tmp_path, dtype=torch.float32, device="cpu")
    for i, theirs in ((0, "linear_1"), (2, "linear_2")):
        for part in ("weight", "bias"):
            tensors[f"mm_projector.{theirs}.{part}"] = tensors.pop(f"mm_projector.proj.{i}.{part}")
    tensors["vision_tower.patch_embed.pos_emb.time_weight"] = torch.ones(4, 1, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    _, other = load_moonvit(tmp_path, dtype=torch.float32, device="cpu")
    assert torch.equal(plain.linear0, other.linear0) and torch.equal(plain.linear1_bias, other.linear1_bias)
