"""A draft's configuration for a target, and its checkpoint as other engines read it too: `midlayer.*`, fc, norms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.formats.writer import write
from perilune.model.config import KimiConfig


def config_for(
    target: KimiConfig,
    *,
    aux_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    fc_norm: bool = True,
    norm_output: bool = True,
) -> dict[str, Any]:
    """config.json of an EAGLE-3.1 draft with latent attention of the target's shape, as published ones spell it.

    aux_ids  layers whose *output* is read, beginning with 1, as in published files; default: spread over the target
    """
    layers = target.num_hidden_layers
    ids = list(aux_ids) if aux_ids is not None else [1, layers // 2 - 1, layers - 4]
    if ids != sorted(set(ids)) or not ids or ids[0] != 1 or ids[-1] >= layers:
        raise ConfigError(
            f"aux layers {ids} must begin with 1, ascend, and be below {layers}: a first id of 1 is what tells engines "
            "that outputs are meant"
        )
    yarn = target.yarn
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_attention_heads,
        "q_lora_rank": target.q_lora_rank,
        "kv_lora_rank": target.kv_lora_rank,
        "qk_nope_head_dim": target.qk_nope_head_dim,
        "qk_rope_head_dim": target.qk_rope_head_dim,
        "v_head_dim": target.v_head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "rope_theta": target.rope_theta,
        "rope_scaling": None
        if yarn is None
        else {
            "type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        },
        "max_position_embeddings": target.max_position_embeddings,
        "num_aux_hidden_states": len(ids),
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": ids,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def export(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes the draft without embedding and head: it shares its target's. The directory must hold no checkpoint."""
    write(directory, tensors.items(), config=config)
