"""The model's configuration: spellings, refusals, golden YaRN values, parameter counts."""

import copy
import json

import pytest

from perilune.core.errors import CheckpointError
from perilune.formats import scheme
from perilune.model.config import KimiConfig

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
FLAT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 101,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}


def parse(**changes):
    """FLAT with changes; a value of ... removes the key."""
    return KimiConfig.from_dict({k: v for k, v in (FLAT | changes).items() if v is not ...})


def nested(**outer):
    text = {k: v for k, v in FLAT.items() if k != "architectures"}
    return {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        **outer,
    }


def test_official_k26(kimi_k26):
    config = KimiConfig.from_directory(kimi_k26)
    assert (config.model_type, config.has_vision, config.quantization) == ("kimi_k25", True, scheme.INT4)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (7168, 61, 163840)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (384, 8, 1)
    assert (config.rms_norm_eps, config.routed_scaling_factor) == (1e-5, 2.827)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((163586,), 163584, 163839)
    assert (config.yarn.beta_fast, config.yarn.factor, config.max_position_embeddings) == (32.0, 64.0, 262144)
    count = config.parameters()
    assert round(count.routed / 1e9, 3) == 1014.686
    assert round(count.other / 1e9, 3) == 11.722
    assert round(count.active / 1e9, 2) == 32.86
    assert count.total == count.routed + count.other


@pytest.mark.parametrize(
    ("beta_fast", "factor", "golden"),
    [
        (32.0, 64.0, {9: 0.043776656, 14: 0.0044658487, 20: 1.8070234e-05, 31: 4.3822065e-07}),
        (1.0, 64.0, {9: 0.047688612, 19: 0.0016217599}),
        (1.0, 32.0, {20: 3.6140468e-05}),
    ],
)
def test_yarn_golden(beta_fast, factor, golden):
    config = parse(
        rope_scaling=YARN | {"beta_fast": beta_fast, "factor": factor},
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
    )
    inv = config.rope_inv_freq()
    assert len(inv) == 32
    for i, value in golden.items():
        assert inv[i] == pytest.approx(value, rel=5e-7), i
    scale = {64.0: 0.14467962580, 32.0: 0.13086079995}[factor]
    assert config.softmax_scale == pytest.approx(scale, rel=1e-9)
    assert config.rope_magnitude == 1.0


def test_yarn_equals_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for change in ({}, {"beta_fast": 4.0}, {"mscale": 0.5}, {"factor": 3.0}):
        rope = YARN | {"rope_theta": 10000.0, "rope_type": "yarn"} | change
        theirs = transformers.DeepseekV3Config(
            qk_rope_head_dim=64, max_position_embeddings=262144, rope_parameters=rope
        )
        inv, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        ours = parse(qk_rope_head_dim=64, rope_parameters=rope, rope_scaling=..., rope_theta=...)
        assert ours.rope_inv_freq() == pytest.approx(inv.tolist(), rel=1e-5)
        assert ours.rope_magnitude == pytest.approx(magnitude, rel=1e-6)


def test_plain_rope():
    for changes in (
        {"rope_scaling": None},
        {"rope_scaling": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "rope_theta": ...},
    ):
        config = parse(**changes)
        assert config.yarn is None
        assert config.rope_inv_freq() == pytest.approx([50000.0 ** (-i / 4) for i in range(4)])
        assert config.softmax_scale == pytest.approx(24**-0.5)


def test_spellings_agree():
    flat = parse()
    parameters = {k: v for k, v in YARN.items() if k != "type"} | {"rope_type": "yarn", "rope_theta": 50000.0}
    assert parse(rope_parameters=parameters, rope_scaling=..., rope_theta=...) == flat
    # The transformers 5 export carries both spellings of the type.
    assert parse(rope_parameters=parameters | {"type": "yarn"}, rope_scaling=..., rope_theta=...) == flat
    assert parse(model_type="deepseek_v3") == parse(model_type="deepseek_v3", scoring_func="sigmoid", moe_layer_freq=1)
    for inner in ("kimi_k2", "deepseek_v3"):
        data = nested()
        data["text_config"]["model_type"] = inner
        config = KimiConfig.from_dict(data)
        assert (config.model_type, config.has_vision) == ("kimi_k25", False)
        assert config.rope_inv_freq() == flat.rope_inv_freq() and config.parameters() == flat.parameters()
    assert KimiConfig.from_dict(nested(vision_config={})).has_vision


def test_end_tokens_of_both_levels():
    assert parse(eos_token_id=None).eos_token_ids == ()
    assert parse(eos_token_id=[5, 6, 5]).eos_token_ids == (5, 6)
    assert KimiConfig.from_dict(nested(eos_token_id=[9, 7])).eos_token_ids == (9, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": -8}, "hidden_size must be a whole number from 1 to 2147483647, not -8"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"kv_lora_rank": 30}, "kv_lora_rank must be a multiple of 8, not 30"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"routed_scaling_factor": 10**400}, "routed_scaling_factor"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the 8"),
        ({"n_group": 3}, "n_group=3"),
        ({"n_group": 8, "topk_group": 4}, "n_group=8"),
        ({"topk_group": 2}, "topk_group=2 exceeds n_group=1"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling of type 'linear'"),
        ({"rope_scaling": {k: v for k, v in YARN.items() if k != "factor"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": YARN | {"beta_slow": 1e-320}}, "rope_scaling.beta_slow must be a finite number above"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"quantization_config": "int4"}, "quantization_config must be an object"),
        ({"model_type": "llama"}, "model_type 'llama' is not served; served: kimi_k2"),
        ({"model_type": ...}, "model_type None"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "'Eagle3DeepseekV2ForCausalLM' is not served"),
        ({"model_type": "kimi_k25", "text_config": []}, "text_config must be an object"),
        (nested(vision_config="x"), "vision_config must be an object, not 'x'"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "qwen3"}}, "text_config.model_type 'qwen3'"),
    ],
)
def test_refusals_name_the_key(changes, words):
    with pytest.raises(CheckpointError) as e:
        parse(**changes).rope_inv_freq()
    assert words in str(e.value) and "\n" not in str(e.value)


def test_nested_errors_give_the_path():
    data = nested()
    del data["text_config"]["vocab_size"]
    with pytest.raises(CheckpointError, match=r"text_config\.vocab_size is missing"):
        KimiConfig.from_dict(data)


def test_files(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        KimiConfig.from_directory(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        KimiConfig.from_directory(tmp_path)
    for text, words in (("{", "not valid JSON"), ("[1]", "must hold a JSON object"), ("[" * 10**6, "not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            KimiConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        KimiConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    assert KimiConfig.from_directory(tmp_path) == parse()


INT4_BLOCK = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    },
}


def int4_with(**weights):
    block = copy.deepcopy(INT4_BLOCK)
    block["config_groups"]["group_0"]["weights"] |= weights
    return block


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (None, scheme.DENSE),
        (INT4_BLOCK, scheme.INT4),
        (int4_with(group_size=128), "pack-quantized with group_size=128"),
        (int4_with(num_bits=8), "pack-quantized with num_bits=8"),
        (int4_with(num_bits="4"), "pack-quantized with num_bits='4'"),
        (int4_with(symmetric=False), "pack-quantized with symmetric=False"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, scheme.FP8_BLOCK),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, scheme.NVFP4),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, scheme.NVFP4_PACKED),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors float-quantized"),
        ({"format": "perilune-int4-compact"}, scheme.INT4_COMPACT),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_quantisation_names(block, name):
    assert parse(quantization_config=block).quantization == name


def test_quantisation_precedence():
    """hf_quant_config.json, then the outer block, then the inner one, which may be stale."""
    data = nested()
    data["text_config"]["quantization_config"] = INT4_BLOCK
    hf_quant = {"quantization": {"quant_algo": "NVFP4"}}
    assert KimiConfig.from_dict(data).quantization == scheme.INT4
    assert KimiConfig.from_dict(data, hf_quant=hf_quant).quantization == scheme.NVFP4
    data["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert KimiConfig.from_dict(data).quantization == scheme.FP8_BLOCK
