"""The model's weights as the model file consumes them. Data only: which op runs on them is the model's business.

Letters: D hidden size, H heads, n and r the query's nope and rope widths, v the value width, R the latent width,
I an intermediate width, E routed experts, V vocabulary. Linear layers are stored [outputs, inputs]. Tensors are
contiguous, of the load's dtype unless a comment says otherwise, and belong to one `Weights` alone.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Dense:
    weight: torch.Tensor  # [o, i]


@dataclass(slots=True)
class Int4:
    """formats/int4.py has the layout."""

    packed: torch.Tensor  # [o, i/8] int32
    scale: torch.Tensor  # [o, i/32] bfloat16, or the checkpoint's float16 or float32


@dataclass(slots=True)
class Fp8:
    """Made at load (loading/fp8_dense.py): the value is weight * scale of its row."""

    weight: torch.Tensor  # [o, i] float8_e4m3fn
    scale: torch.Tensor  # [o] float32


Linear = Dense | Int4 | Fp8


@dataclass(slots=True)
class Attention:
    qkv_a: Linear  # [q_lora + R + r, D]: q_a_proj's rows, then kv_a_proj_with_mqa's
    q_a_norm: torch.Tensor  # [q_lora]
    q_b: Linear  # [H (n + r), q_lora]
    kv_a_norm: torch.Tensor  # [R]
    w_uk: torch.Tensor  # [H, n, R]: k_nope = c @ w_uk[h].T, and absorbed q_lat = q_nope @ w_uk[h]
    w_uv: torch.Tensor  # [H, R, v]: v = c @ w_uv[h], and absorbed o = o_lat @ w_uv[h]
    o: Linear  # [D, H v]
    uv_fp8: Fp8 | None = None  # where o is FP8: the very numbers of w_uv, for one token's kernel; scale [H, v]


@dataclass(slots=True)
class Mlp:
    gate_up: Linear  # [2I, D]: gate's rows first
    down: Linear  # [D, I]


@dataclass(slots=True)
class DenseExperts:
    gate_up: torch.Tensor  # [E, 2I, D]: gate's rows first
    down: torch.Tensor  # [E, D, I]


@dataclass(slots=True)
class Int4Experts:
    gate_up_packed: torch.Tensor  # [E, 2I, D/8] int32
    gate_up_scale: torch.Tensor  # [E, 2I, D/32] as Int4.scale
    down_packed: torch.Tensor  # [E, D, I/8] int32
    down_scale: torch.Tensor  # [E, D, I/32]


@dataclass(slots=True)
class Int4CompactExperts:
    """formats/int4_compact.py has the layout."""

    gate_up_packed: torch.Tensor  # [E, 2I, D/8] int32
    gate_up_scale: torch.Tensor  # [E, 2I, D/32] uint8
    gate_up_row: torch.Tensor  # [E, 2I] bfloat16
    down_packed: torch.Tensor  # [E, D, I/8] int32
    down_scale: torch.Tensor  # [E, D, I/32] uint8
    down_row: torch.Tensor  # [E, D] bfloat16


@dataclass(slots=True)
class Fp8Experts:
    """formats/fp8_block.py has the layout; gate and up keep blocks of their own, cut at their lower edges."""

    gate_up: torch.Tensor  # [E, 2I, D] float8_e4m3fn
    gate_up_scale: torch.Tensor  # [E, 2, ceil(I/128), ceil(D/128)] float32
    down: torch.Tensor  # [E, D, I] float8_e4m3fn
    down_scale: torch.Tensor  # [E, ceil(D/128), ceil(I/128)] float32


@dataclass(slots=True)
class NvFp4Experts:
    """formats/nvfp4.py has the layout, whichever of the two the checkpoint had."""

    gate_up_packed: torch.Tensor  # [E, 2I, D/2] uint8
    gate_up_scale: torch.Tensor  # [E, 2I, D/16] float8_e4m3fn
    gate_up_global: torch.Tensor  # [E, 2] float32: gate's weight_scale_2, up's
    down_packed: torch.Tensor  # [E, D, I/2] uint8
    down_scale: torch.Tensor  # [E, D, I/16] float8_e4m3fn
    down_global: torch.Tensor  # [E] float32


Experts = DenseExperts | Int4Experts | Int4CompactExperts | Fp8Experts | NvFp4Experts


@dataclass(slots=True)
class Moe:
    gate: torch.Tensor  # [E, D] float32; on a GPU bfloat16 if that is what is stored
    bias: torch.Tensor  # [E] float32: added for the choice of experts, not to their weights
    experts: Experts
    shared: Mlp | None


@dataclass(slots=True)
class Layer:
    input_norm: torch.Tensor  # [D]
    attention: Attention
    post_norm: torch.Tensor  # [D]
    ffn: Mlp | Moe


@dataclass(slots=True)
class Weights:
    embed: torch.Tensor  # [V, D]
    layers: list[Layer]
    norm: torch.Tensor  # [D]
    lm_head: Linear  # [V, D]
