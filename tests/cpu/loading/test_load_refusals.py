"""Loading what cannot be served: each kind of damage is one clear error."""

import json
import threading

import pytest
import torch

from perilune.core.errors import CheckpointError, ConfigError
from perilune.formats import fp8_block, fp8_scaled, int4_compact, nvfp4, nvfp4_packed
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.writer import write
from perilune.loading.weights_plan import WeightsPlan
from perilune.model.config import KimiConfig
from perilune.model.names import expected
from tests.cpu.loading import test_load
from tests.cpu.loading.test_load import CONFIG, EXPERT, names_of, put, quantised, read, refused

given = test_load.given


def test_missing_extra_and_misshapen(given, tmp_path):
    less = {k: v for k, v in given.items() if k not in (f"{EXPERT}.weight", "lm_head.weight")}
    refused(put(tmp_path, less), "lacks 2 tensors", f"{EXPERT}.weight", "lm_head.weight")
    many = {k: v for k, v in given.items() if ".experts." not in k}
    refused(put(tmp_path, many), "lacks 24 tensors", "and 21 more")
    refused(put(tmp_path, given | {"model.layers.3.x": torch.ones(1)}), "holds 1 tensor (model.layers.3.x)")
    refused(
        put(tmp_path, given | {"model.norm.weight": torch.ones(65)}),
        "tensor model.norm.weight has shape [65], config.json asks for [64]",
    )
    whole = given | {"model.norm.weight": torch.ones(64, dtype=torch.int32)}
    refused(put(tmp_path, whole), "tensor model.norm.weight is int32, not bfloat16 or")
    mixed = given | {"language_model.model.norm.weight": torch.ones(64)}
    refused(put(tmp_path, mixed), "lacks", "language_model.model.embed_tokens.weight")


def test_int4_inconsistencies(given, tmp_path):
    experts = [n.removesuffix(".weight") for n in given if ".mlp.experts." in n]
    good = quantised(given, *experts)
    read(put(tmp_path, good))
    wrong = {
        f"{EXPERT}.weight_shape": (torch.tensor([64, 32]), "says [64, 32], the packed weight beside it is [32, 64]"),
        f"{EXPERT}.weight_scale": (torch.full((32, 2), float("inf")).bfloat16(), "scales that are not finite"),
        f"{EXPERT}.weight_packed": (torch.zeros(32, 4, dtype=torch.int32), "has shape [32, 4]"),
    }
    for name, (tensor, words) in wrong.items():
        refused(put(tmp_path, good | {name: tensor}), name, words)
    refused(put(tmp_path, good | {f"{EXPERT}.weight_scale": torch.ones(32, 4).bfloat16()}), "asks for [32, 2]")
    refused(put(tmp_path, {k: v for k, v in good.items() if k != f"{EXPERT}.weight_scale"}), f"{EXPERT}.weight_scale")
    refused(put(tmp_path, good | {f"{EXPERT}.weight": given[f"{EXPERT}.weight"]}), f"holds 1 tensor ({EXPERT}.weight)")
    refused(put(tmp_path, quantised(given, *experts[1:])), "must share one format, found dense and int4")
    config = CONFIG | {"moe_intermediate_size": 40}
    tensors = {name: torch.ones(shape) for name, shape in expected(KimiConfig.from_dict(config)).items()}
    down = "model.layers.1.mlp.experts.0.down_proj"
    tensors[f"{down}.weight_packed"] = torch.zeros(64, 5, dtype=torch.int32)
    del tensors[f"{down}.weight"]
    refused(put(tmp_path, tensors, config), "multiples of 32, not 40")
    kv_b = quantised(given, "model.layers.0.self_attn.kv_b_proj")
    kv_b["model.layers.0.self_attn.kv_b_proj.weight_scale"][0] = float("nan")
    refused(put(tmp_path, kv_b), "kv_b_proj.weight_scale", "not finite")


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "fp8"}, "'fp8 without blocks'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt FP8'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'compressed-tensors float-quantized'"),
    ],
)
def test_unserved_quantisation_declared(given, tmp_path, block, name):
    path = put(tmp_path, given, CONFIG | {"quantization_config": block})
    refused(path, f"quantisation {name} is not served", "INT4 pack-quantized", "NVFP4 in groups of 16")
    put(tmp_path, given)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    refused(tmp_path, "'modelopt W4A8_AWQ' is not served")


NAN, INF = float("nan"), float("inf")
DAMAGE = [
    # module, suffix, what is stored instead (None: nothing), words of the error
    (fp8_block, ".weight_scale_inv", None, "lacks 1 tensor"),
    (fp8_block, ".weight_scale_inv", torch.tensor([[NAN]]), "holds scales that are not finite"),
    (fp8_block, ".weight_scale_inv", torch.ones(1, 1).half(), "is float16, not float32"),
    (fp8_block, ".weight_scale_inv", torch.ones(1, 2), "has shape [1, 2], config.json asks for [1, 1]"),
    (fp8_block, ".weight", torch.full((32, 64), NAN).to(torch.float8_e4m3fn), "holds nan"),
    (fp8_block, ".weight", torch.ones(32, 64).to(torch.float8_e5m2), "is float8_e5m2, not float8_e4m3fn"),
    (fp8_block, ".weight", torch.ones(32, 32).to(torch.float8_e4m3fn), "has shape [32, 32]"),
    (nvfp4, ".weight_scale", None, "lacks 1 tensor"),
    (nvfp4, ".weight_scale_2", None, "lacks 1 tensor"),
    (nvfp4, ".weight_scale", torch.full((32, 4), NAN).to(torch.float8_e4m3fn), "holds scales that are not finite"),
    (nvfp4, ".weight_scale", torch.ones(32, 4), "is float32, not float8_e4m3fn"),
    (nvfp4, ".weight_scale", torch.ones(32, 2).to(torch.float8_e4m3fn), "asks for [32, 4]"),
    (nvfp4, ".weight_scale_2", torch.tensor(INF), "holds scales that are not finite"),
    (nvfp4, ".weight_scale_2", torch.ones(2), "has shape [2], config.json asks for []"),
    (nvfp4, ".weight", torch.zeros(32, 16, dtype=torch.uint8), "asks for [32, 32]"),
    (nvfp4_packed, ".weight_global_scale", None, "lacks 1 tensor"),
    (nvfp4_packed, ".weight_global_scale", torch.zeros(1), "is 0, and weights are divided by it"),
    (nvfp4_packed, ".weight_global_scale", torch.tensor([-INF]), "holds scales that are not finite"),
    (nvfp4_packed, ".weight_global_scale", torch.ones(1).double(), "is float64, not float32"),
    (int4_compact, ".weight_scale_row", None, "lacks 1 tensor"),
    (int4_compact, ".weight_shape", None, "lacks 1 tensor"),
    (int4_compact, ".weight_scale_row", torch.full((32,), INF).bfloat16(), "holds scales that are not finite"),
    (int4_compact, ".weight_scale_row", torch.ones(32), "is float32, not bfloat16"),
    (int4_compact, ".weight_scale", torch.zeros(32, 2, dtype=torch.uint8), "holds scales of 0, not 1 to 255"),
    (int4_compact, ".weight_shape", torch.tensor([64, 32]), "says [64, 32], the packed weight beside it is [32, 64]"),
]


@pytest.mark.parametrize("linear", [EXPERT, "model.layers.0.self_attn.q_a_proj"])
@pytest.mark.parametrize(("module", "suffix", "instead", "words"), DAMAGE)
def test_damaged_quantised_tensors(given, tmp_path, linear, module, suffix, instead, words):
    """The same one line whether a layer is kept packed or dequantised; both are [32, 64]."""
    experts = names_of(given, ".mlp.experts.") if linear == EXPERT else [linear]
    tensors = quantised(given, *experts, module=module)
    del tensors[linear + suffix]
    if instead is not None:
        tensors[linear + suffix] = instead
    refused(put(tmp_path, tensors), linear + suffix, words)


def test_widths_a_format_cannot_have(tmp_path):
    config = CONFIG | {"moe_intermediate_size": 40}
    tensors = {name: torch.ones(shape) for name, shape in expected(KimiConfig.from_dict(config)).items()}
    tensors["model.layers.1.mlp.experts.0.down_proj.weight"] = torch.zeros(64, 20, dtype=torch.uint8)
    refused(put(tmp_path, tensors, config), "experts.0.down_proj", "multiples of 16, not 40")


def test_truncated_quantised_checkpoint(given, tmp_path):
    write(tmp_path, given.items(), config=CONFIG, form="nvfp4")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    refused(tmp_path, f"{len(whole)} bytes expected, {len(whole) - 100} found")


def test_directory_errors(given, tmp_path):
    refused(tmp_path / "absent", "is not a directory")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "only safetensors")
    put(tmp_path, given, CONFIG | {"model_type": "qwen3"})
    refused(tmp_path, "model_type 'qwen3'")
    put(tmp_path, given)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, "model.safetensors is truncated", f"{len(whole)} bytes expected, {len(whole) // 2} found")


def test_first_error_stops_the_rest(given, tmp_path, monkeypatch):
    """A failing read is raised as it is, no further tensor is read, and no thread is left behind."""
    put(tmp_path, given)
    real, calls = Checkpoint.read_into, []

    def fail(self, info, out, start=0):
        calls.append(info.name)
        if len(calls) == 5:
            raise CheckpointError(f"cannot read {info.name}")
        real(self, info, out, start)

    monkeypatch.setattr(Checkpoint, "read_into", fail)
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="cannot read"):
        read(tmp_path, threads=1)
    assert len(calls) == 5
    calls.clear()
    with pytest.raises(CheckpointError, match="cannot read"):
        read(tmp_path, threads=4)
    assert threading.active_count() == before


def test_device_that_cannot_hold_them(given, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory\nlong story")

    monkeypatch.setattr(WeightsPlan, "_empty", full)
    refused(put(tmp_path, given), "cannot allocate the weights", "float32 on cpu: out of memory", error=ConfigError)


def test_experts_in_a_format_that_has_no_record(tmp_path, given):
    rows = dict(given)
    for name in names_of(given, ".mlp.experts."):
        rows |= fp8_scaled.encode(name, rows.pop(f"{name}.weight"), rows=True)
    says = "model.layers.1.mlp.experts: routed experts in float-quantized by rows are not served; served: dense, int4,"
    refused(put(tmp_path, rows), says)
