"""The Kimi K2 text model: MLA + mixture of experts, as in the DeepSeek-V3 report with Kimi's sizes (spec section 2).

It holds no state but weights and rope tables, calls only `ops`, and knows neither requests nor devices: a step is
T tokens of any requests, in any mixture of prompt chunks and single decoded tokens.

Letters: T tokens, D hidden, H heads, n/r/v head sizes (nope, rope, value), R latent (kv_lora_rank), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.model.config import KimiConfig
from perilune.model.weights import (
    Attention,
    Dense,
    DenseExperts,
    Experts,
    Fp8,
    Fp8Experts,
    Int4Experts,
    Linear,
    Mlp,
    Moe,
    NvFp4Experts,
    Weights,
)
from perilune.ops.add_rmsnorm import add_rmsnorm
from perilune.ops.embed_norm import embed_norm
from perilune.ops.experts import experts
from perilune.ops.experts_fp8 import experts_fp8
from perilune.ops.experts_int4 import experts_int4
from perilune.ops.experts_int4_compact import experts_int4_compact
from perilune.ops.experts_nvfp4 import experts_nvfp4
from perilune.ops.int4_linear import int4_linear
from perilune.ops.kv_write import kv_write
from perilune.ops.linear import linear
from perilune.ops.linear_fp8 import linear_fp8
from perilune.ops.mla_decode import mla_decode
from perilune.ops.mla_plain import mla_plain
from perilune.ops.mla_query import mla_query
from perilune.ops.moe_int4 import moe_int4
from perilune.ops.norm_linear import norm_linear
from perilune.ops.rmsnorm import rmsnorm
from perilune.ops.rope import rope
from perilune.ops.router import router
from perilune.ops.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class Span:
    """Requests whose rows of the step are adjacent, and where their KV lives.

    rows         the rows of the step
    tables       [B, M] int32 block tables, padded with any valid block
    query_start  [B + 1] int32, relative to rows.start
    context      [B] int32 tokens in the cache after this step's are written

    Of the plain span the last two are in host memory: its kernels are launched by request.
    """

    rows: slice
    tables: Tensor
    query_start: Tensor
    context: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """T tokens to compute. `slots` are the flat cache rows (block * block_size + offset) their KV is written to.

    Requests that advance by few tokens attend in the absorbed form (one read of the latent for all heads), those that
    advance by many in the plain form (fewer FLOPs per query); together the two spans cover all rows.
    With `pending` (rows [T] int64, last_tokens) a token that is -1 stands for last_tokens[rows[t]].
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    absorbed: Span | None
    plain: Span | None
    pending: tuple[Tensor, Tensor] | None = None


class KimiK2:
    """`hidden(step, cache)` then `logits(rows of it)`. `cache[layer]` is [blocks, block_size, R + r]."""

    def __init__(self, config: KimiConfig, weights: Weights, *, max_positions: int, qk_norm_eps: float | None = None):
        self.config = config
        self.weights = weights
        self.eps = config.rms_norm_eps
        # transformers and the DeepSeek reference use 1e-6 here whatever the config says; the served references do not.
        self.qk_norm_eps = config.rms_norm_eps if qk_norm_eps is None else qk_norm_eps
        self.scale = config.softmax_scale
        inverse = torch.tensor(config.rope_inv_freq(), dtype=torch.float64)
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
        device = weights.norm.device
        magnitude = config.rope_magnitude
        self.cos = (angles.cos() * magnitude).to(device, torch.float32)
        self.sin = (angles.sin() * magnitude).to(device, torch.float32)

    def hidden(self, step: Step, cache: Tensor) -> Tensor:
        """[T, D] after the final norm."""
        layers = self.weights.layers
        h, x, cos, sin = embed_norm(
            step.tokens,
            *(step.pending or (None, None)),
            step.positions,
            self.weights.embed,
            layers[0].input_norm,
            self.cos,
            self.sin,
            self.eps,
        )
        next_norms = [layer.input_norm for layer in layers[1:]] + [self.weights.norm]
        for layer, pages, next_norm in zip(layers, cache, next_norms):
            x = add_rmsnorm(h, self._attention(layer.attention, x, cos, sin, step, pages), layer.post_norm, self.eps)
            x = add_rmsnorm(h, self._ffn(layer.ffn, x), next_norm, self.eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V] in float32."""
        return _apply(self.weights.lm_head, hidden, wide=True)

    def _attention(self, w: Attention, x: Tensor, cos: Tensor, sin: Tensor, step: Step, pages: Tensor) -> Tensor:
        c = self.config
        latent, n = c.kv_lora_rank, c.qk_nope_head_dim
        q_a, ckv = _apply(w.qkv_a, x).split([c.q_lora_rank, latent + c.qk_rope_head_dim], dim=-1)
        q = _norm_apply(w.q_b, q_a, w.q_a_norm, self.qk_norm_eps)
        q = q.view(x.shape[0], c.num_attention_heads, n + c.qk_rope_head_dim)
        out = []
        if (span := step.absorbed) is not None:
            rows = span.rows
            q_full = mla_query(
                q[rows], ckv[rows], w.kv_a_norm, cos[rows], sin[rows], w.w_uk, pages, step.slots[rows], self.qk_norm_eps
            )
            out.append(
                mla_decode(q_full, pages, span.tables, span.query_start, span.context, self.scale, w.w_uv)
            )  # fmt: skip
        if (span := step.plain) is not None:
            rows = span.rows
            c_raw, k_pe = ckv[rows].split([latent, c.qk_rope_head_dim], dim=-1)
            kv_write(
                pages,
                rmsnorm(c_raw, w.kv_a_norm, self.qk_norm_eps),
                rope(k_pe.unsqueeze(1), cos[rows], sin[rows]).squeeze(1),
                step.slots[rows],
            )
            q_rows = torch.cat([q[rows, :, :n], rope(q[rows, :, n:], cos[rows], sin[rows])], dim=-1)
            out.append(
                mla_plain(q_rows, pages, w.w_uk, w.w_uv, span.tables, span.query_start, span.context, self.scale)
            )
        heads = out[0] if len(out) == 1 else torch.cat(out)
        return _apply(w.o, heads.flatten(1))

    def _ffn(self, w: Mlp | Moe, x: Tensor) -> Tensor:
        """[T, D], or [T, P, D] float32, P parts whose sum it is."""
        if isinstance(w, Mlp):
            return _mlp(w, x)
        c = self.config
        ids, shares = router(
            x, w.gate, w.bias, c.num_experts_per_tok, c.n_group, c.topk_group, c.routed_scaling_factor, c.norm_topk_prob
        )
        e, shared = w.experts, w.shared
        if isinstance(e, Int4Experts):
            dense = _dense(shared)
            parts = moe_int4(
                x, ids, shares, e.gate_up_packed, e.gate_up_scale, e.down_packed, e.down_scale, *(dense or (None, None))
            )
            if dense is None and shared is not None:
                parts = torch.cat([parts, _mlp(shared, x).float().unsqueeze(1)], 1)
            return parts
        routed = _experts(e, x, ids, shares)
        return routed if shared is None else routed + _mlp(shared, x)


def _dense(shared: Mlp | None) -> tuple[Tensor, Tensor] | tuple[None, None] | None:
    """The shared expert's two matrices, or two Nones if there is none; None if it is not dense."""
    if shared is None:
        return None, None
    if isinstance(shared.gate_up, Dense) and isinstance(shared.down, Dense):
        return shared.gate_up.weight, shared.down.weight
    return None


def _experts(e: Experts, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    if isinstance(e, DenseExperts):
        return experts(x, ids, shares, e.gate_up, e.down)
    if isinstance(e, Int4Experts):
        return experts_int4(x, ids, shares, e.gate_up_packed, e.gate_up_scale, e.down_packed, e.down_scale)
    if isinstance(e, Fp8Experts):
        return experts_fp8(x, ids, shares, e.gate_up, e.gate_up_scale, e.down, e.down_scale)
    if isinstance(e, NvFp4Experts):
        return experts_nvfp4(
            x, ids, shares, e.gate_up_packed, e.gate_up_scale, e.gate_up_global, e.down_packed, e.down_scale,
            e.down_global,
        )  # fmt: skip
    return experts_int4_compact(
        x, ids, shares, e.gate_up_packed, e.gate_up_scale, e.gate_up_row, e.down_packed, e.down_scale, e.down_row
    )


def _apply(w: Linear, x: Tensor, wide: bool = False) -> Tensor:
    """x w^T as x, or in float32 if `wide`."""
    if isinstance(w, Dense):
        return linear(x, w.weight, wide)
    if isinstance(w, Fp8):
        return linear_fp8(x, None, w.weight, w.scale, wide=wide)
    y = int4_linear(x, w.packed, w.scale)
    return y.float() if wide else y


def _norm_apply(w: Linear, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    if isinstance(w, Dense):
        return norm_linear(x, norm, w.weight, eps)
    if isinstance(w, Fp8):
        return linear_fp8(x, norm, w.weight, w.scale, eps)
    return _apply(w, rmsnorm(x, norm, eps))


def _mlp(w: Mlp, x: Tensor) -> Tensor:
    return _apply(w.down, swiglu(_apply(w.gate_up, x)))
