"""The config.json of an EAGLE-3 or 3.1 draft, in the spellings that published ones have (docs/formats.md section 6).

An unknown key is refused by name: a draft that runs otherwise than it was trained causes no error, but fewer of its
tokens are accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from perilune.core.errors import CheckpointError, quoted, shown
from perilune.core.jsonfile import read_object
from perilune.model.config import Keys, Yarn, inverse_frequencies, read_rope, yarn_mscale

DRAFTER = "drafter"  # subdirectory of a model directory: the draft model
ARCHITECTURES: Mapping[str, Literal["mha", "mla"]] = {
    "LlamaForCausalLMEagle3": "mha",
    "Eagle3LlamaForCausalLM": "mha",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
MODEL_TYPES = ("llama", "kimi_k2", "deepseek_v3", "deepseek_v2")

_READ = {
    "architectures", "model_type", "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "eagle_config", "num_aux_hidden_states",
}  # fmt: skip
# Keys with their defaults; they may be at the top level or in eagle_config.
_FLAGS = {
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
}
_AUX = "eagle_aux_hidden_state_layer_ids"
# Keys with the one value that is served.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "bias": (False,),
    "tie_word_embeddings": (False,),
    "is_causal": (True,),
    "mla_use_nope": (False,),
    "use_moe": (False,),
    "rope_interleave": (True,),
    "quantization_config": (),
    "use_sliding_window": (False,),
    "sliding_window": (),
    "layer_types": (["full_attention"],),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
    "logit_scale": (1.0,),
}
# Ignored: keys that model libraries write into any configuration, and those of experts, which a draft does not have.
_MEANINGLESS = {
    "_name_or_path", "add_cross_attention", "attention_dropout", "attn_implementation", "_attn_implementation",
    "auto_map", "aux_loss_alpha", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "ep_size", "exponential_decay_length_penalty",
    "finetuning_task", "first_k_dense_replace", "forced_bos_token_id", "forced_eos_token_id", "has_lm_head", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length",
    "max_position_embeddings",
    "max_window_layers", "modules_to_not_convert", "moe_intermediate_size", "moe_layer_freq", "n_group",
    "n_routed_experts", "n_shared_experts", "next_layer_regular", "no_repeat_ngram_size", "norm_topk_prob",
    "num_beam_groups", "num_beams", "num_experts_per_tok", "num_nextn_predict_layers", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "position_embedding_type", "prefix",
    "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "routed_scaling_factor", "scoring_func", "sep_token_id", "seq_aux", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "topk_group", "topk_method", "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16",
    "use_cache",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A draft's shapes and constants. `form` "mha": attention with q, k and v heads; "mla": latent, as the target's."""

    form: Literal["mha", "mla"]
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int  # mha
    head_dim: int  # mha
    q_lora_rank: int  # mla, as the rest of the head sizes
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    aux_layer_ids: tuple[int, ...] | None  # as in the file; `aux_layers` converts them
    num_aux: int
    fc_norm: bool  # EAGLE-3.1: each aux state is normed before fc
    norm_output: bool  # EAGLE-3.1: the next step gets the state after the final norm
    norm_before_residual: bool  # the residual is the normed feature
    norm_before_fc: bool  # one norm over all aux states together

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory")
        return cls.from_dict(read_object(path / "config.json"), where=str(path / "config.json"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config.json") -> Self:
        """CheckpointError names the key that is unknown, missing or not served."""
        names = data.get("architectures") or []
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise CheckpointError(
                f"{where}: architecture {quoted(name)} is no draft's; served: {', '.join(ARCHITECTURES)}"
            )
        form = ARCHITECTURES[name]
        if (kind := data.get("model_type")) not in MODEL_TYPES:
            raise CheckpointError(f"{where}: model_type {quoted(kind)} is not served; served: {', '.join(MODEL_TYPES)}")
        inner = data.get("eagle_config")
        if not isinstance(inner, Mapping | None):
            raise CheckpointError(f"{where}: eagle_config must be an object, not {quoted(inner)}")
        levels = (("", data), ("eagle_config.", inner or {}))
        for prefix, level in levels:
            _check_keys(level, where, prefix)
        get = Keys(data, where, "")
        ids = _once(levels, _AUX, where)
        if ids is not None and (
            not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids) or ids != sorted(ids)
        ):
            raise CheckpointError(f"{where}: {_AUX} must be layer numbers in ascending order, not {quoted(ids)}")
        flags = {flag: _once(levels, flag, where) for flag in _FLAGS}
        for flag, value in flags.items():
            if value is not None and not isinstance(value, bool):
                raise CheckpointError(f"{where}: {flag} must be true or false, not {quoted(value)}")
        hidden, heads = get.width("hidden_size"), get.whole("num_attention_heads")
        theta, yarn = read_rope(data, get, where, "")
        num_aux = get.whole("num_aux_hidden_states", default=len(ids) if ids else 3, high=64)
        if ids and len(ids) != num_aux:
            raise CheckpointError(f"{where}: {_AUX} names {len(ids)} layers, num_aux_hidden_states says {num_aux}")
        mla = form == "mla"
        vocab = get.whole("vocab_size")
        config = cls(
            form=form,
            hidden_size=hidden,
            target_hidden_size=get.width("target_hidden_size") if data.get("target_hidden_size") else hidden,
            intermediate_size=get.width("intermediate_size"),
            vocab_size=vocab,
            draft_vocab_size=get.whole("draft_vocab_size", default=vocab, high=vocab),
            num_attention_heads=heads,
            num_key_value_heads=heads if mla else get.whole("num_key_value_heads", default=heads, high=heads),
            head_dim=0 if mla else get.whole("head_dim", default=hidden // heads, high=4096),
            q_lora_rank=get.width("q_lora_rank") if mla else 0,
            kv_lora_rank=get.width("kv_lora_rank") if mla else 0,
            qk_nope_head_dim=get.width("qk_nope_head_dim") if mla else 0,
            qk_rope_head_dim=get.width("qk_rope_head_dim") if mla else 0,
            v_head_dim=get.width("v_head_dim") if mla else 0,
            rms_norm_eps=get.real("rms_norm_eps"),
            rope_theta=theta,
            yarn=yarn,
            aux_layer_ids=tuple(ids) if ids else None,
            num_aux=num_aux,
            **{flag: flags[flag] or default for flag, default in _FLAGS.items()},
        )
        if not mla and (config.head_dim % 2 or heads % config.num_key_value_heads):
            raise CheckpointError(
                f"{where}: head_dim={config.head_dim} must be even and num_attention_heads={heads} a multiple of "
                f"num_key_value_heads={config.num_key_value_heads}"
            )
        return config

    def aux_layers(self, target_layers: int) -> tuple[int, ...]:
        """0-based target layers; the draft reads the residual stream at their inputs. `target_layers` (their number)
        means the last layer's output.

        Files disagree about their ids. If the first id is 1, ids name layers' outputs, the inputs of the next layers;
        otherwise inputs (the rule of SGLang; docs/formats.md section 6.3).
        """
        ids = self.aux_layer_ids
        if ids is None:
            ids = (2, target_layers // 2, target_layers - 3)
        elif ids[0] == 1:
            ids = tuple(i + 1 for i in ids)
        if len(ids) != self.num_aux or not 0 <= ids[0] <= ids[-1] <= target_layers:
            raise CheckpointError(f"the draft reads the inputs of layers {ids}, and its target has {target_layers}")
        return ids

    @property
    def rope_width(self) -> int:
        return self.qk_rope_head_dim if self.form == "mla" else self.head_dim

    @property
    def rope_inv_freq(self) -> tuple[float, ...]:
        """Radians per position of interleaved pairs (mla), or of pairs half a head apart (mha)."""
        return inverse_frequencies(self.rope_width, self.rope_theta, self.yarn)

    @property
    def rope_magnitude(self) -> float:
        """The factor on cos and sin."""
        if self.yarn is None:
            return 1.0
        return yarn_mscale(self.yarn.factor, self.yarn.mscale) / yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """The factor on q.k; mla has YaRN's mscale squared in it, as its target."""
        if self.form == "mha":
            return float(self.head_dim**-0.5)
        scale = float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)
        return scale if self.yarn is None else scale * yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2

    @property
    def kv_width(self) -> int:
        """Values a token has in the draft's cache: a latent and a rope key, or k and then v of all key-value heads."""
        if self.form == "mla":
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.num_key_value_heads * self.head_dim


def _check_keys(level: Mapping[str, Any], where: str, prefix: str) -> None:
    for key, value in level.items():
        if key in _ONLY:
            if value is not None and value not in _ONLY[key]:
                served = " or ".join(map(repr, _ONLY[key])) or "nothing"
                raise CheckpointError(f"{where}: {prefix}{key}={quoted(value)} is not served; served: {served}")
        elif key not in _READ and key not in _FLAGS and key != _AUX and key not in _MEANINGLESS:
            raise CheckpointError(
                f"{where}: {prefix}{shown(key)} is not known, so the draft might run otherwise than it was trained: "
                "remove the key if it means nothing"
            )


def _once(levels: tuple[tuple[str, Mapping[str, Any]], ...], key: str, where: str) -> Any:
    """The value of a key that may be at either level; None if at neither."""
    values = [level[key] for _, level in levels if level.get(key) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise CheckpointError(f"{where}: {key} is {quoted(values[0])}, but eagle_config says {quoted(values[1])}")
    return values[0] if values else None
