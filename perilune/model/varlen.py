"""Runs the model on batches of whole texts, one layer at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from perilune.model.kimi_k2 import KimiK2, Step, apply
from perilune.model.weights import Attention, Layer, Mlp, Moe
from perilune.ops.attention.mla_rotate_query import mla_rotate_query
from perilune.ops.harness.workspace import Workspaces
from perilune.ops.layouts.operands import Latents, Pairs, Rotary
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm
from perilune.ops.pointwise.embed import embed
from perilune.ops.pointwise.rmsnorm import rmsnorm

SPREAD, SLACK = 1.25, 8  # a grid's longest text has at most 1.25 times the tokens of its shortest, plus 8


@dataclass(frozen=True, slots=True)
class Grid:
    """`count` texts of similar length, padded to `longest` tokens. tokens [t]: rows of the step; places [t]: indices in
    the flat grid [count * longest]."""

    tokens: Tensor
    places: Tensor
    count: int
    longest: int


def grids(lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> list[Grid]:
    """Groups the texts by length: every text is in one grid."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    found: list[Grid] = []
    while order:
        count = sum(lengths[i] <= SPREAD * lengths[order[0]] + SLACK for i in order)
        some, order = order[:count], order[count:]
        longest = lengths[some[-1]]
        tokens = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in some])
        places = np.concatenate([np.arange(n * longest, n * longest + lengths[i]) for n, i in enumerate(some)])
        found.append(Grid(torch.from_numpy(tokens).to(device), torch.from_numpy(places).to(device), count, longest))
    return found


class WholeTexts(KimiK2):
    """The same model for whole texts, without a cached prefix. Attention takes a few launches per grid; mla_prefill
    would take a few per text."""

    def __init__(self, model: KimiK2) -> None:
        self.__dict__.update(model.__dict__)  # the same weights and tables
        self.grids: list[Grid] = []
        self._workspaces = Workspaces()

    def entering(self, step: Step) -> Tensor:
        """[T, D], the residual stream at the first layer's input."""
        return embed(step.tokens, self.weights.embed)

    def leaving(self, h: Tensor) -> Tensor:
        """[T, D] after the final norm; h is the last layer's output."""
        return rmsnorm(h, self.weights.norm, self.eps)

    def through(self, layer: Layer, h: Tensor, step: Step, pages: Tensor) -> None:
        """Runs one layer, not necessarily of `weights.layers`, on the residual stream h [T, D], in place."""
        rotary, latents = Rotary(self.cos[step.positions], self.sin[step.positions]), Latents(pages, step.slots)
        x = rmsnorm(h, layer.input_norm, self.eps)
        attended = self._attention(layer.attention, apply(layer.attention.qkv_a, x), rotary, step, latents)
        x = add_rmsnorm(h, attended, layer.post_norm, self.eps)
        # `_add` also computes a norm. The next layer's is not loaded yet, so any norm will do: its result is dropped.
        self._add(h, self._ffn(layer.ffn, x), layer.post_norm)

    def _ffn(self, w: Mlp | Moe, x: Tensor) -> Tensor | Pairs:
        with self._workspaces.use():
            return super()._ffn(w, x)

    def _attention(self, w: Attention, qkv: Tensor, rotary: Rotary, step: Step, latents: Latents) -> Tensor:
        (heads, n, latent), r, v = w.w_uk.shape, 2 * rotary.cos.shape[1], w.w_uv.shape[2]
        q_a, ckv = qkv.tensor_split((w.q_a_norm.shape[0],), -1)
        q = apply(w.q_b, rmsnorm(q_a, w.q_a_norm, self.qk_norm_eps)).view(-1, heads, n + r)
        mla_rotate_query(q, ckv, w.kv_a_norm, rotary, latents, self.qk_norm_eps)
        c, k_pe = latents.pages.view(-1, latent + r)[step.slots].tensor_split((latent,), -1)
        k = torch.cat([F.linear(c, w.w_uk.flatten(0, 1)).view(-1, heads, n), k_pe[:, None].expand(-1, heads, -1)], -1)
        values = F.linear(c, w.w_uv.mT.flatten(0, 1)).view(-1, heads, v)
        out = torch.empty_like(values)
        for grid in self.grids:
            # Padding follows the texts, so the causal mask hides it from all tokens.
            attended = F.scaled_dot_product_attention(
                _filled(q, grid), _filled(k, grid), _filled(values, grid), is_causal=True, scale=self.scale
            )
            out[grid.tokens] = attended.transpose(1, 2).flatten(0, 1)[grid.places]
        return apply(w.o, out.flatten(1))


def _filled(x: Tensor, grid: Grid) -> Tensor:
    """[T, H, d] -> [count, H, longest, d]."""
    flat = x.new_zeros(grid.count * grid.longest, *x.shape[1:])
    flat[grid.places] = x[grid.tokens]
    return flat.view(grid.count, grid.longest, *x.shape[1:]).transpose(1, 2)
