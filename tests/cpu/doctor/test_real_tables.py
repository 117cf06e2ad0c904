"""doctor and survey against the real checkpoints' configurations and tensor tables: every name, type and shape."""

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perilune.cli import doctor
from perilune.doctor import headers as shards_examine
from perilune.doctor import published
from perilune.doctor import tensors as weights_examine
from perilune.doctor.headers import Shards
from perilune.formats.checkpoint import INDEX
from perilune.formats.safetensors_file import DTYPES, TensorInfo
from perilune.formats.served import require_served
from perilune.loading.survey import compare, spell
from perilune.model.config import KimiConfig
from perilune.model.names import SKIPPED, VISION
from perilune.text.family import recognise
from perilune.text.tokenizer import Tokenizer
from tests.conftest import DATA

FOLDER = DATA / "kimi-configs"
Tensors = dict[str, tuple[str, tuple[int, ...]]]

pytestmark = pytest.mark.skipif(
    not (FOLDER / "tables.py").is_file(), reason=f"the real tables are not at {FOLDER} (set PERILUNE_TEST_DATA)"
)


def tables_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kimi_tables", FOLDER / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def _one_vocabulary() -> Iterator[None]:
    """The same one for every checkpoint: read once, it takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        read = Tokenizer.from_directory
        known: dict[Path, Tokenizer] = {}
        patch.setattr(
            Tokenizer,
            "from_directory",
            lambda path: known.setdefault((real := (path / "tiktoken.model").resolve()), known.get(real) or read(path)),
        )
        yield


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return tables_module()


@pytest.fixture(scope="module")
def tables(module: ModuleType) -> Mapping[str, Any]:
    """By the model's name, such as "Kimi-K2.5"."""
    return {label.split()[0].split("/")[1]: table for label, table in module.tables().items()}


def stored(module: ModuleType, tensors: Tensors) -> dict[str, TensorInfo]:
    file = Path("x.safetensors")
    return {n: TensorInfo(n, DTYPES[d], s, file, 0, module.nbytes(d, s)) for n, (d, s) in tensors.items()}


def checkpoint(path: Path, module: ModuleType, table: Any, shards: int, texts: Path) -> int:
    """The checkpoint's headers in so many sparse files of the right size; the number of bytes of its tensors."""
    path.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (path / name).symlink_to(texts / name)
    (path / "config.json").write_text(json.dumps(table.config))
    names = list(table.tensors)
    weight_map, total = {}, sum(module.nbytes(*x) for x in table.tensors.values())
    for i in range(shards):
        header, at = {}, 0
        for name in names[i * len(names) // shards : (i + 1) * len(names) // shards]:
            dtype, shape = table.tensors[name]
            nbytes = module.nbytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header).encode()
        file = path / f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        with file.open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + at)
        weight_map |= dict.fromkeys(header, file.name)
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


# Kimi-K2-Instruct, which has the fewest tensors, as files; the others' tables are handed to doctor.
@pytest.mark.parametrize(("name", "shards", "form", "says"), [
    ("Kimi-K2.5", 64, "int4", {
        "vision": "335 tensors (0.94 GB) read by name, shape and type: pictures are served",
        "inv_freq": "none", "weight_shape": "int32",
        "expert scales": "bfloat16", "router bias": "float32", "KV cache scales": "none",
    }),
    ("Kimi-K2.5-NVFP4", 119, "nvfp4", {
        "vision": "335 tensors (0.94 GB) read by name, shape and type: pictures are served",
        "inv_freq": "none", "weight_shape": "none",
        "expert scales": "float8_e4m3fn", "router bias": "bfloat16", "KV cache scales": "122 tensors",
    }),
    ("Kimi-K2-Instruct", 61, "fp8-block", {
        "vision": "none", "inv_freq": "61 tensors", "weight_shape": "none",
        "expert scales": "float32", "router bias": "float32", "KV cache scales": "none",
    }),
])  # fmt: skip
def test_doctor_knows_every_tensor(
    module: ModuleType, tables: Mapping[str, Any], kimi_k26: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, shards: int, form: str, says: dict[str, str],
) -> None:  # fmt: skip
    table, path = tables[name], tmp_path / name
    total = checkpoint(path, module, table, shards if name == "Kimi-K2-Instruct" else 0, kimi_k26)
    if name != "Kimi-K2-Instruct":
        found = Shards(stored(module, table.tensors), frozenset(), shards, total, ())
        monkeypatch.setattr(shards_examine, "examine", lambda path: found)
    report = doctor.diagnose(path, name, values=False)
    page = "\n".join(doctor.page(report))
    assert report.findings == [], page
    assert f"{table.published_tensors:,} tensors by name, shape and type" in report.sound
    assert f", {form}, 61 layers, 1.026 T parameters, {total / 1e9:.2f} GB in {shards} files" in report.title
    for topic, words in says.items():
        assert words in report.answers[topic], (topic, report.answers[topic])
    assert report.answers["config.json"] == "every value is a published one"
    assert "draft model" in report.answers["draft"] or "repository" in report.answers["draft"]
    weights = next(fits[0].footprint for _, fits in report.rows)
    assert weights.name == "as stored" and weights.per_gpu(1) == pytest.approx(total, rel=0.02)


def cut(table: Any) -> tuple[KimiConfig, Tensors]:
    """Four layers of eight experts of a table: every kind of tensor that it has, vision left out."""
    config = json.loads(json.dumps(table.config))
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 4, "n_routed_experts": 8}
    tensors = {}
    for name, (dtype, shape) in table.tensors.items():
        layer, expert = (re.search(rf"\.{what}\.(\d+)\.", name) for what in ("layers", "experts"))
        if name.startswith(VISION) or (layer and int(layer[1]) > 3) or (expert and int(expert[1]) > 7):
            continue
        tensors[name] = dtype, (8, *shape[1:]) if ".mlp.gate." in name else shape
    return KimiConfig.from_dict(config), tensors


@pytest.mark.parametrize("name", ["Kimi-K2.5", "Kimi-K2.5-NVFP4", "Kimi-K2-Instruct"])
def test_every_mutation_is_found_and_named(module: ModuleType, tables: Mapping[str, Any], name: str) -> None:
    config, tensors = cut(tables[name])

    def faults(changes: Mapping[str, Any]) -> list[str]:
        changed = {n: x for n, x in (tensors | changes).items() if x is not None}
        return compare(stored(module, changed), config)[1]

    assert faults({}) == []
    kinds = {
        re.sub(r"experts\.\d", "experts.3", n): x for n, x in tensors.items() if "layers.0." not in n or ".mlp." in n
    }
    assert len(kinds) > 20
    for tensor, (dtype, shape) in kinds.items():
        ignored = SKIPPED.fullmatch(tensor) or tensor.endswith(".input_scale")
        lacks = f"lacks 1 tensor ({tensor})"
        assert faults({tensor: None}) == ([] if ignored else [lacks])
        other = f"{tensor}x"
        holds = f"holds 1 tensor ({other}) that are no part of the model in config.json"
        if not SKIPPED.fullmatch(tensor):
            expected = [holds] if ignored else [lacks, holds]
            assert faults({tensor: None, other: (dtype, shape)}) == expected, tensor
        if ignored:
            continue
        for wrong in {"I32", "U8", "F8_E4M3", "BF16", "F32"} - {dtype}:
            found = faults({tensor: (wrong, shape)})
            if not found:  # both are converted when they are read
                assert {wrong, dtype} == {"BF16", "F32"}, (tensor, wrong)
            elif "lm_head." in tensor or "layers.0.mlp." in tensor or (dtype == "BF16" and tensor.endswith("weight")):
                # No other layer shows what type it should have, or those that do are plain and it may be quantised.
                linear = tensor.rpartition(".")[0]
                assert all(f"{linear}.weight" in line for line in found), (tensor, found)
            else:
                (line,) = found
                assert line.startswith(f"tensor {tensor} is {spell(DTYPES[wrong])}, not "), (tensor, found)
        (found,) = faults({tensor: (dtype, (*shape, 3))})
        wanted = f"tensor {tensor} has shape {[*shape, 3]}, config.json asks for {list(shape)}"
        assert found == wanted


def test_damage_to_the_vision_tower_is_counted(module: ModuleType, tables: Mapping[str, Any]) -> None:
    """Vision tensors are not read, so their types and shapes do not matter; one under another name is not known."""
    few = {n: x for n, x in tables["Kimi-K2.5"].tensors.items() if "experts." not in n}
    found, _ = compare(stored(module, few), KimiConfig.from_dict(tables["Kimi-K2.5"].config))
    assert (found.vision_tensors, found.vision_bytes) == (335, 942_287_840)
    name = "vision_tower.encoder.blocks.3.wo.bias"
    few["vision." + name] = few.pop(name)
    found, faults = compare(stored(module, few), KimiConfig.from_dict(tables["Kimi-K2.5"].config))
    assert found.vision_tensors == 334 and any("vision." + name in fault for fault in faults)


def test_what_keeps_a_vision_tower_from_being_loaded_is_a_warning(
    module: ModuleType, tables: Mapping[str, Any]
) -> None:
    table, name = tables["Kimi-K2.5"], "vision_tower.encoder.blocks.3.wo.bias"
    vision = {n: x for n, x in table.tensors.items() if n.startswith(VISION)}
    lacking = {n: x for n, x in vision.items() if n != name}
    narrow = table.config | {"vision_config": table.config["vision_config"] | {"vt_num_hidden_layers": 26}}
    other = table.config | {"vision_config": table.config["vision_config"] | {"merge_type": "other"}}
    for tensors, config, unread, topic, says in (
        (vision, table.config, (), "335 tensors (0.94 GB) read by name, shape and type: pictures are served", ""),
        (lacking, table.config, (), "334 tensors (0.94 GB) known, cannot be loaded", f"lacks 1 tensor ({name})"),
        (lacking, table.config, ("x",), "not checked: shards are missing", ""),
        (lacking | {name: ("BF16", (1153,))}, table.config, (), "cannot be loaded", "of shape [1153], not [1152]"),
        (vision, narrow, (), "cannot be loaded", "12 tensors (vision_tower.encoder.blocks.26."),
        (vision, other, (), "cannot be loaded", "merge_type='other' is not served"),
        ({}, table.config, (), "none", "no tensor of one is there"),
        (vision, {}, (), "no vision_config that describes them", ""),
        ({}, {}, (), "none", ""),
    ):
        shards = Shards(stored(module, tensors), frozenset(unread), 64, 0, ())
        answer, findings = weights_examine.tower(shards, config)
        assert topic in answer
        assert [f.severity for f in findings] == ["warning"] * bool(says) and all(says in str(f) for f in findings)


CONFIGS = {
    "moonshotai--Kimi-K2-Instruct": ("fp8-block", (163585,), 131072, 32.0),
    "moonshotai--Kimi-K2.5": ("int4", (163585,), 262144, 64.0),
    "nvidia--Kimi-K2.5-NVFP4": ("nvfp4", (163585,), 262144, 64.0),
    "nvidia--Kimi-K2.6-NVFP4": ("nvfp4", (163586,), 262144, 64.0),
    "nvidia--Kimi-K2.7-Code-NVFP4": ("nvfp4", (163586,), 262144, 64.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configurations(tmp_path: Path, name: str) -> None:
    shutil.copyfile(FOLDER / f"{name}_config.json", tmp_path / "config.json")
    if (extra := FOLDER / f"{name}_hf_quant_config.json").is_file():
        shutil.copyfile(extra, tmp_path / "hf_quant_config.json")
    config = KimiConfig.from_directory(tmp_path)
    require_served(config.quantization, name)
    assert config.yarn is not None and published.differences(config) == []
    said = (config.quantization, config.eos_token_ids, config.max_position_embeddings, config.yarn.factor)
    assert said == CONFIGS[name]
    assert config.has_vision == (name != "moonshotai--Kimi-K2-Instruct")
    assert config.parameters().total == 1_026_408_232_448
    assert recognise(tmp_path).name in ("kimi-k2-instruct", "kimi-k2.6", "kimi-k2.7-code")


def test_every_real_configuration_is_tested() -> None:
    names = {f.name for f in FOLDER.glob("*_config.json") if not f.name.endswith("_hf_quant_config.json")}
    assert names == {f"{name}_config.json" for name in CONFIGS}
