"""A checkpoint's config.json, in any of its published spellings, as one frozen record.

Flat (model_type kimi_k2 or deepseek_v3) or nested (kimi_k25 with a text_config of either kind); rope_parameters, or
rope_scaling beside rope_theta. A value that is not served is refused here, by the name of its key.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from perilune.core.errors import CheckpointError, quoted
from perilune.core.files import exists
from perilune.core.jsonfile import read_object
from perilune.formats import scheme

TEXT_TYPES = ("kimi_k2", "deepseek_v3")
NESTED_TYPE = "kimi_k25"
ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",  # transformers' own spelling
)
SERVED = "served: kimi_k2, deepseek_v3, and kimi_k25 around either"

MAX_ENDS = 64  # limit of eos_token_ids per level of the file
# Limit of num_hidden_layers * n_routed_experts (Kimi K2: 23,424): all names are made before a file is opened.
MAX_EXPERTS = 1 << 18

# Keys that may be absent, because transformers leaves them out when it saves; each with the one value served.
_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN fields of a configuration; DeepSeek's form, ramp bounds rounded outwards (docs/formats.md section 2.2)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Number of weights of the text model. `active` counts what one token uses: all but the unchosen experts."""

    routed: int
    other: int
    active: int

    @property
    def total(self) -> int:
        return self.routed + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiConfig:
    """The text model's shapes and constants. Field names are the checkpoint's own."""

    model_type: str  # as at the outermost level
    has_vision: bool
    quantization: str  # as declared; formats/scheme.py

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Reads config.json, and hf_quant_config.json if there is one. CheckpointError names the offending key."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory")
        extra = path / "hf_quant_config.json"
        hf_quant = read_object(extra) if exists(extra) else None
        return cls.from_dict(read_object(path / "config.json"), hf_quant=hf_quant, where=str(path / "config.json"))

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, hf_quant: Mapping[str, Any] | None = None, where: str = "config.json"
    ) -> Self:
        text, prefix = _text_level(data, where)
        get = Keys(text, where, prefix)
        for key, served in _ONLY.items():
            if (value := text.get(key)) is not None and value != served:
                raise CheckpointError(f"{where}: {prefix}{key}={quoted(value)} is not served; served: {served!r}")
        if data.get("tie_word_embeddings") or text.get("tie_word_embeddings"):
            raise CheckpointError(
                f"{where}: tie_word_embeddings=true is not served: lm_head must be a tensor of its own"
            )
        if text.get("q_lora_rank") is None:
            raise CheckpointError(f"{where}: {prefix}q_lora_rank is missing or null; only low-rank queries are served")
        rope_theta, yarn = read_rope(text, get, where, prefix)
        config = cls(
            model_type=data["model_type"],
            has_vision=isinstance(data.get("vision_config"), Mapping),
            quantization=scheme.declared(data, text, hf_quant, where=where),
            hidden_size=get.width("hidden_size"),
            num_hidden_layers=get.whole("num_hidden_layers", high=1000),
            vocab_size=get.whole("vocab_size"),
            num_attention_heads=get.whole("num_attention_heads"),
            q_lora_rank=get.width("q_lora_rank"),
            kv_lora_rank=get.width("kv_lora_rank"),
            qk_nope_head_dim=get.width("qk_nope_head_dim"),
            qk_rope_head_dim=get.width("qk_rope_head_dim"),
            v_head_dim=get.width("v_head_dim"),
            intermediate_size=get.width("intermediate_size"),
            moe_intermediate_size=get.width("moe_intermediate_size"),
            n_routed_experts=get.whole("n_routed_experts", high=10_000),
            num_experts_per_tok=get.whole("num_experts_per_tok"),
            n_shared_experts=get.whole("n_shared_experts", low=0, default=0),
            first_k_dense_replace=get.whole("first_k_dense_replace", low=0),
            n_group=get.whole("n_group", default=1),
            topk_group=get.whole("topk_group", default=1),
            routed_scaling_factor=get.real("routed_scaling_factor"),
            norm_topk_prob=get.flag("norm_topk_prob"),
            rms_norm_eps=get.real("rms_norm_eps"),
            rope_theta=rope_theta,
            yarn=yarn,
            max_position_embeddings=get.whole("max_position_embeddings"),
            eos_token_ids=_eos(data, text, where),
            bos_token_id=_token("bos_token_id", data, text, where),
            pad_token_id=_token("pad_token_id", data, text, where),
        )
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        if self.num_hidden_layers * self.n_routed_experts > MAX_EXPERTS:
            raise CheckpointError(
                f"{where}: num_hidden_layers={self.num_hidden_layers} times n_routed_experts={self.n_routed_experts} "
                f"exceeds {MAX_EXPERTS:,}: no model of this family is as large"
            )
        groups, experts = self.n_group, self.n_routed_experts
        if experts % groups or (groups > 1 and experts // groups < 2):
            raise CheckpointError(f"{where}: n_routed_experts={experts} cannot be split into n_group={groups} groups")
        if self.topk_group > groups:
            raise CheckpointError(f"{where}: topk_group={self.topk_group} exceeds n_group={groups}")
        if self.num_experts_per_tok > (choice := experts // groups * self.topk_group):
            raise CheckpointError(
                f"{where}: num_experts_per_tok={self.num_experts_per_tok} exceeds the {choice} experts to choose from"
            )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on q.k: qk_head_dim^-0.5, times YaRN's mscale squared."""
        scale = math.pow(self.qk_head_dim, -0.5)
        if self.yarn is None:
            return scale
        return scale * math.pow(yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim), 2)

    @property
    def rope_magnitude(self) -> float:
        """The factor on cos and sin; 1 for every published member of the family."""
        if self.yarn is None:
            return 1.0
        factor = self.yarn.factor
        return yarn_mscale(factor, self.yarn.mscale) / yarn_mscale(factor, self.yarn.mscale_all_dim)

    def rope_inv_freq(self) -> tuple[float, ...]:
        """Radians per position of each interleaved pair."""
        return inverse_frequencies(self.qk_rope_head_dim, self.rope_theta, self.yarn)

    def parameters(self) -> Parameters:
        """Weights of the text model, router biases and norms included, counted from the shapes alone."""
        d, heads = self.hidden_size, self.num_attention_heads
        attention = (
            d * (self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim)
            + self.q_lora_rank * heads * self.qk_head_dim
            + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * d
            + self.q_lora_rank
            + self.kv_lora_rank
        )
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        moe = self.num_hidden_layers - dense
        expert = 3 * d * self.moe_intermediate_size
        router = self.n_routed_experts * (d + 1)
        other = (
            2 * self.vocab_size * d
            + d
            + self.num_hidden_layers * (attention + 2 * d)
            + dense * 3 * d * self.intermediate_size
            + moe * (router + self.n_shared_experts * expert)
        )
        return Parameters(
            routed=moe * self.n_routed_experts * expert,
            other=other,
            active=other + moe * self.num_experts_per_tok * expert,
        )


def inverse_frequencies(d: int, theta: float, yarn: Yarn | None) -> tuple[float, ...]:
    """d / 2 frequencies in radians per position, one for each rotated pair."""
    base = [theta ** (-2 * i / d) for i in range(d // 2)]
    if yarn is None:
        return tuple(base)

    def corner(turns: float) -> float:
        """Fractional index of the pair that rotates `turns` times over the original context."""
        return d * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(corner(yarn.beta_fast)), 0)
    high = float(min(math.ceil(corner(yarn.beta_slow)), d - 1))
    if low == high:
        high += 0.001
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(d // 2)]
    return tuple(b / yarn.factor * r + b * (1 - r) for b, r in zip(base, ramp))


def yarn_mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _text_level(data: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """The level with the text model's keys, and the prefix under which errors name them."""
    names = data.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if name not in ARCHITECTURES:
            raise CheckpointError(
                f"{where}: architecture {quoted(name)} is not served; served: {', '.join(ARCHITECTURES)}"
            )
    kind = data.get("model_type")
    if kind in TEXT_TYPES:
        return data, ""
    if kind != NESTED_TYPE:
        raise CheckpointError(f"{where}: model_type {quoted(kind)} is not served; {SERVED}")
    levels = {"text_config": data.get("text_config"), "vision_config": data.get("vision_config") or {}}
    for key, level in levels.items():
        if not isinstance(level, Mapping):
            raise CheckpointError(f"{where}: {key} must be an object, not {quoted(level)}")
    text: Mapping[str, Any] = data["text_config"]
    if (inner := text.get("model_type")) not in TEXT_TYPES:
        raise CheckpointError(f"{where}: text_config.model_type {quoted(inner)} is not served; {SERVED}")
    return text, "text_config."


class Keys:
    """Typed reads of one level of the configuration; errors name the key with the path to it."""

    def __init__(self, level: Mapping[str, Any], where: str, prefix: str) -> None:
        self._level, self._where, self._prefix = level, where, prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self._level.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        return value

    def _refuse(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {self._prefix}{key} must be {wanted}, not {quoted(value)}")

    def whole(self, key: str, *, low: int = 1, high: int = 2**31 - 1, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self._refuse(key, value, f"a whole number from {low} to {high}")
        return value

    def width(self, key: str) -> int:
        value = self.whole(key)
        if value % 8:
            raise self._refuse(key, value, "a multiple of 8")
        return value

    def real(self, key: str, *, above: float = 1e-30, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e30:
            raise self._refuse(key, value, f"a finite number above {above:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, None)
        if not isinstance(value, bool):
            raise self._refuse(key, value, "true or false")
        return value


def read_rope(text: Mapping[str, Any], get: Keys, where: str, prefix: str) -> tuple[float, Yarn | None]:
    """(rope_theta, YaRN's fields or None). CheckpointError for a kind of rope scaling that is not served."""
    key = "rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling"
    block = text.get(key)
    if block is None:
        return get.real("rope_theta", above=1.0), None
    if not isinstance(block, Mapping):
        raise CheckpointError(f"{where}: {prefix}{key} must be an object, not {quoted(block)}")
    inner = Keys(block, where, f"{prefix}{key}.")
    theta = inner.real("rope_theta", above=1.0) if "rope_theta" in block else get.real("rope_theta", above=1.0)
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise CheckpointError(
            f"{where}: {prefix}{key} of type {quoted(kind)} is not served; served: 'yarn' and 'default'"
        )
    for name, served in (("truncate", True), ("attention_factor", None)):
        if block.get(name, served) != served:
            raise CheckpointError(f"{where}: {prefix}{key}.{name}={quoted(block[name])} is not served; leave it out")
    return theta, Yarn(
        factor=inner.real("factor"),
        original_max_position_embeddings=inner.whole("original_max_position_embeddings"),
        beta_fast=inner.real("beta_fast", default=32.0),
        beta_slow=inner.real("beta_slow", default=1.0),
        mscale=inner.real("mscale", above=-1.0, default=1.0),
        mscale_all_dim=inner.real("mscale_all_dim", above=-1.0, default=0.0),
    )


def _token(key: str, data: Mapping[str, Any], text: Mapping[str, Any], where: str) -> int | None:
    value = data.get(key) if data.get(key) is not None else text.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise CheckpointError(f"{where}: {key} must be a token id, not {quoted(value)}")
    return value


def _eos(data: Mapping[str, Any], text: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The end tokens of both levels, outer ones first."""
    ids: list[int] = []
    for level in (data, text):
        value = level.get("eos_token_id")
        if isinstance(value, list) and len(value) > MAX_ENDS:
            raise CheckpointError(f"{where}: eos_token_id has {len(value):,} ids, at most {MAX_ENDS} are served")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or token < 0:
                raise CheckpointError(
                    f"{where}: eos_token_id must be a token id or a list of them, not {quoted(value)}"
                )
            if token not in ids:
                ids.append(token)
    return tuple(ids)
