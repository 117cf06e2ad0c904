"""The table of checkpoint names against the weights records, the real checkpoints and the split over ranks."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from perilune.formats import scheme
from perilune.formats.served import SERVED
from perilune.model import eagle3, names, weights
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import Eagle3Config
from tests.cpu.doctor.test_real_tables import FOLDER, tables_module
from tests.cpu.model.test_eagle3 import MHA, MLA, TARGET

PACKAGE = Path(names.__file__).parents[1]
real = pytest.mark.skipif(not (FOLDER / "tables.py").is_file(), reason=f"the real tables are not at {FOLDER}")
FORMS = {"Kimi-K2.5": scheme.INT4, "Kimi-K2.5-NVFP4": scheme.NVFP4, "Kimi-K2-Instruct": scheme.FP8_BLOCK}


@pytest.mark.parametrize(("record", "entries", "made"), [
    (weights.Weights, (names.EMBED, *names.ENDS), {"layers"}),
    (weights.Layer, names.NORMS, {"attention", "ffn"}),
    (weights.Attention, names.ATTENTION, {"w_uk", "w_uv", "uv_fp8"}),
    (weights.Mlp, names.MLP, set()),
    (weights.DenseExperts, names.MLP, set()),
    (weights.Moe, names.ROUTER, {"experts", "shared"}),
])  # fmt: skip
def test_every_field_of_the_weights_is_in_the_table(record: Any, entries: Any, made: set[str]) -> None:
    """`made` are records of their own, and w_uk and w_uv, which are kv_b's."""
    fields = {field.name for field in dataclasses.fields(record)}
    assert {entry.field for entry in entries} - {"kv_b"} == fields - made


@pytest.mark.parametrize("raw", [MHA, MLA | {"fc_norm": True, "norm_before_fc": True}], ids=["mha", "mla"])
def test_every_field_of_a_draft_is_in_the_table(raw: dict[str, Any]) -> None:
    config = Eagle3Config.from_dict(raw)
    attention = weights.Attention if config.form == "mla" else eagle3.HeadAttention
    records = (eagle3.Eagle3Weights, attention, weights.Mlp)
    fields = {field.name for record in records for field in dataclasses.fields(record)}
    fields -= {"attention", "mlp", "target_ids", "w_uk", "w_uv", "uv_fp8"}
    if config.form == "mha":
        fields -= {"fc_norms", "joint_norm"}
    assert set(names.draft(config)) - {"kv_b"} == fields


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Every string of a file but its docstrings, pieces of f-strings included."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def test_names_are_spelled_in_one_file() -> None:
    """Outside model/names.py no string holds a checkpoint's name of a tensor or module."""
    entries = (names.EMBED, *names.NORMS, *names.ATTENTION, *names.MLP, *names.ROUTER)
    parts = {part for entry in entries for part in entry.suffix.split(".")} - {"model", "weight", "gate"}
    parts |= {"self_attn", "shared_experts", "k_proj", "v_proj", "midlayer", "vision_tower", "mm_projector"}
    assert {"q_a_proj", "gate_proj", "embed_tokens", "input_layernorm", "e_score_correction_bias"} <= parts
    places = r"model\.layers\.|mlp\.experts|lm_head\.weight|language_model\.|(?:gate|up|down|[kqvo])_proj"
    pattern = re.compile(rf"(?<![a-z0-9_])(?:{'|'.join(parts)})(?![a-z0-9_])|{places}")
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(names.__file__)
        for line, text in strings(path)
        if pattern.search(text)
    ]
    assert found == []


@real
@pytest.mark.parametrize("label", FORMS)
def test_the_table_is_that_of_the_real_checkpoints(label: str) -> None:
    """Both ways: every stored tensor is one of the table's, of the shape its format gives it, and none is missing."""
    table = next(t for name, t in tables_module().tables().items() if name.split()[0].split("/")[1] == label)
    config = KimiConfig.from_dict(table.config)
    tower = {name for name in table.tensors if name.startswith(names.VISION)}
    assert all(any(name.startswith(prefix) for name in tower) for prefix in names.VISION) == config.has_vision
    skipped = {name for name in table.tensors if names.SKIPPED.fullmatch(name)}
    prefix = names.NESTED if config.has_vision else ""
    left = {n.removeprefix(prefix): s for n, (_, s) in table.tensors.items() if n not in tower | skipped}
    assert len(left) + len(tower) + len(skipped) == len(table.tensors)
    quantised = SERVED[FORMS[label]].parts
    for tensor in names.tensors(config):
        if tensor.name in left and left[tensor.name] == tensor.shape and not tensor.entry.linear:
            del left[tensor.name]
            continue
        assert tensor.entry.linear, tensor.name
        linear = tensor.name.removesuffix(".weight")
        plain = left.get(tensor.name) == tensor.shape and linear + ".weight_scale_inv" not in left
        for suffix, part in ({".weight": None} if plain else quantised(tensor.shape)).items():
            assert part is None or part.fits(left[linear + suffix]), linear + suffix
            del left[linear + suffix]
    assert not left


@pytest.fixture(scope="module")
def k25() -> tuple[KimiConfig, dict[str, tuple[int, int, tuple[int, ...]]]]:
    """The configuration of Kimi-K2.5, and of every tensor of its text model (bytes, bytes of a number, shape)."""
    module = tables_module()
    table = next(t for name, t in module.tables().items() if "/Kimi-K2.5 " in name)
    stored = {
        n.removeprefix(names.NESTED): (module.nbytes(d, s), module.WIDTH[d], s) for n, (d, s) in table.tensors.items()
    }
    return KimiConfig.from_dict(table.config), {n: x for n, x in stored.items() if not n.startswith(names.VISION)}


@real
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_hold_every_byte_once_but_what_all_of_them_hold(k25: Any, ranks: int) -> None:
    config, stored = k25
    split = whole = held = 0
    axes: dict[str, int | None] = {}
    for tensor in names.tensors(config):
        axis = axes[tensor.entry.suffix] = tensor.entry.axis
        parts = [tensor.part(rank, ranks) for rank in range(ranks)]
        for along, size in enumerate(tensor.shape):
            cuts = [(part[along].start, part[along].stop) for part in parts]
            if along != axis:
                assert set(cuts) == {(0, size)}
                continue
            assert cuts[0][0] == 0 and cuts[-1][1] == size
            assert all(stop == start for (_, stop), (start, _) in pairwise(cuts))
            assert len({stop - start for start, stop in cuts}) == 1
            assert all(start % (size // tensor.units) == 0 for start, _ in cuts), "a head is cut"
        linear = tensor.name.removesuffix(".weight")
        suffixes = (".weight_packed", ".weight_scale", ".weight_shape") if names.ROUTED in linear else (".weight",)
        for name in [linear + suffix for suffix in suffixes] if tensor.entry.linear else [tensor.name]:
            nbytes, width, shape = stored[name]
            if axis is None or name.endswith("_shape"):  # two numbers that every rank writes anew
                whole, held = whole + nbytes, held + ranks * nbytes
                continue
            split += nbytes
            for part in parts:  # packed numbers and scales are cut where their numbers are
                first, step = part[axis].start * shape[axis], tensor.shape[axis]
                last = part[axis].stop * shape[axis]
                assert first % step == last % step == 0, name
                held += prod(shape) // shape[axis] * (last - first) // step * width
    assert split + whole == sum(nbytes for nbytes, _, _ in stored.values())
    assert held == split + ranks * whole
    assert 0 < whole < 0.005 * split
    assert {suffix for suffix, axis in axes.items() if axis is None} == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "q_a_proj", "q_a_layernorm.weight",
        "kv_a_proj_with_mqa", "kv_a_layernorm.weight", "gate.weight", "gate.e_score_correction_bias",
        "model.norm.weight",
    }  # fmt: skip
    assert {suffix for suffix, axis in axes.items() if axis == 1} == {"o_proj", "down_proj"}


def test_heads_are_not_cut() -> None:
    config = KimiConfig.from_dict(TARGET | {"num_attention_heads": 6})
    q_b = next(tensor for tensor in names.tensors(config) if tensor.entry.field == "q_b")
    assert q_b.part(1, 3)[0] == slice(2 * 16, 4 * 16)
    with pytest.raises(ValueError, match=r"q_b_proj.weight: 6 heads, rows or columns for 4 ranks"):
        q_b.part(0, 4)
