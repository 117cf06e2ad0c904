"""Records of operands of the fused ops.

The op that takes a record checks it. `kind` is a hashable value, made once with the record, by which the op chooses
an implementation: a call compares one tuple instead of tensors' shapes and types (harness/registry.py).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from perilune.ops.exchange.peers import Peers


def kind(t: Tensor | None) -> Hashable:
    """Shape and dtype of a tensor, or None."""
    return None if t is None else (t.shape, t.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight matrix (or a stack of matrices, with one more dimension in front).

    weight      [o, i] as the activations; [o, i] float8_e4m3fn; or [o, i / 8] int32, INT4 as in layouts/int4.py
    scale       None; [o] float32 for FP8; [o, i / 32] for INT4
    row_scale   None; [o] bfloat16 for INT4 with compact scales (docs/formats.md section 3.6); [] float32, of the whole
                matrix, for NVFP4
    fp8_activations  FP8: prompts' activations may be quantised to e4m3 too (linear/linear_w8a8.py)

    Block FP8 and NVFP4 occur in experts only: moe/experts_fp8.py and moe/experts_nvfp4.py have the layouts.
    """

    weight: Tensor
    scale: Tensor | None = None
    row_scale: Tensor | None = None
    fp8_activations: bool = False
    format: str = field(init=False)  # "dense", "fp8", "int4" or "int4-compact"
    kind: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        packed = "int4" if self.row_scale is None else "int4-compact"
        known = {torch.float8_e4m3fn: "fp8", torch.int32: packed}
        object.__setattr__(self, "format", known.get(self.weight.dtype, "dense"))
        object.__setattr__(self, "kind", (kind(self.weight), kind(self.scale), kind(self.row_scale)))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.scale, self.row_scale) if t is not None)


def pointers(w: Matrix) -> list[int | None]:
    """Addresses of weight, scale and row_scale of contiguous matrices, for launchers."""
    held = (w.weight, w.scale, w.row_scale)
    assert all(t is None or t.is_contiguous() for t in held), f"{w.kind=}: not contiguous"
    return [None if t is None else t.data_ptr() for t in held]


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """One layer's KV cache, and the slots that a step writes.

    pages   [N, block_size, R + r] of any float type, or packed rows (layouts/latent_cache.py)
    slots   [T] int64: block * block_size + offset of each row's latent; below 0: the row is not written
    """

    pages: Tensor
    slots: Tensor
    kind: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", kind(self.pages))


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The requests that a step's rows belong to: request b has rows query_start[b] .. query_start[b + 1] - 1.

    tables       [B, M] int32 block tables, padded with any valid block
    query_start  [B + 1] int32
    context      [B] int32 tokens in the cache, this step's included; a request's rows are the last of them
    """

    tables: Tensor
    query_start: Tensor
    context: Tensor

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """(tables, query_start, context), as kernels read them."""
        return self.tables.contiguous(), self.query_start.contiguous(), self.context.contiguous()

    @property
    def kind(self) -> Hashable:
        """Constant: an implementation must not depend on a span, because its numbers change from step to step."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """The rotation of each row's rope values: cos and sin [T, r / 2] float32 of the angles at the row's position."""

    cos: Tensor
    sin: Tensor


@dataclass(slots=True, eq=False)
class Attention:
    """Weights of one layer's latent attention: D hidden, i the query's rank, H heads, n and r the query's nope and rope
    widths, v the value width, R the latent width. An op reads only the fields that it needs."""

    qkv_a: Matrix  # [i + R + r, D]: q_a_proj's rows, then kv_a_proj_with_mqa's
    q_a_norm: Tensor  # [i]
    q_b: Matrix  # [H (n + r), i]
    kv_a_norm: Tensor  # [R]
    w_uk: Tensor  # [H, n, R]: k_nope = c @ w_uk[h].T, and absorbed q_lat = q_nope @ w_uk[h]
    w_uv: Tensor  # [H, R, v]: v = c @ w_uv[h], and absorbed o = o_lat @ w_uv[h]
    o: Matrix  # [D, H v]
    uv_fp8: Matrix | None = None  # w_uv's values in FP8 with scale [H, v], if o is FP8: for mla_decode_output's kernels

    @property
    def kind(self) -> Hashable:
        return self.qkv_a.kind, self.q_b.kind, self.o.kind, self.w_uk.shape, self.w_uv.shape


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts (docs/formats.md section 2.3): top_k of E, from topk_group of n_group groups; the
    weights of the chosen are normalised to 1 if `normalise`, then multiplied by `factor`."""

    top_k: int
    n_group: int
    topk_group: int
    factor: float
    normalise: bool

    @property
    def kind(self) -> Hashable:
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """A router: weight [E, D] float32, or bfloat16 if the checkpoint stores that; bias [E] float32, added for the
    choice of experts only; the rest of its configuration."""

    weight: Tensor
    bias: Tensor
    routing: Routing

    @property
    def kind(self) -> Hashable:
        return self.weight.shape, self.weight.dtype, self.routing


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """An RMS norm of a residual stream: weight [D] and epsilon. peers: the ranks that each have a partial sum of the
    term added to the stream before the norm; None: this rank has the whole term."""

    weight: Tensor
    eps: float
    peers: "Peers | None" = None

    @property
    def kind(self) -> Hashable:
        return None if self.peers is None else self.peers.kind


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Expert results of T tokens, not yet summed: y[t] = the sum over j of weights[t, j] part[position[t, j]], plus
    shared[t].

    part      [M, D] bfloat16, the results of pairs (token, expert); `mixed`: of every 8 columns in the order
              0, 4, 1, 5, 2, 6, 3, 7, as moe_int4_cluster.cuh leaves them
    position  [T, k] int32: a pair's row of part; below 0: none
    weights   [T, k] float32
    shared    [T, D] bfloat16: the shared expert's results, or None
    """

    part: Tensor
    position: Tensor
    weights: Tensor
    shared: Tensor | None
    mixed: bool
    kind: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", (kind(self.part), kind(self.weights), kind(self.shared), self.mixed))


@dataclass(slots=True, eq=False)
class Mlp:
    """gate_up [2 I, D], the gate's rows first, and down [D, I]."""

    gate_up: Matrix
    down: Matrix
