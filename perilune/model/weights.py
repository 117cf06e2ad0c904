"""The model's weights as the model file consumes them. Data only: the model chooses the ops that run on them.

Letters: D hidden size, H heads, n and r the query's nope and rope widths, v the value width, R the latent width,
I an intermediate width, E routed experts, V vocabulary. Linear layers are stored [outputs, inputs]. Tensors are
contiguous, of the load's dtype unless a comment says otherwise, and belong to one `Weights` alone.
"""

import functools
from dataclasses import dataclass, fields

import torch

from perilune.ops.layouts.operands import Attention as Attention
from perilune.ops.layouts.operands import Matrix as Matrix
from perilune.ops.layouts.operands import Mlp as Mlp


class _Experts:
    """Fields: the weight of gate_up, then its scale and row_scale if the format has them; then the same of down."""

    @functools.cached_property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """gate_up and down as ops take them."""
        parts = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]  # of its subclasses
        half = len(parts) // 2
        return Matrix(*parts[:half]), Matrix(*parts[half:])


@dataclass(slots=True)
class DenseExperts(_Experts):
    gate_up: torch.Tensor  # [E, 2I, D]: gate's rows first
    down: torch.Tensor  # [E, D, I]


@dataclass(slots=True)
class Int4Experts(_Experts):
    gate_up_packed: torch.Tensor  # [E, 2I, D/8] int32
    gate_up_scale: torch.Tensor  # [E, 2I, D/32] bfloat16, or the checkpoint's float16 or float32
    down_packed: torch.Tensor  # [E, D, I/8] int32
    down_scale: torch.Tensor  # [E, D, I/32]


@dataclass(slots=True)
class Int4CompactExperts(_Experts):
    """formats/int4_compact.py has the layout."""

    gate_up_packed: torch.Tensor  # [E, 2I, D/8] int32
    gate_up_scale: torch.Tensor  # [E, 2I, D/32] uint8
    gate_up_row: torch.Tensor  # [E, 2I] bfloat16
    down_packed: torch.Tensor  # [E, D, I/8] int32
    down_scale: torch.Tensor  # [E, D, I/32] uint8
    down_row: torch.Tensor  # [E, D] bfloat16


@dataclass(slots=True)
class Fp8Experts(_Experts):
    """formats/fp8_block.py has the layout; gate and up have separate blocks, smaller at the bottom edge of each."""

    gate_up: torch.Tensor  # [E, 2I, D] float8_e4m3fn
    gate_up_scale: torch.Tensor  # [E, 2, ceil(I/128), ceil(D/128)] float32
    down: torch.Tensor  # [E, D, I] float8_e4m3fn
    down_scale: torch.Tensor  # [E, ceil(D/128), ceil(I/128)] float32


@dataclass(slots=True)
class NvFp4Experts(_Experts):
    """formats/nvfp4.py has the layout; checkpoints in nvfp4_packed.py's are converted to it."""

    gate_up_packed: torch.Tensor  # [E, 2I, D/2] uint8
    gate_up_scale: torch.Tensor  # [E, 2I, D/16] float8_e4m3fn
    gate_up_global: torch.Tensor  # [E, 2] float32: gate's weight_scale_2, up's
    down_packed: torch.Tensor  # [E, D, I/2] uint8
    down_scale: torch.Tensor  # [E, D, I/16] float8_e4m3fn
    down_global: torch.Tensor  # [E] float32


Experts = DenseExperts | Int4Experts | Int4CompactExperts | Fp8Experts | NvFp4Experts


@dataclass(slots=True)
class Moe:
    gate: torch.Tensor  # [E, D] float32; on a GPU bfloat16 if the checkpoint stores bfloat16
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
    lm_head: Matrix  # [V, D]
