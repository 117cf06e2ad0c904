"""Operands of the fused ops as records, instead of their tensors one by one.

A record checks nothing: the op that takes it does. `kind` is what may choose an implementation, a hashable value that
is made once with the record, so that a call compares one tuple and looks at no tensor (harness/registry.py).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor


def kind(t: Tensor | None) -> Hashable:
    """Shape and dtype of a tensor, or None."""
    return None if t is None else (t.shape, t.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight matrix (or a stack of them, with one more dimension in front) in one of the formats of weights.

    weight      [o, i] as the activations; [o, i] float8_e4m3fn; or [o, i / 8] int32, INT4 as in layouts/int4.py
    scale       None; [o] float32 for FP8; [o, i / 32] for INT4
    row_scale   None; [o] bfloat16 for INT4 with compact scales (docs/formats.md section 3.6)
    """

    weight: Tensor
    scale: Tensor | None = None
    row_scale: Tensor | None = None
    kind: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", (kind(self.weight), kind(self.scale), kind(self.row_scale)))

    @property
    def format(self) -> str:
        """ "dense", "fp8", "int4" or "int4-compact"."""
        if self.weight.dtype == torch.float8_e4m3fn:
            return "fp8"
        if self.weight.dtype == torch.int32:
            return "int4" if self.row_scale is None else "int4-compact"
        return "dense"


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """One layer's KV cache, and where a step writes.

    pages   [N, block_size, R + r] of any float type, or packed rows (layouts/latent_cache.py)
    slots   [T] int64: block * block_size + offset of each row's latent; below 0: not written
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
    context      [B] int32 tokens in the cache after this step's are written; a request's rows are the last of them
    """

    tables: Tensor
    query_start: Tensor
    context: Tensor

    @property
    def kind(self) -> Hashable:
        """Nothing of a span chooses an implementation: its numbers change from step to step."""
        return None


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
