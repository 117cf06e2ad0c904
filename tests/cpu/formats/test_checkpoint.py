"""Checkpoint files: what is written is read back, what is declared is believed or refused, and damage is named."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune.core.errors import CheckpointError
from perilune.core.jsonfile import write_object
from perilune.formats import fp8_block, int4, int4_compact, nvfp4, nvfp4_packed, scheme
from perilune.formats.checkpoint import INDEX, SINGLE, Checkpoint
from perilune.formats.served import format_of, require_served
from perilune.formats.writer import Writer, with_quantization, write
from tests.cpu.formats.test_formats import randn


def tensors():
    yield "model.embed_tokens.weight", randn(50, 32, seed=1)
    for e in range(3):
        yield f"model.layers.1.mlp.experts.{e}.up_proj.weight", randn(8, 64, seed=2 + e)
    yield "model.layers.1.mlp.shared_experts.up_proj.weight", randn(8, 64, seed=6)
    yield "model.layers.1.mlp.gate.e_score_correction_bias", randn(3, seed=7)


@pytest.mark.parametrize("shard_bytes", [1, 2000, 10**9])
@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_round_trip(tmp_path, form, shard_bytes):
    write(tmp_path, tensors(), config={"model_type": "kimi_k2"}, form=form, shard_bytes=shard_bytes)
    given = dict(tensors())
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.nbytes == sum(t.nbytes for t in checkpoint.tensors.values())
        stored = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert stored["model.embed_tokens.weight"].equal(given["model.embed_tokens.weight"].bfloat16())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert stored[bias].equal(given[bias])
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert stored[shared].equal(given[shared].bfloat16())
    for e in range(3):
        name = f"model.layers.1.mlp.experts.{e}.up_proj"
        w = given[f"{name}.weight"]
        if form == "bf16":
            assert stored[f"{name}.weight"].equal(w.bfloat16())
        else:
            packed, scale = int4.quantize(w)
            assert f"{name}.weight" not in stored and stored[f"{name}.weight_shape"].tolist() == [8, 64]
            assert stored[f"{name}.weight_packed"].equal(packed) and stored[f"{name}.weight_scale"].equal(scale)
    config = json.loads((tmp_path / "config.json").read_text())
    assert scheme.declared(config, config, None, where="") == {"bf16": scheme.DENSE, "int4": scheme.INT4}[form]

    files = sorted(p.name for p in tmp_path.iterdir())
    if shard_bytes == 10**9:
        assert files == ["config.json", SINGLE]
    else:
        count = len(files) - 2
        assert count == (len(stored) if shard_bytes == 1 else count) and count > 1
        assert files == [
            "config.json",
            *(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)),
            INDEX,
        ]
        if shard_bytes == 2000:
            by_file = json.loads((tmp_path / INDEX).read_text())["weight_map"]
            sizes = [
                [stored[n].nbytes for n, f in by_file.items() if f == file] for file in sorted(set(by_file.values()))
            ]
            assert all(sum(s) <= 2000 or len(s) == 1 for s in sizes)
    # The reference library reads the same values, from files without a reserve in the header.
    for file in tmp_path.glob("*.safetensors"):
        theirs = load_file(file)
        assert all(stored[name].equal(t) for name, t in theirs.items())
        assert file.stat().st_size < sum(t.nbytes for t in theirs.values()) + 4096


FORMS = {
    "int4-compact": (int4_compact, scheme.INT4_COMPACT),
    "fp8-block": (fp8_block, scheme.FP8_BLOCK),
    "nvfp4": (nvfp4, scheme.NVFP4),
    "nvfp4-pack-quantized": (nvfp4_packed, scheme.NVFP4_PACKED),
}


@pytest.mark.parametrize("form", FORMS)
def test_round_trip_of_other_forms(tmp_path, form):
    """Names, types and shapes are those the format's reader asks for; values decode to the quantiser's."""
    module, name = FORMS[form]
    config = {"text_config": {"a": 1, "quantization_config": {"quant_method": "fp8"}}}
    write(tmp_path, tensors(), config=config, form=form)
    given = dict(tensors())
    expert, shared = "model.layers.1.mlp.experts.1.up_proj", "model.layers.1.mlp.shared_experts.up_proj"
    with Checkpoint.open(tmp_path) as checkpoint:
        for linear in (expert, shared) if form == "fp8-block" else (expert,):
            assert format_of(checkpoint.tensors, linear) == name
            wanted = {s: p for s, p in module.parts((8, 64)).items() if not p.unread}
            stored = {n.removeprefix(linear): n for n in checkpoint.tensors if n.startswith(f"{linear}.")}
            assert stored.keys() == wanted.keys()
            for suffix, part in wanted.items():
                info = checkpoint.info(linear + suffix)
                assert part.fits(info.shape) and info.dtype in part.dtypes
                assert part.fault is None or part.fault(checkpoint.read(info.name)) is None
            parts = {suffix: checkpoint.read(full) for suffix, full in stored.items()}
            again = {k.removeprefix("x"): v for k, v in module.encode("x", given[f"{linear}.weight"])}
            assert torch.equal(module.decode(parts, torch.float32), module.decode(again, torch.float32))
            w = given[f"{linear}.weight"]
            assert (module.decode(parts, torch.float32) - w).norm() < 0.15 * w.norm()
        assert (format_of(checkpoint.tensors, shared) == scheme.DENSE) == (form != "fp8-block")
        assert format_of(checkpoint.tensors, "model.embed_tokens") == scheme.DENSE
    written = json.loads((tmp_path / "config.json").read_text())
    assert scheme.declared(written, written["text_config"], None, where="") == name
    assert ("quantization_config" in written) == (form == "nvfp4")


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "fp8"}, "fp8 without blocks"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "fp8 with weight_block_size=[64, 128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fp8 with fmt=e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt NVFP4_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "modelopt NVFP4 with group_size=32"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            "modelopt NVFP4 with num_bits=8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
            },
            "nvfp4-pack-quantized with group_size=32",
        ),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "compressed-tensors mixed-precision"),
    ],
)
def test_unlike_declarations_are_named(block, name):
    assert scheme.declared({"quantization_config": block}, {}, None, where="") == name
    with pytest.raises(CheckpointError, match="is not served; served: plain bfloat16, FP8"):
        require_served(name, "here")


def test_modelopt_declarations():
    """As NVIDIA's exports spell them, in either file."""
    number = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    block = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"weights": number, "input_activations": number, "targets": ["Linear"]}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "ignore": ["lm_head"],
    }
    assert scheme.declared({"quantization_config": block}, {}, None, where="") == scheme.NVFP4
    hf = {
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []}
    }
    stale = {"quantization_config": int4.quantization_config()}
    assert scheme.declared({}, stale, hf, where="") == scheme.NVFP4
    hf["quantization"]["quant_algo"] = None
    assert scheme.declared({}, stale, hf, where="") == scheme.INT4
    hf["quantization"] |= {"quant_algo": "NVFP4", "group_size": 32}
    assert scheme.declared({}, stale, hf, where="") == "modelopt NVFP4 with group_size=32"


def test_large_shards_keep_their_reserve(tmp_path, monkeypatch):
    """Where the reserve for the header is little beside the data, the header is padded instead of moving the data."""
    monkeypatch.setattr("perilune.formats.writer._ROOM", 4096)
    big = torch.arange(1 << 19, dtype=torch.int16).view(1 << 10, -1)
    with Writer(tmp_path) as out:
        out.add("a", torch.tensor(3.5))
        out.add("big", big)
        out.add("none", torch.zeros(0, 4))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.read("big").equal(big)
        assert checkpoint.read("a").item() == 3.5 and checkpoint.read("a").shape == ()
        assert checkpoint.read("none").shape == (0, 4)
        assert checkpoint.tensors["a"].offset == 8 + 4096


def test_many_names_end_a_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("perilune.formats.writer._ROOM", 4096)
    with Writer(tmp_path) as out:
        for i in range(40):
            out.add(f"{i:03d}", torch.tensor([i]))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert [checkpoint.read(f"{i:03d}").item() for i in range(40)] == list(range(40))
        assert len({t.file for t in checkpoint.tensors.values()}) == 3


def test_writer_refuses_and_cleans_up(tmp_path):
    def failing():
        yield "a", torch.zeros(4)
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        write(tmp_path, failing(), config={})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="'a' is written twice"), Writer(tmp_path) as out:
        out.add("a", torch.zeros(1))
        out.add("a", torch.zeros(1))
    with pytest.raises(CheckpointError, match="complex64"), Writer(tmp_path) as out:
        out.add("a", torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match="without tensors"), Writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, tensors(), config={})
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        Writer(tmp_path)
    with pytest.raises(CheckpointError, match="cannot make directory"):
        Writer(tmp_path / SINGLE / "x")


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("last", [INDEX, "config.json"])
def test_a_disk_that_is_full_at_the_end_leaves_nothing(tmp_path, monkeypatch, last, killed):
    def full(path, data):
        if path.name == last:
            raise OSError(28, "No space left on device")
        write_object(path, data)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left on device"):
        patch.setattr("perilune.formats.writer.write_object", full)
        if killed:
            patch.setattr(Writer, "remove", lambda _: None)
        write(tmp_path, tensors(), config={}, shard_bytes=2000)
    assert killed or list(tmp_path.iterdir()) == []
    write(tmp_path, tensors(), config={})
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", SINGLE}
    (tmp_path / ".unfinished").touch()
    with pytest.raises(CheckpointError, match="already holds"):
        Writer(tmp_path)


def test_quantisation_block_goes_to_the_text_level():
    block = int4.quantization_config()
    source = {"quantization_config": {"quant_method": "fp8"}, "text_config": {"a": 1, "quantization_config": {}}}
    assert with_quantization(source, block) == {"text_config": {"a": 1, "quantization_config": block}}
    assert with_quantization(source, None) == {"text_config": {"a": 1}}
    assert "quantization_config" in source and "quantization_config" in source["text_config"]
    assert with_quantization({"a": 1}, block) == {"a": 1, "quantization_config": block}


def test_official_quantization_config(kimi_k26):
    text = json.loads((kimi_k26 / "config.json").read_text())["text_config"]
    assert int4.quantization_config() == text["quantization_config"]


def test_format_of(tmp_path):
    save_file(
        {
            "d.weight": torch.zeros(2, 32),
            "i.weight_packed": torch.zeros(2, 4, dtype=torch.int32),
            "i.weight_scale": torch.zeros(2, 1, dtype=torch.bfloat16),
            "c.weight_packed": torch.zeros(2, 4, dtype=torch.int32),
            "c.weight_scale": torch.zeros(2, 1, dtype=torch.uint8),
            "p.weight_packed": torch.zeros(2, 16, dtype=torch.uint8),
            "n.weight": torch.zeros(2, 16, dtype=torch.uint8),
            "f.weight": torch.zeros(2, 32).to(torch.float8_e4m3fn),
        },
        tmp_path / SINGLE,
    )
    with Checkpoint.open(tmp_path) as checkpoint:
        names = {x: format_of(checkpoint.tensors, x) for x in "dicpnfx"}
    assert names == {
        "d": scheme.DENSE,
        "i": scheme.INT4,
        "c": scheme.INT4_COMPACT,
        "p": scheme.NVFP4_PACKED,
        "n": scheme.NVFP4,
        "f": scheme.FP8_BLOCK,
        "x": None,
    }


# --- damage ------------------------------------------------------------------------------------------------------


def refused(path, *words):
    with pytest.raises(CheckpointError) as e:
        Checkpoint.open(path)
    for word in words:
        assert word in str(e.value), str(e.value)
    assert "\n" not in str(e.value)


def with_header(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype="F32", shape=(1,), span=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{nonsense", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 200_000, "not valid JSON"),
        ({"a": 1}, "'a' has no description"),
        ({"a": entry("F31")}, "unknown dtype 'F31'"),
        ({"a": entry(shape=(-1,))}, "has shape [-1]"),
        ({"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}, "has shape 3"),
        ({"a": entry(span=(4, 0))}, "data_offsets [4, 0]"),
        ({"a": entry(span=(0, 4, 8))}, "data_offsets"),
        ({"a": entry(shape=(2,))}, "needs 8 bytes, its data_offsets give 4"),
        ({"a": entry(shape=(10**30,))}, "needs 4"),
        ({"a": entry(), "b": entry(span=(2, 6))}, "'a' and 'b' overlap"),
        ({"a": entry(), "b": entry(span=(8, 12))}, "'a' and 'b' leave a hole"),
        ({"a": entry(shape=(3,), span=(0, 12))}, "bytes expected"),
        ({}, "bytes expected"),
    ],
)
def test_damaged_headers(tmp_path, header, words):
    with_header(tmp_path, header, bytes(8))
    refused(tmp_path, SINGLE, words)


def test_damaged_files(tmp_path):
    refused(tmp_path / "absent", "absent is not a directory")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "only safetensors")
    file = tmp_path / SINGLE
    save_file({"a": randn(100)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    refused(
        tmp_path, "truncated", f"expected, {len(whole) - 10} found: remove it and download it again, or convert again"
    )
    file.write_bytes(whole + b"x")
    refused(tmp_path, "damaged", f"{len(whole) + 1} found")
    file.write_bytes(whole[:20])
    refused(tmp_path, "truncated", "20 found")
    file.write_bytes(whole[:5])
    refused(tmp_path, "truncated", "5 bytes")
    file.write_bytes(b"\xff" * 64)
    refused(tmp_path, "exceeds 100000000")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(tmp_path, "Git LFS pointer")


def test_truncated_after_opening(tmp_path):
    save_file({"a": randn(100), "b": randn(100)}, tmp_path / SINGLE)
    with Checkpoint.open(tmp_path) as checkpoint:
        size = (tmp_path / SINGLE).stat().st_size
        with (tmp_path / SINGLE).open("r+b") as f:
            f.truncate(size - 100)
        assert checkpoint.read("a").shape == (100,)
        with pytest.raises(CheckpointError, match=r"truncated: 400 bytes expected at byte \d+, 300 found"):
            checkpoint.read("b")
        with pytest.raises(CheckpointError, match="'c' is missing"):
            checkpoint.read("c")


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path, tensors(), config={}, shard_bytes=2100)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    return tmp_path, index


def test_missing_shard(sharded):
    path, index = sharded
    shard = sorted(set(index.values()))[0]
    (path / shard).unlink()
    refused(path, f"lacks 1 shard ({shard})", "download is incomplete: repeat it")


def test_index_disagrees(sharded):
    path, index = sharded

    def put(weight_map):
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    first, last = index[name], sorted(set(index.values()))[-1]
    assert sum(f == first for f in index.values()) > 1 and first != last
    put(index | {name: last})
    refused(path, f"places tensor '{name}' in {last}, but it is in {first}: download {INDEX} and")
    put(index | {"extra": last})
    refused(path, f"places tensor 'extra' in {last}, but none of the listed shards has it")
    put({n: f for n, f in index.items() if n != name})
    refused(path, f"1 tensor ({name})", f"does not place there: download {INDEX} and")
    for bad in ("../x.safetensors", "/etc/passwd", "model.bin", 3, None):
        put(index | {"extra": bad})
        refused(path, "weight_map['extra']", "not a .safetensors file name")
    put([])
    refused(path, "weight_map must be a non-empty object")
    (path / INDEX).write_text("{")
    refused(path, INDEX, "not valid JSON")


def test_stray_tensor_in_a_shard(sharded):
    path, index = sharded
    shard = index["model.embed_tokens.weight"]
    tensors_there = load_file(path / shard)
    save_file(tensors_there | {"stray": torch.zeros(1)}, path / shard)
    refused(path, "the shards hold 1 tensor (stray)")
