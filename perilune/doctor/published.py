"""Values in the configurations of all published members of the family, to compare a checkpoint's with."""

from perilune.core.errors import quoted, shown
from perilune.model.config import KimiConfig

# Several values in a tuple: published members differ.
_TEXT = {
    "vocab_size": (163840,),
    "num_attention_heads": (64,),
    "q_lora_rank": (1536,),
    "kv_lora_rank": (512,),
    "qk_nope_head_dim": (128,),
    "qk_rope_head_dim": (64,),
    "v_head_dim": (128,),
    "intermediate_size": (18432,),
    "moe_intermediate_size": (2048,),
    "n_routed_experts": (384,),
    "num_experts_per_tok": (8,),
    "n_shared_experts": (1,),
    "first_k_dense_replace": (1,),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (2.827,),
    "norm_topk_prob": (True,),
    "rms_norm_eps": (1e-6, 1e-5),
    "rope_theta": (50000.0,),
    "max_position_embeddings": (131072, 262144),
    "bos_token_id": (163584,),
    "pad_token_id": (163839, None),
    "eos_token_ids": ((163585,), (163586,)),
}
_YARN = {
    "factor": (32.0, 64.0),
    "original_max_position_embeddings": (4096,),
    "beta_fast": (1.0, 32.0),
    "beta_slow": (1.0,),
    "mscale": (1.0,),
    "mscale_all_dim": (1.0,),
}


def is_full_size(config: KimiConfig) -> bool:
    return (config.hidden_size, config.num_hidden_layers) == (7168, 61)


def differences(config: KimiConfig) -> list[str]:
    """Values that no published member has, as 'key=value (published: ...)'; for a configuration of full size."""
    odd = [
        f"{key}={quoted(value)} (published: {' or '.join(map(repr, known))})"
        for key, known in _TEXT.items()
        if (value := getattr(config, key)) not in known
    ]
    if config.yarn is None:
        return [*odd, "no YaRN"]
    return odd + [
        f"yarn.{key}={quoted(value)} (published: {' or '.join(map(repr, known))})"
        for key, known in _YARN.items()
        if (value := getattr(config.yarn, key)) not in known
    ]


def varying(config: KimiConfig) -> str:
    """The values in which members differ."""
    yarn = config.yarn
    stretched = f"yarn factor {yarn.factor:g}, beta_fast {yarn.beta_fast:g}" if yarn else "no yarn"
    return (
        f"max_position_embeddings {config.max_position_embeddings}, {stretched}, rms_norm_eps {config.rms_norm_eps:g}, "
        f"eos {shown(' and '.join(map(str, config.eos_token_ids))) or 'none'}"
    )
