"""The Kimi K2 text model: MLA + mixture of experts, as in the DeepSeek-V3 report with Kimi's sizes
(docs/formats.md section 2).

It holds no state but weights and rope tables, calls only `ops`, and knows neither requests nor devices: a step is
T tokens of any requests, in any mixture of prompt chunks and single decoded tokens.

With several ranks (dist/slicing.py) each holds some heads and a part of every MLP, expert and the vocabulary. Attention
and MLPs then return partial sums, which `_add` sums over ranks where a layer's output joins the residual stream. The
stream and the routing are the same on all ranks.

Letters: T tokens, D hidden, H heads, n/r/v head sizes (nope, rope, value), R latent (kv_lora_rank), V vocabulary; with
several ranks H and V are the rank's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.dist.experts import own as experts_of_rank
from perilune.dist.group import ALONE, Group, total
from perilune.dist.vocabulary import Vocabulary
from perilune.model.config import KimiConfig
from perilune.model.sharded_kv import ShardedKv
from perilune.model.weights import (
    Attention,
    DenseExperts,
    Fp8Experts,
    Int4CompactExperts,
    Int4Experts,
    Layer,
    Matrix,
    Mlp,
    Moe,
    Weights,
)
from perilune.ops.attention.mla_absorb_query import mla_absorb_query
from perilune.ops.attention.mla_decode import mla_decode
from perilune.ops.attention.mla_decode_output import mla_decode_output
from perilune.ops.attention.mla_merge_output import mla_merge_output
from perilune.ops.attention.mla_pre_attention import mla_pre_attention
from perilune.ops.attention.mla_prefill import mla_prefill
from perilune.ops.attention.mla_prefill_w8a8 import mla_prefill_w8a8
from perilune.ops.attention.mla_project_query import mla_project_query
from perilune.ops.attention.mla_rotate_query import mla_rotate_query
from perilune.ops.exchange.exchange_add_rmsnorm import exchange_add_rmsnorm, reads_owned_rows
from perilune.ops.exchange.exchange_rows import exchange_rows
from perilune.ops.exchange.peers import Peers
from perilune.ops.layouts import operands
from perilune.ops.layouts.operands import Gate, Latents, Norm, Pairs, Rotary, Routing
from perilune.ops.linear import linear_w8a8
from perilune.ops.linear.add_rmsnorm_quantize import add_rmsnorm_quantize
from perilune.ops.linear.linear import linear
from perilune.ops.linear.linear_fp8 import linear_fp8, matmul
from perilune.ops.linear.linear_int4 import linear_int4
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.combine_add_rmsnorm import combine_add_rmsnorm
from perilune.ops.moe.combine_add_rmsnorm_quantize import combine_add_rmsnorm_quantize
from perilune.ops.moe.exchange_pairs_add_rmsnorm import exchange_pairs_add_rmsnorm
from perilune.ops.moe.experts import experts
from perilune.ops.moe.experts_fp8 import experts_fp8
from perilune.ops.moe.experts_nvfp4 import experts_nvfp4
from perilune.ops.moe.mla_decode_router import mla_decode_router
from perilune.ops.moe.mla_merge_router import mla_merge_router
from perilune.ops.moe.moe_int4 import moe_int4, moe_int4_pairs
from perilune.ops.moe.router import router
from perilune.ops.moe.scatter_pairs_add_rmsnorm import scatter_pairs_add_rmsnorm
from perilune.ops.moe.scatter_pairs_add_rmsnorm_quantize import scatter_pairs_add_rmsnorm_quantize
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm
from perilune.ops.pointwise.embed_norm import embed_norm
from perilune.ops.pointwise.embed_part import embed_part
from perilune.ops.pointwise.rmsnorm import rmsnorm
from perilune.ops.pointwise.swiglu import swiglu

# Steps of at least this many tokens report progress before every layer, with two launches each time, so that a long
# step does not look like a hang. Smaller: steps of under a second pay for these launches, too.
LONG_STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Span(operands.Span):
    """Requests in adjacent rows of the step; query_start is relative to rows.start. Step.plain has query_start and
    context in host memory, because its kernels are launched per request."""

    rows: slice


@dataclass(frozen=True, slots=True)
class Step:
    """T tokens to compute. `slots` are the flat cache rows (block * block_size + offset) that their KV is written to;
    where KV is sharded, block_size counts the tokens of all ranks.

    Requests that advance by few tokens attend in the absorbed form (one read of the latent for all heads), those that
    advance by many in the plain form (fewer FLOPs per query); together the two spans cover all rows.
    With `pending` (rows [T] int64, last_tokens) a token -1 means last_tokens[rows[t]].
    With `replaced` (rows [M] int64, values [M, D]) the values are the embeddings of these rows.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    absorbed: Span | None
    plain: Span | None
    pending: tuple[Tensor, Tensor] | None = None
    replaced: tuple[Tensor, Tensor] | None = None


def routing(c: KimiConfig) -> Routing:
    return Routing(c.num_experts_per_tok, c.n_group, c.topk_group, c.routed_scaling_factor, c.norm_topk_prob)


class KimiK2:
    """Use: `hidden_with_aux(step, cache, ())`, then `logits` of the rows to sample. `cache[layer]` is [blocks,
    block_size, R + r]; where KV is sharded along the sequence, it has the rank's tokens of each block."""

    def __init__(
        self,
        config: KimiConfig,
        weights: Weights,
        *,
        max_positions: int,
        qk_norm_eps: float | None = None,
        group: Group = ALONE,
        kv_shard_tokens: int | None = None,
    ):
        """`config` is the whole model's, `weights` are those of the group's rank. `kv_shard_tokens`: tokens of each
        block on each rank, where KV is sharded along the sequence; None: each rank has the whole KV."""
        self.config = config
        self.weights = weights
        self.group = group
        self.vocabulary = Vocabulary(group, config.vocab_size)
        self.peers = group.peers  # exchange over peer memory instead of the group's collectives
        self.eps = config.rms_norm_eps
        # transformers and the DeepSeek reference use 1e-6 here whatever the config says; the served references do not.
        self.qk_norm_eps = config.rms_norm_eps if qk_norm_eps is None else qk_norm_eps
        self.scale = config.softmax_scale
        self.sharded_kv = None if kv_shard_tokens is None else ShardedKv(group, kv_shard_tokens)
        self.routing = routing(config)
        inverse = torch.tensor(config.rope_inv_freq(), dtype=torch.float64)
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
        device = weights.norm.device
        magnitude = config.rope_magnitude
        self.cos = (angles.cos() * magnitude).to(device, torch.float32)
        self.sin = (angles.sin() * magnitude).to(device, torch.float32)

    def hidden_with_aux(self, step: Step, cache: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[T, D] after the final norm, and [T, len(layers) D] for draft models (docs/formats.md section 6.3): the
        residual stream at the inputs of `layers`, concatenated. num_hidden_layers means the last layer's output.
        """
        # `out` at layer 0: the norm of h; from layer 1 on: the output of the layer before, not yet added to h.
        out: Tensor | Pairs
        h, out, rotary = self._embed(step, self.weights.layers[0].input_norm)
        kept: dict[int, Tensor] = {}
        step = self._own_part(step)
        long = len(step.tokens) >= LONG_STEP_TOKENS
        for i, (layer, pages) in enumerate(zip(self.weights.layers, cache)):
            q_full, latents, w = None, Latents(pages, step.slots), layer.attention
            if long:
                self.group.mark()
            if i > 0 and isinstance(out, Tensor) and self._fused_over_sums and _absorbed(w, step):
                q_full = mla_pre_attention(h, out, self._norm(layer.input_norm), w, rotary, latents, self.qk_norm_eps)
            elif i == 0 and isinstance(out, Tensor):
                qkv = apply(w.qkv_a, out)
            else:
                qkv = self._add_project(h, out, layer.input_norm, w.qkv_a, i in layers)
            del out  # `Pairs` of a long prompt are a gigabyte, which this layer's experts need
            if i in layers:
                kept[i] = h.clone()  # the stream is updated in place
            if q_full is not None:
                out = self._after_queries(q_full, layer, h, step, pages)
            else:
                # Bind no tensor to a name that the experts do not read: step_memory.py counts its memory as free.
                x = self._add(h, self._attention(w, qkv, rotary, step, latents), layer.post_norm)
                out = self._ffn(layer.ffn, x)
                del x
        x = self._add(h, out, self.weights.norm)
        del out
        kept[len(self.weights.layers)] = h
        return x, torch.cat([kept[i] for i in layers], -1) if layers else x[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V] in float32."""
        return apply(self.weights.lm_head, hidden, wide=True)

    def _own_part(self, step: Step) -> Step:
        """With sharded KV: the step with this rank's slots and, for absorbed rows, its context lengths."""
        kv, span = self.sharded_kv, step.absorbed
        if kv is None:
            return step
        slots, context = kv.shards.rows(step.slots, step.positions)
        if span is not None:
            own = kv.span(span, context[span.rows])
            span = Span(own.tables, own.query_start, own.context, span.rows)
        return replace(step, slots=slots, absorbed=span)

    def _embed(self, step: Step, norm: Tensor) -> tuple[Tensor, Tensor, Rotary]:
        """(the residual stream at the first layer's input, its norm, cos and sin of the positions)."""
        (rows, last_tokens), table = step.pending or (None, None), self.weights.embed
        if self.group.ranks == 1:
            h, x, cos, sin = embed_norm(
                step.tokens, rows, last_tokens, step.positions, table, norm, self.cos, self.sin, self.eps
            )
        else:
            first = self.vocabulary.first
            h, part, cos, sin = embed_part(
                step.tokens, rows, last_tokens, step.positions, table, first, self.cos, self.sin
            )
            x = self._add(h, part, norm)
        rotary = Rotary(cos, sin)
        if step.replaced is None:
            return h, x, rotary
        where, values = step.replaced
        h[where] = values.to(h.dtype)
        return h, rmsnorm(h, norm, self.eps), rotary

    def _add(self, h: Tensor, x: Tensor | Pairs, norm: Tensor) -> Tensor:
        """h += x summed over ranks, in place; returns the norm of h."""
        if isinstance(x, Pairs):
            if self.peers is not None:
                return exchange_pairs_add_rmsnorm(h, x, norm, self.eps, self.peers)
            return combine_add_rmsnorm(h, x, norm, self.eps)
        return add_parts(h, x, norm, self.eps, self.group, self.peers)

    def _add_project(self, h: Tensor, x: Tensor | Pairs, norm: Tensor, w: Matrix, whole: bool) -> Tensor:
        """`_add`, then the product with w. Unless `whole`, h may be updated only in the rows that this rank owns: the
        next `_add` of the step reads no others."""
        peers = self.peers
        if isinstance(x, Pairs) and peers is not None and not whole and reads_owned_rows(h, norm, self.eps, peers):
            return self._scatter_project(h, x, norm, w, peers)
        if peers is None and linear_w8a8.applies(w, h):
            if isinstance(x, Pairs):
                rounded = combine_add_rmsnorm_quantize(h, x, norm, self.eps)
            else:
                rounded = add_rmsnorm_quantize(h, total(self.group, x), norm, self.eps)
            return linear_w8a8.linear_w8a8(*rounded, w, h.dtype == torch.float32)
        return apply(w, self._add(h, x, norm))

    def _scatter_project(self, h: Tensor, x: Pairs, norm: Tensor, w: Matrix, peers: Peers) -> Tensor:
        """As `_add_project`, but each rank sums, normalises and multiplies only its own rows; then ranks exchange the
        products."""
        if linear_w8a8.applies(w, h):
            rounded = scatter_pairs_add_rmsnorm_quantize(h, x, norm, self.eps, peers)
            own = linear_w8a8.linear_w8a8(*rounded, w, h.dtype == torch.float32)
        else:
            own = apply(w, scatter_pairs_add_rmsnorm(h, x, norm, self.eps, peers))
        if missing := -(-len(h) // peers.ranks) - len(own):  # the last ranks own fewer rows; pad to equal numbers
            own = torch.cat([own, own.new_empty(missing, own.shape[1])])
        return exchange_rows(own.view(1, -1), peers).view(-1, own.shape[1])[: len(h)]

    @property
    def _fused_over_sums(self) -> bool:
        """Whether a kernel may contain the sum over ranks: there is one rank, or peer memory."""
        return self.group.ranks == 1 or self.peers is not None

    def _norm(self, weight: Tensor) -> Norm:
        """The norm of the residual stream after a sum over `peers`."""
        return Norm(weight, self.eps, self.peers)

    def _attention(self, w: Attention, qkv: Tensor, rotary: Rotary, step: Step, latents: Latents) -> Tensor:
        return mla(w, qkv, rotary, step, latents, self.qk_norm_eps, self.scale, self.sharded_kv)

    def _after_queries(self, q_full: Tensor, layer: Layer, h: Tensor, step: Step, pages: Tensor) -> Tensor | Pairs:
        """Attends with these queries, adds the attention's output to h, then computes the FFN; returns as `_ffn`."""
        w, ffn, span = layer.attention, layer.ffn, step.absorbed
        assert span is not None
        sharded = self.sharded_kv
        if isinstance(ffn, Mlp) or w.o.format == "int4" or self.group.slicing.whole_experts:
            attended = _attend(w, q_full, span, pages, self.scale, sharded)
            return self._ffn(ffn, self._add(h, attended, layer.post_norm))
        gate, norm = Gate(ffn.gate, ffn.bias, self.routing), self._norm(layer.post_norm)
        if sharded is not None:
            x, chosen = mla_merge_router(*sharded.parts(w, q_full, span, pages, self.scale), w, h, norm, gate)
        else:
            x, chosen = mla_decode_router(q_full, pages, span, w, self.scale, h, norm, gate)
        return _mixture(ffn, x, chosen)

    def _ffn(self, w: Mlp | Moe, x: Tensor) -> Tensor | Pairs:
        """[T, D], or P partial sums [T, P, D] float32; or, for a long prompt on one rank or with peer memory, Pairs:
        the results of all (token, expert) pairs, which the next `_add` sums."""
        if isinstance(w, Mlp):
            return mlp(w, x)
        chosen, e = router(x, w.gate, w.bias, self.routing), w.experts
        if self.group.slicing.whole_experts:
            chosen = experts_of_rank(chosen, self.group.slicing, self.config.n_routed_experts)
        sums_pairs = self.group.ranks == 1 if self.peers is None else not self.peers.loopback
        if sums_pairs and isinstance(e, Int4Experts | Int4CompactExperts) and _fuses_shared(w.shared):
            pairs = moe_int4_pairs(x, chosen, *e.matrices, w.shared)
            if pairs is not None:
                return pairs
        return _mixture(w, x, chosen)


def add_parts(h: Tensor, x: Tensor, norm: Tensor, eps: float, group: Group, peers: Peers | None) -> Tensor:
    """h [T, D] += the sum over ranks of x [T, D] or [T, P, D], in place, over the memory of `peers` if given; returns
    the norm of h, [T, D]."""
    if peers is not None:
        return exchange_add_rmsnorm(h, x, norm, eps, peers)
    return add_rmsnorm(h, total(group, x), norm, eps)


def mla(
    w: Attention,
    qkv: Tensor,
    rotary: Rotary,
    step: Step,
    latents: Latents,
    norm_eps: float,
    scale: float,
    sharded: ShardedKv | None = None,
) -> Tensor:
    """qkv [T, outputs of w.qkv_a] -> [T, D]; writes the step's latents to their pages [blocks, block_size, R + r]. With
    `sharded`, step and latents are those of the rank's part of the KV, but step.plain has the whole contexts."""
    if step.plain is None and (span := step.absorbed) is not None and w.q_b.format != "int4":
        q_a, ckv = qkv.tensor_split((len(w.q_a_norm),), -1)
        q_full = mla_project_query(q_a, ckv, w, rotary, latents, norm_eps)
        return _attend(w, q_full, span, latents.pages, scale, sharded)
    alone = step.absorbed is None and sharded is None
    if alone and (span := step.plain) is not None and linear_w8a8.applies(w.o, qkv):
        q, ckv = _queries(w, qkv, norm_eps)
        mla_rotate_query(q, ckv, w.kv_a_norm, rotary, latents, norm_eps)
        rounded = mla_prefill_w8a8(q, latents.pages, w.w_uk, w.w_uv, span, scale)
        return linear_w8a8.linear_w8a8(*rounded, w.o, qkv.dtype == torch.float32)
    pages, out = latents.pages, []
    q, ckv = _queries(w, qkv, norm_eps)
    if (span := step.absorbed) is not None:
        q_rows, ckv_rows, turn, places = _rows(q, ckv, rotary, latents, span.rows)
        q_full = mla_absorb_query(q_rows, ckv_rows, w.kv_a_norm, turn, w.w_uk, places, norm_eps)
        if sharded is not None:
            out.append(sharded.decode(w, q_full, span, pages, scale))
        else:
            out.append(mla_decode(q_full, pages, span, w.w_uv, scale))
    if (span := step.plain) is not None:
        q_rows, ckv_rows, turn, places = _rows(q, ckv, rotary, latents, span.rows)
        mla_rotate_query(q_rows, ckv_rows, w.kv_a_norm, turn, places, norm_eps)
        if sharded is not None:
            out.append(sharded.prefill(w, q_rows, span, pages, scale))
        else:
            out.append(mla_prefill(q_rows, pages, w.w_uk, w.w_uv, span, scale))
    return apply(w.o, (out[0] if len(out) == 1 else torch.cat(out)).flatten(1))


def _queries(w: Attention, qkv: Tensor, norm_eps: float) -> tuple[Tensor, Tensor]:
    """(queries [T, H, n + r] before their rotation, ckv [T, R + r])."""
    q_a, ckv = qkv.tensor_split((len(w.q_a_norm),), -1)
    q = _norm_apply(w.q_b, q_a, w.q_a_norm, norm_eps)
    heads = len(w.w_uk)
    return q.view(len(qkv), heads, q.shape[1] // heads), ckv


def _rows(
    q: Tensor, ckv: Tensor, rotary: Rotary, latents: Latents, rows: slice
) -> tuple[Tensor, Tensor, Rotary, Latents]:
    """The rows of one span."""
    return q[rows], ckv[rows], Rotary(rotary.cos[rows], rotary.sin[rows]), Latents(latents.pages, latents.slots[rows])


def _attend(w: Attention, q_full: Tensor, span: Span, pages: Tensor, scale: float, sharded: ShardedKv | None) -> Tensor:
    """The attention's output [T, D] where all rows of the step are in `span`."""
    if w.o.format == "int4":
        if sharded is not None:
            return apply(w.o, sharded.decode(w, q_full, span, pages, scale).flatten(1))
        return apply(w.o, mla_decode(q_full, pages, span, w.w_uv, scale).flatten(1))
    if sharded is not None:
        return mla_merge_output(*sharded.parts(w, q_full, span, pages, scale), w)
    return mla_decode_output(q_full, pages, span, w, scale)


def _absorbed(w: Attention, step: Step) -> bool:
    """Whether all rows attend in the absorbed form and `mla_pre_attention` can make their queries."""
    rows = step.plain is None and step.absorbed is not None
    return rows and w.qkv_a.format != "int4" and w.q_b.format != "int4"


def mlp(w: Mlp, x: Tensor) -> Tensor:
    """down(swiglu(gate_up(x))): [T, D] -> [T, D]."""
    if linear_w8a8.applies(w.gate_up, x) and w.down.format == "fp8":  # down is dense if I is no multiple of 64
        return linear_w8a8.mlp(x, w)
    return apply(w.down, swiglu(apply(w.gate_up, x)))


def _fuses_shared(shared: Mlp | None) -> bool:
    """Whether `moe_int4` computes the shared expert, too."""
    return shared is None or (shared.gate_up.format == shared.down.format != "int4")


def _mixture(w: Moe, x: Tensor, chosen: Chosen) -> Tensor:
    """As `KimiK2._ffn`, with the experts in `chosen`."""
    e, shared = w.experts, w.shared
    if isinstance(e, Int4Experts | Int4CompactExperts):
        fused = _fuses_shared(shared)
        parts = moe_int4(x, chosen, *e.matrices, shared if fused else None)
        if shared is not None and not fused:
            parts = torch.cat([parts, mlp(shared, x).float().unsqueeze(1)], 1)
        return parts
    op = experts if isinstance(e, DenseExperts) else experts_fp8 if isinstance(e, Fp8Experts) else experts_nvfp4
    routed = op(x, chosen, *e.matrices)
    return routed if shared is None else routed + mlp(shared, x)


def apply(w: Matrix, x: Tensor, wide: bool = False) -> Tensor:
    """x w^T in x's type, or in float32 if `wide`."""
    if w.scale is None:
        return linear(x, w.weight, wide)
    if linear_w8a8.applies(w, x):
        return linear_w8a8.linear(x, w)
    if w.format == "fp8":
        return linear_fp8(x, None, w.weight, w.scale, wide=wide)
    y = linear_int4(x, w.weight, w.scale)
    return y.float() if wide else y


def _norm_apply(w: Matrix, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """norm(x) w^T, fused where an op does so."""
    if linear_w8a8.applies(w, x):
        return linear_w8a8.linear(x, w, norm, eps)
    return apply(w, rmsnorm(x, norm, eps)) if w.format == "int4" else matmul(x, w, norm, eps)
