"""Loading: transformers' own checkpoints and ours, in every spelling."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune.cli.shared import synthetic
from perilune.core.errors import CheckpointError
from perilune.engine.step_times import cost_table
from perilune.formats import fp8_block, int4, int4_compact, nvfp4, nvfp4_packed
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.writer import write
from perilune.loading import apart, jobs
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.load import load, survey
from perilune.loading.survey import read_linear
from perilune.loading.weights_plan import WeightsPlan
from perilune.model.config import KimiConfig
from perilune.model.names import expected
from perilune.model.weights import (
    DenseExperts,
    Fp8Experts,
    Int4CompactExperts,
    Int4Experts,
    Mlp,
    Moe,
    NvFp4Experts,
    Weights,
)

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 101,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 4096,
    "eos_token_id": 7,
}
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.fixture(scope="module")
def given():
    """Random float32 weights by name."""
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in expected(KimiConfig.from_dict(CONFIG)).items()}


def put(path: Path, tensors, config=CONFIG):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return path


def quantised(tensors, *names, module=int4):
    result = dict(tensors)
    for name in names:
        result |= module.encode(name, result.pop(f"{name}.weight"))
    return result


def decoded(tensors, name, module):
    """The float32 values of a linear layer stored in the module's format."""
    parts = {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(f"{name}.")}
    return module.decode(parts, torch.float32)


def read(path, dtype=torch.float32, **options):
    return load(path, dtype=dtype, device="cpu", **options)[1]


def refused(path, *words, error=CheckpointError):
    with pytest.raises(error) as e:
        read(path)
    for word in words:
        assert word in str(e.value), str(e.value)
    assert "\n" not in str(e.value)


def check(weights, w, dtype=torch.float32, prefix=""):
    """Every number of dense `weights` is that of the checkpoint `w`, in its place."""

    def at(name):
        return w[f"{prefix}{name}.weight"].to(dtype)

    def mlp(ours, name):
        assert ours.gate_up.weight.equal(torch.cat([at(f"{name}.gate_proj"), at(f"{name}.up_proj")]))
        assert ours.down.weight.equal(at(f"{name}.down_proj"))

    assert weights.embed.equal(at("model.embed_tokens")) and weights.norm.equal(at("model.norm"))
    assert weights.lm_head.weight.equal(at("lm_head"))
    for i, layer in enumerate(weights.layers):
        a, name = layer.attention, f"model.layers.{i}.self_attn"
        assert layer.input_norm.equal(at(f"model.layers.{i}.input_layernorm"))
        assert layer.post_norm.equal(at(f"model.layers.{i}.post_attention_layernorm"))
        assert a.qkv_a.weight.equal(torch.cat([at(f"{name}.q_a_proj"), at(f"{name}.kv_a_proj_with_mqa")]))
        assert a.q_b.weight.equal(at(f"{name}.q_b_proj")) and a.o.weight.equal(at(f"{name}.o_proj"))
        assert a.q_a_norm.equal(at(f"{name}.q_a_layernorm")) and a.kv_a_norm.equal(at(f"{name}.kv_a_layernorm"))
        heads, n, latent = a.w_uk.shape
        v = a.w_uv.shape[2]
        assert a.w_uv.shape == (heads, latent, v) and a.w_uv.is_contiguous() and a.w_uk.is_contiguous()
        kv_b = at(f"{name}.kv_b_proj")
        c = torch.ones(latent, dtype=dtype)
        c[0] = 2
        both = (kv_b.double() @ c.double()).view(heads, n + v)
        assert torch.allclose(a.w_uk.double() @ c.double(), both[:, :n])
        assert torch.allclose(torch.einsum("r,hrv->hv", c.double(), a.w_uv.double()), both[:, n:])
        mlp_name = f"model.layers.{i}.mlp"
        if isinstance(layer.ffn, Mlp):
            mlp(layer.ffn, mlp_name)
            continue
        moe = layer.ffn
        assert moe.gate.equal(w[f"{prefix}{mlp_name}.gate.weight"].float()) and moe.gate.dtype == torch.float32
        assert moe.bias.equal(w[f"{prefix}{mlp_name}.gate.e_score_correction_bias"].float())
        mlp(moe.shared, f"{mlp_name}.shared_experts")
        assert isinstance(moe.experts, DenseExperts)
        for e in range(moe.gate.shape[0]):
            gate, up = at(f"{mlp_name}.experts.{e}.gate_proj"), at(f"{mlp_name}.experts.{e}.up_proj")
            assert moe.experts.gate_up[e].equal(torch.cat([gate, up]))
            assert moe.experts.down[e].equal(at(f"{mlp_name}.experts.{e}.down_proj"))


# --- transformers' checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A random tiny DeepseekV3ForCausalLM as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    keys = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "rope_theta")}
    config = transformers.DeepseekV3Config(
        **keys
        | {
            "num_key_value_heads": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "rope_parameters": rope,
        }
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_()
    path = tmp_path_factory.mktemp("oracle")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_checkpoint(oracle, dtype):
    config, weights = load(oracle, dtype=dtype, device="cpu")
    assert config.yarn.factor == 64.0 and config.eos_token_ids == (7,)
    check(weights, load_file(oracle / "model.safetensors"), dtype)
    assert weights.layers[1].ffn.bias.abs().sum() > 0


def test_transformers_checkpoint_nested(oracle, tmp_path):
    """The K2.5 form: text_config, the language_model. prefix, vision tensors to be left out."""
    tensors = {f"language_model.{k}": v for k, v in load_file(oracle / "model.safetensors").items()}
    vision = {"vision_tower.encoder.final_layernorm.bias": torch.ones(8), "mm_projector.pre_norm.bias": torch.ones(4)}
    stray = {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    text = json.loads((oracle / "config.json").read_text())
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}}
    put(tmp_path, tensors | vision | stray, config)
    config, weights = load(tmp_path, dtype=torch.float32, device="cpu")
    assert config.has_vision
    check(weights, tensors, prefix="language_model.")
    with Checkpoint.open(tmp_path) as checkpoint:
        found = survey(checkpoint, config)
    assert (found.prefix, found.vision_tensors, found.vision_bytes) == ("language_model.", 2, 48)
    assert found.text_bytes == sum(t.nbytes for t in tensors.values())


# --- our own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("stage", [1 << 25, 2048])
def test_sharded_in_pieces(given, tmp_path, monkeypatch, threads, stage):
    """A staging buffer smaller than the tensors, conversions and several threads change nothing."""
    monkeypatch.setattr(jobs, "STAGE_BYTES", stage)
    write(tmp_path, given.items(), config=CONFIG, shard_bytes=20_000)
    stored = {}
    for file in tmp_path.glob("*.safetensors"):
        stored |= load_file(file)
    for dtype in (torch.bfloat16, torch.float32):
        check(read(tmp_path, dtype, threads=threads), stored, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["bf16", "int4", "int4-compact", "fp8-block", "nvfp4", "nvfp4-pack-quantized"])
def test_cuda_equals_cpu(given, tmp_path, monkeypatch, form):
    """The pinned staging buffers, filled again and again, deliver the same bytes."""
    monkeypatch.setattr(jobs, "STAGE_BYTES", 2048)
    write(tmp_path, given.items(), config=CONFIG, form=form, shard_bytes=20_000)
    _, there = load(tmp_path, dtype=torch.bfloat16, device="cuda", threads=4)
    here = flat(read(tmp_path, torch.bfloat16))
    for ours, theirs in zip(here, flat(there), strict=True):
        assert theirs.device.type == "cuda" and theirs.dtype == ours.dtype
        theirs = theirs.cpu()
        assert theirs.view(torch.uint8).equal(ours.view(torch.uint8)) if ours.itemsize == 1 else theirs.equal(ours)


def flat(record):
    """All tensors of a record of weights, in order."""
    if isinstance(record, torch.Tensor):
        return [record]
    values = record if isinstance(record, list) else [getattr(record, f.name) for f in dataclasses.fields(record)]
    return [tensor for value in values if value is not None for tensor in flat(value)]


def test_int4_checkpoint(given, tmp_path):
    write(tmp_path, given.items(), config=CONFIG, form="int4", shard_bytes=20_000)
    config, weights = load(tmp_path, dtype=torch.float32, device="cpu")
    assert config.quantization == "int4"
    assert weights.lm_head.format == "dense" and weights.layers[0].ffn.gate_up.format == "dense"
    for i in (1, 2):
        moe = weights.layers[i].ffn
        assert isinstance(moe, Moe) and moe.shared.gate_up.format == "dense"
        x = moe.experts
        assert isinstance(x, Int4Experts)
        assert (x.gate_up_packed.shape, x.gate_up_packed.dtype) == ((4, 64, 8), torch.int32)
        assert (x.gate_up_scale.shape, x.gate_up_scale.dtype) == ((4, 64, 2), torch.bfloat16)
        assert x.down_packed.shape == (4, 64, 4) and x.down_scale.shape == (4, 64, 1)
        for e in range(4):
            at = f"model.layers.{i}.mlp.experts.{e}"
            gate_up = torch.cat([given[f"{at}.gate_proj.weight"], given[f"{at}.up_proj.weight"]])
            assert x.gate_up_packed[e].equal(int4.quantize(gate_up)[0])
            assert x.gate_up_scale[e].equal(int4.quantize(gate_up)[1])
            assert x.down_packed[e].equal(int4.quantize(given[f"{at}.down_proj.weight"])[0])
            assert x.down_scale[e].equal(int4.quantize(given[f"{at}.down_proj.weight"])[1])


def test_any_linear_may_be_int4(given, tmp_path):
    attn, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    names = [
        f"{attn}.kv_b_proj",
        f"{attn}.q_a_proj",
        f"{attn}.q_b_proj",
        f"{mlp}.gate_proj",
        f"{mlp}.up_proj",
        "lm_head",
    ]
    weights = read(put(tmp_path, quantised(given, *names)))
    layer = weights.layers[0]

    def rounded(name):
        return int4.dequantize(*int4.quantize(given[f"{name}.weight"]), torch.float32)

    kv_b = rounded(f"{attn}.kv_b_proj").view(4, 40, 32)  # split into two, so it is dequantised
    assert layer.attention.w_uk.equal(kv_b[:, :16]) and layer.attention.w_uv.equal(kv_b[:, 16:].transpose(1, 2))
    # Fused with a dense neighbour: dequantised. Fused with another INT4 one, or alone: kept.
    mixed = torch.cat([rounded(f"{attn}.q_a_proj"), given[f"{attn}.kv_a_proj_with_mqa.weight"]])
    assert layer.attention.qkv_a.weight.equal(mixed)
    for kept, name in ((layer.attention.q_b, f"{attn}.q_b_proj"), (weights.lm_head, "lm_head")):
        assert kept.format == "int4"
        assert int4.dequantize(kept.weight, kept.scale, torch.float32).equal(rounded(name))
    pair = layer.ffn.gate_up
    both = torch.cat([rounded(f"{mlp}.gate_proj"), rounded(f"{mlp}.up_proj")])
    assert int4.dequantize(pair.weight, pair.scale, torch.float32).equal(both)


def test_other_scale_and_shape_types(given, tmp_path):
    """float16 scales stay float16; next to bfloat16 ones both become float32. weight_shape may be int32."""
    mlp = "model.layers.0.mlp"
    tensors = quantised(given, f"{mlp}.gate_proj", f"{mlp}.up_proj", f"{mlp}.down_proj")
    for name in ("up_proj", "down_proj"):
        tensors[f"{mlp}.{name}.weight_scale"] = tensors[f"{mlp}.{name}.weight_scale"].half()
        tensors[f"{mlp}.{name}.weight_shape"] = tensors[f"{mlp}.{name}.weight_shape"].int()
    ffn = read(put(tmp_path, tensors), torch.bfloat16).layers[0].ffn
    assert ffn.down.scale.equal(tensors[f"{mlp}.down_proj.weight_scale"])
    scales = [tensors[f"{mlp}.{name}.weight_scale"].float() for name in ("gate_proj", "up_proj")]
    assert ffn.gate_up.scale.equal(torch.cat(scales))


def test_level_minus_eight_is_read(given, tmp_path):
    tensors = quantised(given, *(n.removesuffix(".weight") for n in given if ".mlp.experts." in n))
    tensors[f"{EXPERT}.weight_packed"] = torch.full_like(tensors[f"{EXPERT}.weight_packed"], 0)
    x = read(put(tmp_path, tensors)).layers[1].ffn.experts
    assert (int4.unpack(x.gate_up_packed[2, 32:]) == -8).all()


EXPERTS = ("gate_proj", "up_proj", "down_proj")
FORMATS = {
    "int4": int4,
    "int4-compact": int4_compact,
    "fp8-block": fp8_block,
    "nvfp4": nvfp4,
    "nvfp4-packed": nvfp4_packed,
}


def names_of(given, part):
    return [n.removesuffix(".weight") for n in given if part in n]


def of_expert(x, e):
    """(gate and up, down) of one expert as float32, from its record of packed weights."""
    if isinstance(x, Fp8Experts):
        both = x.gate_up[e].unflatten(0, (2, -1))
        return (
            fp8_block.dequantize(both, x.gate_up_scale[e], torch.float32).flatten(0, 1),
            fp8_block.dequantize(x.down[e], x.down_scale[e], torch.float32),
        )
    if isinstance(x, NvFp4Experts):
        halves = x.gate_up_packed[e].unflatten(0, (2, -1)), x.gate_up_scale[e].unflatten(0, (2, -1))
        return (
            nvfp4.dequantize(*halves, x.gate_up_global[e], torch.float32).flatten(0, 1),
            nvfp4.dequantize(x.down_packed[e], x.down_scale[e], x.down_global[e], torch.float32),
        )
    if isinstance(x, Int4CompactExperts):
        return (
            int4_compact.dequantize(x.gate_up_packed[e], x.gate_up_scale[e], x.gate_up_row[e], torch.float32),
            int4_compact.dequantize(x.down_packed[e], x.down_scale[e], x.down_row[e], torch.float32),
        )
    return (
        int4.dequantize(x.gate_up_packed[e], x.gate_up_scale[e], torch.float32),
        int4.dequantize(x.down_packed[e], x.down_scale[e], torch.float32),
    )


@pytest.mark.parametrize("stage", [1 << 25, 2048])
@pytest.mark.parametrize("form", FORMATS)
def test_experts_stay_packed(given, tmp_path, monkeypatch, form, stage):
    """Every routed expert's numbers are the checkpoint's, each in its place; gate and up keep scales of their own."""
    monkeypatch.setattr(jobs, "STAGE_BYTES", stage)
    module, experts = FORMATS[form], names_of(given, ".mlp.experts.")
    tensors = quantised(given, *experts, module=module)
    weights = read(put(tmp_path, tensors), torch.bfloat16, threads=3)
    kinds = {fp8_block: Fp8Experts, nvfp4: NvFp4Experts, nvfp4_packed: NvFp4Experts, int4: Int4Experts}
    for i in (1, 2):
        x = weights.layers[i].ffn.experts
        assert type(x) is kinds.get(module, Int4CompactExperts)
        for e in range(4):
            gate, up, down = (decoded(tensors, f"model.layers.{i}.mlp.experts.{e}.{n}", module) for n in EXPERTS)
            # One rounding more where a record holds the reciprocal of what is stored.
            rtol = 3e-7 if form == "nvfp4-packed" else 0
            both, one = of_expert(x, e)
            torch.testing.assert_close(both, torch.cat([gate, up]), rtol=rtol, atol=0)
            torch.testing.assert_close(one, down, rtol=rtol, atol=0)
    if form == "nvfp4":
        pairs = weights.layers[1].ffn.experts.gate_up_global
        assert (pairs[:, 0] != pairs[:, 1]).all()


@pytest.mark.parametrize("stage", [1 << 25, 2048])
@pytest.mark.parametrize("form", FORMATS)
def test_other_linears_are_dequantised(tmp_path, monkeypatch, form, stage):
    """In pieces, ragged blocks included; fused neighbours may be in different formats."""
    monkeypatch.setattr(jobs, "STAGE_BYTES", stage)
    module = FORMATS[form]
    config = CONFIG | {"intermediate_size": 320, "num_hidden_layers": 1}
    g = torch.Generator().manual_seed(1)
    shapes = expected(KimiConfig.from_dict(config))
    given = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    attn, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    names = [f"{attn}.{n}" for n in ("kv_b_proj", "q_a_proj", "o_proj")] + [f"{mlp}.up_proj", f"{mlp}.down_proj"]
    tensors = quantised(given, *names, module=module)
    path = put(tmp_path, quantised(tensors, f"{attn}.kv_a_proj_with_mqa", module=nvfp4), config)
    for dtype in (torch.float32, torch.bfloat16):
        layer = read(path, dtype).layers[0]
        want = {name: decoded(tensors, name, module).to(dtype) for name in names}
        kv_b = want[f"{attn}.kv_b_proj"].view(4, 40, 32)
        assert layer.attention.w_uk.equal(kv_b[:, :16]) and layer.attention.w_uv.equal(kv_b[:, 16:].transpose(1, 2))
        fp4 = nvfp4.quantize(given[f"{attn}.kv_a_proj_with_mqa.weight"])
        other = nvfp4.dequantize(*fp4, torch.float32).to(dtype)
        assert layer.attention.qkv_a.weight.equal(torch.cat([want[f"{attn}.q_a_proj"], other]))
        gate = given[f"{mlp}.gate_proj.weight"].to(dtype)
        assert layer.ffn.gate_up.weight.equal(torch.cat([gate, want[f"{mlp}.up_proj"]]))
        if form != "int4":  # which stays packed where all of a record is
            assert layer.ffn.down.weight.equal(want[f"{mlp}.down_proj"])
            assert layer.attention.o.weight.equal(want[f"{attn}.o_proj"])
    with Checkpoint.open(path) as checkpoint:
        found = survey(checkpoint, KimiConfig.from_directory(path))
        whole = read_linear(checkpoint, found, f"{mlp}.up_proj", torch.float32)
        assert whole.equal(decoded(tensors, f"{mlp}.up_proj", module))


def test_modelopt_checkpoint(given, tmp_path):
    """NVIDIA's export of Kimi K2.5: nested, stale inner declaration, some shards with the older names, scales that are
    not needed; one-element tensors where others have none."""
    fp4 = names_of(given, ".mlp.experts.") + names_of(given, ".shared_experts.") + names_of(given, "layers.0.mlp.")
    tensors = quantised(given, *fp4, module=nvfp4)
    for name in fp4:
        tensors[f"{name}.input_scale"] = torch.tensor(float("nan"))  # nobody looks at it
        tensors[f"{name}.weight_scale_2"] = tensors[f"{name}.weight_scale_2"].reshape(1)
    for kv in "kv":
        tensors[f"model.layers.1.self_attn.{kv}_proj.{kv}_scale"] = torch.tensor(1.0)
    stored = {
        f"language_model.{k.removeprefix('model.') if k.startswith('model.layers.2.') else k}": v
        for k, v in tensors.items()
    }
    assert "language_model.layers.2.input_layernorm.weight" in stored
    config = {
        "model_type": "kimi_k25",
        "vision_config": {},
        "text_config": CONFIG | {"model_type": "deepseek_v3", "quantization_config": int4.quantization_config()},
    }
    put(tmp_path, stored, config)
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    config, weights = load(tmp_path, dtype=torch.float32, device="cpu")
    assert config.quantization == "nvfp4"
    plain = dict(given)
    for name in fp4:
        plain[f"{name}.weight"] = decoded(tensors, name, nvfp4)
    for layer in weights.layers[1:]:
        both, down = zip(*(of_expert(layer.ffn.experts, e) for e in range(4)))
        layer.ffn.experts = DenseExperts(torch.stack(both), torch.stack(down))
    check(weights, plain)
    twice = stored | {"language_model.model.layers.2.input_layernorm.weight": torch.ones(64)}
    refused(put(tmp_path, twice), "layers.2.input_layernorm.weight", "two names of the same tensor")
    wrong = stored | {"language_model.layers.2.input_layernorm.weight": torch.ones(3)}
    refused(put(tmp_path, wrong), "tensor language_model.layers.2.input_layernorm.weight has shape [3]")


def test_layers_may_differ_in_format(given, tmp_path):
    tensors = quantised(given, *names_of(given, "layers.1.mlp.experts."), module=nvfp4)
    tensors = quantised(tensors, *names_of(given, "layers.2.mlp.experts."), module=fp8_block)
    layers = read(put(tmp_path, tensors)).layers
    assert isinstance(layers[1].ffn.experts, NvFp4Experts) and isinstance(layers[2].ffn.experts, Fp8Experts)


def test_without_shared_experts_or_moe(tmp_path):
    for changes in ({"n_shared_experts": None}, {"first_k_dense_replace": 3}, {"first_k_dense_replace": 0}):
        config = CONFIG | changes
        shapes = expected(KimiConfig.from_dict(config))
        path = put(tmp_path / str(changes), {name: torch.ones(shape) for name, shape in shapes.items()}, config)
        weights = read(path)
        kinds = [type(layer.ffn) for layer in weights.layers]
        dense = changes.get("first_k_dense_replace", 1)
        assert kinds == [Mlp] * dense + [Moe] * (3 - dense)
        if "n_shared_experts" in changes:
            assert weights.layers[1].ffn.shared is None


def test_expected_counts_parameters():
    for changes in ({}, {"n_shared_experts": 0}, {"first_k_dense_replace": 5}):
        config = KimiConfig.from_dict(CONFIG | changes)
        sizes = {name: torch.Size(shape).numel() for name, shape in expected(config).items()}
        routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
        count = config.parameters()
        assert (count.routed, count.total) == (routed, sum(sizes.values()))


def test_expected_names_of_k26(kimi_k26):
    shapes = expected(KimiConfig.from_directory(kimi_k26))
    assert shapes["model.layers.60.mlp.experts.383.down_proj.weight"] == (7168, 2048)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (18432, 7168)
    assert shapes["model.layers.5.self_attn.q_b_proj.weight"] == (12288, 1536)
    assert shapes["model.layers.5.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["model.layers.5.self_attn.kv_b_proj.weight"] == (16384, 512)
    assert shapes["model.layers.5.self_attn.o_proj.weight"] == (7168, 8192)
    assert shapes["model.layers.1.mlp.gate.weight"] == (384, 7168)
    assert len(shapes) == 3 + 61 * 9 + 3 + 60 * (2 + 3 + 384 * 3)


def test_memory_is_the_weights_own(given, tmp_path):
    """The files may go once the weights are loaded, and no two weights share memory."""
    path = put(tmp_path / "model", given)
    weights = read(path)
    shutil.rmtree(path)
    check(weights, given)
    layer = weights.layers[1]
    pointers = {t.untyped_storage().data_ptr() for t in (layer.attention.w_uk, layer.attention.w_uv, layer.input_norm)}
    assert len(pointers) == 3


@pytest.mark.parametrize("form", ["bf16", "nvfp4", "fp8-block"])
def test_progress_on_stderr(given, tmp_path, capsys, form):
    write(tmp_path, given.items(), config=CONFIG, form=form)
    load(tmp_path, dtype=torch.float32, device="cpu", progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "loading" in err
    seen = []
    with Checkpoint.open(tmp_path) as checkpoint:
        total = checkpoint.nbytes
        config = KimiConfig.from_directory(tmp_path)
        plan = WeightsPlan(config, checkpoint, survey(checkpoint, config), torch.bfloat16, torch.device("cpu"))
        plan.weights()
        jobs.run(plan.jobs, 2, torch.device("cpu"), seen.append)
    assert sum(seen) == total


def test_layers_that_will_be_converted_lie_apart_and_leave_nothing(
    tmp_path: Path, given: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "CHUNK_BYTES", 300_000)
    with synthetic.directory("tiny", 2) as shape:
        for path in (put(tmp_path / "checkpoint", given), shape):
            usual, weights = (load(path, dtype=torch.float32, device="cpu", apart=a)[1] for a in (False, True))
            assert all(torch.equal(a, b) for a, b in zip(_leaves(usual), _leaves(weights), strict=True))
            held = {t.untyped_storage().data_ptr() for t in _leaves(weights) if t.untyped_storage().nbytes() > t.nbytes}
            assert held
        to_fp8(weights)  # of the shape: widths of the checkpoint are no multiples of 64
        left = [t for t in _leaves(weights) if t.untyped_storage().nbytes() > t.nbytes]
        assert not {t.untyped_storage().data_ptr() for t in left} & held


def _leaves(weights: Weights) -> list[torch.Tensor]:
    return [leaf for leaf in cost_table._leaves(weights) if isinstance(leaf, torch.Tensor)]
