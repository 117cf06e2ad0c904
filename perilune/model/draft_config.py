"""config.json of a new draft model. Needs no torch."""

from collections.abc import Sequence
from typing import Any, Literal

from perilune.core.errors import ConfigError
from perilune.model.config import KimiConfig

MHA_THETA = 1_000_000.0


def config_for(
    target: KimiConfig,
    *,
    form: Literal["mla", "mha"] = "mla",
    aux_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    draft_vocab: int | None = None,
) -> dict[str, Any]:
    """config.json of a draft for `target`, as published ones spell it.

    form         "mla": EAGLE-3.1 with latent attention of the target's shape. "mha": plain EAGLE-3 with keys and values
                 of its own heads and no YaRN, which every engine reads
    aux_ids      layers of which the *output* is read, beginning with 1, as in published files; default: spread out
    draft_vocab  size of its output vocabulary; default: the target's
    """
    layers = target.num_hidden_layers
    middle = max(layers // 2 - 1, 2)  # as published drafts have it, but for targets of few layers
    ids = list(aux_ids) if aux_ids is not None else [1, middle, max(layers - 4, middle + 1)]
    if ids != sorted(set(ids)) or not ids or ids[0] != 1 or ids[-1] >= layers:
        raise ConfigError(
            f"aux layers {ids} must begin with 1, ascend, and be below {layers}: engines take a first id of 1 as the "
            "sign that layers' outputs are meant"
        )
    vocab = target.vocab_size
    if draft_vocab is not None and not 0 < draft_vocab <= vocab:
        raise ConfigError(f"a draft's vocabulary must have 1 to {vocab} tokens, not {draft_vocab}")
    return (_mla(target) if form == "mla" else _mha(target)) | {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab or vocab,
        "max_position_embeddings": target.max_position_embeddings,
        "num_aux_hidden_states": len(ids),
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


def _mla(target: KimiConfig) -> dict[str, Any]:
    yarn = target.yarn
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_attention_heads,
        "q_lora_rank": target.q_lora_rank,
        "kv_lora_rank": target.kv_lora_rank,
        "qk_nope_head_dim": target.qk_nope_head_dim,
        "qk_rope_head_dim": target.qk_rope_head_dim,
        "v_head_dim": target.v_head_dim,
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
        "fc_norm": True,
        "norm_output": True,
    }


def _mha(target: KimiConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_attention_heads,
        "head_dim": target.v_head_dim,
        "rope_theta": MHA_THETA,
    }
