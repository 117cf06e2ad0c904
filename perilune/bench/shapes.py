"""Configurations of real models by name, for measurements with random weights of exactly their shapes."""

from typing import Any

from perilune.core.errors import ConfigError
from perilune.model.config import KimiConfig

_K2: dict[str, Any] = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}
# A small model with every part of a real one, for tests on a CPU.
_TINY = _K2 | {
    "vocab_size": 4352,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 4096,
    "eos_token_id": 4098,
    "pad_token_id": 4351,
}
SHAPES = {"kimi-k2.5": _K2, "tiny": _TINY}


def shape(name: str, layers: int) -> KimiConfig:
    """The configuration of a model cut to its first `layers` layers. ConfigError for an unknown name."""
    return KimiConfig.from_dict(raw(name, layers), where=name)


def raw(name: str, layers: int) -> dict[str, Any]:
    """As `shape`, in the form of config.json."""
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    config = SHAPES[name]
    if not 0 < layers <= config["num_hidden_layers"]:
        raise ConfigError(f"{name} has {config['num_hidden_layers']} layers: layers must be between 1 and that")
    return {**config, "num_hidden_layers": layers}
