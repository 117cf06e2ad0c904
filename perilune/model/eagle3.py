"""EAGLE-3 and 3.1 drafts: one decoder layer that predicts the target's next tokens from its hidden states
(docs/formats.md section 6).

At position t the draft reads the target's feature at t and the embedding of token t+1, and predicts token t+2:

    g = fc(aux states at t)                                       `features`
    x = [rms(embed(token t+1)), rms(g)]; r = g, or rms(g)         r: `norm_before_residual`
    h1 = r + attention(x); h = h1 + mlp(rms(h1))                  `hidden`
    logits = lm_head(rms(h)): token t+2                           `logits`

The next drafting step, at t+1, has no feature, because the target has not computed t+1 yet: it takes g = h, or rms(h)
with `norm_output`, and the token just drafted. Keys and values of position t are in the slot of the target's position
t, and depend on token t+1. Entries written by drafting steps are computed again once the target's features of accepted
tokens are known.

With several ranks the draft is split like its target: heads, MLP width, vocabulary; g and h are the same on all ranks.

Letters: T rows, D hidden, A aux states, H query heads, K key-value heads, d their width, W draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from perilune.dist.group import ALONE, Group
from perilune.dist.vocabulary import Vocabulary
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import Span, Step, add_parts, apply, mla, mlp
from perilune.model.weights import Attention, Matrix, Mlp
from perilune.ops.attention.write_cache import write_cache
from perilune.ops.drafts.draft_embed import draft_embed
from perilune.ops.layouts.operands import Latents, Rotary
from perilune.ops.pointwise.embed_part import embed_part
from perilune.ops.pointwise.rmsnorm import rmsnorm
from perilune.ops.pointwise.rope import rope


@dataclass(slots=True)
class HeadAttention:
    """Attention with its own K key-value heads; H / K query heads share each (GQA)."""

    qkv: Matrix  # [(H + 2 K) d, 2 D]: q_proj's rows, then k_proj's, then v_proj's
    o: Matrix  # [D, H d]


@dataclass(slots=True)
class Eagle3Weights:
    """`embed` and `lm_head` may be the target's own. Letters as in the module."""

    embed: Tensor  # [V, D]
    fc: Matrix  # [D, A * target D]
    fc_norms: Tensor | None  # [A, target D]
    joint_norm: Tensor | None  # [A * target D]
    input_norm: Tensor  # [D]
    hidden_norm: Tensor  # [D]
    attention: Attention | HeadAttention  # inputs are 2 D wide
    post_norm: Tensor  # [D]
    mlp: Mlp
    norm: Tensor  # [D]
    lm_head: Matrix  # [W, D]
    target_ids: Tensor | None  # [W] int64: the target's id of each draft id; None: ids are equal


class Eagle3:
    """Holds weights and rope tables only; the caller owns `pages` [blocks, block_size, `kv_width(config, group)`]."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, *, max_positions: int, group: Group = ALONE):
        """`config` is the whole draft's, `weights` are those of the group's rank."""
        self.config = config
        self.weights = weights
        self.group = group
        self.vocabulary = Vocabulary(group, config.draft_vocab_size)
        self._target_vocabulary = Vocabulary(group, config.vocab_size)
        self.eps = config.rms_norm_eps
        self.scale = config.softmax_scale
        self._ones = weights.norm.new_ones(config.target_hidden_size)
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * torch.tensor(
            config.rope_inv_freq, dtype=torch.float64
        )
        device = weights.norm.device
        cos, sin = ((f(angles) * config.rope_magnitude).to(device, torch.float32) for f in (torch.cos, torch.sin))
        self.angles = Rotary(cos, sin)  # rows for all positions

    def features(self, aux: Tensor) -> Tensor:
        """[T, A * target D] from `KimiK2.hidden_with_aux` -> [T, D]."""
        w = self.weights
        if w.joint_norm is not None:
            aux = rmsnorm(aux, w.joint_norm, self.eps)
        if w.fc_norms is not None:
            # One launch for all A norms: each norm of a slice would take a copy and a launch.
            states = aux.reshape(-1, w.fc_norms.shape[1])
            aux = (rmsnorm(states, self._ones, self.eps).view(len(aux), *w.fc_norms.shape) * w.fc_norms).flatten(1)
        return apply(w.fc, aux)

    def hidden(self, step: Step, features: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """(the input of `logits`, the features of the next drafting step), [T, D] each.

        `step.tokens` and `replaced` belong to step.positions + 1; all else is as in the target's step.
        `features` may be overwritten.
        """
        w = self.weights
        x, cos, sin = self._inputs(step, features)
        h = x[:, features.shape[1] :].contiguous() if self.config.norm_before_residual else features
        if isinstance(w.attention, Attention):
            qkv = apply(w.attention.qkv_a, x)
            attended = mla(w.attention, qkv, Rotary(cos, sin), step, Latents(pages, step.slots), self.eps, self.scale)
        else:
            attended = self._heads(w.attention, x, cos, sin, step, pages)
        x = self._add(h, attended, w.post_norm)
        x = self._add(h, mlp(w.mlp, x), w.norm)
        return x, x if self.config.norm_output else h

    def store(self, step: Step, features: Tensor, pages: Tensor) -> None:
        """Does only the part of `hidden` that writes the step's KV to `pages`. `features` may be overwritten."""
        w = self.weights
        x, cos, sin = self._inputs(step, features)
        if isinstance(w.attention, Attention):
            latent = w.attention.kv_a_norm.shape[0]
            ckv = apply(w.attention.qkv_a, x)[:, w.attention.q_a_norm.shape[0] :]
            k_pe = rope(ckv[:, latent:].unsqueeze(1), cos, sin).squeeze(1)
            write_cache(Latents(pages, step.slots), rmsnorm(ckv[:, :latent], w.attention.kv_a_norm, self.eps), k_pe)
        else:
            self._keys(w.attention, x, cos, sin, step, pages)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, W] in float32; the rank's columns of them."""
        return apply(self.weights.lm_head, hidden, wide=True)

    def target_ids(self, drafted: Tensor) -> Tensor:
        """The target's ids of draft ids, any shape."""
        ids = self.weights.target_ids
        return drafted if ids is None else ids[drafted]

    def _inputs(self, step: Step, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x [T, 2 D], cos and sin of the step's positions)."""
        w = self.weights
        at, angles = step.positions, self.angles
        if self.group.ranks == 1:
            x, cos, sin = draft_embed(step.tokens, at, w.embed, w.input_norm, features, w.hidden_norm, angles, self.eps)
        else:
            first = self._target_vocabulary.first
            h, part, cos, sin = embed_part(step.tokens, None, None, at, w.embed, first, angles.cos, angles.sin)
            token = self._add(h, part, w.input_norm)
            x = torch.cat([token, rmsnorm(features, w.hidden_norm, self.eps)], -1)
        if step.replaced is not None:
            where, values = step.replaced
            if values.shape[1] == len(w.input_norm):  # the draft is as wide as its target
                x[where, : values.shape[1]] = rmsnorm(values.to(x.dtype), w.input_norm, self.eps)
        return x, cos, sin

    def _add(self, h: Tensor, x: Tensor, norm: Tensor) -> Tensor:
        """h += x summed over ranks, in place; returns the norm of h."""
        return add_parts(h, x, norm, self.eps, self.group, self.group.peers)

    def _heads(self, w: HeadAttention, x: Tensor, cos: Tensor, sin: Tensor, step: Step, pages: Tensor) -> Tensor:
        """The attention's output [T, D]; writes keys and values to `pages`."""
        q, flat = self._keys(w, x, cos, sin, step, pages)
        out = []
        if step.absorbed is not None:
            out.append(_attend_few(q[step.absorbed.rows], flat, pages.shape[1], step.absorbed, self.scale))
        if step.plain is not None:
            out.append(_attend_many(q[step.plain.rows], flat, pages.shape[1], step.plain, self.scale))
        return apply(w.o, (out[0] if len(out) == 1 else torch.cat(out)).flatten(1))

    def _keys(
        self, w: HeadAttention, x: Tensor, cos: Tensor, sin: Tensor, step: Step, pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values to `pages`; (queries [T, H, d], `pages` as [slots, 2, K, d])."""
        c = self.config
        heads, shared, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        heads, shared = heads // self.group.ranks, shared // self.group.ranks
        qkv = apply(w.qkv, x).view(x.shape[0], heads + 2 * shared, d)
        q, k = _half_rope(qkv[:, :heads], cos, sin), _half_rope(qkv[:, heads : heads + shared], cos, sin)
        flat = pages.view(-1, 2, shared, d)
        rows, padding = torch.stack([k, qkv[:, heads + shared :]], 1).to(pages.dtype), step.slots < 0
        # Padding rows (slot < 0, at the end) repeat the first row's write, so that every index is valid.
        flat[torch.where(padding, step.slots[:1], step.slots)] = torch.where(
            padding[:, None, None, None], rows[:1], rows
        )
        return q, flat


def kv_width(config: Eagle3Config, group: Group) -> int:
    """Values of a rank's cache per position: latents are whole on every rank, heads are its own."""
    return config.kv_width // (group.ranks if config.form == "mha" else 1)


def _half_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, d], the pair of element i is i + d / 2; cos and sin [T, d / 2] float32."""
    low, high = x.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype)


def _attend_many(q: Tensor, flat: Tensor, block_size: int, span: Span, scale: float) -> Tensor:
    """q [T, H, d] of the span's requests, one after the other, over flat [slots, 2, K, d] -> [T, H, d]."""
    out = []
    starts = span.query_start.tolist()
    for table, begin, end, context in zip(span.tables, starts, starts[1:], span.context.tolist()):
        blocks = table[: -(-context // block_size)].long()
        places = (blocks[:, None] * block_size + torch.arange(block_size, device=q.device)).flatten()[:context]
        keys, values = flat[places].to(q.dtype).transpose(0, 2).unbind(1)  # [K, context, d]
        seen = _lower_right(end - begin, context, q.device)
        rows = q[begin:end].transpose(0, 1)
        mixed = scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
        )
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


def _lower_right(rows: int, context: int, device: torch.device) -> Tensor:
    """The causal mask of the last `rows` of `context` positions; on a GPU without a tensor of its values."""
    if device.type == "cpu":
        return torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
    # Imported only here, because it imports torch._dynamo, half of an engine's imports; few drafts have form "mha".
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(rows, context)


def _attend_few(q: Tensor, flat: Tensor, block_size: int, span: Span, scale: float) -> Tensor:
    """q [T, H, d] of the span's requests over flat [slots, 2, K, d] -> [T, H, d].

    Gathers all blocks of each row's table, so the host need not wait for lengths; for the few rows of a drafting step.
    Results of padding rows are undefined.
    """
    T = q.shape[0]
    tables, start = span.tables.long(), span.query_start.to(q.device)
    context = span.context.to(q.device)
    index = torch.arange(T, device=q.device)
    owner = (torch.searchsorted(start, index, right=True) - 1).clamp_max(tables.shape[0] - 1)
    own = context[owner] - start[owner + 1] + index  # the row's position
    places = torch.arange(tables.shape[1] * block_size, device=q.device)
    seen = places <= own[:, None]
    rows = torch.where(seen, tables[owner][:, places // block_size] * block_size + places % block_size, 0)
    keys, values = flat[rows].to(q.dtype).unbind(2)  # [T, L, K, d]
    # Unseen entries become 0: what a block held before may be NaN.
    keys, values = (torch.where(seen[..., None, None], t, 0) for t in (keys, values))
    groups = q.view(T, keys.shape[2], -1, q.shape[2]).float() * scale
    scores = torch.einsum("tkgd,tlkd->tkgl", groups, keys.float())
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    weights = torch.where(seen[:, None, None].any(-1, keepdim=True), scores.softmax(-1), 0)
    return torch.einsum("tkgl,tlkd->tkgd", weights, values.float()).flatten(1, 2).to(q.dtype)
